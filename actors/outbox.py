"""Where a request's text waits for its reader: merged, never lost, never in anyone's way.

Lives on trio's thread; written by one Request actor, read by one client. Bounded by what the
request may generate: a reader that falls behind finds its text joined into one piece.
"""

from __future__ import annotations

import trio

from mlx_troupe.runtime.requests import Failed, Finished, GenerationEvent, TextDelta


class Outbox:
    """Pieces of text by channel, then one terminal event."""

    def __init__(self) -> None:
        self._parts: list[tuple[TextDelta, list[TextDelta]]] = []
        self._end: Finished | Failed | None = None
        self._wake = trio.Event()
        self._waiting_since: float | None = None

    def put(self, delta: TextDelta) -> None:
        """Add text; joined to the last piece when both are of one channel."""
        if self._parts and self._parts[-1][0].channel is delta.channel:
            self._parts[-1][1].append(delta)
        else:
            self._parts.append((delta, [delta]))
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

    async def take(self) -> GenerationEvent:
        """All text of one channel that has piled up, or the terminal event after the last text."""
        while not self._parts and self._end is None:
            self._wake = trio.Event()
            await self._wake.wait()
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._parts:
            first, pieces = self._parts.pop(0)
            # Whoever reads is there: what is left has begun to wait now.
            self._waiting_since = trio.current_time() if self._parts else None
            text = "".join(piece.text for piece in pieces)
            return TextDelta(first.channel, text, tuple(s for p in pieces for s in p.scores))
        assert self._end is not None
        return self._end
