"""Any order of what may happen to the scheduler's core, for machines that add their own rules."""

from __future__ import annotations

from typing import Any

from core_rig import Rig
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlx_troupe.runtime.plans import RowId


def endless(ids: tuple[int, ...]) -> int:
    """A script that never samples an end token."""
    return ids[-1] % 999 + 1


def ids(n: int, start: int) -> tuple[int, ...]:
    """``n`` ids that share no prefix with those of another start."""
    return (start, *((start * 101 + i * 7) % 900 + 1 for i in range(1, n)))


class Walk(RuleBasedStateMachine):
    """Whatever it does with its rows, they say what they would alone, and nothing leaks."""

    def __init__(self, rig: Rig) -> None:
        super().__init__()
        self.rig = rig
        self.rows: list[RowId] = []

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        self.rig.cancel(data.draw(st.sampled_from(self.rows)))
        self.rig.plan()

    @precondition(lambda self: self.rig.lookups)
    @rule(miss=st.booleans())
    def answer(self, miss: bool) -> None:
        self.rig.answer(miss=miss)
        self.rig.plan()

    @precondition(lambda self: self.rig.core.model is not None)
    @rule()
    def lose_device(self) -> None:
        self.rig.lose_device()

    @precondition(lambda self: self.rig.core.model is None)
    @rule()
    def ready(self) -> None:
        self.rig.ready()

    @invariant()
    def holds(self) -> None:
        self.rig.check()

    def teardown(self) -> None:
        self.rig.drain()
