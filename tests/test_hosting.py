"""Kept states as bytes and back: bit for bit, for every cache that a row may consist of."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny
import tiny_families
import tiny_hybrids
from device_rig import Driver
from kv_rig import CONFIG
from mlx_lm.models.cache import CacheList, make_prompt_cache
from tier_rig import recorded

from mlx_troupe.runtime.device import StateSlice
from mlx_troupe.runtime.engine.hosting import Hosting
from mlx_troupe.runtime.engine.kvplan import PLAIN_PLAN
from mlx_troupe.runtime.engine.snapshots import arrays_of, compact, cut
from mlx_troupe.runtime.errors import StateRefused
from mlx_troupe.runtime.kvschemes import PLAIN_KV, AffineKV, KVScheme, PerLayerKV, TurboKV
from mlx_troupe.runtime.plans import FromSnapshot, RowId, SnapshotId, StartRow
from mlx_troupe.runtime.requests import Sampling
from mlx_troupe.runtime.spill.state import (
    HostArray,
    HostState,
    StateMismatch,
    cut_tokens,
    join,
)

pytestmark = pytest.mark.mlx

A, B, C, D = (RowId(n) for n in range(1, 5))
KEPT, BACK, OTHER = SnapshotId(1), SnapshotId(2), SnapshotId(3)
NEXT = 8
WIDE = {"head_dim": 64}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", WIDE),
    "sliding": ("sliding", {**WIDE, "sliding_window": 16}),
    "recurrent": ("mamba2", {}),
    "hybrid": ("qwen3_5", {}),
    "lists": (
        "llama",
        {**tiny_hybrids.HYBRIDS["falcon_h1"], **WIDE, "model_type": "falcon_h1"},
    ),
}
FORMS: list[tuple[str, KVScheme]] = [
    ("plain", PLAIN_KV),
    ("plain", AffineKV(8, start=16)),
    ("plain", AffineKV(4)),
    ("plain", PerLayerKV()),
    ("plain", TurboKV()),
    ("sliding", PLAIN_KV),
    ("sliding", AffineKV(8)),
    ("sliding", TurboKV(4, 5)),
    ("recurrent", PLAIN_KV),
    ("hybrid", PLAIN_KV),
    ("lists", PLAIN_KV),
]
LENGTHS = (5, 15, 16, 17, 40, 257)
"""Before, at and past the window of 16, the threshold of 16, and a block of 256."""


@cache
def folder(name: str) -> Path:
    """One of ``CONFIGS`` as a checkpoint, written once."""
    family, config = CONFIGS[name]
    path = tiny.make_checkpoint(Path(tempfile.mkdtemp(prefix="host")) / "m", family, **config)
    (path / "kv_config.json").write_text(CONFIG)
    return path


@pytest.fixture
def drive() -> Iterator[Callable[..., Driver]]:
    """Opens drivers and closes their devices."""
    opened: list[Driver] = []

    def open_(name: str, kv: KVScheme = PLAIN_KV, dtype: str = "float32") -> Driver:
        opened.append(Driver(folder(name), kv=kv, dtype=dtype))
        return opened[-1]

    yield open_
    for driver in opened:
        driver.device.close()


@pytest.fixture
def logits() -> Iterator[list[np.ndarray]]:
    """The logits of every draw, in order."""
    with recorded() as seen:
        yield seen


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "kv"), FORMS, ids=lambda v: str(v))
@pytest.mark.parametrize("batched", [False, True])
def test_what_comes_back_goes_on_bit_for_bit(
    name: str,
    kv: KVScheme,
    dtype: str,
    batched: bool,
    drive: Callable[..., Driver],
    logits: list[np.ndarray],
) -> None:
    """Bytes, settings and the next eight tokens' logits are those of the kept state."""
    driver = drive(name, kv, dtype)
    lengths = LENGTHS if dtype == "float32" and not batched else (5, 17, 40)
    for number, length in enumerate(lengths):
        row, twin, again, company = (RowId(4 * number + n) for n in range(1, 5))
        ids = tiny.prompt(length, seed=number)
        driver.start(row, ids)
        if batched:
            driver.start(company, tiny.prompt(9, seed=100 + number))
        driver.decode(1, row, *(company,) * batched)
        made = driver.keep(row, length, KEPT)
        back = driver.device.import_state(StateSlice(BACK, driver.export(KEPT)))
        assert (back.length, back.nbytes) == (made.length, made.nbytes)
        driver.assert_same_state(KEPT, BACK)
        text = (*ids, 3)
        outcomes = []
        driver.step(end=(row, company) if batched else (row,))
        for other, snapshot in ((twin, KEPT), (again, BACK)):
            logits.clear()
            driver.start(other, text, FromSnapshot(snapshot, length))
            drawn = driver.decode(NEXT, other)
            outcomes.append((drawn, [x.copy() for x in logits]))
            driver.step(end=(other,))
        (drawn, expected), (drawn_again, got) = outcomes
        assert drawn == drawn_again
        assert len(expected) == NEXT
        assert all(np.array_equal(x, y) for x, y in zip(expected, got, strict=True))
        driver.device.release((KEPT, BACK))


