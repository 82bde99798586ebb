"""The SSD tier in a whole runtime, on a scripted device, a scripted disk and virtual time."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import trio
from company import ask, company, counted, nothing_left, run, settle, until

from mlx_troupe.actors.disk import Disk
from mlx_troupe.actors.scripted_disk import ScriptedDisk
from mlx_troupe.actors.system import Runtime
from mlx_troupe.actors.testing import ScriptedDevice
from mlx_troupe.runtime.model_info import ModelInfo
from mlx_troupe.runtime.requests import Finished
from mlx_troupe.runtime.spill import faults

LONG = tuple(range(1, 301))


def figures(runtime: Runtime) -> dict[str, int]:
    """``/stats.ssd_cache``."""
    block = runtime.stats()["ssd_cache"]
    assert isinstance(block, dict)
    return block


async def cached(runtime: Runtime, *ids: int, tokens: int = 5) -> int:
    """Run one request, check its text, and say how much of its prompt was cached."""
    text, end = await run(runtime, ask(*ids, max_tokens=tokens))
    assert text == counted(ids[-1], tokens)
    assert isinstance(end, Finished)
    return end.usage.cached_tokens


async def left_on(disk: Disk, *prompts: tuple[int, ...]) -> None:
    """A runtime that served some prompts and wrote what it kept."""
    async with company(disk=disk) as (runtime, device):
        for prompt in prompts:
            await cached(runtime, *prompt)
        assert (await runtime.flush_cache(60)).durable
        await settle(runtime)
        nothing_left(runtime, device)


async def test_a_restarted_runtime_finds_what_the_last_one_kept(autojump_clock) -> None:
    """All of the prompt but its last token comes from the disk, and the text is the same."""
    disk = ScriptedDisk(save_seconds=1.0, load_seconds=0.1)
    await left_on(disk, LONG)
    async with company(disk=disk) as (runtime, device):
        assert await cached(runtime, *LONG) == len(LONG) - 1
        assert figures(runtime)["restores"] == 1
        assert await cached(runtime, *LONG) == len(LONG) - 1
        assert figures(runtime)["restores"] == 1, "the second hit is in memory"
        await settle(runtime)
        nothing_left(runtime, device)


async def test_the_disk_wins_only_with_a_longer_prefix(autojump_clock) -> None:
    """What memory has as much of is not read."""
    disk = ScriptedDisk()
    await left_on(disk, LONG)
    async with company(disk=disk) as (runtime, _):
        await cached(runtime, *LONG[:200], 900)
        loads = len([entry for entry in disk.log if entry.startswith("load")])
        assert await cached(runtime, *LONG[:200], 901) == 200
        assert len([entry for entry in disk.log if entry.startswith("load")]) == loads
        assert await cached(runtime, *LONG) == len(LONG) - 1


async def test_a_state_is_not_read_for_a_few_of_its_tokens(autojump_clock) -> None:
    """Reading three hundred tokens for ten costs more than computing ten."""
    disk = ScriptedDisk()
    await left_on(disk, LONG)
    async with company(disk=disk) as (runtime, _):
        assert await cached(runtime, *LONG[:10], 900) == 0
        assert figures(runtime)["restores"] == 0
        assert await cached(runtime, *LONG[:100], 900) == 100


async def test_other_adapters_or_models_find_nothing(autojump_clock) -> None:
    """A namespace of its own means states of its own."""
    disk = ScriptedDisk()
    await left_on(disk, LONG)
    other = ScriptedDevice(ModelInfo("other", 1000, 4096, frozenset({0}), namespace="t"))
    async with company(other, disk=disk) as (runtime, _):
        assert await cached(runtime, *LONG) == 0


async def test_decode_does_not_wait_for_a_slow_disk(autojump_clock) -> None:
    """While a write takes a minute, requests take what they take."""
    disk = ScriptedDisk(save_seconds=60.0)
    async with company(disk=disk) as (runtime, _):
        await cached(runtime, *LONG)
        await until(lambda: "save 304" in disk.log)
        began = trio.current_time()
        await cached(runtime, 5, 6, 7, tokens=100)
        assert trio.current_time() - began < 2.0
        await settle(runtime)
        assert figures(runtime)["pending_spills"] == 2


async def test_a_restore_goes_before_states_that_wait_to_be_written(autojump_clock) -> None:
    """It waits for no write but the one that is under way."""
    disk = ScriptedDisk(load_seconds=0.1)
    await left_on(disk, LONG)
    disk.log.clear()
    disk.save_seconds = 10.0
    async with company(disk=disk) as (runtime, _):
        for start in (500, 600, 700):
            await cached(runtime, *range(start, start + 50))
        await until(lambda: "save 54" in disk.log)
        began = trio.current_time()
        assert await cached(runtime, *LONG) == len(LONG) - 1
        assert trio.current_time() - began < 1.0
        assert disk.log.index("load 304") < 3 + disk.log.count("open")


async def test_a_request_that_waits_for_its_turn_has_its_state_fetched(autojump_clock) -> None:
    """By the time its row starts, the disk has been read; nothing is read twice."""
    disk = ScriptedDisk(load_seconds=5.0)
    await left_on(disk, LONG)
    async with company(disk=disk, batch=1) as (runtime, _):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, runtime, ask(900, max_tokens=2000))
            await until(lambda: runtime.stats()["batch"]["active_rows"] == 1)  # type: ignore[index]
            done = trio.Event()

            async def waits() -> None:
                assert await cached(runtime, *LONG) == len(LONG) - 1
                done.set()

            nursery.start_soon(waits)
            await until(lambda: figures(runtime)["restores"] == 1, 0.1)
            assert not done.is_set()
        assert figures(runtime)["restores"] == 1


async def test_several_requests_for_one_state_read_it_once(autojump_clock) -> None:
    """The second one joins the first one's restore."""
    disk = ScriptedDisk(load_seconds=1.0)
    await left_on(disk, LONG)
    async with company(disk=disk) as (runtime, device):
        async with trio.open_nursery() as nursery:
            for last in (901, 902, 903):
                nursery.start_soon(partial(cached, runtime, *LONG, last))
        assert figures(runtime)["restores"] == 1
        await settle(runtime)
        nothing_left(runtime, device)


