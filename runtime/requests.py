"""What a client may ask for and what it gets back, free of any wire format.

Values here are frozen and already validated at the edge; ``runtime.text`` turns a prompt into
token ids and ``runtime.scheduling`` sees only ids and a fully resolved :class:`Sampling`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from .curves import Points
from .errors import TroupeError
from .grammars import Grammar


@dataclass(frozen=True, slots=True)
class Hlg:
    """A transfer curve for log-probabilities, in nats; stands in for temperature, top-p and top-k.

    Around a pivot, ``pivot_offset`` below the best token, it is a straight line of slope
    1/temperature; more than ``width`` above it a shoulder, below it a toe bend off
    logarithmically. The smaller they are the stronger; 0 leaves that side straight.
    """

    width: float = 4.0
    shoulder: float = 4.0
    toe: float = 6.0
    pivot_offset: float = 6.0


DEFAULT_HLG = Hlg()


@dataclass(frozen=True, slots=True)
class HlgRequest:
    """A curve as the client sent it: ``None`` means "the server's".

    ``enabled`` left out is True where any figure is given, else the server's.
    """

    enabled: bool | None = None
    width: float | None = None
    shoulder: float | None = None
    toe: float | None = None
    pivot_offset: float | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """Fully resolved sampling parameters of one row.

    ``temperature`` 0 means argmax. ``top_p`` outside (0, 1), ``min_p`` 0 and ``top_k`` 0 (or
    ≥ vocabulary) are off. ``seed`` is always set: the draw at token position *p* depends on
    ``(seed, p)`` alone, whatever shares the batch. Penalty windows count tokens; 0 = all.
    With ``hlg`` or ``curve`` top-p and top-k are off. ``curve`` goes through these points and bends
    log-probabilities before the temperature divides them.
    """

    temperature: float = 0.0
    top_p: float = 0.0
    top_k: int = 0
    min_p: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 0.0
    repetition_context_size: int = 20
    presence_penalty: float = 0.0
    presence_context_size: int = 20
    frequency_penalty: float = 0.0
    frequency_context_size: int = 20
    hlg: Hlg | None = None
    curve: Points | None = None


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """Sampling as the client sent it: ``None`` means "the server's default"."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float | None = None
    repetition_context_size: int | None = None
    presence_penalty: float | None = None
    presence_context_size: int | None = None
    frequency_penalty: float | None = None
    frequency_context_size: int | None = None
    hlg: HlgRequest | None = None
    curve: Points | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message; content parts were joined at the edge. ``name`` etc. ride in ``extra``."""

    role: str
    content: str
    extra: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages to be rendered with the model's own template."""

    messages: tuple[Message, ...]
    template_kwargs: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Raw text, encoded by the tokenizer's own rule for a beginning-of-text token."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids as they are."""

    ids: tuple[int, ...]


Prompt: TypeAlias = ChatPrompt | TextPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class StreamTicket:
    """A client's name for the stream of an answer, under which it may come back for the rest.

    ``returns``: it has read a part of it before. ``restarts``: where nothing is known of the
    stream any more, it takes the answer from the beginning instead of an error.
    """

    name: str
    returns: bool = False
    restarts: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One generation: a prompt, limits and sampling.

    ``max_tokens`` ``None`` runs to an end token or the end of the context window. ``stop`` are
    texts, cut from the output at the earliest match; ``stop_token_ids`` end like an end token.
    ``adapters`` are ids of mounted adapters, applied in this order; empty is the base model alone,
    ``None`` the server's default. ``grammar`` is what the answer must be; reasoning before it is
    free. ``logprobs`` asks for each token's log-probability and that many alternatives' (at most
    ``device.MAX_LOGPROBS``); None for none at all.

    ``resume_key`` asks for the answer to be gone on with when the same request comes again after
    it was interrupted, even one that is sampled without a seed. ``ticket`` lets the client come
    back to the stream itself.

    ``session`` is the client's name for the chat that the request belongs to. It is a hint: it
    decides which kept states go first, never which ones are used. ``explain``: the usage says what
    the prompt cache had.
    """

    prompt: Prompt
    sampling: SamplingRequest = SamplingRequest()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    adapters: tuple[str, ...] | None = None
    grammar: Grammar | None = None
    logprobs: int | None = None
    resume_key: str | None = None
    ticket: StreamTicket | None = field(default=None, compare=False)
    session: str | None = field(default=None, compare=False)
    explain: bool = field(default=False, compare=False)


class FinishReason(Enum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class CacheNote:
    """What the prompt cache had for a prompt when it came; see ``prefix.explain.Explanation``.

    ``before``, ``after`` and ``theirs`` are texts: of the prompt on both sides of the place where
    the nearest known prompt parts from it, and of that one, for its own session only.
    """

    memory_tokens: int
    disk_tokens: int
    shared_tokens: int
    reason: str | None
    before: str = ""
    after: str = ""
    theirs: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. ``cached_tokens`` ≤ ``prompt_tokens`` were not recomputed.

    An end token counts as generated although its text is not emitted. ``lane`` says what ran
    the request: ``"batched"`` (the shared executor) or ``"serial"`` (alone, one row at a time).
    ``cache`` is there for requests that asked for an explanation.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    lane: str
    cache: CacheNote | None = None


class Channel(Enum):
    """Which part of the answer a piece of text belongs to."""

    CONTENT = "content"
    REASONING = "reasoning"


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token and its log-probability, which may be -inf.

    ``spelled`` are its bytes, which need not be whole characters; None for a special token, whose
    ``text`` is not part of the answer.
    """

    id: int
    text: str
    spelled: bytes | None
    logprob: float


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A generated token and the likeliest tokens in its place, in falling order."""

    chosen: TokenScore
    top: tuple[TokenScore, ...] = ()


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of one channel; never empty, never part of a character or of a stop string.

    ``scores`` are those of all tokens since the last delta, if the request asked for any: tokens
    without text of their own ride with the next that has some, the last ones with Finished.
    """

    channel: Channel
    text: str
    scores: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a generation that ended well."""

    reason: FinishReason
    usage: Usage
    scores: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a generation that did not."""

    error: TroupeError


GenerationEvent: TypeAlias = TextDelta | Finished | Failed
