"""A bounded mailbox and the handle that others post to.

Lives on trio's thread. Nobody ever awaits a send: :meth:`Mailbox.post` either has room, which the
bound reserves, or raises :class:`trio.WouldBlock` for the sender's written policy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Generic, TypeVar

import trio

M = TypeVar("M")


class Mailbox(Generic[M]):
    """One receiver, many senders. It outlives the actor that reads it, so handles stay good."""

    def __init__(self, bound: float = math.inf) -> None:
        self._bound = bound
        self._send, self._receive = trio.open_memory_channel[M](bound)

    def post(self, message: M, *, spare: int = 0) -> None:
        """Put a message in; never waits.

        ``spare`` is the room that must be left behind it, for others who have reserved it.
        Raises trio.WouldBlock when there is not that much.
        """
        if spare and self.depth + spare >= self._bound:
            raise trio.WouldBlock
        self._send.send_nowait(message)

    async def receive(self) -> M:
        """Wait for the oldest message."""
        return await self._receive.receive()

    def drain(self) -> Iterator[M]:
        """Every message that is already there, oldest first."""
        while True:
            try:
                yield self._receive.receive_nowait()
            except trio.WouldBlock:
                return

    @property
    def depth(self) -> int:
        """Messages waiting."""
        return self._receive.statistics().current_buffer_used

    def close(self) -> None:
        """Close both ends."""
        self._send.close()
        self._receive.close()
