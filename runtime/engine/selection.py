"""The largest of a vocabulary: what filters and log-probabilities ask for.

On the device thread. Two kits with the same methods, one for arrays that stay on a GPU and one for
values that a CPU has already computed: there MLX's sort, partition and exponential are scalar code,
20 times slower than NumPy's. A filter needs one threshold, the largest value such that all values
from it up weigh enough. On a GPU one sort gives it in a few launches, which are what counts there;
the few best tokens come without a sort of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

LIKELY = 1024
"""Values that nearly always hold all that a top-p keeps."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A threshold on a scale that has the order of the values it was made for.

    ``scale`` is [N, V], ``at`` [N, 1]; both may be transformed values.
    """

    scale: Any
    at: Any

    @property
    def kept(self) -> Any:
        """bool [N, V]: at the threshold or above."""
        return self.scale >= self.at

    @property
    def above(self) -> Any:
        """bool [N, V]: strictly above the threshold."""
        return self.scale > self.at

    @property
    def tied(self) -> Any:
        """bool [N, V]: equal to the threshold."""
        return self.scale == self.at


class Kit(Protocol):
    """Selection on one kind of arrays.

    Attributes:
        xp: the module that made them.
        coarse: launching an operation costs more than what it computes for rows that need none of
            it: rows are to be drawn in few groups.
    """

    xp: Any
    coarse: bool

    def cut_by_mass(self, x: Any, p: Any, limit: Any) -> Cut:
        """The largest threshold from which up the ``p`` add up to ``limit``.

        Args:
            x: float32 [N, V].
            p: float32 [N, V], its exponentials.
            limit: [N, 1], at most the sum of all ``p``.
        """
        ...

    def cut_by_count(self, x: Any, count: Any) -> Cut:
        """The threshold that is the ``count``-th largest of ``x``; ``count`` is [N, 1]."""
        ...

    def best(self, x: Any, count: int) -> tuple[Any, Any]:
        """The ``count`` ≤ V largest of each row of ``x`` and their indices, [N, count] each.

        Of equals the lower index comes first.
        """
        ...


class DeviceKit:
    """For lazy arrays on a GPU."""

    xp: Any = mx
    coarse = True

    def cut_by_mass(self, x: mx.array, p: mx.array, limit: mx.array) -> Cut:
        ranked = mx.sort(x, axis=-1)
        reached = mx.cumsum(mx.exp(ranked), axis=-1, reverse=True) >= limit
        last = mx.maximum(mx.sum(reached, axis=-1, keepdims=True) - 1, 0)
        return Cut(x, mx.take_along_axis(ranked, last, axis=-1))

    def cut_by_count(self, x: mx.array, count: mx.array) -> Cut:
        ranked = mx.sort(x, axis=-1)
        return Cut(x, mx.take_along_axis(ranked, x.shape[-1] - count, axis=-1))

    def best(self, x: mx.array, count: int) -> tuple[mx.array, mx.array]:
        """They stand in those ``count`` blocks that have the largest maxima: sort only those."""
        rows, size = x.shape
        block = _block_size(size, count)
        blocks = _padded(x, block).reshape(rows, -1, block)
        leaders = mx.argsort(-mx.max(blocks, axis=-1), axis=-1)[:, :count]
        # In the order of the vocabulary again: sorting is stable, so the lower index comes first.
        leaders = mx.sort(leaders, axis=-1)[:, :, None]
        values = mx.take_along_axis(blocks, leaders, axis=1).reshape(rows, -1)
        ids = (leaders * block + mx.arange(block, dtype=leaders.dtype)).reshape(rows, -1)
        order = mx.argsort(-values, axis=-1)[:, :count]
        found = mx.minimum(mx.take_along_axis(ids, order, axis=-1), size - 1)
        return mx.take_along_axis(values, order, axis=-1), found


class HostKit:
    """For NumPy arrays."""

    xp: Any = np
    coarse = False

    def cut_by_mass(self, x: Any, p: Any, limit: Any) -> Cut:
        likely = min(LIKELY, p.shape[-1])
        at, found = _by_mass(np.partition(p, -likely, axis=-1)[:, -likely:], limit)
        rest = np.flatnonzero(~found)
        if rest.size:
            at[rest], _ = _by_mass(p[rest], limit[rest])
        return Cut(p, at)

    def cut_by_count(self, x: Any, count: Any) -> Cut:
        rows = zip(x, count[:, 0], strict=True)
        return Cut(x, np.stack([np.partition(row, -n)[-n, None] for row, n in rows]))

    def best(self, x: Any, count: int) -> tuple[Any, Any]:
        least = np.partition(x, -count, axis=-1)[:, -count]
        ids = np.stack([_best_of(row, at, count) for row, at in zip(x, least, strict=True)])
        return np.take_along_axis(x, ids, axis=-1), ids


def _by_mass(p: Any, limit: Any) -> tuple[Any, Any]:
    """Thresholds [N, 1] among these ``p`` and, [N], whether they add up to the limit at all."""
    ranked = np.sort(p, axis=-1)[:, ::-1]
    reached = np.cumsum(ranked, axis=-1, dtype=np.float64) >= limit
    first = np.where(reached[:, -1], np.argmax(reached, axis=-1), p.shape[-1] - 1)
    return np.take_along_axis(ranked, first[:, None], axis=-1), reached[:, -1]


def _best_of(row: Any, least: Any, count: int) -> Any:
    ids = np.flatnonzero(row >= least)
    if ids.size < count:
        # Not a number anywhere: any ids do, the row is going to fail.
        return np.arange(count)
    return ids[np.argsort(-row[ids], kind="stable")[:count]]


def _block_size(size: int, count: int) -> int:
    """The power of two that leaves the fewest values to sort; 1 = sort them all."""
    sizes = [b for b in (1, 8, 16, 32, 64, 128) if size // b >= count]
    return min(sizes, key=lambda b: size if b == 1 else size // b + count * b)


def _padded(values: mx.array, multiple: int) -> mx.array:
    missing = -values.shape[-1] % multiple
    if not missing:
        return values
    return mx.pad(values, [(0, 0), (0, missing)], constant_values=-mx.inf)
