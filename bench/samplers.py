"""16 rows with 16 different samplers against 16 greedy rows: step time on one device.

    .venv/bin/python bench/samplers.py                      the starter
    .venv/bin/python bench/samplers.py --shape llama-3b     random weights, any device; no download

Every sampled row has a chain, penalties and a seed of its own. Both sides decode the same prompts
and take turns; prefill is outside the clock. Prints the median step of each, the ratio, and how
long the host builds the sampling of a step (on a CPU that is the sampling itself, and the wait for
the logits before it). ``--logprobs`` adds a third side: greedy rows, each with five alternatives.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from rig import Rig, ready

ready()

import mlx.core as mx  # noqa: E402
from engine import SHAPES, make_model, prompts  # noqa: E402

from mlx_troupe.runtime import plans as d  # noqa: E402
from mlx_troupe.runtime.engine.sampling import Sampler  # noqa: E402
from mlx_troupe.runtime.requests import Hlg, Sampling  # noqa: E402

CHAINS = (
    Sampling(temperature=0.7),
    Sampling(temperature=1.0, min_p=0.05),
    Sampling(temperature=0.8, top_p=0.95),
    Sampling(temperature=1.0, top_p=0.9, min_p=0.02),
    Sampling(temperature=0.6, top_k=20),
    Sampling(temperature=0.6, top_p=0.95, top_k=20),
    Sampling(temperature=0.7, top_p=0.8, top_k=20, min_p=0.01),
    Sampling(temperature=1.2, top_k=50),
    Sampling(temperature=1.0, top_p=0.9, top_k=40),
    Sampling(temperature=1.0, xtc_probability=0.5),
    Sampling(temperature=0.9, top_p=0.98, xtc_probability=0.5),
    Sampling(temperature=1.0, hlg=Hlg()),
    Sampling(temperature=1.5, min_p=0.1),
    Sampling(temperature=0.3, top_p=0.5),
    Sampling(temperature=1.0, top_k=200),
    Sampling(temperature=0.9, top_k=64, xtc_probability=1.0, xtc_threshold=0.05),
)
PENALTIES: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.1},
    {"presence_penalty": 0.5},
    {"frequency_penalty": 0.3, "frequency_context_size": 64},
    {"repetition_penalty": 1.05, "presence_penalty": 0.2, "logit_bias": ((5, 1.0), (9, -2.0))},
)
MIXED = tuple(
    replace(chain, seed=1000 + n, **PENALTIES[n % len(PENALTIES)]) for n, chain in enumerate(CHAINS)
)
GREEDY = (Sampling(),) * len(MIXED)


class Clock:
    """Seconds spent in ``Sampler.draw``, by call."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        draw = Sampler.draw

        def timed(sampler: Sampler, *arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return draw(sampler, *arguments)
            finally:
                self.seconds.append(time.perf_counter() - began)

        Sampler.draw = timed  # type: ignore[method-assign,assignment]


class Side:
    """Rows with these samplers, decoded as the scheduler does: one step running, one queued."""

    rows = count(1_000_000)
    steps = count(1_000_000)

    def __init__(
        self, device: Any, asked: Sequence[Sequence[int]], samplings: Sequence[Sampling], top: Any
    ) -> None:
        self._device = device
        self._ids = tuple(d.RowId(next(self.rows)) for _ in asked)
        for row, prompt, sampling in zip(self._ids, asked, samplings, strict=True):
            start = d.StartRow(row, tuple(prompt), sampling, d.Cold(), logprobs=top)
            self._launch(start=(start,))
            device.settle()
            for done in range(0, len(prompt) - 1, 512):
                size = min(512, len(prompt) - 1 - done)
                self._launch(prefill=(d.PrefillRow(row, size),))
                device.settle()

    def times(self, tokens: int) -> list[float]:
        """Seconds of each of this many steps, after two that are not counted."""
        device, seen = self._device, []
        self._launch(decode=self._ids)
        before = time.perf_counter()
        for _ in range(tokens + 2):
            device.launch(d.StepPlan(d.StepId(next(self.steps)), decode=self._ids))
            failed = device.settle().failed
            device.push()
            assert not failed, failed
            now = time.perf_counter()
            seen.append(now - before)
            before = now
        device.settle()
        self._launch(end=self._ids)
        device.settle()
        return seen[2:]

    def _launch(self, **parts: Any) -> None:
        self._device.launch(d.StepPlan(d.StepId(next(self.steps)), **parts))
        self._device.push()


def measure(rig: Rig, options: argparse.Namespace) -> dict[str, float]:
    """Medians of all sides; the first turn of each only warms up."""
    asked = prompts(len(MIXED), options.prompt, rig.info.vocab_size)
    sides: dict[str, tuple[Sequence[Sampling], int | None]] = {
        "greedy": (GREEDY, None),
        "mixed": (MIXED, None),
    }
    if options.logprobs:
        sides["logprobs"] = (GREEDY, 5)
    clock = Clock()
    steps: dict[str, list[float]] = {side: [] for side in sides}
    host: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(options.repeat + 1):
        for side, (samplings, top) in sides.items():
            clock.seconds.clear()
            seen = Side(rig.device, asked, samplings, top).times(options.tokens)
            if turn:
                steps[side] += seen
                host[side] += clock.seconds
    medians = {side: statistics.median(seen) for side, seen in steps.items()}
    for side, seconds in medians.items():
        print(
            f"{side:9s} {seconds * 1e3:7.2f} ms a step, {seconds / medians['greedy']:.3f} ×; "
            f"in draw {statistics.median(host[side]) * 1e3:.2f} ms",
            flush=True,
        )
    return medians | {"ratio": medians["mixed"] / medians["greedy"]}


def main() -> None:
    """Measure and print, then the same as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, help="random weights instead of the starter")
    parser.add_argument("--bits", type=int, default=0, help="of random weights; 0: not quantized")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--logprobs", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        if options.shape is None:
            from serve import starter

            path = starter()
        else:
            dtype = mx.bfloat16 if mx.default_device() == mx.gpu else mx.float32
            make_model(path, options.shape, options.bits, dtype)
        print(json.dumps(measure(Rig(path), options)))


if __name__ == "__main__":
    main()
