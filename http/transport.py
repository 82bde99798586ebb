"""The TCP stream under a connection: bounded writes and a close that loses no reply.

Each stream belongs to one connection's tasks; the server may abort it from outside. hypercorn
shields its writes from cancellation and closes a connection at once after its last byte; both are
put right here, below it:

* A write that makes no progress for ``stall_seconds`` breaks the stream, so a client that stopped
  reading loses its connection and its request.
* A reply to a request whose body was not read (413, 415) is followed by a short wait for the
  client's end: closing with unread data would reset the connection under the reply.
"""

from __future__ import annotations

import trio

WRITE_BYTES = 64 << 10
"""Progress is judged by pieces of this size, so that a slow reader of much data is not cut."""

LINGER_SECONDS = 2.0


class BoundedStream(trio.abc.HalfCloseableStream):
    """A socket stream that neither waits forever for a reader nor cuts off a writer."""

    def __init__(self, stream: trio.SocketStream, stall_seconds: float) -> None:
        self._stream = stream
        self._stall_seconds = stall_seconds
        self._peer_ended = trio.Event()
        self._sent_eof = False

    @property
    def socket(self) -> trio.socket.SocketType:
        """The socket below, for its addresses."""
        return self._stream.socket

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send everything. Raises BrokenResourceError when the peer stops reading."""
        with memoryview(data) as view:
            for start in range(0, len(view), WRITE_BYTES):
                with trio.move_on_after(self._stall_seconds) as scope:
                    await self._stream.send_all(view[start : start + WRITE_BYTES])
                if scope.cancelled_caught:
                    self.abort()
                    raise trio.BrokenResourceError("the peer stopped reading")

    async def wait_send_all_might_not_block(self) -> None:
        """Wait for room in the socket's buffer."""
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """Receive; remembers whether the peer has ended."""
        try:
            data = await self._stream.receive_some(max_bytes)
        except BaseException:
            self._peer_ended.set()
            raise
        if not data:
            self._peer_ended.set()
        return data

    async def send_eof(self) -> None:
        """End our side."""
        await self._stream.send_eof()
        self._sent_eof = True

    async def aclose(self) -> None:
        """Close; after our own end, first give the peer a moment to end its side."""
        try:
            if self._sent_eof:
                with trio.move_on_after(LINGER_SECONDS):
                    await self._peer_ended.wait()
        finally:
            await self._stream.aclose()

    def abort(self) -> None:
        """Close at once, waking whoever waits on the socket."""
        self._peer_ended.set()
        self.socket.close()
