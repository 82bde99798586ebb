"""From what the prefix cache knows of a prompt to what its client is told.

Run by the request's own task, before its row is submitted; nobody else waits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeAlias

import trio

from mlx_troupe.runtime.adapter_table import AdapterTable
from mlx_troupe.runtime.errors import RequestError
from mlx_troupe.runtime.prefix.explain import AROUND, Explanation, Reason
from mlx_troupe.runtime.requests import CacheNote, ChatPrompt, GenerationRequest, Prompt
from mlx_troupe.runtime.spill.index import Near
from mlx_troupe.runtime.text.prompts import BuiltPrompt
from mlx_troupe.runtime.text.renderings import Cause, Renderings, shows_otherwise, trials
from mlx_troupe.runtime.text.tokenizer import Tokenizer

from .desk import SpillDesk
from .mailbox import Mailbox
from .messages import CacheMessage, Explain
from .reply import Reply

Build: TypeAlias = Callable[[Prompt], Awaitable[BuiltPrompt]]
"""Makes ids of a prompt; raises RequestError for what is none."""
PATIENCE = 0.5
"""Seconds to wait for the state of the answer before, which the cache may not have been told of."""


def with_disk(
    ids: tuple[int, ...],
    memory: Explanation,
    usable: int,
    near: tuple[Near | None, Near | None, Near | None],
    fits: Callable[[int], bool] = lambda _: True,
) -> Explanation:
    """What memory says of a prompt, and the disk, which could serve ``usable`` tokens of it.

    ``near``: the states on disk that share most of it, as of ``Neighbours``; another setup is
    another KV scheme, model or version. ``fits``: whether memory could keep so many tokens.
    """
    goal, served = len(ids) - 1, max(usable, memory.memory_tokens)
    shared, reason = memory.shared_tokens, memory.reason
    own, kin, other = (one and replace(one, shared=min(one.shared, goal)) for one in near)
    if own is not None and own.shared >= shared + (reason in (None, "text")):
        shared, reason = own.shared, "text" if own.length > own.shared else None
        if shared > served:
            reason = "uncuttable" if fits(own.length) else "too_large"
    others: tuple[tuple[Near | None, Reason], ...] = ((kin, "adapters"), (other, "setup"))
    for one, why in others:
        if one is not None and one.shared > shared:
            shared, reason = one.shared, why
    if served >= goal:
        reason = None
    if (shared, reason) == (memory.shared_tokens, memory.reason):
        return memory
    if reason is None:
        return Explanation(memory.memory_tokens, shared, None)
    before, after = ids[max(0, shared - AROUND) : shared], ids[shared : shared + AROUND]
    return Explanation(memory.memory_tokens, shared, reason, before, after)


class Explainer:
    """Asks the prefix cache on behalf of requests.

    Args:
        cache: a full one explains nothing. ``spare`` is the room in it that is not for questions.
        table: what adapter ids stand for now.
        disk: where states are looked for that memory does not have.
        copied: waits until the cache has the states of rows that have ended by now.
    """

    def __init__(
        self,
        cache: Mailbox[CacheMessage],
        spare: int,
        table: AdapterTable,
        disk: SpillDesk,
        copied: Callable[[], Awaitable[None]],
    ) -> None:
        self._cache = cache
        self._spare = spare
        self._table = table
        self._disk = disk
        self._copied = copied
        self._renderings = Renderings()

    async def explain(
        self,
        request: GenerationRequest,
        ids: tuple[int, ...],
        tokenizer: Tokenizer,
        build: Build,
    ) -> CacheNote | None:
        """What the cache has for ``ids`` now; None if nobody asked, or it cannot say.

        ``build`` makes ids of a prompt as those of ``request`` were made.
        Raises RequestError for an adapter that is not mounted any more.
        """
        told = await self._explain(request, ids, tokenizer, build) if request.explain else None
        if isinstance(request.prompt, ChatPrompt):
            self._renderings.note(ids, request.prompt)
        return told

    async def _explain(
        self,
        request: GenerationRequest,
        ids: tuple[int, ...],
        tokenizer: Tokenizer,
        build: Build,
    ) -> CacheNote | None:
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
        known, usable = told
        near = self._disk.nearest(ids, revisions)
        known = with_disk(ids, known, usable, near, self._disk.fits)
        if known.reason == "text" and isinstance(request.prompt, ChatPrompt):
            cause = await self._cause(request.prompt, ids, known.shared_tokens, build)
            known = replace(known, reason=cause or known.reason)
        before, after, theirs = map(tokenizer.decode, (known.before, known.after, known.theirs))
        return CacheNote(
            known.memory_tokens, usable, known.shared_tokens, known.reason, before, after, theirs
        )

    async def _cause(
        self,
        prompt: ChatPrompt,
        ids: tuple[int, ...],
        shared: int,
        build: Build,
    ) -> Cause | None:
        """Why a chat parts from a known one after ``shared`` ids, other than by what it says.

        What may be the cause is tried: rendered as the other was, it would have gone on like it.
        """
        for other in tuple(self._renderings.parting_at(ids, shared)):
            if shows_otherwise(prompt, shared, other):
                return "template"
            for cause, changed in trials(prompt, other):
                try:
                    built = await build(changed)
                except RequestError:
                    continue
                if other.explains(built.ids, shared):
                    return cause
        return None
