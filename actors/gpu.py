"""The GPU actor: passes steps to the one thread that computes and its results back.

Runs on trio's thread; the device runs on its worker's. Owns the truth about the device: loading,
ready, lost or hung. It loads the model again once after a fault; a device that says nothing for
the watchdog's time is given up for good, since a thread cannot be killed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import NoReturn, assert_never

import trio

from mlx_troupe.runtime.adapter_fit import AdapterTarget
from mlx_troupe.runtime.adapter_table import Loaded, Mounting
from mlx_troupe.runtime.adapters import AdapterInfo
from mlx_troupe.runtime.device import DeviceStats
from mlx_troupe.runtime.errors import ModelError, Unavailable
from mlx_troupe.runtime.model_info import ModelInfo
from mlx_troupe.runtime.prefix.room import excess

from .device_messages import (
    Answered,
    Asked,
    Broke,
    DropRows,
    Export,
    GpuCommand,
    Import,
    Launch,
    Mount,
    Open,
    Opened,
    OpenFailed,
    Refused,
    Release,
    Rest,
    Rested,
    Settle,
    Settled,
    Unmount,
    WorkerEvent,
)
from .mailbox import Mailbox
from .messages import CacheMessage, DeviceLost, DeviceReady, Pressed, SchedulerMessage, StepSettled
from .reply import Bell
from .supervisor import Fatal
from .watchdog import LOADING, Watchdog
from .worker import Worker

REST_AFTER = 5.0
"""Seconds without a step after which unused memory goes back to the system."""


class DeviceBroken(Exception):
    """The device raised; it will be opened again."""


class ModelRefused(Fatal):
    """The model cannot be loaded; trying again would not help."""

    def __init__(self, error: ModelError) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass(slots=True)
class GpuView:
    """What others may read of the GPU, on trio's thread: written by its actor only."""

    model: ModelInfo | None = None
    stats: DeviceStats = field(default_factory=DeviceStats)
    error: str | None = None
    loads: int = 0
    mounted_at_load: tuple[AdapterInfo, ...] = ()
    adapter_targets: tuple[AdapterTarget, ...] = ()
    bell: Bell = field(default_factory=Bell)

    def loaded(self) -> Loaded:
        """What the latest load mounted."""
        return Loaded(self.loads, self.mounted_at_load)


