"""What the text side asks of a tokenizer.

Owns the protocol only. ``runtime.engine.tokenizer`` implements it on mlx-lm's wrapper; tests may
implement it with a dictionary. Every method may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .pieces import TokenTable


class TemplateError(Exception):
    """A chat template that cannot render these messages; the text is fit for a client."""


class Tokenizer(Protocol):
    """Text to ids and back, and the model's chat template.

    Special tokens are those that stand for structure and are never part of an answer's text.
    Tokens that spell a thinking marker are not among them: the reasoning splitter reads them.
    """

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a generation."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def bos_text(self) -> str | None:
        """The beginning-of-text token as a template writes it."""
        ...

    @property
    def table(self) -> TokenTable | None:
        """Bytes of each id, or None for a tokenizer that can only decode whole sequences."""
        ...

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`render` can work at all."""
        ...

    @property
    def think_markers(self) -> tuple[str, str] | None:
        """The texts that open and close a reasoning block, for models that have one."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encode; special tokens written out in ``text`` become their ids."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Decode all ids, special tokens included. Ids outside the vocabulary are left out."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """What one id spells in the middle of a text; empty for special and unknown ids."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether the id produces no text."""
        ...

    def render(
        self,
        messages: list[dict[str, object]],
        *,
        add_generation_prompt: bool = True,
        **kwargs: object,
    ) -> str:
        """Render messages with the chat template; raises TemplateError."""
        ...
