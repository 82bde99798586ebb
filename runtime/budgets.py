"""What the operator's memory limits come to for a loaded model, in bytes and in tokens.

Pure functions over :class:`Settings` and :class:`ModelInfo`, used by whoever admits requests and
by whoever reports. Without ``--kv-budget`` and ``--memory-budget`` nothing here limits anything:
estimates advise, only limits that somebody set reject or shorten.

State costs what the device allocates for it. A row alone keeps steps of 256 tokens; rows that
share a batch stand in slots of a power of two. Sliding layers stop growing at their window;
recurrent ones cost the same whatever a row's length, twice while it runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from .engine.groups import capacity_for
from .errors import ContextLengthExceeded, ModelError
from .kvschemes import PagedKV
from .model_info import ModelInfo
from .settings import Settings

GB = 10**9
LONE_STEP = 256
"""Tokens by which the state of a row that is alone grows."""
SAFE_SHARE = 0.75
"""Of the memory, what weights, state and prefill may take together before it is called unsafe."""
PREFILL_TOKENS = 2048
"""Most tokens of one step's prefill."""
CACHE_SHARE = 4
"""Kept states take at most one part in this many of a memory budget."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """Limits of one model under one set of settings. None = nobody set such a limit.

    Attributes:
        kv_bytes: most bytes of state that rows may reserve together.
        context_tokens: most tokens (prompt + answer) of a row that has all of that to itself.
        usable_bytes: what a memory budget leaves for rows beside weights, prefill, kept states and
            what attention unpacks or gathers.
        cause: the flag that sets ``context_tokens``.
    """

    kv_bytes: int | None = None
    context_tokens: int | None = None
    usable_bytes: int | None = None
    cause: str = ""


def budgets(settings: Settings, model: ModelInfo) -> Budgets:
    """The limits that hold for ``model``."""
    usable = None
    if settings.memory_budget_bytes is not None:
        taken = model.weights_bytes + prefill_bytes(model) + cache_bytes(settings)
        usable = _for_states(model, max(0, settings.memory_budget_bytes - taken))
    limits = [n for n in (settings.kv_budget_bytes, usable) if n is not None]
    if not limits:
        return Budgets()
    least = min(limits)
    cause = "--memory-budget" if least == usable else "--kv-budget"
    return Budgets(least, lone_tokens(model, least), usable, cause)


def check_limits(settings: Settings, model: ModelInfo) -> None:
    """Raise ModelError where the limits leave no room for a single request, however short."""
    limits = budgets(settings, model)
    if limits.usable_bytes != 0 and limits.context_tokens != 0:
        return
    least = (
        f"the state of a request takes {in_gb(state_bytes(model, 1, alone=True))} or more "
        f"({LONE_STEP} tokens)"
    )
    if limits.cause == "--kv-budget":
        raise ModelError(
            f"{least}: --kv-budget {in_gb(settings.kv_budget_bytes or 0)} leaves room for none",
            code="context_over_budget",
        )
    raise ModelError(
        f"{model.name} takes {in_gb(model.weights_bytes)} for its weights, about "
        f"{in_gb(prefill_bytes(model))} in prefill and {in_gb(cache_bytes(settings))} for kept "
        f"states: --memory-budget {in_gb(settings.memory_budget_bytes or 0)} leaves "
        f"{in_gb(limits.usable_bytes or 0)}, and {least}",
        code="memory_admission",
    )


def cache_bytes(settings: Settings) -> int:
    """Budget of kept states: what was asked for, within its share of a memory budget."""
    if isinstance(settings.kv, PagedKV):
        return 0
    if settings.memory_budget_bytes is None:
        return settings.prompt_cache_bytes
    return min(settings.prompt_cache_bytes, settings.memory_budget_bytes // CACHE_SHARE)


def why_no_cache(settings: Settings) -> str:
    """Why no states are kept, in words; empty if they are."""
    if isinstance(settings.kv, PagedKV):
        return "--paged-kv goes past the prompt cache"
    return "" if cache_bytes(settings) else "--prompt-cache 0"


def prefill_bytes(model: ModelInfo) -> int:
    """Memory that the largest prefill step takes beside weights and state, roughly.

    Quantized weights that it expands are part of it; a step of many rows takes as much for those.
    """
    return model.prefill_bytes_per_token * PREFILL_TOKENS + model.expanded_bytes


def state_bytes(model: ModelInfo, tokens: int, *, alone: bool) -> int:
    """Bytes of the state of a row of ``tokens`` tokens, as the device allocates it."""
    capacity = -(-tokens // LONE_STEP) * LONE_STEP if alone else capacity_for(tokens)
    sliding, window = _sliding(model)
    growing = model.kv_bytes_per_token - sliding
    return _fixed(model) + capacity * growing + min(capacity, window) * sliding


def kept_bytes(model: ModelInfo, tokens: int) -> int:
    """About the bytes of a kept state: no more tokens than it has."""
    sliding, window = _sliding(model)
    growing = model.kv_bytes_per_token - sliding
    return model.fixed_bytes + tokens * growing + min(tokens, window) * sliding


def lone_tokens(model: ModelInfo, limit_bytes: int) -> int | None:
    """Most tokens of a row that has ``limit_bytes`` to itself; None where state does not grow."""
    sliding, window = _sliding(model)
    growing = model.kv_bytes_per_token - sliding
    limit_bytes -= _fixed(model)
    if limit_bytes < 0:
        return 0
    if growing <= 0:
        return None
    tokens = limit_bytes // model.kv_bytes_per_token
    if sliding and tokens > window:
        tokens = (limit_bytes - window * sliding) // growing
    return tokens // LONE_STEP * LONE_STEP


def _for_states(model: ModelInfo, nbytes: int) -> int:
    """Of so many bytes for rows, what their states may take: a step unpacks some of these."""
    sliding, _ = _sliding(model)
    # Layers that see everything outgrow the others.
    growing = model.kv_bytes_per_token - sliding or model.kv_bytes_per_token
    if not model.unpacked_bytes_per_token:
        return nbytes
    return nbytes * growing // (growing + model.unpacked_bytes_per_token)


def _fixed(model: ModelInfo) -> int:
    """Recurrent state of a running row: as it is, and as it was before the step under way."""
    return 2 * model.fixed_bytes


def _sliding(model: ModelInfo) -> tuple[int, int]:
    """Bytes of a token that sliding layers take, and the tokens after which they take no more."""
    layers = [kind for kind in model.kv_layers if kind.kind == "sliding"]
    if not layers or model.trim_window is None:
        return 0, 0
    return sum(kind.layers * kind.bytes_per_token for kind in layers), model.trim_window + 1


def max_safe_context(model: ModelInfo, memory_bytes: int) -> int | None:
    """Advice: the longest row that leaves a quarter of the memory free. None = no such limit.

    Nothing is ever refused for it.
    """
    left = SAFE_SHARE * memory_bytes - model.weights_bytes - prefill_bytes(model)
    tokens = lone_tokens(model, _for_states(model, max(0, int(left))))
    found = [n for n in (tokens, model.context_window) if n is not None]
    return min(found, default=None)


def room_for_answer(
    prompt_tokens: int, settings: Settings, model: ModelInfo, *, param: str
) -> int | None:
    """Most tokens that a limit leaves for the answer; None where nobody set one.

    Raises:
        ContextLengthExceeded: none at all, even if the row were alone; it names ``param``.
    """
    limits = budgets(settings, model)
    if limits.context_tokens is None:
        return None
    room = limits.context_tokens - prompt_tokens
    if room >= 1:
        return room
    by_kv = limits.cause == "--kv-budget"
    raise ContextLengthExceeded(
        f"the prompt has {prompt_tokens} tokens, but {limits.cause} leaves "
        f"{in_gb(limits.kv_bytes or 0)} for the state of requests, which is enough for "
        f"{limits.context_tokens} tokens ({model.kv_bytes_per_token} bytes each), and at least one "
        "must be left for the answer",
        param=param,
        code="context_over_budget" if by_kv else "memory_admission",
    )


def in_words(settings: Settings, model: ModelInfo) -> str:
    """What is enforced, for people; empty where nothing is."""
    limits = budgets(settings, model)
    if limits.kv_bytes is None:
        return ""
    flags = {
        "--memory-budget": settings.memory_budget_bytes,
        "--kv-budget": settings.kv_budget_bytes,
    }
    named = ", ".join(f"{flag} {in_gb(size)}" for flag, size in flags.items() if size is not None)
    tokens = "" if limits.context_tokens is None else f", {limits.context_tokens:,} tokens each"
    return f"{named}: {in_gb(limits.kv_bytes)} for the state of running requests{tokens} at most"


def in_gb(size: int) -> str:
    """Bytes in decimal gigabytes, for people."""
    return f"{size / GB:.3g} GB"
