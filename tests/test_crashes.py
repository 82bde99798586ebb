"""A crash in each actor, with requests in hand: everyone gets an error, and the company goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import pytest
import trio
from company import ask, company, counted, nothing_left, run, settle, until

from mlx_troupe.actors.device_messages import GpuCommand, Release
from mlx_troupe.actors.gate import Gate
from mlx_troupe.actors.gpu import DeviceBroken, GpuView, ModelRefused
from mlx_troupe.actors.kvcache import KVCacheActor
from mlx_troupe.actors.mailbox import Mailbox
from mlx_troupe.actors.messages import (
    CacheLost,
    CacheMessage,
    Cancel,
    Clear,
    Found,
    SchedulerMessage,
    StepSettled,
    Submit,
)
from mlx_troupe.actors.reply import Reply
from mlx_troupe.actors.scheduler import SchedulerActor
from mlx_troupe.actors.system import Runtime
from mlx_troupe.actors.testing import Call, ScriptedDevice
from mlx_troupe.actors.watchdog import DeviceHung
from mlx_troupe.runtime.errors import ModelError, TroupeError, Unavailable
from mlx_troupe.runtime.plans import RowId, SnapshotId, SnapshotMade, StepDone, StepId
from mlx_troupe.runtime.prefix.entries import LeaseId
from mlx_troupe.runtime.prefix.index import PrefixCore
from mlx_troupe.runtime.requests import Failed, Finished, Sampling
from mlx_troupe.runtime.scheduling.core import SchedulerCore
from mlx_troupe.runtime.scheduling.effects import LookUp, ReturnLease, RowEvent, RowSpec, Store


class Injected(Exception):
    """The crash that a test orders."""


class Clients:
    """Clients of one runtime, what they got and when."""

    def __init__(self, runtime: Runtime, nursery: trio.Nursery, **more: Any) -> None:
        self.runtime = runtime
        self.more = more
        self.nursery = nursery
        self.ends: dict[int, tuple[str, Finished | Failed]] = {}
        self.ended_at: dict[int, float] = {}
        self.started = 0

    def start(self, n: int, max_tokens: int = 200) -> None:
        """``n`` more clients, each with a prompt of its own of 40 tokens."""
        for _ in range(n):
            self.nursery.start_soon(self._run, self.started, max_tokens)
            self.started += 1

    async def _run(self, i: int, max_tokens: int) -> None:
        prompt = [(i * 37 + k) % 900 + 1 for k in range(40)]
        try:
            wanted = ask(*prompt, max_tokens=max_tokens, **self.more)
            self.ends[i] = await run(self.runtime, wanted)
        except TroupeError as error:
            self.ends[i] = ("", Failed(error))
        self.ended_at[i] = trio.current_time()

    @property
    def all_ended(self) -> bool:
        return len(self.ends) == self.started

    def errors(self) -> list[str]:
        """Messages of those that failed."""
        return [end.error.message for _, end in self.ends.values() if isinstance(end, Failed)]


@asynccontextmanager
async def busy_company(
    device: ScriptedDevice | None = None, clients: int = 10, **changes: Any
) -> AsyncIterator[tuple[Runtime, ScriptedDevice, Clients]]:
    """A company with clients in the batch and in the queue."""
    async with company(device, **changes) as (runtime, device), trio.open_nursery() as nursery:
        crowd = Clients(runtime, nursery)
        crowd.start(clients)
        await trio.sleep(0.5)
        assert not crowd.ends
        yield runtime, device, crowd


def crash_once(owner: Any, method: str, *, after: bool = False) -> Callable[[], bool]:
    """Make the next call of a method raise, before or after its work; says whether it did."""
    real = getattr(owner, method)
    done: list[bool] = []

    def crash(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, method, real)
        if after:
            real(*args, **kwargs)
        done.append(True)
        raise Injected(method)

    setattr(owner, method, crash)
    return lambda: bool(done)


class Reached(Exception):
    """Raised if a company goes on where it should have ended."""


_reached: list[bool] = []


async def until_it_ends() -> None:
    """The last line of a block that the company's end interrupts: all before it has held."""
    _reached.append(True)
    await trio.sleep(10)
    raise Reached


