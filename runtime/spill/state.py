"""A row's state as plain bytes in host memory: values, and how they are cut and joined.

Owned by nobody, frozen, safe to send to any thread. Knows no arrays of any library and no cache by
name: a layer is a word, some plain values and arrays of raw bytes. What it knows is where tokens
lie, so that what a state gained since an earlier one can be taken out and put back behind it:

    earlier state   tokens [0, first)       ┐ join
    delta           tokens [first, length)  ┘ ──▶ tokens [0, length)

Recurrent state and turned rings have no tokens to take out: a delta holds them whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Protocol, TypeAlias

Bytes: TypeAlias = bytes | memoryview
Meta: TypeAlias = tuple[tuple[str, int | float | str], ...]

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
}
"""Bytes of one item by MLX's name of its type."""
_PIECE = 1 << 20


class StateMismatch(ValueError):
    """Two states that do not fit together, or a cut that a state does not allow."""


@dataclass(frozen=True, slots=True)
class HostArray:
    """One array, row-major. ``data``: its raw bytes, little-endian; a view must be flat bytes.

    Raises ValueError when type, shape and number of bytes disagree.
    """

    dtype: str
    shape: tuple[int, ...]
    data: Bytes

    def __post_init__(self) -> None:
        if (item := ITEM_BYTES.get(self.dtype)) is None:
            raise ValueError(f"no array type is called {self.dtype!r}")
        if isinstance(self.data, memoryview) and (self.data.format, self.data.ndim) != ("B", 1):
            raise ValueError("a view of an array must be cast to flat bytes")
        if any(size < 0 for size in self.shape) or prod(self.shape) * item != len(self.data):
            raise ValueError(f"{self.dtype}{list(self.shape)} is not of {len(self.data)} bytes")


@dataclass(frozen=True, slots=True)
class HostLayer:
    """One layer's state.

    Attributes:
        kind: what the layer is, in the words of whoever exported it.
        meta: plain values that belong to it. Where every array has a token axis they must not
            depend on how many tokens there are, for a cut leaves them as they are.
        arrays: its arrays; may be none.
        token_axis: for each array the axis along which the state's tokens lie, first to last; None
            for an array without one (recurrent state, a turned ring).
    """

    kind: str
    meta: Meta
    arrays: tuple[HostArray, ...]
    token_axis: tuple[int | None, ...]

    def __post_init__(self) -> None:
        if len(self.arrays) != len(self.token_axis):
            raise ValueError(f"{len(self.arrays)} arrays with {len(self.token_axis)} token axes")
        for array, axis in zip(self.arrays, self.token_axis, strict=True):
            if axis is not None and not 0 <= axis < len(array.shape):
                raise ValueError(f"{list(array.shape)} has no axis {axis}")


@dataclass(frozen=True, slots=True)
class HostState:
    """Tokens [first, length) of a state; a whole one has ``first`` 0, a delta more.

    Raises ValueError when an array has another number of tokens along its token axis.
    """

    length: int
    layers: tuple[HostLayer, ...]
    first: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.length:
            raise ValueError(f"[{self.first}, {self.length}) holds no tokens")
        for layer in self.layers:
            for array, axis in zip(layer.arrays, layer.token_axis, strict=True):
                if axis is not None and array.shape[axis] != self.length - self.first:
                    raise ValueError(
                        f"{layer.kind}: {list(array.shape)} along {axis} is not of"
                        f" [{self.first}, {self.length})"
                    )


def nbytes(state: HostState) -> int:
    """Bytes of all arrays."""
    return sum(len(array.data) for layer in state.layers for array in layer.arrays)


def cut_tokens(state: HostState, first: int, last: int) -> HostState:
    """Tokens [first, last) of ``state``: with ``first`` > 0 what it has beyond an earlier state.

    Arrays without a token axis are taken whole, which is right only at the state's end.

    Raises:
        StateMismatch: the state does not hold these tokens, or ``last`` is before its end and some
            array has no token axis.
    """
    if not state.first <= first < last <= state.length:
        raise StateMismatch(f"[{first}, {last}) is not in [{state.first}, {state.length})")
    if last < state.length:
        for layer in state.layers:
            if None in layer.token_axis:
                raise StateMismatch(f"{layer.kind} of {state.length} tokens is not cut to {last}")
    start, stop = first - state.first, last - state.first
    layers = tuple(_cut_layer(layer, start, stop) for layer in state.layers)
    return HostState(last, layers, first)


