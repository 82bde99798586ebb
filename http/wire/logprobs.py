"""Log-probabilities on the wire: what may be asked, and the two shapes of the answer.

Pure functions and data. A chat asks by ``logprobs`` (a boolean) and ``top_logprobs``, a text
completion by a number in ``logprobs``. Entries are one per generated token, reasoning and end
token included. A probability of zero is written as -9999, since JSON has no infinity.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from mlx_troupe.runtime.errors import InvalidRequest
from mlx_troupe.runtime.requests import ScoredToken, TokenScore

MOST = 11
"""Most alternatives that a client may ask for, as with mlx-lm's server."""
LEAST = -9999.0


class ChatAlternative(Struct):
    """One token that might have been; ``bytes`` is null for a special token."""

    id: int
    token: str
    logprob: float
    bytes: tuple[int, ...] | None


class ChatEntry(Struct):
    """One generated token."""

    id: int
    token: str
    logprob: float
    bytes: tuple[int, ...] | None
    top_logprobs: tuple[ChatAlternative, ...]


class ChatLogprobs(Struct):
    """``logprobs`` of a chat's choice."""

    content: tuple[ChatEntry, ...]
    refusal: None = None


class TextLogprobs(Struct):
    """``logprobs`` of a text completion's choice; lists of equal length.

    Of alternatives that are spelled the same the likelier one is kept. ``text_offset`` counts
    characters from the beginning of the answer.
    """

    tokens: tuple[str, ...]
    token_logprobs: tuple[float, ...]
    top_logprobs: tuple[dict[str, float], ...] | None
    text_offset: tuple[int, ...]


def asked_by_chat(logprobs: bool | None, top_logprobs: int | None) -> int | None:
    """How many alternatives a chat wants; None for no figures. Raises InvalidRequest."""
    if top_logprobs is not None and not -1 <= top_logprobs <= MOST:
        raise InvalidRequest(
            f"top_logprobs must be between 0 and {MOST}, or -1 for none", param="top_logprobs"
        )
    if not logprobs:
        if top_logprobs is not None and top_logprobs > 0:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        return None
    return max(0, top_logprobs or 0)


def asked_by_completion(logprobs: bool | int | None) -> int | None:
    """How many alternatives a text completion wants. Raises InvalidRequest."""
    if logprobs is None or logprobs is False:
        return None
    if not 0 <= logprobs <= MOST:
        raise InvalidRequest(f"logprobs must be between 0 and {MOST}", param="logprobs")
    return 0 if logprobs is True else logprobs


def chat_logprobs(scores: Sequence[ScoredToken]) -> ChatLogprobs:
    """The block of a chat's choice."""
    return ChatLogprobs(tuple(_chat_entry(score) for score in scores))


def text_logprobs(scores: Sequence[ScoredToken], offset: int) -> tuple[TextLogprobs, int]:
    """The block of a text completion's choice, and where the next one begins.

    ``offset`` is where this one does.
    """
    offsets: list[int] = []
    for score in scores:
        offsets.append(offset)
        offset += 0 if score.chosen.spelled is None else len(score.chosen.text)
    top = tuple(_by_text(score.top) for score in scores)
    block = TextLogprobs(
        tuple(score.chosen.text for score in scores),
        tuple(_finite(score.chosen.logprob) for score in scores),
        top if any(top) else None,
        tuple(offsets),
    )
    return block, offset


def _chat_entry(score: ScoredToken) -> ChatEntry:
    alternatives = tuple(ChatAlternative(*_fields(other)) for other in score.top)
    return ChatEntry(*_fields(score.chosen), alternatives)


def _fields(score: TokenScore) -> tuple[int, str, float, tuple[int, ...] | None]:
    spelled = None if score.spelled is None else tuple(score.spelled)
    return score.id, score.text, _finite(score.logprob), spelled


def _by_text(top: Iterable[TokenScore]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for score in top:
        figures.setdefault(score.text, _finite(score.logprob))
    return figures


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
