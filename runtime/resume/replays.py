"""From a record to what a new row says again before it goes on.

Plain functions, run on any thread.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from ..scheduling.effects import Replay
from ..text.matching import MatchFailed, TokenMatcher
from .records import Record


def replay_of(
    record: Record,
    *,
    limit: int,
    end_ids: AbstractSet[int],
    adapters: tuple[str, ...],
    matcher: TokenMatcher | None,
) -> Replay | None:
    """The part of a record that a row can go on from; None when there is none.

    A token that would end the row is made anew, and so is all that follows it. ``matcher`` stands
    at the beginning of the answer and stays there.
    """
    count = next((n for n, i in enumerate(record.ids) if i in end_ids), len(record.ids))
    count = min(count, limit - 1)
    follows = None
    if matcher is not None:
        try:
            count = _followed(matcher.copy(), record.ids[:count])
            follows = matcher.copy()
            for token in record.ids[:count]:
                follows.take(token)
        except MatchFailed:
            return None
    if count < 1:
        return None
    return Replay(record.ids[:count], record.figures[:count], adapters, follows)


def _followed(matcher: TokenMatcher, ids: tuple[int, ...]) -> int:
    """How many ids the matcher follows before one that completes the text."""
    return next((n for n, token in enumerate(ids) if matcher.take(token)), len(ids))