@pytest.mark.parametrize(("name", "kv"), FORMS, ids=lambda v: str(v))
def test_a_state_comes_back_in_another_process_life(
    name: str, kv: KVScheme, drive: Callable[..., Driver], logits: list[np.ndarray]
) -> None:
    """Closed and opened again, the device goes on from the bytes as it did from the state."""
    driver = drive(name, kv)
    ids = tiny.prompt(40)
    driver.start(A, ids)
    driver.keep(A, 39, KEPT)
    state = driver.export(KEPT)
    copied = HostState(
        state.length,
        tuple(
            replace(y, arrays=tuple(replace(x, data=bytes(x.data)) for x in y.arrays))
            for y in state.layers
        ),
    )
    driver.step(end=(A,))
    logits.clear()
    driver.start(B, ids, FromSnapshot(KEPT, 39))
    drawn = driver.decode(NEXT, B)
    expected = [x.copy() for x in logits]
    driver.device.close()
    driver.device.open()
    logits.clear()
    driver.device.import_state(StateSlice(BACK, copied))
    driver.start(A, ids, FromSnapshot(BACK, 39))
    assert driver.decode(NEXT, A) == drawn
    assert all(np.array_equal(x, y) for x, y in zip(expected, logits, strict=True))


@pytest.mark.parametrize(("name", "kv"), FORMS, ids=lambda v: str(v))
@pytest.mark.parametrize("length", [12, 30])
def test_a_delta_behind_an_earlier_state_is_the_later_state(
    name: str, kv: KVScheme, length: int, drive: Callable[..., Driver]
) -> None:
    """Tokens lie where the layers say: what one turn added, joined to the turn before."""
    driver = drive(name, kv)
    driver.start(A, tiny.prompt(length))
    driver.decode(1, A)
    driver.keep(A, length, KEPT)
    before = driver.export(KEPT)
    driver.decode(12, A)
    driver.keep(A, length + 12, OTHER)
    after = driver.export(OTHER)
    delta = cut_tokens(after, length, after.length)
    if before.length < driver.info.trim_floor:
        with pytest.raises(StateMismatch):
            join(before, delta)
        return
    driver.device.import_state(StateSlice(BACK, join(before, delta)))
    driver.assert_same_state(OTHER, BACK)


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES | tiny_families.FAMILIES))
def test_every_family_has_a_form_as_bytes(family: str) -> None:
    """Each family's caches come back with every bit, before and after a window has turned."""
    path = tiny.make_checkpoint(Path(tempfile.mkdtemp(prefix="host")) / "m", family)
    model: Any = tiny.load_oracle(path)
    hosting = Hosting(model, PLAIN_PLAN)
    for length in (7, 40):
        caches: list[Any] = make_prompt_cache(model)
        model(mx.array([tiny.prompt(length)]), cache=caches)
        caches = compact(cut(caches, length, length))
        arrival = hosting.begin(HostState(length, hosting.export(caches, length, 0, 99)))
        arrival.take()
        for x, y in zip(arrays_of(caches), arrays_of(arrival.caches()), strict=True):
            assert x.dtype == y.dtype
            assert np.array_equal(np.array(x.view(mx.uint8)), np.array(y.view(mx.uint8)))


