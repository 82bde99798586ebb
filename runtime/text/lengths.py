"""Refuses texts that are much too long for a model, without reading all of them.

Pure functions. A tokenizer takes a second for every megabyte and serves one caller at a time, so a
text of tens of megabytes would keep everybody else's prompts waiting, only to be refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import ContextLengthExceeded

CHARACTERS = 8
"""Of a token; text has fewer, but for long runs of blanks."""
MARGIN = 256
"""Tokens, beside an eighth, that a beginning may have more than its share in the whole text."""


def check_length(
    text: str, room: int, encode: Callable[[str], Sequence[int]], *, param: str
) -> None:
    """Raise ContextLengthExceeded for a text whose beginning alone has more tokens than ``room``.

    A text that is near the limit passes, for its ids to be counted.
    """
    size = CHARACTERS * room
    while size < len(text):
        if (tokens := len(encode(text[:size]))) > room + room // 8 + MARGIN:
            raise ContextLengthExceeded(
                f"the prompt has more than {tokens} tokens, but the context window is {room} "
                "tokens and at least one must be left for the answer",
                param=param,
            )
        size *= 4


def check_messages(count: int, room: int) -> None:
    """Raise ContextLengthExceeded for more messages than tokens: each one takes a few."""
    if count > room:
        raise ContextLengthExceeded(
            f"the prompt has {count} messages, but the context window is {room} tokens",
            param="messages",
        )
