"""Clients that leave at every possible moment, and more of them than any mailbox could hold."""

from __future__ import annotations

import gc
from itertools import count

import pytest
import trio
from company import SETTINGS, ask, company, counted, nothing_left, run, settle

from mlx_troupe.actors.gate import Bounds, Gate
from mlx_troupe.actors.mailbox import Mailbox
from mlx_troupe.actors.messages import (
    Cancel,
)
from mlx_troupe.actors.system import Runtime
from mlx_troupe.actors.testing import ScriptedDevice
from mlx_troupe.runtime.errors import Overloaded
from mlx_troupe.runtime.plans import RowId
from mlx_troupe.runtime.prefix.entries import LeaseId
from mlx_troupe.runtime.requests import Failed, Finished
from mlx_troupe.runtime.scheduling.effects import LookUp, ReturnLease


async def leave_after(runtime: Runtime, prompt: int, seconds: float, wakes: int) -> bool:
    """A client that goes at a moment of time, then some turns of the loop later; True if cut."""
    with trio.CancelScope() as scope:

        async def go() -> None:
            await trio.sleep(seconds)
            for _ in range(wakes):
                await trio.lowlevel.checkpoint()
            scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(go)
            text, end = await run(runtime, ask(prompt, max_tokens=2))
            assert text == counted(prompt, 2)
            assert isinstance(end, Finished)
            nursery.cancel_scope.cancel()
    return scope.cancelled_caught