@pytest.mark.parametrize("kv", [AffineKV(8), TurboKV()], ids=lambda v: str(v))
def test_encoded_layers_in_lists_are_kept_and_come_back(
    kv: KVScheme, drive: Callable[..., Driver]
) -> None:
    """mlx-lm's list of caches does not know ours by name; keeping and cloning must."""
    driver = drive("lists", kv)
    caches = driver.device._opened()[0].states._hosting._blank
    assert any(type(cache) is CacheList for cache in caches)
    driver.start(A, tiny.prompt(20))
    drawn = driver.decode(1, A)
    driver.keep(A, 20, KEPT)
    driver.device.import_state(StateSlice(BACK, driver.export(KEPT)))
    driver.assert_same_state(KEPT, BACK)
    driver.start(B, (*tiny.prompt(20), drawn[0]), FromSnapshot(BACK, 20))
    assert driver.decode(4, B) == driver.decode(4, A)


def test_layers_leave_in_slices(drive: Callable[..., Driver]) -> None:
    """Slices of any size make the same state; beyond its end there is nothing."""
    driver = drive("sliding")
    driver.start(A, tiny.prompt(20))
    driver.keep(A, 19, KEPT)
    whole = driver.device.export(KEPT, 0, 99)
    assert len(whole) == 3
    for size in (1, 2, 3):
        assert driver.export(KEPT, size).layers == whole
    assert driver.device.export(KEPT, 3, 1) == ()


@pytest.mark.parametrize(("name", "kv"), FORMS, ids=lambda v: str(v))
def test_what_a_row_gained_goes_behind_what_it_had(
    name: str, kv: KVScheme, drive: Callable[..., Driver]
) -> None:
    """An earlier state and the later one without its tokens are, joined, the later one."""
    driver = drive(name, kv)
    driver.start(A, tiny.prompt(21))
    driver.keep(A, 20, KEPT)
    earlier = driver.export(KEPT)
    driver.decode(8, A)
    driver.keep(A, 28, OTHER)
    gained = HostState(28, driver.device.export(OTHER, 0, 99, 20), 20)
    assert join(earlier, gained) == driver.export(OTHER)


def test_layers_arrive_in_slices(drive: Callable[..., Driver]) -> None:
    """In order only; what arrives is no state until it is whole, and may be given up before."""
    driver = drive("sliding")
    ids = tiny.prompt(20)
    driver.start(A, ids)
    made = driver.keep(A, 19, KEPT)
    state = driver.export(KEPT)
    device, took = driver.device, made.nbytes
    whole = replace(made, snapshot=BACK)
    for size in (1, 2, 3):
        answers = [
            device.import_state(StateSlice(BACK, state, (), at, size)) for at in range(0, 3, size)
        ]
        assert answers == [None] * (len(answers) - 1) + [whole]
        driver.assert_same_state(KEPT, BACK)
        device.release((BACK,))
    assert device.import_state(StateSlice(BACK, state, (), 0, 2)) is None
    assert device.stats().snapshots == 1
    assert device.stats().snapshot_bytes == 2 * took, "its room is taken"
    start = StartRow(B, ids, Sampling(), FromSnapshot(BACK, 19))
    assert len(driver.step(start=(start,)).failed) == 1
    twin = HostState(state.length, state.layers)
    for wrong, first in ((state, 1), (state, 3), (twin, 2)):
        assert device.import_state(StateSlice(BACK, state, (), 0, 2)) is None
        with pytest.raises(StateRefused):
            device.import_state(StateSlice(BACK, wrong, (), first, 1))
        assert device.stats().snapshot_bytes == took, "nothing of it is kept"
    device.import_state(StateSlice(BACK, state, (), 0, 2))
    device.release((BACK,))
    assert device.stats().snapshot_bytes == took
    with pytest.raises(StateRefused):
        device.import_state(StateSlice(BACK, state, (), 2, 1))
    assert device.import_state(StateSlice(BACK, state, (), 0, 1)) is None
    assert device.import_state(StateSlice(BACK, state)) == whole, "begun anew"


