"""Streams closed at random moments, in waves: does everything come back?

    .venv/bin/python bench/closing.py [--waves 10] [--streams 20] [--plain 5]

Each wave opens its streams and plain requests, waits until at least 16 streams have produced text,
then closes every connection at a random moment. Afterwards: active rows within 2 s, a greedy
answer as before, and memory, rows and leases as before once the prefix cache is emptied.
Needs a server of its own; uses /stats and resident memory of the process.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

import httpx
import trio

sys.path.insert(0, str(Path(__file__).parent))
from serve import RESULTS, bodies, starter
from servers import deltas, running, troupe


class Wave:
    """Counts the streams that have produced text and opens the gate for closing."""

    def __init__(self, need: int) -> None:
        self.need = need
        self.seen = 0
        self.gate = trio.Event()

    def text(self) -> None:
        """One more stream has produced text."""
        self.seen += 1
        if self.seen >= self.need:
            self.gate.set()


async def stream_then_close(client: httpx.AsyncClient, body: dict[str, object], wave: Wave) -> None:
    """Read a stream until the gate opens, then for a random moment more, and close it."""
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            async def closer() -> None:
                await wave.gate.wait()
                await trio.sleep(random.random() * 1.5)
                scope.cancel()

            nursery.start_soon(closer)
            seen = False
            async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if deltas(line)[0] and not seen:
                        seen = True
                        wave.text()
            nursery.cancel_scope.cancel()


async def plain_then_close(client: httpx.AsyncClient, body: dict[str, object], wave: Wave) -> None:
    """Ask without a stream and hang up at a random moment."""
    with trio.move_on_after(random.random() * 3):
        await client.post("/v1/chat/completions", json={**body, "stream": False})


async def open_and_close(url: str, options: argparse.Namespace) -> None:
    """Run all waves."""
    for number in range(options.waves):
        wave = Wave(16)
        asked = bodies("", options.streams + options.plain, 400, f"wave{number}")
        limits = httpx.Limits(max_connections=100)
        async with (
            httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client,
            trio.open_nursery() as nursery,
        ):
            for body in asked[: options.streams]:
                nursery.start_soon(stream_then_close, client, body, wave)
            await wave.gate.wait()
            for body in asked[options.streams :]:
                nursery.start_soon(plain_then_close, client, body, wave)


def until_idle(url: str) -> float:
    """Seconds from now until no row is active."""
    began = time.monotonic()
    while httpx.get(f"{url}/stats", timeout=30).json()["batch"]["active_rows"]:
        time.sleep(0.05)
    return time.monotonic() - began


def figures(url: str) -> dict[str, float]:
    """What must come back: device bytes, rows, snapshots, leases, tasks; and resident bytes."""
    stats = httpx.get(f"{url}/stats", timeout=30).json()
    return {
        "active": stats["device"]["active_bytes"],
        "rows": stats["device"]["rows"],
        "snapshots": stats["device"]["snapshots"],
        "snapshot_bytes": stats["device"]["snapshot_bytes"],
        "leases": stats["prompt_cache"]["leases"],
        "cache_bytes": stats["prompt_cache"]["bytes"],
        "requests": stats["requests"]["active"],
        "tasks": stats["process"]["tasks"],
        "resident": stats["process"]["resident_bytes"],
    }


def answer(url: str) -> str:
    """A fixed greedy answer."""
    body = {**bodies("", 1, 24, "fixed")[0], "stream": False}
    body.pop("stream_options")
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    return str(response.json()["choices"][0]["message"]["content"])


def main() -> None:
    """Run the waves and compare before and after."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--waves", type=int, default=10)
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--plain", type=int, default=5)
    options = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    for flags in (("--prompt-cache", "0"), ()):
        label = "prefix cache off" if flags else "prefix cache on"
        with running(troupe(starter(), *flags), RESULTS / "closing.log") as url:
            before_answer = answer(url)
            trio.run(open_and_close, url, argparse.Namespace(waves=1, streams=18, plain=2))
            time.sleep(8)
            before = figures(url)
            trio.run(open_and_close, url, options)
            seconds = until_idle(url)
            time.sleep(8)
            after = figures(url)
            print(f"{label}: active rows 0 after {seconds:.2f} s; "
                  f"answer the same: {answer(url) == before_answer}")  # fmt: skip
            for key, value in after.items():
                print(f"  {key}: {before[key]:.0f} → {value:.0f}")


if __name__ == "__main__":
    main()