@contextmanager
def ends_with(error: type[Exception]) -> Iterator[None]:
    """The company ends with this error, and not before the block came to its last line."""
    _reached.clear()
    with pytest.RaisesGroup(error, flatten_subgroups=True):
        yield
    assert _reached, "the company ended before all that was to be seen"


def states(runtime: Runtime) -> set[str]:
    return set(runtime.health().actors.values())


async def works_again(runtime: Runtime, device: ScriptedDevice) -> None:
    """The next request is served, health is ok, and nothing is left over."""
    text, end = await run(runtime, ask(*range(1, 31), max_tokens=4))
    assert text == counted(30, 4)
    assert isinstance(end, Finished)
    await settle(runtime)
    assert runtime.health().status == "ok", runtime.health()
    nothing_left(runtime, device)
    assert runtime.cast.gate.taken == 0


# ---- the scheduler ------------------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("method", ["submit", "cancel", "settled", "plan", "found"])
async def test_a_scheduler_crash_fails_everyone_in_hand_and_nobody_later(
    autojump_clock: object, method: str, after: bool
) -> None:
    """Whatever it was doing, all its clients hear of it within a second."""
    async with busy_company() as (runtime, device, crowd):
        crashed = crash_once(runtime.cast.scheduler.core, method, after=after)
        if method == "submit":
            crowd.start(1)
        if method in ("cancel", "found"):
            # A client that leaves makes room for the next, whose prefix is then looked up.
            with trio.move_on_after(2.5):
                await run(runtime, ask(5, max_tokens=1))
        await until(crashed)
        at = trio.current_time()
        await until(lambda: "restarting" in states(runtime))
        assert runtime.health().status == "degraded"
        assert "scheduler" in runtime.health().reason
        await until(lambda: crowd.all_ended)
        assert trio.current_time() - at < 1.0
        if method not in ("cancel", "found"):
            assert len(crowd.errors()) == crowd.started
        assert all("scheduler failed" in message for message in crowd.errors())
        await works_again(runtime, device)
        assert runtime.cast.supervisor.crashes["scheduler"] == 1


@pytest.mark.parametrize("method", ["_pump", "_perform", "_send", "_store"])
async def test_a_crash_halfway_through_the_effects_leaks_nothing(
    autojump_clock: object, method: str
) -> None:
    """States that were made and not yet passed on are released."""
    async with busy_company(clients=4) as (runtime, device, crowd):
        await until(lambda: crowd.runtime.cast.scheduler.core.stats().generated_tokens > 780)
        crashed = crash_once(runtime.cast.scheduler, method)
        await until(crashed)
        await until(lambda: crowd.all_ended)
        await works_again(runtime, device)


async def test_states_made_while_the_scheduler_is_down_are_released(
    autojump_clock: object,
) -> None:
    """Results that nobody can place any more leave nothing on the device."""
    device = ScriptedDevice(decode_seconds=0.03)
    async with busy_company(device, clients=4) as (runtime, device, crowd):
        core = runtime.cast.scheduler.core
        await until(lambda: any(planned.keeps for planned in core._steps))
        crash_once(core, "settled")
        await until(lambda: crowd.all_ended)
        await works_again(runtime, device)


async def test_requests_sent_while_the_scheduler_is_down_are_served(
    autojump_clock: object,
) -> None:
    """They wait in its mailbox for the next incarnation."""
    async with busy_company(clients=3) as (runtime, device, crowd):
        crashed = crash_once(runtime.cast.scheduler.core, "settled")
        await until(lambda: crashed() and "restarting" in states(runtime))
        text, _ = await run(runtime, ask(7, max_tokens=3))
        assert text == counted(7, 3)
        await until(lambda: crowd.all_ended)
        await works_again(runtime, device)


