"""Bytes of state reserved for rows, where the operator set a limit to them.

Part of the scheduler's core. Without a limit every question is answered with yes.

The rule, with a limit:

- A row leaves the queue when the state of its whole prompt fits beside what is reserved. The queue
  stays in order: nobody overtakes a row that does not fit yet, and nobody joins while a row that
  runs waits for room.
- A row's reservation grows with its state, by what the device allocates (``budgets.state_bytes``);
  under a limit a batch keeps no spare slots. Not counted: copies while rows move, and up to
  ``LONE_STEP - 1`` tokens of a prompt that is prefilled alone and in pieces, since it grows by
  whole steps from where a piece ended.
  A row whose next token does not fit *waits*: it is left out of the steps. So do all younger rows
  that would have to grow; those that still have room in their slot go on.
- Room comes back when a row ends, and the oldest row that waits is the first to get it.
- When nothing can go on because every row waits, the *youngest* ends with ``length`` (what it said
  stays said), until the oldest fits. A row alone may use all of the limit, and then ends with
  ``length`` itself. So there is no deadlock, and the oldest row always comes to its end.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..budgets import state_bytes
from ..model_info import ModelInfo
from .rows import Phase, Row

HOLDING = (Phase.LOOKING, Phase.READY, Phase.PREFILL, Phase.DECODE)
"""Phases with a reservation. A row that ends gives it back at once: the step that ends it frees
its state before it decodes anybody."""


class Reserve:
    """What rows have reserved of ``limit_bytes``; the reservations themselves are on the rows."""

    def __init__(self) -> None:
        self.limit_bytes: int | None = None
        self._model: ModelInfo | None = None

    def limit(self, limit_bytes: int | None, model: ModelInfo) -> None:
        """Set the limit for a model; None is none."""
        self.limit_bytes = limit_bytes
        self._model = model

    def reserved(self, rows: Iterable[Row]) -> int:
        """Bytes that ``rows`` have reserved."""
        return self._cost([(row, row.room) for row in rows if row.phase in HOLDING])

    def admits(self, row: Row, live: Iterable[Row]) -> bool:
        """Whether the state of ``row``'s prompt fits beside the ``live`` rows; takes it if so.

        A row alone is let in whatever it needs: what could never fit was refused before.
        """
        holding = [other for other in live if other.phase in HOLDING]
        if self.limit_bytes is not None and holding:
            rooms = [(other, other.room) for other in holding]
            fits = self._cost([*rooms, (row, len(row.ids))]) <= self.limit_bytes
            if not fits or any(other.waits for other in holding):
                return False
        row.room = len(row.ids)
        return True

    def grants(self, row: Row, live: Iterable[Row]) -> bool:
        """Whether ``row``, which is one of ``live``, has room for one more token; takes it if so.

        ``live`` are in order of age. The answer is remembered in ``row.waits``.
        """
        tokens = row.processed + 1
        row.waits = self.limit_bytes is not None and not self._fits(row, tokens, live)
        if not row.waits:
            row.room = max(row.room, tokens)
        return not row.waits

    def check_integrity(self, rows: Iterable[Row]) -> None:
        """Raise AssertionError if rows that share the limit have more than that."""
        holding = [row for row in rows if row.phase in HOLDING]
        within = self.limit_bytes is None or self.reserved(holding) <= self.limit_bytes
        assert within or len(holding) == 1, "rows reserved more than the limit"
        held = [row for row in holding if row.phase in (Phase.PREFILL, Phase.DECODE)]
        assert all(row.processed <= row.room for row in held), "a row holds what it did not reserve"

    def _fits(self, row: Row, tokens: int, live: Iterable[Row]) -> bool:
        assert self.limit_bytes is not None
        holding = [other for other in live if other.phase in HOLDING]
        before = [(other, other.room) for other in holding]
        after = [(other, max(room, tokens) if other is row else room) for other, room in before]
        if self._cost(after) <= self._cost(before):
            return True
        older = any(other.waits for other in holding if other.number < row.number)
        return not older and self._cost(after) <= self.limit_bytes

    def _cost(self, rooms: list[tuple[Row, int]]) -> int:
        if self._model is None:
            return 0
        alone = len(rooms) == 1
        return sum(_row_cost(self._model, row, room, alone=alone) for row, room in rooms)


def _row_cost(model: ModelInfo, row: Row, room: int, *, alone: bool) -> int:
    """Bytes of one row. In prefill it may stand alone or with others, whichever takes more."""
    lone = state_bytes(model, room, alone=True)
    if alone:
        return lone
    shared = state_bytes(model, room, alone=False)
    return shared if row.phase is Phase.DECODE else max(lone, shared)


def youngest_waiting(live: Iterable[Row]) -> Row | None:
    """The row that has to make room when nothing can go on; None where somebody still can."""
    holding = [row for row in live if row.phase in HOLDING]
    stuck = [row for row in holding if row.phase is Phase.DECODE and row.waits]
    if not stuck or len(stuck) < len(holding):
        return None
    return max(stuck, key=lambda row: row.number)
