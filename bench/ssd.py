"""The SSD tier on the starter model: a restart, decode beside writes, a thousand prompts.

    .venv/bin/python bench/ssd.py restart [--tokens 4000]
    .venv/bin/python bench/ssd.py decode [--seconds 40]
    .venv/bin/python bench/ssd.py caps [--prompts 1000] [--tiny]

``restart``: first token of a prompt cold and from memory, over HTTP, and as the first request of a
second process on the same folder, whose files were dropped from the system's own cache in between
(on Linux); about two minutes on two quiet cores.
``decode``: tokens a second of one stream, with windows in which the spill actor writes states of
``--tokens`` tokens (at most 2,000) without end between windows in which it is idle. ``caps``:
distinct prompts through 200 MB of memory and ``--disk`` MB of disk (1,000); what both hold
meanwhile, and what is left at the end; ``--tiny``: with a random model that computes
next to nothing and has states of 12 KB a token.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import trio

sys.path.insert(0, str(Path(__file__).parent))

import rig

rig.ready()

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from clients import ask as ask_served  # noqa: E402
from clients import ordinary_ids as ids  # noqa: E402
from serve import RESULTS, starter  # noqa: E402
from servers import running, troupe  # noqa: E402
from tiny import make_checkpoint  # noqa: E402

from mlx_troupe.actors.desk import SpillDesk  # noqa: E402
from mlx_troupe.actors.disk import FolderDisk, folder_disk  # noqa: E402
from mlx_troupe.actors.figures import resident_bytes  # noqa: E402
from mlx_troupe.actors.spill_messages import Save  # noqa: E402
from mlx_troupe.actors.system import Runtime, open_runtime  # noqa: E402
from mlx_troupe.runtime.requests import (  # noqa: E402
    Finished,
    GenerationRequest,
    SamplingRequest,
    TextDelta,
    TokenPrompt,
)
from mlx_troupe.runtime.settings import Settings  # noqa: E402
from mlx_troupe.runtime.spill.queue import Candidate  # noqa: E402
from mlx_troupe.runtime.spill.state import HostState  # noqa: E402
from mlx_troupe.runtime.spill.store import key_of  # noqa: E402
from mlx_troupe.runtime.text.testing import ByteTokenizer  # noqa: E402

MB = 10**6


def tiny(path: Path) -> Path:
    """A checkpoint with more state than computation."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    return make_checkpoint(path, "llama", **heads)


async def ask(runtime: Runtime, prompt: tuple[int, ...], tokens: int = 1) -> tuple[float, int]:
    """Seconds to the first event of a greedy answer, and how much of the prompt was cached."""
    request = GenerationRequest(
        TokenPrompt(prompt), SamplingRequest(temperature=0.0), max_tokens=tokens
    )
    began = time.perf_counter()
    first: float | None = None
    async with runtime.generate(request) as generation:
        while True:
            event = await generation.next_event()
            first = first or time.perf_counter() - began
            if isinstance(event, Finished):
                return first, event.usage.cached_tokens
            if not isinstance(event, TextDelta):
                raise RuntimeError(f"a request failed: {event}")


def ssd(runtime: Runtime) -> dict[str, Any]:
    """``/stats.ssd_cache``."""
    block = runtime.stats()["ssd_cache"]
    assert isinstance(block, dict)
    return block


def restart(settings: Settings, options: argparse.Namespace) -> None:
    """Cold and from memory in one process, from the disk in the next."""
    folder = settings.ssd_cache
    assert folder is not None
    prompt = ids(options.tokens, 1)
    arm = troupe(settings.model, "--ssd-cache", str(folder))
    RESULTS.mkdir(exist_ok=True)
    log = RESULTS / "restart.log"
    with running(arm, log) as url:
        ask_served(url, ids(300, 2))
        cold, memory = ask_served(url, prompt), ask_served(url, prompt)
        httpx.post(f"{url}/admin/cache/flush", json={}, timeout=150).raise_for_status()
    dropped = drop_pages(folder)
    began = time.perf_counter()
    with running(arm, log) as url:
        ready = time.perf_counter() - began
        disk = ask_served(url, prompt)
        told = httpx.get(f"{url}/stats", timeout=60).json()["ssd_cache"]
    print(f"first token: cold {cold.first:.3f} s, memory {memory.first:.3f} s, "
          f"disk {disk.first:.3f} s after the {ready:.2f} s of a start")  # fmt: skip
    print(f"disk {cold.first / disk.first:.1f} × sooner than cold, "
          f"{cold.first / (ready + disk.first):.1f} × with the start")  # fmt: skip
    print(f"{disk.cached} of {disk.usage['prompt_tokens']} tokens cached, restored in "
          f"{told['restore_ms_last']:.0f} ms; {dropped / MB:.0f} MB of files "
          "were dropped from the system's cache")  # fmt: skip


def drop_pages(folder: Path) -> int:
    """Have the files read from the disk again, where the system can be asked; says how much."""
    if not hasattr(os, "posix_fadvise"):
        return 0
    size = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            size += path.stat().st_size
    return size


class Rewriting(FolderDisk):
    """Writes the same states again and again."""

    def holds(self, candidate: Candidate) -> bool:
        """Nothing is ever enough."""
        return False

    async def save(self, candidate: Candidate, state: HostState) -> int:
        """Write a state anew."""
        self._store.drop(key_of(candidate.namespace, candidate.ids))
        return await super().save(candidate, state)


