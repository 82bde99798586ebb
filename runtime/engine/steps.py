"""What all layers of one batched forward share: offsets, write positions and masks, made once.

A :class:`Step` lives from the beginning of a forward to its commit, on the device thread. It knows
groups, slots and lengths (from ``groups``), not what the rows are for, codecs or models.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from .groups import Segment


class Step:
    """What all layers share in one forward pass: offsets, write positions, masks.

    ``offsets`` is int32 [B]: tokens in each row before the step. Never change it in place: every
    layer holds the same array. ``counts`` says how many of the columns each row will keep, where
    that is known beforehand and not all.
    """

    in_place = False
    """Whether kernels may put new tokens into their slots without MLX's knowing of it."""

    def __init__(
        self,
        segments: tuple[Segment, ...],
        columns: int,
        counts: tuple[int, ...] | None = None,
    ) -> None:
        self.segments = segments
        self.columns = columns
        self.counts = counts
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


class TracedStep(Step):
    """A step of one column that is traced once and replayed with other ``offsets`` [slots].

    Every slot of its segments counts as a row, and nothing unfinished reads any of them. Nothing
    may depend on the lengths, which the trace would keep for ever: positions and masks are computed
    from the offsets, on the device.
    """

    def __init__(
        self, segments: tuple[Segment, ...], offsets: mx.array, *, in_place: bool = False
    ) -> None:
        super().__init__(segments, 1)
        self.in_place = in_place
        self.offsets = offsets
        self.on_cpu = False

    def positions(self, segment: Segment, ring: int | None) -> mx.array:
        """See :class:`Step`."""
        key = (segment.start, ring)
        if key not in self._positions:
            where = self.offsets[segment.start : segment.stop].reshape(-1, 1, 1, 1)
            self._positions[key] = where if ring is None else where % ring
        return self._positions[key]

    def _needs_mask(self, segment: Segment, used: int, window: int | None) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Reach:
    """What one group's queries may see of its buffers: ``used`` slots' worth, masked.

    ``ring`` and ``window`` are None for a plain layer. ``repeats`` is for kernels that fold the
    heads of a key head into rows.
    """

    step: Step
    segment: Segment
    used: int
    ring: int | None
    window: int | None

    def mask(self, repeats: int = 1) -> mx.array | None:
        """bool [n, 1, columns · repeats, used]; None where every row may see all that is read."""
        return self.step.mask(self.segment, self.used, self.ring, self.window, repeats)

    def offsets(self) -> mx.array:
        """int32 [n]: where each row's first new token stands."""
        if len(self.step.segments) == 1:
            return self.step.offsets
        return self.step.offsets[self.segment.start : self.segment.stop]
