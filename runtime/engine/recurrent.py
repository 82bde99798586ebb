"""The state of a recurrent layer (convolution, state space, gated delta) of all rows of a batch.

Such a state has no token axis and cannot be cut: a forward pass replaces its arrays [B, …] as a
whole. They stay in the order of the batch, just as the model left them, and are put together anew
only when that order changes. What a step replaced is held until the next one, so that one token can
be taken back, and costs no copy. Runs on the device thread; knows slots, not models or requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from ..plans import RowId
from .codecs import Image, Stored
from .groups import GroupKey, Place, Relayout
from .layout_protocols import Piece
from .lone import CannotTrim
from .seats import Seats
from .steps import Step

Seat: TypeAlias = int | Stored
"""Where a slot's state is: at a place in the batch, or in arrays that joined; none: it is empty."""


@dataclass(frozen=True, slots=True)
class Moment(Image):
    """A row's state [1, …] in a recurrent layer, and what it was one token ago if that is known."""

    before: Stored | None = None


class RecurrentLayout:
    """One recurrent layer of a batch; ``size`` is how many arrays its state has."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._now: Any = _cache_of([None] * size)
        self._before: list[mx.array | None] | None = None
        self._rows = 0
        self._seats: Seats[Seat] = Seats()
        self._settled = True
        self._step: Step | None = None

    @property
    def arrays(self) -> list[mx.array]:
        """The arrays of the state as it is now."""
        return [array for array in self._now.cache if array is not None]

    @property
    def most_columns(self) -> int | None:
        """None: but see :meth:`commit` for what may be taken back of several."""
        return None

    def take(self, cache: Any) -> tuple[Image | None, int]:
        """See :class:`~.layouts.BatchLayout`."""
        if type(cache) is not ArraysCache or len(cache.cache) != self._size:
            raise TypeError(f"{type(cache).__name__} in a recurrent layer")
        if all(array is None for array in cache.cache):
            return None, 0
        if any(array is None for array in cache.cache):
            raise TypeError("a recurrent state of which a part is missing")
        return Moment(tuple(cache.cache)), 0

    def give(self, image: Image | None, length: int, oldest: int, held: int) -> Any:
        """See :class:`~.layouts.BatchLayout`; the whole state, or that of one token ago."""
        if length == 0:
            return _cache_of([None] * self._size)
        assert isinstance(image, Moment)
        stored = image.stored if length == held else None
        if length == held - 1:
            stored = image.before
        if stored is None:
            raise CannotTrim(f"a recurrent state of {held} tokens cannot be cut to {length}")
        return _cache_of([mx.contiguous(array) for array in stored])

    def oldest_held(self, written: int, oldest: int) -> int:
        """Nothing is forgotten with time."""
        return oldest

    def image(self, place: Place) -> Image | None:
        """See :class:`~.layouts.BatchLayout`."""
        seat = self._seats.at(place)
        if not isinstance(seat, int):
            return None if seat is None else Moment(seat)
        now = _slot(self._now.cache, seat)
        if now is None:
            return None
        return Moment(now, before=_slot(self._before, seat) if self._before else None)

    def fitted(self, image: Image, length: int, capacity: int) -> Image:
        """The state as it is now: another batch's step before is nobody's business here."""
        return Moment(image.stored)

    def gather(
        self, relayout: Relayout, joining: Mapping[RowId, Image | None]
    ) -> dict[GroupKey, list[Piece]]:
        """See :class:`~.layouts.BatchLayout`; only what joins, as the rest moves in one go."""
        moved: dict[GroupKey, list[Piece]] = {}
        for change in relayout.changes:
            newcomers = [copy for copy in change.copies if copy.source is None]
            images = [(copy.slot, joining[copy.row]) for copy in newcomers]
            pieces = [Piece(slot, image.stored, False) for slot, image in images if image]
            moved[change.group] = pieces
        return moved

    def apply(self, relayout: Relayout, moved: Mapping[GroupKey, list[Piece]]) -> None:
        """See :class:`~.layouts.BatchLayout`; bytes move in the :meth:`cache` that follows."""
        pieces = ((group, piece) for group, pieces in moved.items() for piece in pieces)
        joined = {Place(group, piece.slot): piece.stored for group, piece in pieces}
        self._seats.move(relayout, joined)
        self._settled = False
        if not self._seats:
            self._now, self._before, self._rows = _cache_of([None] * self._size), None, 0

    def cache(self, step: Step) -> Any:
        """See :class:`~.layouts.BatchLayout`: an ArraysCache of all rows."""
        rows = step.segments[-1].stop
        if not self._settled or rows != self._rows:
            self._reseat(step)
            self._rows, self._settled = rows, True
        self._step = step
        self._before = list(self._now.cache)
        self._now = _cache_of(list(self._before))
        if step.counts is not None:
            # One of its own for every layer: models count it down in place.
            self._now.lengths = mx.array(step.counts)
        return self._now

    def commit(self, counts: Sequence[int]) -> None:
        """See :class:`~.layouts.BatchLayout`.

        Of a row's columns all can be kept, none, or those that the step was told beforehand;
        ValueError otherwise. To keep some of several, take all back and run the step once more.
        """
        step = self._step
        if step is None:
            return
        self._now.lengths = None
        told = step.counts or (step.columns,) * len(counts)
        if tuple(counts) != told:
            self._take_back(counts, told)
        if step.columns > 1 or tuple(counts) != told:
            self._before = None

    def _take_back(self, counts: Sequence[int], told: Sequence[int]) -> None:
        kept = [count == announced for count, announced in zip(counts, told, strict=True)]
        if not all(keep or not count for keep, count in zip(kept, counts, strict=True)):
            raise ValueError(f"{list(counts)} of {list(told)} columns of a recurrent layer kept")
        assert self._before is not None
        keep = mx.array(kept)
        for index, (now, before) in enumerate(zip(self._now.cache, self._before, strict=True)):
            if not any(kept):
                self._now[index] = before
            elif now is not None:
                here = keep.reshape(-1, *[1] * (now.ndim - 1))
                old = mx.zeros_like(now) if before is None else before
                self._now[index] = mx.where(here, now, old)

    def _reseat(self, step: Step) -> None:
        """Bring the rows' states into the order of the batch."""
        seats = self._seats.in_order(step.segments)
        joined = [seat for seat in seats if isinstance(seat, tuple)]
        places = _places(seats, self._rows if self._now.cache[0] is not None else 0, len(joined))
        self._now = _cache_of(
            [
                _drawn_together(array, [stored[index] for stored in joined], places)
                for index, array in enumerate(self._now.cache)
            ]
        )
        self._seats.put(step.segments, range(len(seats)))


