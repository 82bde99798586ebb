"""Keys and values of one layer by capacity group.

:class:`KVLayout` keeps them, plain or sliding, in the bytes of a codec once a row is encoded. Runs
on the device thread. It knows slots and lengths (from ``groups``), not what the rows are for,
models or requests.

In a replayed step a plain layer's new tokens are written by the attention kernel itself, in place
and unknown to MLX (``kernels``): whoever reads the buffers beside it must have begun before.

A sliding layer's buffer is a ring: position *p* lies in slot *p* mod ring, and which position a
slot holds follows from the row's length alone. The ring is longer than the window by ``SLACK``, so
that a step of several columns does not overwrite what its first column sees, and so that up to
``SLACK`` tokens can be taken back after the ring has wrapped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from ..plans import RowId
from . import kernels
from .attention import AttentionView, attend_group_capped
from .codecs import PLAIN, Codec, Image, Stored
from .groups import GroupChange, GroupKey, Place, Relayout, Segment, SlotCopy
from .layout_protocols import Attending, Piece
from .lazy import copied
from .lone import give_cache, take_image
from .steps import Reach, Step

SLACK = 16


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
        self._beside: dict[GroupKey, Stored] = {}
        self._put: set[GroupKey] = set()

    @property
    def arrays(self) -> list[mx.array]:
        """Every buffer, in the order of the groups."""
        return [array for group in sorted(self.buffers) for array in self.buffers[group]]

    def put_arrays(self, arrays: Sequence[mx.array]) -> None:
        """Replace every buffer by one of the same shape, in the order of :attr:`arrays`."""
        self._beside.clear()
        self._put.clear()
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
        return Piece(copy.slot, tuple(copied(x) for x in stored), True)

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
        """Put a step's new tokens ([B, heads, columns, width]) behind each row's last.

        In place they stay beside the buffers until the step has attended to them.
        """
        for segment in step.segments:
            share = (_share(segment, x) for x in (keys, values))
            new = self.codec_of(segment.group).encode(*share)
            if step.in_place and self.ring is None and self.codec_of(segment.group) is PLAIN:
                self._beside[segment.group] = new
            else:
                self._put_down(step, segment, new)

    def finish(self, step: Step) -> None:
        """Write what no kernel has: the end of a traced step."""
        for segment in step.segments:
            new = self._beside.pop(segment.group, None)
            if new is not None and segment.group not in self._put:
                self._put_down(step, segment, new)
        self._put.clear()

    def _put_down(self, step: Step, segment: Segment, new: Stored) -> Stored:
        buffers = self.buffers.get(segment.group)
        if buffers is None:
            buffers = self._zeros(segment.group, segment.slots, new)
        where = step.positions(segment, self.ring)
        self.buffers[segment.group] = written = _scatter(buffers, segment, where, new)
        return written

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
        outputs = [
            self._attend_to(segment, step, _share(segment, queries), scale, window, sinks, softcap)
            for segment in step.segments
        ]
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def _attend_to(
        self,
        segment: Segment,
        step: Step,
        queries: mx.array,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
        softcap: float | None,
    ) -> mx.array:
        stored = self.buffers[segment.group]
        depth, rows = stored[0].shape[2], len(segment.lengths)
        reach = Reach(step, segment, step.used(segment, depth), self.ring, window)
        if (beside := self._beside.get(segment.group)) is not None:
            (keys, values), own = stored, (beside[0], beside[1])
            if sinks is None and softcap is None and kernels.fits(queries, keys, values, own):
                # Layers that share these take them from beside as well, and put them again.
                self._put.add(segment.group)
                return kernels.ragged_attention(
                    queries, keys, values, reach.offsets(), scale, None, window, own
                )
            stored = self._put_down(step, segment, self._beside.pop(segment.group))
        if (rows, reach.used) != (stored[0].shape[0], depth):
            stored = tuple(x[:rows, :, : reach.used] for x in stored)
        codec = self.codec_of(segment.group)
        if softcap is None:
            return codec.attend(queries, stored, scale, reach, sinks)
        if codec is not PLAIN:
            raise TypeError("a softcap on encoded keys and values")
        keys, values = stored
        mask = reach.mask(queries.shape[1] // keys.shape[1])
        return attend_group_capped(queries, keys, values, scale, softcap, mask)


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
