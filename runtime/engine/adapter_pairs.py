"""Low-rank pairs, and those of several adapters for one module side by side as one.

Values and how they are laid out; nothing is computed with them here. Runs on the device thread.
Knows numbers of adapters, not adapters, modules or rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

_LEAST_WIDTH = 16


@dataclass(frozen=True, slots=True)
class Pair:
    """A low-rank pair in mlx-lm's shapes.

    A linear layer's: ``a`` [inputs, rank], ``b`` [rank, outputs]. Experts': ``a`` [experts, rank,
    inputs], ``b`` [experts, outputs, rank]. An embedding's: ``a`` [vocabulary, rank], ``b`` [rank,
    width].
    """

    a: mx.array
    b: mx.array
    scale: float


class Span(NamedTuple):
    """Columns of a stack that are one adapter's: its number, how many, and what they count."""

    adapter: int
    rank: int
    scale: float


class Part(NamedTuple):
    """A pair on its way into a stack.

    ``before`` and ``behind`` are outputs of the stack's module that are not the pair's.
    """

    adapter: int
    pair: Pair
    before: int = 0
    behind: int = 0


class Stack:
    """Several pairs of one module side by side: a pair whose rank is all of theirs.

    The rank is filled up to a power of two with zeros, so that a step's shape says little about
    who takes part. ``spans`` say whose columns are whose.
    """

    def __init__(self, parts: Sequence[Part], *, of_experts: bool) -> None:
        self.spans = tuple(Span(p.adapter, _rank(p.pair, of_experts), p.pair.scale) for p in parts)
        used = sum(span.rank for span in self.spans)
        self.width = max(_LEAST_WIDTH, 1 << (used - 1).bit_length())
        in_a, in_b = (1, 2) if of_experts else (1, 0)
        self.a = _filled(mx.concatenate([p.pair.a for p in parts], in_a), in_a, self.width)
        self.b = _filled(mx.concatenate([_widened(p) for p in parts], in_b), in_b, self.width)


class Traced:
    """A stack within a trace: other arrays of the same shapes, and the same columns."""

    def __init__(self, stack: Stack | Traced, a: mx.array, b: mx.array) -> None:
        self.spans: tuple[Span, ...] = stack.spans
        self.width: int = stack.width
        self.a, self.b = a, b


def _rank(pair: Pair, of_experts: bool) -> int:
    return int(pair.b.shape[2 if of_experts else 0])


def _widened(part: Part) -> mx.array:
    """A pair's second half with outputs of zeros around its own."""
    b = part.pair.b
    if not (part.before or part.behind):
        return b
    return mx.pad(b, [(0, 0), (part.before, part.behind)])


def _filled(array: mx.array, axis: int, width: int) -> mx.array:
    missing = width - array.shape[axis]
    if not missing:
        return mx.contiguous(array)
    return mx.pad(array, [(0, missing if n == axis else 0) for n in range(array.ndim)])
