"""A worker without a thread, of the test kit: a scripted device on trio's own, in virtual time."""

from __future__ import annotations

from collections import deque

import trio

from .device_messages import Close, Launch, Open, Settle, WorkerCommand, WorkerEvent
from .testing import ScriptedDevice
from .worker import Conductor


class InlineWorker:
    """Runs a device on trio's thread, spending its steps' seconds on trio's (virtual) clock."""

    def __init__(self, device: ScriptedDevice) -> None:
        self.device = device
        # Full is a crash: two steps, a few releases and one open are all that is ever queued.
        self._commands, self._inbox = trio.open_memory_channel[WorkerCommand](10_000)
        self._events: deque[WorkerEvent] = deque()
        self._conductor = Conductor(device, self._events.append)
        self._current: WorkerCommand | None = None

    def start(self) -> None:
        """Nothing to start: commands are carried out by :meth:`receive`."""

    def submit(self, command: WorkerCommand) -> None:
        """Queue a command."""
        self._commands.send_nowait(command)

    async def receive(self) -> WorkerEvent:
        """Carry out commands, spending their time, until one has something to say."""
        while not self._events:
            # A receiver that is cancelled in the middle leaves the command to the next one.
            if self._current is None:
                self._current = await self._inbox.receive()
            await trio.sleep(self._cost(self._current))
            command, self._current = self._current, None
            self._conductor.perform(command)
        return self._events.popleft()

    def stop(self) -> None:
        """Close the device at once."""
        self._conductor.perform(Close())

    def _cost(self, command: WorkerCommand) -> float:
        match command:
            case Open():
                return self.device.open_seconds
            case Settle():
                return self.device.seconds()
            case Launch():
                return self.device.seconds()
            case _:
                return 0.0
