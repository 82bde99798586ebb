"""What turns prompts into ids and ids into text, one for all requests of a model.

Lives on trio's thread. A prompt that takes long to render and encode is built on a worker thread,
one at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import assert_never

import trio

from mlx_troupe.runtime.defaults import SamplingDefaults
from mlx_troupe.runtime.requests import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from mlx_troupe.runtime.text.prompts import BuiltPrompt, PromptBuilder
from mlx_troupe.runtime.text.provenance import Provenance
from mlx_troupe.runtime.text.tokenizer import Tokenizer

from .grammars import GrammarTools

LONG_PROMPT = 2_000
"""Characters from which a prompt is rendered and encoded off the event loop (about 2 ms). Ids need
only be checked, and count as a tenth."""
MESSAGE_COST = 20
"""What a message costs to render beside its text, in characters."""


@dataclass(frozen=True, slots=True)
class TextTools:
    """What turns prompts into ids and ids into text; shared by all requests of a model.

    ``off_loop`` lets one prompt at a time be built on a thread: the tokenizer serves one caller at
    a time, and whoever waits for it must not be the event loop.
    """

    tokenizer: Tokenizer
    builder: PromptBuilder
    provenance: Provenance
    defaults: SamplingDefaults
    grammars: GrammarTools
    off_loop: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(1))

    async def build(self, prompt: Prompt, room: int) -> BuiltPrompt:
        """Token ids of a prompt; much more than ``room`` are refused. Raises RequestError."""
        if _size(prompt) < LONG_PROMPT and not self.off_loop.borrowed_tokens:
            return self.builder.build(prompt, room)
        # An abandoned thread keeps the limiter until it has let go of the tokenizer.
        return await trio.to_thread.run_sync(
            self.builder.build, prompt, room, abandon_on_cancel=True, limiter=self.off_loop
        )


def _size(prompt: Prompt) -> int:
    """Roughly how long a prompt takes to build, in characters of plain text."""
    match prompt:
        case ChatPrompt(messages, template_kwargs):
            return _text_in(template_kwargs) + sum(
                MESSAGE_COST + len(message.content) + _text_in(message.extra)
                for message in messages
            )
        case TextPrompt(text):
            return len(text)
        case TokenPrompt(ids):
            return len(ids) // 10
        case _:
            assert_never(prompt)


def _text_in(value: object) -> int:
    """Characters and items in a JSON value: calls, reasoning and settings are rendered too."""
    match value:
        case str():
            return len(value)
        case Mapping():
            return sum(len(key) + _text_in(item) for key, item in value.items())
        case list() | tuple():
            return sum(map(_text_in, value))
        case _:
            return 1
