"""A lone row's state one token back: what a decode is about to replace, and putting it back.

A row that draws an end token is found one step late, when that token is in its state already. Most
caches can be cut; a recurrent layer and a ring that has turned have lost what they held before, so
a decode holds on to that for one step. Pure functions, on the device thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, RotatingKVCache

from .lazy import start
from .rings import QuantizedRing
from .snapshots import CannotCut, clone, cut_one, cut_straight, is_cuttable

_List: Any = CacheList
_Ring: Any = RotatingKVCache


@dataclass(frozen=True, slots=True)
class _Slot:
    """Keys and values [1, heads, 1, width] of the slot that a ring writes next.

    ``index`` is where the ring stands before that.
    """

    keys: mx.array
    values: mx.array
    index: int


def hold(caches: list[Any]) -> list[Any]:
    """What layers are about to forget in a decode of one token, for :func:`step_back`.

    A recurrent layer replaces its arrays, so a second handle keeps the old ones. A ring writes in
    place: the one slot is copied, before the decode, which then finds nobody else holding the
    buffer. Raises CannotCut for a cache that cannot go back.
    """
    held = [_held(cache) for cache in caches]
    if slots := [array for layer in held for array in _slots(layer)]:
        start(slots)
    return held


def step_back(caches: list[Any], held: list[Any], length: int) -> list[Any]:
    """Layers as they were at ``length`` tokens, one before now. Raises CannotCut."""
    return [_before(*layer, length) for layer in zip(caches, held, strict=True)]


def _held(cache: Any) -> Any:
    kind = type(cache)
    if kind is CacheList:
        return [_held(c) for c in cache.caches]
    if is_cuttable(cache):
        return None
    if kind is ArraysCache:
        return clone(cache)
    if kind is QuantizedRing:
        return [_held_of_ring(part) for part in _parts(cache)]
    if kind is RotatingKVCache:
        return _held_of_ring(cache)
    raise CannotCut(f"{kind.__name__} cannot go back a token")


def _held_of_ring(ring: Any) -> Any:
    surplus = ring.keys.shape[2] - ring.max_size
    if ring.keep or surplus < 0:
        raise CannotCut("a ring that keeps its first tokens cannot go back one")
    if surplus:
        # The next write puts shorter arrays in the place of these.
        return clone(ring)
    at = ring._idx % ring.max_size
    keys, values = (mx.contiguous(x[..., at : at + 1, :]) for x in (ring.keys, ring.values))
    return _Slot(keys, values, ring._idx)


def _slots(held: Any) -> Iterator[mx.array]:
    if isinstance(held, _Slot):
        yield from (held.keys, held.values)
    elif isinstance(held, list):
        for part in held:
            yield from _slots(part)


def _before(cache: Any, held: Any, length: int) -> Any:
    kind = type(cache)
    if kind is CacheList:
        return _List(*step_back(list(cache.caches), held, length))
    if kind is QuantizedRing:
        parts = _parts(cache)
        *_, group_size, bits = cache.state
        before = step_back(parts, held or [None] * len(parts), length)
        return QuantizedRing.from_state((*(part.state for part in before), group_size, bits))
    if isinstance(held, _Slot):
        return _put_back(cache, held, length)
    if held is not None:
        return cut_one(held, length)
    if kind is RotatingKVCache:
        # It has turned in this very step at the most, and has overwritten nothing.
        return cut_straight(cache, length)
    return cut_one(cache, length)


def _put_back(ring: Any, slot: _Slot, length: int) -> Any:
    if type(ring) is not RotatingKVCache:
        raise CannotCut(f"{type(ring).__name__} was another cache a token ago")
    at = slot.index % ring.max_size
    keys, values = ring.keys[...], ring.values[...]
    keys[..., at : at + 1, :] = slot.keys
    values[..., at : at + 1, :] = slot.values
    return _Ring.from_state((keys, values, length, ring.keep, ring.max_size, slot.index))


def _parts(ring: QuantizedRing) -> list[Any]:
    return [_Ring.from_state(part) for part in ring.state[:-2]]
