"""Requests of random shape against a running company, and what must be as before once they ended.

Shared by ``test_soak.py`` and ``bench/soak.py``.
"""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
import trio
from company import until

from mlx_troupe.actors.device_messages import Rest
from mlx_troupe.actors.system import Runtime
from mlx_troupe.runtime.errors import Overloaded
from mlx_troupe.runtime.requests import (
    Failed,
    Finished,
    GenerationRequest,
    SamplingRequest,
    TextDelta,
    TokenPrompt,
)

VOCAB = 128


@dataclass(frozen=True)
class Remains:
    """What is there when nothing runs: counts, and bytes of MLX's active memory."""

    rows: int
    snapshots: int
    leases: int
    requests: int
    tasks: int
    active_bytes: int
    arrays: int


def shape(draw: random.Random) -> GenerationRequest:
    """A request of random length, limits and sampling; a third share one of four heads."""
    length = draw.choice((1, 2, 5, 17, 40, 63, 64, 65, 100, 150, 260))
    head = draw.randrange(4) if draw.random() < 1 / 3 else None
    ids = [draw.randrange(2, VOCAB) for _ in range(length)]
    if head is not None:
        ids = [2 + (head * 37 + i * 11) % (VOCAB - 2) for i in range(60)] + ids
    maybe = draw.random() < 0.5
    sampling = SamplingRequest(
        temperature=draw.choice((0.0, 0.0, 0.7, 1.5)),
        top_p=draw.choice((None, 0.5, 0.95)),
        top_k=draw.choice((None, 1, 20)),
        min_p=draw.choice((None, 0.1)),
        seed=draw.choice((None, 1, 2)),
        repetition_penalty=draw.choice((None, 1.2)) if maybe else None,
        presence_penalty=draw.choice((None, 0.5)) if maybe else None,
        frequency_penalty=draw.choice((None, -0.5)) if maybe else None,
        logit_bias=((5, -100.0), (9, 2.0)) if draw.random() < 0.1 else (),
        xtc_probability=0.5 if draw.random() < 0.1 else None,
        curve=((-9.0, -15.0), (-3.0, -2.0), (0.0, 0.0)) if draw.random() < 0.1 else None,
    )
    stop = ("qz",) if draw.random() < 0.1 else ()
    return GenerationRequest(TokenPrompt(tuple(ids)), sampling, draw.choice((1, 3, 9, 24)), stop)


async def client(runtime: Runtime, draw: random.Random, ends: Counter[str]) -> None:
    """One request, sent until there is room, read to its end or left at a random moment."""
    wanted = shape(draw)
    patience = draw.choice((None, None, 0.0, 0.005, 0.05))
    events = draw.choice((None, None, 0, 1, 2))
    with trio.move_on_after(1e9 if patience is None else patience) as scope:
        for _ in range(10_000):
            if await _try(runtime, wanted, events, ends):
                break
            await trio.sleep(0.05)
    ends["cancelled"] += scope.cancelled_caught


async def _try(
    runtime: Runtime, wanted: GenerationRequest, events: int | None, ends: Counter[str]
) -> bool:
    """Send a request once; False where there was no room for it."""
    try:
        async with runtime.generate(wanted) as generation:
            ends[await _read(generation, events)] += 1
    except Overloaded:
        ends["refused"] += 1
        return False
    return True


async def _read(generation: object, events: int | None) -> str:
    seen = 0
    if events == 0:
        return "left"
    async for event in generation:  # type: ignore[attr-defined]
        match event:
            case TextDelta():
                seen += 1
            case Finished(reason, _):
                return reason.value
            case Failed(error):
                raise error
        if seen == events:
            break
    return "left"


async def soak(
    runtime: Runtime, requests: int, *, seed: int, clients: int = 24, told: bool = False
) -> Counter[str]:
    """Send that many requests, ``clients`` at a time; how they ended."""
    ends: Counter[str] = Counter()
    turns = iter(range(requests))

    async def work(turns: Iterator[int]) -> None:
        for turn in turns:
            await client(runtime, random.Random(seed * 1_000_003 + turn), ends)
            if told and turn % 200 == 0:
                print(f"{turn} of {requests}: {dict(ends)}", flush=True)

    async with trio.open_nursery() as nursery:
        for _ in range(clients):
            nursery.start_soon(work, turns)
    return ends


async def rest(runtime: Runtime) -> Remains:
    """Wait until nothing runs, empty the prefix cache, and count what is left."""
    with trio.fail_after(60):
        await until(lambda: not _is_busy(runtime), 0.01)
        await runtime.clear_cache()
        await until(lambda: not runtime.cast.view.stats.snapshots, 0.01)
        shown = runtime.cast.view.stats
        # As the device does by itself after a few quiet seconds.
        runtime._worker.submit(Rest())
        await until(lambda: runtime.cast.view.stats is not shown, 0.01)
    stats, core = runtime.cast.view.stats, runtime.cast.scheduler.core
    core.check_integrity()
    return Remains(
        rows=stats.rows,
        snapshots=stats.snapshots,
        leases=runtime.cast.cache.core.leases,
        requests=len(core.everyone()),
        tasks=trio.lowlevel.current_statistics().tasks_living,
        active_bytes=mx.get_active_memory(),
        arrays=_num_arrays(),
    )


def _is_busy(runtime: Runtime) -> bool:
    stats = runtime.stats()
    scheduler, batch = runtime.cast.scheduler.core, stats["batch"]
    assert isinstance(batch, dict)
    rows = batch["active_rows"] + batch["pending_rows"] + runtime.cast.view.stats.rows
    return bool(rows or scheduler.in_flight or stats["requests"] != {"active": 0})


def _num_arrays() -> int:
    """Live MLX arrays of this process, whichever thread made them."""
    gc.collect()
    return sum(isinstance(thing, mx.array) for thing in gc.get_objects())
