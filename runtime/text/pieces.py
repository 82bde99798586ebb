"""What each token id spells, as bytes: one table per tokenizer, shared by all requests.

Owns the reading of a ``tokenizers`` decoder description. Pure functions and a frozen value, built
once at load and then only read, from any thread. Knows no model, no request and no tokenizer
library: whoever loads one passes its vocabulary and its decoder as plain JSON values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

_SPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class TokenTable:
    """Bytes of every id and the rule for blanks at the start of a text.

    Attributes:
        pieces: ``pieces[id]`` is what the id adds to the text in UTF-8; empty for special tokens
            that are left out and for ids that the vocabulary does not use.
        strip_blanks: how many leading blanks of the whole text are dropped.
        first_without_blanks: the first token of a text loses its blanks.
    """

    pieces: tuple[bytes, ...]
    strip_blanks: int = 0
    first_without_blanks: bool = False


def build_table(
    tokens: Sequence[str | None], decoder: object, skipped: AbstractSet[int]
) -> TokenTable | None:
    """Build the table, or return None when the decoder is none that works token by token.

    ``tokens[id]`` is the id's string in the vocabulary (None: unused), ``decoder`` the decoder's
    description in ``tokenizer.json``, ``skipped`` the ids that produce no text.
    """
    steps = _steps(decoder)
    kinds = [step.get("type") for step in steps]
    if [kind for kind in kinds if kind != "Fuse"] == ["ByteLevel"]:
        return TokenTable(_pieces(tokens, skipped, _byte_level_translation(), None))
    if kinds == ["Metaspace"]:
        blank = str(steps[0].get("replacement", _SPACE))
        return TokenTable(
            _pieces(tokens, skipped, None, ((blank, " "),)),
            first_without_blanks=steps[0].get("prepend_scheme", "always") != "never",
        )
    return _sentencepiece_table(tokens, skipped, steps)


def _steps(decoder: object) -> list[Mapping[str, object]]:
    if not isinstance(decoder, Mapping):
        return []
    if decoder.get("type") != "Sequence":
        return [decoder]
    inner = decoder.get("decoders")
    return [step for step in inner if isinstance(step, Mapping)] if isinstance(inner, list) else []


def _sentencepiece_table(
    tokens: Sequence[str | None],
    skipped: AbstractSet[int],
    steps: Sequence[Mapping[str, object]],
) -> TokenTable | None:
    """Replacements, then byte tokens, then fusing, then stripping: each step optional."""
    rest = list(steps)
    replacements = []
    while rest and rest[0].get("type") == "Replace":
        pattern = rest.pop(0)
        found, content = pattern.get("pattern"), pattern.get("content")
        if not isinstance(found, Mapping) or not isinstance(found.get("String"), str):
            return None
        replacements.append((str(found["String"]), str(content)))
    if not rest or rest.pop(0).get("type") != "ByteFallback":
        return None
    if rest and rest[0].get("type") == "Fuse":
        rest.pop(0)
    elif rest:
        return None
    strip = 0
    if rest and rest[0].get("type") == "Strip":
        last = rest.pop(0)
        start, stop = last.get("start"), last.get("stop")
        if last.get("content") != " " or stop != 0 or not isinstance(start, int):
            return None
        strip = start
    if rest:
        return None
    return TokenTable(_pieces(tokens, skipped, None, tuple(replacements), True), strip)


def _pieces(
    tokens: Sequence[str | None],
    skipped: AbstractSet[int],
    byte_level: Mapping[int, int] | None,
    replacements: tuple[tuple[str, str], ...] | None,
    byte_fallback: bool = False,
) -> tuple[bytes, ...]:
    pieces = []
    for token_id, token in enumerate(tokens):
        if token is None or token_id in skipped:
            pieces.append(b"")
        elif byte_level is not None:
            pieces.append(_byte_level_piece(token, byte_level))
        elif byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            pieces.append(bytes([int(match[1], 16)]))
        else:
            for found, content in replacements or ():
                token = token.replace(found, content)
            pieces.append(token.encode("utf-8", "replace"))
    return tuple(pieces)


def _byte_level_piece(token: str, translation: Mapping[int, int]) -> bytes:
    """A token spells bytes only if all its characters are stand-ins; else it is literal text."""
    try:
        return token.translate(translation).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode("utf-8", "replace")


def _byte_level_translation() -> dict[int, int]:
    """Code point of each stand-in character → the byte that it stands for.

    Bytes that print as Latin-1 stand for themselves, the other 68 are numbered from U+0100 on.
    Those 68 characters themselves are no stand-ins: they are sent out of Latin-1's reach.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    outside = dict.fromkeys(others, 0xFFFD)
    return outside | {0x100 + index: byte for index, byte in enumerate(others)}
