"""Buffers of one layer's keys and values, by capacity group: plain and sliding.

Each layer owns one :class:`LayerBuffers`; all layers of a step share one :class:`Step`, which has
the index and mask arrays, made once. Runs on the device thread. It knows slots and lengths (from
``groups``), not what the rows are for, models or requests.

A sliding layer's buffer is a ring: position *p* lies in slot *p* mod ring, and which position a
slot holds follows from the row's length alone. The ring is longer than the window by ``SLACK``, so
that a step of several columns does not overwrite what its first column sees, and so that up to
``SLACK`` tokens can be taken back after the ring has wrapped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..device import RowId
from .attention import RaggedMask, attend_group, attend_group_folded
from .groups import GroupChange, Place, Relayout, Segment, SlotCopy

SLACK = 16


class Step:
    """What all layers share in one forward pass: offsets, write positions, masks.

    ``offsets`` is int32 [B]: tokens in each row before the step. Never change it in place: every
    layer holds the same array.
    """

    def __init__(self, segments: tuple[Segment, ...], columns: int) -> None:
        self.segments = segments
        self.columns = columns
        lengths = [length for segment in segments for length in segment.lengths]
        self.offsets = mx.array(lengths, dtype=mx.int32)
        self.on_cpu = mx.default_device() == mx.cpu
        self._positions: dict[tuple[int, int | None], mx.array] = {}
        self._masks: dict[tuple[int, int | None, int | None, int], mx.array | None] = {}

    def positions(self, segment: Segment, ring: int | None) -> mx.array:
        """int32 [slots, 1, columns, 1]: where each slot's new tokens go; spare slots write to 0."""
        key = (segment.start, ring)
        if key not in self._positions:
            first = np.zeros((segment.slots, 1), np.int32)
            first[: len(segment.lengths), 0] = segment.lengths
            where = first + np.arange(self.columns, dtype=np.int32)
            where = where if ring is None else where % ring
            self._positions[key] = mx.array(where[:, None, :, None])
        return self._positions[key]

    def used(self, segment: Segment, depth: int) -> int:
        """Tokens of a buffer of ``depth`` that attention reads.

        On a GPU all of it: kernels and plans are kept by shape. On the CPU no more than is filled.
        """
        return min(depth, max(segment.lengths) + self.columns) if self.on_cpu else depth

    def mask(
        self, segment: Segment, used: int, ring: int | None, window: int | None, repeats: int
    ) -> mx.array | None:
        """bool [n, 1, columns · repeats, used]; None where every row may see all that is read."""
        key = (segment.start, ring, window, repeats)
        if key not in self._masks:
            needed = self._needs_mask(segment, used, window)
            mask = self._make_mask(segment, used, ring, window) if needed else None
            if mask is not None and self.columns > 1 and repeats > 1:
                mask = mx.tile(mask, (1, 1, repeats, 1))
            self._masks[key] = mask
        return self._masks[key]

    def _needs_mask(self, segment: Segment, used: int, window: int | None) -> bool:
        if self.columns > 1 or min(segment.lengths) + 1 < used:
            return True
        return max(segment.lengths) + 1 > min(used, window or used)

    def _make_mask(
        self, segment: Segment, used: int, ring: int | None, window: int | None
    ) -> mx.array:
        first = self.offsets[segment.start : segment.stop].reshape(-1, 1, 1, 1)
        query = first + mx.arange(self.columns, dtype=mx.int32).reshape(-1, 1)
        held = mx.arange(used, dtype=mx.int32)
        if ring is not None:
            last = first + (self.columns - 1)
            held = last - (last + ring - held) % ring
        valid = (held <= query) & (held >= 0)
        return valid if window is None else valid & (held > query - window)


