"""States as host bytes: cutting and joining."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_troupe.runtime.spill.state import (
    HostArray,
    HostLayer,
    HostState,
    StateMismatch,
    cut_tokens,
    join,
    nbytes,
)

DTYPES = {"uint8": np.uint8, "bfloat16": np.uint16, "float32": np.float32, "int64": np.int64}


def host(array: np.ndarray, dtype: str) -> HostArray:
    """An array of NumPy's as a host array under the name of ``dtype``."""
    data = np.ascontiguousarray(array).data.cast("B") if array.size else b""
    return HostArray(dtype, array.shape, data)


def numbered(dtype: str, shape: tuple[int, ...], seed: int) -> HostArray:
    """An array whose bytes differ from item to item."""
    size = int(np.prod(shape))
    values = (np.arange(size, dtype=np.uint64) * 2654435761 + seed) % 251
    return host(values.astype(DTYPES[dtype]).reshape(shape), dtype)


@st.composite
def layers(draw: st.DrawFn, length: int) -> HostLayer:
    """A layer of a state of ``length`` tokens, with arrays of any kind."""
    arrays, axes = [], []
    for index in range(draw(st.integers(0, 3))):
        other = draw(st.lists(st.integers(0, 3), min_size=0, max_size=3))
        axis = draw(st.none() | st.integers(0, len(other)))
        shape = tuple(other) if axis is None else (*other[:axis], length, *other[axis:])
        arrays.append(numbered(draw(st.sampled_from(sorted(DTYPES))), shape, index))
        axes.append(axis)
    meta = (("bits", draw(st.integers(0, 8))), ("name", "x"))
    return HostLayer(draw(st.sampled_from(("plain", "ring"))), meta, tuple(arrays), tuple(axes))


@st.composite
def states(draw: st.DrawFn) -> HostState:
    """A whole state."""
    length = draw(st.integers(1, 12))
    count = draw(st.integers(0, 3))
    return HostState(length, tuple(draw(layers(length)) for _ in range(count)))


@settings(deadline=None)
@given(states(), st.data())
def test_a_state_cut_anywhere_joins_to_itself(state: HostState, data: st.DataObject) -> None:
    """An earlier state and any chain of deltas behind it give the later state, byte for byte."""
    cuts = sorted(data.draw(st.sets(st.integers(1, state.length - 1)))) if state.length > 1 else []
    edges = [0, *cuts, state.length]
    whole = all(None not in layer.token_axis for layer in state.layers)
    if whole:
        parts = [cut_tokens(state, a, b) for a, b in pairwise(edges)]
    else:
        # Only its end knows the arrays without a token axis: earlier states have other ones.
        parts = [_earlier(state, a, b) for a, b in pairwise(edges)]
    assert join(*parts) == state
    for at in range(1, len(parts)):
        assert join(join(*parts[:at]), join(*parts[at:])) == state


def _earlier(state: HostState, first: int, last: int) -> HostState:
    if last == state.length:
        return cut_tokens(state, first, last)
    layers = []
    for layer in state.layers:
        arrays = tuple(
            numbered("uint8", (3,), 7)
            if axis is None
            else host(
                np.take(_view(array), range(first, last), axis=axis),
                array.dtype,
            )
            for array, axis in zip(layer.arrays, layer.token_axis, strict=True)
        )
        layers.append(HostLayer(layer.kind, layer.meta, arrays, layer.token_axis))
    return HostState(last, tuple(layers), first)


def _view(array: HostArray) -> np.ndarray:
    return np.frombuffer(array.data, DTYPES[array.dtype]).reshape(array.shape)


@settings(deadline=None)
@given(states(), st.data())
def test_a_cut_of_a_cut_is_the_cut(state: HostState, data: st.DataObject) -> None:
    """Taking a delta out of a delta gives what taking it out of the state gives."""
    first = data.draw(st.integers(0, state.length - 1))
    again = data.draw(st.integers(first, state.length - 1))
    delta = cut_tokens(state, first, state.length)
    assert cut_tokens(delta, again, state.length) == cut_tokens(state, again, state.length)


@settings(deadline=None)
@given(states(), st.data())
def test_a_cut_takes_the_tokens_that_numpy_would(state: HostState, data: st.DataObject) -> None:
    """Along its token axis each array is what a slice is; the others are untouched."""
    first = data.draw(st.integers(0, state.length - 1))
    delta = cut_tokens(state, first, state.length)
    for old, new in zip(state.layers, delta.layers, strict=True):
        for a, b, axis in zip(old.arrays, new.arrays, old.token_axis, strict=True):
            tokens = range(first, state.length)
            expected = _view(a) if axis is None else np.take(_view(a), tokens, axis=axis)
            assert np.array_equal(_view(b), expected)
    assert nbytes(delta) == sum(len(a.data) for layer in delta.layers for a in layer.arrays)


