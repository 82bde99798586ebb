"""Turns what a client sent into a fully resolved request: defaults, ranges, limits.

Plain functions, run wherever a request is made. Knows the model's vocabulary and window; knows
neither text nor wire formats. Raises before anything is started.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .budgets import room_for_answer
from .curves import fault_of
from .errors import ContextLengthExceeded, InvalidRequest
from .model_info import ModelInfo
from .plans import MAX_LOGPROBS
from .requests import (
    DEFAULT_HLG,
    ChatPrompt,
    GenerationRequest,
    Hlg,
    HlgRequest,
    Prompt,
    Sampling,
    SamplingRequest,
)
from .settings import Settings

MAX_STOP_CHARACTERS = 2_048
"""Of all stop strings of a request: what looks for them is built on the event loop."""
USUAL_TEMPERATURE = 0.7
THINKING = "enable_thinking"
"""What chat templates call the choice whether to think."""
UNKNOWN_WINDOW = 131_072
"""Most tokens of a row whose model does not say how long its window is."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What an omitted field means: the operator's flag, else the model's file, else 0.7/off.

    ``calm`` is the temperature of a chat in which a model that thinks was told not to: the model's
    own is meant for thoughts, so it is at most 0.7 there.
    """

    temperature: float = USUAL_TEMPERATURE
    calm: float = USUAL_TEMPERATURE
    top_p: float = 0.0
    top_k: int = 0
    min_p: float = 0.0
    hlg: Hlg = DEFAULT_HLG
    hlg_sampling: bool = False

    @classmethod
    def load(cls, settings: Settings) -> SamplingDefaults:
        """Read ``generation_config.json`` beside the model; unreadable files count as absent."""
        read = _generation_config(settings.model / "generation_config.json")
        sampled = read.get("do_sample", True) is not False
        own = _number(read.get("temperature"), USUAL_TEMPERATURE) if sampled else 0.0
        asked = settings.temperature
        top_k = int(_number(read.get("top_k"), 0.0))
        return cls(
            temperature=own if asked is None else asked,
            calm=min(own, USUAL_TEMPERATURE) if asked is None else asked,
            top_p=_number(read.get("top_p"), 0.0) if settings.top_p is None else settings.top_p,
            top_k=top_k if settings.top_k is None else settings.top_k,
            min_p=_number(read.get("min_p"), 0.0),
            hlg=settings.hlg,
            hlg_sampling=settings.hlg_sampling,
        )


def with_thinking(prompt: Prompt, thinking: bool | None) -> Prompt:
    """A chat that does not say whether to think does as the operator said."""
    if thinking is None or not isinstance(prompt, ChatPrompt):
        return prompt
    return replace(prompt, template_kwargs={THINKING: thinking, **prompt.template_kwargs})


def is_calm(prompt: Prompt) -> bool:
    """Whether this is a chat in which there is to be no thinking."""
    return isinstance(prompt, ChatPrompt) and prompt.template_kwargs.get(THINKING) is False


def resolve_sampling(
    wanted: SamplingRequest, defaults: SamplingDefaults, model: ModelInfo, *, calm: bool = False
) -> Sampling:
    """Fill in defaults and check ranges. Raises InvalidRequest naming the field.

    ``calm``: the model could think, and is not to.
    """
    for token, bias in wanted.logit_bias:
        if not 0 <= token < model.vocab_size:
            raise InvalidRequest(
                f"logit_bias names token {token}, but the vocabulary has {model.vocab_size}",
                param="logit_bias",
            )
        _within("logit_bias", bias, -100.0, 100.0)
    top_k = defaults.top_k if wanted.top_k is None else wanted.top_k
    if top_k < -1:
        raise InvalidRequest(f"top_k must be 0 (off) or more, got {top_k}", param="top_k")
    # What a logit is divided by: much less would make it infinite. 0 is off, as in mlx-lm.
    repetition = _within("repetition_penalty", wanted.repetition_penalty or 1.0, 0.01, 100.0)
    hlg = _hlg(wanted, defaults)
    bent = hlg is not None or wanted.curve is not None
    top_p = _within("top_p", wanted.top_p, 0.0, 1.0, defaults.top_p)
    usual = defaults.calm if calm else defaults.temperature
    return Sampling(
        temperature=_within("temperature", wanted.temperature, 0.0, 5.0, usual),
        top_p=0.0 if bent else top_p,
        top_k=0 if bent or top_k < 0 or top_k >= model.vocab_size else top_k,
        min_p=_within("min_p", wanted.min_p, 0.0, 1.0, defaults.min_p),
        xtc_probability=_within("xtc_probability", wanted.xtc_probability, 0.0, 1.0, 0.0),
        xtc_threshold=_within("xtc_threshold", wanted.xtc_threshold, 0.0, 0.5, 0.1),
        seed=secrets.randbits(63) if wanted.seed is None else wanted.seed,
        logit_bias=wanted.logit_bias,
        repetition_penalty=0.0 if repetition == 1.0 else repetition,
        repetition_context_size=_window("repetition", wanted.repetition_context_size, model),
        presence_penalty=_within("presence_penalty", wanted.presence_penalty, -2.0, 2.0, 0.0),
        presence_context_size=_window("presence", wanted.presence_context_size, model),
        frequency_penalty=_within("frequency_penalty", wanted.frequency_penalty, -2.0, 2.0, 0.0),
        frequency_context_size=_window("frequency", wanted.frequency_context_size, model),
        hlg=hlg,
        curve=wanted.curve,
    )


def _hlg(wanted: SamplingRequest, defaults: SamplingDefaults) -> Hlg | None:
    """The HLG curve, unless the request brings one of its own; that is checked too."""
    if wanted.curve is None:
        return _checked_hlg(wanted.hlg, defaults)
    if (fault := fault_of(wanted.curve)) is not None:
        raise InvalidRequest(f"curve {fault}", param="curve")
    if wanted.hlg is not None and _checked_hlg(wanted.hlg, defaults) is not None:
        raise InvalidRequest("curve and hlg exclude each other", param="curve")
    return None


def _checked_hlg(wanted: HlgRequest | None, defaults: SamplingDefaults) -> Hlg | None:
    """The curve that stands in for the temperature, None for none; its figures are checked."""
    if wanted is None:
        return defaults.hlg if defaults.hlg_sampling else None
    base = defaults.hlg
    curve = Hlg(
        width=_within("hlg.width", wanted.width, 0, 100, base.width),
        shoulder=_within("hlg.shoulder", wanted.shoulder, 0, 100, base.shoulder),
        toe=_within("hlg.toe", wanted.toe, 0, 100, base.toe),
        pivot_offset=_within("hlg.pivot_offset", wanted.pivot_offset, 0, 100, base.pivot_offset),
    )
    named = defaults.hlg_sampling or wanted != HlgRequest()
    return curve if (named if wanted.enabled is None else wanted.enabled) else None


def check_request(request: GenerationRequest) -> None:
    """Raise InvalidRequest for limits that no model could serve."""
    if request.max_tokens is not None and request.max_tokens < 1:
        raise InvalidRequest(
            f"max_tokens must be at least 1, got {request.max_tokens}", param="max_tokens"
        )
    check_stops(request.stop)
    if request.logprobs is not None and not 0 <= request.logprobs <= MAX_LOGPROBS:
        raise InvalidRequest(f"logprobs must be between 0 and {MAX_LOGPROBS}", param="logprobs")


def check_stops(stops: Sequence[str]) -> None:
    """Raise InvalidRequest for stop strings that are too long; each counts once."""
    if sum(map(len, set(stops))) > MAX_STOP_CHARACTERS:
        raise InvalidRequest(
            f"stop: stop strings may have {MAX_STOP_CHARACTERS} characters altogether", param="stop"
        )


def token_limit(
    prompt_tokens: int,
    wanted: int | None,
    settings: Settings,
    model: ModelInfo,
    *,
    param: str = "messages",
) -> int:
    """Most tokens to generate: the client's, the operator's and the window's least.

    Raises:
        ContextLengthExceeded: the prompt alone fills the window, or a limit that the operator set;
            it names ``param``.
    """
    window = model.context_window or UNKNOWN_WINDOW
    room = window - prompt_tokens
    if room < 1:
        raise ContextLengthExceeded(
            f"the prompt has {prompt_tokens} tokens, but the context window of {model.name} is "
            f"{window} tokens and at least one must be left for the answer",
            param=param,
        )
    budget = room_for_answer(prompt_tokens, settings, model, param=param)
    return min(n for n in (room, budget, wanted, settings.max_tokens) if n is not None)


def _within(name: str, value: float | None, low: float, high: float, default: float = 0.0) -> float:
    if value is None:
        return default
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidRequest(
            f"{name} must be between {low:g} and {high:g}, got {value}", param=name
        )
    return float(value)


def _window(name: str, value: int | None, model: ModelInfo) -> int:
    """Of a penalty: no row has more tokens than its model's window, so as many are all."""
    if value is None:
        return 20
    if value < 0:
        raise InvalidRequest(
            f"{name}_context_size must be 0 (all) or more, got {value}",
            param=f"{name}_context_size",
        )
    return 0 if value >= (model.context_window or UNKNOWN_WINDOW) else value


def _generation_config(path: Path) -> dict[str, object]:
    try:
        read = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def _number(value: object, default: float) -> float:
    usable = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if usable and math.isfinite(float(value)) else default  # type: ignore[arg-type]
