"""Whose turn it is in a step's prefill: the oldest row and the short ones, each with its half.

Runs inside the scheduler's core. Knows counts only.

Every step, two rows have a claim to at least half of its budget each (or to all that they need):

- the *oldest* row in prefill, always;
- the *shortest* one, when it came with at most half as many new tokens as the oldest.

A row's length here is what it had to compute when it started, so nobody's rank changes on the way.
Three things follow:

**Bound.** A row that has started gets its first token within :func:`most_steps` steps. Whoever
decides the first token's step before it is either shorter, or older and less than twice as long;
each of those takes at most ⌈tokens / half a budget⌉ steps. A long prefill, or any number of them,
is not among them. The same holds with all older rows in their place, so a stream of short ones
cannot starve it either: the lesser of the two counts.

**No starvation.** The oldest row advances in every step, and every row is the oldest in the end.

**No waste.** Two prompts of about the same length are computed one after the other, in whole
chunks: halving the budget between them would make both as late as the later one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .rows import Row


def most_steps(own: int, ahead: Iterable[int], budget: int) -> int:
    """Most steps from a row's start to its first token, both included.

    Args:
        own: prompt tokens that it has to compute.
        ahead: the same of each row that goes before it: shorter ones, those that come meanwhile
            too, and older ones that are less than twice as long; or else all older ones.
        budget: tokens of the smallest step on the way.

    Beside these it may wait for the steps under way when it comes (``pipeline.PIPELINE``), for one
    step where the state of its prompt is copied before it changes, and for one for each row that
    waits for a prefix, since chunks end where prefixes part.
    """
    half = max(1, budget // 2)
    return max(1, -(-own // half)) + sum(-(-tokens // half) for tokens in ahead)


def goes_before(other: Row, row: Row) -> bool:
    """Whether ``other`` is among the rows that :func:`most_steps` counts as ahead of ``row``."""
    shorter = (other.fresh, other.number) < (row.fresh, row.number)
    return shorter or (other.number < row.number and other.fresh < 2 * row.fresh)


def short_ones(pending: Sequence[Row]) -> list[Row]:
    """Rows that may go beside the oldest, the shortest first. ``pending`` is in order of age."""
    oldest = pending[0]
    short = [row for row in pending[1:] if 2 * row.fresh <= oldest.fresh]
    return sorted(short, key=lambda row: (row.fresh, row.number))


def share(pending: Sequence[Row], budget: int) -> list[tuple[Row, int]]:
    """Tokens of each row in a step of ``budget`` tokens. ``pending`` is in order of age."""
    counts: dict[int, int] = {}
    oldest = pending[0]
    room = max(budget // 2, budget - oldest.remaining)
    for row in short_ones(pending):
        if row.remaining > room:
            # Only one that comes first is cut: another fits whole into a step to come.
            counts.update({} if counts else {row.number: room})
            break
        counts[row.number] = row.remaining
        room -= row.remaining
    left = budget - sum(counts.values())
    for row in pending:
        missing = row.remaining - counts.get(row.number, 0)
        if left < missing and row is not oldest and row.remaining <= budget:
            continue
        counts[row.number] = counts.get(row.number, 0) + min(left, missing)
        left = max(0, left - missing)
    return [(row, counts[row.number]) for row in pending if counts.get(row.number)]
