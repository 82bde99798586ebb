"""Log-probabilities of ids turned into log-probabilities of texts.

Pure functions, run wherever a request's actor runs. An entry spells its token as it stands in the
middle of a text, whatever the stream of text holds back or merges.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..requests import ScoredToken, TokenScore

if TYPE_CHECKING:
    from ..plans import TokenLogprobs
    from .tokenizer import Tokenizer


def scored_token(tokenizer: Tokenizer, token_id: int, figures: TokenLogprobs) -> ScoredToken:
    """One generated token with its alternatives."""
    return ScoredToken(
        _score(tokenizer, token_id, figures.chosen),
        tuple(_score(tokenizer, other, logprob) for other, logprob in figures.top),
    )


def newline_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """The ids that a line break is written with."""
    ids = tokenizer.encode("\n", add_special_tokens=False)
    return frozenset(i for i in ids if tokenizer.token_bytes(i) == b"\n")


def _score(tokenizer: Tokenizer, token_id: int, logprob: float) -> TokenScore:
    if tokenizer.is_special(token_id):
        return TokenScore(token_id, tokenizer.decode([token_id]), None, logprob)
    spelled = tokenizer.token_bytes(token_id)
    return TokenScore(token_id, spelled.decode("utf-8", "replace"), spelled, logprob)