def test_exported_bytes_outlive_the_state(drive: Callable[..., Driver]) -> None:
    """Rows that go on, a release and a rest change nothing of what was handed out."""
    driver = drive("plain")
    ids = tiny.prompt(20)
    driver.start(A, ids)
    driver.keep(A, 19, KEPT)
    state = driver.export(KEPT)
    image = [bytes(x.data) for y in state.layers for x in y.arrays]
    driver.start(B, ids, FromSnapshot(KEPT, 19))
    driver.device.release((KEPT,))
    driver.decode(5, B, A)
    driver.device.drop_rows()
    driver.device.idle()
    driver.start(C, tiny.prompt(300, seed=9))
    assert [bytes(x.data) for y in state.layers for x in y.arrays] == image
    with pytest.raises(TypeError):
        memoryview(state.layers[0].arrays[0].data)[0] = 1


def changed(state: HostState, layer: int = 0, **parts: Any) -> HostState:
    """``state`` with another ``layer``."""
    layers = list(state.layers)
    layers[layer] = replace(layers[layer], **parts)
    return HostState(state.length, tuple(layers))


def resized(array: HostArray, axis: int, by: int = 1) -> HostArray:
    """Zeros of another shape."""
    shape = tuple(n + by * (at == axis) for at, n in enumerate(array.shape))
    size = len(array.data) // max(1, int(np.prod(array.shape)))
    return HostArray(array.dtype, shape, bytes(int(np.prod(shape)) * size))


def hostile(state: HostState) -> Iterator[HostState]:
    """States that are like ``state`` and wrong."""
    yield HostState(state.length, state.layers[:-1])
    yield HostState(state.length, (*state.layers, state.layers[0]))
    yield HostState(state.length, ())
    yield changed(state, kind="other")
    yield changed(state, meta=(*state.layers[0].meta, ("more", 1)))
    yield changed(state, meta=(("slot", 0), *state.layers[0].meta))
    yield changed(state, meta=(("slot", "x"), *state.layers[0].meta[:-1]))
    arrays, axes = state.layers[0].arrays, state.layers[0].token_axis
    yield changed(state, arrays=arrays[:-1], token_axis=axes[:-1])
    yield changed(state, arrays=(*arrays, arrays[0]), token_axis=(*axes, axes[0]))
    for axis in range(len(arrays[0].shape)):
        if axis != axes[0]:
            yield changed(state, arrays=(resized(arrays[0], axis), *arrays[1:]))
    other = "float16" if arrays[0].dtype != "float16" else "bfloat16"
    narrow = HostArray(other, arrays[0].shape, bytes(2 * int(np.prod(arrays[0].shape))))
    yield changed(state, arrays=(narrow, *arrays[1:]))
    flat = HostArray(arrays[0].dtype, (*arrays[0].shape, 1), arrays[0].data)
    yield changed(state, arrays=(flat, *arrays[1:]))
    if axes[0] is not None:
        yield changed(state, token_axis=(None,) * len(axes))
        yield cut_tokens(state, 3, state.length)
    if state.layers[0].kind.endswith("ring") and axes[0] is None:
        yield changed(state, meta=state.layers[0].meta[:-1])
        for slot in (-1, 17, 10**9, 1.5):
            yield changed(state, meta=(*state.layers[0].meta[:-1], ("slot", slot)))
        yield HostState(4, state.layers[:1] + state.layers[2:3])


