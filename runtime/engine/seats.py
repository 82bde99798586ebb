"""What a layout keeps for each slot on the host, carried along when rows move.

Bookkeeping without MLX, on the device thread, for layouts whose bytes do not lie slot by slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

from .groups import GroupKey, Place, Relayout, Segment

T = TypeVar("T")


class Seats(Generic[T]):
    """A value for each slot; None where no row brought one."""

    def __init__(self) -> None:
        self._seats: dict[GroupKey, list[T | None]] = {}

    def __bool__(self) -> bool:
        return bool(self._seats)

    def at(self, place: Place) -> T | None:
        """The value of a slot. Raises KeyError or IndexError where there is none."""
        return self._seats[place.group][place.slot]

    def move(self, relayout: Relayout, joined: Mapping[Place, T]) -> None:
        """Follow a relayout; ``joined`` has the values of rows that come from outside."""
        before = dict(self._seats)
        for change in relayout.changes:
            seats: list[T | None] = [None] * change.slots
            if not change.fresh:
                seats[: len(before[change.group])] = before[change.group]
            for copy in change.copies:
                if copy.source is None:
                    seats[copy.slot] = joined.get(Place(change.group, copy.slot))
                    continue
                first = copy.source.slot
                taken = before[copy.source.group][first : first + copy.count]
                seats[copy.slot : copy.slot + copy.count] = taken
            self._seats[change.group] = seats
        for group in relayout.dropped:
            self._seats.pop(group, None)

    def in_order(self, segments: Sequence[Segment]) -> list[T | None]:
        """The values along the batch axis."""
        return [
            seat
            for segment in segments
            for seat in self._seats[segment.group][: len(segment.lengths)]
        ]

    def put(self, segments: Sequence[Segment], values: Sequence[T | None]) -> None:
        """New values along the batch axis; slots that nobody stands in have none."""
        for segment in segments:
            self._seats[segment.group] = list(values[segment.start : segment.stop])
