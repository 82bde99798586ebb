"""The steps under way: launched and not yet settled, oldest first, with the leases that they hold.

Part of the scheduler's core. Knows plans as they were made, and nothing of what rows do with the
results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from ..plans import RowId, StepDone, StepId
from .effects import ReturnLease
from .planning import Planned

PIPELINE = 2
"""Steps under way at most: one running and one queued."""


class Pipeline:
    """Steps in the order in which the device computes them."""

    def __init__(self) -> None:
        # Never full: the core plans no step while ``is_full``.
        self._steps: deque[Planned] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Planned]:
        return iter(self._steps)

    @property
    def is_full(self) -> bool:
        """Whether a further step has to wait."""
        return len(self._steps) >= PIPELINE

    @property
    def ids(self) -> tuple[StepId, ...]:
        """Steps that may still speak of a row."""
        return tuple(planned.plan.step for planned in self._steps)

    def begin(self, planned: Planned) -> None:
        """A step is launched."""
        self._steps.append(planned)

    def settle(self, done: StepDone) -> Planned | None:
        """The step that has settled; None for one that was not launched from here."""
        if not self._steps or self._steps[0].plan.step != done.step:
            return None
        return self._steps.popleft()

    def lose(self) -> tuple[ReturnLease, ...]:
        """The device lost them all: what was lent to them goes back."""
        lent = tuple(ReturnLease(lent.lease) for planned in self._steps for lent in planned.leases)
        self._steps.clear()
        return lent


def give_back(planned: Planned, lost: set[RowId]) -> tuple[ReturnLease, ...]:
    """What was lent to a step that has settled; taken, where the row that it was for goes on."""
    return tuple(
        ReturnLease(lent.lease, taken=lent.row is not None and lent.row not in lost)
        for lent in planned.leases
    )
