"""Token counts on the wire. Pure data."""

from __future__ import annotations

from msgspec import Struct

from mlx_troupe.runtime.requests import Usage


class PromptTokensDetails(Struct):
    """``cached_tokens`` of the prompt were not computed again."""

    cached_tokens: int


class UsageBlock(Struct):
    """``usage`` of an answer; ``lane`` is an extension that says what ran the request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    lane: str


def usage_block(usage: Usage) -> UsageBlock:
    """The wire form of a usage."""
    return UsageBlock(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(usage.cached_tokens),
        lane=usage.lane,
    )
