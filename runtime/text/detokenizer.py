"""Token ids to text, one id at a time, never cutting a character in two.

One detokenizer belongs to one request and runs wherever that request's actor runs. What it reads
of the tokenizer (the table of pieces) is shared and immutable, so opening one costs nothing.

The text of all feeds and the finish equals what the tokenizer decodes from all ids with special
tokens left out. Two exceptions, both about byte tokens that are not valid UTF-8, where waiting for
the whole run would withhold characters that are complete: the ``tokenizers`` library replaces
every byte of a bad run, this module only the bad ones; and an unfinished character at the very end
gives one U+FFFD.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .pieces import TokenTable
    from .tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_UNFINISHED = 8
"""A character has at most four bytes; more pending tokens than this are no character."""


class Detokenizer(Protocol):
    """A stream of ids on its way to text."""

    def feed(self, token_id: int) -> str:
        """Text completed by this id; empty while a character is unfinished. Never raises."""
        ...

    def finish(self) -> str:
        """The rest of the text: at most one U+FFFD for an unfinished character."""
        ...


def open_detokenizer(tokenizer: Tokenizer) -> Detokenizer:
    """A fresh detokenizer of the fastest kind that the tokenizer allows."""
    if tokenizer.table is not None:
        return TableDetokenizer(tokenizer.table)
    return WindowDetokenizer(tokenizer)


class TableDetokenizer:
    """Looks bytes up and decodes UTF-8 incrementally: constant work per token."""

    __slots__ = ("_blanks_left", "_decoder", "_first_without_blanks", "_pieces")

    def __init__(self, table: TokenTable) -> None:
        self._pieces = table.pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._blanks_left = table.strip_blanks
        self._first_without_blanks = table.first_without_blanks

    def feed(self, token_id: int) -> str:
        if not 0 <= token_id < len(self._pieces):
            return ""
        piece = self._pieces[token_id]
        if piece and self._first_without_blanks:
            self._first_without_blanks = False
            piece = piece.replace(b" ", b"")
        return self._strip(self._decoder.decode(piece))

    def finish(self) -> str:
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        while text and self._blanks_left:
            if text[0] != " ":
                self._blanks_left = 0
                break
            text = text[1:]
            self._blanks_left -= 1
        return text


class WindowDetokenizer:
    """Decodes a short window of ids with and without the newest and emits the difference.

    For tokenizers whose decoding depends on neighbours. The window starts at the last ids that
    were emitted (they decide, say, whether a blank precedes the next word).
    """

    __slots__ = ("_emitted", "_tokenizer", "_window")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._emitted = 0

    def feed(self, token_id: int) -> str:
        if self._tokenizer.is_special(token_id) or not 0 <= token_id < self._tokenizer.vocab_size:
            return ""
        self._window.append(token_id)
        text = self._fresh()
        unfinished = text.endswith(_REPLACEMENT)
        if not text or (unfinished and len(self._window) - self._emitted <= _MAX_UNFINISHED):
            return ""
        self._advance()
        return text

    def finish(self) -> str:
        text = self._fresh()
        self._advance()
        if not text.endswith(_REPLACEMENT):
            return text
        return text.rstrip(_REPLACEMENT) + _REPLACEMENT

    def _fresh(self) -> str:
        before = self._tokenizer.decode(self._window[: self._emitted])
        return self._tokenizer.decode(self._window)[len(before) :]

    def _advance(self) -> None:
        self._window = self._window[self._emitted :]
        self._emitted = len(self._window)
