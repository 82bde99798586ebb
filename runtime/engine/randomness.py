"""Random numbers by seed and position, and weighted draws with them.

Pure functions, on the device thread. A row's numbers depend on its seed and its token position
alone: each key goes through ``vmap`` by itself. One number makes one draw (by the inverse of the
cumulative weights), so a draw costs a sum over the vocabulary, not noise for all of it.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

NUMBERS = 2
"""Uniform numbers of one position: one for the draw, one for whether XTC strikes."""
BLOCK = 256

_MASK64 = (1 << 64) - 1
# A cumulative sum may end a few roundings below the sum of its parts.
_SAFE = 1 - 2.0**-20


def mix(seed: int) -> int:
    """A well spread 32-bit key for any integer seed (the finalizer of splitmix64)."""
    z = (seed + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return (z ^ (z >> 31)) & 0xFFFFFFFF


def uniforms(keys: mx.array) -> mx.array:
    """float32 [N, NUMBERS] in [0, 1), a row for each key of uint32 [N, 2]; lazy."""
    return mx.vmap(_uniform)(keys)


def _uniform(key: mx.array) -> mx.array:
    return mx.random.uniform(shape=(NUMBERS,), key=key)


def pick(xp: Any, weights: Any, number: Any) -> Any:
    """One index a row, each as probable as its share of the row's weights.

    Args:
        xp: ``mlx.core`` or ``numpy``, whose arrays the others are.
        weights: float32 [N, M], not negative; what has none is never picked.
        number: [N, 1] in [0, 1).

    Returns:
        [N, 1], within the row even where its weights are not finite.
    """
    size = weights.shape[-1]
    if size <= 2 * BLOCK:
        total = xp.sum(weights, axis=-1, keepdims=True)
        return _first_beyond(xp, weights, number * total)[0]
    if size % BLOCK:
        weights = xp.pad(weights, [(0, 0), (0, BLOCK - size % BLOCK)])
    blocks = weights.reshape(weights.shape[0], -1, BLOCK)
    sums = xp.sum(blocks, axis=-1)
    target = number * xp.sum(sums, axis=-1, keepdims=True)
    block, before = _first_beyond(xp, sums, target)
    within = xp.take_along_axis(blocks, block[:, :, None], axis=1)[:, 0]
    place, _ = _first_beyond(xp, within, target - before)
    return xp.minimum(block * BLOCK + place, size - 1)


def _first_beyond(xp: Any, weights: Any, target: Any) -> tuple[Any, Any]:
    """The first index whose cumulative weight exceeds ``target``, and the weight before it.

    What has no weight is passed over, whatever a parallel sum's roundings say.
    """
    reached = xp.cumsum(weights, axis=-1)
    target = xp.minimum(target, reached[:, -1:] * _SAFE)
    beyond = (reached > target) & (weights > 0)
    index = xp.argmax(beyond, axis=-1, keepdims=True)
    before = xp.take_along_axis(reached, index, axis=-1) - xp.take_along_axis(
        weights, index, axis=-1
    )
    return index, before