async def test_a_disconnect_racing_a_token_ten_thousand_times(autojump_clock: object) -> None:
    """Whatever the moment, nobody crashes, no cancel is lost, and whoever stays gets all."""
    device = ScriptedDevice(decode_seconds=0.01)
    moments = (0.0, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05)
    async with company(device, batch=32, queue=64) as (runtime, _):
        cut = 0
        turn = count()

        async def client() -> None:
            nonlocal cut
            while (i := next(turn)) < 10_000:
                was_cut = await leave_after(runtime, i % 900 + 1, moments[i % 7], i // 7 % 12)
                cut += was_cut

        async with trio.open_nursery() as nursery:
            for _ in range(32):
                nursery.start_soon(client)
        await settle(runtime)
        nothing_left(runtime, device)
        assert runtime.cast.gate.taken == 0
        assert set(runtime.cast.supervisor.crashes.values()) == {0}
        stats = runtime.cast.scheduler.core.stats()
        assert stats.refused == 0
        assert stats.finished + stats.cancelled == stats.submitted
        assert 2_000 < cut < 9_500, "the moments do not race"
        assert (await run(runtime, ask(5)))[0] == counted(5, 5)


@pytest.mark.parametrize("wakes", [0, 1, 2, 3, 5, 8])
async def test_a_storm_of_clients_that_go_at_once_loses_no_cancel(
    autojump_clock: object, wakes: int
) -> None:
    """Ten times as many as there is room for: some are refused, each one is forgotten."""
    clients = 10 * Bounds(SETTINGS.batch, SETTINGS.queue).scheduler
    async with company() as (runtime, device):
        refused = 0

        async def client(scope: trio.CancelScope) -> None:
            nonlocal refused
            with scope:
                try:
                    await run(runtime, ask(1, max_tokens=50))
                except Overloaded:
                    refused += 1

        scopes = [trio.CancelScope() for _ in range(clients)]
        async with trio.open_nursery() as nursery:
            for scope in scopes:
                nursery.start_soon(client, scope)
            for _ in range(wakes):
                await trio.lowlevel.checkpoint()
            for scope in scopes:
                scope.cancel()
        await settle(runtime)
        nothing_left(runtime, device)
        assert runtime.cast.gate.taken == 0
        assert set(runtime.cast.supervisor.crashes.values()) == {0}
        if wakes > 1:
            assert refused >= clients - runtime.cast.gate.places
        assert (await run(runtime, ask(5)))[0] == counted(5, 5)


async def test_a_storm_while_the_scheduler_is_down_loses_no_cancel(
    autojump_clock: object,
) -> None:
    """Nobody empties the mailbox while clients come and go: places run out, room does not."""
    async with company() as (runtime, device):
        core = runtime.cast.scheduler.core

        def crash(done: object) -> None:
            raise RuntimeError("injected")

        core.settled = crash  # type: ignore[method-assign, assignment]
        _, end = await run(runtime, ask(1))
        assert isinstance(end, Failed)
        assert runtime.cast.supervisor.states["scheduler"] == "restarting"
        refused = 0
        while runtime.cast.supervisor.states["scheduler"] == "restarting":
            with trio.move_on_after(0.001):
                for _ in range(200):
                    with trio.CancelScope() as scope:
                        scope.cancel()
                        try:
                            await run(runtime, ask(1, max_tokens=50))
                        except Overloaded:
                            refused += 1
                await trio.sleep_forever()
            assert runtime.cast.to_scheduler.depth <= runtime.cast.bounds.scheduler
        assert refused > 1_000
        await settle(runtime)
        nothing_left(runtime, device)
        assert runtime.cast.gate.taken == 0
        assert runtime.cast.supervisor.crashes["scheduler"] == 1
        assert (await run(runtime, ask(5)))[0] == counted(5, 5)


async def test_a_slow_cache_makes_misses_and_keeps_room_for_leases(
    autojump_clock: object,
) -> None:
    """While the cache sleeps, lookups beyond its room count as misses and rows go on."""
    async with company(batch=4) as (runtime, device):
        await trio.sleep(0.1)
        bounds = runtime.cast.bounds
        posted = 0
        while True:
            try:
                runtime.cast.to_cache.post(
                    LookUp(RowId(-posted), (1, 2, 3)), spare=bounds.cache_spare
                )
            except trio.WouldBlock:
                break
            posted += 1
        assert posted == bounds.lookups + 1, "the first one went to the actor at once"
        for i in range(bounds.cache_spare):
            runtime.cast.to_cache.post(ReturnLease(LeaseId(-i)))
        with pytest.raises(trio.WouldBlock):
            runtime.cast.to_cache.post(ReturnLease(LeaseId(0)))
        await trio.sleep(1)
        nothing_left(runtime, device)


async def test_the_mailbox_keeps_spare_room() -> None:
    """A post that must leave room is refused earlier than one that need not."""
    mailbox = Mailbox[int](3)
    mailbox.post(1, spare=2)
    with pytest.raises(trio.WouldBlock):
        mailbox.post(2, spare=2)
    mailbox.post(2)
    mailbox.post(3)
    with pytest.raises(trio.WouldBlock):
        mailbox.post(4)
    assert list(mailbox.drain()) == [1, 2, 3]
    mailbox.close()


def test_the_gate_counts() -> None:
    """As many come in as there are places; more leave than came is a fault."""
    gate = Gate(2)
    assert [gate.try_enter() for _ in range(3)] == [True, True, False]
    gate.leave()
    assert gate.try_enter()
    gate.leave()
    gate.leave()
    with pytest.raises(ValueError, match="more clients left"):
        gate.leave()


async def test_every_actor_of_a_request_ends_with_it(autojump_clock: object) -> None:
    """After many generations there are as many tasks as before."""
    async with company() as (runtime, _):
        await run(runtime, ask(1))
        await settle(runtime)
        before = _tasks()
        for i in range(50):
            with trio.move_on_after(0.001 * i):
                await run(runtime, ask(i + 1))
        await settle(runtime)
        assert _tasks() == before


async def test_a_cancel_of_an_unknown_row_is_ignored(autojump_clock: object) -> None:
    """A row that was never submitted, or is gone, can be cancelled by its owner all the same."""
    async with company() as (runtime, _):
        assert runtime.cast.gate.try_enter()
        runtime.cast.to_scheduler.post(Cancel(RowId(12_345)))
        await trio.sleep(0.1)
        assert runtime.cast.gate.taken == 0
        assert (await run(runtime, ask(5)))[0] == counted(5, 5)


def _tasks() -> int:
    gc.collect()
    return trio.lowlevel.current_statistics().tasks_living
