"""mlx-lm's caches of a model, flat and back: some layers have a list of caches of several kinds.

Pure functions, on the device thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mlx_lm.models.cache import CacheList

_List: Any = CacheList


def flatten(caches: Iterable[Any]) -> list[Any]:
    """The caches that are not lists, in order."""
    leaves: list[Any] = []
    for cache in caches:
        leaves += flatten(cache.caches) if type(cache) is CacheList else [cache]
    return leaves


def nest(leaves: Iterable[Any], like: Sequence[Any]) -> list[Any]:
    """``leaves`` in lists as in ``like``, a model's caches."""
    return _nested(iter(leaves), like)


def _nested(leaves: Iterator[Any], like: Iterable[Any]) -> list[Any]:
    return [
        _List(*_nested(leaves, cache.caches)) if type(cache) is CacheList else next(leaves)
        for cache in like
    ]
