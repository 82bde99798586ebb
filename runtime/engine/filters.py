"""The sampler chain: which tokens stay, how much they weigh, and which one is drawn.

Pure functions over rows that need the same filters, each row with its own parameters; on the device
thread, on a GPU's arrays or on values that a CPU has computed (the kit says which). The order is
mlx-lm's: top-p, min-p, XTC, top-k, temperature. HLG stands in for the temperature; a curve of the
client's comes before it.

Scores ``x`` are float32 [N, V] log-probabilities relative to the row's best token, so at most 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..requests import Hlg, Sampling
from .curves import Curves, curves_of, transfer
from .randomness import pick
from .selection import Kit

FEW = (64, 256)
"""Up to the last of these, a top-k is drawn from that many best tokens instead of all."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What rows need of the sampler; a filter that a row does not ask for does nothing to it.

    ``few`` is the number of best tokens that hold all that may be drawn, 0 = the vocabulary.
    """

    top_p: bool
    min_p: bool
    xtc: bool
    top_k: bool
    few: int
    hlg: bool
    curve: bool

    def coarse(self) -> Needs:
        """What must be equal for rows to be drawn together with all the filters of both."""
        xtc = self.few > 0 and self.xtc
        return Needs(False, False, xtc, False, self.few, self.hlg, self.curve)

    def __or__(self, other: Needs) -> Needs:
        return Needs(
            self.top_p or other.top_p,
            self.min_p or other.min_p,
            self.xtc or other.xtc,
            self.top_k or other.top_k,
            max(self.few, other.few),
            self.hlg or other.hlg,
            self.curve or other.curve,
        )


def needs_of(sampling: Sampling, vocab_size: int) -> Needs:
    """What one row needs."""
    straight = sampling.hlg is None and sampling.curve is None
    top_k = 0 < sampling.top_k < vocab_size and straight
    fits = [few for few in FEW if sampling.top_k <= few < vocab_size]
    return Needs(
        top_p=0 < sampling.top_p < 1 and straight,
        min_p=sampling.min_p > 0,
        xtc=sampling.xtc_probability > 0,
        top_k=top_k,
        few=fits[0] if top_k and fits else 0,
        hlg=bends(sampling.hlg),
        curve=sampling.curve is not None,
    )


def bends(hlg: Hlg | None) -> bool:
    """Whether a curve differs from a straight line, which is a temperature."""
    return hlg is not None and (hlg.shoulder > 0 or hlg.toe > 0)


@dataclass(frozen=True, slots=True)
class Parameters:
    """The rows' parameters, [N, 1] each, and ``removable`` [V]: what XTC may remove.

    ``drawn`` are there if all rows have curves of their own.
    """

    temperature: Any
    top_p: Any
    log_min_p: Any
    top_k: Any
    xtc_threshold: Any
    xtc_probability: Any
    width: Any
    shoulder: Any
    toe: Any
    pivot: Any
    removable: Any
    drawn: Curves | None


def parameters_of(kit: Kit, rows: Sequence[Sampling], removable: Any) -> Parameters:
    """Arrays of the rows' parameters, with values that do nothing for filters that are off."""
    vocab_size = removable.shape[0]
    needs = [needs_of(s, vocab_size) for s in rows]

    def column(values: Sequence[float]) -> Any:
        return kit.xp.array([[value] for value in values], dtype=kit.xp.float32)

    curves = [s.hlg or Hlg() for s in rows]
    drawn = [s.curve for s in rows if s.curve is not None]
    return Parameters(
        temperature=column([s.temperature for s in rows]),
        top_p=column([s.top_p if n.top_p else 2.0 for s, n in zip(rows, needs, strict=True)]),
        log_min_p=column([math.log(s.min_p) if s.min_p > 0 else -math.inf for s in rows]),
        top_k=kit.xp.array(
            [[s.top_k if n.top_k else vocab_size] for s, n in zip(rows, needs, strict=True)]
        ),
        xtc_threshold=column([s.xtc_threshold for s in rows]),
        xtc_probability=column([s.xtc_probability or -1.0 for s in rows]),
        width=column([c.width for c in curves]),
        shoulder=column([c.shoulder for c in curves]),
        toe=column([c.toe for c in curves]),
        pivot=column([c.pivot_offset for c in curves]),
        removable=removable,
        drawn=curves_of(kit, drawn) if len(drawn) == len(rows) else None,
    )


def choose(kit: Kit, needs: Needs, x: Any, rows: Parameters, numbers: Any) -> Any:
    """One token id a row, [N]. ``numbers`` is [N, 2], uniform in [0, 1)."""
    xp = kit.xp
    if needs.few and not needs.xtc:
        values, ids = kit.best(x, needs.few)
        kept = _kept_of_few(kit, needs, x, values, rows)
        place = pick(xp, weigh(kit, needs, values, rows) * kept, numbers[:, :1])
        return xp.take_along_axis(ids, place, axis=-1)[:, 0]
    kept = kept_of_all(kit, needs, x, rows, numbers[:, 1:])
    if needs.few:
        values, ids = kit.best(xp.where(kept, x, -xp.inf), needs.few)
        weights = weigh(kit, needs, values, rows) * (xp.arange(needs.few) < rows.top_k)
        return xp.take_along_axis(ids, pick(xp, weights, numbers[:, :1]), axis=-1)[:, 0]
    weights = weigh(kit, needs, x, rows)
    return pick(xp, weights if kept is None else weights * kept, numbers[:, :1])[:, 0]


