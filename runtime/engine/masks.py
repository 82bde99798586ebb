"""Which tokens a step's rows may draw: bit masks made by the rows' matchers, and their use.

Owns the grammar engine's threads. A step's masks are asked for when the tokens of the step before
it are known and taken when its logits are under way: they are made on the engine's own threads,
without the interpreter's lock, while the forward pass runs. Knows no plans and no steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..text.matching import TokenMatcher

if TYPE_CHECKING:
    from llguidance import LLExecutor

WORD = 32


@dataclass(frozen=True, slots=True)
class Masks:
    """Masks of a batch.

    Attributes:
        words: uint32 [B, ceil(V / 32)]; bit ``v % 32`` of word ``v // 32`` allows token ``v``.
        faults: rows whose matcher gave up, by their place in the batch, with the reason; they are
            masked like rows without a matcher.
    """

    words: npt.NDArray[np.uint32]
    faults: dict[int, str]


class MaskMaker:
    """Makes the masks of one model's batches. Called on the device's thread."""

    def __init__(self, vocab_size: int) -> None:
        self._width = -(-vocab_size // WORD)
        self._pool: ThreadPoolExecutor | None = None
        self._engine: LLExecutor | None = None

    def begin(self, matchers: Sequence[TokenMatcher | None]) -> Future[Masks]:
        """Begin to make masks for rows in the order of the batch; without a matcher all is free.

        At least one row has a matcher, and all matchers come from one compiler. They must be left
        alone until the masks are there.
        """
        if self._pool is None:
            # One batch at a time; the engine spreads its rows over threads of its own.
            self._pool = ThreadPoolExecutor(1, "masks")
        return self._pool.submit(self._make, tuple(matchers))

    def close(self) -> None:
        """Let the threads go; the next :meth:`begin` starts new ones."""
        if self._pool is not None:
            self._pool.shutdown()
        self._pool = self._engine = None

    def _make(self, matchers: tuple[TokenMatcher | None, ...]) -> Masks:
        from llguidance import LLExecutor
        from llguidance.numpy import fill_next_token_bitmask_par

        if self._engine is None:
            self._engine = LLExecutor()
        bound = [(place, m) for place, m in enumerate(matchers) if m is not None]
        made = np.zeros((len(bound), max(m.words for _, m in bound)), dtype=np.int32)
        fill_next_token_bitmask_par(
            self._engine, [(m.engine, index) for index, (_, m) in enumerate(bound)], made
        )
        words = np.full((len(matchers), self._width), -1, dtype=np.int32)
        faults: dict[int, str] = {}
        for (place, matcher), mask in zip(bound, made, strict=True):
            if matcher.fault:
                faults[place] = matcher.fault
                continue
            # The model may have more logits than its tokenizer has ids: these are never drawn.
            words[place] = 0
            words[place, : mask.size] = mask[: self._width]
        return Masks(words.view(np.uint32), faults)


def restricted(logits: mx.array, masks: Masks) -> mx.array:
    """Logits [B, V] as they are for tokens that are allowed, and -inf for all others."""
    bits = mx.left_shift(mx.array(1, mx.uint32), mx.arange(WORD, dtype=mx.uint32))
    allowed = mx.bitwise_and(mx.array(masks.words)[:, :, None], bits) != 0
    allowed = allowed.reshape(logits.shape[0], -1)[:, : logits.shape[-1]]
    return mx.where(allowed, logits, mx.array(-mx.inf, logits.dtype))