async def test_a_request_that_leaves_while_its_state_is_read_leaves_nothing(
    autojump_clock,
) -> None:
    """The state is there for the next one."""
    disk = ScriptedDisk(load_seconds=5.0)
    await left_on(disk, LONG)
    async with company(disk=disk) as (runtime, device):
        with trio.move_on_after(1.0):
            await run(runtime, ask(*LONG))
        await settle(runtime)
        await trio.sleep(10)
        nothing_left(runtime, device)
        began = trio.current_time()
        assert await cached(runtime, *LONG) == len(LONG) - 1
        assert trio.current_time() - began < 1.0


async def test_a_row_does_not_wait_for_ever_for_a_disk_that_does_not_answer(
    autojump_clock,
) -> None:
    """About as long as it takes to compute, which it then does; others go on meanwhile."""
    disk = ScriptedDisk()
    await left_on(disk, LONG)
    disk.load_seconds = 1e6
    async with company(disk=disk) as (runtime, device):
        began = trio.current_time()
        assert await cached(runtime, *LONG) == 0
        assert trio.current_time() - began < 10
        assert figures(runtime)["faults"] == 1
        await settle(runtime)
        nothing_left(runtime, device)


FAULTS = (
    faults.DiskFull("no space left"),
    faults.Unwritable("read-only file system"),
    faults.FolderGone("no such folder"),
    faults.Corrupt("not what was written"),
    faults.ForeignVersion("of another version"),
    faults.Unreadable("input/output error"),
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.code)
async def test_a_broken_disk_fails_no_request_and_is_told_once(
    autojump_clock, caplog: pytest.LogCaptureFixture, fault: faults.SpillFault
) -> None:
    """Eight streams at once, twice: every text is right, a counter moves, one line is told."""
    disk = ScriptedDisk(save_seconds=0.01, load_seconds=0.01)
    await left_on(disk, LONG)
    with caplog.at_level(logging.WARNING):
        async with company(disk=disk, batch=8, queue=16) as (runtime, device):
            await until(lambda: disk.is_open)
            disk.fault = fault
            for _ in range(2):
                async with trio.open_nursery() as nursery:
                    for last in range(800, 808):
                        nursery.start_soon(partial(cached, runtime, *LONG, last))
            await trio.sleep(10)
            assert figures(runtime)["faults"] > 0
            assert figures(runtime)["restores"] == 0
            assert figures(runtime)["failed_spills"] > 0
            report = await runtime.flush_cache(60)
            assert not report.durable
            disk.fault = None
            assert (await runtime.flush_cache(60)).durable
            await settle(runtime)
            nothing_left(runtime, device)
    told = [record for record in caplog.records if "SSD" in record.getMessage()]
    assert len(told) == 1


