"""How a row begins, takes its tokens, starts over, and ends.

Part of the scheduler's core: functions on one row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..plans import FromRow, RowId, Sampled, StartRow, StepId
from ..requests import FinishReason
from .effects import RowEnded, RowEvent, Started, TokenMade
from .rows import Phase, Row


def begin(row: Row, lane: str) -> Iterator[RowEvent]:
    """The row has started: what its client hears at once, replayed tokens too."""
    cached = min(row.cached, len(row.spec.prompt))
    yield Started(row.id, cached, lane, row.adapters, row.replayed)
    replay = row.spec.replay
    if replay is None or not row.replayed:
        return
    figures = replay.figures or (None,) * len(replay.ids)
    for token, told in zip(replay.ids, figures, strict=True):
        yield TokenMade(row.id, token, told)


def take_token(row: Row, sampled: Sampled, eos_ids: frozenset[int]) -> tuple[RowEvent, ...]:
    """Give the row a token that was sampled for it; what its client hears. Nothing: nobody does."""
    row.in_flight -= 1
    token = sampled.token
    if row.phase is Phase.ENDING:
        # Nobody hears it, but it is in the state that is about to be kept: a state that is
        # further than one token ahead of its known ids could not always be cut back.
        if row.cancelled and not _is_end(row, row.generated[-1:], eos_ids):
            row.generated.append(token)
        return ()
    row.generated.append(token)
    made = TokenMade(row.id, token, sampled.logprobs)
    if sampled.ends or _is_end(row, [token], eos_ids):
        return made, end(row, FinishReason.STOP)
    if len(row.generated) >= row.spec.limit:
        return made, end(row, FinishReason.LENGTH)
    return (made,)


def donor_of(start: StartRow) -> RowId | None:
    """The row whose state a row starts from."""
    return start.source.row if isinstance(start.source, FromRow) else None


def can_start_over(row: Row) -> bool:
    """Whether a row that failed may not be at fault: it took a state from one that has failed too.

    Once, and only before its client has heard a token.
    """
    started = row.phase in (Phase.PREFILL, Phase.DECODE)
    return row.orphaned and started and not row.generated


def start_over(row: Row, steps: Iterable[StepId]) -> None:
    """The row, which is gone from the device, is to start from nothing, under the same id.

    ``steps`` are all that may still speak of it.
    """
    row.move(Phase.READY)
    row.processed = row.in_flight = 0
    row.keep_prompt = row.waits = row.orphaned = False
    row.donor, row.cold = None, True
    row.before = frozenset(steps)


def end(row: Row, reason: FinishReason) -> RowEnded:
    """The row is complete."""
    row.move(Phase.ENDING)
    return RowEnded(row.id, reason)


def _is_end(row: Row, tokens: Iterable[int], eos_ids: frozenset[int]) -> bool:
    return any(token in eos_ids or token in row.spec.stop_ids for token in tokens)
