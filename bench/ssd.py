"""The SSD tier on the starter model: a restart, decode beside writes, a thousand prompts.

    .venv/bin/python bench/ssd.py restart [--tokens 4000]
    .venv/bin/python bench/ssd.py decode [--seconds 120]
    .venv/bin/python bench/ssd.py caps [--prompts 1000] [--tiny]

``restart``: first token of a prompt cold and from memory, over HTTP, and as the first request of a
second process on the same folder, whose files were dropped from the system's own cache in between
(on Linux); about two minutes on two quiet cores.
``decode``: tokens a second of one stream, in windows of two seconds: in every second one states of
``--tokens`` tokens (at most 2,000) wait to be written without end. Each of these is compared with
the two around it, and idle ones with each other, which shows the noise; and the writer's CPU time;
about three minutes on two quiet cores.
``caps``: distinct prompts through 200 MB of memory and ``--disk`` MB of disk (1,000); what both
hold meanwhile, what is written of ``--ssd-write-budget`` MB an hour, and what is left at the end
(``caps.py``); ``--tiny``: with a random model that computes next to nothing and has states of
12 KB a token, about three minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx
import trio

sys.path.insert(0, str(Path(__file__).parent))

import rig

rig.ready()

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from caps import caps  # noqa: E402
from clients import ask as ask_served  # noqa: E402
from clients import ordinary_ids as ids  # noqa: E402
from company import until  # noqa: E402
from serve import RESULTS, starter  # noqa: E402
from servers import running, troupe  # noqa: E402
from tiny import make_checkpoint  # noqa: E402

from mlx_troupe.actors.desk import SpillDesk  # noqa: E402
from mlx_troupe.actors.disk import FolderDisk  # noqa: E402
from mlx_troupe.actors.spill_messages import Save  # noqa: E402
from mlx_troupe.actors.system import Runtime, open_runtime  # noqa: E402
from mlx_troupe.runtime.prefix.entries import Origin  # noqa: E402
from mlx_troupe.runtime.requests import (  # noqa: E402
    Finished,
    GenerationRequest,
    SamplingRequest,
    TextDelta,
    TokenPrompt,
)
from mlx_troupe.runtime.settings import Settings  # noqa: E402
from mlx_troupe.runtime.spill.candidates import Candidate  # noqa: E402
from mlx_troupe.runtime.spill.state import HostState  # noqa: E402
from mlx_troupe.runtime.spill.store import SpillEntry, SpillStore  # noqa: E402

MB = 10**6
WINDOW = 2.0


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


class Measured(SpillStore):
    """Writes the same states again and again, and counts what that costs its thread."""

    cpu_seconds = 0.0
    nbytes = 0

    def save(self, entry: SpillEntry, state: HostState, origin: Origin | None = None) -> int:
        """Write a state anew."""
        self.drop(entry.key)
        began = time.thread_time()
        written = super().save(entry, state, origin)
        self.cpu_seconds += time.thread_time() - began
        self.nbytes += written
        return written


class Rewriting(FolderDisk):
    """A disk that never has enough."""

    def holds(self, candidate: Candidate) -> bool:
        """Nothing is."""
        return False


async def decode(settings: Settings, options: argparse.Namespace) -> None:
    """One stream; each window with writes is compared with those before and behind it."""
    assert settings.ssd_cache is not None
    store = Measured(settings.ssd_cache)
    async with open_runtime(settings, disk=Rewriting(store)) as runtime:
        await runtime.wait_ready()
        for seed in range(4):
            await ask(runtime, ids(min(options.tokens, 2000), seed))
        await runtime.flush_cache(60)
        tier, desk = runtime.cast.cache._tier, runtime.cast.ssd
        assert tier is not None
        states = [kept.candidate for kept in tier._kept.values()]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(talk, runtime)
            await trio.sleep(5)
            store.cpu_seconds, store.nbytes = 0.0, 0
            pairs = max(3, int(options.seconds / 2 / WINDOW))
            rates = [
                await rate(runtime, desk, states if number % 2 else [])
                for number in range(2 * pairs + 1)
            ]
            nursery.cancel_scope.cancel()
    idle, busy = rates[::2], rates[1::2]
    beside = [2 * on / sum(off) for on, off in zip(busy, pairwise(idle), strict=True)]
    print(f"idle {median(idle):.1f}, beside writes {median(busy):.1f} tokens/s")
    print(f"beside writes against the idle windows around: {middle(beside)}")
    print(f"an idle window against the one before: {middle([b / a for a, b in pairwise(idle)])}")
    written = store.nbytes / MB
    print(
        f"{written / WINDOW / len(busy):.0f} MB/s written meanwhile,"
        f" at {1e3 * store.cpu_seconds / max(written, 1e-9):.2f} ms of CPU a MB"
    )


def middle(ratios: list[float]) -> str:
    """The median, and where the middle half lies."""
    low, _, high = quantiles(ratios, n=4)
    return f"{median(ratios):.3f} × ({low:.3f} to {high:.3f} of {len(ratios)})"


async def talk(runtime: Runtime) -> None:
    """One long answer after the other."""
    model = runtime.model
    assert model is not None
    sampling = SamplingRequest(
        temperature=0.0, logit_bias=tuple((end, -100.0) for end in model.eos_ids)
    )
    for seed in count(100):
        request = GenerationRequest(TokenPrompt(ids(100, seed)), sampling, max_tokens=1500)
        async with runtime.generate(request) as generation:
            async for _ in generation:
                pass


async def rate(runtime: Runtime, desk: SpillDesk, states: list[Candidate]) -> float:
    """Tokens a second over a window, with these states always waiting to be written."""
    # What the window before left is written first.
    await until(lambda: not len(desk._queue), 0.05)
    made, began = made_by(runtime), time.perf_counter()
    while time.perf_counter() < began + WINDOW:
        if states and len(desk._queue) < 2:
            for state in states:
                desk._mailbox.post(Save(state))
        await trio.sleep(0.02)
    return (made_by(runtime) - made) / (time.perf_counter() - began)


def made_by(runtime: Runtime) -> int:
    """Tokens generated so far."""
    return runtime.cast.scheduler.core.stats().generated_tokens


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mode", choices=("restart", "decode", "caps"))
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--ssd-write-budget", type=int, default=3000, help="MB an hour")
    parser.add_argument("--disk", type=int, default=1000, help="MB")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = tiny(Path(folder) / "model") if options.tiny else starter()
        settings = Settings(path, "bench", batch=8, ssd_cache=Path(folder) / "cache")
        if options.mode == "restart":
            restart(settings, options)
        else:
            work = partial(caps, ask=ask) if options.mode == "caps" else decode
            trio.run(work, settings, options)


if __name__ == "__main__":
    main()