async def test_a_folder_that_cannot_be_opened_is_tried_again(autojump_clock) -> None:
    """Until then all is as without a disk."""
    disk = ScriptedDisk()
    await left_on(disk, LONG)
    disk.fault = faults.FolderGone("not mounted yet")
    disk.is_open = False
    async with company(disk=disk) as (runtime, _):
        assert await cached(runtime, *LONG, 900) == 0
        disk.fault = None
        await trio.sleep(100)
        assert await cached(runtime, *LONG[:299], 901) == 299
        assert (await runtime.flush_cache(60)).durable


@pytest.mark.parametrize("when", ["save", "load"])
async def test_a_crash_of_the_actor_loses_saves_that_wait_and_nothing_else(
    autojump_clock, when: str
) -> None:
    """Whoever waits for a restore computes; the next save is written."""
    disk = ScriptedDisk(save_seconds=0.5, load_seconds=0.5)
    await left_on(disk, LONG)
    async with company(disk=disk) as (runtime, device):
        await until(lambda: disk.is_open)
        if when == "load":
            disk.crash = RuntimeError("a bug")
            assert await cached(runtime, *LONG) == 0
        else:
            for start in (500, 600, 700):
                await cached(runtime, *range(start, start + 50))
            disk.crash = RuntimeError("a bug")
            await trio.sleep(5)
        assert runtime.cast.supervisor.crashes["spill"] == 1
        assert disk.crash is None
        await cached(runtime, *range(800, 900))
        assert (await runtime.flush_cache(60)).missing == 0
        await settle(runtime)
        nothing_left(runtime, device)


async def test_a_flush_that_is_under_way_hears_of_a_crash(autojump_clock) -> None:
    """Nobody waits on the dead."""
    disk = ScriptedDisk(save_seconds=5.0)
    async with company(disk=disk) as (runtime, _):
        await cached(runtime, *LONG)
        disk.crash = RuntimeError("a bug")
        with pytest.raises(Exception, match="spill failed"):
            await runtime.flush_cache(60)


async def test_the_prefix_cache_may_crash_while_rows_wait_for_the_disk(autojump_clock) -> None:
    """They compute, and what was read for them is released."""
    disk = ScriptedDisk(load_seconds=5.0)
    await left_on(disk, LONG)
    async with company(disk=disk) as (runtime, device):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cached, runtime, *LONG)
            await until(lambda: "load 304" in disk.log)
            runtime.cast.cache._take = None  # type: ignore[assignment]
            nursery.start_soon(cached, runtime, 900, 901, 902)
        await settle(runtime)
        await trio.sleep(20)
        assert runtime.cast.supervisor.crashes["kvcache"] == 1
        nothing_left(runtime, device)


