"""A state on its way back into a model's caches: compared first, then copied layer by layer.

Runs on the device thread. What comes back is compared with what the model itself makes: kinds,
settings, types, shapes and lengths. A state of another model or scheme is refused before anything
is made of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache, RotatingKVCache

from ..errors import StateRefused
from ..spill.state import HostArray, HostLayer, HostState, nbytes
from .nesting import nest
from .rings import PARTS, QuantizedRing
from .turbo_cache import TurboCache

_Plain: Any = KVCache
_Ring: Any = RotatingKVCache
_Affine: Any = QuantizedKVCache
_Recurrent: Any = ArraysCache

TOKENS = 2
"""The axis along which an array's tokens lie."""
SLOT = "slot"


@dataclass(frozen=True, slots=True)
class Like:
    """What a layer must be like, whatever its tokens; ``blank`` is an unused cache of it."""

    kind: str
    meta: tuple[tuple[str, int | str], ...]
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    by_token: bool
    window: int | None
    blank: Any


class Arrival:
    """A state on its way in. Its layers arrive in order, and it may be given up at any time."""

    def __init__(
        self,
        state: HostState,
        likes: tuple[Like, ...],
        slots: tuple[int, ...],
        nesting: list[Any],
        stream: Any,
    ) -> None:
        self._state = state
        self._likes = likes
        self._slots = slots
        self._nesting = nesting
        self._stream = stream
        self._leaves: list[Any] = []

    @property
    def is_whole(self) -> bool:
        """Whether all layers are there."""
        return len(self._leaves) == len(self._likes)

    @property
    def nbytes(self) -> int:
        """What it takes when it is whole."""
        return nbytes(self._state)

    def goes_on(self, state: HostState, first: int) -> bool:
        """Whether the next layer is the ``first`` of this very state."""
        return state is self._state and first == len(self._leaves)

    def take(self, count: int | None = None) -> None:
        """Copy ``count`` more layers, or all that are left."""
        first = len(self._leaves)
        some = slice(first, None if count is None else first + count)
        parts = zip(self._state.layers[some], self._likes[some], self._slots[some], strict=True)
        with mx.stream(self._stream):
            leaves = [_rebuilt(*part, self._state.length) for part in parts]
            mx.eval([cache.state for cache in leaves])
        self._leaves += leaves

    def caches(self) -> list[Any]:
        """Evaluated caches of the whole state, nested as the model's are."""
        return nest(self._leaves, self._nesting)


def check(layer: HostLayer, like: Like, length: int) -> int:
    """Raise StateRefused unless ``layer`` is like that; the slot of a ring."""
    turned = like.window is not None and length >= like.window
    meta = dict(layer.meta)
    slot = meta.pop(SLOT, None) if turned else length
    axis = TOKENS if like.by_token and not turned else None
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


def _tokens(array: HostArray, like: Like, at: int) -> int:
    dtype, shape = like.arrays[at]
    wanted = array.shape
    if like.by_token and len(array.shape) == len(shape):
        wanted = (*shape[:TOKENS], array.shape[TOKENS], *shape[TOKENS + 1 :])
    elif not like.by_token:
        wanted = shape
    if array.dtype != dtype or array.shape != wanted or len(array.shape) != len(shape):
        got = f"{array.dtype}{list(array.shape)}"
        raise StateRefused(f"a {like.kind} layer has {got}, the model's {dtype}{list(shape)}")
    return array.shape[TOKENS] if like.by_token else 0


def _check_ring(like: Like, held: int, slot: object, length: int) -> None:
    window = like.window or 0
    # Beyond the window lies only what a long chunk of prefill left, the oldest token first.
    whole = window <= held <= length and isinstance(slot, int) and 0 <= slot <= held
    if not whole or (held > window and slot != held):
        raise StateRefused(f"a ring of {window} holds {held} of {length} tokens, slot {slot}")


def _rebuilt(layer: HostLayer, like: Like, slot: int, length: int) -> Any:
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


def _array(array: HostArray) -> mx.array:
    dtype: mx.Dtype = getattr(mx, array.dtype)
    if not len(array.data):
        return mx.zeros(array.shape, dtype)
    # A copy of its own: the bytes belong to somebody else.
    flat = mx.array(np.frombuffer(array.data, np.uint8))
    return flat.view(dtype).reshape(array.shape)
