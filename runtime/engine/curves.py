"""Curves that clients draw through points, from the log-probabilities of a model to those drawn by.

Pure functions, on the device thread. Between its points a curve is cubic, smooth, and never falls
where they do not (Fritsch and Butland's slopes: harmonic means of the sides'); beyond the outer
points it goes on straight. Points that lie on a line make that line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..curves import Points
from .selection import Kit

LOWEST = -2000.0
"""Twice as far below the best token as a point may lie; what is lower counts as this."""


@dataclass(frozen=True, slots=True)
class Curves:
    """The rows' curves as sums of what each piece rises up to a place.

    ``ends`` [N, 5]: the first point's x and slope, the last one's, and the rise from the first
    point to 0. ``pieces``, [N, 5] each: where one begins, how long it is, and the factors of t, t²
    and t³ within it; rows with fewer points have pieces of no length.
    """

    ends: Any
    pieces: tuple[Any, ...]


def curves_of(kit: Kit, rows: Sequence[Points]) -> Curves:
    """Curves of rows; each has two points or more, x rising."""
    slopes = [_slopes(points) for points in rows]
    both = list(zip(rows, slopes, strict=True))
    ends = [
        (p[0][0], m[0], p[-1][0], m[-1], p[-1][1] - p[0][1] - m[-1] * p[-1][0]) for p, m in both
    ]
    pieces = [[_piece(*s) for s in zip(pairwise(p), pairwise(m), strict=True)] for p, m in both]
    longest = max(map(len, pieces))
    padded = [row + [(0.0,) * 5] * (longest - len(row)) for row in pieces]

    def array(values: Sequence[Sequence[float]]) -> Any:
        return kit.xp.array(values, dtype=kit.xp.float32)

    return Curves(array(ends), tuple(map(array, zip(*padded, strict=True))))


def transfer(kit: Kit, x: Any, curves: Curves) -> Any:
    """What the rows' curves make of ``x`` [N, V], which is at most 0; the best token's 0 stays."""
    xp = kit.xp
    first, fall, last, rise, whole = _columns(curves.ends)
    u = xp.maximum(x, LOWEST)
    y = xp.minimum(u - first, 0) * fall + xp.maximum(u - last, 0) * rise - whole
    for piece in curves.pieces:
        start, length, slope, square, cube = _columns(piece)
        t = xp.clip(u - start, 0, length)
        y = y + t * (slope + t * (square + t * cube))
    return y


def _columns(table: Any) -> list[Any]:
    return [table[:, i : i + 1] for i in range(table.shape[1])]


def _slopes(points: Points) -> list[float]:
    """One for each point: of the outer ones that of their side, of the others the sides' mean."""
    lengths = [after[0] - before[0] for before, after in pairwise(points)]
    rises = [after[1] - before[1] for before, after in pairwise(points)]
    sides = [rise / length for rise, length in zip(rises, lengths, strict=True)]
    between = [
        _mean(*pair, *weights)
        for pair, weights in zip(pairwise(sides), pairwise(lengths), strict=True)
    ]
    return [sides[0], *between, sides[-1]]


def _mean(left: float, right: float, left_length: float, right_length: float) -> float:
    if left <= 0 or right <= 0:
        return 0.0
    a, b = left_length + 2 * right_length, 2 * left_length + right_length
    return (a + b) / (a / left + b / right)


def _piece(
    points: tuple[tuple[float, float], tuple[float, float]], slopes: tuple[float, float]
) -> tuple[float, ...]:
    (x0, y0), (x1, y1) = points
    m0, m1 = slopes
    h = x1 - x0
    side = (y1 - y0) / h
    return x0, h, m0, (3 * side - 2 * m0 - m1) / h, (m0 + m1 - 2 * side) / (h * h)
