"""The GPU actor: passes steps to the one thread that computes and its results back.

Runs on trio's thread; the device runs on its worker's. Owns the truth about the device: loading,
ready, lost or hung. It loads the model again once after a fault; a device that says nothing for
the watchdog's time is given up for good, since a thread cannot be killed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import assert_never

import trio

from mlx_troupe.runtime.device import DeviceStats, ModelInfo
from mlx_troupe.runtime.errors import ModelError

from .mailbox import Mailbox
from .messages import (
    Broke,
    CacheMessage,
    DeviceLost,
    DeviceReady,
    DropRows,
    GpuCommand,
    Launch,
    Open,
    Opened,
    OpenFailed,
    Release,
    Rest,
    Rested,
    SchedulerMessage,
    Settle,
    Settled,
    StepSettled,
    WorkerEvent,
)
from .reply import Bell
from .supervisor import Fatal
from .worker import Worker

REST_AFTER = 5.0
"""Seconds without a step after which unused memory goes back to the system."""
LOADING = -1
"""Stands for a load among the steps that the watchdog waits for; step ids start at 0."""


class DeviceHung(Fatal):
    """No step's result within the watchdog's time."""


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
    bell: Bell = field(default_factory=Bell)


class GpuActor:
    """Feeds the worker and watches it.

    Args:
        mailbox: commands. A scheduler has at most two steps under way and the cache releases at
            most what it holds, so the bound is never met; a full mailbox is a crash.
        step_timeout, prefill_timeout: seconds for a step without and with prefill (or a load).
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
    ) -> None:
        self._mailbox = mailbox
        self._worker = worker
        self._view = view
        self._scheduler = scheduler
        self._cache = cache
        self._step_timeout = step_timeout
        self._prefill_timeout = prefill_timeout
        self._due: dict[int, float] = {}
        self._armed = trio.Event()
        self._last_step = -math.inf

    async def run(self) -> None:
        """Load, then serve until cancelled. Raises DeviceBroken, DeviceHung or ModelRefused."""
        self._worker.start()
        self._worker.submit(Open())
        self._arm(LOADING, self._prefill_timeout)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._listen)
            nursery.start_soon(self._watch)
            nursery.start_soon(self._serve)

    def abandon(self, reason: str) -> None:
        """Everyone who had something on the device is told; queued commands are void."""
        for _ in self._mailbox.drain():
            pass
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
                busy = bool(self._due)
                self._last_step = trio.current_time() if busy else math.inf
                if not busy:
                    self._worker.submit(Rest())

    def _pass_on(self, command: GpuCommand) -> None:
        match command:
            case Launch(plan):
                slow = bool(plan.prefill)
                self._arm(plan.step, self._prefill_timeout if slow else self._step_timeout)
                self._last_step = trio.current_time()
            case DropRows():
                self._due.clear()
            case Settle() | Release():
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
            event = await self._worker.receive()
            self._handle(event)

    def _handle(self, event: WorkerEvent) -> None:
        match event:
            case Settled(done, stats):
                self._due.pop(done.step, None)
                self._view.stats = stats
                self._scheduler.post(StepSettled(done))
            case Opened(model, stats):
                self._due.pop(LOADING, None)
                self._view.model = model
                self._view.stats = stats
                self._view.error = None
                self._view.loads += 1
                self._view.bell.ring()
                self._cache.post(DeviceReady(model))
                self._scheduler.post(DeviceReady(model))
            case Rested(stats):
                self._view.stats = stats
            case OpenFailed(error):
                self._view.error = error.message
                raise ModelRefused(ModelError(error.message))
            case Broke(error):
                raise DeviceBroken(f"{type(error).__name__}: {error}") from error

    def _arm(self, step: int, seconds: float) -> None:
        self._due[step] = trio.current_time() + seconds
        self._armed.set()

    async def _watch(self) -> None:
        while True:
            self._armed = trio.Event()
            if not self._due:
                await self._armed.wait()
                continue
            await trio.sleep_until(min(self._due.values()))
            if min(self._due.values(), default=math.inf) <= trio.current_time():
                raise DeviceHung("the device gave no result in time")
