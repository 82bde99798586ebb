"""Where a request's text waits for its reader: merged, never lost, never in anyone's way.

Lives on trio's thread; written by one Request actor, read by one client at a time. Bounded by what
the request may generate: a reader that falls behind finds its text joined into one piece. With
``retain`` what was read is held too, up to so many bytes, so that another reader can begin at the
beginning.
"""

from __future__ import annotations

import trio

from mlx_troupe.runtime.errors import GenerationFailed
from mlx_troupe.runtime.requests import Failed, Finished, GenerationEvent, TextDelta

SCORE_BYTES = 400
"""What the figures of a token, or of an alternative, cost in memory, roughly."""


class Outbox:
    """Pieces of text by channel, then one terminal event."""

    def __init__(self, retain: int = 0) -> None:
        self._parts: list[tuple[TextDelta, list[TextDelta]]] = []
        self._end: Finished | Failed | None = None
        self._wake = trio.Event()
        self._waiting_since: float | None = None
        self._retain = retain
        self._read: list[TextDelta] = []
        self._bytes = 0
        self._reader = 0

    @property
    def end_event(self) -> Finished | Failed | None:
        """The terminal event, once there is one."""
        return self._end

    @property
    def is_whole(self) -> bool:
        """Whether a reader can begin at the beginning."""
        return self._retain > 0

    def put(self, delta: TextDelta) -> None:
        """Add text; joined to the last piece when both are of one channel."""
        if self._parts and self._parts[-1][0].channel is delta.channel:
            self._parts[-1][1].append(delta)
        else:
            self._parts.append((delta, [delta]))
        self._hold(delta)
        if self._waiting_since is None:
            self._waiting_since = trio.current_time()
        self._wake.set()

    def end(self, event: Finished | Failed) -> None:
        """Add the terminal event; a second one is ignored."""
        if self._end is None:
            self._end = event
            self._wake.set()

    def unread_for(self) -> float:
        """Seconds that text has been waiting for a reader; 0 when none waits."""
        since = self._waiting_since
        return 0.0 if since is None else trio.current_time() - since

    def begin(self) -> int:
        """A new reader, from the beginning; the one before it is told that it was displaced."""
        self._reader += 1
        self._parts[:0] = [(delta, [delta]) for delta in self._read]
        self._read.clear()
        self._waiting_since = trio.current_time() if self._parts else None
        self._wake.set()
        return self._reader

    async def take(self, reader: int = 0) -> GenerationEvent:
        """All text of one channel that has piled up, or the terminal event after the last text."""
        while not self._parts and self._end is None and reader == self._reader:
            self._wake = trio.Event()
            await self._wake.wait()
        await trio.lowlevel.checkpoint_if_cancelled()
        if reader != self._reader:
            return Failed(GenerationFailed("another client reads this stream now"))
        if self._parts:
            first, pieces = self._parts.pop(0)
            # Whoever reads is there: what is left has begun to wait now.
            self._waiting_since = trio.current_time() if self._parts else None
            text = "".join(piece.text for piece in pieces)
            taken = TextDelta(first.channel, text, tuple(s for p in pieces for s in p.scores))
            if self._retain:
                self._read.append(taken)
            return taken
        assert self._end is not None
        return self._end

    def _hold(self, delta: TextDelta) -> None:
        if not self._retain:
            return
        scores = sum(1 + len(score.top) for score in delta.scores)
        self._bytes += 4 * len(delta.text) + SCORE_BYTES * scores
        if self._bytes > self._retain:
            self._retain = 0
            self._read.clear()
