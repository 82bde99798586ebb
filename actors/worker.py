"""The thread that computes: one dedicated OS thread, one device, strictly one call at a time.

A limiter of one on trio's worker threads would not do: MLX's streams and lazy arrays belong to
the thread that made them. Commands come through a queue; events go into a deque, followed by one
idempotent wake-up that never raises. (A send from this thread into a closed trio channel would
kill the whole loop.)
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol, assert_never

import trio

from mlx_troupe.runtime.adapter_table import Mounting
from mlx_troupe.runtime.adapters import AdapterInfo
from mlx_troupe.runtime.device import Device
from mlx_troupe.runtime.errors import AdapterError, ModelError, NoRoom, StateRefused, TroupeError
from mlx_troupe.runtime.plans import StepPlan

from .device_messages import (
    Answered,
    Broke,
    Close,
    DropRows,
    Export,
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
    WorkerCommand,
    WorkerEvent,
)
from .threads import run_on_device_thread

log = logging.getLogger(__name__)


class Worker(Protocol):
    """Where a device runs. ``start`` and ``receive`` are called on trio's thread."""

    def start(self) -> None:
        """Begin to serve commands."""
        ...

    def submit(self, command: WorkerCommand) -> None:
        """Queue a command; never waits. The scheduler's pipeline bounds what can be queued."""
        ...

    async def receive(self) -> WorkerEvent:
        """The next event."""
        ...

    def stop(self) -> None:
        """Close the device after the command that is running; does not wait."""
        ...


class Conductor:
    """The order of calls on a device, apart from where they run: commands in, events out."""

    def __init__(self, device: Device, post: Callable[[WorkerEvent], None]) -> None:
        self._device = device
        self._post = post
        self._under_way = 0
        self._opened = False
        self._broken = False

    def perform(self, command: WorkerCommand) -> None:
        """Carry out one command. Every fault of the device becomes an event."""
        try:
            self._perform(command)
        except Exception as error:  # the device may raise anything; it is reported, never lost
            self._broken = True
            self._post(Broke(error))

    def _perform(self, command: WorkerCommand) -> None:
        if self._broken and not isinstance(command, Open | Close):
            return
        match command:
            case Open():
                self._open(command)
            case Launch(plan):
                self._launch(plan)
            case Settle():
                if self._under_way:
                    self._settle()
            case Release(snapshots):
                self._device.release(snapshots)
            case DropRows():
                self._under_way = 0
                self._device.drop_rows()
            case Mount():
                self._mount(command)
            case Unmount(revision, reply):
                modules = self._device.unmount(revision)
                self._post(Answered(reply, modules, self._device.stats()))
            case Export() | Import():
                self._host(command)
            case Rest():
                if not self._under_way:
                    self._device.idle()
                    self._post(Rested(self._device.stats()))
            case Close():
                self._under_way = 0
                self._device.close()
            case _:
                assert_never(command)

    def _open(self, command: Open) -> None:
        self._under_way = 0
        try:
            # Rows and states of the time before, if any, belong to nobody now.
            if self._opened:
                self._device.close()
            self._opened = True
            model = self._device.open()
            mounted = tuple(self._mount_again(command))
        except TroupeError as error:
            self._post(OpenFailed(error))
        except Exception as error:  # a loader may raise anything
            self._post(OpenFailed(ModelError(f"the model cannot be loaded: {error}")))
        else:
            self._broken = False
            targets = self._device.adapter_targets()
            self._post(Opened(model, self._device.stats(), mounted, targets))

    def _mount_again(self, command: Open) -> Iterator[AdapterInfo]:
        for mounting in command.mounts:
            try:
                yield self._device.mount(mounting.id, mounting.path)
            except AdapterError as error:
                if command.strict:
                    raise _unmountable(mounting, error) from error
                log.warning("adapter %s is not mounted again: %s", mounting.id, error.message)

    def _mount(self, command: Mount) -> None:
        # The results of steps under way need not wait for files to be read.
        while self._under_way:
            self._settle()
        try:
            info = self._device.mount(command.adapter, command.path)
        except TroupeError as error:
            self._post(Refused(command.reply, error))
        else:
            self._post(Answered(command.reply, info, self._device.stats()))

    def _host(self, command: Export | Import) -> None:
        try:
            if isinstance(command, Export):
                layers = self._device.export(
                    command.snapshot, command.first_layer, command.count, command.since
                )
                self._post(Answered(command.reply, layers, self._device.stats()))
            else:
                made = self._device.import_state(command.part)
                self._post(Answered(command.reply, made, self._device.stats()))
        except StateRefused as error:
            self._post(Refused(command.reply, error))
        except Exception as error:  # rows go on; a device that is broken fails at its next step
            log.warning("a kept state could not be moved", exc_info=error)
            words = f"{type(error).__name__}: {error}"
            if isinstance(command, Export):
                self._post(Refused(command.reply, StateRefused(words)))
            else:
                self._device.release((command.part.snapshot,))
                # Not the state's fault, as far as anybody knows: its file stays.
                self._post(Refused(command.reply, NoRoom(words)))

    def _launch(self, plan: StepPlan) -> None:
        if self._under_way and not self._device.overlaps(plan):
            self._settle()
        self._device.launch(plan)
        self._under_way += 1
        if self._under_way > 1:
            self._settle()
        self._device.push()

    def _settle(self) -> None:
        done = self._device.settle()
        self._under_way -= 1
        self._post(Settled(done, self._device.stats()))


def _unmountable(mounting: Mounting, error: AdapterError) -> ModelError:
    return ModelError(f"adapter {mounting.id} cannot be mounted: {error.message}")


class ThreadWorker:
    """Runs a device on a thread of its own."""

    def __init__(self, device: Device) -> None:
        self._commands: queue.SimpleQueue[WorkerCommand] = queue.SimpleQueue()
        self._events: deque[WorkerEvent] = deque()
        self._device = device
        self._done: threading.Event | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._wake = trio.Event()

    def start(self) -> None:
        """Take a thread, once; later calls are ignored."""
        if self._done is None:
            # A waiting event loop must not wait the default 5 ms for the interpreter.
            sys.setswitchinterval(0.0005)
            self._token = trio.lowlevel.current_trio_token()
            self._done = run_on_device_thread(self._run)

    def submit(self, command: WorkerCommand) -> None:
        """Queue a command for the thread."""
        self._commands.put(command)

    async def receive(self) -> WorkerEvent:
        """The next event; cancellation loses none."""
        while not self._events:
            self._wake = trio.Event()
            if not self._events:
                await self._wake.wait()
        await trio.lowlevel.checkpoint_if_cancelled()
        return self._events.popleft()

    def stop(self) -> None:
        """Ask the thread to close the device and let go of it."""
        self._commands.put(Close())

    def join(self, seconds: float) -> bool:
        """Wait until the device is closed; False when time ran out first. Blocks the caller."""
        return self._done is None or self._done.wait(seconds)

    def _run(self) -> None:
        conductor = Conductor(self._device, self._send)
        while True:
            command = self._commands.get()
            conductor.perform(command)
            if isinstance(command, Close):
                return

    def _send(self, event: WorkerEvent) -> None:
        self._events.append(event)
        assert self._token is not None
        try:
            self._token.run_sync_soon(self._wake_up, idempotent=True)
        except trio.RunFinishedError:
            return

    def _wake_up(self) -> None:
        self._wake.set()
