"""mlx-lm's own single-row caches, turned into slot images and back.

Knows the inner states of mlx-lm's ``KVCache`` and ``RotatingKVCache`` (grown by steps of 256, cut,
wrapped, longer than their window after several tokens at once) so that nobody else must. Pure
functions, on the device thread.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from .layouts import Image, LayerBuffers


class CannotTrim(Exception):
    """A sliding layer no longer holds what a state of the wanted length needs."""


def window_of_cache(cache: Any) -> int | None:
    """The window of a layer with this cache. Raises TypeError for a kind that has no layout."""
    match cache:
        case RotatingKVCache(keep=0, max_size=window):
            return int(window)
        case KVCache():
            return None
        case _:
            raise TypeError(f"no batch layout for {type(cache).__name__}")


def take_image(cache: Any, layer: LayerBuffers) -> tuple[Image | None, int]:
    """A lone row's state in slot order, and the oldest position that it holds.

    The image is None for an empty state. It shares bytes with the cache but does not change with
    it: MLX arrays are values.
    """
    if layer.window != window_of_cache(cache):
        raise TypeError("a row's caches differ from the model's layers")
    if cache.keys is None or cache.offset == 0:
        return None, 0
    if layer.ring is None:
        return Image(cache.keys[..., : cache.offset, :], cache.values[..., : cache.offset, :]), 0
    keys, values = _in_order(cache, cache.keys), _in_order(cache, cache.values)
    kept = min(keys.shape[2], layer.ring, cache.offset)
    oldest = cache.offset - kept
    place = _place_in_ring
    return Image(
        place(keys, kept, cache.offset, layer.ring), place(values, kept, cache.offset, layer.ring)
    ), oldest


def give_cache(image: Image | None, layer: LayerBuffers, length: int, oldest: int) -> Any:
    """A fresh mlx-lm cache with the first ``length`` tokens of an image; copies, not evaluated.

    ``oldest`` is the oldest position that the image's ring still holds. Raises CannotTrim.
    """
    window = layer.window
    cache = KVCache() if window is None else RotatingKVCache(max_size=window)
    if length == 0:
        return cache
    assert image is not None
    first = 0 if window is None else max(0, length - window)
    if first < oldest:
        raise CannotTrim(f"{length} tokens need position {first}; the oldest held is {oldest}")
    cache.keys = _cut(image.keys, first, length, layer.ring)
    cache.values = _cut(image.values, first, length, layer.ring)
    cache.offset = length
    if window is not None:
        cache._idx = length - first
    return cache


def _in_order(cache: RotatingKVCache, array: mx.array) -> mx.array:
    """A rotating cache's filled part, oldest token first."""
    index = cache._idx
    if index == array.shape[2]:
        return array
    if index < cache.offset:
        return mx.concatenate([array[..., index:, :], array[..., :index, :]], axis=2)
    return array[..., :index, :]


def _place_in_ring(array: mx.array, kept: int, offset: int, ring: int) -> mx.array:
    array = array[..., array.shape[2] - kept :, :]
    if kept == offset:
        return array
    first = offset - kept
    if offset <= ring:
        return mx.pad(array, [(0, 0), (0, 0), (first, 0), (0, 0)])
    array = mx.pad(array, [(0, 0), (0, 0), (0, ring - kept), (0, 0)])
    return mx.roll(array, first % ring, 2)


def _cut(array: mx.array, first: int, length: int, ring: int | None) -> mx.array:
    if ring is not None and first // ring != (length - 1) // ring:
        parts = [array[..., first % ring : ring, :], array[..., : length % ring, :]]
        return mx.concatenate(parts, axis=2)
    start = first if ring is None else first % ring
    return mx.contiguous(array[..., start : start + length - first, :])
