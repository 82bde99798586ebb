"""Request fields that chat and text completions share, and their meaning.

Pure functions; no task, no clock. Ranges (both ends allowed unless said otherwise): temperature
0–5; top_p and min_p 0–1, where 0 is off; top_k ≥ -1, where -1, 0 and anything from the vocabulary
size up are off; presence and frequency penalty -2–2; repetition_penalty 0.01–100, where 1 and 0 are
off; logit_bias -100–100 for ids within the vocabulary; max_tokens ≥ 1, clipped by the context
window; seed any 64-bit integer; stop strings of 2,048 characters altogether, of which empty ones
ask for nothing. Of max_completion_tokens and max_tokens the former wins.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, Struct

from mlx_troupe.runtime.curves import LOWEST_POINT, MAX_POINTS
from mlx_troupe.runtime.defaults import check_stops
from mlx_troupe.runtime.errors import InvalidRequest, Unsupported
from mlx_troupe.runtime.requests import (
    GenerationRequest,
    HlgRequest,
    Prompt,
    SamplingRequest,
)

from .adapters import to_adapters
from .parsing import INT64
from .resuming import MAX_NAME
from .session import session_of
from .structured import StructuredParams, to_grammar

MAX_BIAS = 100.0
_TOKEN_ID = re.compile(r"[0-9]{1,18}")

Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
Count = Annotated[int, Meta(ge=0)]
Nats = Annotated[float, Meta(ge=0, le=100)]
Below = Annotated[float, Meta(ge=LOWEST_POINT, le=0)]
Curve = Annotated[list[tuple[Below, Below]], Meta(min_length=2, max_length=MAX_POINTS)]


class StreamOptions(Struct):
    """``stream_options``; allowed, and without effect, when not streaming."""

    include_usage: bool | None = None


class HlgParams(Struct, forbid_unknown_fields=True):
    """``hlg``: a curve in place of temperature, top-p and top-k; figures in nats, 0–100."""

    enabled: bool | None = None
    width: Nats | None = None
    shoulder: Nats | None = None
    toe: Nats | None = None
    pivot_offset: Nats | None = None


class GenerationParams(StructuredParams, kw_only=True):
    """The shared fields as they come over the wire."""

    model: Annotated[str, Meta(max_length=512)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=5)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Share | None = None
    xtc_probability: Share | None = None
    xtc_threshold: Annotated[float, Meta(ge=0, le=0.5)] | None = None
    seed: int | None = None
    logit_bias: object = None
    repetition_penalty: Annotated[float, Meta(ge=0, le=100)] | None = None
    repetition_context_size: Count | None = None
    presence_penalty: Penalty | None = None
    presence_context_size: Count | None = None
    frequency_penalty: Penalty | None = None
    frequency_context_size: Count | None = None
    hlg: HlgParams | None = None
    curve: Curve | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Count] | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    adapter: str | None = None
    adapters: str | list[str] | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    request_id: Name | None = None
    restart: bool | None = None
    resume_key: Name | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One parsed API call.

    ``stream_name`` and ``restarts`` are what the body says of a stream to come back to; the
    headers have a say too (``resuming.py``).
    """

    request: GenerationRequest
    stream: bool
    include_usage: bool
    stream_name: str | None = None
    restarts: bool = False


def to_call(
    params: GenerationParams,
    prompt: Prompt,
    vocab_size: int | None,
    *,
    logprobs: int | None = None,
) -> Call:
    """The call that the fields ask for. Raises InvalidRequest or Unsupported."""
    if params.n is not None and params.n > 1:
        raise Unsupported("n above 1 is not supported", param="n")
    options = params.stream_options
    request = GenerationRequest(
        prompt=prompt,
        sampling=to_sampling(params, vocab_size),
        max_tokens=params.max_completion_tokens or params.max_tokens,
        stop=to_stops(params.stop),
        stop_token_ids=check_ids(
            tuple(dict.fromkeys(params.stop_token_ids or ())), vocab_size, "stop_token_ids"
        ),
        adapters=to_adapters(params.adapter, params.adapters),
        grammar=to_grammar(params),
        logprobs=logprobs,
        resume_key=params.resume_key,
        session=session_of(params.session_id, params.prompt_cache_key),
    )
    return Call(
        request=request,
        stream=bool(params.stream),
        include_usage=options is not None and bool(options.include_usage),
        stream_name=params.request_id,
        restarts=bool(params.restart),
    )


def to_sampling(params: GenerationParams, vocab_size: int | None) -> SamplingRequest:
    """The sampling fields, ``None`` where the client left the server's default."""
    if params.seed is not None and not -INT64 <= params.seed < 2 * INT64:
        raise InvalidRequest("seed: must be a 64-bit integer", param="seed")
    return SamplingRequest(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=0 if params.top_k == -1 else params.top_k,
        min_p=params.min_p,
        xtc_probability=params.xtc_probability,
        xtc_threshold=params.xtc_threshold,
        seed=params.seed,
        logit_bias=to_bias(params.logit_bias, vocab_size),
        repetition_penalty=params.repetition_penalty,
        repetition_context_size=params.repetition_context_size,
        presence_penalty=params.presence_penalty,
        presence_context_size=params.presence_context_size,
        frequency_penalty=params.frequency_penalty,
        frequency_context_size=params.frequency_context_size,
        hlg=to_hlg(params.hlg),
        curve=None if params.curve is None else tuple(params.curve),
    )


def to_hlg(params: HlgParams | None) -> HlgRequest | None:
    """The curve as asked for."""
    if params is None:
        return None
    return HlgRequest(
        params.enabled, params.width, params.shoulder, params.toe, params.pivot_offset
    )


def to_bias(value: object, vocab_size: int | None) -> tuple[tuple[int, float], ...]:
    """``logit_bias`` by token id, in ascending order of the ids."""
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise _bad_bias()
    bias: dict[int, float] = {}
    for key, amount in value.items():
        is_number = isinstance(amount, (int, float)) and not isinstance(amount, bool)
        if not _TOKEN_ID.fullmatch(key) or not is_number:
            raise _bad_bias()
        if not -MAX_BIAS <= amount <= MAX_BIAS:  # NaN is not, either
            raise InvalidRequest(
                "logit_bias: values must be between -100 and 100", param="logit_bias"
            )
        bias[int(key)] = float(amount)
    ids = check_ids(tuple(sorted(bias)), vocab_size, "logit_bias")
    return tuple((id_, bias[id_]) for id_ in ids)


def to_stops(value: str | list[str] | None) -> tuple[str, ...]:
    """Stop strings, each once, in the order given; an empty one asks for nothing."""
    given = (value,) if isinstance(value, str) else value or ()
    stops = tuple(dict.fromkeys(stop for stop in given if stop))
    check_stops(stops)
    return stops


def check_ids(ids: Sequence[int], vocab_size: int | None, param: str) -> tuple[int, ...]:
    """Token ids, all within the vocabulary where its size is known (None: still loading)."""
    if vocab_size is not None and any(id_ >= vocab_size for id_ in ids):
        raise InvalidRequest(
            f"{param}: token ids must be below the vocabulary size of {vocab_size}", param=param
        )
    return tuple(ids)


def _bad_bias() -> InvalidRequest:
    return InvalidRequest("logit_bias must be a dict of int to float", param="logit_bias")
