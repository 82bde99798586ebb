"""What a client of the library holds: the events of one generation, and the company's health.

Lives on trio's thread; read by one task. Made by the front door (``system.py``) only.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mlx_troupe.runtime.requests import Failed, Finished, GenerationEvent

from .request import RequestActor


@dataclass(frozen=True, slots=True)
class Health:
    """What the supervisor knows. ``ok`` means that a request sent now will be served."""

    status: Literal["ok", "loading", "degraded", "failed"]
    reason: str
    actors: Mapping[str, str] = field(default_factory=dict)


class Generation:
    """The client's end of one generation: events until :class:`Finished` or :class:`Failed`.

    ``warnings`` says what the client asked for and does not get. ``resumed``: the answer is, from
    its first token on, the one that was interrupted, or left, before. ``created`` is when it was
    begun, in Unix seconds.
    """

    def __init__(
        self,
        actor: RequestActor,
        prompt_tokens: int,
        *,
        reader: int = 0,
        resumed: bool = False,
        created: int | None = None,
    ) -> None:
        self._actor = actor
        self._reader = reader
        self._over = False
        self.prompt_tokens = prompt_tokens
        self.warnings = actor.warnings
        self.resumed = resumed
        self.created = int(time.time()) if created is None else created

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that were not computed again; None until the row has started."""
        return self._actor.cached_tokens

    async def next_event(self) -> GenerationEvent:
        """All text of one channel that has piled up, or the terminal event."""
        event = await self._actor.outbox.take(self._reader)
        self._over = isinstance(event, Finished | Failed)
        return event

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> GenerationEvent:
        if self._over:
            raise StopAsyncIteration
        return await self.next_event()
