"""How a layer's keys and values are stored: codecs between what a model makes and what is kept.

A codec turns keys and values into a tuple of arrays, attends to such a tuple, and knows which of
mlx-lm's single-row caches has the same form. All arrays are [rows, heads, tokens, width]: groups
lie along the last axis, so cutting and moving tokens is safe for the bytes. Codecs hold no state.
Runs on the device thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from . import kernels
from .attention import attend_group, attend_group_folded, packed_products, unpacked
from .lazy import copied
from .rings import QuantizedRing, to_ring
from .steps import Reach

Stored: TypeAlias = tuple[mx.array, ...]


@dataclass(frozen=True, slots=True)
class Image:
    """One row's state in a layer, in slot order: [1, heads, tokens, width] each.

    ``encoded`` says that it is in the layer's codec.
    """

    stored: Stored
    encoded: bool = False

    def first(self, tokens: int) -> Image:
        """Its first ``tokens`` slots' worth, a view."""
        return Image(tuple(x[..., :tokens, :] for x in self.stored), self.encoded)

    def detached(self) -> Image:
        """The same in memory of its own."""
        return Image(tuple(copied(x) for x in self.stored), self.encoded)


class Codec(Protocol):
    """One way to store keys and values."""

    @property
    def name(self) -> str:
        """What it is called, for people."""
        ...

    @property
    def unpacks(self) -> bool:
        """Whether :meth:`attend` makes plain keys and values of what is stored."""
        ...

    def encode(self, keys: mx.array, values: mx.array) -> Stored:
        """What is kept of keys and values [B, heads, tokens, width]."""
        ...

    def attend(
        self,
        queries: mx.array,
        stored: Stored,
        scale: float,
        reach: Reach,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attention of one group: queries [n, H, L, D], ``stored`` cut to its rows and reach."""
        ...

    def is_held_by(self, cache: Any) -> bool:
        """Whether a single-row cache keeps its tokens in this form."""
        ...

    def stored_in(self, cache: Any) -> Stored | None:
        """The arrays of such a cache, in its own order of tokens; None while it is empty."""
        ...

    def make_cache(self, window: int | None) -> Any:
        """An empty single-row cache of this form; with ``window`` one that slides."""
        ...

    def fill(self, cache: Any, stored: Stored, length: int) -> None:
        """Give an empty cache its arrays; ``length`` counts all tokens, forgotten ones too."""
        ...

    def convert(self, cache: Any) -> Any:
        """A plain single-row cache in this form (lazy); what was plain is not held any more."""
        ...


class PlainCodec:
    """Keys and values as the model makes them."""

    name = "plain"
    unpacks = False

    def encode(self, keys: mx.array, values: mx.array) -> Stored:
        """See :class:`Codec`."""
        return keys, values

    def attend(
        self,
        queries: mx.array,
        stored: Stored,
        scale: float,
        reach: Reach,
        sinks: mx.array | None,
    ) -> mx.array:
        """See :class:`Codec`."""
        keys, values = stored
        if reach.step.on_cpu and sinks is None and queries.dtype == mx.float32:
            repeats = queries.shape[1] // keys.shape[1]
            return attend_group_folded(queries, keys, values, scale, reach.mask(repeats))
        if sinks is None and kernels.fits(queries, keys, values):
            return kernels.ragged_attention(
                queries, keys, values, reach.offsets(), scale, reach.ring, reach.window
            )
        return attend_group(queries, keys, values, scale, reach.mask(), sinks)

    def is_held_by(self, cache: Any) -> bool:
        """See :class:`Codec`."""
        return type(cache) in (KVCache, RotatingKVCache)

    def stored_in(self, cache: Any) -> Stored | None:
        """See :class:`Codec`."""
        return None if cache.keys is None else (cache.keys, cache.values)

    def make_cache(self, window: int | None) -> Any:
        """See :class:`Codec`."""
        return KVCache() if window is None else RotatingKVCache(max_size=window)

    def fill(self, cache: Any, stored: Stored, length: int) -> None:
        """See :class:`Codec`."""
        cache.keys, cache.values = stored
        cache.offset = length
        if isinstance(cache, RotatingKVCache):
            cache._idx = stored[0].shape[2]

    def convert(self, cache: Any) -> Any:
        """See :class:`Codec`."""
        return cache


class AffineCodec:
    """MLX's affine quantisation of 4 or 8 bits, with mlx-lm's attention over packed arrays.

    Where these cannot be multiplied (CUDA) they are unpacked for each step.
    """

    def __init__(self, bits: int, group_size: int = 64) -> None:
        self.bits = bits
        self.group_size = group_size

    @property
    def name(self) -> str:
        """See :class:`Codec`."""
        return f"affine {self.bits}-bit, groups of {self.group_size}"

    @property
    def unpacks(self) -> bool:
        """See :class:`Codec`."""
        return not packed_products()

    def encode(self, keys: mx.array, values: mx.array) -> Stored:
        """Packed values, scales and biases of the keys, then those of the values."""
        return (*self._quantize(keys), *self._quantize(values))

    def attend(
        self,
        queries: mx.array,
        stored: Stored,
        scale: float,
        reach: Reach,
        sinks: mx.array | None,
    ) -> mx.array:
        """The operations of mlx-lm's quantised attention, in its order."""
        if sinks is not None:
            raise TypeError("attention sinks with a quantised KV cache")
        if not packed_products():
            keys, values = self._unpacked(stored[:3]), self._unpacked(stored[3:])
            return PLAIN.attend(queries, (keys, values), scale, reach, None)
        n, heads, columns, width = queries.shape
        kv_heads = stored[0].shape[1]
        grouped = (queries * scale).reshape(n, kv_heads, heads // kv_heads, columns, width)
        packed = ([mx.expand_dims(x, 2) for x in part] for part in (stored[:3], stored[3:]))
        packed_keys, packed_values = packed
        scores = self._matmul(grouped, packed_keys, transpose=True)
        if (mask := reach.mask()) is not None:
            scores = mx.where(mask[:, :, None], scores, mx.finfo(scores.dtype).min)
        weights = mx.softmax(scores, axis=-1, precise=True)
        output = self._matmul(weights, packed_values, transpose=False)
        return output.reshape(n, heads, columns, -1)

    def is_held_by(self, cache: Any) -> bool:
        """See :class:`Codec`."""
        if type(cache) not in (QuantizedKVCache, QuantizedRing):
            return False
        return bool((cache.bits, cache.group_size) == (self.bits, self.group_size))

    def stored_in(self, cache: Any) -> Stored | None:
        """See :class:`Codec`."""
        return None if cache.keys is None else (*cache.keys, *cache.values)

    def make_cache(self, window: int | None) -> Any:
        """See :class:`Codec`."""
        if window is not None:
            return QuantizedRing(window, self.group_size, self.bits)
        return QuantizedKVCache(group_size=self.group_size, bits=self.bits)

    def fill(self, cache: Any, stored: Stored, length: int) -> None:
        """See :class:`Codec`."""
        if isinstance(cache, QuantizedRing):
            cache.fill(stored, length)
            return
        cache.keys, cache.values = list(stored[:3]), list(stored[3:])
        cache.offset = length

    def convert(self, cache: Any) -> Any:
        """See :class:`Codec`; a plain layer as mlx-lm does it."""
        if isinstance(cache, RotatingKVCache):
            return to_ring(cache, self.group_size, self.bits)
        return cache.to_quantized(group_size=self.group_size, bits=self.bits)

    def _matmul(self, x: mx.array, packed: list[mx.array], *, transpose: bool) -> mx.array:
        weights, scales, biases = packed
        return mx.quantized_matmul(
            x,
            weights,
            scales,
            biases,
            transpose=transpose,
            group_size=self.group_size,
            bits=self.bits,
        )

    def _unpacked(self, part: Stored) -> mx.array:
        return unpacked(part, self.bits, self.group_size)

    def _quantize(self, x: mx.array) -> list[mx.array]:
        return list(mx.quantize(x, group_size=self.group_size, bits=self.bits))


PLAIN = PlainCodec()
