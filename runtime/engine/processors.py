"""Logit bias and penalties for all rows of a batch at once.

Owns the recent tokens of the rows that are penalised (:class:`History`). Runs on the device thread
and never waits. The arithmetic of each row is that of mlx-lm's own processors, in their order:
bias, repetition, presence, frequency; a row that asks for none of them is not touched. On CUDA one
kernel does all penalties of bounded windows (``penalty_kernel``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..requests import Sampling
from . import penalty_kernel

NO_TOKEN = -1
MIN_WIDTH = 32


class Past:
    """The tokens that one row has seen before its next input; ``window`` 0 means all of them."""

    def __init__(self, ids: Sequence[int], window: int) -> None:
        self.window = window
        self.count = len(ids)
        self._ids: Sequence[int] = ids[-window:] if window else ids
        self._home: History | None = None
        self._place = 0

    def width(self) -> int:
        """Columns that it needs, its next input included: a power of two."""
        wanted = self.window or self.count + 1
        return max(MIN_WIDTH, 1 << (wanted - 1).bit_length())

    def recent(self, width: int) -> mx.array:
        """int32 [width], the newest last, NO_TOKEN where there are not so many."""
        if self._home is None:
            ids = list(self._ids[-width:])
            return mx.array([NO_TOKEN] * (width - len(ids)) + ids, dtype=mx.int32)
        held = self._home.tokens[self._place]
        missing = width - held.size
        return _widened(held, missing) if missing > 0 else held[-missing:]

    def move(self, home: History, place: int) -> None:
        """From now on the row's tokens are in a row of ``home``."""
        self._home, self._place, self._ids = home, place, ()


class History:
    """The recent tokens of rows that stand together: int32 [R, W], the newest in the last column.

    ``places`` are the rows' places in the batch.
    """

    def __init__(self, places: Sequence[int], pasts: Sequence[Past], recent: Sequence[Any]) -> None:
        self._pasts = tuple(pasts)
        self._rows = mx.array(list(places))
        self.tokens = mx.stack(list(recent))
        for place, past in enumerate(pasts):
            past.move(self, place)

    def replace(self, tokens: mx.array) -> None:
        """These are the recent tokens now, with one more in each row."""
        for past in self._pasts:
            past.count += 1
        self.tokens = tokens

    def push(self, inputs: mx.array) -> None:
        """Take the rows' next inputs in; ``inputs`` [B] are those of the whole batch."""
        for past in self._pasts:
            past.count += 1
        missing = max(past.width() for past in self._pasts) - self.tokens.shape[1]
        if missing > 0:
            self.tokens = _widened(self.tokens, missing)
        newest = inputs[self._rows].astype(mx.int32)[:, None]
        self.tokens = mx.concatenate([self.tokens[:, 1:], newest], axis=1)


class Penalty(ABC):
    """One kind of penalty for the rows of a history that ask for it. Parameters are [R, 1]."""

    def __init__(
        self, places: Sequence[int], values: Sequence[float], windows: Sequence[int]
    ) -> None:
        self._rows = mx.array(list(places))[:, None]
        self._values = mx.array(list(values))[:, None]
        self._windows = mx.array([window or 1 << 30 for window in windows])[:, None]
        self._values_as: dict[mx.Dtype, mx.array] = {}
        self._within = mx.zeros((1, 0), mx.bool_)

    def _targets(self, tokens: mx.array) -> tuple[mx.array, mx.array]:
        """Token ids within the windows, and which of them count.

        Those that do not are replaced by the newest token, which always does.
        """
        width = tokens.shape[1]
        if self._within.shape[1] != width:
            self._within = mx.arange(width - 1, -1, -1) < self._windows
        valid = self._within & (tokens >= 0)
        return mx.where(valid, tokens, tokens[:, -1:]), valid

    def _amounts(self, dtype: mx.Dtype) -> mx.array:
        if dtype not in self._values_as:
            self._values_as[dtype] = self._values.astype(dtype)
        return self._values_as[dtype]

    @abstractmethod
    def apply(self, logits: mx.array, tokens: mx.array) -> mx.array:
        """New logits [B, V]; ``tokens`` int32 [R, W] are the rows' recent ones."""


class Repetition(Penalty):
    """Divides positive logits of recent tokens, multiplies negative ones."""

    def apply(self, logits: mx.array, tokens: mx.array) -> mx.array:
        ids, _ = self._targets(tokens)
        amounts = self._amounts(logits.dtype)
        held = logits[self._rows, ids]
        return _put(logits, self._rows, ids, mx.where(held < 0, held * amounts, held / amounts))


class Presence(Penalty):
    """Subtracts once from every recent token."""

    def apply(self, logits: mx.array, tokens: mx.array) -> mx.array:
        ids, _ = self._targets(tokens)
        held = logits[self._rows, ids]
        return _put(logits, self._rows, ids, held - self._amounts(logits.dtype))


class Frequency(Penalty):
    """Subtracts from a recent token for every time that it occurs."""

    def apply(self, logits: mx.array, tokens: mx.array) -> mx.array:
        ids, valid = self._targets(tokens)
        return logits.at[self._rows, ids].subtract(valid * self._amounts(logits.dtype))


