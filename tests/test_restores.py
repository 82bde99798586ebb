"""States on their way back: slices between steps, and what may happen between two of them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import trio
import trio.testing
from company import ask, company, counted, nothing_left, read, run, settle, until

from mlx_troupe.actors import restores
from mlx_troupe.actors.scripted_disk import ScriptedDisk
from mlx_troupe.actors.system import Runtime
from mlx_troupe.actors.testing import ScriptedDevice
from mlx_troupe.runtime.device import StateSlice
from mlx_troupe.runtime.errors import StateRefused
from mlx_troupe.runtime.plans import SnapshotMade, StepPlan
from mlx_troupe.runtime.requests import Finished
from mlx_troupe.runtime.spill.state import HostArray, HostLayer

LAYERS = 8
LONG = tuple(range(1, 301))
KEPT = len(LONG) + 4
"""Tokens of the state that a request of five tokens leaves."""
SLICE = 2 * 4 * KEPT
"""Bytes of two layers."""
SLICES = [(0, 2), (2, 2), (4, 2), (6, 2)]


class Slicing(ScriptedDevice):
    """A device of eight layers that tells what happens when, and lets a test meddle between."""

    layers = LAYERS

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str | tuple[int, int | None]] = []
        self.meddle: Callable[[], None] | None = None

    def launch(self, plan: StepPlan) -> None:
        if plan.decode:
            self.log.append("decode")
        super().launch(plan)

    def import_state(self, part: StateSlice) -> SnapshotMade | None:
        self.log.append((part.first_layer, part.count))
        if part.first_layer == 4 and self.meddle is not None:
            self.meddle()
        return super().import_state(part)

    @property
    def slices(self) -> list[Any]:
        """First layers and counts."""
        return [entry for entry in self.log if entry != "decode"]


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restores, "IMPORT_BYTES", SLICE)


@pytest.fixture
async def disk(autojump_clock: object) -> ScriptedDisk:
    """A disk with the state of a long prompt."""
    made = ScriptedDisk(load_seconds=0.1)
    async with company(Slicing(), disk=made) as (runtime, _):
        await run(runtime, ask(*LONG))
        assert (await runtime.flush_cache(60)).durable
    return made


def figures(runtime: Runtime) -> dict[str, int]:
    """``/stats.ssd_cache``."""
    block = runtime.stats()["ssd_cache"]
    assert isinstance(block, dict)
    return block


async def cached(runtime: Runtime) -> int:
    """The long prompt once more: its text is right, and so much of it was cached."""
    text, end = await run(runtime, ask(*LONG))
    assert text == counted(LONG[-1], 5)
    assert isinstance(end, Finished)
    return end.usage.cached_tokens


async def talking(runtime: Runtime, device: Slicing, nursery: trio.Nursery) -> list[str]:
    """Begin a long answer; once it is complete its text is in the list."""
    texts: list[str] = []

    async def talk() -> None:
        texts.append((await run(runtime, ask(500, max_tokens=400)))[0])

    nursery.start_soon(talk)
    await until(lambda: len(device.log) > 5)
    return texts


async def test_slices_arrive_in_order_and_rows_that_run_step_between_them(
    disk: ScriptedDisk,
) -> None:
    """No two slices follow on each other while a row decodes, and its text is right."""
    device = Slicing()
    async with company(device, disk=disk) as (runtime, _), trio.open_nursery() as nursery:
        texts = await talking(runtime, device, nursery)
        assert await cached(runtime) == len(LONG) - 1
        assert device.slices == SLICES
        first = device.log.index((0, 2))
        between = device.log[first : device.log.index((6, 2)) + 1]
        assert all("decode" in pair for pair in pairwise(between))
    assert texts == [counted(500, 400)]


async def test_with_nobody_running_slices_follow_on_each_other(disk: ScriptedDisk) -> None:
    """And a state within one slice arrives at once."""
    device = Slicing()
    async with company(device, disk=disk) as (runtime, _):
        assert await cached(runtime) == len(LONG) - 1
        assert device.log[: len(SLICES)] == SLICES
        assert figures(runtime)["restores"] == 1
        await settle(runtime)
        nothing_left(runtime, device)


async def test_a_client_that_leaves_between_two_slices_leaves_the_state_to_others(
    disk: ScriptedDisk,
) -> None:
    """It arrives all the same, nothing else is left, and the next one finds it in memory."""
    device = Slicing()
    async with company(device, disk=disk) as (runtime, _):
        with trio.CancelScope() as scope:
            device.meddle = scope.cancel
            async with runtime.generate(ask(*LONG)) as generation:
                await read(generation)
        assert scope.cancelled_caught
        await settle(runtime)
        nothing_left(runtime, device)
        device.meddle = None
        assert await cached(runtime) == len(LONG) - 1
        assert device.slices == SLICES


async def test_a_server_that_stops_between_two_slices_stops(disk: ScriptedDisk) -> None:
    """No half of a state outlives it, and the file is there for the next."""
    device = Slicing()
    with trio.CancelScope() as scope:
        device.meddle = scope.cancel
        async with company(device, disk=disk) as (runtime, _):
            await run(runtime, ask(*LONG))
    assert scope.cancelled_caught
    assert not device.arriving
    async with company(Slicing(), disk=disk) as (runtime, _):
        assert await cached(runtime) == len(LONG) - 1


async def test_a_device_that_breaks_between_two_slices_costs_no_file(disk: ScriptedDisk) -> None:
    """The rest does not go to the next device, which knows nothing of the state's first half."""
    device = Slicing()

    def broken() -> None:
        device.fail_next = RuntimeError("broken")

    async with company(device, disk=disk) as (runtime, _):
        device.meddle = broken
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, runtime, ask(500, max_tokens=400))
            await until(lambda: len(device.log) > 5)
            nursery.start_soon(run, runtime, ask(*LONG))
            await until(lambda: device.opened == 2)
            device.meddle = None
        await runtime.wait_ready()
        await settle(runtime)
        assert figures(runtime)["faults"] == 0
        assert await cached(runtime) == len(LONG) - 1
        await settle(runtime)
        nothing_left(runtime, device)


