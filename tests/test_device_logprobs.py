"""Log-probabilities from the MLX device: mlx-lm's, for lone rows and in any company."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model
from tiny import VOCAB, make_checkpoint, prompt

from mlx_troupe.runtime.engine.executor import MLXDevice
from mlx_troupe.runtime.engine.opening import Options
from mlx_troupe.runtime.engine.row_sampler import RowSampler
from mlx_troupe.runtime.engine.sampling import Sampler
from mlx_troupe.runtime.engine.warmup import warm_up
from mlx_troupe.runtime.plans import Cold, PrefillRow, RowId, Sampled, StartRow, StepId, StepPlan
from mlx_troupe.runtime.requests import Sampling

pytestmark = pytest.mark.mlx

TOKENS = 10


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tiny model."""
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def device(checkpoint: Path) -> Iterator[MLXDevice]:
    """It, open."""
    made = MLXDevice(
        Options(checkpoint, name="tiny", dtype="float32", xtc_exempt=lambda: frozenset({7}))
    )
    made.open()
    yield made
    made.close()


def decode(
    device: MLXDevice, starts: Sequence[StartRow], tokens: int = TOKENS
) -> dict[RowId, list[Sampled]]:
    """What each row samples while all of them decode together, two steps deep."""
    steps = count(1)
    rows = tuple(start.row for start in starts)
    chunks = tuple(PrefillRow(start.row, len(start.ids) - 1) for start in starts)
    device.launch(StepPlan(StepId(next(steps)), start=tuple(starts), prefill=chunks))
    device.push()
    device.settle()
    seen: dict[RowId, list[Sampled]] = {row: [] for row in rows}
    device.launch(StepPlan(StepId(next(steps)), decode=rows))
    device.push()
    for step in range(tokens):
        last = step == tokens - 1
        step_id = StepId(next(steps))
        device.launch(StepPlan(step_id, end=rows) if last else StepPlan(step_id, decode=rows))
        done = device.settle()
        assert not done.failed
        for sampled in done.sampled:
            seen[sampled.row].append(sampled)
        device.push()
    device.settle()
    return seen


def start(row: int, ids: Sequence[int], sampling: Sampling, top: int | None) -> StartRow:
    """A cold row."""
    return StartRow(RowId(row), tuple(ids), sampling, Cold(), logprobs=top)


def test_figures_are_mlx_lms_alone_and_in_company(checkpoint: Path, device: MLXDevice) -> None:
    """Greedy rows: the log-probabilities that generate_step gives, and its likeliest tokens."""
    ids = prompt(12)
    model, _ = load_model(checkpoint)
    model.set_dtype(mx.float32)
    wanted = [
        (token, np.array(logprobs))
        for token, logprobs in generate_step(mx.array(ids), model, max_tokens=TOKENS)
    ]
    alone = decode(device, [start(1, ids, Sampling(), 5)])[RowId(1)]
    warm = Sampling(temperature=1.0, top_p=0.9, seed=3, repetition_penalty=1.2)
    company = [
        start(2, prompt(5, 2), warm, None),
        start(3, ids, Sampling(), 5),
        start(4, prompt(20, 3), warm, 0),
        start(5, prompt(9, 4), Sampling(), None),
    ]
    together = decode(device, company)
    for sampled in (alone, together[RowId(3)]):
        for (token, logprobs), made in zip(wanted, sampled, strict=True):
            assert made.token == token
            assert made.logprobs is not None
            assert made.logprobs.chosen == pytest.approx(float(logprobs[token]), abs=1e-4)
            figures = [float(logprobs[i]) for i, _ in made.logprobs.top]
            assert [x for _, x in made.logprobs.top] == pytest.approx(figures, abs=1e-4)
            assert figures[0] == pytest.approx(float(logprobs.max()), abs=1e-4)
            assert len(figures) == 5
    assert all(made.logprobs is None for row in (2, 5) for made in together[RowId(row)])
    assert all(made.logprobs and not made.logprobs.top for made in together[RowId(4)])


def test_what_xtc_spares_is_asked_for_when_a_row_needs_it(checkpoint: Path) -> None:
    """Once, by the first row with XTC; then neither end tokens nor those ids are removed."""
    asked: list[int] = []

    def exempt() -> frozenset[int]:
        asked.append(1)
        return frozenset({7})

    device = MLXDevice(Options(checkpoint, name="tiny", dtype="float32", xtc_exempt=exempt))
    device.open()
    decode(device, [start(1, prompt(4), Sampling(temperature=1.0), None)], 3)
    assert not asked
    struck = Sampling(
        temperature=1.0,
        xtc_probability=1.0,
        xtc_threshold=0.01,
        logit_bias=((7, 90.0), (9, 90.0), (11, 90.0)),
    )
    rows = [start(2 + seed, prompt(4), struck, None) for seed in range(2)]
    rows.append(start(9, prompt(4, 5), Sampling(), None))
    seen = decode(device, rows, 20)
    drawn = {sampled.token for row in (2, 3) for sampled in seen[RowId(row)]}
    assert 7 in drawn
    assert len(drawn & {9, 11}) >= 1
    assert len(asked) == 1
    device.close()


def test_warming_up_tries_all_samplers_and_leaves_a_device_that_serves(device: MLXDevice) -> None:
    """What a GPU does before it is ready, and then rows as ever."""
    warm_up(device, 2)
    assert device.stats().rows == 2
    device.drop_rows()
    assert len(decode(device, [start(1, prompt(4), Sampling(), None)], 3)[RowId(1)]) == 3


def test_nothing_of_a_batch_is_left_at_rest() -> None:
    """Histories and parameters of the last batch go when the device idles."""
    warm = Sampling(temperature=1.0, top_p=0.9, repetition_penalty=1.2)
    rows = [RowSampler(warm, prompt(4), VOCAB)]
    sampler = Sampler(VOCAB)
    logits = mx.zeros((1, VOCAB))
    mx.eval(logits)
    gc.collect()
    before = len(live_arrays())
    sampler.draw(logits, rows, [4], mx.array([1], dtype=mx.uint32))
    sampler.rest()
    rows.clear()
    gc.collect()
    assert len(live_arrays()) == before


def live_arrays() -> list[mx.array]:
    """Every array that Python knows of."""
    return [held for held in gc.get_objects() if isinstance(held, mx.array)]
