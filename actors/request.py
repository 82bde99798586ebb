"""The Request actor: one client's journey from a prompt to the end of its text.

One task per request in the runtime's nursery. Owns the prompt's ids, the detokenizer, the stop
strings, the reasoning splitter and the outbox that its client reads. Its death harms nobody else;
its cancellation, at any moment, posts one Cancel and ends its row before the next step.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import assert_never

import trio

from mlx_troupe.runtime.defaults import (
    check_request,
    is_calm,
    resolve_sampling,
    token_limit,
    with_thinking,
)
from mlx_troupe.runtime.errors import (
    GenerationFailed,
    InvalidRequest,
    TroupeError,
    Unavailable,
    UnknownStream,
)
from mlx_troupe.runtime.model_info import ModelInfo
from mlx_troupe.runtime.plans import RowId
from mlx_troupe.runtime.requests import (
    CacheNote,
    ChatPrompt,
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    Sampling,
    ScoredToken,
    TextDelta,
    Usage,
)
from mlx_troupe.runtime.resume.identity import Asked
from mlx_troupe.runtime.scheduling.effects import (
    Replay,
    RowBroken,
    RowEnded,
    RowEvent,
    RowSpec,
    Started,
    TokenMade,
)
from mlx_troupe.runtime.settings import Settings
from mlx_troupe.runtime.text.prompts import BuiltPrompt
from mlx_troupe.runtime.text.scores import scored_token
from mlx_troupe.runtime.text.stream import TextStream

from .checkpoints import Checkpoints
from .explaining import Explainer
from .mailbox import Mailbox
from .messages import Cancel, SchedulerMessage, Submit
from .outbox import Outbox
from .preparing import build, markers_of, prepare
from .progress import Progress
from .reply import Reply
from .text_tools import TextTools

log = logging.getLogger(__name__)

RETAINED_BYTES = 2 << 20
"""Text and figures of a stream that a client may come back to; a longer one is not held."""


class RequestActor:
    """Runs one generation.

    ``admitted`` is settled with the number of prompt tokens once the row is queued, or with the
    error that refused it. After that everything, errors too, comes through ``outbox``.
    ``warnings`` is what the client asked for and does not get, in words; final once admitted.
    ``resumed``: the answer goes on from an interrupted one; final then too.

    Args:
        revisions: what the request's adapters stand for when it comes.
        records: of requests that were interrupted.
    """

    def __init__(
        self,
        row: RowId,
        request: GenerationRequest,
        *,
        model: ModelInfo,
        tools: TextTools,
        settings: Settings,
        scheduler: Mailbox[SchedulerMessage],
        revisions: tuple[str, ...],
        records: Checkpoints,
        explainer: Explainer | None = None,
    ) -> None:
        self.admitted: Reply[int] = Reply()
        self.outbox = Outbox(0 if request.ticket is None else RETAINED_BYTES)
        self.cached_tokens: int | None = None
        self.warnings: tuple[str, ...] = ()
        self.resumed = False
        self._row = row
        self._request = replace(request, prompt=with_thinking(request.prompt, settings.thinking))
        # With what is asked for in words.
        self._shown = self._request.prompt
        self._model = model
        self._tools = tools
        self._settings = settings
        self._scheduler = scheduler
        self._revisions = revisions
        self._records = records
        self._progress: Progress | None = None
        self._explainer = explainer
        self._note: CacheNote | None = None
        self._scope = trio.CancelScope()
        self._lane = "batched"
        self._completion = 0
        self._scores: list[ScoredToken] = []
        self._prompt_tokens = 0
        self._served = False

    def close(self) -> None:
        """The client is gone; never waits. What it had is on record when this returns."""
        self._keep_progress()
        self._scope.cancel()

    def fail(self, error: TroupeError) -> None:
        """End with an error that comes from outside; never waits."""
        self._fail(error)
        self._scope.cancel()

    async def run(self) -> None:
        """The whole journey. Never raises but for cancellation: errors go to the client."""
        try:
            with self._scope:
                await self._run()
        except TroupeError as error:
            self._fail(error)
        except Exception as error:  # whatever it is, it is this request's alone
            log.exception("request %d failed", self._row)
            self._fail(GenerationFailed(f"the request failed: {type(error).__name__}"))
        finally:
            self._keep_progress()
            self._fail(Unavailable("the server is stopping"))
            # Reserved room: a request posts one submit at most and exactly one cancel.
            self._scheduler.post(Cancel(self._row, self._served))

    def _fail(self, error: TroupeError) -> None:
        if not self.admitted.settled:
            self.admitted.fail(error)
        self.outbox.end(Failed(error))

    async def _run(self) -> None:
        check_request(self._request)
        calm = is_calm(self._request.prompt) and self._tools.tokenizer.think_markers is not None
        sampling = resolve_sampling(
            self._request.sampling, self._tools.defaults, self._model, calm=calm
        )
        ready = await prepare(self._request.prompt, self._request.grammar, self._tools, self._model)
        built, matcher = ready.built, ready.matcher
        self._shown, self.warnings = ready.shown, ready.warnings
        self._prompt_tokens = len(built.ids)
        limit = token_limit(
            self._prompt_tokens,
            self._request.max_tokens,
            self._settings,
            self._model,
            param="messages" if isinstance(self._request.prompt, ChatPrompt) else "prompt",
        )
        stop_ids = self._tools.tokenizer.eos_ids | frozenset(self._request.stop_token_ids)
        progress = self._begin_progress(built, sampling, limit)
        replay = await progress.replay(self._model, stop_ids, matcher) if progress else None
        self._check_return(replay)
        spec = RowSpec(
            self._row,
            built.ids,
            sampling if progress is None else replace(sampling, seed=progress.seed),
            limit,
            stop_ids,
            adapters=self._request.adapters,
            matcher=matcher,
            logprobs=self._request.logprobs,
            replay=replay,
            checkpoints=progress is not None and progress.is_written,
            session=self._request.session,
        )
        # The buffer is the reservation: two Started at most, one event a token, one end.
        send, receive = trio.open_memory_channel[RowEvent](limit + 3)
        with receive:
            await self._explain_cache(built.ids)
            await self._submit(spec, send)
            await self._read(receive, self._stream(built, stop_ids))

    def _begin_progress(
        self, built: BuiltPrompt, sampling: Sampling, limit: int
    ) -> Progress | None:
        """What is written down of this request; None where nobody asked for that."""
        request = self._request
        named = request.ticket is not None or request.resume_key is not None
        if not named and not self._records.every:
            return None
        markers = markers_of(self._request.prompt, self._tools)
        reasoning = None if markers is None else (*markers, built.opens_reasoning)
        asked = Asked(built.ids, sampling, limit, reasoning, self._model.namespace, self._revisions)
        self._progress = Progress(self._records, request, asked)
        return self._progress

    def _check_return(self, replay: Replay | None) -> None:
        self.resumed = replay is not None
        ticket = self._request.ticket
        if ticket is not None and ticket.returns and not (self.resumed or ticket.restarts):
            raise UnknownStream(
                f"nothing is known of a stream {ticket.name!r} with this body", param="request_id"
            )

    def _keep_progress(self) -> None:
        if self._progress is not None:
            self._progress.keep()

    def _on_started(self, started: Started) -> None:
        self.cached_tokens = started.cached_tokens
        self._lane = started.lane
        if self._progress is not None:
            self._progress.started(started.adapters)
        if self.resumed and not started.replayed:
            self.resumed = False
            if (ticket := self._request.ticket) is not None and ticket.returns:
                raise GenerationFailed("an adapter was replaced: the answer cannot be gone on with")

    async def _explain_cache(self, ids: tuple[int, ...]) -> None:
        if self._explainer is not None:
            tokenizer = self._tools.tokenizer
            asked = replace(self._request, prompt=self._shown)
            again = partial(build, tools=self._tools, model=self._model)
            self._note = await self._explainer.explain(asked, ids, tokenizer, again)

    async def _submit(self, spec: RowSpec, send: trio.MemorySendChannel[RowEvent]) -> None:
        reply: Reply[None] = Reply()
        self._scheduler.post(Submit(spec, send, reply))
        await reply.wait()
        self.admitted.set(self._prompt_tokens)

    def _stream(self, built: BuiltPrompt, stop_ids: frozenset[int]) -> TextStream:
        return TextStream(
            self._tools.tokenizer,
            stop=self._request.stop,
            markers=markers_of(self._request.prompt, self._tools),
            opens_reasoning=built.opens_reasoning,
            eos_ids=stop_ids | self._model.eos_ids,
        )

    async def _read(self, receive: trio.MemoryReceiveChannel[RowEvent], stream: TextStream) -> None:
        async for event in receive:
            match event:
                case Started():
                    self._on_started(event)
                case TokenMade(_, token, figures):
                    self._completion += 1
                    if self._progress is not None:
                        self._progress.took(token, figures)
                    if figures is not None:
                        self._scores.append(scored_token(self._tools.tokenizer, token, figures))
                    self._put(stream.feed(token))
                    if stream.stopped:
                        self._finish(stream, FinishReason.STOP)
                        return
                    self._check_reader()
                case RowEnded(_, reason):
                    self._finish(stream, reason)
                    return
                case RowBroken(_, message, param):
                    if param is not None:
                        raise InvalidRequest(message, param=param)
                    raise GenerationFailed(message)
                case _:
                    assert_never(event)
        raise GenerationFailed("the row ended without a word")

    def _finish(self, stream: TextStream, reason: FinishReason) -> None:
        self._put(stream.finish())
        if stream.stopped:
            reason = FinishReason.STOP
        self._served = True
        if self._progress is not None:
            self._progress.done()
        ids = stream.content_ids
        if ids:
            self._tools.provenance.remember(stream.content_text, ids)
        cached = self.cached_tokens or 0
        usage = Usage(self._prompt_tokens, self._completion, cached, self._lane, self._note)
        self.outbox.end(Finished(reason, usage, tuple(self._scores)))

    def _put(self, deltas: tuple[TextDelta, ...]) -> None:
        for delta in deltas:
            scores, self._scores = tuple(self._scores), []
            self.outbox.put(replace(delta, scores=scores) if scores else delta)

    def _check_reader(self) -> None:
        if self.outbox.unread_for() > self._settings.read_timeout:
            raise GenerationFailed(
                f"the client read nothing for {self._settings.read_timeout:.0f} s"
            )