async def test_a_slice_that_fails_costs_no_row_and_no_file(disk: ScriptedDisk) -> None:
    """Whoever waits for the state computes; all others go on, and the next one has it."""
    device = Slicing()

    def short() -> None:
        raise MemoryError("for once")

    async with company(device, disk=disk) as (runtime, _), trio.open_nursery() as nursery:
        texts = await talking(runtime, device, nursery)
        device.meddle = short
        assert await cached(runtime) == 0
        device.meddle = None
        await settle(runtime)
        assert (device.opened, texts) == (1, [counted(500, 400)])
        assert figures(runtime)["faults"] == 0
        nothing_left(runtime, device)
    async with company(Slicing(), disk=disk) as (runtime, _):
        assert await cached(runtime) == len(LONG) - 1


async def test_what_is_refused_between_two_slices_is_computed(disk: ScriptedDisk) -> None:
    """Its file is given up, and no half of it stays."""
    device = Slicing()

    def refused() -> None:
        device.arriving.clear()
        raise StateRefused("for once")

    async with company(device, disk=disk) as (runtime, _):
        device.meddle = refused
        assert await cached(runtime) == 0
        device.meddle = None
        await settle(runtime)
        nothing_left(runtime, device)
        assert figures(runtime)["faults"] == 1


async def test_an_actor_that_crashes_between_two_slices_gives_back_what_arrived(
    disk: ScriptedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client computes; the actor that follows brings the state back."""
    device = Slicing()
    fitting = restores._fitting

    def crash(layers: tuple[HostLayer, ...]) -> int:
        if len(layers) == LAYERS - 2:
            raise RuntimeError("a bug")
        return fitting(layers)

    async with company(device, disk=disk) as (runtime, _):
        monkeypatch.setattr(restores, "_fitting", crash)
        assert await cached(runtime) == 0
        assert runtime.cast.supervisor.crashes["spill"] == 1
        monkeypatch.setattr(restores, "_fitting", fitting)
        await settle(runtime)
        nothing_left(runtime, device)
        assert device.slices == SLICES[:1]


async def test_rows_wait_for_a_stalled_disk_together_and_not_one_after_the_other(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """From when each asked, about as long as computing takes; the next one to ask as long again."""
    prompts = [tuple(range(start, start + 50)) for start in (100, 300, 500)]
    disk = ScriptedDisk()
    async with company(disk=disk) as (runtime, _):
        for prompt in prompts:
            await run(runtime, ask(*prompt))
        assert (await runtime.flush_cache(60)).durable
    disk.load_seconds = 1e6
    async with company(disk=disk) as (runtime, device):
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for prompt in prompts:
                nursery.start_soon(run, runtime, ask(*prompt))
        assert trio.current_time() - began < restores.PATIENCE + 1
        assert figures(runtime)["faults"] == 1
        await settle(runtime)
        nothing_left(runtime, device)


@pytest.mark.parametrize(
    ("sizes", "count"),
    [((), 1), ((9000,), 1), ((9000, 1), 1), ((1, 9000), 1), ((SLICE, 1), 1), ((1, 1, 0), 3)],
)
def test_a_slice_is_what_fits_and_never_nothing(sizes: tuple[int, ...], count: int) -> None:
    """Whole layers, so that a layer larger than a slice is one."""
    layers = [
        HostLayer("x", (), (HostArray("uint8", (size,), bytes(size)),), (0,)) for size in sizes
    ]
    assert restores._fitting(layers) == count