class _Fused:
    """All penalties of some rows, by the kernel, on histories of one width."""

    def __init__(
        self, rows: Sequence[tuple[int, Sampling, Past]], recent: dict[int, mx.array], batch: int
    ) -> None:
        places = [place for place, _, _ in rows]
        width = max(recent[place].size for place in places)
        held = [_widened(recent[place], width - recent[place].size) for place in places]
        self._history = History(places, [past for _, _, past in rows], held)
        where = [-1] * batch
        for index, place in enumerate(places):
            where[place] = index
        self._where = mx.array(where, dtype=mx.int32)
        self._table = penalty_kernel.table_of([_amounts_of(s) for _, s, _ in rows])

    def apply(self, logits: mx.array, inputs: mx.array) -> mx.array:
        changed, tokens = penalty_kernel.penalise(
            logits, inputs, self._history.tokens, self._where, self._table
        )
        self._history.replace(tokens)
        return changed


def _amounts_of(sampling: Sampling) -> tuple[penalty_kernel.Asked, ...]:
    return tuple(
        penalty_kernel.NONE if value in (0, neutral) else (value, window)
        for _, value, neutral, window in _asked(sampling)
    )


class Processors:
    """All processors of one batch of rows; made again when the batch changes.

    Args:
        asked: for each row its parameters and its past (None where it has no penalties).
        recent: for each row with a past, what ``past.recent(past.width())`` gave.
        batch: rows of the batch if the kernel may be used, else 0.
    """

    def __init__(
        self,
        asked: Sequence[tuple[int, Sampling, Past | None]],
        recent: dict[int, mx.array],
        batch: int = 0,
    ) -> None:
        self._bias = _bias([(place, s.logit_bias) for place, s, _ in asked])
        self._groups: list[tuple[History, list[tuple[Penalty, mx.array | None]]]] = []
        by_width: dict[int, list[tuple[int, Sampling, Past]]] = {}
        bounded: list[tuple[int, Sampling, Past]] = []
        for place, sampling, past in asked:
            if past is None:
                continue
            fused = batch and 0 < past.window <= penalty_kernel.MOST
            rows = bounded if fused else by_width.setdefault(recent[place].size, [])
            rows.append((place, sampling, past))
        self._fused = _Fused(bounded, recent, batch) if bounded else None
        for rows in by_width.values():
            places = [place for place, _, _ in rows]
            history = History(places, [past for _, _, past in rows], [recent[p] for p in places])
            self._groups.append((history, _penalties(rows)))

    def apply(self, logits: mx.array, inputs: mx.array) -> mx.array:
        """New logits [B, V]; ``inputs`` [B] are the tokens that made them."""
        if self._bias is not None:
            rows, ids, values = self._bias
            logits = logits.at[rows, ids].add(values)
        if self._fused is not None:
            logits = self._fused.apply(logits, inputs)
        for history, penalties in self._groups:
            history.push(inputs)
            for penalty, members in penalties:
                tokens = history.tokens if members is None else history.tokens[members]
                logits = penalty.apply(logits, tokens)
        return logits


def past_of(sampling: Sampling, ids: Sequence[int]) -> Past | None:
    """The past that a row's penalties need; None without penalties. ``ids`` is its prompt."""
    windows = [
        window for _, value, neutral, window in _asked(sampling) if value not in (0, neutral)
    ]
    if not windows:
        return None
    # The last prompt token is the first input.
    return Past(ids[:-1], 0 if 0 in windows else max(windows))


def _asked(s: Sampling) -> tuple[tuple[type[Penalty], float, float, int], ...]:
    """Each penalty in mlx-lm's order: value, the value beside 0 that does nothing, window."""
    return (
        (Repetition, s.repetition_penalty, 1.0, s.repetition_context_size),
        (Presence, s.presence_penalty, 0.0, s.presence_context_size),
        (Frequency, s.frequency_penalty, 0.0, s.frequency_context_size),
    )


def _penalties(
    rows: Sequence[tuple[int, Sampling, Past]],
) -> list[tuple[Penalty, mx.array | None]]:
    """The penalties that any of the rows ask for, with the indices of those rows (None = all)."""
    made: list[tuple[Penalty, mx.array | None]] = []
    for kind in range(3):
        wanted = [
            (index, place, asked)
            for index, (place, sampling, _) in enumerate(rows)
            if (asked := _asked(sampling)[kind])[1] not in (0, asked[2])
        ]
        if wanted:
            places, asks = [place for _, place, _ in wanted], [asked for _, _, asked in wanted]
            penalty = asks[0][0](places, [ask[1] for ask in asks], [ask[3] for ask in asks])
            members = None if len(wanted) == len(rows) else mx.array([i for i, _, _ in wanted])
            made.append((penalty, members))
    return made


def _bias(
    asked: Sequence[tuple[int, tuple[tuple[int, float], ...]]],
) -> tuple[mx.array, mx.array, mx.array] | None:
    entries = [(place, *item) for place, bias in asked for item in dict(bias).items()]
    if not entries:
        return None
    rows, ids, values = zip(*entries, strict=True)
    return mx.array(list(rows)), mx.array(list(ids)), mx.array(list(values))


def _put(logits: mx.array, rows: mx.array, ids: mx.array, values: mx.array) -> mx.array:
    """Other logits with these values; equal places are given equal values."""
    changed = logits[...]
    changed[rows, ids] = values
    return changed


def _widened(tokens: mx.array, missing: int) -> mx.array:
    if not missing:
        return tokens
    pads = [(0, 0)] * (tokens.ndim - 1) + [(missing, 0)]
    return mx.pad(tokens, pads, constant_values=NO_TOKEN)
