"""Turning logits into token ids, every row by its own parameters and its own random numbers.

Owns the per-row sampling state (:class:`RowSampler`: seed, processors, penalty history). Runs on
the device thread and never waits: everything returned is lazy. Knows no rows beyond their order in
the batch and no cache.

A draw depends on the row's logits, its seed and its token position alone. The noise of token *t*
is the same whatever shares the batch, because each row's key goes through ``vmap`` by itself, and
rows that need different filters are filtered in separate groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors

from ..requests import Sampling
from .masks import Masks, penalties

COLDEST = 1e-5
"""Below this a temperature is argmax: the noise could only decide between float32 neighbours."""

_XTC_STREAM = 0x9E3779B9
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Draws:
    """One drawn token for each row of a batch, all lazy.

    Attributes:
        tokens: uint32 [B], always valid ids: the next step's input.
        reported: int32 [B], the same ids, or -1 where the row's logits were not finite.
        faults: rows whose processor raised, by their place in the batch, with the reason.
    """

    tokens: mx.array
    reported: mx.array
    faults: dict[int, str] = field(default_factory=dict)


class RowSampler:
    """One row's parameters and penalty history. Raises ValueError for parameters out of range."""

    def __init__(self, sampling: Sampling, ids: Sequence[int], vocab_size: int) -> None:
        _check(sampling, vocab_size)
        self.sampling = sampling
        self.key = mix(sampling.seed)
        self.greedy = sampling.temperature < COLDEST
        self.sorts = 0 < sampling.top_p < 1 or 0 < sampling.top_k < vocab_size
        self.xtc = sampling.xtc_probability > 0
        self._processors = _processors(sampling)
        self._window = _penalty_window(sampling)
        self._history: mx.array | None = None
        if self._window is not None:
            self._history = mx.array(list(ids[:-1]), dtype=mx.uint32)

    @property
    def processes(self) -> bool:
        """Whether logits of this row are changed before sampling."""
        return bool(self._processors)

    def process(self, token: mx.array, logits: mx.array) -> mx.array:
        """Apply the processors to ``logits`` [1, V]; ``token`` [1] is the input that made them."""
        history = token
        if self._history is not None:
            history = mx.concatenate([self._history, token.astype(mx.uint32)])
            if self._window:
                history = history[-self._window :]
            self._history = history
        for processor in self._processors:
            logits = processor(history, logits)
        return logits


