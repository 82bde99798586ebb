"""Several lone rows in one prefill pass, right-padded.

The linear layers run over all rows at once; attention runs row by row on each row's own mlx-lm
``KVCache``, so that no row's state ever holds padding. Runs on the device thread, for one forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache

from .attention import RaggedMask, attend_group


class RaggedPrefill:
    """The cache objects of one forward over rows with ``counts`` new tokens each.

    ``rows_caches`` are the rows' own caches, a list of layers each, and grow by ``counts``. Tokens
    are [B, max(counts)], padded on the right with any valid id; outputs behind a row's count mean
    nothing. Raises TypeError for anything but plain ``KVCache`` rows.
    """

    def __init__(self, rows_caches: Sequence[Sequence[Any]], counts: Sequence[int]) -> None:
        if any(type(cache) is not KVCache for caches in rows_caches for cache in caches):
            raise TypeError("only rows of plain caches are prefilled together")
        if len(rows_caches) != len(counts) or min(counts) < 1:
            raise ValueError(f"{len(rows_caches)} rows, counts {counts}")
        offsets = mx.array([caches[0].offset for caches in rows_caches], dtype=mx.int32)
        layers = zip(*rows_caches, strict=True)
        self.caches: list[Any] = [PrefillCache(layer, tuple(counts), offsets) for layer in layers]


class PrefillCache:
    """One layer of all rows, and the opaque view of their keys and values."""

    def __init__(
        self, caches: Sequence[KVCache], counts: tuple[int, ...], offsets: mx.array
    ) -> None:
        self.offset = offsets
        self._caches = caches
        self._counts = counts
        self._held: list[tuple[mx.array, mx.array]] = []

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[PrefillCache, PrefillCache]:
        """Give each row its share of new keys and values, [B, heads, max(counts), width]."""
        self._held = [
            cache.update_and_fetch(keys[i : i + 1, :, :count], values[i : i + 1, :, :count])
            for i, (cache, count) in enumerate(zip(self._caches, self._counts, strict=True))
        ]
        return self, self

    def keys_and_values(self) -> tuple[PrefillCache, PrefillCache]:
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
        """See ``attention.AttentionView``; what lies behind a row's count is zero."""
        outputs = [
            self._attend_row(queries[i : i + 1, :, :count], i, scale, window, sinks)
            for i, count in enumerate(self._counts)
        ]
        return mx.concatenate([_padded(output, queries.shape[2]) for output in outputs])

    def _attend_row(
        self, queries: mx.array, row: int, scale: float, window: int | None, sinks: mx.array | None
    ) -> mx.array:
        keys, values = self._held[row]
        count, before = queries.shape[2], keys.shape[2] - queries.shape[2]
        mask = "causal" if count > 1 else None
        if window is not None and before + count > window:
            mask = create_causal_mask(count, before, window_size=window)
        return attend_group(queries, keys, values, scale, mask, sinks)


def _padded(output: mx.array, columns: int) -> mx.array:
    missing = columns - output.shape[2]
    return mx.pad(output, [(0, 0), (0, 0), (0, missing), (0, 0)]) if missing else output
