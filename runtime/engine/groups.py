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
from typing import NamedTuple

from ..plans import RowId

MIN_CAPACITY = 64


class GroupKey(NamedTuple):
    """What the rows of one group share: their capacity, and whether their state is encoded.

    ``encoded`` rows are past the threshold of the KV scheme; their bytes are in each layer's
    codec, if it has one.
    """

    capacity: int
    encoded: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """A slot of a group."""

    group: GroupKey
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

    group: GroupKey
    slots: int
    fresh: bool
    wipe: tuple[int, ...]
    copies: tuple[SlotCopy, ...]


@dataclass(frozen=True, slots=True)
class Relayout:
    """All changes of one :meth:`Groups.begin`; ``dropped`` are emptied groups."""

    changes: tuple[GroupChange, ...]
    dropped: tuple[GroupKey, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """One group's share ``[start, start + len(lengths))`` of the batch axis.

    ``lengths`` are tokens held by each row before the step; ``slots`` is what the group's buffers
    have, of which the leading ``len(lengths)`` are in use.
    """

    group: GroupKey
    slots: int
    start: int
    lengths: tuple[int, ...]

    @property
    def capacity(self) -> int:
        return self.group.capacity

    @property
    def stop(self) -> int:
        return self.start + len(self.lengths)


def capacity_for(tokens: int) -> int:
    """The smallest power of two, at least ``MIN_CAPACITY``, that holds ``tokens`` tokens."""
    return max(MIN_CAPACITY, 1 << max(tokens - 1, 0).bit_length())


class Groups:
    """Rows by capacity group, dense in slots ``[0, n)``, in ascending order of capacity.

    With ``spare`` a group keeps slots for rows that may come: it moves less often, and takes more.
    """

    def __init__(self, *, spare: bool = True) -> None:
        self._spare = spare
        self._wanted: dict[GroupKey, list[RowId]] = {}
        self._filed: dict[RowId, GroupKey] = {}
        self._lengths: dict[RowId, int] = {}
        self._places: dict[RowId, Place] = {}
        self._slots: dict[GroupKey, int] = {}
        self._held: dict[GroupKey, list[RowId | None]] = {}
        self._poisoned: dict[GroupKey, set[int]] = {}

    @property
    def rows(self) -> tuple[RowId, ...]:
        """All rows in the order of the batch axis."""
        return tuple(row for group in sorted(self._wanted) for row in self._wanted[group])

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

    def is_encoded(self, row: RowId) -> bool:
        """Whether a row stands with the encoded ones, or will from the next :meth:`begin` on."""
        return self._filed[row].encoded

    def join(self, row: RowId, length: int, *, encoded: bool = False) -> None:
        """Take a row of ``length`` tokens in. Raises ValueError if it is here already."""
        if row in self._lengths:
            raise ValueError(f"row {row} is in the batch already")
        self._lengths[row] = length
        self._put(row, GroupKey(capacity_for(length + 1), encoded))

    def convert(self, row: RowId) -> None:
        """Move a row to the encoded ones; there is no way back. Raises KeyError for a stranger."""
        group = self._filed[row]
        if not group.encoded:
            self._take_out(row)
            self._put(row, GroupKey(group.capacity, encoded=True))

    def leave(self, row: RowId, *, poisoned: bool = False) -> None:
        """Let a row go; what a ``poisoned`` one left in any slot is wiped before anybody reads it.

        Slots that it moved out of still hold its bytes, and poison is found a step late.
        """
        del self._lengths[row]
        self._take_out(row)
        self._places.pop(row, None)
        if poisoned:
            for group, held in self._held.items():
                found = {slot for slot, holder in enumerate(held) if holder == row}
                self._poisoned.setdefault(group, set()).update(found)

    def begin(self, columns: int) -> Relayout:
        """Make room for ``columns`` more tokens in every row; what to copy for that."""
        self._promote(columns)
        changes = tuple(c for c in map(self._change, sorted(self._wanted)) if c is not None)
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
        for group, rows in self._wanted.items():
            capacity = group.capacity
            assert capacity == capacity_for(capacity), "a capacity that is no power of two"
            assert all(self._filed[row] == group for row in rows), "a row misfiled"
            assert all(self._lengths[row] <= capacity for row in rows), "a row longer than its slot"
        places = list(self._places.values())
        assert len(places) == len(set(places)), "two rows in one slot"
        assert all(place.slot < self._slots[place.group] for place in places), "no such slot"

    def _put(self, row: RowId, group: GroupKey) -> None:
        self._wanted.setdefault(group, []).append(row)
        self._filed[row] = group

    def _take_out(self, row: RowId) -> None:
        group = self._filed.pop(row)
        rows = self._wanted[group]
        index = rows.index(row)
        last = rows.pop()
        if index < len(rows):
            rows[index] = last
        if not rows:
            del self._wanted[group]

    def _promote(self, columns: int) -> None:
        for row in self.rows:
            capacity = capacity_for(self._lengths[row] + columns)
            group = self._filed[row]
            if capacity > group.capacity:
                self._take_out(row)
                self._put(row, group._replace(capacity=capacity))

    def _fitting_slots(self, group: GroupKey) -> int:
        needed, slots = len(self._wanted[group]), self._slots.get(group, 0)
        if not self._spare:
            return needed
        if needed > slots:
            return max(needed, slots * 5 // 4)
        return needed if needed * 2 < slots else slots

    def _change(self, group: GroupKey) -> GroupChange | None:
        slots = self._fitting_slots(group)
        fresh = slots != self._slots.get(group)
        wipe = () if fresh else tuple(sorted(self._poisoned.get(group, ())))
        copies = tuple(self._copies(group, fresh))
        if not (fresh or wipe or copies):
            return None
        return GroupChange(group, slots, fresh, wipe, copies)

    def _copies(self, group: GroupKey, fresh: bool) -> Iterator[SlotCopy]:
        run: SlotCopy | None = None
        for slot, row in enumerate(self._wanted[group]):
            source = self._places.get(row)
            if source == Place(group, slot) and not fresh:
                continue
            copy = SlotCopy(slot, 1, source, row, self._lengths[row])
            joined = run and _joined(run, copy)
            if run and not joined:
                yield run
            run = joined or copy
        if run:
            yield run

    def _settle(self, changes: tuple[GroupChange, ...], dropped: tuple[GroupKey, ...]) -> None:
        for group, rows in self._wanted.items():
            self._places.update((row, Place(group, slot)) for slot, row in enumerate(rows))
        for change in changes:
            self._slots[change.group] = change.slots
            self._held[change.group] = self._held_after(change)
        for group in dropped:
            del self._slots[group], self._held[group]
        self._poisoned.clear()

    def _held_after(self, change: GroupChange) -> list[RowId | None]:
        """Whose bytes each of a group's slots has now."""
        held = self._held.get(change.group, [])
        if change.fresh:
            held = [None] * change.slots
        for slot in change.wipe:
            held[slot] = None
        for copy in change.copies:
            span = slice(copy.slot, copy.slot + copy.count)
            held[span] = self._wanted[change.group][span]
        return held

    def _segments(self) -> Iterator[Segment]:
        start = 0
        for group in sorted(self._wanted):
            lengths = tuple(self._lengths[row] for row in self._wanted[group])
            yield Segment(group, self._slots[group], start, lengths)
            start += len(lengths)


def _joined(first: SlotCopy, second: SlotCopy) -> SlotCopy | None:
    """Both copies as one, if their slots follow each other on both sides."""
    if first.source is None or second.source is None:
        return None
    after = Place(first.source.group, first.source.slot + first.count)
    if second.slot != first.slot + first.count or second.source != after:
        return None
    tokens = max(first.tokens, second.tokens)
    return SlotCopy(first.slot, first.count + 1, first.source, first.row, tokens)
