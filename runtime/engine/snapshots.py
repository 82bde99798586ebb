"""States of rows as mlx-lm cache objects: cutting, copying, and keeping them.

Owns the kept snapshots. Runs on the device thread. Knows by name the caches that keep tokens
apart, plain and encoded; any other cache is copied whole, through its own ``state``.

An array is never written by two owners. mlx-lm assigns into ``cache.keys`` in place, which changes
the Python object it holds: so every owner gets a handle of its own (``x[...]``), and MLX copies a
buffer that a second handle still refers to before it writes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import (
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from ..plans import SnapshotId, SnapshotMade
from .rings import QuantizedRing
from .turbo_cache import TurboCache

_List: Any = CacheList
_Plain: Any = KVCache
_Ring: Any = RotatingKVCache
_ENDLESS = (KVCache, QuantizedKVCache, TurboCache)
_RINGS = (RotatingKVCache, QuantizedRing)


class CannotCut(Exception):
    """A state cannot be brought to the length asked for; the message says why."""


def clone(cache: Any) -> Any:
    """The same state under new handles: writing through one leaves the other as it is."""
    return _mapped(cache, _handle)


def clone_all(caches: list[Any]) -> list[Any]:
    """:func:`clone` of every layer."""
    return [clone(c) for c in caches]


def is_cuttable(cache: Any) -> bool:
    """Whether this layer can be cut to any shorter length right now."""
    kind = type(cache)
    if kind is CacheList:
        return all(is_cuttable(c) for c in cache.caches)
    if kind in _RINGS:
        return bool(cache.keep == 0 and cache.is_trimmable())
    return kind in _ENDLESS


def cut(caches: list[Any], have: int, length: int) -> list[Any]:
    """The first ``length`` of ``have`` tokens, sharing the arrays of ``caches``.

    Raises CannotCut when a layer has already forgotten what a shorter state needs.
    """
    if not 0 < length <= have:
        raise CannotCut(f"the state holds {have} tokens, not {length}")
    if length < have:
        stuck = sorted({type(c).__name__ for c in caches if not is_cuttable(c)})
        if stuck:
            raise CannotCut(f"{', '.join(stuck)} of {have} tokens cannot be cut to {length}")
    return [cut_one(c, length) for c in caches]


def compact(caches: list[Any]) -> list[Any]:
    """Exact-length contiguous copies (lazy); nothing of the original buffers stays referenced."""
    return [_mapped(cache, _packed) for cache in caches]


def arrays_of(caches: list[Any]) -> list[mx.array]:
    """Every array that a state is made of."""
    leaves: Any = tree_flatten([c.state for c in caches])
    return [x for _, x in leaves if isinstance(x, mx.array)]


def num_bytes(caches: list[Any]) -> int:
    """Bytes of all arrays of a state, whether evaluated yet or not."""
    return sum(x.nbytes for x in arrays_of(caches))


def _mapped(cache: Any, change: Callable[[Any], Any]) -> Any:
    # A list's own from_state knows mlx-lm's caches only.
    if type(cache) is CacheList:
        return _List(*(_mapped(c, change) for c in cache.caches))
    return type(cache).from_state(tree_map(change, cache.state))


def _handle(leaf: Any) -> Any:
    return leaf[...] if isinstance(leaf, mx.array) else leaf


def _packed(leaf: Any) -> Any:
    return mx.contiguous(leaf) if isinstance(leaf, mx.array) else leaf


def cut_one(cache: Any, length: int) -> Any:
    """One layer cut, sharing its arrays; what cannot be cut is taken to have that length."""
    kind = type(cache)
    if kind is CacheList:
        return _List(*(cut_one(c, length) for c in cache.caches))
    if kind not in (*_ENDLESS, *_RINGS) or cache.empty():
        return clone(cache)
    if kind is QuantizedRing:
        *parts, group_size, bits = cache.state
        cut_parts = [cut_one(_Ring.from_state(part), length).state for part in parts]
        return QuantizedRing.from_state((*cut_parts, group_size, bits))
    if kind is RotatingKVCache and not cache.is_trimmable():
        return _cut_ring(cache)
    if kind is RotatingKVCache:
        return cut_straight(cache, length)
    shorter = kind.from_state(tree_map(lambda leaf: _first(leaf, length), cache.state))
    shorter.offset = length
    return shorter


def cut_straight(ring: Any, length: int) -> Any:
    """The first tokens of a ring that has overwritten none."""
    keys, values = _first(ring.keys, length), _first(ring.values, length)
    return _Ring.from_state((keys, values, length, ring.keep, ring.max_size, length))


def _first(leaf: Any, length: int) -> Any:
    return leaf[..., :length, :] if isinstance(leaf, mx.array) else leaf


def _cut_ring(cache: Any) -> Any:
    # After a long prefill a ring holds up to max_size + chunk tokens, oldest first; the next
    # decode would drop the surplus, so leaving it out changes nothing but the bytes kept.
    keys, values, offset, keep, max_size, idx = cache.state
    surplus = keys.shape[2] - max_size
    if keep == 0 and surplus > 0:
        state = (keys[..., surplus:, :], values[..., surplus:, :], offset, keep, max_size, max_size)
        return _Ring.from_state(state)
    return _Ring.from_state((keys[...], values[...], offset, keep, max_size, idx))


@dataclass(frozen=True, slots=True)
class _Snapshot:
    caches: list[Any]
    length: int
    nbytes: int


class Snapshots:
    """Kept states by id. They are never written; rows get handles or cut copies of them."""

    def __init__(self) -> None:
        self._kept: dict[SnapshotId, _Snapshot] = {}

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes of all kept states; arrays shared by two snapshots count twice."""
        return sum(s.nbytes for s in self._kept.values())

    def put(self, snapshot: SnapshotId, caches: list[Any], length: int) -> SnapshotMade:
        """Keep ``caches``, which must be exact and owned by nobody else."""
        nbytes = num_bytes(caches)
        self._kept[snapshot] = _Snapshot(caches, length, nbytes)
        return SnapshotMade(snapshot, length, nbytes)

    def length(self, snapshot: SnapshotId) -> int:
        """Tokens of a kept state; 0 for an unknown id."""
        kept = self._kept.get(snapshot)
        return 0 if kept is None else kept.length

    def take(self, snapshot: SnapshotId, length: int) -> list[Any]:
        """Caches for a new row. Raises CannotCut (also for an unknown id)."""
        kept = self._kept.get(snapshot)
        if kept is None:
            raise CannotCut(f"snapshot {snapshot} is not kept any more")
        return cut(kept.caches, kept.length, length)

    def whole(self, snapshot: SnapshotId) -> tuple[list[Any], int]:
        """A kept state's caches, not to be written, and its tokens; none for an unknown id."""
        kept = self._kept.get(snapshot)
        return ([], 0) if kept is None else (kept.caches, kept.length)

    def release(self, snapshots: tuple[SnapshotId, ...]) -> None:
        """Forget; unknown ids are ignored."""
        for snapshot in snapshots:
            self._kept.pop(snapshot, None)

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()
