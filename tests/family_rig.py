"""Models of every family, loaded once, and the runs that compare them with mlx-lm."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
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

from mlx_troupe.runtime.device import (
    Cold,
    ModelInfo,
    PrefillRow,
    RowId,
    StartRow,
    StepId,
    StepPlan,
)
from mlx_troupe.runtime.engine.batch import why_not_batchable
from mlx_troupe.runtime.engine.executor import MLXDevice
from mlx_troupe.runtime.engine.sampling import Sampler
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


@dataclass(frozen=True, slots=True)
class Family:
    """A checkpoint, mlx-lm's answers to ``PROMPTS``, and the model with our hands on it."""

    path: Path
    oracle: tuple[Outcome, ...]
    model: nn.Module
    alone: str | None


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


@cache
def family(name: str, bits: int | None = None) -> Family:
    """Made once. The oracle answers before anything of ours has touched the model."""
    folder = tempfile.TemporaryDirectory(prefix=f"{name}-")
    _FOLDERS.append(folder)
    path = make_checkpoint(Path(folder.name), name, bits=bits)
    model: Any = load_oracle(path)
    answers = tuple(_ask_mlx_lm(model, ids) for ids in PROMPTS)
    object.__setattr__(model, "solo_runs", {})
    return Family(path, answers, model, why_not_batchable(model))


def _ask_mlx_lm(model: nn.Module, ids: Sequence[int]) -> Outcome:
    outcome = Outcome()
    for token, logprobs in generate_step(mx.array(ids), model, max_tokens=TOKENS):
        outcome.add(int(token), logprobs)
    return outcome


def lone_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ModelInfo, list[Outcome]]:
    """Our device's answers to ``PROMPTS``, one row after the other, steps two deep."""
    seen: list[mx.array] = []
    draw = Sampler.draw

    def recording(self: Sampler, logits: mx.array, *rest: Any, **more: Any) -> Any:
        seen.append(logits[0])
        return draw(self, logits, *rest, **more)

    device = MLXDevice(path, name="tiny", dtype="keep")
    info = device.open()
    outcomes: list[Outcome] = []
    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "draw", recording)
        for number, ids in enumerate(PROMPTS):
            seen.clear()
            row = RowId(number + 1)
            start = StartRow(row, ids, Sampling(), Cold())
            first = StepPlan(
                StepId(0),
                start=(start,),
                prefill=(PrefillRow(row, len(ids) - 1),),
                decode=(row,),
            )
            plans = [first, *(StepPlan(StepId(i), decode=(row,)) for i in range(1, TOKENS))]
            tokens = [s.token for done in _two_deep(device, plans) for s in done.sampled]
            outcome = Outcome()
            for token, logits in zip(tokens, seen, strict=True):
                outcome.add(token, logits - mx.logsumexp(logits, keepdims=True))
            outcomes.append(outcome)
            device.launch(StepPlan(StepId(TOKENS), end=(row,)))
            device.settle()
    device.close()
    return info, outcomes


def _two_deep(device: MLXDevice, plans: Sequence[StepPlan]) -> list[Any]:
    done: list[Any] = []
    for number, plan in enumerate(plans):
        device.launch(plan)
        device.push()
        if number:
            done.append(device.settle())
    return [*done, device.settle()]


def ragged_run(model: nn.Module) -> None:
    """As many rows as key heads, then more; windows and capacities crossed, columns taken back."""
    troupe = Troupe(model)
    troupe.add(0, 3, steps=18)
    troupe.add(1, 14, steps=16)
    for _ in range(3):
        troupe.step()
    troupe.step(4)
    troupe.add(2, 60, steps=16)
    troupe.add(3, 0, steps=16)
    troupe.step()
    troupe.step(4)
    troupe.drop(1)
    troupe.add(4, 40, steps=16)
    troupe.step()
    troupe.step(3, [1, 0, 3, 2])
    troupe.step(2)
    troupe.step()
