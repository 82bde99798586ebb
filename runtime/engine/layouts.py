"""Buffers of one layer by capacity group, behind one protocol; here: keys and values.

A batch owns one :class:`BatchLayout` for each layer. :class:`KVLayout` keeps keys and values, plain
or sliding, in the bytes of a codec once a row is encoded. Runs on the device thread. It knows slots
and lengths (from ``groups``), not what the rows are for, models or requests.

A sliding layer's buffer is a ring: position *p* lies in slot *p* mod ring, and which position a
slot holds follows from the row's length alone. The ring is longer than the window by ``SLACK``, so
that a step of several columns does not overwrite what its first column sees, and so that up to
``SLACK`` tokens can be taken back after the ring has wrapped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from ..device import RowId
from .attention import AttentionView, attend_group_capped
from .codecs import PLAIN, Codec, Image, Stored
from .groups import GroupChange, GroupKey, Place, Relayout, Segment, SlotCopy
from .lone import give_cache, take_image
from .steps import Reach, Step

SLACK = 16


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes on their way to slots ``[slot, slot + count)``."""

    slot: int
    stored: Stored
    detached: bool


class BatchLayout(Protocol):
    """One layer's share of a batch."""

    @property
    def arrays(self) -> list[mx.array]:
        """Every buffer that lives."""
        ...

    @property
    def most_columns(self) -> int | None:
        """Columns that a step may have at most; None = any number."""
        ...

    def take(self, cache: Any) -> tuple[Image | None, int]:
        """A lone row's state, and the oldest position that it holds. Raises TypeError."""
        ...

    def give(self, image: Image | None, length: int, oldest: int, held: int) -> Any:
        """A single-row cache with the first ``length`` of ``held`` tokens. Raises CannotTrim."""
        ...

    def oldest_held(self, written: int, oldest: int) -> int:
        """The oldest position still held once ``written`` tokens went in."""
        ...

    def image(self, place: Place) -> Image | None:
        """A view of a slot, the whole of it; None if nothing was ever written."""
        ...

    def fitted(self, image: Image, length: int, capacity: int) -> Image:
        """The part of another batch's image that a slot of this capacity takes."""
        ...

    def gather(
        self, relayout: Relayout, joining: Mapping[RowId, Image | None]
    ) -> dict[GroupKey, list[Piece]]:
        """What the changes move, by group, read before any of them."""
        ...

    def apply(self, relayout: Relayout, moved: Mapping[GroupKey, list[Piece]]) -> None:
        """Carry the changes out."""
        ...

    def cache(self, step: Step) -> Any:
        """What stands for a cache in one forward pass of all rows."""
        ...

    def commit(self, counts: Sequence[int]) -> None:
        """The step's rows keep that many of its columns; before lengths grow by them."""
        ...


class Attending(Protocol):
    """A layer that takes a step's keys and values and attends to all that it has."""

    def write(self, step: Step, keys: mx.array, values: mx.array) -> None:
        """Put a step's new tokens ([B, heads, columns, width]) behind each row's last."""
        ...

    def attend(
        self,
        step: Step,
        queries: mx.array,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
        softcap: float | None = None,
    ) -> mx.array:
        """Attention of all rows; shapes as in ``attention.AttentionView``."""
        ...


