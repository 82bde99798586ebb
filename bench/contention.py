"""A short prompt sent in the middle of a long prefill: its first token, and what it costs the long.

    .venv/bin/python bench/contention.py [--long 32768] [--short 200] [--answer 8] [--repeat 3]
    … --shape llama-3b --dtype bfloat16 [--bits 4]                       # random weights, for a GPU

Two whole companies in this process serve one model of random weights: one is sent the long prompt
alone, the other a short one as well, once half of the long one is prefilled; then they change
places. They share the device by turns, a step each, so that both sides see the same machine at the
same time, however busy it is. (On a GPU steps overlap, and a turn lasts until no step is under way:
one side runs after the other.) Counted is the time of the turns up to the long prompt's first
token: by the clock, and of this process on all cores. What disturbs the machine makes turns
longer, never shorter, so each 2,048 tokens of the long prompt are also told at the least that they
took in any pair. The short one's wait is told in seconds and in steps, beside the bound of
``runtime/scheduling/turns.py``.

Imports the project's runtime/ and actors/, and of bench/ engine.py and rig.py; beside MLX, mlx-lm
and their requirements it takes trio and msgspec. Needs no installation.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import trio

sys.path.insert(0, str(Path(__file__).parent))

from engine import SHAPES, make_model, mx  # first: it puts a fast BLAS before MLX

from mlx_troupe.actors.system import Runtime, open_runtime
from mlx_troupe.runtime.device import RowId, StepDone, StepPlan
from mlx_troupe.runtime.engine.executor import MLXDevice
from mlx_troupe.runtime.requests import (
    Failed,
    GenerationRequest,
    SamplingRequest,
    TokenPrompt,
)
from mlx_troupe.runtime.scheduling.core import PIPELINE
from mlx_troupe.runtime.scheduling.turns import most_steps
from mlx_troupe.runtime.settings import Settings
from mlx_troupe.runtime.text.testing import EOS, ByteTokenizer

SHAPES["tiny"] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 2048,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 512,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
}

WINDOW = 2048
KINDS = ((1, "clock"), (2, "cores"))


@dataclass
class Run:
    """What one side's device did for one long prompt, its rows by the length of their prompts.

    Attributes:
        marks: after each turn, tokens of the long prompt that are done, and the seconds that all
            turns took by then, by the clock and on all cores.
        passes: of prompts through the model, as (length of the prompt, tokens of the pass).
        decodes: tokens computed in decode steps.
        steps: prompt tokens of each step that was launched.
        first: for each row, when its first token was known, and how many steps had settled then.
    """

    marks: list[tuple[int, float, float]] = field(default_factory=lambda: [(0, 0.0, 0.0)])
    passes: list[tuple[int, int]] = field(default_factory=list)
    decodes: int = 0
    steps: list[int] = field(default_factory=list)
    settled: int = 0
    first: dict[int, tuple[float, int]] = field(default_factory=dict)

    def seconds(self, kind: int) -> float:
        """Until the long prompt's first token, by the clock (1) or on all cores (2)."""
        return self.marks[-1][kind]

    def windows(self, kind: int) -> np.ndarray:
        """The same for each :data:`WINDOW` tokens of the long prompt."""
        done, spent = ([mark[at] for mark in self.marks] for at in (0, kind))
        ends = np.arange(0, done[-1] + WINDOW, WINDOW).clip(max=done[-1])
        # Of several turns at one place the last counts: they belong to what was done before.
        place = dict(zip(done, spent, strict=True))
        reached = np.interp(ends[1:], list(place), list(place.values()))
        return np.diff(reached, prepend=0.0)


class Sharing(MLXDevice):
    """The MLX device; it computes when it is its turn, and notes what it does."""

    def __init__(self, path: Path, turn: threading.Lock, **options: Any) -> None:
        super().__init__(path, name="bench", **options)
        self._turn = turn
        self._under_way = 0
        self._began = (0.0, 0.0)
        self._prompts: dict[RowId, int] = {}
        self.run = Run()

    def launch(self, plan: StepPlan) -> None:
        if not self._under_way:
            self._turn.acquire()
            self._began = time.perf_counter(), time.process_time()
        self._under_way += 1
        self._prompts.update((start.row, len(start.ids)) for start in plan.start)
        self.run.passes += [(self._prompts[part.row], part.count) for part in plan.prefill]
        self.run.steps.append(sum(part.count for part in plan.prefill))
        self.run.decodes += len(plan.decode)
        with self._giving_way():
            super().launch(plan)

    def settle(self) -> StepDone:
        with self._giving_way():
            done = super().settle()
        self.run.settled += 1
        for sampled in done.sampled:
            now = time.perf_counter(), self.run.settled
            self.run.first.setdefault(self._prompts[sampled.row], now)
        self._under_way -= 1
        if not self._under_way:
            self._end_turn()
        return done

    @contextmanager
    def _giving_way(self) -> Iterator[None]:
        """A fault must not leave the other side waiting."""
        try:
            yield
        except BaseException:
            self._under_way = 0
            self._turn.release()
            raise

    def _end_turn(self) -> None:
        began, worked = self._began
        run, long = self.run, max(self._prompts.values())
        if run.marks[-1][0] < long:
            # One more for its first token, so that the last mark is where that is known.
            done = sum(count for length, count in run.passes if length == long)
            done += long in run.first
            _, clock, cores = run.marks[-1]
            clock += time.perf_counter() - began
            run.marks.append((done, clock, cores + time.process_time() - worked))
        self._turn.release()


