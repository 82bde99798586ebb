"""Curves that clients draw through points, as plain values.

What they do to log-probabilities is ``engine/curves.py``'s.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TypeAlias

Points: TypeAlias = tuple[tuple[float, float], ...]
"""Where a curve of the client's own leads through: log-probabilities relative to the best token's,
before and after, in nats; see :func:`fault_of`."""

MAX_POINTS = 16
LOWEST_POINT = -1000.0
NEAREST_POINTS = 0.01


def fault_of(points: Points) -> str | None:
    """What keeps them from being a curve, in words."""
    if not 2 <= len(points) <= MAX_POINTS:
        return f"must have 2 to {MAX_POINTS} points, not {len(points)}"
    if not all(LOWEST_POINT <= value <= 0 for point in points for value in point):
        return f"figures must be between {LOWEST_POINT:g} and 0"
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(points)]
    if not all(across >= NEAREST_POINTS for across, _ in steps):
        return f"each point must lie at least {NEAREST_POINTS} to the right of the one before"
    return None if all(up >= 0 for _, up in steps) else "must not fall from one point to the next"
