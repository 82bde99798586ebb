"""Models of every family, loaded once, and the runs that compare them with mlx-lm."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from ragged_rig import Troupe
from tiny import load_oracle, make_checkpoint, prompt

from mlx_troupe.runtime.engine.batch import why_not_batchable
from mlx_troupe.runtime.engine.executor import MLXDevice
from mlx_troupe.runtime.engine.opening import Options
from mlx_troupe.runtime.engine.sampling import Sampler
from mlx_troupe.runtime.model_info import ModelInfo
from mlx_troupe.runtime.plans import Cold, PrefillRow, RowId, StartRow, StepDone, StepId, StepPlan
from mlx_troupe.runtime.requests import Sampling

PROMPTS = (prompt(13), prompt(40, seed=1))
"""One that crosses a window of 16 while it decodes, and one whose prefill is past two of them."""
TOKENS = 24


@dataclass(slots=True)
class Outcome:
    """Greedy ids, and the log-probabilities of every position [TOKENS, V] as float32."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)

    def add(self, token: int, logprobs: mx.array) -> None:
        """One more token."""
        self.ids.append(token)
        self.logprobs.append(np.array(logprobs.astype(mx.float32)))

    def clear_ids(self, gap: float) -> list[int]:
        """The ids before the first position whose two best are closer than ``gap``."""
        best = np.sort(np.stack(self.logprobs), axis=-1)[:, -2:]
        close = np.flatnonzero(best[:, 1] - best[:, 0] < gap)
        return self.ids[: close[0]] if close.size else self.ids


@dataclass(frozen=True, slots=True)
class Family:
    """A checkpoint, mlx-lm's answers to ``PROMPTS``, and the model with our hands on it."""

    path: Path
    oracle: tuple[Outcome, ...]
    model: nn.Module
    alone: str | None


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


def family(name: str, bits: int | None = None) -> Family:
    """Made once. The oracle answers before anything of ours has touched the model."""
    return _family(name, bits)


@cache
def _family(name: str, bits: int | None) -> Family:
    folder = tempfile.TemporaryDirectory(prefix=f"{name}-")
    _FOLDERS.append(folder)
    path = make_checkpoint(Path(folder.name), name, bits=bits)
    model: Any = load_oracle(path)
    answers = tuple(ask_mlx_lm(model, ids) for ids in PROMPTS)
    object.__setattr__(model, "solo_runs", {})
    return Family(path, answers, model, why_not_batchable(model))


def ask_mlx_lm(model: nn.Module, ids: Sequence[int], count: int = TOKENS) -> Outcome:
    """Greedy decoding by mlx-lm alone."""
    outcome = Outcome()
    for token, logprobs in generate_step(mx.array(ids), model, max_tokens=count):
        outcome.add(int(token), logprobs)
    return outcome


@dataclass(frozen=True, slots=True)
class Answers:
    """What our device makes of ``PROMPTS``: one after the other, then at once."""

    info: ModelInfo
    alone: tuple[Outcome, ...]
    together: tuple[list[int], ...]
    batched_rows: int


def answers(name: str, bits: int | None = None) -> Answers:
    """Made once."""
    return _answers(name, bits)


@cache
def _answers(name: str, bits: int | None) -> Answers:
    device = MLXDevice(Options(family(name, bits).path, name="tiny", dtype="keep"))
    info = device.open()
    alone = tuple(_ask_alone(device, RowId(i), ids) for i, ids in enumerate(PROMPTS, 1))
    rows = {RowId(i): ids for i, ids in enumerate(PROMPTS, 11)}
    tokens: dict[RowId, list[int]] = {row: [] for row in rows}
    for done in run_plans(device, plans(rows)):
        for sampled in done.sampled:
            tokens[sampled.row].append(sampled.token)
    batched = device.stats().batched_rows
    device.close()
    return Answers(info, alone, tuple(tokens.values()), batched)


def _ask_alone(device: MLXDevice, row: RowId, ids: tuple[int, ...]) -> Outcome:
    seen: list[mx.array] = []
    draw = Sampler.draw

    def recording(self: Sampler, logits: mx.array, *rest: Any, **more: Any) -> Any:
        seen.append(logits[0])
        return draw(self, logits, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampler, "draw", recording)
        done = run_plans(device, [*plans({row: ids}), StepPlan(StepId(TOKENS), end=(row,))])
    outcome = Outcome()
    tokens = [sampled.token for step in done for sampled in step.sampled]
    for token, logits in zip(tokens, seen, strict=True):
        outcome.add(token, logits - mx.logsumexp(logits, keepdims=True))
    return outcome


def plans(rows: Mapping[RowId, tuple[int, ...]]) -> Iterator[StepPlan]:
    """Rows that start together and decode ``TOKENS`` tokens each."""
    yield StepPlan(
        StepId(0),
        start=tuple(StartRow(row, ids, Sampling(), Cold()) for row, ids in rows.items()),
        prefill=tuple(PrefillRow(row, len(ids) - 1) for row, ids in rows.items()),
        decode=tuple(rows),
    )
    for number in range(1, TOKENS):
        yield StepPlan(StepId(number), decode=tuple(rows))


def run_plans(device: MLXDevice, steps: Iterable[StepPlan]) -> list[StepDone]:
    """Two deep, as the scheduler launches them."""
    done: list[StepDone] = []
    for number, plan in enumerate(steps):
        device.launch(plan)
        device.push()
        if number:
            done.append(device.settle())
    return [*done, device.settle()]


def ragged_run(model: nn.Module, *, can_take_back: bool = True) -> None:
    """As many rows as key heads, then more; windows and capacities crossed, columns taken back.

    ``can_take_back`` is False for recurrent layers, which keep all columns of a step or none.
    """
    troupe = Troupe(model)
    troupe.add(0, 3, steps=20)
    troupe.add(1, 14, steps=20)
    for _ in range(3):
        troupe.step()
    troupe.step(4)
    troupe.add(2, 60, steps=20)
    troupe.add(3, 0, steps=20)
    troupe.step()
    troupe.step(4)
    troupe.drop(1)
    troupe.add(4, 40, steps=20)
    troupe.step()
    troupe.step(3, [1, 0, 3, 2] if can_take_back else 3)
    troupe.step(2)
    troupe.step()
