"""A tokenizer small enough to read, for tests of everything that needs text but no model.

Ids 0 to 255 are bytes, ``EOS`` ends a turn, ``THINK`` and ``END_THINK`` mark reasoning, and any
words given to :class:`ByteTokenizer` follow as tokens of several bytes. Encoding never uses those,
so that a model that does gives ids that encoding its text again would not.
"""

from __future__ import annotations

from collections.abc import Sequence

from .pieces import TokenTable
from .tokenizer import TemplateError

EOS = 256
THINK = 257
END_THINK = 258
_MARKERS = {THINK: "<think>", END_THINK: "</think>"}


class ByteTokenizer:
    """The protocol ``runtime.text.tokenizer.Tokenizer`` on raw UTF-8 bytes.

    A chat renders as ``role: content`` and EOS for each turn, then ``assistant: ``. The settings
    ``think=True`` opens a reasoning block in the prompt; ``refuse`` names roles that the template
    refuses.
    """

    def __init__(
        self, words: tuple[str, ...] = (), *, thinks: bool = False, chats: bool = True
    ) -> None:
        self.has_chat_template = chats
        self.think_markers = ("<think>", "</think>") if thinks else None
        self.bos_text: str | None = None
        self.eos_ids = frozenset({EOS})
        single = tuple(bytes([value]) for value in range(256))
        markers = tuple(text.encode() for text in _MARKERS.values())
        self.table: TokenTable | None = TokenTable(
            (*single, b"", *markers, *(word.encode() for word in words))
        )
        self._pieces = self.table.pieces
        self.vocab_size = len(self._pieces)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Bytes, with ``<eos>`` and the thinking markers as single ids."""
        specials = {"<eos>": EOS, **{text: token_id for token_id, text in _MARKERS.items()}}
        ids: list[int] = []
        while text:
            found = [(text.find(word), word) for word in specials if word in text]
            start, word = min(found, default=(len(text), ""))
            ids += text[:start].encode()
            ids += [specials[word]] if word else []
            text = text[start + len(word) :]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of all ids, end tokens written out."""
        pieces = (
            b"<eos>" if i == EOS else self._pieces[i] for i in ids if 0 <= i < len(self._pieces)
        )
        return b"".join(pieces).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one id; empty for EOS and unknown ids."""
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else b""

    def is_special(self, token_id: int) -> bool:
        """EOS is the only special token."""
        return token_id == EOS

    def render(
        self,
        messages: list[dict[str, object]],
        *,
        add_generation_prompt: bool = True,
        **kwargs: object,
    ) -> str:
        """One line for each turn; raises TemplateError for a role in ``kwargs["refuse"]``."""
        refused = kwargs.get("refuse", ())
        text = ""
        for message in messages:
            if isinstance(refused, (tuple, list)) and message["role"] in refused:
                raise TemplateError(f"No {message['role']} messages, please.")
            text += f"{message['role']}: {message['content']}<eos>\n"
        if not add_generation_prompt:
            return text
        return text + "assistant: " + ("<think>\n" if kwargs.get("think") else "")
