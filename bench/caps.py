"""A thousand prompts through two small tiers: ``bench/ssd.py caps``.

Eight clients, 200 MB of memory, ``--disk`` MB of disk, ``--ssd-write-budget`` MB an hour. All that
the prefix cache keeps alive counts: entries, states that wait to be written, copies of those that
are being written, states on their way back. What running rows own does not, and is shown beside.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import trio
from clients import ordinary_ids

from mlx_troupe.actors.figures import resident_bytes
from mlx_troupe.actors.system import Runtime, open_runtime
from mlx_troupe.runtime.settings import Settings
from mlx_troupe.runtime.text.testing import ByteTokenizer

MB = 10**6
MEMORY = 200 * MB
CLIENTS = 8
WARM_UP = 250
AGAIN = 100
"""Prompts, at the most, that are asked once more: some of them have to come back from the disk."""
AT_REST = 7.0
"""Seconds after which a server that does nothing has given back what it can."""

Ask = Callable[[Runtime, tuple[int, ...]], Awaitable[object]]


class Peaks:
    """The most that was ever seen, by name."""

    def __init__(self, runtime: Runtime, folder: Path) -> None:
        self._runtime = runtime
        self._folder = folder
        self.most: dict[str, int] = {}

    def look(self) -> None:
        """Look once; what the device says it held between two looks is included."""
        stats, ssd = self._runtime.cast.view.stats, figures(self._runtime, "ssd_cache")
        copied = ssd["copied_for_spill_bytes"]
        self._note("memory tier", stats.most_snapshot_bytes + copied)
        self._note("entries", self._runtime.cast.cache.core.bytes)
        self._note("waiting for the disk", ssd["held_for_spill_bytes"])
        self._note("rows", stats.kv_bytes)
        self._note("disk tier", sum(map(size_of, self._folder.iterdir())))

    async def watch(self) -> None:
        """Look again and again."""
        while True:
            self.look()
            await trio.sleep(0.1)

    def _note(self, name: str, nbytes: int) -> None:
        self.most[name] = max(nbytes, self.most.get(name, 0))


def figures(runtime: Runtime, block: str) -> dict[str, Any]:
    """One block of ``/stats``."""
    told = runtime.stats()[block]
    assert isinstance(told, dict)
    return told


def size_of(file: Path) -> int:
    """Bytes of a file that may be gone by now."""
    with suppress(FileNotFoundError):
        return file.stat().st_size
    return 0


async def serve_all(runtime: Runtime, prompts: list[tuple[int, ...]], ask: Ask) -> None:
    """Ask for all, several at a time."""
    todo = list(reversed(prompts))

    async def client() -> None:
        while todo:
            await ask(runtime, todo.pop())

    async with trio.open_nursery() as clients:
        for _ in range(CLIENTS):
            clients.start_soon(client)


async def at_rest(runtime: Runtime) -> tuple[int, int]:
    """MLX's bytes, free buffers included, and resident bytes, of an empty cache that rests."""
    await runtime.flush_cache(60)
    await runtime.clear_cache()
    await trio.sleep(AT_REST)
    stats = runtime.cast.view.stats
    return stats.active_bytes + stats.cache_bytes, resident_bytes()


async def caps(settings: Settings, options: argparse.Namespace, ask: Ask) -> None:
    """Measure and say which of the caps held."""
    settings = replace(
        settings,
        prompt_cache_bytes=MEMORY,
        ssd_cache_max_bytes=options.disk * MB,
        ssd_write_budget_bytes=options.ssd_write_budget * MB,
    )
    assert settings.ssd_cache is not None
    draw = random.Random(0)
    lengths, below = ((200, 400), 120) if options.tiny else ((90, 110), 40_000)
    prompts = [
        ordinary_ids(draw.randrange(*lengths), seed, below)
        for seed in range(WARM_UP + options.prompts)
    ]
    again = draw.sample(prompts[WARM_UP:], min(AGAIN, options.prompts))
    tokenizer = ByteTokenizer() if options.tiny else None
    async with open_runtime(settings, tokenizer=tokenizer) as runtime:
        await runtime.wait_ready()
        await serve_all(runtime, prompts[:WARM_UP], ask)
        before = await at_rest(runtime)
        peaks, began = Peaks(runtime, settings.ssd_cache), time.perf_counter()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(peaks.watch)
            await serve_all(runtime, prompts[WARM_UP:], ask)
            await serve_all(runtime, again, ask)
            seconds = time.perf_counter() - began
            await runtime.flush_cache(120)
            await trio.sleep(AT_REST)
            nursery.cancel_scope.cancel()
        peaks.look()
        told, cache = figures(runtime, "ssd_cache"), figures(runtime, "prompt_cache")
        full = (
            runtime.cast.view.stats.active_bytes
            - before[0]
            - runtime.cast.view.stats.snapshot_bytes
        )
        after = await at_rest(runtime)
    print(f"{options.prompts} prompts and {len(again)} of them again in {seconds:.0f} s")
    print(
        "most held: " + ", ".join(f"{name} {held / MB:.1f} MB" for name, held in peaks.most.items())
    )
    for name in ("spills", "dropped_spills", "over_budget_spills", "evictions", "restores"):
        print(f"  {name} {told[name]:,}")
    print(f"  crowded_restores {told['crowded_restores']:,}, missed_states {cache['missed']:,}")
    print(f"full cache at rest: MLX holds {full:+,} bytes beyond idle and the ledger's states")
    limits = {"memory tier": MEMORY, "disk tier": options.disk * MB}
    for name, limit in limits.items():
        say(f"{name} {peaks.most[name]:,} of {limit:,} bytes", peaks.most[name] <= limit)
    written, budget = told["bytes_written"], options.ssd_write_budget * MB
    say(f"written {written:,} of {budget:,} bytes an hour", written <= budget)
    mlx, resident = (new / old - 1 for old, new in zip(before, after, strict=True))
    say(f"MLX at rest {before[0]:,} → {after[0]:,} bytes ({mlx:+.2%})", mlx <= 0.02)
    say(f"resident at rest {before[1]:,} → {after[1]:,} bytes ({resident:+.2%})", resident <= 0.02)


def say(what: str, holds: bool) -> None:
    """One line a bar."""
    print(f"{what}: {'holds' if holds else 'DOES NOT HOLD'}")
