"""Server-sent events: framing, and the body of a streamed answer.

Runs in the request's own task. Nothing here holds a cancel scope or nursery open across a
``return`` to the framework: each wait opens and closes its own.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Protocol, Self, assert_never

import msgspec
import trio
from quart import Response
from quart.wrappers.response import ResponseBody

from mlx_troupe.runtime.errors import TroupeError
from mlx_troupe.runtime.requests import Failed, Finished, GenerationEvent, TextDelta

from .errors import describe, error_json

if TYPE_CHECKING:
    from contextlib import AsyncExitStack
    from types import TracebackType

    from mlx_troupe.runtime.requests import Usage

    from .metrics import Meter
    from .seams import GenerationLike
    from .wire.resuming import Cursor, Position

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keepalive\n\n"
"""A comment in a block of its own, so that no parser sees it inside an event."""

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",
}


class ChunkShape(Protocol):
    """How one kind of answer is cut into JSON chunks."""

    def opening(self) -> msgspec.Struct | None:
        """The chunk before any text; None = there is none."""
        ...

    def delta(self, event: TextDelta) -> msgspec.Struct: ...

    def closing(self, finished: Finished) -> msgspec.Struct: ...

    def trailer(self, usage: Usage) -> msgspec.Struct | None:
        """The usage chunk after the closing one; None = not asked for."""
        ...


def event(payload: bytes, position: Position | None = None) -> bytes:
    """One event of one line, with an id if it has a position; JSON never holds a raw line break."""
    head = b"" if position is None else f"id: {position}\n".encode()
    return head + b"data: " + payload + b"\n\n"


class EventStream(ResponseBody):
    """Body of a streamed answer.

    Chunks come in the order opening, deltas, closing, trailer, ``[DONE]``; an answer that fails
    ends with one error event instead and no ``[DONE]``. The generation lives on ``stack``, which
    is unwound as soon as the body ends. With a ``cursor`` events have ids, and those that the
    client has read are left out.
    """

    def __init__(
        self,
        generation: GenerationLike,
        shape: ChunkShape,
        meter: Meter,
        stack: AsyncExitStack,
        keepalive: float,
        cursor: Cursor | None = None,
    ) -> None:
        self._generation = generation
        self._shape = shape
        self._meter = meter
        self._stack = stack
        self._keepalive = keepalive if keepalive > 0 else float("inf")
        # Holds one frame between calls: full cannot happen, a frame is made only when it is empty.
        self._frames: deque[bytes] = deque(maxlen=1)
        self._ended = False
        self._cursor = cursor
        opening = shape.opening()
        if opening is not None and (cursor is None or cursor.opens):
            self._frames.append(self._event(opening))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if self._frames:
            return self._frames.popleft()
        if self._ended:
            raise StopAsyncIteration
        return await self._next_frame()

    async def _next_frame(self) -> bytes:
        try:
            with trio.move_on_after(self._keepalive):
                while not (frame := self._render(await self._generation.next_event())):
                    pass
                return frame
        except Exception as error:
            return self._render_error(error)
        return KEEPALIVE

    def _render(self, happened: GenerationEvent) -> bytes:
        self._meter.saw(happened)
        match happened:
            case TextDelta():
                return self._render_text(happened)
            case Finished():
                self._ended = True
                return self._render_end(happened)
            case Failed():
                return self._render_error(happened.error)
            case _:
                assert_never(happened)

    def _render_end(self, finished: Finished) -> bytes:
        last = (self._shape.closing(finished), self._shape.trailer(finished.usage))
        frames = [
            self._event(chunk)
            for stage, chunk in enumerate(last, 1)
            if chunk is not None and (self._cursor is None or self._cursor.reach(stage))
        ]
        return b"".join((*frames, DONE))

    def _render_text(self, delta: TextDelta) -> bytes:
        """The event of what the client has not read; nothing where it has read all of it."""
        if self._cursor is None:
            return self._event(self._shape.delta(delta))
        read, unread = self._cursor.split(delta)
        if read is not None:
            # The shape counts what it has written.
            self._shape.delta(read)
        return b"" if unread is None else self._event(self._shape.delta(unread))

    def _event(self, chunk: msgspec.Struct) -> bytes:
        position = None if self._cursor is None else self._cursor.position
        return event(msgspec.json.encode(chunk), position)

    def _render_error(self, error: Exception) -> bytes:
        self._ended = True
        reply = describe(error)
        if reply.status >= 500:
            log.error("a stream failed: %s", error, exc_info=error)
        if not isinstance(error, TroupeError):
            self._meter.failed()
        return event(error_json(reply))


def stream_response(body: EventStream) -> Response:
    """The response around a body of events."""
    response = Response(body)
    response.headers.update(HEADERS)
    response.timeout = None
    return response