@pytest.mark.parametrize(("name", "kv"), FORMS, ids=lambda v: str(v))
@pytest.mark.parametrize("length", [9, 30])
def test_what_is_no_state_of_the_model_is_refused(
    name: str, kv: KVScheme, length: int, drive: Callable[..., Driver]
) -> None:
    """Wrong kinds, settings, shapes, types and lengths harm neither rows nor kept states."""
    driver = drive(name, kv)
    ids = tiny.prompt(length)
    driver.start(A, ids)
    drawn = driver.decode(1, A)
    driver.keep(A, length, KEPT)
    state = driver.export(KEPT)
    before = driver.device.stats()
    refused = 0
    for wrong in hostile(state):
        with pytest.raises(StateRefused):
            driver.device.import_state(StateSlice(BACK, wrong))
        refused += 1
    assert refused >= 12
    stats = driver.device.stats()
    assert (stats.snapshots, stats.snapshot_bytes) == (1, before.snapshot_bytes)
    driver.device.import_state(StateSlice(BACK, state))
    driver.start(B, (*ids, drawn[0]), FromSnapshot(BACK, length))
    assert driver.decode(4, B) == driver.decode(4, A)


def test_states_of_another_model_are_refused(drive: Callable[..., Driver]) -> None:
    """Each of the forms is at home in its own model and scheme only."""
    states: list[tuple[int, HostState]] = []
    drivers = [drive(name, kv) for name, kv in FORMS if kv != PerLayerKV()]
    for number, driver in enumerate(drivers):
        driver.start(A, tiny.prompt(30))
        driver.keep(A, 29, KEPT)
        states.append((number, driver.export(KEPT)))
    plain_beside_encoded = 0
    for number, driver in enumerate(drivers):
        for home, state in states:
            if home == number:
                continue
            try:
                driver.device.import_state(StateSlice(BACK, state))
            except StateRefused:
                continue
            plain_beside_encoded += 1
            assert all(layer.kind in ("plain", "ring") for layer in state.layers)
            driver.device.release((BACK,))
    # The shapes cannot tell them from a row of the same model that is not encoded yet.
    assert plain_beside_encoded == 5


def test_an_encoded_state_below_the_threshold_is_refused(drive: Callable[..., Driver]) -> None:
    """A cold row of nine tokens would still be plain under a threshold of sixteen."""
    eager, patient = drive("plain", AffineKV(8)), drive("plain", AffineKV(8, start=16))
    for length, welcome in ((9, False), (15, False), (16, True)):
        eager.start(A, tiny.prompt(length + 1))
        eager.keep(A, length, KEPT)
        state = eager.export(KEPT)
        eager.step(end=(A,))
        if welcome:
            patient.device.import_state(StateSlice(BACK, state))
        else:
            with pytest.raises(StateRefused, match="not be encoded yet"):
                patient.device.import_state(StateSlice(BACK, state))


def test_an_id_is_used_once(drive: Callable[..., Driver]) -> None:
    """An unknown id is not exported; a known one is not imported over."""
    driver = drive("plain")
    driver.start(A, tiny.prompt(9))
    driver.keep(A, 8, KEPT)
    with pytest.raises(StateRefused):
        driver.device.export(OTHER, 0, 1)
    with pytest.raises(StateRefused):
        driver.device.import_state(StateSlice(KEPT, driver.export(KEPT)))


def test_a_state_serves_only_rows_with_its_adapters(drive: Callable[..., Driver]) -> None:
    """An imported state remembers what it was computed with."""
    driver = drive("plain")
    ids = tiny.prompt(9)
    driver.start(A, ids)
    driver.keep(A, 8, KEPT)
    driver.device.import_state(StateSlice(BACK, driver.export(KEPT), ("revision",)))
    start = StartRow(B, ids, Sampling(), FromSnapshot(BACK, 8))
    (failed,) = driver.step(start=(start,)).failed
    assert "other adapters" in failed.reason