async def test_too_many_scheduler_crashes_end_the_company(autojump_clock: object) -> None:
    """Those in hand and those in the queue get their error first."""
    messages: list[str] = []
    with ends_with(Injected):
        async with company(batch=2) as (runtime, _), trio.open_nursery() as nursery:
            for _ in range(6):
                crowd = Clients(runtime, nursery)
                crowd.start(5)
                await trio.sleep(0.5)
                crashed = crash_once(runtime.cast.scheduler.core, "settled")
                await until(crashed)
                await until(partial(getattr, crowd, "all_ended"))
                messages += crowd.errors()
            assert len(messages) == 30
            assert runtime.health().status == "failed"
            late = Clients(runtime, nursery)
            late.start(1)
            await until(lambda: late.all_ended)
            assert "engine has failed" in late.errors()[0]
            await until_it_ends()


# ---- the prefix cache ---------------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("method", ["lookup", "put", "end_lease", "clear"])
async def test_a_cache_crash_harms_no_request(
    autojump_clock: object, method: str, after: bool
) -> None:
    """Lookups become misses; whatever it held is given back."""
    async with busy_company() as (runtime, device, crowd):
        prompt = range(100, 200)
        await run(runtime, ask(*prompt, max_tokens=1))
        await trio.sleep(0.1)
        crashed = crash_once(runtime.cast.cache.core, method, after=after)
        if method == "clear":
            with pytest.raises(TroupeError):
                await runtime.clear_cache()
        crowd.start(1)
        text, end = await run(runtime, ask(*prompt, max_tokens=3))
        await until(crashed)
        assert isinstance(end, Finished)
        assert text == counted(199, 3)
        await until(lambda: crowd.all_ended)
        assert crowd.errors() == []
        await works_again(runtime, device)
        assert runtime.cast.supervisor.crashes["kvcache"] == 1


async def test_rows_that_borrow_from_a_crashed_cache_go_on(autojump_clock: object) -> None:
    """A lent state stays until the step that reads it has run."""
    async with company() as (runtime, device), trio.open_nursery() as nursery:
        await run(runtime, ask(*range(1, 101), max_tokens=1))
        crowd = Clients(runtime, nursery)
        crowd.start(3)
        await trio.sleep(0.2)
        crash_once(runtime.cast.cache, "_look_up", after=True)
        text, _ = await run(runtime, ask(*range(1, 101), max_tokens=3))
        assert text == counted(100, 3)
        await until(lambda: crowd.all_ended)
        assert crowd.errors() == []
        await works_again(runtime, device)


# ---- the device ---------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["launch", "settle"])
async def test_a_fault_of_the_device_fails_its_rows_and_the_model_is_loaded_again(
    autojump_clock: object, call: Call
) -> None:
    """Rows in the batch fail within a second; the queue waits and is served."""
    device = ScriptedDevice(open_seconds=5.0)
    async with busy_company(device) as (runtime, device, crowd):
        device.fail_on, device.fail_next = call, Injected("out of memory")
        await until(lambda: device.fail_next is None)
        at = trio.current_time()
        await until(lambda: len(crowd.ends) == 4)
        assert trio.current_time() - at < 1.0
        assert all("out of memory" in message for message in crowd.errors())
        assert runtime.health().status == "degraded"
        assert runtime.model is None
        await trio.sleep(1)
        assert runtime.health().status == "degraded"
        assert "out of memory" in runtime.health().reason
        await until(lambda: crowd.all_ended)
        assert len(crowd.errors()) == 4
        assert device.opened == 2
        await works_again(runtime, device)


@pytest.mark.parametrize("after", [False, True])
async def test_a_crash_of_the_gpu_actor_itself_leaves_no_row_behind(
    autojump_clock: object, after: bool
) -> None:
    """The device was well, but what it held belongs to nobody; it is emptied and loaded again."""
    async with busy_company() as (runtime, device, crowd):
        worker = runtime._worker
        crashed = crash_once(worker, "submit", after=after)
        await until(crashed)
        await until(lambda: len(crowd.ends) >= 4)
        await until(lambda: crowd.all_ended)
        assert len(crowd.errors()) == 4
        assert device.opened == 2
        await works_again(runtime, device)