async def decode(settings: Settings, options: argparse.Namespace) -> None:
    """One stream; windows of two seconds with and without writes, in turn."""
    plain = folder_disk(settings)
    assert plain is not None
    disk = Rewriting(plain._store)
    async with open_runtime(settings, disk=disk) as runtime:
        await runtime.wait_ready()
        for seed in range(4):
            await ask(runtime, ids(min(options.tokens, 2000), seed))
        await runtime.flush_cache(60)
        tier, desk = runtime.cache._tier, runtime._ssd
        assert tier is not None
        states = [kept.candidate for kept in tier._kept.values()]
        rates: dict[bool, list[float]] = {False: [], True: []}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, runtime, ids(100, 9), 100_000)
            await trio.sleep(3)
            wrote = ssd(runtime)["bytes_written"]
            for window in range(int(options.seconds / 2)):
                writing = window % 4 in (1, 2)
                rates[writing].append(await rate(runtime, desk, states if writing else []))
            wrote = ssd(runtime)["bytes_written"] - wrote
            nursery.cancel_scope.cancel()
    idle, busy = (statistics.median(rates[key]) for key in (False, True))
    seconds = 2 * len(rates[True])
    print(f"idle {idle:.1f}, beside writes {busy:.1f} tokens/s: {busy / idle:.3f} ×")
    print(f"{wrote / MB / seconds:.0f} MB/s written meanwhile")


async def rate(runtime: Runtime, desk: SpillDesk, states: list[Candidate]) -> float:
    """Tokens a second over two seconds, with these states always waiting to be written."""
    for state in states:
        desk._mailbox.post(Save(state))
    if not states:
        # What the window before left is written first.
        await runtime.flush_cache(30)
    made, began = made_by(runtime), time.perf_counter()
    while time.perf_counter() < began + 2:
        await trio.sleep(0.02)
        if len(desk._queue) < 2:
            for state in states:
                desk._mailbox.post(Save(state))
    return (made_by(runtime) - made) / (time.perf_counter() - began)


def made_by(runtime: Runtime) -> int:
    """Tokens generated so far."""
    return runtime.scheduler.core.stats().generated_tokens


async def caps(settings: Settings, options: argparse.Namespace) -> None:
    """Many prompts through two small tiers."""
    settings = replace(
        settings,
        prompt_cache_bytes=200 * MB,
        ssd_cache_max_bytes=options.disk * MB,
        ssd_write_budget_bytes=options.budget * MB if options.budget else None,
    )
    assert settings.ssd_cache is not None
    most = {"memory": 0, "states": 0, "disk": 0}
    vocabulary = 120 if options.tiny else 40_000
    lengths = random.Random(0)

    def prompt(seed: int) -> tuple[int, ...]:
        return ids(lengths.randrange(200, 400) if options.tiny else 100, seed, vocabulary)

    tokenizer = ByteTokenizer() if options.tiny else None
    async with open_runtime(settings, tokenizer=tokenizer) as runtime:
        await runtime.wait_ready()
        todo = list(range(-100, 0))

        async def client() -> None:
            while todo:
                await ask(runtime, prompt(todo.pop()))

        async def serve_all() -> None:
            async with trio.open_nursery() as clients:
                for _ in range(8):
                    clients.start_soon(client)

        await serve_all()
        await rest(runtime)
        before = runtime.view.stats.active_bytes, resident_bytes()
        todo += range(options.prompts)
        began = time.perf_counter()

        async def watch() -> None:
            folder = settings.ssd_cache
            assert folder is not None
            while True:
                on_disk = sum(map(size_of, folder.glob("*.safetensors")))
                most["memory"] = max(most["memory"], runtime.cache.core.bytes)
                most["states"] = max(most["states"], runtime.view.stats.snapshot_bytes)
                most["disk"] = max(most["disk"], on_disk)
                await trio.sleep(0.25)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await serve_all()
            await runtime.flush_cache(120)
            nursery.cancel_scope.cancel()
        seconds = time.perf_counter() - began
        told = ssd(runtime)
        await rest(runtime)
        after = runtime.view.stats.active_bytes, resident_bytes()
    print(f"{options.prompts} prompts in {seconds:.0f} s; most bytes held:")
    print("  " + ", ".join(f"{name} {held / MB:.0f} MB" for name, held in most.items()))
    for name in ("spills", "bytes_written", "dropped_spills", "over_budget_spills", "evictions"):
        print(f"  {name} {told[name]:,}")
    for name, old, new in zip(("active", "resident"), before, after, strict=True):
        print(f"{name}: {old / MB:.1f} MB before, {new / MB:.1f} MB after ({new / old - 1:+.2%})")


def size_of(file: Path) -> int:
    """Bytes of a file that may be gone by now."""
    with suppress(FileNotFoundError):
        return file.stat().st_size
    return 0


async def rest(runtime: Runtime) -> None:
    """Empty the cache and wait until unused memory went back to the system."""
    await runtime.flush_cache(60)
    await runtime.clear_cache()
    await trio.sleep(7)


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mode", choices=("restart", "decode", "caps"))
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--budget", type=int, default=0, help="MB an hour; 0 = none")
    parser.add_argument("--disk", type=int, default=1000, help="MB")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = tiny(Path(folder) / "model") if options.tiny else starter()
        settings = Settings(path, "bench", batch=8, ssd_cache=Path(folder) / "cache")
        if options.mode == "restart":
            restart(settings, options)
        else:
            trio.run({"decode": decode, "caps": caps}[options.mode], settings, options)


if __name__ == "__main__":
    main()