class Sampler:
    """Samples batches of one model. ``exempt`` are the ids that XTC never removes."""

    def __init__(self, vocab_size: int, exempt: frozenset[int] = frozenset()) -> None:
        ids = sorted(i for i in exempt if 0 <= i < vocab_size)
        self._vocab_size = vocab_size
        self._exempt = mx.zeros((vocab_size,), dtype=mx.bool_)
        if ids:
            self._exempt[mx.array(ids)] = True

    def draw(
        self,
        logits: mx.array,
        rows: Sequence[RowSampler],
        positions: Sequence[int],
        inputs: mx.array,
        masks: Masks | None = None,
    ) -> Draws:
        """One token a row.

        Args:
            logits: [B, V].
            rows: the B samplers in the order of the batch.
            positions: tokens (prompt and generated) that each row holds at this draw.
            inputs: [B] the tokens that made these logits.
            masks: tokens that the rows' grammars allow; applied after the processors.
        """
        faults: dict[int, str] = {}
        if any(r.processes for r in rows):
            logits = _process(logits, rows, inputs, faults)
        allowed = logits if masks is None else logits + penalties(masks, logits)
        tokens = self._choose(allowed, rows, positions)
        # The maximum of a row that holds a NaN is NaN.
        finite = mx.isfinite(mx.max(logits, axis=-1))
        reported = mx.where(finite, tokens.astype(mx.int32), -1)
        return Draws(tokens, reported, faults)

    def _choose(
        self, logits: mx.array, rows: Sequence[RowSampler], positions: Sequence[int]
    ) -> mx.array:
        groups: dict[tuple[bool, bool, bool], list[int]] = {}
        for place, row in enumerate(rows):
            kind = (row.greedy, row.sorts and not row.greedy, row.xtc and not row.greedy)
            groups.setdefault(kind, []).append(place)
        if len(groups) == 1:
            (kind,) = groups
            return self._choose_group(kind, logits, rows, positions)
        parts, order = [], []
        for kind, places in groups.items():
            parts.append(
                self._choose_group(
                    kind,
                    logits[mx.array(places)],
                    [rows[p] for p in places],
                    [positions[p] for p in places],
                )
            )
            order.extend(places)
        back = sorted(range(len(order)), key=order.__getitem__)
        return mx.concatenate(parts)[mx.array(back)]

    def _choose_group(
        self,
        kind: tuple[bool, bool, bool],
        logits: mx.array,
        rows: Sequence[RowSampler],
        positions: Sequence[int],
    ) -> mx.array:
        greedy, sorts, xtc = kind
        if greedy and len(rows) > 1:
            # MLX's exponential over a vocabulary costs a fifth of a CPU step of 16 rows.
            return mx.argmax(logits, axis=-1)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if greedy:
            return mx.argmax(logprobs, axis=-1)
        x = logprobs.astype(mx.float32)
        wanted = [r.sampling for r in rows]
        keys = [(r.key, p) for r, p in zip(rows, positions, strict=True)]
        ranked = mx.sort(x, axis=-1) if sorts else None
        if ranked is not None and any(0 < s.top_p < 1 for s in wanted):
            x = _top_p(x, ranked, _column([s.top_p if 0 < s.top_p < 1 else 2.0 for s in wanted]))
        if any(s.min_p > 0 for s in wanted):
            x = _min_p(x, _column([math.log(s.min_p) if s.min_p > 0 else -mx.inf for s in wanted]))
        if xtc:
            x = self._xtc(x, wanted, keys)
        if ranked is not None and any(0 < s.top_k < self._vocab_size for s in wanted):
            ranked = mx.sort(x, axis=-1) if xtc else ranked
            x = _top_k(x, ranked, [s.top_k for s in wanted])
        temperature = _column([s.temperature for s in wanted])
        scaled = (x - mx.max(x, axis=-1, keepdims=True)) / temperature
        return mx.argmax(scaled + _noise(keys, self._vocab_size), axis=-1)

    def _xtc(
        self, x: mx.array, wanted: Sequence[Sampling], keys: Sequence[tuple[int, int]]
    ) -> mx.array:
        probabilities = mx.softmax(x, axis=-1)
        threshold = _column([s.xtc_threshold for s in wanted])
        above = probabilities > threshold
        least = mx.min(mx.where(above, probabilities, mx.inf), axis=-1, keepdims=True)
        chance = _column([s.xtc_probability for s in wanted])
        strikes = _uniform([(key ^ _XTC_STREAM, p) for key, p in keys]) <= chance
        removed = (probabilities > least) & ~self._exempt & strikes
        return mx.where(removed, -mx.inf, x)