async def test_a_second_fault_ends_the_company(autojump_clock: object) -> None:
    """Rows, queue and those who wait for the model all hear why before it ends."""
    device = ScriptedDevice()
    with ends_with(DeviceBroken):
        async with busy_company(device) as (runtime, device, crowd):
            for _ in range(2):
                device.fail_on, device.fail_next = "launch", Injected("fell off the bus")
                await until(lambda: device.fail_next is None)
                await until(lambda: len(crowd.ends) >= 4)
            at = trio.current_time()
            await until(lambda: crowd.all_ended)
            assert trio.current_time() - at < 1.0
            assert len(crowd.errors()) == 10
            assert all("fell off the bus" in message for message in crowd.errors())
            assert runtime.health().status == "failed"
            await until_it_ends()


async def test_a_model_that_cannot_be_loaded_again_ends_the_company(
    autojump_clock: object,
) -> None:
    """The queue, which had survived the fault, gets its error too."""
    device = ScriptedDevice(open_seconds=1.0)
    with ends_with(ModelRefused):
        async with busy_company(device) as (runtime, device, crowd):
            device.fail_on, device.fail_next = "launch", Injected("x")
            await until(lambda: device.fail_next is None)
            device.fail_on, device.fail_next = "open", ModelError("gone")
            await until(lambda: crowd.all_ended)
            assert len(crowd.errors()) == 10
            assert runtime.health().status == "failed"
            await until_it_ends()


async def test_a_device_that_hangs_ends_the_company(autojump_clock: object) -> None:
    """Within the step's timeout health has failed and every client has an error."""
    device = ScriptedDevice()
    with ends_with(DeviceHung):
        async with busy_company(device) as (runtime, device, crowd):
            device.decode_seconds = 1e9
            at = trio.current_time()
            await until(lambda: crowd.all_ended, pause=0.1)
            assert 59 < trio.current_time() - at < 61
            assert len(crowd.errors()) == 10
            assert runtime.health().status == "failed"
            await until_it_ends()


async def test_a_long_prefill_is_not_a_hang_nor_is_the_step_behind_it(
    autojump_clock: object,
) -> None:
    """A decode queued behind a prefill has its own minute, which begins when its turn comes."""
    device = ScriptedDevice(prefill_token_seconds=0.2)
    async with company(device) as (runtime, device):
        text, end = await run(runtime, ask(*[5] * 2000, max_tokens=3))
        assert trio.current_time() > 390
        assert text == counted(5, 3)
        assert isinstance(end, Finished)


async def test_a_hang_behind_a_prefill_is_seen_in_the_time_of_a_step(
    autojump_clock: object,
) -> None:
    """The watchdog does not sleep through it because a prefill was allowed more."""
    device = ScriptedDevice(prefill_token_seconds=0.01)
    with ends_with(DeviceHung):
        async with company(device) as (runtime, device), trio.open_nursery() as nursery:
            crowd = Clients(runtime, nursery)
            crowd.start(1)
            await trio.sleep(0.1)
            device.decode_seconds = 1e9
            await until(lambda: crowd.all_ended, pause=0.1)
            assert trio.current_time() < 62
            await until_it_ends()


async def test_a_load_that_hangs_is_seen_although_a_scheduler_starts(
    autojump_clock: object,
) -> None:
    """A new scheduler forgets the steps under way, not the load."""
    device = ScriptedDevice()
    with ends_with(DeviceHung):
        async with busy_company(device) as (runtime, device, _):
            device.open_seconds = 1e9
            device.fail_on, device.fail_next = "launch", Injected("x")
            await until(lambda: runtime.model is None)
            await trio.sleep(1)
            crash_once(runtime.cast.scheduler.core, "cancel")
            assert runtime.cast.gate.try_enter()
            runtime.cast.to_scheduler.post(Cancel(RowId(12_345)))
            at = trio.current_time()
            await until(lambda: runtime.cast.supervisor.crashes["scheduler"] == 1)
            with pytest.raises(Unavailable, match="no result in time"):
                await runtime.wait_ready()
            assert trio.current_time() - at < 601
            await until_it_ends()


# ---- one request --------------------------------------------------------------------------


