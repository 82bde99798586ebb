"""Layers with low-rank residuals: what stands in for a model's modules in a step.

A stand-in computes the module's own result first and adds to it. Where all rows that have adapters
have the same ones, it adds ``scale · ((x · a) · b)`` in mlx-lm's order of operations, and rows
without keep their bits. Where rows differ, the pairs of all adapters lie side by side as one pair
of all their ranks, and between its two products each row keeps only the columns of its own
adapters: three kernels in a trace, whatever the rows take. A row that keeps none adds zeros, which
changes no number. Runs on the device thread. Knows columns of stacks, not adapters, rows or
folders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from .adapter_pairs import Pair, Span, Stack, Traced


class Takers:
    """Which rows of a step take a pair. Shared by all layers of a step."""

    def __init__(self, takes: Sequence[bool]) -> None:
        self.num_rows = len(takes)
        self.is_total = all(takes)
        self._takes = np.array(takes)
        self._made: dict[tuple[int, int], mx.array] = {}

    def mask(self, length: int, ndim: int) -> mx.array:
        """bool [length, 1, …] with ``ndim`` axes; ``length`` is a multiple of the rows."""
        key = length, ndim
        if key not in self._made:
            taken = np.repeat(self._takes, _repeats(length, self.num_rows))
            self._made[key] = mx.array(taken.reshape(length, *[1] * (ndim - 1)))
        return self._made[key]


class Shares:
    """How much of each column of a stack each row of a step takes. Shared by all its layers.

    ``counts`` [rows, adapters] says how often a row takes an adapter.
    """

    def __init__(self, counts: Sequence[Sequence[int]]) -> None:
        self._counts = np.array(counts, np.float32)
        self._made: dict[object, mx.array] = {}

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return len(self._counts)

    def by_row(self, spans: tuple[Span, ...], width: int) -> mx.array:
        """float32 [rows, width]."""
        key = spans, width
        if key not in self._made:
            shares = np.zeros((self.num_rows, width), np.float32)
            first = 0
            for adapter, rank, scale in spans:
                shares[:, first : first + rank] = self._counts[:, adapter, None] * scale
                first += rank
            self._made[key] = mx.array(shares)
        return self._made[key]

    def like(self, z: mx.array, spans: tuple[Span, ...]) -> mx.array:
        """In the type of ``z`` [length, …, width] and of a shape that goes with it."""
        length, width = z.shape[0], z.shape[-1]
        key = spans, z.dtype, length, z.ndim, width
        if key not in self._made:
            shares = self.by_row(spans, width).astype(z.dtype)
            if (repeats := _repeats(length, self.num_rows)) > 1:
                shares = mx.repeat(shares, repeats, axis=0)
            self._made[key] = shares.reshape(length, *[1] * (z.ndim - 2), width)
        return self._made[key]


class TracedShares(Shares):
    """The same within a trace, out of arrays [rows, width] that come with each replay."""

    def __init__(self, num_rows: int, given: dict[tuple[tuple[Span, ...], int], mx.array]) -> None:
        super().__init__([[]] * num_rows)
        for key, shares in given.items():
            self._made[key] = shares


@dataclass(frozen=True, slots=True)
class Term:
    """A residual that all rows have in common which have any."""

    takers: Takers
    pair: Pair

    def added(self, y: mx.array, z: mx.array, dtype: mx.Dtype) -> mx.array:
        """``y`` + scale · ``z`` where a row takes it, ``y`` to the bit elsewhere."""
        total = y + (self.pair.scale * z).astype(dtype)
        if self.takers.is_total:
            return total
        return mx.where(self.takers.mask(y.shape[0], y.ndim), total, y)


@dataclass(frozen=True, slots=True)
class Blend:
    """Residuals of rows that differ."""

    shares: Shares
    stack: Stack | Traced

    def own(self, z: mx.array) -> mx.array:
        """``z`` [length, …, width] with each row's own columns, as much of them as it takes."""
        return _weighted(z, self.shares.like(z, self.stack.spans))


Residuals = tuple[Term, ...] | Blend | None


class AdaptedLinear:
    """Stands in for a linear layer, or for a joint product of several."""

    def __init__(self, base: Any, residuals: Residuals) -> None:
        self._base = base
        self._residuals = residuals

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self._base(x)
        match self._residuals:
            case Blend() as blend:
                y = _plus(y, blend.own(_flat(x) @ blend.stack.a), blend.stack.b)
            case terms:
                for term in terms or ():
                    y = term.added(y, (x @ term.pair.a) @ term.pair.b, x.dtype)
        return y


