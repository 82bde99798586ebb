"""Sixteen rows of the starter in one batch against mlx-lm, each alone."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from mlx_troupe.runtime.engine.executor import MLXDevice
from mlx_troupe.runtime.engine.opening import Options
from mlx_troupe.runtime.plans import Cold, PrefillRow, RowId, StartRow, StepId, StepPlan
from mlx_troupe.runtime.requests import Sampling
from mlx_troupe.runtime.store.starter import ensure_starter

GAP = 2e-3
"""Twice the tolerance in logits: from a smaller top-2 gap on, either id is right."""

LENGTHS = (3, 5, 9, 14, 20, 27, 33, 41, 50, 58, 63, 64, 65, 90, 127, 130)


@pytest.fixture(scope="module")
def device() -> Iterator[MLXDevice]:
    """The starter in float32."""
    opened = MLXDevice(Options(ensure_starter(), name="starter", dtype="float32"))
    opened.open()
    yield opened
    opened.close()


def prompt_of(length: int) -> tuple[int, ...]:
    """Ids that spell nothing in particular, another text for every length."""
    return tuple(500 + (length * 7919 + i * i * 31) % 40_000 for i in range(length))


def alone(model: object, prompt: tuple[int, ...], tokens: int) -> tuple[list[int], int]:
    """mlx-lm's greedy ids, and how many of them are certain."""
    ids: list[int] = []
    certain = tokens
    for token, logprobs in generate_step(mx.array(prompt), model, max_tokens=tokens):
        best = mx.sort(logprobs)[-2:].tolist()
        if best[1] - best[0] < GAP:
            certain = min(certain, len(ids))
        ids.append(int(token))
    return ids, certain


@pytest.mark.golden
@pytest.mark.starter
def test_sixteen_rows_that_join_and_leave_say_what_each_says_alone(device: MLXDevice) -> None:
    """Rows of mixed lengths start in different steps, end at different times, share each step."""
    steps = count()
    made: dict[RowId, list[int]] = {}
    wanted = {RowId(i): 6 + i % 7 for i in range(16)}
    prompts = {RowId(i): prompt_of(n) for i, n in enumerate(LENGTHS)}
    waiting, widest = list(wanted), 0
    running: list[RowId] = []
    while waiting or running:
        joining, waiting = waiting[:5], waiting[5:]
        starts = tuple(StartRow(r, prompts[r], Sampling(), Cold()) for r in joining)
        chunks = tuple(PrefillRow(r, len(prompts[r]) - 1) for r in joining)
        ended = tuple(r for r in running if len(made[r]) == wanted[r])
        running = [r for r in running if r not in ended] + joining
        made |= {r: [] for r in joining}
        widest = max(widest, len(running))
        plan = StepPlan(StepId(next(steps)), (), starts, ended, chunks, tuple(running))
        device.launch(plan)
        device.push()
        done = device.settle()
        assert not done.failed
        for sampled in done.sampled:
            made[sampled.row].append(sampled.token)
    assert widest == 16
    certain = 0
    for row, prompt in prompts.items():
        ids, sure = alone(device.model, prompt, wanted[row])
        certain += sure
        assert made[row][:sure] == ids[:sure], f"the row of {len(prompt)} tokens"
    assert certain > 100
