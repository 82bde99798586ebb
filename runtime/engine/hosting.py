"""Kept states as plain bytes in host memory and back, bit for bit.

Runs on the device thread. Knows by name every cache that a row may consist of; lists of caches are
laid flat. What comes back is compared with what the model itself makes (``arrivals.py``).

On a CPU the exported bytes are read-only views of the arrays, which nobody writes; a view keeps
its memory and may be dropped on any thread. On a GPU they are copies. Either way they are made on a
stream of their own, so that a step under way is not waited for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx.nn import Module
from mlx_lm.models.cache import (
    ArraysCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from ..errors import StateRefused
from ..spill.state import Bytes, HostArray, HostLayer, HostState, Meta
from .arrivals import SLOT, TOKENS, Arrival, Like, check
from .kvplan import KVPlan
from .nesting import flatten
from .rings import QuantizedRing
from .turbo_cache import TurboCache

_WINDOW = "window"


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One cache taken apart, and what a cache of its kind is like.

    Arrays with tokens are [1, heads, tokens, width]. ``window``: it is a ring, which has turned
    from so many tokens on; then ``slot`` is where it goes on writing, and its tokens are in no
    order.
    """

    kind: str
    meta: tuple[tuple[str, int | str], ...]
    arrays: tuple[mx.array, ...]
    by_token: bool = True
    window: int | None = None
    slot: int = 0


class Hosting:
    """Export and import for one model. Built before the first row; evaluates nothing then."""

    def __init__(self, model: Module, plan: KVPlan) -> None:
        self._start = plan.start if plan.encodes else 0
        self._blank: list[Any] = make_prompt_cache(model)
        caches: list[Any] = make_prompt_cache(model)
        model(mx.array([[0]]), cache=caches)
        strange = sorted({type(c).__name__ for c in flatten(caches) if type(c) not in _PARTS})
        self._obstacle = f"{', '.join(strange)} has no form as bytes" if strange else ""
        self._stream = mx.new_stream(mx.default_device())
        self._forms: tuple[tuple[Like, ...], ...] = ()
        if not strange:
            encoded = plan.converted(caches, max(1, plan.start))
            self._forms = (self._likes(encoded), self._likes(caches))

    def export(
        self, caches: list[Any], length: int, first: int, count: int, since: int = 0
    ) -> tuple[HostLayer, ...]:
        """Up to ``count`` layers, from ``first`` on, of a state of ``length`` tokens.

        Tokens before ``since`` are left out where tokens lie in order. Raises StateRefused for
        layers that have no form as bytes.
        """
        if self._obstacle:
            raise StateRefused(self._obstacle)
        chosen = flatten(caches)[first : first + count]
        leaves = [_PARTS[type(cache)](cache) for cache in chosen]
        axes = [_token_axis(leaf, length) for leaf in leaves]
        with mx.stream(self._stream):
            if since:
                leaves = [_since(leaf, since, a) for leaf, a in zip(leaves, axes, strict=True)]
            data = iter(_host_bytes([x for leaf in leaves for x in leaf.arrays]))
        pairs = zip(leaves, axes, strict=True)
        return tuple(_host_layer(leaf, length, axis, data) for leaf, axis in pairs)

    def begin(self, state: HostState) -> Arrival:
        """Caches that will go on from ``state`` just as the exported ones do; none is made yet.

        Raises StateRefused unless this model makes such states of such lengths.
        """
        likes = self._expected(state)
        pairs = zip(state.layers, likes, strict=True)
        slots = tuple(check(layer, like, state.length) for layer, like in pairs)
        return Arrival(state, likes, slots, self._blank, self._stream)

    def _likes(self, caches: list[Any]) -> tuple[Like, ...]:
        blanks = flatten(self._blank)
        pairs = zip(flatten(caches), blanks, strict=True)
        return tuple(_like(_PARTS[type(cache)](cache), blank) for cache, blank in pairs)

    def _expected(self, state: HostState) -> tuple[Like, ...]:
        if self._obstacle:
            raise StateRefused(self._obstacle)
        if state.first:
            raise StateRefused(f"tokens [{state.first}, {state.length}) are no whole state")
        kinds = [layer.kind for layer in state.layers]
        for likes in self._forms:
            if kinds == [like.kind for like in likes]:
                break
        else:
            raise StateRefused("its layers are not those of this model under this scheme")
        if likes is not self._forms[-1] and state.length < self._start:
            raise StateRefused(f"a state of {state.length} tokens would not be encoded yet")
        return likes


