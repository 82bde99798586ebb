"""Where rows stand: capacity groups, slots and lengths, as plain integers.

Owns the bookkeeping of one batch and nothing else; ``layouts`` moves the bytes that it asks for.
Runs on the device thread, called by ``batch.RowBatch``. It knows nothing of MLX, layers or models.

Rows stand in groups of power-of-two capacity. The *wanted* order changes at once when a row joins
or leaves; the *held* places (where the bytes are) follow at the next :meth:`Groups.begin`, which
returns what must be copied in between, so that ten joins and leaves cost one pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..device import RowId

MIN_CAPACITY = 64


@dataclass(frozen=True, slots=True)
class Place:
    """A slot of the group with this capacity."""

    capacity: int
    slot: int


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """Fill slots ``[slot, slot + count)``, the first ``tokens`` tokens of each.

    They come from consecutive slots that begin at ``source``, or, where ``source`` is None, from
    the state that ``row`` (then ``count`` is 1) brought along when it joined.
    """

    slot: int
    count: int
    source: Place | None
    row: RowId
    tokens: int


@dataclass(frozen=True, slots=True)
class GroupChange:
    """What happens to one group's buffers: new ones of ``slots`` slots if ``fresh``, or patches.

    ``wipe`` are slots to be zeroed before the copies; all copies read the state before any change.
    """

    capacity: int
    slots: int
    fresh: bool
    wipe: tuple[int, ...]
    copies: tuple[SlotCopy, ...]


@dataclass(frozen=True, slots=True)
class Relayout:
    """All changes of one :meth:`Groups.begin`; ``dropped`` are capacities of emptied groups."""

    changes: tuple[GroupChange, ...]
    dropped: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """One group's share ``[start, start + len(lengths))`` of the batch axis.

    ``lengths`` are tokens held by each row before the step; ``slots`` is what the group's buffers
    have, of which the leading ``len(lengths)`` are in use.
    """

    capacity: int
    slots: int
    start: int
    lengths: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + len(self.lengths)


def capacity_for(tokens: int) -> int:
    """The smallest power of two, at least ``MIN_CAPACITY``, that holds ``tokens`` tokens."""
    return max(MIN_CAPACITY, 1 << max(tokens - 1, 0).bit_length())


class Groups:
    """Rows by capacity group, dense in slots ``[0, n)``, in ascending order of capacity."""

    def __init__(self) -> None:
        self._wanted: dict[int, list[RowId]] = {}
        self._capacities: dict[RowId, int] = {}
        self._lengths: dict[RowId, int] = {}
        self._places: dict[RowId, Place] = {}
        self._slots: dict[int, int] = {}
        self._poisoned: dict[int, set[int]] = {}

    @property
    def rows(self) -> tuple[RowId, ...]:
        """All rows in the order of the batch axis."""
        return tuple(row for capacity in sorted(self._wanted) for row in self._wanted[capacity])

    def __contains__(self, row: RowId) -> bool:
        return row in self._lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def length(self, row: RowId) -> int:
        """Tokens held by a row. Raises KeyError for a stranger."""
        return self._lengths[row]

    def place(self, row: RowId) -> Place | None:
        """Where a row's bytes are; None from its joining to the next :meth:`begin`."""
        return self._places.get(row)

    def join(self, row: RowId, length: int) -> None:
        """Take a row of ``length`` tokens in. Raises ValueError if it is here already."""
        if row in self._lengths:
            raise ValueError(f"row {row} is in the batch already")
        self._lengths[row] = length
        self._put(row, capacity_for(length + 1))

    def leave(self, row: RowId, *, poisoned: bool = False) -> None:
        """Let a row go; a ``poisoned`` one's slot is wiped before anybody can read it."""
        del self._lengths[row]
        self._take_out(row)
        place = self._places.pop(row, None)
        if poisoned and place is not None:
            self._poisoned.setdefault(place.capacity, set()).add(place.slot)

    def begin(self, columns: int) -> Relayout:
        """Make room for ``columns`` more tokens in every row; what to copy for that."""
        self._promote(columns)
        capacities = sorted(self._wanted)
        changes = tuple(change for change in map(self._change, capacities) if change is not None)
        dropped = tuple(sorted(self._slots.keys() - self._wanted.keys()))
        self._settle(changes, dropped)
        return Relayout(changes, dropped)

    def commit(self, counts: Sequence[int]) -> None:
        """Add ``counts`` tokens to the rows, in batch order."""
        for row, count in zip(self.rows, counts, strict=True):
            self._lengths[row] += count

    def segments(self) -> tuple[Segment, ...]:
        """The groups along the batch axis, as they stand after :meth:`begin`."""
        return tuple(self._segments())

    def check_integrity(self) -> None:
        """Raise AssertionError with the broken rule in words. For tests."""
        standing = [row for rows in self._wanted.values() for row in rows]
        assert len(standing) == len(set(standing)), "a row stands in two groups"
        assert set(standing) == self._lengths.keys(), "a row without a length, or without a group"
        assert all(self._wanted.values()), "an empty group is kept"
        for capacity, rows in self._wanted.items():
            assert capacity == capacity_for(capacity), "a capacity that is no power of two"
            assert all(self._capacities[row] == capacity for row in rows), "a row misfiled"
            assert all(self._lengths[row] <= capacity for row in rows), "a row longer than its slot"
        places = list(self._places.values())
        assert len(places) == len(set(places)), "two rows in one slot"
        assert all(place.slot < self._slots[place.capacity] for place in places), "no such slot"

    def _put(self, row: RowId, capacity: int) -> None:
        self._wanted.setdefault(capacity, []).append(row)
        self._capacities[row] = capacity

    def _take_out(self, row: RowId) -> None:
        capacity = self._capacities.pop(row)
        rows = self._wanted[capacity]
        index = rows.index(row)
        last = rows.pop()
        if index < len(rows):
            rows[index] = last
        if not rows:
            del self._wanted[capacity]

    def _promote(self, columns: int) -> None:
        for row in self.rows:
            capacity = capacity_for(self._lengths[row] + columns)
            if capacity > self._capacities[row]:
                self._take_out(row)
                self._put(row, capacity)

    def _fitting_slots(self, capacity: int) -> int:
        needed, slots = len(self._wanted[capacity]), self._slots.get(capacity, 0)
        if needed > slots:
            return max(needed, slots * 5 // 4)
        return needed if needed * 2 < slots else slots

    def _change(self, capacity: int) -> GroupChange | None:
        slots = self._fitting_slots(capacity)
        fresh = slots != self._slots.get(capacity)
        wipe = () if fresh else tuple(sorted(self._poisoned.get(capacity, ())))
        copies = tuple(self._copies(capacity, fresh))
        if not (fresh or wipe or copies):
            return None
        return GroupChange(capacity, slots, fresh, wipe, copies)

    def _copies(self, capacity: int, fresh: bool) -> Iterator[SlotCopy]:
        run: SlotCopy | None = None
        for slot, row in enumerate(self._wanted[capacity]):
            source = self._places.get(row)
            if source == Place(capacity, slot) and not fresh:
                continue
            copy = SlotCopy(slot, 1, source, row, self._lengths[row])
            joined = run and _joined(run, copy)
            if run and not joined:
                yield run
            run = joined or copy
        if run:
            yield run

    def _settle(self, changes: tuple[GroupChange, ...], dropped: tuple[int, ...]) -> None:
        for capacity, rows in self._wanted.items():
            self._places.update((row, Place(capacity, slot)) for slot, row in enumerate(rows))
        self._slots.update((change.capacity, change.slots) for change in changes)
        for capacity in dropped:
            del self._slots[capacity]
        self._poisoned.clear()

    def _segments(self) -> Iterator[Segment]:
        start = 0
        for capacity in sorted(self._wanted):
            lengths = tuple(self._lengths[row] for row in self._wanted[capacity])
            yield Segment(capacity, self._slots[capacity], start, lengths)
            start += len(lengths)


def _joined(first: SlotCopy, second: SlotCopy) -> SlotCopy | None:
    """Both copies as one, if their slots follow each other on both sides."""
    if first.source is None or second.source is None:
        return None
    after = Place(first.source.capacity, first.source.slot + first.count)
    if second.slot != first.slot + first.count or second.source != after:
        return None
    tokens = max(first.tokens, second.tokens)
    return SlotCopy(first.slot, first.count + 1, first.source, first.row, tokens)