class KVLayout:
    """One layer's K and V of all groups: [slots, heads, depth, width] each, by group.

    ``window`` is None for a plain layer, else how many tokens a query sees, its own included.
    ``codec`` is that of encoded rows; None: they stay plain here. Buffers come into being with the
    first bytes, as only these tell their shape and type.
    """

    def __init__(self, window: int | None, codec: Codec | None = None) -> None:
        self.window = window
        self.ring = None if window is None else window + SLACK
        self.codec = codec
        self.buffers: dict[GroupKey, Stored] = {}

    @property
    def arrays(self) -> list[mx.array]:
        """Every buffer, in the order of the groups."""
        return [array for group in sorted(self.buffers) for array in self.buffers[group]]

    def put_arrays(self, arrays: Sequence[mx.array]) -> None:
        """Replace every buffer by one of the same shape, in the order of :attr:`arrays`."""
        rest = iter(arrays)
        for group in sorted(self.buffers):
            self.buffers[group] = tuple(next(rest) for _ in self.buffers[group])

    @property
    def most_columns(self) -> int | None:
        """A ring takes its slack and one more."""
        return None if self.ring is None else SLACK + 1

    def codec_of(self, group: GroupKey) -> Codec:
        """What the rows of a group are stored in."""
        return self.codec if group.encoded and self.codec is not None else PLAIN

    def depth(self, capacity: int) -> int:
        """Slots' length in a group of this capacity, in tokens."""
        return capacity if self.ring is None else min(capacity, self.ring)

    def take(self, cache: Any) -> tuple[Image | None, int]:
        """See :class:`BatchLayout`; shares bytes with the cache but does not change with it."""
        return take_image(cache, self.codec, self.window, self.ring)

    def give(self, image: Image | None, length: int, oldest: int, held: int) -> Any:
        """See :class:`BatchLayout`; copies, not evaluated."""
        codec = self.codec if image is not None and image.encoded else None
        return give_cache(image, codec or PLAIN, self.window, self.ring, length, oldest)

    def oldest_held(self, written: int, oldest: int) -> int:
        """See :class:`BatchLayout`."""
        return oldest if self.ring is None else max(oldest, written - self.ring)

    def image(self, place: Place) -> Image | None:
        """See :class:`BatchLayout`."""
        if (stored := self.buffers.get(place.group)) is None:
            return None
        slot = slice(place.slot, place.slot + 1)
        encoded = self.codec_of(place.group) is not PLAIN
        return Image(tuple(x[slot] for x in stored), encoded)

    def fitted(self, image: Image, length: int, capacity: int) -> Image:
        """See :class:`BatchLayout`."""
        return image.first(min(length, self.depth(capacity)))

    def gather(
        self, relayout: Relayout, joining: Mapping[RowId, Image | None]
    ) -> dict[GroupKey, list[Piece]]:
        """See :class:`BatchLayout`.

        Pieces out of a group that lives on are copies, not views: a view would make the next write
        to that group copy it whole.
        """
        ending = {change.group for change in relayout.changes if change.fresh}
        ending.update(relayout.dropped)
        moved: dict[GroupKey, list[Piece]] = {}
        for change in relayout.changes:
            pieces = (self._piece(change.group, c, ending, joining) for c in change.copies)
            moved[change.group] = [piece for piece in pieces if piece is not None]
        return moved

    def _piece(
        self,
        group: GroupKey,
        copy: SlotCopy,
        ending: set[GroupKey],
        joining: Mapping[RowId, Image | None],
    ) -> Piece | None:
        if copy.tokens == 0:
            return None
        if copy.source is None:
            image = joining[copy.row]
            if image is None:
                return None
            return Piece(copy.slot, self._recoded(image, group), False)
        source, first = copy.source.group, copy.source.slot
        depth = min(copy.tokens, self.depth(source.capacity))
        part = slice(first, first + copy.count), slice(None), slice(0, depth)
        encoded = self.codec_of(source) is not PLAIN
        image = Image(tuple(x[part] for x in self.buffers[source]), encoded)
        stored = self._recoded(image, group)
        if source in ending:
            return Piece(copy.slot, stored, False)
        return Piece(copy.slot, tuple(mx.contiguous(x) for x in stored), True)

    def _recoded(self, image: Image, group: GroupKey) -> Stored:
        """An image in the form of a group: encoding is for good, nothing is ever decoded."""
        codec = self.codec_of(group)
        if codec is PLAIN or image.encoded:
            return image.stored
        return codec.encode(*image.stored)

    def apply(self, relayout: Relayout, moved: Mapping[GroupKey, list[Piece]]) -> None:
        """See :class:`BatchLayout`."""
        for change in relayout.changes:
            self._change(change, moved[change.group])
        for group in relayout.dropped:
            self.buffers.pop(group, None)

    def _change(self, change: GroupChange, pieces: list[Piece]) -> None:
        group = change.group
        if change.fresh:
            self.buffers.pop(group, None)
        if group not in self.buffers:
            if not pieces:
                return
            self.buffers[group] = self._zeros(group, change.slots, pieces[0].stored)
        for index, buffer in enumerate(self.buffers[group]):
            for slot in change.wipe:
                buffer[slot] = mx.zeros(buffer.shape[1:], buffer.dtype)
            for piece in pieces:
                part = piece.stored[index]
                buffer[piece.slot : piece.slot + part.shape[0], :, : part.shape[2]] = part

    def _zeros(self, group: GroupKey, slots: int, like: Stored) -> Stored:
        depth = self.depth(group.capacity)
        return tuple(mx.zeros((slots, x.shape[1], depth, x.shape[3]), x.dtype) for x in like)

    def cache(self, step: Step) -> RowsCache:
        """See :class:`BatchLayout`."""
        return RowsCache(self, step)

    def commit(self, counts: Sequence[int]) -> None:
        """Nothing to do: what lies behind a row's length is overwritten."""

    def write(self, step: Step, keys: mx.array, values: mx.array) -> None:
        """Put a step's new tokens ([B, heads, columns, width]) behind each row's last."""
        for segment in step.segments:
            share = (_share(segment, x) for x in (keys, values))
            new = self.codec_of(segment.group).encode(*share)
            buffers = self.buffers.get(segment.group)
            if buffers is None:
                buffers = self._zeros(segment.group, segment.slots, new)
            where = step.positions(segment, self.ring)
            self.buffers[segment.group] = _scatter(buffers, segment, where, new)

    def attend(
        self,
        step: Step,
        queries: mx.array,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
        softcap: float | None = None,
    ) -> mx.array:
        """Attention of all rows, once per group; shapes as in ``attention.AttentionView``."""
        window = min((w for w in (window, self.window) if w is not None), default=None)
        outputs: list[mx.array] = []
        for segment in step.segments:
            stored = self.buffers[segment.group]
            depth, rows = stored[0].shape[2], len(segment.lengths)
            reach = Reach(step, segment, step.used(segment, depth), self.ring, window)
            if (rows, reach.used) != (stored[0].shape[0], depth):
                stored = tuple(x[:rows, :, : reach.used] for x in stored)
            codec, share = self.codec_of(segment.group), _share(segment, queries)
            if softcap is None:
                outputs.append(codec.attend(share, stored, scale, reach, sinks))
            elif codec is PLAIN:
                keys, values = stored
                mask = reach.mask(share.shape[1] // keys.shape[1])
                outputs.append(attend_group_capped(share, keys, values, scale, softcap, mask))
            else:
                raise TypeError("a softcap on encoded keys and values")
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def _share(segment: Segment, x: mx.array) -> mx.array:
    """A group's rows of what has all rows."""
    return x if len(segment.lengths) == x.shape[0] else x[segment.start : segment.stop]


def _scatter(buffers: Stored, segment: Segment, where: mx.array, new: Stored) -> Stored:
    spare = segment.slots - len(segment.lengths)
    if spare:
        new = tuple(mx.pad(x, [(0, spare), (0, 0), (0, 0), (0, 0)]) for x in new)
    pairs = zip(buffers, new, strict=True)
    return tuple(mx.put_along_axis(buffer, where, x, axis=2) for buffer, x in pairs)


class RowsCache(AttentionView):
    """One layer's cache object for one forward pass of all rows, in mlx-lm's terms.

    It is also the opaque view that it returns for keys and values.
    """

    def __init__(self, layout: Attending, step: Step) -> None:
        self._layout = layout
        self._step = step
        self.offset = step.offsets

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[RowsCache, RowsCache]:
        """Take the step's new keys and values, [B, heads, columns, width]."""
        self._layout.write(self._step, keys, values)
        return self, self

    def attend(
        self,
        queries: mx.array,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
        softcap: float | None = None,
    ) -> mx.array:
        """See ``attention.AttentionView``."""
        return self._layout.attend(self._step, queries, scale, window, sinks, softcap)
