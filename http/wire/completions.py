"""``/v1/completions`` on the wire: the request, the answer, the chunks.

Pure functions and data. A prompt is one string, one list of token ids, or a list holding just one
such list; an answer has no reasoning of its own, so text of every channel is text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec import UNSET, Struct, UnsetType

from mlx_troupe.runtime.errors import InvalidRequest, Unsupported
from mlx_troupe.runtime.model_info import ModelInfo
from mlx_troupe.runtime.requests import (
    Finished,
    ScoredToken,
    TextDelta,
    TextPrompt,
    TokenPrompt,
    Usage,
)

from .logprobs import TextLogprobs, asked_by_completion, text_logprobs
from .params import Call, GenerationParams, check_ids, to_call
from .parsing import INT64, fit
from .unsupported import refuse_unsupported
from .usage import UsageBlock, usage_block


class CompletionRequest(GenerationParams, kw_only=True):
    """Body of a text completion."""

    prompt: object = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None


def completion_call(body: Mapping[str, object], model: ModelInfo | None) -> Call:
    """Parse a body. Raises InvalidRequest or Unsupported."""
    refuse_unsupported(body)
    params = fit(body, CompletionRequest)
    if params.top_logprobs not in (None, 0, -1):
        raise Unsupported(
            "top_logprobs is not supported by text completions: logprobs takes the number",
            param="top_logprobs",
        )
    vocab_size = model.vocab_size if model is not None else None
    return to_call(
        params,
        to_prompt(params.prompt, vocab_size),
        vocab_size,
        logprobs=asked_by_completion(params.logprobs),
    )


def to_prompt(value: object, vocab_size: int | None) -> TextPrompt | TokenPrompt:
    """The prompt of a request. Raises InvalidRequest."""
    if isinstance(value, str):
        return TextPrompt(value)
    if value is None:
        raise InvalidRequest("prompt required", param="prompt")
    ids = value
    if isinstance(ids, list) and len(ids) == 1 and isinstance(ids[0], list):
        ids = ids[0]
    if not isinstance(ids, list) or not ids or not all(_is_id(item) for item in ids):
        raise InvalidRequest("prompt: must be a string or a list of token ids", param="prompt")
    return TokenPrompt(check_ids(ids, vocab_size, "prompt"))


def _is_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool) and 0 <= item < INT64


class TextChoice(Struct):
    """The only choice of an answer or chunk."""

    index: int
    text: str
    finish_reason: str | None
    logprobs: TextLogprobs | None = None


class TextCompletion(Struct):
    """A whole answer, or one chunk of it; ``usage`` follows the same rule as in chat chunks."""

    id: str
    object: str
    created: int
    model: str
    choices: tuple[TextChoice, ...]
    usage: UsageBlock | UnsetType | None = UNSET


@dataclass(slots=True)
class CompletionShape:
    """How a text completion is written, whole or in chunks; one per answer.

    It counts the characters of the scored tokens, since offsets go on from chunk to chunk.
    """

    id: str
    created: int
    model: str
    include_usage: bool
    _offset: int = 0

    def opening(self) -> None:
        """Text completions have no opening chunk."""

    def delta(self, event: TextDelta) -> TextCompletion:
        """More text."""
        return self._chunk(TextChoice(0, event.text, None, self._block(event.scores)))

    def closing(self, finished: Finished) -> TextCompletion:
        """The finish reason, with empty text."""
        block = self._block(finished.scores)
        return self._chunk(TextChoice(0, "", finished.reason.value, block))

    def trailer(self, usage: Usage) -> TextCompletion | None:
        """Usage without a choice, when asked for."""
        return self._whole((), usage_block(usage)) if self.include_usage else None

    def answer(self, content: str, reasoning: str, finished: Finished) -> TextCompletion:
        """The whole answer."""
        block = self._block(finished.scores)
        choice = TextChoice(0, reasoning + content, finished.reason.value, block)
        return self._whole((choice,), usage_block(finished.usage))

    def _block(self, scores: tuple[ScoredToken, ...]) -> TextLogprobs | None:
        if not scores:
            return None
        block, self._offset = text_logprobs(scores, self._offset)
        return block

    def _chunk(self, choice: TextChoice) -> TextCompletion:
        return self._whole((choice,), None if self.include_usage else UNSET)

    def _whole(
        self, choices: tuple[TextChoice, ...], usage: UsageBlock | UnsetType | None
    ) -> TextCompletion:
        return TextCompletion(self.id, "text_completion", self.created, self.model, choices, usage)
