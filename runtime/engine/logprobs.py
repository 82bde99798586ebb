"""Log-probabilities of drawn tokens and of the likeliest ones, for the rows that ask.

Pure functions, on the device thread, on a GPU's lazy arrays or on values that a CPU has computed
(the kit says which). They are the log-softmax over the whole vocabulary of the processed logits,
before any filter and temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..plans import TokenLogprobs
from .selection import Kit

FEW = (16, 64)
"""How many of the likeliest are looked up, so that a row's figures do not depend on its company."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Figures of the rows at ``places``, of which each asked for ``counts`` alternatives.

    Attributes:
        chosen: float32 [A].
        ids, likeliest: [A, N] in falling order, None when nobody asked for alternatives.
    """

    places: tuple[int, ...]
    counts: tuple[int, ...]
    chosen: Any
    ids: Any = None
    likeliest: Any = None

    @property
    def arrays(self) -> list[mx.array]:
        """What is still to be computed."""
        held = (self.chosen, self.ids, self.likeliest)
        return [array for array in held if isinstance(array, mx.array)]

    def read(self) -> dict[int, TokenLogprobs]:
        """The figures by place in the batch; waits for them."""
        chosen = self.chosen.tolist()
        empty: list[list[Any]] = [[]] * len(chosen)
        ids = empty if self.ids is None else self.ids.tolist()
        likeliest = empty if self.likeliest is None else self.likeliest.tolist()
        return {
            place: TokenLogprobs(
                chosen[index],
                tuple(zip(ids[index][:count], likeliest[index][:count], strict=True)),
            )
            for index, (place, count) in enumerate(zip(self.places, self.counts, strict=True))
        }


def score(kit: Kit, logits: Any, tokens: Any, wanted: Sequence[tuple[int, int]]) -> Scores:
    """Figures for ``wanted`` pairs of a place in the batch and a number of alternatives.

    Args:
        logits: float32 [B, V].
        tokens: [B], the drawn ids.
    """
    xp = kit.xp
    places, counts = zip(*wanted, strict=True)
    picked = xp.array(places)
    x = logits[picked]
    x -= xp.max(x, axis=-1, keepdims=True)
    mass = xp.log(xp.sum(xp.exp(x), axis=-1, keepdims=True))
    chosen = (xp.take_along_axis(x, tokens[picked][:, None], axis=-1) - mass)[:, 0]
    if not any(counts):
        return Scores(places, counts, chosen)
    few = next(few for few in FEW if max(counts) <= few)
    values, ids = kit.best(x, min(few, x.shape[-1]))
    return Scores(places, counts, chosen, ids, values - mass)
