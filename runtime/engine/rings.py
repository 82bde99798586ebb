"""A lone row's sliding layer in affine form, which mlx-lm does not have.

Made of mlx-lm's own rotating caches, one for each kind of array (packed values, scales, biases):
groups lie along the width of a head, so each turns just as plain keys and values do. Runs on the
device thread; knows no batch.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache, _BaseCache

_Ring: Any = RotatingKVCache
_Base: Any = _BaseCache

PARTS = 3


class QuantizedRing(_Base):
    """Keys and values of the last ``max_size`` tokens, each as packed values, scales and biases.

    ``bits`` makes mlx-lm's attention take its quantised path.
    """

    keep = 0

    def __init__(self, max_size: int, group_size: int, bits: int) -> None:
        self.group_size = group_size
        self.bits = bits
        self._parts: list[Any] = [_Ring(max_size=max_size) for _ in range(PARTS)]

    @property
    def max_size(self) -> int:
        """Tokens that a query sees, its own included."""
        return int(self._parts[0].max_size)

    @property
    def offset(self) -> int:
        """All tokens so far, forgotten ones too."""
        return int(self._parts[0].offset)

    @property
    def _idx(self) -> int:
        return int(self._parts[0]._idx)

    @property
    def keys(self) -> tuple[mx.array, ...] | None:
        """The buffers of the keys; None while empty."""
        return None if self.empty() else tuple(part.keys for part in self._parts)

    @property
    def values(self) -> tuple[mx.array, ...] | None:
        """The buffers of the values; None while empty."""
        return None if self.empty() else tuple(part.values for part in self._parts)

    def fill(self, stored: tuple[mx.array, ...], offset: int) -> None:
        """Take over arrays of ``offset`` tokens, the oldest kept one first."""
        for part, keys, values in zip(self._parts, stored[:PARTS], stored[PARTS:], strict=True):
            part.keys, part.values = keys, values
            part.offset, part._idx = offset, keys.shape[2]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Take new keys and values [1, heads, tokens, width]; all that a query may see."""
        pairs = zip(self._parts, self._quantize(keys), self._quantize(values), strict=True)
        fetched = [part.update_and_fetch(k, v) for part, k, v in pairs]
        return tuple(k for k, _ in fetched), tuple(v for _, v in fetched)

    def make_mask(self, *args: Any, **options: Any) -> Any:
        """mlx-lm's mask of a rotating cache."""
        return self._parts[0].make_mask(*args, **options)

    @property
    def state(self) -> tuple[Any, ...]:
        """Everything that the cache is made of, for :meth:`from_state`."""
        return (*(part.state for part in self._parts), self.group_size, self.bits)

    @state.setter
    def state(self, value: tuple[Any, ...]) -> None:
        *parts, self.group_size, self.bits = value
        self._parts = [_Ring.from_state(part) for part in parts]

    def is_trimmable(self) -> bool:
        """Before it has turned."""
        return bool(self._parts[0].is_trimmable())

    def trim(self, n: int) -> int:
        """Take ``n`` tokens back; how many it were."""
        return max([int(part.trim(n)) for part in self._parts])

    def empty(self) -> bool:
        """Whether nothing was ever written."""
        return bool(self._parts[0].empty())

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(int(part.nbytes) for part in self._parts)

    def _quantize(self, x: mx.array) -> list[mx.array]:
        return list(mx.quantize(x, group_size=self.group_size, bits=self.bits))


def to_ring(cache: Any, group_size: int, bits: int) -> QuantizedRing:
    """A rotating cache in affine form, every slot where it was (lazy)."""
    ring = QuantizedRing(cache.max_size, group_size, bits)
    if cache.empty():
        return ring
    triples = [ring._quantize(x) for x in (cache.keys, cache.values)]
    for part, keys, values in zip(ring._parts, *triples, strict=True):
        part.keys, part.values = keys, values
        part.offset, part._idx = cache.offset, cache._idx
    return ring