def _places(seats: Sequence[Seat | None], rows: int, joined: int) -> list[int]:
    """Where in (rows, joined ones, an empty one) each seat's state lies."""
    newcomers = iter(range(rows, rows + joined))
    places: list[int] = []
    for seat in seats:
        match seat:
            case int():
                places.append(seat if rows else rows + joined)
            case tuple():
                places.append(next(newcomers))
            case None:
                places.append(rows + joined)
    return places


def _drawn_together(
    array: mx.array | None, joined: list[mx.array], places: list[int]
) -> mx.array | None:
    parts = joined if array is None else [array, *joined]
    if not parts:
        return None
    size = sum(part.shape[0] for part in parts)
    if max(places) == size:
        parts = [*parts, mx.zeros((1, *parts[0].shape[1:]), parts[0].dtype)]
        size += 1
    pool = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    return pool if places == list(range(size)) else pool[mx.array(places)]


def _cache_of(arrays: Sequence[mx.array | None]) -> Any:
    make: Any = ArraysCache
    cache = make(size=len(arrays))
    cache.cache = list(arrays)
    return cache


def _slot(arrays: Sequence[mx.array | None], place: int) -> Stored | None:
    slot = [array[place : place + 1] for array in arrays if array is not None]
    return tuple(slot) if slot else None
