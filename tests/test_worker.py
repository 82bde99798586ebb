"""The device's thread: commands in, events out, on a real thread and the real clock."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

import pytest
import trio

from mlx_troupe.actors.device_messages import (
    Broke,
    Close,
    DropRows,
    Launch,
    Open,
    Opened,
    OpenFailed,
    Release,
    Rest,
    Rested,
    Settle,
    Settled,
    WorkerEvent,
)
from mlx_troupe.actors.inline_worker import InlineWorker
from mlx_troupe.actors.testing import ScriptedDevice
from mlx_troupe.actors.worker import Conductor, ThreadWorker
from mlx_troupe.runtime.errors import ModelError
from mlx_troupe.runtime.plans import (
    Cold,
    KeepRow,
    PrefillRow,
    RowId,
    SnapshotId,
    StartRow,
    StepId,
    StepPlan,
)
from mlx_troupe.runtime.requests import Sampling

ROW = RowId(1)


def start(step: int = 0, row: RowId = ROW) -> Launch:
    """A step that starts a row and decodes its first token, which is 4."""
    row_start = StartRow(row, (1, 2, 3), Sampling(), Cold())
    return Launch(
        StepPlan(StepId(step), start=(row_start,), prefill=(PrefillRow(row, 2),), decode=(row,))
    )


def decode(step: int, row: RowId = ROW) -> Launch:
    return Launch(StepPlan(StepId(step), decode=(row,)))


def token(event: WorkerEvent) -> int:
    assert isinstance(event, Settled), event
    return event.done.sampled[0].token


@asynccontextmanager
async def thread_worker(device: ScriptedDevice) -> AsyncIterator[ThreadWorker]:
    """A worker whose thread has ended when the block is left."""
    worker = ThreadWorker(device)
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()
        assert await trio.to_thread.run_sync(worker.join, 30.0)


async def opened(worker: ThreadWorker) -> None:
    worker.submit(Open())
    with trio.fail_after(30):
        assert isinstance(await worker.receive(), Opened)


async def test_results_come_in_the_order_of_the_steps() -> None:
    """A second launch settles the first one; a settle the last one."""
    async with thread_worker(ScriptedDevice()) as worker:
        await opened(worker)
        for command in (start(), decode(1), decode(2), Settle()):
            worker.submit(command)
        with trio.fail_after(30):
            events = [await worker.receive() for _ in range(3)]
    assert [token(event) for event in events] == [4, 5, 6]


async def test_a_burst_of_a_thousand_settles_loses_none() -> None:
    """Wake-ups may merge; events do not."""
    async with thread_worker(ScriptedDevice()) as worker:
        await opened(worker)
        worker.submit(start())
        for step in range(1, 1000):
            worker.submit(decode(step))
        worker.submit(Settle())
        with trio.fail_after(30):
            steps = []
            for _ in range(1000):
                event = await worker.receive()
                assert isinstance(event, Settled)
                steps.append(event.done.step)
    assert steps == list(range(1000))


async def test_a_receiver_that_is_cancelled_loses_nothing() -> None:
    """Whoever asks next gets the event."""
    async with thread_worker(ScriptedDevice()) as worker:
        await opened(worker)
        worker.submit(start())
        for step in range(1, 300):
            worker.submit(decode(step))
        worker.submit(Settle())
        steps: list[int] = []
        with trio.fail_after(30):
            tries = count()
            while len(steps) < 300:
                with trio.move_on_after(0.0001 * (next(tries) % 3)):
                    event = await worker.receive()
                    assert isinstance(event, Settled)
                    steps.append(event.done.step)
    assert steps == list(range(300))


@pytest.mark.parametrize("call", ["launch", "settle"])
async def test_a_fault_is_an_event_and_the_device_is_opened_again(call: str) -> None:
    """What was queued behind the fault is void; after a new open all is empty."""
    device = ScriptedDevice()
    async with thread_worker(device) as worker:
        await opened(worker)
        device.fail_on = call  # type: ignore[assignment]
        device.fail_next = ValueError("boom")
        for command in (start(), decode(1), decode(2), Settle(), Rest()):
            worker.submit(command)
        with trio.fail_after(30):
            event = await worker.receive()
            assert isinstance(event, Broke)
            assert str(event.error) == "boom"
            await opened(worker)
            assert not device.rows
            worker.submit(start(7, RowId(2)))
            worker.submit(Settle())
            assert token(await worker.receive()) == 4


@pytest.mark.parametrize(
    ("error", "message"),
    [(ModelError("torn"), "torn"), (ValueError("odd"), "the model cannot be loaded: odd")],
)
async def test_a_model_that_cannot_be_opened_is_an_event(error: Exception, message: str) -> None:
    """Whatever the loader raises."""
    device = ScriptedDevice()
    device.fail_next = error
    async with thread_worker(device) as worker:
        worker.submit(Open())
        with trio.fail_after(30):
            event = await worker.receive()
    assert isinstance(event, OpenFailed)
    assert event.error.message == message


async def test_stop_closes_the_device_on_its_own_thread_and_lends_it_to_the_next() -> None:
    """Every call comes from one thread, the last one too; threads do not pile up."""

    class Watched(ScriptedDevice):
        threads: set[int]

        def open(self):  # type: ignore[no-untyped-def]
            self.threads = {threading.get_ident()}
            return super().open()

        def launch(self, plan: StepPlan) -> None:
            self.threads.add(threading.get_ident())
            super().launch(plan)

        def close(self) -> None:
            self.threads.add(threading.get_ident())
            super().close()

    seen: set[int] = set()
    for _ in range(3):
        device = Watched()
        async with thread_worker(device) as worker:
            await opened(worker)
            worker.submit(start())
        assert not device.rows
        assert len(device.threads) == 1
        assert threading.get_ident() not in device.threads
        seen |= device.threads
    assert len(seen) == 1


async def test_a_worker_that_never_started_can_be_stopped() -> None:
    """Stopping and joining do not need a thread."""
    worker = ThreadWorker(ScriptedDevice())
    worker.stop()
    assert worker.join(0.0)


def test_posting_after_the_loop_has_ended_does_not_raise() -> None:
    """A step that ends late finds nobody and harms nobody; the thread then ends."""

    class Slow(ScriptedDevice):
        go = threading.Event()

        def settle(self):  # type: ignore[no-untyped-def]
            assert self.go.wait(10)
            return super().settle()

    worker = ThreadWorker(Slow())

    async def loop() -> None:
        worker.start()
        await opened(worker)
        worker.submit(start())
        worker.submit(Settle())
        worker.stop()

    trio.run(loop)
    Slow.go.set()
    assert worker.join(10.0)


def test_the_conductor_keeps_two_steps_under_way_at_most() -> None:
    """One running and one queued: the device is never asked for a third."""
    events: list[WorkerEvent] = []
    device = ScriptedDevice()
    conductor = Conductor(device, events.append)
    conductor.perform(Open())
    conductor.perform(Settle())
    conductor.perform(start())
    conductor.perform(Rest())
    assert len(events) == 1, "nothing to settle, and no rest while a step is under way"
    conductor.perform(decode(1))
    conductor.perform(decode(2))
    assert [token(event) for event in events[1:]] == [4, 5]
    conductor.perform(Settle())
    conductor.perform(Rest())
    assert isinstance(events[-1], Rested)


def test_dropping_rows_forgets_the_steps_under_way() -> None:
    """A new scheduler gets no result of the old one's steps, and their states are gone."""
    events: list[WorkerEvent] = []
    device = ScriptedDevice()
    conductor = Conductor(device, events.append)
    conductor.perform(Open())
    conductor.perform(start())
    keep = KeepRow(ROW, 2, SnapshotId(1))
    conductor.perform(Launch(StepPlan(StepId(1), keep=(keep,), decode=(ROW,))))
    conductor.perform(DropRows())
    conductor.perform(Settle())
    assert [type(event) for event in events] == [Opened, Settled]
    assert not device.rows
    assert not device.snapshots
    conductor.perform(start(2, RowId(2)))
    conductor.perform(Settle())
    assert token(events[-1]) == 4