async def test_a_lost_device_loses_what_was_not_written(autojump_clock) -> None:
    """And nothing hangs: rows fail or are served, and the disk serves the new device."""
    disk = ScriptedDisk(load_seconds=5.0)
    await left_on(disk, LONG)
    disk.save_seconds = 5.0
    async with company(disk=disk) as (runtime, device):
        await cached(runtime, *range(500, 600))
        device.fail_next = RuntimeError("broken")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, runtime, ask(*LONG))
            nursery.start_soon(run, runtime, ask(700, 701))
        await runtime.wait_ready()
        assert await cached(runtime, *LONG) == len(LONG) - 1
        assert (await runtime.flush_cache(60)).missing == 0
        await settle(runtime)
        nothing_left(runtime, device)


async def test_idle_states_that_are_on_the_disk_leave_memory(autojump_clock) -> None:
    """And come back when they are asked for."""
    disk = ScriptedDisk()
    async with company(disk=disk, ssd_demote_idle=300.0) as (runtime, device):
        rested: list[float] = []
        device.idle = lambda: rested.append(trio.current_time())  # type: ignore[method-assign]
        await cached(runtime, *LONG)
        await trio.sleep(200)
        assert len(runtime.cast.cache.core) == 1
        await trio.sleep(200)
        assert len(runtime.cast.cache.core) == 0
        assert not device.snapshots
        assert figures(runtime)["demotions"] == 1
        assert rested[-1] > 300, "their memory went back to the system"
        assert await cached(runtime, *LONG) == len(LONG) - 1


async def test_idle_states_stay_where_the_disk_does_not_take_them(autojump_clock) -> None:
    """They are offered again, and leave once they are safe."""
    disk = ScriptedDisk()
    async with company(disk=disk, ssd_demote_idle=300.0) as (runtime, _):
        await until(lambda: disk.is_open)
        disk.fault = faults.DiskFull("no space left")
        await cached(runtime, *LONG)
        await trio.sleep(1000)
        assert len(runtime.cast.cache.core) == 1
        disk.fault = None
        await trio.sleep(1000)
        assert len(runtime.cast.cache.core) == 0


async def test_memory_that_is_full_waits_for_no_write(autojump_clock) -> None:
    """States that memory lets go before they are written stay within an eighth of its budget."""
    disk = ScriptedDisk(save_seconds=5.0)
    async with company(disk=disk, prompt_cache_bytes=800) as (runtime, device):
        for start in range(1, 900, 50):
            await cached(runtime, *range(start, start + 80))
            assert runtime.cast.cache.core.bytes <= 800
            assert sum(map(len, device.snapshots.values())) <= 800 + 100 + 84
        await trio.sleep(200)
        assert figures(runtime)["dropped_spills"] > 0
        await settle(runtime)
        nothing_left(runtime, device)


async def test_a_flush_says_what_is_not_safe_in_time(autojump_clock) -> None:
    """It answers within its seconds, whatever the disk does."""
    disk = ScriptedDisk(save_seconds=50.0)
    async with company(disk=disk) as (runtime, _):
        await cached(runtime, *LONG)
        await cached(runtime, *range(500, 550))
        began = trio.current_time()
        report = await runtime.flush_cache(10)
        assert trio.current_time() - began == pytest.approx(10)
        assert (report.durable, report.missing, report.pending) == (False, 2, 2)
        report = await runtime.flush_cache(1000)
        assert (report.durable, report.flushed, report.pending, report.missing) == (True, 2, 0, 0)
        assert report.longest_tokens == 304


async def test_nobody_waits_for_a_folder_that_is_not_there(autojump_clock) -> None:
    """Neither a flush nor a stop: what is not safe is told at once, and written once it can be."""
    disk = ScriptedDisk()
    disk.fault = faults.FolderGone("not mounted")
    async with company(disk=disk) as (runtime, _):
        await cached(runtime, *LONG)
        began = trio.current_time()
        report = await runtime.flush_cache(120)
        assert (report.durable, report.missing, report.pending) == (False, 1, 1)
        disk.fault = None
        await trio.sleep(60)
        assert (await runtime.flush_cache(120)).durable
        assert trio.current_time() - began < 65
    disk.fault, disk.is_open = faults.FolderGone("not mounted"), False
    async with company(disk=disk) as (runtime, _):
        await cached(runtime, *range(400, 500))
        began = trio.current_time()
        report = await runtime.drain_to_disk(120)
        assert report is not None
        assert report.missing == 1
        assert trio.current_time() - began < 1


