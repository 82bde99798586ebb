"""Kept states as plain bytes in host memory and back, bit for bit.

Runs on the device thread. Knows by name every cache that a row may consist of; lists of caches are
laid flat. What comes back is compared with what the model itself makes: kinds, settings, types,
shapes and lengths. A state of another model or scheme is refused before anything is made of it.

On a CPU the exported bytes are read-only views of the arrays, which nobody writes; a view keeps
its memory and may be dropped on any thread. On a GPU they are copies. Either way they are made on a
stream of their own, so that a step under way is not waited for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
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
from .kvplan import KVPlan
from .nesting import flatten, nest
from .rings import PARTS, QuantizedRing
from .turbo_cache import TurboCache

_Plain: Any = KVCache
_Ring: Any = RotatingKVCache
_Affine: Any = QuantizedKVCache
_Recurrent: Any = ArraysCache

_TOKENS = 2
_SLOT = "slot"
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


@dataclass(frozen=True, slots=True)
class _Like:
    """What a layer must be like, whatever its tokens; ``blank`` is an unused cache of it."""

    kind: str
    meta: tuple[tuple[str, int | str], ...]
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    by_token: bool
    window: int | None
    blank: Any


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
        self._forms: tuple[tuple[_Like, ...], ...] = ()
        if not strange:
            encoded = plan.converted(caches, max(1, plan.start))
            self._forms = (self._likes(encoded), self._likes(caches))

    def export(
        self, caches: list[Any], length: int, first: int, count: int
    ) -> tuple[HostLayer, ...]:
        """Up to ``count`` layers, from ``first`` on, of a state of ``length`` tokens.

        Raises StateRefused for layers that have no form as bytes.
        """
        if self._obstacle:
            raise StateRefused(self._obstacle)
        chosen = flatten(caches)[first : first + count]
        leaves = [_PARTS[type(cache)](cache) for cache in chosen]
        with mx.stream(self._stream):
            data = iter(_host_bytes([x for leaf in leaves for x in leaf.arrays]))
        return tuple(_host_layer(leaf, length, data) for leaf in leaves)

    def rebuild(self, state: HostState) -> list[Any]:
        """Evaluated caches that go on from ``state`` just as the exported ones do.

        Raises StateRefused unless this model makes such states of such lengths.
        """
        pairs = list(zip(state.layers, self._expected(state), strict=True))
        slots = [_check(layer, like, state.length) for layer, like in pairs]
        with mx.stream(self._stream):
            leaves = [
                _rebuilt(layer, like, state.length, slot)
                for (layer, like), slot in zip(pairs, slots, strict=True)
            ]
            mx.eval([cache.state for cache in leaves])
        return nest(leaves, self._blank)

    def _likes(self, caches: list[Any]) -> tuple[_Like, ...]:
        blanks = flatten(self._blank)
        pairs = zip(flatten(caches), blanks, strict=True)
        return tuple(_like(_PARTS[type(cache)](cache), blank) for cache, blank in pairs)

    def _expected(self, state: HostState) -> tuple[_Like, ...]:
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


def _like(leaf: _Leaf, blank: Any) -> _Like:
    arrays = tuple((_name(x.dtype), tuple(x.shape)) for x in leaf.arrays)
    return _Like(leaf.kind, leaf.meta, arrays, leaf.by_token, leaf.window, blank)


def _host_layer(leaf: _Leaf, length: int, data: Iterator[Bytes]) -> HostLayer:
    turned = leaf.window is not None and length >= leaf.window
    meta: Meta = (*leaf.meta, (_SLOT, leaf.slot)) if turned else leaf.meta
    axis = _TOKENS if leaf.by_token and not turned else None
    if axis is not None and any(x.shape[axis] != length for x in leaf.arrays):
        raise StateRefused(f"a {leaf.kind} layer does not hold exactly {length} tokens")
    arrays = tuple(HostArray(_name(x.dtype), tuple(x.shape), next(data)) for x in leaf.arrays)
    return HostLayer(leaf.kind, meta, arrays, (axis,) * len(arrays))


# ---- bytes, put together ---------------------------------------------------------------------


def _check(layer: HostLayer, like: _Like, length: int) -> int:
    """Raise StateRefused unless ``layer`` is like that; the slot of a ring."""
    turned = like.window is not None and length >= like.window
    meta = dict(layer.meta)
    slot = meta.pop(_SLOT, None) if turned else length
    axis = _TOKENS if like.by_token and not turned else None
    told_once = len(layer.meta) == len(like.meta) + turned
    if meta != dict(like.meta) or not told_once or set(layer.token_axis) - {axis}:
        raise StateRefused(f"a {like.kind} layer has other settings: {layer.meta}")
    if len(layer.arrays) != len(like.arrays):
        raise StateRefused(f"a {like.kind} layer has {len(layer.arrays)} arrays")
    held = {_tokens(array, like, at) for at, array in enumerate(layer.arrays)}
    if len(held) > 1:
        raise StateRefused(f"the arrays of a {like.kind} layer hold {held} tokens")
    if turned and held:
        _check_ring(like, min(held), slot, length)
    return slot if isinstance(slot, int) else 0


def _tokens(array: HostArray, like: _Like, at: int) -> int:
    dtype, shape = like.arrays[at]
    wanted = array.shape
    if like.by_token and len(array.shape) == len(shape):
        wanted = (*shape[:_TOKENS], array.shape[_TOKENS], *shape[_TOKENS + 1 :])
    elif not like.by_token:
        wanted = shape
    if array.dtype != dtype or array.shape != wanted or len(array.shape) != len(shape):
        got = f"{array.dtype}{list(array.shape)}"
        raise StateRefused(f"a {like.kind} layer has {got}, the model's {dtype}{list(shape)}")
    return array.shape[_TOKENS] if like.by_token else 0


def _check_ring(like: _Like, held: int, slot: object, length: int) -> None:
    window = like.window or 0
    # Beyond the window lies only what a long chunk of prefill left, the oldest token first.
    whole = window <= held <= length and isinstance(slot, int) and 0 <= slot <= held
    if not whole or (held > window and slot != held):
        raise StateRefused(f"a ring of {window} holds {held} of {length} tokens, slot {slot}")


def _rebuilt(layer: HostLayer, like: _Like, length: int, slot: int) -> Any:
    arrays = tuple(_array(array) for array in layer.arrays)
    if not arrays:
        return type(like.blank).from_state(like.blank.state)
    meta = dict(like.meta)
    match like.kind:
        case "plain":
            return _Plain.from_state((*arrays, length))
        case "ring":
            return _Ring.from_state((*arrays, length, meta["keep"], like.window, slot))
        case "affine":
            pair = (arrays[:PARTS], arrays[PARTS:])
            return _Affine.from_state((*pair, length, meta["group_size"], meta["bits"]))
        case "affine ring":
            pairs = zip(arrays[:PARTS], arrays[PARTS:], strict=True)
            parts = tuple((*pair, length, 0, like.window, slot) for pair in pairs)
            return QuantizedRing.from_state((*parts, meta["group_size"], meta["bits"]))
        case "turbo":
            return TurboCache.from_state((arrays, length, meta["key_bits"], meta["value_bits"]))
        case _:
            left = iter(arrays)
            slots = [next(left) if held == "1" else None for held in str(meta["held"])]
            return _Recurrent.from_state((slots, None, None))


# ---- arrays and bytes ------------------------------------------------------------------------


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def _array(array: HostArray) -> mx.array:
    dtype: mx.Dtype = getattr(mx, array.dtype)
    if not len(array.data):
        return mx.zeros(array.shape, dtype)
    # A copy of its own: the bytes belong to somebody else.
    flat = mx.array(np.frombuffer(array.data, np.uint8))
    return flat.view(dtype).reshape(array.shape)


def _host_bytes(arrays: Sequence[mx.array]) -> list[Bytes]:
    on_gpu = mx.default_device() == mx.gpu
    # On a GPU adding nothing copies: reading an array on the host may move it out of there.
    flat: list[Any] = [_flat(x) + 0 if on_gpu else _flat(x) for x in arrays]
    mx.eval(flat)
    views = [memoryview(x).toreadonly() if x.size else b"" for x in flat]
    return [bytes(view) for view in views] if on_gpu else views


def _flat(x: mx.array) -> mx.array:
    return x.reshape(-1).view(mx.uint8) if x.size else mx.zeros((0,), mx.uint8)