@dataclass(frozen=True, slots=True)
class Image:
    """One row's keys and values in a layer, [1, heads, tokens, width], in slot order."""

    keys: mx.array
    values: mx.array

    def first(self, tokens: int) -> Image:
        """Its first ``tokens`` slots' worth, a view."""
        return Image(self.keys[..., :tokens, :], self.values[..., :tokens, :])


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes on their way to slots ``[slot, slot + count)``."""

    slot: int
    keys: mx.array
    values: mx.array
    detached: bool


class LayerBuffers:
    """One layer's K and V of all groups: [slots, heads, depth, width] each, by capacity.

    ``window`` is None for a plain layer, else how many tokens a query sees, its own included.
    Buffers come into being with the first bytes, as only these tell their shape and type.
    """

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.ring = None if window is None else window + SLACK
        self.keys: dict[int, mx.array] = {}
        self.values: dict[int, mx.array] = {}

    @property
    def arrays(self) -> list[mx.array]:
        """Every buffer."""
        return [*self.keys.values(), *self.values.values()]

    def depth(self, capacity: int) -> int:
        """Slots' length in the group of this capacity, in tokens."""
        return capacity if self.ring is None else min(capacity, self.ring)

    def image(self, place: Place) -> Image | None:
        """A view of a slot, the whole of it; None if nothing was ever written."""
        if place.capacity not in self.keys:
            return None
        slot = slice(place.slot, place.slot + 1)
        return Image(self.keys[place.capacity][slot], self.values[place.capacity][slot])

    def gather(
        self, relayout: Relayout, joining: Mapping[RowId, Image | None]
    ) -> dict[int, list[Piece]]:
        """What the changes move, by capacity, read before any of them.

        Pieces out of a group that lives on are copies, not views: a view would make the next write
        to that group copy it whole.
        """
        ending = {change.capacity for change in relayout.changes if change.fresh}
        ending.update(relayout.dropped)
        moved: dict[int, list[Piece]] = {}
        for change in relayout.changes:
            pieces = (self._piece(copy, ending, joining) for copy in change.copies)
            moved[change.capacity] = [piece for piece in pieces if piece is not None]
        return moved

    def _piece(
        self, copy: SlotCopy, ending: set[int], joining: Mapping[RowId, Image | None]
    ) -> Piece | None:
        if copy.tokens == 0:
            return None
        if copy.source is None:
            image = joining[copy.row]
            return None if image is None else Piece(copy.slot, image.keys, image.values, False)
        capacity, first = copy.source.capacity, copy.source.slot
        part = slice(first, first + copy.count), slice(None), slice(0, self._depth_of(copy))
        keys, values = self.keys[capacity][part], self.values[capacity][part]
        if capacity in ending:
            return Piece(copy.slot, keys, values, False)
        return Piece(copy.slot, mx.contiguous(keys), mx.contiguous(values), True)

    def _depth_of(self, copy: SlotCopy) -> int:
        assert copy.source is not None
        return min(copy.tokens, self.depth(copy.source.capacity))

    def apply(self, relayout: Relayout, moved: Mapping[int, list[Piece]]) -> None:
        """Carry the changes out."""
        for change in relayout.changes:
            pieces, depth = moved[change.capacity], self.depth(change.capacity)
            _change(self.keys, change, depth, [(p.slot, p.keys) for p in pieces])
            _change(self.values, change, depth, [(p.slot, p.values) for p in pieces])
        for capacity in relayout.dropped:
            self.keys.pop(capacity, None)
            self.values.pop(capacity, None)

    def write(self, step: Step, keys: mx.array, values: mx.array) -> None:
        """Put a step's new tokens ([B, heads, columns, width]) behind each row's last."""
        for segment in step.segments:
            where = step.positions(segment, self.ring)
            depth = self.depth(segment.capacity)
            _scatter(self.keys, segment, depth, where, keys)
            _scatter(self.values, segment, depth, where, values)

    def attend(
        self,
        step: Step,
        queries: mx.array,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attention of all rows, once per group; shapes as in ``attention.AttentionView``."""
        window = min((w for w in (window, self.window) if w is not None), default=None)
        outputs = [
            self._attend_segment(step, segment, queries, scale, window, sinks)
            for segment in step.segments
        ]
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def _attend_segment(
        self,
        step: Step,
        segment: Segment,
        queries: mx.array,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
    ) -> mx.array:
        keys, values = self.keys[segment.capacity], self.values[segment.capacity]
        rows, used = len(segment.lengths), step.used(segment, keys.shape[2])
        if (rows, used) != (keys.shape[0], keys.shape[2]):
            keys, values = keys[:rows, :, :used], values[:rows, :, :used]
        if rows != queries.shape[0]:
            queries = queries[segment.start : segment.stop]
        if step.on_cpu and sinks is None and queries.dtype == mx.float32:
            repeats = queries.shape[1] // keys.shape[1]
            mask = step.mask(segment, used, self.ring, window, repeats)
            return attend_group_folded(queries, keys, values, scale, mask)
        mask = step.mask(segment, used, self.ring, window, 1)
        return attend_group(queries, keys, values, scale, mask, sinks)


def _change(
    buffers: dict[int, mx.array],
    change: GroupChange,
    depth: int,
    parts: list[tuple[int, mx.array]],
) -> None:
    if change.fresh:
        buffers.pop(change.capacity, None)
    buffer = buffers.get(change.capacity)
    if buffer is None:
        if not parts:
            return
        like = parts[0][1]
        buffer = mx.zeros((change.slots, like.shape[1], depth, like.shape[3]), like.dtype)
        buffers[change.capacity] = buffer
    for slot in change.wipe:
        buffer[slot] = mx.zeros(buffer.shape[1:], buffer.dtype)
    for slot, part in parts:
        buffer[slot : slot + part.shape[0], :, : part.shape[2]] = part


def _scatter(
    buffers: dict[int, mx.array], segment: Segment, depth: int, where: mx.array, new: mx.array
) -> None:
    if len(segment.lengths) != new.shape[0]:
        new = new[segment.start : segment.stop]
    spare = segment.slots - len(segment.lengths)
    if spare:
        new = mx.pad(new, [(0, spare), (0, 0), (0, 0), (0, 0)])
    buffer = buffers.get(segment.capacity)
    if buffer is None:
        buffer = mx.zeros((segment.slots, new.shape[1], depth, new.shape[3]), new.dtype)
    buffers[segment.capacity] = mx.put_along_axis(buffer, where, new, axis=2)


class RowsCache:
    """One layer's cache object for one forward pass of all rows, in mlx-lm's terms.

    It is also the opaque view that it returns for keys and values (``attention.AttentionView``).
    """

    def __init__(self, buffers: LayerBuffers, step: Step) -> None:
        self._buffers = buffers
        self._step = step
        self.offset = step.offsets

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[RowsCache, RowsCache]:
        """Take the step's new keys and values, [B, heads, columns, width]."""
        self._buffers.write(self._step, keys, values)
        return self, self

    def keys_and_values(self) -> tuple[RowsCache, RowsCache]:
        """For layers that share another's keys and values."""
        return self, self

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> RaggedMask:
        """An opaque word for :func:`attention.scaled_dot_product_attention`."""
        return RaggedMask(window_size)

    def attend(
        self, queries: mx.array, scale: float, window: int | None, sinks: mx.array | None
    ) -> mx.array:
        """See ``attention.AttentionView``."""
        return self._buffers.attend(self._step, queries, scale, window, sinks)
