"""From what the prefix cache knows of a prompt to what its client is told.

Run by the request's own task, before its row is submitted; nobody else waits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from mlx_troupe.runtime.adapter_table import AdapterTable
from mlx_troupe.runtime.prefix.explain import Explanation
from mlx_troupe.runtime.requests import CacheNote, GenerationRequest
from mlx_troupe.runtime.text.tokenizer import Tokenizer

from .mailbox import Mailbox
from .messages import CacheMessage, Explain
from .reply import Reply

PATIENCE = 0.5
"""Seconds to wait for the state of the answer before, which the cache may not have been told of."""


class Explainer:
    """Asks the prefix cache on behalf of requests.

    Args:
        cache: a full one explains nothing. ``spare`` is the room in it that is not for questions.
        table: what adapter ids stand for now.
        copied: waits until the cache has the states of rows that have ended by now.
    """

    def __init__(
        self,
        cache: Mailbox[CacheMessage],
        spare: int,
        table: AdapterTable,
        copied: Callable[[], Awaitable[None]],
    ) -> None:
        self._cache = cache
        self._spare = spare
        self._table = table
        self._copied = copied

    async def explain(
        self, request: GenerationRequest, ids: tuple[int, ...], tokenizer: Tokenizer
    ) -> CacheNote | None:
        """What the cache has for ``ids`` now; None if nobody asked, or it cannot say.

        Raises RequestError for an adapter that is not mounted any more.
        """
        if not request.explain:
            return None
        with trio.move_on_after(PATIENCE):
            await self._copied()
        reply: Reply[tuple[Explanation, int] | None] = Reply()
        revisions = self._table.resolve(request.adapters)
        question = Explain(ids, revisions, request.session, reply)
        try:
            self._cache.post(question, spare=self._spare)
        except trio.WouldBlock:
            return None
        told = await reply.wait()
        if told is None:
            return None
        known, on_disk = told
        before, after, theirs = map(tokenizer.decode, (known.before, known.after, known.theirs))
        return CacheNote(
            known.memory_tokens, on_disk, known.shared_tokens, known.reason, before, after, theirs
        )
