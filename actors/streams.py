"""Streams that outlive their client's connection, by the names that clients gave them.

Lives on trio's thread; owned by the front door (``system.py``). A stream that its client has left
is held for a while: its row goes on, and what it says waits for the client to come back. After that
the row is cancelled; what it had come to is on record (``progress.py``), so a later return goes on
from there. Bounds: running streams have a place in the gate like everybody, those that have ended
are MAX_ENDED, and each holds what its outbox retains.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from mlx_troupe.runtime.errors import InvalidRequest
from mlx_troupe.runtime.requests import Finished, GenerationRequest

from .generation import Generation
from .request import RequestActor

MAX_ENDED = 64
"""Streams held after their end; of more, the one that ended first is let go."""


@dataclass(slots=True, eq=False)
class Stream:
    """One generation with a name. ``visits`` counts its readers, ``here`` says one is there."""

    request: GenerationRequest
    actor: RequestActor
    created: int = field(default_factory=lambda: int(time.time()))
    visits: int = 0
    here: bool = False


@dataclass(frozen=True, slots=True)
class Visit:
    """One client's connection to a stream. ``resumes``: it need not begin at the beginning."""

    stream: Stream
    reader: int
    resumes: bool


class Streams:
    """All named streams of a runtime.

    Args:
        grace: seconds that a stream without a reader is held.
        nursery: where the end of that is waited for.
    """

    def __init__(self, grace: float, nursery: trio.Nursery) -> None:
        self._grace = grace
        self._nursery = nursery
        # Bounded by the gate's places and MAX_ENDED.
        self._streams: dict[str, Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def left(self) -> int:
        """Streams that are held without a reader."""
        return sum(not stream.here for stream in self._streams.values())

    @asynccontextmanager
    async def generation(
        self, request: GenerationRequest, start: Callable[[], RequestActor]
    ) -> AsyncIterator[Generation]:
        """One client's generation, once it is admitted. Without a ticket it ends with the block.

        Raises:
            InvalidRequest: as :meth:`enter`, and whatever the request is refused with.
        """
        if request.ticket is None:
            actor = start()
            try:
                yield Generation(actor, await actor.admitted.wait())
            finally:
                actor.close()
            return
        visit = self.enter(request, start)
        try:
            yield await _read(visit)
        finally:
            self.leave(visit)

    def enter(self, request: GenerationRequest, start: Callable[[], RequestActor]) -> Visit:
        """Come to the stream of a request, or start it.

        Raises:
            InvalidRequest: the name is that of another request's stream, which still runs.
        """
        assert request.ticket is not None
        stream = self._held(request)
        known = stream is not None
        if stream is None:
            stream = Stream(request, start())
            self._streams[request.ticket.name] = stream
        stream.visits += 1
        stream.here = True
        return Visit(stream, stream.actor.outbox.begin(), known)

    def leave(self, visit: Visit) -> None:
        """The connection is gone, or has all of the answer. Never waits."""
        stream = visit.stream
        if stream.visits != visit.reader or self._named(stream) is None:
            return
        stream.here = False
        ended = stream.actor.outbox.end_event
        if self._grace <= 0 or not (ended is None or isinstance(ended, Finished)):
            self._drop(stream)
            return
        self._let_go_of_oldest()
        self._nursery.start_soon(self._expire, stream, stream.visits)

    def close_left(self) -> None:
        """End every stream that has no reader."""
        for stream in [s for s in self._streams.values() if not s.here]:
            self._drop(stream)

    def _held(self, request: GenerationRequest) -> Stream | None:
        assert request.ticket is not None
        stream = self._streams.get(request.ticket.name)
        if stream is None:
            return None
        ended = stream.actor.outbox.end_event
        if stream.request == request and (ended is None or isinstance(ended, Finished)):
            if stream.actor.outbox.is_whole:
                return stream
        elif ended is None:
            raise InvalidRequest(
                "request_id names the stream of another request, which still runs",
                param="request_id",
            )
        self._drop(stream)
        return None

    def _named(self, stream: Stream) -> str | None:
        assert stream.request.ticket is not None
        name = stream.request.ticket.name
        return name if self._streams.get(name) is stream else None

    def _drop(self, stream: Stream) -> None:
        name = self._named(stream)
        if name is not None:
            del self._streams[name]
        stream.actor.close()

    def _let_go_of_oldest(self) -> None:
        ended = [
            stream
            for stream in self._streams.values()
            if not stream.here and stream.actor.outbox.end_event is not None
        ]
        for stream in ended[: max(0, len(ended) - MAX_ENDED)]:
            self._drop(stream)

    async def _expire(self, stream: Stream, visits: int) -> None:
        await trio.sleep(self._grace)
        if stream.visits == visits and not stream.here:
            self._drop(stream)


async def _read(visit: Visit) -> Generation:
    stream = visit.stream
    prompt_tokens = await stream.actor.admitted.wait()
    resumed = visit.resumes or stream.actor.resumed
    return Generation(
        stream.actor, prompt_tokens, reader=visit.reader, resumed=resumed, created=stream.created
    )