class GpuActor:
    """Feeds the worker and watches it.

    Args:
        mailbox: commands. A scheduler has at most two steps under way and the cache releases at
            most what it holds, so the bound is never met; a full mailbox is a crash.
        step_timeout, prefill_timeout: seconds for a step without and with prefill (or a load, or
            work on adapters).
        mounts: adapters that belong to the model whenever it is loaded.
        check: raises ModelError for a loaded model that could serve nobody under the limits.
    """

    def __init__(
        self,
        mailbox: Mailbox[GpuCommand],
        worker: Worker,
        view: GpuView,
        *,
        scheduler: Mailbox[SchedulerMessage],
        cache: Mailbox[CacheMessage],
        step_timeout: float,
        prefill_timeout: float,
        mounts: Callable[[], tuple[Mounting, ...]] = tuple,
        check: Callable[[ModelInfo], None] = lambda model: None,
    ) -> None:
        self._mailbox = mailbox
        self._worker = worker
        self._view = view
        self._scheduler = scheduler
        self._cache = cache
        self._step_timeout = step_timeout
        self._prefill_timeout = prefill_timeout
        self._mounts = mounts
        self._check = check
        self._watchdog = Watchdog()
        self._last_step = -math.inf
        # Asks that the worker has and has not answered, by their number for the watchdog.
        self._asked: dict[Asked, int] = {}
        self._numbers = count(LOADING - 1, -1)

    async def run(self) -> None:
        """Load, then serve until cancelled. Raises DeviceBroken, DeviceHung or ModelRefused."""
        self._worker.start()
        self._worker.submit(Open(self._mounts(), strict=self._view.loads == 0))
        self._watchdog.expect(LOADING, self._prefill_timeout)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._listen)
            nursery.start_soon(self._watchdog.run)
            nursery.start_soon(self._serve)

    def abandon(self, reason: str) -> None:
        """Everyone who had something on the device is told; queued commands are void."""
        for command in self._mailbox.drain():
            if isinstance(command, Mount | Unmount | Export | Import):
                command.reply.fail(Unavailable(reason))
        for reply in self._asked:
            reply.fail(Unavailable(reason))
        self._view.model = None
        self._view.error = reason
        self._view.bell.ring()
        self._scheduler.post(DeviceLost(reason))
        self._cache.post(DeviceLost(reason))

    async def _serve(self) -> None:
        while True:
            with trio.move_on_after(self._rest_in()) as quiet:
                self._pass_on(await self._mailbox.receive())
            if quiet.cancelled_caught:
                busy = self._watchdog.is_waiting
                self._last_step = trio.current_time() if busy else math.inf
                if not busy:
                    self._worker.submit(Rest())

    def _pass_on(self, command: GpuCommand) -> None:
        match command:
            case Launch(plan):
                slow = bool(plan.prefill)
                allowed = self._prefill_timeout if slow else self._step_timeout
                self._watchdog.expect(plan.step, allowed)
                self._last_step = trio.current_time()
            case DropRows():
                self._watchdog.forget_steps()
            case (
                Mount(reply=reply)
                | Unmount(reply=reply)
                | Export(reply=reply)
                | Import(reply=reply)
            ):
                self._asked[reply] = number = next(self._numbers)
                self._watchdog.expect(number, self._prefill_timeout)
            case Release():
                if not math.isfinite(self._last_step):
                    # States that leave memory while nothing runs give it back, too.
                    self._last_step = trio.current_time()
            case Settle():
                pass
            case _:
                assert_never(command)
        self._worker.submit(command)

    def _rest_in(self) -> float:
        if not math.isfinite(self._last_step):
            return math.inf
        return max(0.0, self._last_step + REST_AFTER - trio.current_time())

    async def _listen(self) -> None:
        while True:
            # No name for it here: it would hold an exported state's bytes until the next event.
            self._handle(await self._worker.receive())

    def _handle(self, event: WorkerEvent) -> None:
        match event:
            case Settled(done, stats):
                self._watchdog.heard(done.step)
                self._view.stats = stats
                self._look_at_memory()
                self._scheduler.post(StepSettled(done))
            case Opened(model, stats, mounted, targets):
                self._watchdog.heard(LOADING)
                self._check_limits(model)
                self._view.model = model
                self._view.stats = stats
                self._view.error = None
                self._view.loads += 1
                self._view.mounted_at_load = mounted
                self._view.adapter_targets = targets
                self._view.bell.ring()
                # Loading leaves buffers behind.
                self._last_step = trio.current_time()
                self._cache.post(DeviceReady(model))
                self._scheduler.post(DeviceReady(model))
            case Rested(stats):
                self._view.stats = stats
            case Answered(reply=reply, stats=stats):
                self._answered(reply)
                self._view.stats = stats
                event.deliver()
            case Refused(reply, refusal):
                self._answered(reply)
                reply.fail(refusal)
            case OpenFailed(error):
                self._refuse(ModelError(error.message))
            case Broke(error):
                raise DeviceBroken(f"{type(error).__name__}: {error}") from error

    def _check_limits(self, model: ModelInfo) -> None:
        try:
            self._check(model)
        except ModelError as error:
            self._refuse(error)

    def _refuse(self, error: ModelError) -> NoReturn:
        self._view.error = error.message
        raise ModelRefused(error)

    def _look_at_memory(self) -> None:
        """Have kept states given up where memory runs out; any message makes the cache look."""
        stats, model = self._view.stats, self._view.model
        pressed = model and excess(stats, stats.snapshot_bytes, model)
        if pressed and stats.snapshots and not self._cache.depth:
            self._cache.post(Pressed())

    def _answered(self, reply: Asked) -> None:
        number = self._asked.pop(reply, None)
        if number is not None:
            self._watchdog.heard(number)
