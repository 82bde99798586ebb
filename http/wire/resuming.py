"""Streams that a client may come back to: names, event ids, and what they mean.

Pure functions and data. A stream has a name if the client gives it one: ``request_id`` in the body,
else the header ``X-Stream-Id``. Its events then carry ids; after a cut the client sends the same
body under the same name, with the last id that it has read in the header ``Last-Event-ID``, and is
sent what follows. Where nothing is known of the stream the reply is a 404, or, with ``restart`` in
the body, the answer from its beginning.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from mlx_troupe.runtime.errors import InvalidRequest
from mlx_troupe.runtime.requests import StreamTicket, TextDelta

MAX_NAME = 128
_NAME = re.compile(rf"[!-~]{{1,{MAX_NAME}}}")
_POSITION = re.compile(r"([0-9]{1,12})-([0-9]{1,12})-([012])")


@dataclass(frozen=True, slots=True)
class Position:
    """A place between two events of a stream, the same however its text is cut into events.

    Attributes:
        chars: of text that came before, reasoning and content.
        scores: tokens whose log-probabilities came before.
        stage: 1 behind the finish reason, 2 behind the usage, else 0.
    """

    chars: int = 0
    scores: int = 0
    stage: int = 0

    def __str__(self) -> str:
        return f"{self.chars}-{self.scores}-{self.stage}"


def ticket_in(
    header: Callable[[str], str | None], name: str | None, restarts: bool
) -> StreamTicket | None:
    """The ticket that a streamed call asks for. Raises InvalidRequest.

    ``header`` looks one up, in any case; ``name`` and ``restarts`` are those of the body.
    """
    # Not X-Request-Id: proxies set it on requests that ask for nothing, and services pass one on to
    # several calls.
    name = name or header("x-stream-id")
    read = position_in(header)
    if name is None:
        if read is not None:
            raise InvalidRequest("Last-Event-ID needs the request_id of its stream")
        return None
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"request_id: must be 1 to {MAX_NAME} printable ASCII characters without blanks",
            param="request_id",
        )
    # Who has read nothing but the opening loses nothing when the answer is begun again.
    return StreamTicket(name, read is not None and read != Position(), restarts)


def position_in(header: Callable[[str], str | None]) -> Position | None:
    """The last event that the client has read; None when it has read none. Raises InvalidRequest.

    Event ids are opaque to clients, so anything else is a mistake.
    """
    value = header("last-event-id")
    if value is None:
        return None
    found = _POSITION.fullmatch(value.strip())
    if found is None:
        raise InvalidRequest("Last-Event-ID is not the id of an event of this server")
    return Position(*map(int, found.groups()))


class Cursor:
    """Follows a stream from its beginning and leaves out what its client has read.

    ``read`` is where that ends; None = the client has read nothing, not even the opening.
    """

    def __init__(self, read: Position | None) -> None:
        self._read = read
        self.position = Position()

    @property
    def opens(self) -> bool:
        """Whether the opening is still to be sent."""
        return self._read is None

    def split(self, delta: TextDelta) -> tuple[TextDelta | None, TextDelta | None]:
        """Follow a piece of text: what of it has been read, and what has not."""
        before, read = self.position, self._read or Position()
        self.position = after = Position(
            before.chars + len(delta.text), before.scores + len(delta.scores)
        )
        if read.chars >= after.chars:
            return delta, None
        if read.chars <= before.chars:
            return None, delta
        chars, scores = read.chars - before.chars, max(0, read.scores - before.scores)
        return (
            TextDelta(delta.channel, delta.text[:chars], delta.scores[:scores]),
            TextDelta(delta.channel, delta.text[chars:], delta.scores[scores:]),
        )

    def reach(self, stage: int) -> bool:
        """Follow one of the last events; whether it is still to be sent."""
        self.position = Position(self.position.chars, self.position.scores, stage)
        return self._read is None or self._read.stage < stage
