"""Concurrent chat streams against this server and its rivals, on one model and one machine.

    .venv/bin/python bench/serve.py                         # the starter as shipped, default flags
    .venv/bin/python bench/serve.py --weights float32       # rivals given float32 and the same BLAS
    … --vllm-mlx DIR --rapid-mlx DIR                        # environments that hold those rivals

Each repetition starts a fresh server for every arm, one after the other, in an order that rotates;
one warm-up request each; prompts carry a salt of the repetition so that no cache helps by accident.
Only streams that finished count as output; the others are errors and are counted. Writes a dated
Markdown table and the raw figures under bench/results/, which git ignores.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import httpx
import trio

sys.path.insert(0, str(Path(__file__).parent))
from servers import Arm, deltas, mlx_lm, rapid_mlx, running, served_name, troupe, vllm_mlx
from weights import expanded, same_blas

RESULTS = Path(__file__).parent / "results"
TOPICS = ("rivers", "bridges", "bread", "glass", "violins", "maps", "clocks", "salt", "wool", "tea",
          "paper", "honey", "ropes", "lamps", "ships", "bells")  # fmt: skip


@dataclass(frozen=True)
class Stream:
    """What one client saw: seconds to its first text and to its end, and tokens received."""

    first: float
    total: float
    tokens: int


@dataclass(frozen=True)
class Round:
    """One arm in one repetition."""

    arm: str
    repetition: int
    wall: float
    streams: tuple[Stream, ...]
    errors: tuple[str, ...]

    @property
    def rate(self) -> float:
        """Tokens of finished streams per second of wall time."""
        return sum(stream.tokens for stream in self.streams) / self.wall

    @property
    def first(self) -> float:
        """Median seconds to the first text."""
        return statistics.median(s.first for s in self.streams) if self.streams else float("inf")


async def one(client: httpx.AsyncClient, body: dict[str, object]) -> Stream:
    """Send one streamed chat and read it to its end."""
    began = time.monotonic()
    first: float | None = None
    tokens: int | None = None
    done = False
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"status {response.status_code}: {(await response.aread())[:200]!r}")
        async for line in response.aiter_lines():
            done = done or line == "data: [DONE]"
            text, counted = deltas(line)
            tokens = counted if counted is not None else tokens
            if text and first is None:
                first = time.monotonic() - began
    if not done or first is None or tokens is None:
        raise RuntimeError("the stream ended early")
    return Stream(first, time.monotonic() - began, tokens)


async def all_at_once(url: str, bodies: list[dict[str, object]]) -> tuple[list[Stream], list[str]]:
    """Every body as a stream of its own, all at the same moment."""
    streams: list[Stream] = []
    errors: list[str] = []
    limits = httpx.Limits(max_connections=len(bodies) + 4)

    async def client_task(client: httpx.AsyncClient, body: dict[str, object]) -> None:
        try:
            streams.append(await one(client, body))
        except Exception as error:  # every failure of a rival is a figure, not a crash
            errors.append(f"{type(error).__name__}: {error}"[:200])

    async with (
        httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client,
        trio.open_nursery() as nursery,
    ):
        for body in bodies:
            nursery.start_soon(client_task, client, body)
    return streams, errors


def bodies(name: str, streams: int, tokens: int, salt: str) -> list[dict[str, object]]:
    """The same requests for every arm."""
    return [
        {
            "model": name,
            "messages": [
                {
                    "role": "user",
                    "content": f"({salt}-{i}) Write a long, detailed essay about the history of "
                    f"{TOPICS[i % len(TOPICS)]} and the people who made them.",
                }
            ],
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for i in range(streams)
    ]


def measure(arm: Arm, model: Path, repetition: int, streams: int, tokens: int) -> Round:
    """A fresh server, one warm-up, then all streams."""
    with running(arm, RESULTS / f"{arm.name}.log") as url:
        name = served_name(url, model)
        trio.run(all_at_once, url, bodies(name, 1, 4, "warm"))
        began = time.monotonic()
        asked = bodies(name, streams, tokens, f"r{repetition}")
        finished, errors = trio.run(all_at_once, url, asked)
        wall = time.monotonic() - began
    return Round(arm.name, repetition, wall, tuple(finished), tuple(errors))


def table(rounds: list[Round], baseline: str) -> str:
    """Medians over the repetitions, and ratios against ``baseline``."""
    lines = [
        "| arm | tok/s | first token s | finished | errors | tok/s ratio | first-token ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    names = list(dict.fromkeys(r.arm for r in rounds))
    medians = {
        name: (
            statistics.median(r.rate for r in rounds if r.arm == name),
            statistics.median(r.first for r in rounds if r.arm == name),
        )
        for name in names
    }
    for name in names:
        mine = [r for r in rounds if r.arm == name]
        rate, first = medians[name]
        base_rate, base_first = medians[baseline]
        lines.append(
            f"| {name} | {rate:.1f} | {first:.2f} | {sum(len(r.streams) for r in mine)} "
            f"| {sum(len(r.errors) for r in mine)} | {rate / base_rate if base_rate else 0:.2f} "
            f"| {first / base_first:.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a model directory (default: the starter)")
    parser.add_argument("--weights", choices=("shipped", "float32"), default="shipped")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--vllm-mlx", type=Path)
    parser.add_argument("--rapid-mlx", type=Path)
    options = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    model = options.model or starter()
    env = same_blas() if options.weights == "float32" else {}
    rival_model = expanded(model) if options.weights == "float32" else model
    arms = [troupe(model), mlx_lm(rival_model, env=env)]
    if options.vllm_mlx:
        arms.append(vllm_mlx(options.vllm_mlx, rival_model, env=env))
    if options.rapid_mlx:
        arms.append(rapid_mlx(options.rapid_mlx, rival_model, env=env))
    rounds: list[Round] = []
    for repetition in range(options.repeat):
        turn = repetition % len(arms)
        for arm in (*arms[turn:], *arms[:turn]):
            used = model if arm.name == "mlx-troupe" else rival_model
            rounds.append(measure(arm, used, repetition, options.streams, options.tokens))
            last = rounds[-1]
            print(f"{repetition} {arm.name}: {last.rate:.1f} tok/s, first {last.first:.2f} s, "
                  f"{len(last.errors)} errors {last.errors[:1]}", flush=True)  # fmt: skip
    report(options, rounds)


def starter() -> Path:
    """The starter's directory."""
    from mlx_troupe.runtime.store.starter import ensure_starter

    return ensure_starter()


def report(options: argparse.Namespace, rounds: list[Round]) -> None:
    """Print the table and leave it with the raw figures in bench/results/."""
    now = datetime.datetime.now(datetime.UTC)
    head = (
        f"# {options.streams} streams × {options.tokens} tokens, weights {options.weights}\n\n"
        f"{now:%Y-%m-%d %H:%M} UTC · {platform.machine()} · mlx {version('mlx')} · "
        f"mlx-lm {version('mlx-lm')} · {options.repeat} repetitions\n\n"
    )
    text = head + table(rounds, "mlx_lm.server") + "\n"
    print(text)
    stem = RESULTS / f"serve-{options.weights}-{options.streams}x{options.tokens}-{now:%Y%m%dT%H%M}"
    stem.with_suffix(".md").write_text(text)
    stem.with_suffix(".json").write_text(json.dumps([asdict(r) for r in rounds], indent=1))


if __name__ == "__main__":
    main()