# ---- caches, taken apart ---------------------------------------------------------------------


def _plain_parts(cache: Any) -> _Leaf:
    return _Leaf("plain", (), _present(cache.keys, cache.values))


def _ring_parts(cache: Any) -> _Leaf:
    meta = (("keep", cache.keep), (_WINDOW, cache.max_size))
    arrays = _present(cache.keys, cache.values)
    return _Leaf("ring", meta, arrays, window=cache.max_size, slot=cache._idx)


def _affine_parts(cache: Any) -> _Leaf:
    meta = (("group_size", cache.group_size), ("bits", cache.bits))
    return _Leaf("affine", meta, _present(*(cache.keys or ()), *(cache.values or ())))


def _affine_ring_parts(cache: Any) -> _Leaf:
    meta = (("group_size", cache.group_size), ("bits", cache.bits), (_WINDOW, cache.max_size))
    arrays = _present(*(cache.keys or ()), *(cache.values or ()))
    return _Leaf("affine ring", meta, arrays, window=cache.max_size, slot=cache._idx)


def _turbo_parts(cache: Any) -> _Leaf:
    stored, _, key_bits, value_bits = cache.state
    return _Leaf("turbo", (("key_bits", key_bits), ("value_bits", value_bits)), tuple(stored or ()))


def _recurrent_parts(cache: Any) -> _Leaf:
    if cache.left_padding is not None or cache.lengths is not None:
        raise StateRefused("a recurrent state of several rows")
    held = "".join("0" if x is None else "1" for x in cache.cache)
    return _Leaf("recurrent", (("held", held),), _present(*cache.cache), by_token=False)


_PARTS = {
    KVCache: _plain_parts,
    RotatingKVCache: _ring_parts,
    QuantizedKVCache: _affine_parts,
    QuantizedRing: _affine_ring_parts,
    TurboCache: _turbo_parts,
    ArraysCache: _recurrent_parts,
}


def _present(*arrays: mx.array | None) -> tuple[mx.array, ...]:
    return tuple(x for x in arrays if x is not None)


def _like(leaf: _Leaf, blank: Any) -> Like:
    arrays = tuple((_name(x.dtype), tuple(x.shape)) for x in leaf.arrays)
    return Like(leaf.kind, leaf.meta, arrays, leaf.by_token, leaf.window, blank)


def _has_turned(leaf: _Leaf, length: int) -> bool:
    return leaf.window is not None and length >= leaf.window


def _token_axis(leaf: _Leaf, length: int) -> int | None:
    axis = TOKENS if leaf.by_token and not _has_turned(leaf, length) else None
    if axis is not None and any(x.shape[axis] != length for x in leaf.arrays):
        raise StateRefused(f"a {leaf.kind} layer does not hold exactly {length} tokens")
    return axis


def _since(leaf: _Leaf, since: int, axis: int | None) -> _Leaf:
    """The layer without its first tokens."""
    if axis is None:
        return leaf
    return replace(leaf, arrays=tuple(x[:, :, since:] for x in leaf.arrays))


def _host_layer(leaf: _Leaf, length: int, axis: int | None, data: Iterator[Bytes]) -> HostLayer:
    turned = _has_turned(leaf, length)
    meta: Meta = (*leaf.meta, (SLOT, leaf.slot)) if turned else leaf.meta
    arrays = tuple(HostArray(_name(x.dtype), tuple(x.shape), next(data)) for x in leaf.arrays)
    return HostLayer(leaf.kind, meta, arrays, (axis,) * len(arrays))


# ---- arrays and bytes ------------------------------------------------------------------------


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def _host_bytes(arrays: Sequence[mx.array]) -> list[Bytes]:
    on_gpu = mx.default_device() == mx.gpu
    # On a GPU adding nothing copies: reading an array on the host may move it out of there.
    flat: list[Any] = [_flat(x) + 0 if on_gpu else _flat(x) for x in arrays]
    mx.eval(flat)
    views = [memoryview(x).toreadonly() if x.size else b"" for x in flat]
    return [bytes(view) for view in views] if on_gpu else views


def _flat(x: mx.array) -> mx.array:
    return x.reshape(-1).view(mx.uint8) if x.size else mx.zeros((0,), mx.uint8)