def join(parent: HostState, *deltas: HostState) -> HostState:
    """``parent`` with each delta behind the one before; every byte is copied at most once.

    Where the last delta holds an array whole it replaces all earlier ones, whatever they were.

    Raises:
        StateMismatch: a delta that does not start where the state before it ends, or whose layers
            do not continue those before it.
    """
    parts = (parent, *deltas)
    for before, after in pairwise(parts):
        if after.first != before.length:
            raise StateMismatch(f"a delta from {after.first} does not continue {before.length}")
        if len(after.layers) != len(before.layers):
            raise StateMismatch(f"{len(after.layers)} layers do not continue {len(before.layers)}")
    if not deltas:
        return parent
    columns = zip(*(part.layers for part in parts), strict=True)
    return HostState(parts[-1].length, tuple(_join_layer(c) for c in columns), parent.first)


class ArrayShape(Protocol):
    """An array with or without its bytes."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class LayerShape(Protocol):
    """A layer with or without its bytes."""

    @property
    def kind(self) -> str: ...
    @property
    def meta(self) -> Meta: ...
    @property
    def arrays(self) -> Sequence[ArrayShape]: ...
    @property
    def token_axis(self) -> tuple[int | None, ...]: ...


def token_runs(array: HostArray, axis: int, start: int, stop: int) -> list[memoryview]:
    """The stretches of bytes in which tokens [start, stop) lie, one for each outer index.

    Behind one another they are the array's cut; nothing is copied.
    """
    view = memoryview(array.data)
    token = prod(array.shape[axis + 1 :]) * ITEM_BYTES[array.dtype]
    size = array.shape[axis] * token
    outer = range(0, prod(array.shape[:axis]) * size, size) if size else ()
    return [view[at + start * token : at + stop * token] for at in outer]


def check_continues(before: LayerShape, after: LayerShape) -> None:
    """Raise StateMismatch unless ``after`` can be joined behind ``before``; contents do not matter.

    An array that ``after`` holds whole needs nothing of ``before``.
    """
    if all(axis is None for axis in after.token_axis):
        return
    if (before.kind, before.token_axis) != (after.kind, after.token_axis):
        raise StateMismatch(f"{after.kind} does not continue {before.kind}")
    if None not in after.token_axis and before.meta != after.meta:
        raise StateMismatch(f"{after.kind} {after.meta} does not continue {before.meta}")
    for old, new, axis in zip(before.arrays, after.arrays, after.token_axis, strict=True):
        if axis is not None and (old.dtype, _but(old, axis)) != (new.dtype, _but(new, axis)):
            raise StateMismatch(
                f"{after.kind}: {new.dtype}{list(new.shape)} does not continue"
                f" {old.dtype}{list(old.shape)} along {axis}"
            )


def _cut_layer(layer: HostLayer, start: int, stop: int) -> HostLayer:
    pairs = zip(layer.arrays, layer.token_axis, strict=True)
    arrays = tuple(_cut_array(array, axis, start, stop) for array, axis in pairs)
    return HostLayer(layer.kind, layer.meta, arrays, layer.token_axis)


def _cut_array(array: HostArray, axis: int | None, start: int, stop: int) -> HostArray:
    if axis is None or (start, stop) == (0, array.shape[axis]):
        return array
    shape = (*array.shape[:axis], stop - start, *array.shape[axis + 1 :])
    slices = token_runs(array, axis, start, stop)
    return HostArray(array.dtype, shape, slices[0] if len(slices) == 1 else _joined(slices))


def _join_layer(parts: tuple[HostLayer, ...]) -> HostLayer:
    for before, after in pairwise(parts):
        check_continues(before, after)
    last = parts[-1]
    if all(axis is None for axis in last.token_axis):
        return last
    # Each layer continues the one before it, so all have the same axes.
    columns = zip(last.token_axis, *(part.arrays for part in parts), strict=True)
    arrays = tuple(_join_arrays(tuple(arrays), axis) for axis, *arrays in columns)
    return HostLayer(last.kind, last.meta, arrays, last.token_axis)


def _join_arrays(parts: tuple[HostArray, ...], axis: int | None) -> HostArray:
    if axis is None:
        return parts[-1]
    tokens = sum(part.shape[axis] for part in parts)
    last = parts[-1]
    shape = (*last.shape[:axis], tokens, *last.shape[axis + 1 :])
    rows = zip(*(token_runs(part, axis, 0, part.shape[axis]) for part in parts), strict=True)
    return HostArray(last.dtype, shape, _joined([run for row in rows for run in row]))


def _joined(runs: Sequence[memoryview]) -> memoryview:
    """All runs behind one another. Copied in pieces, since nobody else's Python runs meanwhile."""
    import numpy as np  # here: the command line imports this module and must start at once

    joined = np.empty(sum(map(len, runs)), np.uint8).data
    at = 0
    for run in runs:
        for first in range(0, len(run), _PIECE):
            piece = run[first : first + _PIECE]
            joined[at : at + len(piece)] = piece
            at += len(piece)
    return joined.toreadonly()


def _but(array: ArrayShape, axis: int) -> tuple[int, ...]:
    return array.shape[:axis] + array.shape[axis + 1 :]
