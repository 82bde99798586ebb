"""One long row among short ones: step time and state held, on the starter's weights.

    .venv/bin/python bench/ragged.py [--long 4000] [--short 60] [--steps 20]

Drives the MLX device directly, one decode step after another: 16 short rows, then 15 short rows
and one long one. Needed bytes are tokens × bytes per token.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from mlx_troupe.runtime.engine.blas import ensure_fast_blas

ensure_fast_blas()

from mlx_troupe.runtime.engine.executor import MLXDevice  # noqa: E402
from mlx_troupe.runtime.engine.opening import Options  # noqa: E402
from mlx_troupe.runtime.plans import (  # noqa: E402
    Cold,
    PrefillRow,
    RowId,
    StartRow,
    StepId,
    StepPlan,
)
from mlx_troupe.runtime.requests import Sampling  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))
from serve import starter  # noqa: E402

rows = count(1)
steps = count(0)


def decode(device: MLXDevice, lengths: Sequence[int], turns: int) -> tuple[float, int, int]:
    """Median step seconds, state bytes held, tokens held, for rows of these lengths."""
    ids = [RowId(next(rows)) for _ in lengths]
    for row, length in zip(ids, lengths, strict=True):
        prompt = tuple(1000 + (row * 7919 + i * 31) % 40000 for i in range(length))
        start = StartRow(row, prompt, Sampling(), Cold())
        device.launch(StepPlan(StepId(next(steps)), start=(start,)))
        device.push()
        device.settle()
        for done in range(0, length - 1, 512):
            part = PrefillRow(row, min(512, length - 1 - done))
            device.launch(StepPlan(StepId(next(steps)), prefill=(part,)))
            device.push()
            device.settle()
    plan = StepPlan(StepId(next(steps)), decode=tuple(ids))
    device.launch(plan)
    device.push()
    times = []
    for _ in range(turns):
        began = time.perf_counter()
        device.launch(StepPlan(StepId(next(steps)), decode=tuple(ids)))
        device.push()
        device.settle()
        times.append(time.perf_counter() - began)
    device.settle()
    held = device.stats().kv_bytes
    device.launch(StepPlan(StepId(next(steps)), end=tuple(ids)))
    device.push()
    device.settle()
    return statistics.median(times[2:]), held, sum(lengths) + (turns + 1) * len(lengths)


def main() -> None:
    """Alternate both mixes and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--long", type=int, default=4000)
    parser.add_argument("--short", type=int, default=60)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    device = MLXDevice(Options(starter(), name="starter", dtype="float32"))
    model = device.open()
    short = [options.short] * 16
    mixed = [options.short] * 15 + [options.long]
    flat_times, mixed_times = [], []
    held = tokens = 0
    for _ in range(options.repeat):
        flat_times.append(decode(device, short, options.steps)[0])
        seconds, held, tokens = decode(device, mixed, options.steps)
        mixed_times.append(seconds)
    flat, ragged = statistics.median(flat_times), statistics.median(mixed_times)
    needed = tokens * model.kv_bytes_per_token
    print(f"16 short rows {flat * 1e3:.1f} ms, 15 short and one of {options.long} "
          f"{ragged * 1e3:.1f} ms: {ragged / flat:.2f} ×")  # fmt: skip
    print(f"state {held / 1e6:.0f} MB for {needed / 1e6:.0f} MB needed: {held / needed:.2f} ×")


if __name__ == "__main__":
    main()
