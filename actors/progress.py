"""How far one request has come, written down so that the same request can go on from there.

Lives in the request's own task, on trio's thread. Owns the ids that its row reported; the records
themselves are shared by all requests of a runtime (``runtime/resume``). Never waits but for a
thread that follows a long replay through a grammar.
"""

from __future__ import annotations

import trio

from mlx_troupe.runtime.model_info import ModelInfo
from mlx_troupe.runtime.plans import TokenLogprobs
from mlx_troupe.runtime.requests import GenerationRequest
from mlx_troupe.runtime.resume.identity import Asked, identity_of
from mlx_troupe.runtime.resume.records import Record
from mlx_troupe.runtime.resume.replays import replay_of
from mlx_troupe.runtime.scheduling.effects import Replay
from mlx_troupe.runtime.text.matching import TokenMatcher

from .checkpoints import Checkpoints


class Progress:
    """The tokens of one request, for the next try."""

    def __init__(self, records: Checkpoints, request: GenerationRequest, asked: Asked) -> None:
        self._records = records
        self._asked = asked
        self._identity = identity_of(request, asked)
        self._seed = asked.sampling.seed
        self._is_named = request.ticket is not None or request.resume_key is not None
        self._ids: list[int] = []
        self._figures: list[TokenLogprobs] = []

    @property
    def seed(self) -> int:
        """The seed to go on with: after :meth:`replay` that of the interrupted try."""
        return self._seed

    @property
    def is_written(self) -> bool:
        """Whether the row's state is to be kept on the way, as its tokens are."""
        return self._identity is not None and self._records.every > 0

    async def replay(
        self, model: ModelInfo, stop_ids: frozenset[int], matcher: TokenMatcher | None
    ) -> Replay | None:
        """What the interrupted try had said; None to start afresh."""
        record = None if self._identity is None else await self._records.find(self._identity)
        if record is None:
            return None
        self._seed = record.seed

        def make() -> Replay | None:
            return replay_of(
                record,
                limit=self._asked.limit,
                end_ids=stop_ids | model.eos_ids,
                adapters=self._asked.adapters,
                matcher=matcher,
            )

        # Following ids through a grammar takes some microseconds each.
        return make() if matcher is None else await trio.to_thread.run_sync(make)

    def started(self, adapters: tuple[str, ...]) -> None:
        """The row runs with these adapters; with others than were asked for it is another one."""
        if adapters != self._asked.adapters:
            self._identity = None

    def took(self, token: int, figures: TokenLogprobs | None) -> None:
        """One more token."""
        self._ids.append(token)
        if figures is not None:
            self._figures.append(figures)
        every = self._records.every
        if every and (not len(self._ids) % every or (self._is_named and len(self._ids) == 1)):
            # What was said under a name is known from its first token on: its seed is on record.
            self.keep()

    def keep(self) -> None:
        """The request is interrupted, here or soon."""
        if self._identity is not None:
            told = tuple(self._figures)
            self._records.keep(Record(self._identity, self._seed, tuple(self._ids), told))

    def done(self) -> None:
        """The client has all that it asked for."""
        if self._identity is not None:
            self._records.remove(self._identity)
            self._identity = None
