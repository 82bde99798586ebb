"""The bookkeeping of the batch: who stands where, checked after every operation."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlx_troupe.runtime.engine.groups import (
    MIN_CAPACITY,
    GroupKey,
    Groups,
    Place,
    Relayout,
    capacity_for,
)
from mlx_troupe.runtime.plans import RowId


class Shelf:
    """Stands in for the buffers: each slot holds the name of the row whose bytes it has."""

    def __init__(self) -> None:
        self.slots: dict[GroupKey, list[Any]] = {}

    def carry_out(self, relayout: Relayout) -> None:
        """Do what the layouts do, with names for bytes; all copies read the old state."""
        before = {group: list(slots) for group, slots in self.slots.items()}
        for change in relayout.changes:
            if change.fresh:
                self.slots[change.group] = ["zero"] * change.slots
            slots = self.slots[change.group]
            assert len(slots) == change.slots
            for slot in change.wipe:
                slots[slot] = "zero"
            for copy in change.copies:
                if copy.source is None:
                    assert copy.count == 1
                    slots[copy.slot] = copy.row
                    continue
                first = copy.source.slot
                taken = before[copy.source.group][first : first + copy.count]
                assert len(taken) == copy.count
                slots[copy.slot : copy.slot + copy.count] = taken
        for group in relayout.dropped:
            del self.slots[group]


class GroupsMachine(RuleBasedStateMachine):
    """Rows join, leave, step and are read in any order."""

    spare = True

    def __init__(self) -> None:
        super().__init__()
        self.groups = Groups(spare=self.spare)
        self.shelf = Shelf()
        self.lengths: dict[RowId, int] = {}
        self.encoded: set[RowId] = set()
        self.poisoned: set[RowId] = set()
        self.fresh_id = 0

    @rule(length=st.integers(0, 300), encoded=st.booleans())
    def join(self, length: int, encoded: bool) -> None:
        self.fresh_id += 1
        row = RowId(self.fresh_id)
        self.groups.join(row, length, encoded=encoded)
        self.lengths[row] = length
        if encoded:
            self.encoded.add(row)

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def convert(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.lengths)))
        self.groups.convert(row)
        self.encoded.add(row)

    @precondition(lambda self: self.lengths)
    @rule(data=st.data(), poisoned=st.booleans())
    def leave(self, data: st.DataObject, poisoned: bool) -> None:
        row = data.draw(st.sampled_from(sorted(self.lengths)))
        self.groups.leave(row, poisoned=poisoned)
        del self.lengths[row]
        if poisoned:
            self.poisoned.add(row)

    @rule(columns=st.integers(1, 70), kept=st.integers(0, 70))
    def step(self, columns: int, kept: int) -> None:
        self.shelf.carry_out(self.groups.begin(columns))
        self.check_settled(columns)
        rows = self.groups.rows
        self.groups.commit([min(kept, columns)] * len(rows))
        for row in rows:
            self.lengths[row] += min(kept, columns)

    def check_settled(self, columns: int) -> None:
        at = 0
        rows = self.groups.rows
        for segment in self.groups.segments():
            held = self.shelf.slots[segment.group]
            assert segment.start == at
            assert len(held) == segment.slots >= len(segment.lengths)
            assert tuple(held[: len(segment.lengths)]) == rows[segment.start : segment.stop]
            assert segment.lengths == tuple(self.lengths[r] for r in rows[at : segment.stop])
            assert max(segment.lengths) + columns <= segment.capacity
            here = rows[segment.start : segment.stop]
            assert all((row in self.encoded) is segment.group.encoded for row in here)
            at = segment.stop
            assert len(segment.lengths) * 2 >= segment.slots
        assert at == len(rows)
        assert self.shelf.slots.keys() == {s.group for s in self.groups.segments()}
        assert not any(self.poisoned.intersection(held) for held in self.shelf.slots.values())

    @invariant()
    def integrity(self) -> None:
        self.groups.check_integrity()
        assert set(self.groups.rows) == self.lengths.keys()
        assert len(self.groups) == len(self.lengths)
        for row, length in self.lengths.items():
            assert self.groups.length(row) == length
            assert self.groups.is_encoded(row) is (row in self.encoded)
            place = self.groups.place(row)
            if place is not None:
                assert self.shelf.slots[place.group][place.slot] == row


TestGroupsMachine = GroupsMachine.TestCase
TestGroupsMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


class DenseMachine(GroupsMachine):
    """The same without spare slots: after every step a group has one for each of its rows."""

    spare = False


TestDenseMachine = DenseMachine.TestCase
TestDenseMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_poison_is_wiped_from_slots_that_the_row_moved_out_of_too() -> None:
    """It is found a step late: by then the row may stand in a larger slot, with a copy of it."""
    groups = Groups()
    for row, length in enumerate((10, 10, 60)):
        groups.join(RowId(row), length)
    groups.begin(1)
    groups.begin(20)
    assert [segment.capacity for segment in groups.segments()] == [64, 128]
    groups.leave(RowId(2), poisoned=True)
    (change,) = groups.begin(1).changes
    assert (change.group.capacity, change.wipe) == (64, (2,))


def test_without_spare_slots_a_group_has_one_for_each_row() -> None:
    """When rows come and when they go; with them it has more for a while."""
    kept: dict[bool, list[int]] = {True: [], False: []}
    for spare, slots in kept.items():
        groups = Groups(spare=spare)
        for row in range(9):
            groups.join(RowId(row), 10)
            groups.begin(1)
            slots.append(groups.segments()[0].slots)
        for row in range(8):
            groups.leave(RowId(row))
            groups.begin(1)
            slots.append(groups.segments()[0].slots)
    assert kept[False] == [*range(1, 10), *range(8, 0, -1)]
    assert all(more >= least for more, least in zip(kept[True], kept[False], strict=True))
    assert kept[True] != kept[False]


def test_capacities_are_powers_of_two() -> None:
    """Every length gets the smallest capacity that holds it, from 64 on."""
    wanted = {0: 64, 1: 64, 64: 64, 65: 128, 128: 128, 129: 256, 4001: 4096}
    assert {tokens: capacity_for(tokens) for tokens in wanted} == wanted


def test_a_leaving_row_moves_only_the_last() -> None:
    """The hole is filled by the last slot; nobody else moves."""
    groups = Groups()
    for row in range(5):
        groups.join(RowId(row), 10)
    groups.begin(1)
    groups.leave(RowId(1))
    (change,) = groups.begin(1).changes
    assert groups.rows == (0, 4, 2, 3)
    assert not change.fresh
    (copy,) = change.copies
    assert (copy.slot, copy.count, copy.source) == (1, 1, Place(GroupKey(MIN_CAPACITY), 4))


def test_rows_that_grow_together_move_in_one_copy() -> None:
    """Sixteen rows crossing a capacity at once are one run, not sixteen."""
    groups = Groups()
    for row in range(16):
        groups.join(RowId(row), MIN_CAPACITY - 1)
    groups.begin(1)
    groups.commit([1] * 16)
    relayout = groups.begin(1)
    assert relayout.dropped == (GroupKey(MIN_CAPACITY),)
    (change,) = relayout.changes
    assert [copy.count for copy in change.copies] == [16]
