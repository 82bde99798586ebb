"""One row's sampling: its parameters, its random key, and the tokens that its penalties look at.

A :class:`RowSampler` is made with its row, on the device thread, and belongs to it until it ends.
It draws nothing and knows no other row: ``sampling.py`` draws whole batches of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx

from ..curves import fault_of
from ..plans import MAX_LOGPROBS
from ..requests import Sampling
from .filters import needs_of
from .processors import Past, past_of
from .randomness import mix

COLDEST = 1e-5
"""Below this a temperature is argmax: the noise could only decide between float32 neighbours."""


class RowSampler:
    """One row's parameters and penalty history. Raises ValueError for parameters out of range.

    ``logprobs`` is how many alternatives' log-probabilities it wants, None for no figures at all.
    """

    def __init__(
        self,
        sampling: Sampling,
        ids: Sequence[int],
        vocab_size: int,
        logprobs: int | None = None,
    ) -> None:
        _check(sampling, vocab_size)
        if logprobs is not None and not 0 <= logprobs <= MAX_LOGPROBS:
            raise ValueError(f"{logprobs} log-probabilities are outside [0, {MAX_LOGPROBS}]")
        self.sampling = sampling
        self.logprobs = logprobs
        self.key = mix(sampling.seed)
        self.greedy = sampling.temperature < COLDEST
        self.needs = needs_of(sampling, vocab_size)
        self.past: Past | None = past_of(sampling, ids)

    @property
    def processes(self) -> bool:
        """Whether logits of this row are changed before sampling."""
        return self.past is not None or bool(self.sampling.logit_bias)

    def recent(self) -> mx.array | None:
        """The tokens that its penalties look at; None without penalties."""
        return None if self.past is None else self.past.recent(self.past.width())


def _check(sampling: Sampling, vocab_size: int) -> None:
    ranges = [
        ("temperature", sampling.temperature, 0.0, math.inf),
        ("min_p", sampling.min_p, 0.0, 1.0),
        ("xtc_probability", sampling.xtc_probability, 0.0, 1.0),
        ("xtc_threshold", sampling.xtc_threshold, 0.0, 0.5),
        ("repetition_penalty", sampling.repetition_penalty, 0.0, math.inf),
    ]
    if (hlg := sampling.hlg) is not None:
        ranges += [
            (f"hlg.{name}", getattr(hlg, name), 0.0, math.inf)
            for name in ("width", "shoulder", "toe", "pivot_offset")
        ]
    for name, value, low, high in ranges:
        if not low <= value <= high:
            raise ValueError(f"{name} is {value}, outside [{low}, {high}]")
    if sampling.curve is not None and (fault := fault_of(sampling.curve)) is not None:
        raise ValueError(f"curve {fault}")
    strangers = [i for i, _ in sampling.logit_bias if not 0 <= i < vocab_size]
    if strangers:
        raise ValueError(f"logit_bias names token {strangers[0]} of a vocabulary of {vocab_size}")
