"""Every family that the project names: lone rows against mlx-lm, ragged rows against lone ones."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from family_rig import (
    PROMPTS,
    TOKENS,
    answers,
    ask_mlx_lm,
    family,
    plans,
    ragged_run,
    run_plans,
)
from mutants import forget_the_window, leak_a_slot, lose_a_token, shift_positions
from ragged_rig import TOLERANCE, Replayed, Troupe
from tiny import load_oracle, prompt
from tiny_families import FAMILIES, ONE_BY_ONE

from mlx_troupe.actors.threads import run_on_device_thread
from mlx_troupe.runtime.engine import batch as batch_module
from mlx_troupe.runtime.engine import layouts, steps
from mlx_troupe.runtime.engine.batch import why_not_batchable
from mlx_troupe.runtime.engine.executor import MLXDevice
from mlx_troupe.runtime.engine.opening import Options
from mlx_troupe.runtime.plans import (
    FromSnapshot,
    KeepRow,
    PrefillRow,
    RowId,
    SnapshotId,
    StartRow,
    StepId,
    StepPlan,
)
from mlx_troupe.runtime.requests import Sampling

pytestmark = pytest.mark.mlx

WITHOUT_KEYS = ("mamba", "mamba2")
"""Broken layouts of these are in test_recurrent."""
RECURRENT = ("qwen3_5", "qwen3_5_moe", *WITHOUT_KEYS)
SHELLS = ("gemma4",)
TOGETHER = tuple(name for name in FAMILIES if name not in SHELLS)
SLIDING = ("gemma3_text", "gemma4_text", "gemma4_text-moe", "gpt_oss")
PACKED = ("gemma2", "gemma4_text", "qwen3_moe", "qwen3_5", "phi3")

Mutant = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize(
    ("name", "bits"), [*((name, None) for name in FAMILIES), *((name, 4) for name in PACKED)]
)
def test_a_lone_row_is_bit_exact_with_mlx_lm(name: str, bits: int | None) -> None:
    """Ids and every log-probability equal those of generate_step, bit for bit, and wander."""
    pairs = zip(family(name, bits).oracle, answers(name, bits).alone, strict=True)
    for wanted, got in pairs:
        assert len(set(wanted.ids)) >= 8
        assert got.ids == wanted.ids
        assert len(got.ids) == TOKENS
        assert np.array_equal(np.stack(got.logprobs), np.stack(wanted.logprobs))


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of_one_device_decode_as_alone(name: str) -> None:
    """Two prompts at once give the ids of each alone; where they may, in one batch."""
    ours = answers(name)
    assert ours.info.batchable is (family(name).alone is None)
    assert ours.batched_rows == (len(PROMPTS) if ours.info.batchable else 0)
    for wanted, got in zip(family(name).oracle, ours.together, strict=True):
        clear = wanted.clear_ids(2 * TOLERANCE)
        assert len(clear) >= TOKENS // 3
        assert got[: len(clear)] == clear


@pytest.mark.parametrize("name", TOGETHER)
def test_ragged_rows_equal_lone_rows(name: str) -> None:
    """Teacher-forced logits of every row in a batch equal those of the row alone."""
    assert family(name).alone is None
    ragged_run(family(name).model, can_take_back=name not in RECURRENT)


@pytest.mark.parametrize("name", ["minicpm5", "gemma2", "gemma3_text", "gemma4_text"])
def test_whole_capacities_are_read_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs: attention reads whole capacities, with every slot behind a row masked."""

    class WholeStep(steps.Step):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self.on_cpu = False

    monkeypatch.setattr(batch_module, "Step", WholeStep)
    ragged_run(family(name).model)


@pytest.mark.parametrize("name", ["gemma2", "gemma4_text", "gpt_oss", "minicpm5", "qwen3_moe"])
def test_replayed_steps_equal_lone_rows(name: str) -> None:
    """As on fast GPUs: a step's graph is traced once and replayed, in families' own code too."""
    troupe = Replayed(family(name).model)
    for row, length in enumerate((3, 14, 60)):
        troupe.add(row, length, steps=12)
    for _ in range(6):
        troupe.step()
    troupe.drop(1)
    for _ in range(2):
        troupe.step()
    assert troupe.replays >= 4


@pytest.mark.parametrize("name", [name for name in TOGETHER if name not in (*SLIDING, "mamba")])
def test_prompts_of_several_lengths_share_a_prefill(name: str) -> None:
    """Right-padded prompts in one pass, empty rows and begun ones, then a step of all."""
    troupe = Troupe(family(name).model)
    troupe.add(0, 0, steps=16)
    troupe.add(1, 14, steps=16)
    troupe.prefill({0: 11, 1: 5})
    troupe.add(2, 3, steps=18)
    troupe.prefill({0: 1, 1: 7, 2: 12})
    troupe.step()


@pytest.mark.parametrize("name", TOGETHER)
def test_one_row_in_a_batch_equals_the_row_alone(name: str) -> None:
    """Twenty tokens through the batch's path, across a window, on positions of its own."""
    troupe = Troupe(family(name).model)
    troupe.add(0, 7, steps=20)
    for _ in range(20):
        troupe.step()


