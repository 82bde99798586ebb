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
took in any pair. Where a turn is a step it is also told what the steps that the short one was part
of took beyond the long one's tokens in them, at the price of tokens there (a line through the
other steps of the same run): all that the short one changes, without most of the noise. The short
one's wait is told in seconds and in steps, beside the bound of ``runtime/scheduling/turns.py``.

Imports the project's runtime/ and actors/, and of bench/ engine.py, rig.py and sharing.py; beside
MLX, mlx-lm and their requirements it takes trio and msgspec. Needs no installation.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import trio

sys.path.insert(0, str(Path(__file__).parent))

from engine import DTYPES, SHAPES, make_model  # first: it puts a fast BLAS before MLX
from sharing import KINDS, WINDOW, Run, Sharing

from mlx_troupe.actors.system import Runtime, open_runtime
from mlx_troupe.runtime.requests import (
    Failed,
    GenerationRequest,
    SamplingRequest,
    TokenPrompt,
)
from mlx_troupe.runtime.scheduling.pipeline import PIPELINE
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
    make_model(folder, options.shape, options.bits, DTYPES[options.dtype])
    turn = threading.Lock()
    settings = Settings(folder, "bench", dtype="keep", prompt_cache_bytes=options.cache << 30)
    devices = [Sharing(folder, turn, dtype="keep") for _ in range(2)]
    pairs: list[tuple[Run, Run]] = []
    waits: list[Wait] = []
    one, two = (open_runtime(settings, device=d, tokenizer=ByteTokenizer()) for d in devices)
    async with one as first, two as second:
        alone, beside = Side(first, devices[0]), Side(second, devices[1])
        for side in (alone, beside):
            await side.runtime.wait_ready()
            # Both kinds of steps, and on a GPU the kernels that these make it compile.
            await serve(side.runtime, request(options.long // 8, 77, 8))
            await serve(side.runtime, request(options.short, 78, options.answer))
        for number in range(options.repeat):
            pairs.append(await pair(alone, beside, options, number, waits))
            alone, beside = beside, alone
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
        one, two = (
            np.min([both[at].windows(kind) for both in pairs], axis=0).sum() for at in (0, 1)
        )
        print(f"{name}: the long one's first token is later by "
              f"{statistics.median(beside / alone - 1):+.2%} (median of {len(pairs)} pairs), "
              f"{beside.sum() / alone.sum() - 1:+.2%} (all together), {two / one - 1:+.2%} "
              f"({one:.2f} and {two:.2f} s, each {WINDOW} tokens at their least)")  # fmt: skip
        told = [part for _, run in pairs if (part := run.excess(kind)) is not None]
        if told:
            each = ", ".join(f"{part:+.2%}" for part in told)
            print("  steps with the short one, beyond the long one's tokens in them: "
                  f"{statistics.median(told):+.2%} (each: {each})")  # fmt: skip


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--long", type=int, default=32_768)
    parser.add_argument("--short", type=int, default=200)
    parser.add_argument("--answer", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--bits", type=int, default=0, help="of the weights; 0 = not quantized")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--cache", type=int, default=1, help="GiB of kept states")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trio.run(measure, options, Path(folder))


if __name__ == "__main__":
    main()
