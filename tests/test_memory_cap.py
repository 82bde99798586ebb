"""Kept states stay under their limit, whatever goes on, and give way when memory runs out."""

from __future__ import annotations

from typing import Any

import trio
import trio.testing
from company import ask, company, counted, nothing_left, run, settle

from mlx_troupe.actors.scripted_disk import ScriptedDisk
from mlx_troupe.actors.system import Runtime
from mlx_troupe.actors.testing import ScriptedDevice
from mlx_troupe.runtime.model_info import ModelInfo
from mlx_troupe.runtime.requests import Finished

LIMIT = 2000


def limited(limit: int = LIMIT) -> ScriptedDevice:
    eos = frozenset({0})
    device = ScriptedDevice(ModelInfo("m", 1000, 4096, eos, kv_bytes_per_token=1, namespace="s"))
    device.snapshot_limit = limit
    return device


def cache(runtime: Runtime) -> dict[str, Any]:
    block: Any = runtime.stats()["prompt_cache"]
    return dict(block)


async def cached(runtime: Runtime, *ids: int, tokens: int = 5) -> int:
    """Run one request, check its text, and say how much of its prompt was cached."""
    text, end = await run(runtime, ask(*ids, max_tokens=tokens))
    assert isinstance(end, Finished)
    assert text == counted(ids[-1], tokens)
    return end.usage.cached_tokens


async def serve(runtime: Runtime, prompts: list[range]) -> None:
    """Four at a time, in an order that depends on nothing."""

    async def client(mine: list[range]) -> None:
        for prompt in mine:
            await cached(runtime, *prompt)

    async with trio.open_nursery() as clients:
        for number in range(4):
            clients.start_soon(client, prompts[number::4])


async def test_all_that_is_kept_stays_under_the_limit_beside_a_slow_disk(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Entries, states that wait to be written and those just made; few are given up for it."""
    prompts = [range(n, n + 30 + 7 * n % 90) for n in range(1, 121)]
    disk = ScriptedDisk(save_seconds=0.2)
    async with company(limited(), disk=disk, prompt_cache_bytes=LIMIT) as (runtime, device):
        await serve(runtime, prompts)
        assert LIMIT / 2 < device.most_snapshot_bytes <= LIMIT
        told = cache(runtime)
        assert told["puts"] > 100
        assert told["missed"] < 12
        assert told["set_aside_bytes"] >= LIMIT // 32
        await runtime.flush_cache(600)
        await settle(runtime)
        nothing_left(runtime, device)


async def test_a_chat_may_grow_to_all_of_the_limit(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A state beside which its successor has no room goes with the row that goes on from it."""
    async with company(limited(1000), prompt_cache_bytes=1000) as (runtime, device):
        before = 0
        for length in range(380, 960, 40):
            assert await cached(runtime, *range(1, 1 + length)) >= before
            before = length - 1
        told = cache(runtime)
        assert (told["missed"], told["handed_over"] > 5) == (0, True)
        await settle(runtime)
        nothing_left(runtime, device)


async def test_there_is_room_for_a_state_on_its_way_back(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Two states that do not fit together take turns in memory; each comes back from the disk."""
    first, second = range(1, 701), range(200, 900)
    disk = ScriptedDisk(load_seconds=0.1)
    async with company(limited(1000), disk=disk, prompt_cache_bytes=1000) as (runtime, device):
        for number, prompt in enumerate((first, second) * 3):
            assert await cached(runtime, *prompt) == (699 if number > 1 else 0)
            assert (await runtime.flush_cache(60)).missing == 0
        assert cache(runtime)["missed"] == 0
        assert device.most_snapshot_bytes <= 1000
        await settle(runtime)
        nothing_left(runtime, device)


async def test_a_state_on_the_disk_that_memory_could_not_keep_costs_no_others(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """After a restart with less memory: it is not read, its client is told, and all else stays."""
    large, small = range(1, 701), range(800, 900)
    disk = ScriptedDisk()
    async with company(limited(1000), disk=disk, prompt_cache_bytes=1000) as (runtime, _):
        await cached(runtime, *large)
        assert (await runtime.flush_cache(60)).durable
    async with company(limited(300), disk=disk, prompt_cache_bytes=300) as (runtime, device):
        await cached(runtime, *small)
        for _ in range(2):
            _, end = await run(runtime, ask(*large, explain=True))
            assert isinstance(end, Finished)
            assert end.usage.cached_tokens == 0
            assert end.usage.cache is not None
            assert (end.usage.cache.disk_tokens, end.usage.cache.reason) == (0, "too_large")
        assert await cached(runtime, *small) == 99
        assert not [entry for entry in disk.log if entry.startswith("load")]
        await settle(runtime)
        nothing_left(runtime, device)


async def test_a_device_in_need_gets_kept_states_back_and_no_request_is_refused(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Least worth first, down to 85 % of its memory; while a row only decodes, too."""
    model = ModelInfo("m", 1000, 4096, frozenset({0}), memory_bytes=2000, namespace="s")
    async with company(ScriptedDevice(model), prompt_cache_bytes=10_000) as (runtime, device):
        for number in range(1, 14):
            await cached(runtime, *range(number * 50, number * 50 + 100))
        await settle(runtime)
        assert cache(runtime)["pressed_out"] == 0
        kept = device.stats().snapshot_bytes
        assert 1300 < kept <= 1700, "the bounds of what follows"
        async with runtime.generate(ask(7, 8, 9, max_tokens=900)) as generation:
            while (now := device.stats()).kv_bytes < 700:
                await generation.next_event()
                assert now.active_bytes <= 1700 + 110, "a state was given up too late"
            assert cache(runtime)["pressed_out"] > 0
            assert device.stats().snapshot_bytes > 700, "more were given up than it took"
        await settle(runtime)
        nothing_left(runtime, device)
