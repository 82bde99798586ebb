"""The one attention entry point of our own, and its installation into mlx-lm's models.

mlx-lm's models call ``scaled_dot_product_attention`` by name with what their cache's
``update_and_fetch`` returned. Our caches return an :class:`AttentionView` (keys and values that
are not one array), and this entry point lets the view do the work; plain arrays go to mlx-lm's own
function untouched, so a lone row stays bit-exact. Runs on the device thread; owns no state.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.base import quantized_scaled_dot_product_attention
from mlx_lm.models.base import scaled_dot_product_attention as mlx_lm_attention

from .activations import LOG2_E

NAME = "scaled_dot_product_attention"


@dataclass(frozen=True, slots=True)
class RaggedMask:
    """What our caches' ``make_mask`` returns: an opaque word, not an array.

    It only carries the window that the model asked for; every view makes its own arrays, since
    they depend on where its rows stand. A model that computes with its mask fails on it loudly.
    """

    window: int | None


class AttentionView(ABC):
    """Keys and values that are not one array; also the cache that returns itself for them."""

    def keys_and_values(self) -> tuple[Self, Self]:
        """For layers that share another's keys and values."""
        return self, self

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> RaggedMask:
        """An opaque word for :func:`scaled_dot_product_attention`."""
        return RaggedMask(window_size)

    @abstractmethod
    def attend(
        self,
        queries: mx.array,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
        softcap: float | None = None,
    ) -> mx.array:
        """Attention of ``queries`` [B, H, L, D] in float; the result has the same B, H and L.

        Scores are bent to ±``softcap`` where there is one.
        """


def scaled_dot_product_attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """mlx-lm's signature; raises TypeError for a mask that the model made of its own."""
    if isinstance(keys, mx.array):
        return mlx_lm_attention(queries, keys, values, cache, scale, mask, sinks)
    if isinstance(keys, tuple | list) and not (hasattr(cache, "bits") and packed_products()):
        return _attend_packed(queries, keys, values, scale, mask, sinks)
    if not (keys is values and isinstance(keys, AttentionView)):
        return mlx_lm_attention(queries, keys, values, cache, scale, mask, sinks)
    return keys.attend(queries, scale, window_of(mask), sinks)


def packed_products() -> bool:
    """Whether quantised keys and values can be multiplied as they are: not on CUDA, by MLX."""
    return mx.default_device() == mx.cpu or not mx.cuda.is_available()


def _attend_packed(
    queries: mx.array,
    keys: Sequence[mx.array],
    values: Sequence[mx.array],
    scale: float,
    mask: Any,
    sinks: mx.array | None,
) -> mx.array:
    """Quantised keys and values that come without the cache that knows them, or are in the way.

    They are without it where they are another layer's. Raises TypeError for attention sinks, which
    mlx-lm's quantised attention has not.
    """
    if sinks is not None:
        raise TypeError("attention sinks with a quantised KV cache")
    width = queries.shape[-1]
    bits = keys[0].shape[-1] * 32 // width
    group_size = width // keys[1].shape[-1]
    if not packed_products():
        held, seen = (unpacked(part, bits, group_size) for part in (keys, values))
        return attend_group(queries, held, seen, scale, mask, None)
    attended: mx.array = quantized_scaled_dot_product_attention(
        queries, keys, values, scale=scale, mask=mask, group_size=group_size, bits=bits
    )
    return attended


def unpacked(part: Sequence[mx.array], bits: int, group_size: int) -> mx.array:
    """Keys or values [..., T, D] of their packed words, scales and biases."""
    words, scales, biases = part
    return mx.dequantize(words, scales, biases, group_size=group_size, bits=bits)


def window_of(mask: Any) -> int | None:
    """The window that a mask stands for. Raises TypeError for arrays: rows differ in length."""
    match mask:
        case None | "causal":
            return None
        case RaggedMask(window):
            return window
        case _:
            raise TypeError(f"attention of batched rows got a mask of its own: {type(mask)}")


def install_attention() -> None:
    """Put our entry point wherever mlx-lm's stands by name. Idempotent; call after loading."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if names.get(NAME) is mlx_lm_attention:
            names[NAME] = scaled_dot_product_attention


def attend_group(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attention of one group, by MLX's fused kernel.

    Shapes: queries [n, H, L, D], keys and values [n, G, T, D] with H a multiple of G, mask bool
    [n, 1, L, T] or the word "causal".
    """
    return mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=scale, mask=mask, sinks=sinks
    )


def attend_group_folded(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | None
) -> mx.array:
    """The same in float32 on the CPU, where MLX has no fused kernel.

    All heads of a key head become rows of one matrix product (a third of the products, for three
    heads a key head, and each three times as large), and the softmax is one of powers of two (see
    ``activations`` for why). Mask: bool [n, 1, L·H/G or 1, T].
    """
    n, heads, columns, width = queries.shape
    kv_heads = keys.shape[1]
    folded = queries.reshape(n, kv_heads, heads // kv_heads * columns, width)
    scores = (folded * (scale * LOG2_E)) @ keys.swapaxes(-1, -2)
    if mask is not None:
        scores = mx.where(mask, scores, mx.finfo(scores.dtype).min)
    weights = mx.power(2.0, scores - scores.max(axis=-1, keepdims=True))
    output = (weights @ values) / weights.sum(axis=-1, keepdims=True)
    return output.reshape(n, heads, columns, values.shape[-1])


def attend_group_capped(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    softcap: float,
    mask: mx.array | None,
) -> mx.array:
    """The same with scores bent to ±``softcap``, which no fused kernel does. Mask as above."""
    n, heads, columns, width = queries.shape
    kv_heads = keys.shape[1]
    folded = (queries * scale).reshape(n, kv_heads, heads // kv_heads * columns, width)
    scores = mx.tanh(folded @ keys.swapaxes(-1, -2) / softcap) * softcap
    if mask is not None:
        scores = mx.where(mask, scores, mx.finfo(scores.dtype).min)
    output = mx.softmax(scores, axis=-1, precise=True) @ values
    return output.reshape(n, heads, columns, values.shape[-1])