@dataclass
class Side:
    """A company and its device."""

    runtime: Runtime
    device: Sharing


def request(length: int, salt: int, answer: int) -> GenerationRequest:
    """A greedy request whose prompt shares no prefix with that of another salt, and never ends."""
    ids = tuple(2 + (salt * 7919 + i * 31 + (i * i) % 89) % 120 for i in range(length))
    bias = ((0, -100.0), (EOS, -100.0))
    return GenerationRequest(
        TokenPrompt(ids), SamplingRequest(temperature=0.0, logit_bias=bias), answer
    )


async def serve(runtime: Runtime, wanted: GenerationRequest) -> None:
    """Run one request to its end. Raises what it failed with."""
    async with runtime.generate(wanted) as generation:
        async for event in generation:
            if isinstance(event, Failed):
                raise event.error


@dataclass(frozen=True)
class Wait:
    """How long the short prompt waited. ``chunk`` is the tokens of the smallest step meanwhile."""

    seconds: float
    steps: int
    chunk: int


async def disturb(side: Side, options: argparse.Namespace, salt: int, waits: list[Wait]) -> None:
    """Send the short request in the middle of the long one, and note how long it waited."""
    run = side.device.run
    while True:
        await trio.sleep(0.001)
        settled, launched = run.settled, len(run.steps)
        if sum(run.steps) >= options.long // 2:
            break
    began = time.perf_counter()
    await serve(side.runtime, request(options.short, salt, options.answer))
    seen, steps = run.first[options.short]
    chunk = min(run.steps[launched:steps])
    waits.append(Wait(seen - began, steps - settled, chunk))


async def pair(
    alone: Side, beside: Side, options: argparse.Namespace, turn: int, waits: list[Wait]
) -> tuple[Run, Run]:
    """The long prompt on both sides at once, and the short one on the second."""
    for side in (alone, beside):
        side.device.run = Run()
    async with trio.open_nursery() as nursery:
        for salt, side in enumerate((alone, beside)):
            wanted = request(options.long, 2 * turn + salt, 1)
            nursery.start_soon(serve, side.runtime, wanted)
        await disturb(beside, options, 1000 + turn, waits)
    return alone.device.run, beside.device.run


async def measure(options: argparse.Namespace, folder: Path) -> None:
    """All pairs, and the table."""
    make_model(folder, options.shape, options.bits, getattr(mx, options.dtype))
    turn = threading.Lock()
    settings = Settings(folder, "bench", dtype="keep", prompt_cache_bytes=options.cache << 30)
    devices = [Sharing(folder, turn, dtype="keep") for _ in range(2)]
    pairs: list[tuple[Run, Run]] = []
    waits: list[Wait] = []
    one, two = (open_runtime(settings, device=d, tokenizer=ByteTokenizer()) for d in devices)
    async with one as first, two as second:
        sides = [Side(*both) for both in zip((first, second), devices, strict=True)]
        for side in sides:
            await side.runtime.wait_ready()
            # Both kinds of steps, and on a GPU the kernels that these make it compile.
            await serve(side.runtime, request(options.long // 8, 77, 8))
            await serve(side.runtime, request(options.short, 78, options.answer))
        for number in range(options.repeat):
            pairs.append(await pair(*sides, options, number, waits))
            sides.reverse()
            tell(pairs[-1], waits[-1], options)
    summary(pairs)


def tell(both: tuple[Run, Run], wait: Wait, options: argparse.Namespace) -> None:
    """One pair."""
    alone, beside = both
    for kind, name in KINDS:
        one, two = alone.seconds(kind), beside.seconds(kind)
        print(f"{name}: alone {one:.3f} s, beside {two:.3f} s, {two / one - 1:+.2%}")
    for name, run in (("alone", alone), ("beside", beside)):
        counts = [count for length, count in run.passes if length == options.long]
        own = [count for length, count in run.passes if length != options.long]
        print(f"  {name}: {sum(counts)} tokens in {len(counts)} passes; others' {sum(own)} in "
              f"{len(own)}; {run.decodes} decoded")  # fmt: skip
    bound = most_steps(options.short - 1, (), wait.chunk) + PIPELINE
    print(f"  the short one's first token after {wait.seconds:.2f} s and {wait.steps} steps of at "
          f"least {wait.chunk} tokens (bound: {bound} steps)", flush=True)  # fmt: skip


def least(runs: list[np.ndarray]) -> float:
    """Seconds of all windows, each at the least that it took in any run."""
    common = min(map(len, runs))
    return float(np.min([windows[:common] for windows in runs], axis=0).sum())


def summary(pairs: list[tuple[Run, Run]]) -> None:
    """What all pairs say."""
    for kind, name in KINDS:
        alone, beside = (np.array([both[at].seconds(kind) for both in pairs]) for at in (0, 1))
        one, two = (least([both[at].windows(kind) for both in pairs]) for at in (0, 1))
        print(f"{name}: the long one's first token is later by "
              f"{statistics.median(beside / alone - 1):+.2%} (median of {len(pairs)} pairs), "
              f"{beside.sum() / alone.sum() - 1:+.2%} (all together), {two / one - 1:+.2%} "
              f"({one:.2f} and {two:.2f} s, each {WINDOW} tokens at their least)")  # fmt: skip


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--long", type=int, default=32_768)
    parser.add_argument("--short", type=int, default=200)
    parser.add_argument("--answer", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--bits", type=int, default=0, help="of the weights; 0 = not quantized")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--cache", type=int, default=1, help="GiB of kept states")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trio.run(measure, options, Path(folder))


if __name__ == "__main__":
    main()
