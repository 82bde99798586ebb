"""A short prompt sent in the middle of a long prefill: its first token, and what it costs the long.

    .venv/bin/python bench/contention.py [--long 32768] [--short 200] [--answer 8] [--repeat 3]

Runs the whole company in this process on a small random model, without a prefix cache. Two arms,
alternated: the long prompt alone, and with a short one sent halfway. Seconds by the clock, and of
this process on all cores, which other work on the machine disturbs less. The short one's wait is
told in seconds and in steps, beside the bound of ``runtime/scheduling/turns.py``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import trio

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import rig

rig.ready()

from tiny import make_checkpoint  # noqa: E402

from mlx_troupe.actors.system import Runtime, open_runtime  # noqa: E402
from mlx_troupe.runtime.requests import (  # noqa: E402
    Failed,
    GenerationRequest,
    SamplingRequest,
    TextDelta,
    TokenPrompt,
)
from mlx_troupe.runtime.scheduling.core import PIPELINE  # noqa: E402
from mlx_troupe.runtime.scheduling.turns import most_steps  # noqa: E402
from mlx_troupe.runtime.settings import Settings  # noqa: E402
from mlx_troupe.runtime.text.testing import ByteTokenizer  # noqa: E402

MODEL = {
    "hidden_size": 64,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1 << 17,
}


@dataclass(frozen=True)
class Cost:
    """Seconds of one run by the clock, and of this process on all cores."""

    clock: float
    cores: float


@dataclass(frozen=True)
class Wait:
    """How long the short prompt waited. ``chunk`` is the tokens of the smallest step meanwhile."""

    seconds: float
    steps: int
    chunk: int


def request(length: int, salt: int, answer: int) -> GenerationRequest:
    """A greedy request whose prompt shares no prefix with that of another salt."""
    ids = tuple(2 + (salt * 7919 + i * 31 + (i * i) % 89) % 120 for i in range(length))
    return GenerationRequest(TokenPrompt(ids), SamplingRequest(temperature=0.0), answer)


async def serve(runtime: Runtime, wanted: GenerationRequest) -> float:
    """Run one request to its end; seconds to its first text. Raises what it failed with."""
    began, first = time.perf_counter(), 0.0
    async with runtime.generate(wanted) as generation:
        async for event in generation:
            if isinstance(event, TextDelta):
                first = first or time.perf_counter() - began
            if isinstance(event, Failed):
                raise event.error
    return first or time.perf_counter() - began


async def disturb(runtime: Runtime, length: int, salt: int, answer: int, waits: list[Wait]) -> None:
    """One short request, and how long its first token took."""
    core = runtime.scheduler.core
    steps, prefilled = core.stats().steps, core.stats().prefilled_tokens
    chunks: list[int] = []

    async def watch(task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        seen, done = steps, prefilled
        while True:
            await trio.sleep(0.002)
            now = core.stats()
            if now.steps > seen:
                chunks.append((now.prefilled_tokens - done) // (now.steps - seen))
                seen, done = now.steps, now.prefilled_tokens

    async with trio.open_nursery() as nursery:
        await nursery.start(watch)
        began = time.perf_counter()
        async with runtime.generate(request(length, salt, answer)) as generation:
            async for event in generation:
                if isinstance(event, TextDelta):
                    taken = core.stats().steps - steps
                    smallest = min((c for c in chunks if c), default=core.sizer.chunk)
                    waits.append(Wait(time.perf_counter() - began, taken, smallest))
                    break
            async for event in generation:
                if isinstance(event, Failed):
                    raise event.error
        nursery.cancel_scope.cancel()


async def measure(options: argparse.Namespace, folder: Path) -> None:
    """Both arms, alternated, and the table."""
    model = make_checkpoint(folder / "model", **MODEL)
    settings = Settings(model, "tiny", dtype="keep", prompt_cache_bytes=0)
    alone: list[Cost] = []
    beside: list[Cost] = []
    waits: list[Wait] = []
    async with open_runtime(settings, tokenizer=ByteTokenizer()) as runtime:
        await runtime.wait_ready()
        await serve(runtime, request(options.long // 4, 0, 1))
        for turn in range(options.repeat):
            for arm in (alone, beside):
                salt = 2 * turn + 2 + (arm is beside)
                began, worked = time.perf_counter(), time.process_time()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(serve, runtime, request(options.long, salt, 1))
                    if arm is beside:
                        await trio.sleep(statistics.median(cost.clock for cost in alone) / 2)
                        await disturb(runtime, options.short, 99 + turn, options.answer, waits)
                arm.append(Cost(time.perf_counter() - began, time.process_time() - worked))
    report(options, alone, beside, waits)


def report(
    options: argparse.Namespace, alone: list[Cost], beside: list[Cost], waits: list[Wait]
) -> None:
    """The table."""
    print(f"{options.long} tokens, alone and with {options.short} + {options.answer} in the middle")
    for name in ("clock", "cores"):
        one, two = ([getattr(cost, name) for cost in arm] for arm in (alone, beside))
        each = "; ".join(f"{a:.2f} {b:.2f}" for a, b in zip(one, two, strict=True))
        for kind, of in (("median", statistics.median), ("least", min)):
            first, second = of(one), of(two)
            print(f"{name}, {kind}: {first:.2f} and {second:.2f} s, {second / first - 1:+.1%}")
        print(f"  each pair: {each}")
    for wait in waits:
        bound = most_steps(options.short - 1, (), wait.chunk) + PIPELINE
        print(f"its first token after {wait.seconds:.2f} s and {wait.steps} steps of at least "
              f"{wait.chunk} tokens (bound: {bound} steps)")  # fmt: skip


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--long", type=int, default=32_768)
    parser.add_argument("--short", type=int, default=200)
    parser.add_argument("--answer", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trio.run(measure, options, Path(folder))


if __name__ == "__main__":
    main()
