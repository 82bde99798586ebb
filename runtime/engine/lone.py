"""mlx-lm's own single-row caches, turned into slot images and back.

Knows the inner states of mlx-lm's ``KVCache`` and ``RotatingKVCache`` (grown by steps of 256, cut,
wrapped, longer than their window after several tokens at once) so that nobody else must; which
arrays a cache has is its codec's. Pure functions, on the device thread.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from .codecs import PLAIN, Codec, Image
from .lazy import copied
from .rings import QuantizedRing
from .turbo_cache import TurboCache


class CannotTrim(Exception):
    """A sliding layer no longer holds what a state of the wanted length needs."""


def window_of_cache(cache: Any) -> int | None:
    """The window of a layer with this cache. Raises TypeError for a kind that has no layout."""
    match cache:
        case RotatingKVCache(keep=0, max_size=window) | QuantizedRing(max_size=window):
            return int(window)
        case KVCache() | QuantizedKVCache() | TurboCache():
            return None
        case _:
            raise TypeError(f"no batch layout for {type(cache).__name__}")


def take_image(
    cache: Any, codec: Codec | None, window: int | None, ring: int | None
) -> tuple[Image | None, int]:
    """A lone row's state in slot order, and the oldest position that it holds.

    The image is None for an empty state. It shares bytes with the cache but does not change with
    it: MLX arrays are values. Raises TypeError for a cache that is neither plain nor the codec's.
    """
    if window != window_of_cache(cache):
        raise TypeError("a row's caches differ from the model's layers")
    encoded = codec is not None and codec.is_held_by(cache)
    form = codec if encoded and codec is not None else PLAIN
    if not form.is_held_by(cache):
        raise TypeError(f"{type(cache).__name__} in a layer of another KV scheme")
    stored = form.stored_in(cache)
    if stored is None or cache.offset == 0:
        return None, 0
    if ring is None:
        return Image(tuple(x[..., : cache.offset, :] for x in stored), encoded), 0
    ordered = tuple(_in_order(cache, x) for x in stored)
    kept = min(ordered[0].shape[2], ring, cache.offset)
    placed = tuple(_place_in_ring(x, kept, cache.offset, ring) for x in ordered)
    return Image(placed, encoded), cache.offset - kept


def give_cache(
    image: Image | None,
    codec: Codec,
    window: int | None,
    ring: int | None,
    length: int,
    oldest: int,
) -> Any:
    """A fresh mlx-lm cache with the first ``length`` tokens of an image; copies, not evaluated.

    ``oldest`` is the oldest position that the image's ring still holds. Raises CannotTrim.
    """
    cache = codec.make_cache(window)
    if length == 0:
        return cache
    assert image is not None
    first = 0 if window is None else max(0, length - window)
    if first < oldest:
        raise CannotTrim(f"{length} tokens need position {first}; the oldest held is {oldest}")
    codec.fill(cache, tuple(_cut(x, first, length, ring) for x in image.stored), length)
    return cache


def _in_order(cache: Any, array: mx.array) -> mx.array:
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
    return copied(array[..., start : start + length - first, :])