def weigh(kit: Kit, needs: Needs, x: Any, rows: Parameters) -> Any:
    """Unfiltered weights at the rows' temperature or on their curve; the best token weighs 1."""
    if needs.curve and rows.drawn is not None:
        weights = kit.xp.exp(transfer(kit, x, rows.drawn) / rows.temperature)
        # However flat the curve ends: what a grammar forbids is never drawn.
        return kit.xp.where(x > -kit.xp.inf, weights, 0)
    if not needs.hlg:
        return kit.xp.exp(x / rows.temperature)
    y = bend(kit, x, rows)
    return kit.xp.exp(y - bend(kit, kit.xp.zeros_like(x[:, :1]), rows))


def bend(kit: Kit, x: Any, rows: Parameters) -> Any:
    """The HLG curve: straight around the pivot, logarithmic beyond; smooth and rising.

    The pivot lies ``pivot`` below the best token. Within ``width`` of it the slope is 1/T; above,
    a shoulder, below, a toe bend off with that slope, the more slowly the larger they are; a
    shoulder or toe of 0 stays straight.
    """
    xp = kit.xp
    slope = 1 / rows.temperature
    u = x + rows.pivot
    straight = xp.clip(u, -rows.width, rows.width) * slope
    above = xp.maximum(u - rows.width, 0) * slope
    below = xp.maximum(-rows.width - u, 0) * slope
    return straight + _roll_off(xp, above, rows.shoulder) - _roll_off(xp, below, rows.toe)


def _roll_off(xp: Any, distance: Any, scale: Any) -> Any:
    safe = xp.maximum(scale, 1e-6)
    return xp.where(scale > 0, safe * xp.log1p(distance / safe), distance)


def kept_of_all(kit: Kit, needs: Needs, x: Any, rows: Parameters, number: Any) -> Any:
    """bool [N, V], or None where all tokens stay; a top-k that needs few tokens is left out.

    ``number`` [N, 1] decides whether XTC strikes.
    """
    xp = kit.xp
    kept = None
    p = xp.exp(x) if needs.top_p or needs.xtc else None
    if needs.top_p:
        mass = xp.sum(p, axis=-1, keepdims=True)
        kept = kit.cut_by_mass(x, p, rows.top_p * mass).kept
    if needs.min_p:
        likely = x >= rows.log_min_p
        kept = likely if kept is None else kept & likely
    if needs.xtc:
        p = p if kept is None else p * kept
        stays = ~_struck(xp, p, rows, number)
        kept = stays if kept is None else kept & stays
    if needs.top_k and not needs.few:
        left = x if kept is None else xp.where(kept, x, -xp.inf)
        best = _top_k(kit, left, rows.top_k)
        kept = best if kept is None else kept & best
    return kept


def _struck(xp: Any, p: Any, rows: Parameters, number: Any) -> Any:
    """What XTC removes: all tokens above the threshold but the least likely and the exempt."""
    above = p > rows.xtc_threshold * xp.sum(p, axis=-1, keepdims=True)
    # No weight exceeds 1, so of none above the threshold none is removed.
    least = xp.min(p + 2.0 * (1.0 - above), axis=-1, keepdims=True)
    return (p > least) & rows.removable & (number <= rows.xtc_probability)


def _top_k(kit: Kit, x: Any, top_k: Any) -> Any:
    """Exactly k stay: of several equal to the k-th, those with the lowest ids."""
    cut = kit.cut_by_count(x, top_k)
    above = cut.above
    room = top_k - kit.xp.sum(above, axis=-1, keepdims=True)
    tied = cut.tied
    nth = kit.xp.cumsum(tied.astype(kit.xp.int32), axis=-1)
    return above | (tied & (nth <= room))


def _kept_of_few(kit: Kit, needs: Needs, x: Any, values: Any, rows: Parameters) -> Any:
    """bool [N, few] for the best tokens' ``values``, in falling order."""
    xp = kit.xp
    kept = xp.arange(values.shape[-1]) < rows.top_k
    if needs.top_p:
        p = xp.exp(values)
        limit = rows.top_p * xp.sum(xp.exp(x), axis=-1, keepdims=True)
        above = xp.cumsum(p, axis=-1) - p
        last = xp.maximum(xp.sum(above < limit, axis=-1, keepdims=True) - 1, 0)
        kept = kept & (values >= xp.take_along_axis(values, last, axis=-1))
    if needs.min_p:
        kept = kept & (values >= rows.log_min_p)
    return kept