async def test_a_request_that_crashes_fails_alone(
    autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client gets an error, its row leaves, and the others never notice."""
    from mlx_troupe.actors import request

    class Torn(request.TextStream):
        def feed(self, token_id: int) -> Any:
            if token_id == 505:
                raise Injected("feed")
            return super().feed(token_id)

    monkeypatch.setattr(request, "TextStream", Torn)
    async with busy_company(clients=3) as (runtime, device, crowd):
        text, end = await run(runtime, ask(500, max_tokens=100))
        assert text == counted(500, 4)
        assert isinstance(end, Failed)
        assert "Injected" in end.error.message
        await until(lambda: crowd.all_ended)
        monkeypatch.undo()
        await works_again(runtime, device)
        assert runtime.cast.supervisor.crashes == dict.fromkeys(runtime.cast.supervisor.states, 0)


# ---- an actor alone -----------------------------------------------------------------------


class Post:
    """The mailboxes of an actor that is run without a company."""

    def __init__(self) -> None:
        self.scheduler = Mailbox[SchedulerMessage](100)
        self.cache = Mailbox[CacheMessage](100)
        self.gpu = Mailbox[GpuCommand](100)


async def test_a_cache_that_dies_answers_its_whole_mailbox(autojump_clock: object) -> None:
    """Lookups in hand and behind it are misses, states on their way are released, asks fail."""
    post, view = Post(), GpuView(ScriptedDevice().model)
    actor = KVCacheActor(
        post.cache,
        PrefixCore(100),
        scheduler=post.scheduler,
        gpu=post.gpu,
        view=view,
        max_leases=9,
    )
    reply: Reply[int] = Reply()
    for message in (
        Store(SnapshotId(1), (1, 2), 2, "final"),
        LookUp(RowId(1), (1, 2, 3)),
        LookUp(RowId(2), (1, 2, 3)),
        Store(SnapshotId(2), (3, 4), 2, "final"),
        ReturnLease(LeaseId(1)),
        Clear(reply),
    ):
        post.cache.post(message)
    crash_once(actor.core, "lookup")
    with pytest.raises(Injected):
        await actor.run()
    actor.abandon("it died")
    told = list(post.scheduler.drain())
    assert told == [Found(RowId(1), None), Found(RowId(2), None), CacheLost((SnapshotId(1),))]
    assert list(post.gpu.drain()) == [Release((SnapshotId(2),))]
    with pytest.raises(Unavailable, match="it died"):
        await reply.wait()


async def test_a_scheduler_that_dies_answers_its_whole_mailbox(autojump_clock: object) -> None:
    """Submits fail, states that nobody will hear of are released, places are given back."""
    post, gate = Post(), Gate(2)
    core = SchedulerCore(
        batch=1,
        queue=1,
        cache=True,
        new_snapshot=lambda: SnapshotId(1),
        new_step=lambda: StepId(1),
    )
    actor = SchedulerActor(
        post.scheduler,
        core,
        gpu=post.gpu,
        cache=post.cache,
        view=GpuView(ScriptedDevice().model),
        gate=gate,
        cache_spare=10,
    )
    replies: list[Reply[None]] = []
    for row in (1, 2):
        assert gate.try_enter()
        send, receive = trio.open_memory_channel[RowEvent](9)
        replies.append(Reply())
        spec = RowSpec(RowId(row), (1, 2), Sampling(), 1)
        post.scheduler.post(Submit(spec, send, replies[-1]))
        receive.close()
    made = SnapshotMade(SnapshotId(7), 2, 2)
    post.scheduler.post(StepSettled(StepDone(StepId(9), 0.1, kept=(made,))))
    post.scheduler.post(CacheLost((SnapshotId(8),)))
    post.scheduler.post(Cancel(RowId(1)))
    post.scheduler.post(Cancel(RowId(2)))
    crash_once(core, "submit")
    with pytest.raises(Injected):
        await actor.run()
    list(post.gpu.drain())
    actor.abandon("it died")
    for reply in replies:
        with pytest.raises(Unavailable, match="it died"):
            await reply.wait()
    assert list(post.gpu.drain()) == [Release((SnapshotId(8),)), Release((SnapshotId(7),))]
    assert gate.taken == 0
