"""A one-shot answer, and a bell for those who wait until something has changed.

Lives on trio's thread. Whoever owns the mailbox that an ask was put in settles it before it is
gone, so that nobody waits on the dead.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import trio

T = TypeVar("T")


class Reply(Generic[T]):
    """Settled exactly once, with a value or an error; awaited by one task."""

    __slots__ = ("_error", "_event", "_value")

    def __init__(self) -> None:
        self._event = trio.Event()
        self._value: T | None = None
        self._error: Exception | None = None

    @property
    def settled(self) -> bool:
        """Whether an answer is there."""
        return self._event.is_set()

    def set(self, value: T) -> None:
        """Answer. A second answer is ignored: the first one may already have been read."""
        if not self.settled:
            self._value = value
            self._event.set()

    def fail(self, error: Exception) -> None:
        """Answer with an error, raised from :meth:`wait`."""
        if not self.settled:
            self._error = error
            self._event.set()

    async def wait(self) -> T:
        """The answer, or the error that it was answered with."""
        await self._event.wait()
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]


class Bell:
    """Rung when something changed; whoever waits looks again. Never misses, may wake in vain."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = trio.Event()

    def ring(self) -> None:
        """Wake everyone who waits."""
        event, self._event = self._event, trio.Event()
        event.set()

    async def wait(self) -> None:
        """Wait for the next ring."""
        await self._event.wait()