MUTANTS: tuple[Mutant, ...] = (leak_a_slot, lose_a_token, shift_positions)


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        *((n, mutant) for n in TOGETHER if n not in WITHOUT_KEYS for mutant in MUTANTS),
        *((name, forget_the_window) for name in SLIDING),
    ],
)
def test_the_comparison_catches_broken_layouts(
    name: str, mutant: Mutant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every family the very run that passes fails for a slot, token, position or window."""
    model = family(name).model
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match="differ"):
        ragged_run(model, can_take_back=name not in RECURRENT)


def test_a_lost_softcap_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 2's scores are bent; straight ones give other logits."""
    honest = layouts.RowsCache.attend

    def straight(self: Any, *args: Any, softcap: float) -> mx.array:
        assert softcap > 0
        return honest(self, *args)

    monkeypatch.setattr(layouts.RowsCache, "attend", straight)
    with pytest.raises(AssertionError, match="differ"):
        ragged_run(family("gemma2").model)


def test_lost_sinks_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of gpt_oss gives some of its weight to nobody; without that, logits differ."""
    honest = layouts.RowsCache.attend

    def thirsty(self: Any, queries: mx.array, scale: float, window: Any, sinks: Any) -> mx.array:
        assert sinks is not None
        return honest(self, queries, scale, window, None)

    monkeypatch.setattr(layouts.RowsCache, "attend", thirsty)
    with pytest.raises(AssertionError, match="differ"):
        ragged_run(family("gpt_oss").model)


@pytest.mark.parametrize("name", [*SLIDING, "qwen3_5"])
def test_a_kept_state_grows_and_is_never_cut_too_short(name: str) -> None:
    """The next turn continues behind a turned window or a recurrence; a shorter one is refused."""
    device = MLXDevice(Options(family(name).path, name="tiny", dtype="keep"))
    device.open()
    first, second, third = RowId(1), RowId(2), RowId(3)
    ids, kept = PROMPTS[0], SnapshotId(1)
    begun = run_plans(device, islice(plans({first: ids}), 12))
    known = (*ids, *(sampled.token for done in begun for sampled in done.sampled))[:-1]
    turn = (*known, *prompt(9, seed=8))
    chunk = PrefillRow(second, len(turn) - 1 - len(known))
    starts = (
        StartRow(second, turn, Sampling(), FromSnapshot(kept, len(known))),
        StartRow(third, turn, Sampling(), FromSnapshot(kept, 10)),
    )
    later = [
        StepPlan(StepId(20), keep=(KeepRow(first, len(known), kept),), end=(first,)),
        StepPlan(StepId(21), start=starts, prefill=(chunk,), decode=(second,)),
        *(StepPlan(StepId(22 + i), decode=(second,)) for i in range(7)),
    ]
    done = run_plans(device, later)
    device.close()
    wanted = ask_mlx_lm(load_oracle(family(name).path), turn, 8).clear_ids(2 * TOLERANCE)
    assert len(wanted) >= 4
    assert [s.token for step in done for s in step.sampled][: len(wanted)] == wanted
    refused = [failed for step in done for failed in step.failed]
    assert [failed.row for failed in refused] == [third]
    assert "cannot be cut" in refused[0].reason


@pytest.mark.parametrize("name", ["gemma3_text", "gemma4_text", "qwen3_5"])
def test_a_family_runs_on_a_thread_of_its_own_and_again(name: str) -> None:
    """Loaded, run, closed and loaded again elsewhere: no array belongs to another stream."""
    found: list[list[int]] = []

    def job() -> None:
        for _ in range(2):
            device = MLXDevice(Options(family(name).path, name="tiny", dtype="keep"))
            device.open()
            done = run_plans(device, plans({RowId(1): PROMPTS[0]}))
            found.append([sampled.token for step in done for sampled in step.sampled])
            device.close()

    assert run_on_device_thread(job).wait(60)
    assert found == [family(name).oracle[0].ids] * 2


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_a_family_that_cannot_share_runs_row_by_row(name: str) -> None:
    """The reason names the family, and its rows are those of mlx-lm all the same."""
    ours = answers(name)
    assert not ours.info.batchable
    assert f"batched rows of {name} fail" in ours.info.lone_reason
    assert [outcome.ids for outcome in ours.alone] == [o.ids for o in family(name).oracle]
    assert list(ours.together) == [outcome.ids for outcome in ours.alone]


class OwnScores(nn.Module):
    """A layer that computes attention by itself, in a module that names no function for it."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        heads = self.project(x).reshape(*x.shape[:2], 3, 1, 8).transpose(2, 0, 3, 1, 4)
        keys, values = cache.update_and_fetch(heads[1], heads[2])
        return (mx.softmax(heads[0] @ keys.swapaxes(-1, -2), axis=-1) @ values)[:, 0]


class Homemade(nn.Module):
    """A model of a family that nobody knows."""

    model_type = "homemade"

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = [OwnScores()]

    def __call__(self, ids: mx.array, cache: Any) -> mx.array:
        h = self.embed(ids)
        for layer, c in zip(self.layers, cache, strict=True):
            h = h + layer(h, None, c)
        return self.embed.as_linear(h)


def test_own_attention_is_refused_by_name() -> None:
    """A model that computes its scores itself runs row by row, and the reason says so."""
    assert why_not_batchable(Homemade()) == "homemade computes attention in a way of its own"