def mix(seed: int) -> int:
    """A well spread 32-bit key for any integer seed (the finalizer of splitmix64)."""
    z = (seed + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return (z ^ (z >> 31)) & 0xFFFFFFFF


def _check(sampling: Sampling, vocab_size: int) -> None:
    ranges = (
        ("temperature", sampling.temperature, 0.0, math.inf),
        ("min_p", sampling.min_p, 0.0, 1.0),
        ("xtc_probability", sampling.xtc_probability, 0.0, 1.0),
        ("xtc_threshold", sampling.xtc_threshold, 0.0, 0.5),
        ("repetition_penalty", sampling.repetition_penalty, 0.0, math.inf),
    )
    for name, value, low, high in ranges:
        if not low <= value <= high:
            raise ValueError(f"{name} is {value}, outside [{low}, {high}]")
    strangers = [i for i, _ in sampling.logit_bias if not 0 <= i < vocab_size]
    if strangers:
        raise ValueError(f"logit_bias names token {strangers[0]} of a vocabulary of {vocab_size}")


def _processors(sampling: Sampling) -> list[Callable[[mx.array, mx.array], mx.array]]:
    neutral = sampling.repetition_penalty == 1
    made: list[Any] = make_logits_processors(
        logit_bias=dict(sampling.logit_bias) or None,
        repetition_penalty=None if neutral else sampling.repetition_penalty,
        repetition_context_size=sampling.repetition_context_size,
        presence_penalty=sampling.presence_penalty,
        presence_context_size=sampling.presence_context_size,
        frequency_penalty=sampling.frequency_penalty,
        frequency_context_size=sampling.frequency_context_size,
    )
    return made


def _penalty_window(sampling: Sampling) -> int | None:
    """Tokens of history that the penalties look at: None = no penalty, 0 = all of it."""
    sizes = [
        size
        for penalty, neutral, size in (
            (sampling.repetition_penalty, 1, sampling.repetition_context_size),
            (sampling.presence_penalty, 0, sampling.presence_context_size),
            (sampling.frequency_penalty, 0, sampling.frequency_context_size),
        )
        if penalty not in (0, neutral)
    ]
    if not sizes:
        return None
    return 0 if 0 in sizes else max(sizes)


def _process(
    logits: mx.array, rows: Sequence[RowSampler], inputs: mx.array, faults: dict[int, str]
) -> mx.array:
    parts: list[mx.array] = []
    plain = 0
    for place, row in enumerate(rows):
        if not row.processes:
            continue
        if plain < place:
            parts.append(logits[plain:place])
        own = logits[place : place + 1]
        try:
            parts.append(row.process(inputs[place : place + 1], own))
        except Exception as error:
            faults[place] = f"a logits processor failed: {error}"
            parts.append(logits[place : place + 1])
        plain = place + 1
    if plain < len(rows):
        parts.append(logits[plain:])
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def _column(values: Sequence[float]) -> mx.array:
    return mx.array(list(values), dtype=mx.float32)[:, None]


def _top_p(x: mx.array, ascending: mx.array, top_p: mx.array) -> mx.array:
    probabilities = mx.exp(ascending)
    above = mx.cumsum(probabilities, axis=-1, reverse=True, inclusive=False)
    mass = above[:, :1] + probabilities[:, :1]
    dropped = mx.sum(above >= top_p * mass, axis=-1, keepdims=True)
    threshold = mx.take_along_axis(ascending, dropped, axis=-1)
    return mx.where(x < threshold, -mx.inf, x)


def _min_p(x: mx.array, log_min_p: mx.array) -> mx.array:
    return mx.where(x < mx.max(x, axis=-1, keepdims=True) + log_min_p, -mx.inf, x)


def _top_k(x: mx.array, ascending: mx.array, top_k: Sequence[int]) -> mx.array:
    """Keep exactly k tokens: of several equal to the k-th, those with the lowest ids."""
    vocab_size = x.shape[-1]
    k = mx.array([[n if 0 < n < vocab_size else vocab_size] for n in top_k])
    kth = mx.take_along_axis(ascending, vocab_size - k, axis=-1)
    above = x > kth
    room = k - mx.sum(above, axis=-1, keepdims=True)
    tied = x == kth
    nth = mx.cumsum(tied.astype(mx.int32), axis=-1)
    return mx.where(above | (tied & (nth <= room)), x, -mx.inf)


def _keys(keys: Sequence[tuple[int, int]]) -> mx.array:
    return mx.array(list(keys), dtype=mx.uint32)


def _noise(keys: Sequence[tuple[int, int]], vocab_size: int) -> mx.array:
    return mx.vmap(partial(_gumbel, vocab_size))(_keys(keys))


def _gumbel(vocab_size: int, key: mx.array) -> mx.array:
    return mx.random.gumbel((vocab_size,), key=key)


def _uniform(keys: Sequence[tuple[int, int]]) -> mx.array:
    return mx.vmap(_one_uniform)(_keys(keys))


def _one_uniform(key: mx.array) -> mx.array:
    return mx.random.uniform(shape=(1,), key=key)
