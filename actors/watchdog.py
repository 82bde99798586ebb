"""The patience that the GPU actor has with its device: whose result is due, and since when.

A task of the GPU actor's; it knows numbers and seconds, and nothing of steps or devices.
"""

from __future__ import annotations

import math

import trio

from .supervisor import Fatal

LOADING = -1
"""Stands for a load among the steps that the watchdog waits for; step ids start at 0. Work on
adapters and kept states has the numbers below."""


class DeviceHung(Fatal):
    """No step's result within the watchdog's time."""


class Watchdog:
    """Waits for the results of steps, one after the other, each with its own patience.

    The device works on one step at a time, so the time of a step begins when the one before it
    is done, however long that took.
    """

    def __init__(self) -> None:
        self._allowed: dict[int, float] = {}
        self._since = -math.inf
        self._wakes_at = math.inf
        self._sooner = trio.Event()

    @property
    def is_waiting(self) -> bool:
        """Whether a result is still to come."""
        return bool(self._allowed)

    def expect(self, step: int, seconds: float) -> None:
        """A step was handed over, behind those that are under way already."""
        if not self._allowed:
            self._since = trio.current_time()
        self._allowed[step] = seconds
        self._look()

    def heard(self, step: int) -> None:
        """A step's result came. Steps that nobody expects are ignored."""
        if self._allowed.pop(step, None) is not None:
            self._since = trio.current_time()
            self._look()

    def forget_steps(self) -> None:
        """Nobody waits for the steps under way any more; all else is still waited for."""
        self._allowed = {k: v for k, v in self._allowed.items() if k <= LOADING}

    async def run(self) -> None:
        """Raises DeviceHung when a result is overdue."""
        while True:
            self._sooner = trio.Event()
            self._wakes_at = self._deadline()
            with trio.move_on_at(self._wakes_at):
                await self._sooner.wait()
            if self._deadline() <= trio.current_time():
                raise DeviceHung("the device gave no result in time")

    def _deadline(self) -> float:
        for seconds in self._allowed.values():
            return self._since + seconds
        return math.inf

    def _look(self) -> None:
        # Most steps come long before the watchdog would wake, and need not wake it.
        if self._deadline() < self._wakes_at:
            self._sooner.set()
