"""The waiting queue: who is let in, in order, and with which adapters.

Part of the scheduler's core. A row leaves the queue when the batch has a place for it and the
state of its prompt has room (``reserve.py``); nobody overtakes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from ..errors import RequestError
from .effects import RowBroken
from .reserve import Reserve
from .rows import Phase, Row

TYPICAL_TOKENS = 128
"""Answer of a typical row, for the estimate of how soon a place becomes free."""


class Admission:
    """Rows that wait for a place.

    Args:
        batch: most rows that are live at a time.
        queue: most rows that wait; one more is refused.
        resolve: the revisions that adapter ids stand for now; raises a RequestError for an id that
            is not mounted.
    """

    def __init__(
        self,
        *,
        batch: int,
        queue: int,
        reserve: Reserve,
        resolve: Callable[[tuple[str, ...] | None], tuple[str, ...]],
    ) -> None:
        self.batch = batch
        self.queue = queue
        self._reserve = reserve
        self._resolve = resolve
        # Full: ``has_room`` is False and the core refuses the row.
        self._waiting: deque[Row] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._waiting)

    def has_room(self, row: Row, live: list[Row] | None) -> bool:
        """Whether a newcomer may stay. ``live`` None: there is no model, so that all must wait."""
        if len(self._waiting) < self.queue:
            return True
        starts_at_once = live is not None and not self._waiting and len(live) < self.batch
        return starts_at_once and self._reserve.admits(row, live or ())

    def append(self, row: Row) -> None:
        """A newcomer."""
        self._waiting.append(row)

    def put_back(self, rows: Iterable[Row]) -> None:
        """Rows that had left the queue and have nothing to show for it; in order of age."""
        for row in reversed(list(rows)):
            row.move(Phase.WAITING)
            self._waiting.appendleft(row)

    def remove(self, row: Row) -> None:
        """Nobody wants it any more."""
        self._waiting.remove(row)

    def next(self, live: list[Row]) -> Row | None:
        """The row whose turn it is, out of the queue; None while there is no room for it."""
        if not self._waiting or len(live) >= self.batch:
            return None
        return self._waiting.popleft() if self._reserve.admits(self._waiting[0], live) else None

    def select(self, row: Row) -> RowBroken | None:
        """Settle the row's adapters by what is mounted now, or say why that cannot be."""
        try:
            row.select(self._resolve(row.spec.adapters))
        except RequestError as error:
            return RowBroken(row.id, error.message, error.param)
        return None

    def retry_after(self, decode_seconds: float) -> float:
        """Seconds until a refused request may find room, at least 1."""
        # A typical row leaves every 1/batch of its time; the caller is last.
        per_row = max(decode_seconds, 0.01) * TYPICAL_TOKENS
        return max(1.0, per_row * (len(self._waiting) + 1) / self.batch)

    def check_integrity(self, rows: Iterable[Row]) -> None:
        """Raise AssertionError if the queue is not that of ``rows``."""
        assert all(r.phase is Phase.WAITING for r in self._waiting), "a queued row does not wait"
        waiting = {row.id for row in rows if row.phase is Phase.WAITING}
        assert waiting == {row.id for row in self._waiting}, "the queue lost a row"
        numbers = [row.number for row in self._waiting]
        assert numbers == sorted(numbers), "the queue is out of order"