def test_opening_again_empties_a_device_that_was_well() -> None:
    """What an earlier owner left on it belongs to nobody."""
    events: list[WorkerEvent] = []
    device = ScriptedDevice()
    conductor = Conductor(device, events.append)
    for command in (Open(), start(), decode(1)):
        conductor.perform(command)
    keep = KeepRow(ROW, 2, SnapshotId(1))
    conductor.perform(Launch(StepPlan(StepId(2), keep=(keep,), decode=(ROW,))))
    conductor.perform(Open())
    assert not device.rows
    assert not device.snapshots
    conductor.perform(Settle())
    assert isinstance(events[-1], Opened), "no step is left to settle"


def test_releasing_unknown_states_is_ignored() -> None:
    """Two owners may give the same state back."""
    events: list[WorkerEvent] = []
    conductor = Conductor(ScriptedDevice(), events.append)
    for command in (Open(), Release((SnapshotId(9),)), Close()):
        conductor.perform(command)
    assert len(events) == 1


async def test_the_inline_worker_keeps_a_command_whose_receiver_was_cancelled(
    autojump_clock: object,
) -> None:
    """As with a thread: a step goes on when nobody listens for a while."""
    worker = InlineWorker(ScriptedDevice(decode_seconds=1.0))
    worker.submit(Open())
    assert isinstance(await worker.receive(), Opened)
    worker.submit(start())
    worker.submit(Settle())
    with trio.move_on_after(0.5):
        await worker.receive()
    assert token(await worker.receive()) == 4
