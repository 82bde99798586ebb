"""Token counts on the wire. Pure data."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from mlx_troupe.runtime.requests import CacheNote, Usage


class PromptTokensDetails(Struct):
    """``cached_tokens`` of the prompt were not computed again."""

    cached_tokens: int


class CacheBlock(Struct):
    """``usage.cache``, for requests with ``X-Cache-Explain: 1``: what the cache had for the prompt.

    ``memory_tokens`` and ``disk_tokens`` could be served by each tier when the request came. The
    nearest known prompt begins with the first ``shared_tokens``; ``before`` and ``after`` are the
    texts there. ``reason`` says why no more was served, and is null where nothing is missing.
    ``theirs`` is how the nearest prompt goes on, told to its own session only.
    """

    memory_tokens: int
    disk_tokens: int
    shared_tokens: int
    reason: str | None
    before: str
    after: str
    theirs: str


class UsageBlock(Struct):
    """``usage`` of an answer; ``lane`` is an extension that says what ran the request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    lane: str
    cache: CacheBlock | UnsetType = UNSET


def usage_block(usage: Usage) -> UsageBlock:
    """The wire form of a usage."""
    return UsageBlock(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(usage.cached_tokens),
        lane=usage.lane,
        cache=_cache_block(usage.cache),
    )


def _cache_block(note: CacheNote | None) -> CacheBlock | UnsetType:
    if note is None:
        return UNSET
    return CacheBlock(
        note.memory_tokens,
        note.disk_tokens,
        note.shared_tokens,
        note.reason,
        note.before,
        note.after,
        note.theirs,
    )