def test_long_arrays_are_copied_in_pieces_and_whole() -> None:
    """More than a piece, and no whole number of them, from each of two states and two heads."""
    array = numbered("uint8", (2, 5, 500_001), 3)
    state = HostState(5, (HostLayer("plain", (), (array,), (1,)),))
    parts = cut_tokens(state, 0, 2), cut_tokens(state, 2, 5)
    assert bytes(parts[1].layers[0].arrays[0].data) == _view(array)[:, 2:].tobytes()
    assert bytes(join(*parts).layers[0].arrays[0].data) == bytes(array.data)


def plain(length: int, first: int = 0, **change: object) -> HostState:
    """A state of one layer with keys of ``length - first`` tokens."""
    values: dict[str, Any] = {
        "kind": "plain",
        "meta": (("bits", 4),),
        "dtype": "float32",
        "heads": 2,
        **change,
    }
    keys = numbered(values["dtype"], (1, values["heads"], length - first, 4), 0)
    layer = HostLayer(values["kind"], values["meta"], (keys,), (2,))
    return HostState(length, (layer,), first)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "turbo"},
        {"meta": (("bits", 8),)},
        {"dtype": "bfloat16"},
        {"heads": 3},
    ],
)
def test_states_of_another_form_are_not_joined(change: dict) -> None:
    """A delta of another kind, meaning, type or shape is refused in words."""
    with pytest.raises(StateMismatch):
        join(plain(4), plain(6, first=4, **change))


def test_a_gap_or_an_overlap_is_not_joined() -> None:
    """A delta must start exactly where the state before it ends."""
    for first in (3, 5):
        with pytest.raises(StateMismatch):
            join(plain(4), plain(8, first=first))


def test_another_number_of_layers_is_not_joined() -> None:
    """A delta of another model is refused."""
    delta = plain(6, first=4)
    with pytest.raises(StateMismatch):
        join(plain(4), HostState(6, delta.layers * 2, 4))


def test_a_ring_that_turned_replaces_the_straight_one() -> None:
    """A layer that became a ring after the earlier state is taken whole from the delta."""
    ring = HostLayer("ring", (("idx", 3),), (numbered("float32", (1, 2, 5, 4), 1),), (None,))
    delta = HostState(9, (ring,), 4)
    assert join(plain(4), delta) == HostState(9, (ring,))
    with pytest.raises(StateMismatch):
        join(join(plain(4), delta), plain(12, first=9))


def test_a_state_with_whole_arrays_is_cut_only_at_its_end() -> None:
    """A recurrent layer of ten tokens is not one of five."""
    layer = HostLayer("arrays", (), (numbered("float32", (3,), 0),), (None,))
    state = HostState(10, (layer,))
    assert cut_tokens(state, 5, 10).layers == (layer,)
    with pytest.raises(StateMismatch):
        cut_tokens(state, 0, 5)


@pytest.mark.parametrize(("first", "last"), [(0, 0), (3, 3), (-1, 2), (2, 7), (4, 2)])
def test_a_cut_outside_a_state_is_refused(first: int, last: int) -> None:
    """Only tokens that are there, and at least one of them."""
    with pytest.raises(StateMismatch):
        cut_tokens(plain(6), first, last)


def test_arrays_and_states_that_cannot_be_are_refused() -> None:
    """Sizes that disagree, unknown types and shaped views are told at once."""
    for dtype, shape, data in (
        ("float32", (2,), b"1234"),
        ("float33", (1,), b"1234"),
        ("uint8", (-4,), b"1234"),
        ("float32", (1,), np.zeros(1, np.float32).data),
    ):
        with pytest.raises(ValueError, match=r"no array|not of|flat"):
            HostArray(dtype, shape, data)
    keys = numbered("uint8", (4,), 0)
    with pytest.raises(ValueError, match="axis"):
        HostLayer("plain", (), (keys,), (1,))
    with pytest.raises(ValueError, match="axes"):
        HostLayer("plain", (), (keys,), ())
    with pytest.raises(ValueError, match="along"):
        HostState(5, (HostLayer("plain", (), (keys,), (0,)),))


def test_what_need_not_move_is_not_copied() -> None:
    """An array without outer dimensions is cut as a view of the bytes it had."""
    keys = numbered("uint8", (8, 4), 0)
    state = HostState(8, (HostLayer("plain", (), (keys,), (0,)),))
    (cut,) = cut_tokens(state, 2, 8).layers[0].arrays
    assert isinstance(cut.data, memoryview)
    assert cut.data.obj is memoryview(keys.data).obj