class AdaptedEmbedding:
    """Stands in for an embedding, also where it is the output layer (``head``)."""

    def __init__(self, base: Any, residuals: Residuals, head: Residuals) -> None:
        self._base = base
        self._residuals = residuals
        self._head = head
        self.was_head = False

    def __call__(self, ids: mx.array) -> mx.array:
        y: mx.array = self._base(ids)
        match self._residuals:
            case Blend() as blend:
                y = _plus(y, blend.own(blend.stack.a[ids.flatten()]), blend.stack.b)
            case terms:
                for term in terms or ():
                    y = term.added(y, term.pair.a[ids] @ term.pair.b, y.dtype)
        return y

    def as_linear(self, x: mx.array) -> mx.array:
        """Logits of ``x``."""
        self.was_head = True
        y: mx.array = self._base.as_linear(x)
        match self._head:
            case Blend() as blend:
                y = _plus(y, blend.own(_flat(x) @ blend.stack.b.T), blend.stack.a.T)
            case terms:
                for term in terms or ():
                    y = term.added(y, (x @ term.pair.b.T) @ term.pair.a.T, x.dtype)
        return y


class Routing:
    """Stands in for the module that sends tokens to experts, and remembers whose tokens they are.

    With many tokens mlx-lm sorts them by expert, and the layers of experts no longer see rows.
    """

    def __init__(self, base: Any) -> None:
        self._base = base
        self._indices: mx.array | None = None
        self._owners: dict[int, mx.array] = {}

    def __call__(self, x: mx.array, indices: mx.array, *rest: Any, **options: Any) -> Any:
        self._indices = indices
        self._owners.clear()
        try:
            return self._base(x, indices, *rest, **options)
        finally:
            self._indices = None
            self._owners.clear()

    def owners(self, num_rows: int) -> mx.array:
        """The row of each of the sorted tokens, uint32 [tokens · experts of each]."""
        if self._indices is None:
            raise ValueError("tokens are sorted by expert, and their rows are not known")
        if num_rows not in self._owners:
            of_row = self._indices.size // num_rows
            self._owners[num_rows] = mx.argsort(self._indices.flatten()) // of_row
        return self._owners[num_rows]


class AdaptedExperts:
    """Stands in for a layer of stacked experts."""

    def __init__(self, base: Any, residuals: Residuals, routing: Routing) -> None:
        self._base = base
        self._residuals = residuals
        self._routing = routing

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        y: mx.array = self._base(x, indices, sorted_indices=sorted_indices)
        match self._residuals:
            case Blend() as blend:
                z = _of_experts(x, blend.stack.a, indices, sorted_indices)
                z = self._own_sorted(blend, z) if sorted_indices else blend.own(z)
                y = y + _of_experts(z, blend.stack.b, indices, sorted_indices).astype(y.dtype)
            case terms:
                for term in terms or ():
                    z = _of_experts(x, term.pair.a, indices, sorted_indices)
                    z = _of_experts(z, term.pair.b, indices, sorted_indices)
                    is_mixed = sorted_indices and not term.takers.is_total
                    y = self._added_sorted(term, y, z) if is_mixed else term.added(y, z, x.dtype)
        return y

    def _own_sorted(self, blend: Blend, z: mx.array) -> mx.array:
        owners = self._routing.owners(blend.shares.num_rows)
        shares = blend.shares.by_row(blend.stack.spans, z.shape[-1]).astype(z.dtype)[owners]
        return _weighted(z, shares.reshape(z.shape[0], *[1] * (z.ndim - 2), z.shape[-1]))

    def _added_sorted(self, term: Term, y: mx.array, z: mx.array) -> mx.array:
        takers = term.takers
        taken = takers.mask(takers.num_rows, 1)[self._routing.owners(takers.num_rows)]
        total = y + (term.pair.scale * z).astype(y.dtype)
        return mx.where(taken.reshape(-1, *[1] * (y.ndim - 1)), total, y)


def _repeats(length: int, num_rows: int) -> int:
    repeats, rest = divmod(length, num_rows)
    if rest:
        raise ValueError(f"an adapted layer takes {length} inputs of {num_rows} rows")
    return repeats


def _weighted(z: mx.array, shares: mx.array) -> mx.array:
    """``z`` · ``shares``, and 0 where a row takes nothing, even of what is not finite."""
    return mx.where(shares == 0, 0, shares * z)


def _flat(x: mx.array) -> mx.array:
    """``x`` [n, width]: without this MLX's ``addmm`` takes one product a row on a CPU."""
    return x.flatten(0, -2)


def _plus(y: mx.array, z: mx.array, b: mx.array) -> mx.array:
    """``y`` + ``z`` [n, width] · ``b`` in the type and shape of ``y``."""
    flat, same = _flat(y), y.dtype == z.dtype == b.dtype
    made = mx.addmm(flat, z, b) if same else flat + (z @ b).astype(y.dtype)
    return made.reshape(y.shape)


def _of_experts(x: mx.array, halves: mx.array, indices: mx.array, is_sorted: bool) -> mx.array:
    return mx.gather_mm(x, halves.swapaxes(-1, -2), rhs_indices=indices, sorted_indices=is_sorted)
