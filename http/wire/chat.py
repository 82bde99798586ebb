"""``/v1/chat/completions`` on the wire: the request, the answer, the chunks.

Pure functions and data. Reasoning is sent under both names that clients read, ``reasoning`` and
``reasoning_content``, and never as content.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec import UNSET, Struct, UnsetType

from mlx_troupe.runtime.errors import InvalidRequest, Unsupported
from mlx_troupe.runtime.model_info import ModelInfo
from mlx_troupe.runtime.requests import (
    Channel,
    ChatPrompt,
    Finished,
    ScoredToken,
    TextDelta,
    Usage,
)

from .logprobs import ChatLogprobs, asked_by_chat, chat_logprobs
from .messages import WireMessage, to_messages
from .params import Call, GenerationParams, to_call
from .parsing import fit
from .unsupported import refuse_unsupported
from .usage import UsageBlock, usage_block

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


class ChatRequest(GenerationParams, kw_only=True):
    """Body of a chat completion."""

    messages: list[WireMessage] | None = None
    chat_template_kwargs: dict[str, object] | None = None
    reasoning_effort: str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


def chat_call(body: Mapping[str, object], model: ModelInfo | None) -> Call:
    """Parse a body. Raises InvalidRequest or Unsupported."""
    refuse_unsupported(body)
    params = fit(body, ChatRequest)
    prompt = ChatPrompt(
        messages=to_messages(params.messages),
        template_kwargs=template_kwargs(params.reasoning_effort, params.chat_template_kwargs),
    )
    return to_call(
        params,
        prompt,
        model.vocab_size if model is not None else None,
        logprobs=asked_by_chat(params.logprobs, params.top_logprobs),
    )


def template_kwargs(effort: str | None, explicit: Mapping[str, object] | None) -> dict[str, object]:
    """Template arguments of an effort and of the client's own; the client's own win."""
    if effort is not None and effort not in EFFORTS:
        raise InvalidRequest(
            f"reasoning_effort must be one of {', '.join(EFFORTS)}", param="reasoning_effort"
        )
    if "tools" in (explicit or ()):
        raise Unsupported(
            "chat_template_kwargs: tools are not supported", param="chat_template_kwargs"
        )
    kwargs: dict[str, object] = {}
    if effort is not None:
        kwargs["enable_thinking"] = effort != "none"
        if effort != "none":
            kwargs["reasoning_effort"] = effort
    return {**kwargs, **(explicit or {})}


class AnswerMessage(Struct):
    """The assistant's message."""

    role: str
    content: str
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class AnswerChoice(Struct):
    """The only choice of an answer."""

    index: int
    message: AnswerMessage
    finish_reason: str
    logprobs: ChatLogprobs | UnsetType = UNSET


class ChatAnswer(Struct):
    """A whole answer."""

    id: str
    object: str
    created: int
    model: str
    choices: tuple[AnswerChoice, ...]
    usage: UsageBlock


class Delta(Struct):
    """What one chunk adds."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChunkChoice(Struct):
    """The only choice of a chunk."""

    index: int
    delta: Delta
    finish_reason: str | None
    logprobs: ChatLogprobs | UnsetType = UNSET


class ChatChunk(Struct):
    """One chunk; ``usage`` is left out unless the client asked for it, and then null but once."""

    id: str
    object: str
    created: int
    model: str
    choices: tuple[ChunkChoice, ...]
    usage: UsageBlock | UnsetType | None = UNSET


@dataclass(frozen=True, slots=True)
class ChatShape:
    """How a chat answer is written, whole or in chunks; one value per answer."""

    id: str
    created: int
    model: str
    include_usage: bool

    def opening(self) -> ChatChunk:
        """The role, with empty content."""
        return self._chunk(Delta(role="assistant", content=""))

    def delta(self, event: TextDelta) -> ChatChunk:
        """More text of one channel."""
        if event.channel is Channel.REASONING:
            delta = Delta(reasoning=event.text, reasoning_content=event.text)
        else:
            delta = Delta(content=event.text)
        return self._chunk(delta, scores=event.scores)

    def closing(self, finished: Finished) -> ChatChunk:
        """The finish reason, with an empty delta."""
        return self._chunk(Delta(), finished.reason.value, finished.scores)

    def trailer(self, usage: Usage) -> ChatChunk | None:
        """Usage without a choice, when asked for."""
        if not self.include_usage:
            return None
        return ChatChunk(
            self.id, "chat.completion.chunk", self.created, self.model, (), usage_block(usage)
        )

    def answer(self, content: str, reasoning: str, finished: Finished) -> ChatAnswer:
        """The whole answer."""
        thought = reasoning or UNSET
        message = AnswerMessage("assistant", content, thought, thought)
        return ChatAnswer(
            self.id,
            "chat.completion",
            self.created,
            self.model,
            (AnswerChoice(0, message, finished.reason.value, _block(finished.scores)),),
            usage_block(finished.usage),
        )

    def _chunk(
        self, delta: Delta, reason: str | None = None, scores: tuple[ScoredToken, ...] = ()
    ) -> ChatChunk:
        return ChatChunk(
            self.id,
            "chat.completion.chunk",
            self.created,
            self.model,
            (ChunkChoice(0, delta, reason, _block(scores)),),
            None if self.include_usage else UNSET,
        )


def _block(scores: tuple[ScoredToken, ...]) -> ChatLogprobs | UnsetType:
    return chat_logprobs(scores) if scores else UNSET