async def test_a_stop_lets_rows_end_and_writes_what_they_computed(autojump_clock) -> None:
    """The state of a row that was still running when the stop came is found afterwards."""
    disk = ScriptedDisk(save_seconds=2.0)
    async with company(disk=disk) as (runtime, _):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, runtime, ask(*LONG, max_tokens=100))
            await until(lambda: runtime.stats()["batch"]["active_rows"] == 1)  # type: ignore[index]
            report = await runtime.drain_to_disk(120)
        assert report is not None
        assert report.durable
    async with company(disk=disk) as (runtime, _):
        assert await cached(runtime, *LONG) == len(LONG) - 1


async def test_a_stop_takes_no_longer_than_it_may(autojump_clock) -> None:
    """A disk that never ends a write does not keep the process."""
    disk = ScriptedDisk(save_seconds=1e6)
    async with company(disk=disk) as (runtime, _):
        await cached(runtime, *LONG)
        began = trio.current_time()
        report = await runtime.drain_to_disk(120)
        assert trio.current_time() - began <= 121
        assert report is not None
        assert (report.durable, report.missing) == (False, 1)


async def test_a_state_that_a_flush_writes_at_its_second_offer_is_not_lost(autojump_clock) -> None:
    """It was postponed at its first, when more than half of the hour's budget was spent."""
    disk = ScriptedDisk()
    budget = 30_000
    async with company(disk=disk, ssd_write_budget_bytes=budget) as (runtime, _):
        for first in range(1, 8):
            await cached(runtime, *range(first, first + 300))
            assert (await runtime.flush_cache(10)).durable
        assert budget < 2 * figures(runtime)["bytes_written"] < 1.5 * budget
        await cached(runtime, *range(500, 520))
        await until(lambda: figures(runtime)["over_budget_spills"] == 1)
        report = await runtime.flush_cache(10)
        assert (report.missing, report.pending, report.dropped) == (0, 0, 0)
        assert report.durable


async def test_a_flush_hears_of_states_that_the_budget_has_no_room_for(autojump_clock) -> None:
    """It does not wait to its end for a queue that they left, all at once, before any write."""
    disk = ScriptedDisk(open_seconds=20)
    async with company(disk=disk, ssd_write_budget_bytes=10) as (runtime, _):
        await cached(runtime, *LONG)
        assert not disk.is_open
        began = trio.current_time()
        report = await runtime.flush_cache(1000)
        assert trio.current_time() - began < 20
        assert (report.durable, report.missing, report.pending) == (False, 1, 0)


async def test_the_write_budget_holds(autojump_clock) -> None:
    """No more bytes in an hour than it says, however many states come."""
    disk = ScriptedDisk()
    async with company(disk=disk, ssd_write_budget_bytes=10_000) as (runtime, _):
        for start in range(1, 900, 50):
            await cached(runtime, *range(start, start + 45))
        await trio.sleep(10)
        stats = figures(runtime)
        assert 0 < stats["bytes_written"] <= 10_000
        assert stats["over_budget_spills"] > 0


async def test_without_a_disk_nothing_is_told_of_one(autojump_clock) -> None:
    """No block of figures, no actor, and a flush is refused."""
    async with company() as (runtime, _):
        assert "ssd_cache" not in runtime.stats()
        assert "spill" not in runtime.cast.supervisor.states
        with pytest.raises(Exception, match="no SSD cache"):
            await runtime.flush_cache(1)
        assert await runtime.drain_to_disk(1) is None
