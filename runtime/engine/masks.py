"""Which tokens a step's rows may draw: bit masks made by the rows' matchers.

Owns one thread, on which rows' matchers are at work in the order in which it is asked, and the
grammar engine's own threads, on which masks are made without the interpreter's lock while the
forward pass runs. A row keeps a ticket for its mask until its next draw. Knows no plans, no steps
and no MLX.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from ..text.matching import MatchFailed, TokenMatcher

if TYPE_CHECKING:
    from llguidance import LLExecutor

WORD = 32
ALL = 0xFFFFFFFF
THREADS = 4
"""Of the engine: on 16 cores masks of 16 rows came sooner from 4 than from 8, 12 or 16."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Masks:
    """Masks of a batch.

    Attributes:
        words: uint32 [B, ceil(V / 32)]; bit ``v % 32`` of word ``v // 32`` allows token ``v``.
        faults: why a row's matcher gave up, by the row's place in the batch; it is masked like rows
            without a matcher.
        keys: a number for each mask; equal masks have equal numbers, others hardly ever.
    """

    words: npt.NDArray[np.uint32]
    faults: dict[int, MatchFailed]
    keys: list[int] = field(init=False)

    def __post_init__(self) -> None:
        weights = np.arange(1, 2 * self.words.shape[1], 2, dtype=np.uint64)
        keys = (self.words * (weights * np.uint64(0x9E3779B97F4A7C15))).sum(axis=1)
        object.__setattr__(self, "keys", keys.tolist())


@dataclass(frozen=True, slots=True)
class Ticket:
    """A mask that is being made: the one at ``place`` of ``masks``."""

    masks: Future[Masks]
    place: int


class MaskMaker:
    """Makes the masks of one model's batches. Called on the device's thread.

    ``waited``: seconds for which its caller has waited for masks, and all rows of a step with it.
    """

    def __init__(self, vocab_size: int) -> None:
        self.waited = 0.0
        self._width = -(-vocab_size // WORD)
        self._pool: ThreadPoolExecutor | None = None
        self._engine: LLExecutor | None = None

    def follow(self, work: Callable[[], _T]) -> Future[_T]:
        """Have matchers follow what was drawn, before the masks that are asked for next."""
        if self._pool is None:
            # One batch at a time; the engine spreads its rows over threads of its own.
            self._pool = ThreadPoolExecutor(1, "masks")
        return self._pool.submit(work)

    def begin(self, matchers: Callable[[], Sequence[TokenMatcher | None]]) -> Future[Masks]:
        """Begin to make masks, in the order of ``matchers``; without a matcher all is free.

        ``matchers`` is asked when it is their turn. All come from one compiler, and they must be
        left alone until the masks are there.
        """
        return self.follow(lambda: self._make(matchers()))

    def gather(self, tickets: Sequence[Ticket | None]) -> Masks:
        """Wait for the masks of a batch's rows, in its order; without a ticket all is free."""
        begun = perf_counter()
        try:
            return self._gather(tickets)
        finally:
            self.waited += perf_counter() - begun

    def _gather(self, tickets: Sequence[Ticket | None]) -> Masks:
        first = tickets[0].masks if tickets[0] is not None else None
        if first is not None and all(
            ticket is not None and ticket.masks is first and ticket.place == place
            for place, ticket in enumerate(tickets)
        ):
            made = first.result()
            if len(made.words) == len(tickets):
                return made
        words = np.full((len(tickets), self._width), ALL, dtype=np.uint32)
        faults: dict[int, MatchFailed] = {}
        for place, ticket in enumerate(tickets):
            if ticket is None:
                continue
            made = ticket.masks.result()
            words[place] = made.words[ticket.place]
            if (fault := made.faults.get(ticket.place)) is not None:
                faults[place] = fault
        return Masks(words, faults)

    def close(self) -> None:
        """Let the threads go; the next :meth:`begin` starts new ones."""
        if self._pool is not None:
            self._pool.shutdown()
        self._pool = self._engine = None

    def _make(self, matchers: Sequence[TokenMatcher | None]) -> Masks:
        from llguidance import LLExecutor
        from llguidance.numpy import fill_next_token_bitmask_par

        if self._engine is None:
            self._engine = LLExecutor(num_threads=min(THREADS, max(1, (os.cpu_count() or 1) - 1)))
        words = np.full((len(matchers), self._width), ALL, dtype=np.uint32)
        faults: dict[int, MatchFailed] = {}
        bound = [(place, m) for place, m in enumerate(matchers) if m is not None]
        if not bound:
            return Masks(words, faults)
        made = np.zeros((len(bound), max(m.words for _, m in bound)), dtype=np.int32)
        fill_next_token_bitmask_par(
            self._engine, [(m.engine, index) for index, (_, m) in enumerate(bound)], made
        )
        for (place, matcher), mask in zip(bound, made, strict=True):
            if (fault := matcher.fault) is not None:
                faults[place] = fault
                continue
            # The model may have more logits than its tokenizer has ids: these are never drawn.
            words[place] = 0
            words[place, : mask.size] = mask.view(np.uint32)[: self._width]
        return Masks(words, faults)
