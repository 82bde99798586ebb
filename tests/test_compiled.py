"""Replayed decode steps and fused projections against plain steps and single rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from ragged_rig import Replayed, assert_equal, model_named
from tiny import load_oracle, make_checkpoint, prompt

from mlx_troupe.runtime.engine import compiled as compiled_module
from mlx_troupe.runtime.engine.executor import MLXDevice
from mlx_troupe.runtime.engine.fusing import TurnedLinear, fuse_projections, turn_weights
from mlx_troupe.runtime.engine.opening import Options
from mlx_troupe.runtime.engine.snapshots import arrays_of
from mlx_troupe.runtime.plans import Cold, PrefillRow, RowId, StartRow, StepId, StepPlan
from mlx_troupe.runtime.requests import Sampling

pytestmark = pytest.mark.mlx


@pytest.mark.parametrize("name", ["llama", "llama-4-kv-heads", "sliding", "short-window", "qwen3"])
def test_replayed_steps_equal_solo_rows(name: str) -> None:
    """Rows join, leave a spare slot, cross a capacity and a window: every logit as it was."""
    troupe = Replayed(model_named(name))
    for row, length in enumerate((3, 60, 17, 1, 126)):
        troupe.add(row, length)
    for _ in range(4):
        troupe.step()
    troupe.drop(2)
    for _ in range(4):
        troupe.step()
    troupe.add(9, 2)
    troupe.step(4)
    for _ in range(6):
        troupe.step()
    assert troupe.replays >= 10


def test_a_trace_that_forgets_the_offsets_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails when a replay goes on with the offsets of the first one."""
    honest, known = compiled_module._spread, []

    def stale(segments: Any) -> Any:
        known.append(honest(segments))
        return known[0]

    monkeypatch.setattr(compiled_module, "_spread", stale)
    troupe = Replayed(model_named("llama"))
    for row in range(3):
        troupe.add(row, 5 + row)
    for _ in range(2):
        troupe.step()
    with pytest.raises(AssertionError, match="differ"):
        troupe.step()


@pytest.mark.parametrize("length", [20, 64, 65])
def test_copies_stay_as_they_were(length: int) -> None:
    """Of a row that leaves or goes on: later steps write near them, some of them in place."""
    troupe = Replayed(model_named("llama"))
    for row in (0, 1, 2):
        troupe.add(row, length + (row > 1))
    for _ in range(3):
        troupe.step()
    batch = troupe.batch
    held = {row: batch.length(RowId(row)) for row in (0, 1)}
    before = {row: arrays_of(batch.export(RowId(row), held[row])) for row in held}
    mx.eval(list(before.values()))
    known = {row: [np.array(array) for array in arrays] for row, arrays in before.items()}
    unfinished = {row: arrays_of(batch.export(RowId(row), held[row])) for row in held}
    troupe.drop(0)
    troupe.step()
    troupe.add(3, length)
    for _ in range(3):
        troupe.step()
    for row in held:
        for made in (before[row], unfinished[row]):
            pairs = zip(made, known[row], strict=True)
            assert all(np.array_equal(np.array(array), was) for array, was in pairs)


def test_old_traces_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more traces are kept than the limit; the last one used stays."""
    monkeypatch.setattr(compiled_module, "MOST_TRACES", 1)
    troupe = Replayed(model_named("llama"))
    for row in range(3):
        troupe.add(row, 5)
        for _ in range(3):
            troupe.step()
        assert len(troupe.compiled._traces) == 1
    assert troupe.replays >= 6


@pytest.mark.parametrize("bits", [0, 4])
def test_fused_projections_change_nothing(bits: int, tmp_path: Path) -> None:
    """Two products a layer instead of five, the same logits, the same parameters."""
    model = load_oracle(make_checkpoint(tmp_path / "m", "llama", head_dim=64))
    if bits:
        nn.quantize(model, group_size=32, bits=bits)
    ids = mx.array([prompt(9)])
    expected = model(ids)
    mx.eval(expected)
    assert fuse_projections(model) == 2 * len(model.layers)
    assert_equal(model(ids), expected)
    assert fuse_projections(model) == 0
    attention: Any = model.layers[0].self_attn
    assert isinstance(attention.q_proj, nn.QuantizedLinear if bits else nn.Linear)
    assert attention.q_proj.weight.shape[0] == 4 * 64


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_turned_weights_change_nothing(family: str, tmp_path: Path) -> None:
    """Every bit of one row and of two, with biases and without; no parameter more or less."""
    model: Any = load_oracle(make_checkpoint(tmp_path / "m", family))
    inputs = [mx.array([prompt(9)]), mx.array([prompt(9), prompt(9, seed=1)]), mx.array([[5]])]
    before = [model(ids) for ids in inputs]
    names = [name for name, _ in tree_flatten(model.parameters())]
    turn_weights(model.modules())
    assert any(type(module) is TurnedLinear for module in model.modules())
    assert names == [name for name, _ in tree_flatten(model.parameters())]
    for ids, expected in zip(inputs, before, strict=True):
        assert mx.array_equal(model(ids), expected)


def test_projections_that_differ_stay_apart(tmp_path: Path) -> None:
    """A bias on one of them, or other bits, and nothing is fused."""
    model: Any = load_oracle(make_checkpoint(tmp_path / "m", "llama", head_dim=64))
    for layer in model.layers:
        layer.self_attn.k_proj.bias = mx.zeros((128,))
        layer.mlp.up_proj = nn.QuantizedLinear.from_linear(layer.mlp.up_proj, 32, 4)
    assert fuse_projections(model) == 0


def test_a_device_that_replays_samples_the_same(tmp_path: Path) -> None:
    """As on a GPU: greedy ids of one row and of three are those of a device that does not."""
    path = make_checkpoint(tmp_path / "m", "llama")
    plain = _greedy(MLXDevice(Options(path, name="plain")))
    device = MLXDevice(Options(path, name="replayed", replay=True))
    assert _greedy(device) == plain
    assert device._forward is not None
    assert device._forward._compiled is not None
    assert device._forward._compiled._traces


def _greedy(device: MLXDevice) -> list[list[tuple[int, int]]]:
    device.open()
    found = []
    for rows in ((RowId(1),), (RowId(2), RowId(3), RowId(4))):
        prompts = {row: prompt(7 + row, seed=row) for row in rows}
        starts = tuple(StartRow(row, prompts[row], Sampling(), Cold()) for row in rows)
        chunks = tuple(PrefillRow(row, len(prompts[row]) - 1) for row in rows)
        plans = [StepPlan(StepId(0), start=starts, prefill=chunks)]
        plans += [StepPlan(StepId(1 + step), decode=rows) for step in range(8)]
        plans.append(StepPlan(StepId(9), end=rows))
        ids: list[tuple[int, int]] = []
        for plan in plans:
            device.launch(plan)
            device.push()
            ids += [(token.row, token.token) for token in device.settle().sampled]
        found.append(sorted(ids))
    return found


def test_exact_devices_do_not_share_states_with_replaying_ones(tmp_path: Path) -> None:
    """Bit for bit includes the prefix: the namespaces differ."""
    path = make_checkpoint(tmp_path / "m", "llama")
    exact, replaying = (MLXDevice(Options(path, name="m", replay=how)) for how in (False, True))
    assert exact.open().namespace != replaying.open().namespace
