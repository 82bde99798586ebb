"""Prompts to token ids.

Owns the rules by which ids that the model generated earlier take the place of their text; how
messages become text is in ``forms`` and ``messages``. Holds no state of its own: any thread may
build, and long prompts are built off the event loop.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from ..errors import InvalidRequest
from ..requests import ChatPrompt, Message, Prompt, TextPrompt, TokenPrompt
from .forms import Form, first_that_renders, new_mark, render
from .lengths import check_length, check_messages
from .messages import Messages, has_calls
from .provenance import Provenance
from .tokenizer import TemplateError, Tokenizer

_RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    }
)
"""Names that belong to the rendering call itself and are no settings of a template."""


@dataclass(frozen=True, slots=True)
class BuiltPrompt:
    """A prompt as the model reads it.

    ``opens_reasoning``: the prompt ends inside a reasoning block, so the answer begins in it.
    """

    ids: tuple[int, ...]
    opens_reasoning: bool = False

    @property
    def count(self) -> int:
        """Number of prompt tokens."""
        return len(self.ids)


class PromptBuilder:
    """Builds prompts for one tokenizer; raises InvalidRequest for what cannot be a prompt."""

    def __init__(self, tokenizer: Tokenizer, provenance: Provenance) -> None:
        self._tokenizer = tokenizer
        self._provenance = provenance

    def build(self, prompt: Prompt, room: int = sys.maxsize) -> BuiltPrompt:
        """Token ids of a prompt; at least one.

        A text that is much longer than ``room`` tokens is not read to its end, but refused with
        ContextLengthExceeded; else there may be more ids than that.
        """
        match prompt:
            case ChatPrompt():
                return self._build_chat(prompt, room)
            case TextPrompt(text=text):
                return self._build_text(text, room)
            case TokenPrompt(ids=ids):
                return self._build_tokens(ids)
            case _:
                assert_never(prompt)

    def _build_text(self, text: str, room: int) -> BuiltPrompt:
        self._check_length(text, room, param="prompt")
        bos = self._tokenizer.bos_text
        # A text that brings its own beginning token must not get a second one.
        has_bos = bool(bos) and text.startswith(bos or "")
        ids = self._encode(text, param="prompt", add_special_tokens=not has_bos)
        return BuiltPrompt(_not_empty(ids, param="prompt"))

    def _build_tokens(self, ids: tuple[int, ...]) -> BuiltPrompt:
        size = self._tokenizer.vocab_size
        for token_id in ids:
            if not 0 <= token_id < size:
                raise InvalidRequest(
                    f"Token id {token_id} is outside the vocabulary of {size}.", param="prompt"
                )
        return BuiltPrompt(_not_empty(ids, param="prompt"))

    def _build_chat(self, prompt: ChatPrompt, room: int) -> BuiltPrompt:
        self._check_chat(prompt)
        check_messages(len(prompt.messages), room)
        form, text = first_that_renders(self._tokenizer, prompt)
        _check_unicode(text, param="messages")
        self._check_length(text, room, param="messages")
        ids = self._spliced(form, text)
        if ids is None:
            ids = self._encode(text, param="messages", add_special_tokens=False)
        markers = self._tokenizer.think_markers
        opens = markers is not None and text.rstrip().endswith(markers[0])
        return BuiltPrompt(_not_empty(ids, param="messages"), opens)

    def _check_chat(self, prompt: ChatPrompt) -> None:
        if not prompt.messages:
            raise InvalidRequest("There are no messages.", param="messages")
        if not self._tokenizer.has_chat_template:
            raise InvalidRequest(
                "This model has no chat template; use text completions instead.",
                param="messages",
                code="no_chat_template",
            )
        for name in prompt.template_kwargs:
            if name in _RESERVED:
                raise InvalidRequest(
                    f"{name!r} is not a setting of a chat template.", param="chat_template_kwargs"
                )

    def _spliced(self, form: Form, text: str) -> tuple[int, ...] | None:
        """Ids with remembered answers in place of their text, or None to encode plainly.

        Answers are rendered as unique marks; where putting the texts back gives the ordinary
        rendering, the marks show where each answer stands.
        """
        known = self._remembered(form.messages)
        if not known:
            return None
        marks = {index: new_mark() for index in known}
        try:
            marked = render(
                self._tokenizer, replace(form, messages=_with_marks(form.messages, marks))
            )
        except TemplateError:
            return None
        found: list[int] = []
        position = 0
        for index, mark in marks.items():
            place = marked.find(mark, position)
            # Ids may begin with blank space, which then has to end the template's own text.
            lead = self._lead(form.messages[index].content, known[index])
            if marked.count(mark) == 1 and place >= 0 and marked.endswith(lead, 0, place):
                position = place
                found.append(index)
            else:
                marked = marked.replace(mark, form.messages[index].content)
        pieces = _split(marked, [marks[index] for index in found])
        answers = [form.messages[index].content for index in found]
        if not found or _interleave(pieces, answers) != text:
            return None
        return self._joined(pieces, [(form.messages[i].content, known[i]) for i in found])

    def _joined(
        self, pieces: list[str], answers: list[tuple[str, tuple[int, ...]]]
    ) -> tuple[int, ...] | None:
        """Template text and answers in turn, or None where they cannot be encoded apart."""
        ids: list[int] = []
        before: tuple[int, ...] = ()
        for piece, (answer, answer_ids) in zip(pieces, answers, strict=False):
            own = piece.removesuffix(self._lead(answer, answer_ids))
            if not self._extend(ids, before, own):
                return None
            ids += answer_ids
            before = answer_ids
        return tuple(ids) if self._extend(ids, before, pieces[-1]) else None

    def _extend(self, ids: list[int], before: tuple[int, ...], piece: str) -> bool:
        """Append the ids of template text that follows an answer (or nothing).

        False if encoding it alone adds a blank in front, as SentencePiece does; before a special
        token there is none.
        """
        more = self._encode(piece, param="messages")
        apart = (
            not before
            or not more
            or self._tokenizer.is_special(more[0])
            or self._tokenizer.decode((*before, *more)) == self._tokenizer.decode(before) + piece
        )
        ids += more
        return apart

    def _remembered(self, messages: Messages) -> dict[int, tuple[int, ...]]:
        return {
            index: ids
            for index, message in enumerate(messages)
            if message.role == "assistant"
            and not has_calls(message)
            and (ids := self._provenance.recall(message.content)) is not None
        }

    def _lead(self, answer: str, ids: Sequence[int]) -> str:
        """What the ids spell before the answer itself."""
        spelled = b"".join(map(self._tokenizer.token_bytes, ids)).decode("utf-8", "replace")
        return spelled.removesuffix(answer)

    def _check_length(self, text: str, room: int, *, param: str) -> None:
        check_length(text, room, lambda part: self._encode(part, param=param), param=param)

    def _encode(
        self, text: str, *, param: str, add_special_tokens: bool = False
    ) -> tuple[int, ...]:
        _check_unicode(text, param=param)
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))


def _with_marks(messages: Messages, marks: Mapping[int, str]) -> Messages:
    def marked(index: int, message: Message) -> Message:
        return replace(message, content=marks[index]) if index in marks else message

    return tuple(marked(index, message) for index, message in enumerate(messages))


def _split(text: str, marks: Sequence[str]) -> list[str]:
    pieces = []
    for mark in marks:
        before, _, text = text.partition(mark)
        pieces.append(before)
    return [*pieces, text]


def _interleave(pieces: Sequence[str], answers: Sequence[str]) -> str:
    return "".join(p + a for p, a in zip(pieces, [*answers, ""], strict=True))


def _check_unicode(text: str, *, param: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            "The text holds half of a surrogate pair, which is no character.", param=param
        ) from error


def _not_empty(ids: Sequence[int], *, param: str) -> tuple[int, ...]:
    if not ids:
        raise InvalidRequest("The prompt is empty.", param=param)
    return tuple(ids)
