"""Layers with low-rank residuals of several rows: what stands in for a model's modules in a step.

A stand-in computes the module's own result first, so that rows without an adapter keep their bits,
and adds ``scale · ((x · a) · b)`` in mlx-lm's order of operations. Rows with different adapters
take their pairs out of a stack, each by its index; where all take the same, none is needed. Runs
on the device thread. Knows places in stacks, not adapters, rows or folders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np


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


class Stack:
    """Several pairs of one module, padded with zeros to one rank, stacked on a new first axis."""

    def __init__(self, pairs: Sequence[Pair], *, of_experts: bool) -> None:
        rank_in_a, rank_in_b = (1, 2) if of_experts else (1, 0)
        self.a = mx.stack(_padded([pair.a for pair in pairs], rank_in_a))
        self.b = mx.stack(_padded([pair.b for pair in pairs], rank_in_b))
        self.scales = tuple(pair.scale for pair in pairs)


class Choice:
    """Which place of a stack each row takes, None for none. Shared by all layers of a step.

    ``chosen`` are the places that some row takes; ``is_total`` says that every row takes one.
    """

    def __init__(self, places: Sequence[int | None]) -> None:
        self.chosen = sorted({place for place in places if place is not None})
        self._places = np.array([place or 0 for place in places], np.uint32)
        self._has_one = np.array([place is not None for place in places])
        self.is_total = None not in places
        self._made: dict[object, mx.array] = {}

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return len(self._places)

    def places(self, length: int, ndim: int) -> mx.array:
        """uint32 [length, 1, …] with ``ndim`` axes; ``length`` is a multiple of the rows."""
        return self._spread("places", self._places, length, ndim)

    def mask(self, length: int, ndim: int) -> mx.array:
        """bool, of the same shape: the rows that take one."""
        return self._spread("mask", self._has_one, length, ndim)

    def scales(
        self, scales: tuple[float, ...], dtype: mx.Dtype, length: int, ndim: int
    ) -> mx.array:
        """``scales`` are the stack's; of the same shape."""
        values = np.array(scales, np.float32)[self._places]
        return self._spread((scales, dtype), values, length, ndim).astype(dtype)

    def _spread(self, what: object, values: Any, length: int, ndim: int) -> mx.array:
        key = what, length, ndim
        if key not in self._made:
            repeats, rest = divmod(length, self.num_rows)
            if rest:
                raise ValueError(f"an adapted layer takes {length} inputs of {self.num_rows} rows")
            spread = np.repeat(values, repeats).reshape(length, *[1] * (ndim - 1))
            self._made[key] = mx.array(spread)
        return self._made[key]


@dataclass(frozen=True, slots=True)
class Term:
    """One residual: every row's own, from ``stack``, or that of ``pair`` for all that take one."""

    choice: Choice
    pair: Pair | None
    stack: Stack | None = None

    def added(self, y: mx.array, z: mx.array, dtype: mx.Dtype) -> mx.array:
        """``y`` + scale · ``z`` where a row takes one, ``y`` to the bit elsewhere."""
        shape = y.shape[0], y.ndim
        if self.pair is not None:
            scaled = self.pair.scale * z
        else:
            assert self.stack is not None
            scaled = self.choice.scales(self.stack.scales, z.dtype, *shape) * z
        total = y + scaled.astype(dtype)
        return total if self.choice.is_total else mx.where(self.choice.mask(*shape), total, y)


Terms = tuple[Term, ...]


class AdaptedLinear:
    """Stands in for a linear layer."""

    def __init__(self, base: Any, terms: Terms) -> None:
        self._base = base
        self._terms = terms

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self._base(x)
        for term in self._terms:
            y = term.added(y, _product(term, x), x.dtype)
        return y


class AdaptedEmbedding:
    """Stands in for an embedding, also where it is the output layer (``head``)."""

    def __init__(self, base: Any, terms: Terms, head: Terms) -> None:
        self._base = base
        self._terms = terms
        self._head = head
        self.was_head = False

    def __call__(self, ids: mx.array) -> mx.array:
        y: mx.array = self._base(ids)
        for term in self._terms:
            y = term.added(y, _looked_up(term, ids), y.dtype)
        return y

    def as_linear(self, x: mx.array) -> mx.array:
        """Logits of ``x``."""
        self.was_head = True
        y: mx.array = self._base.as_linear(x)
        for term in self._head:
            y = term.added(y, _product_transposed(term, x), x.dtype)
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

    def __init__(self, base: Any, terms: Terms, routing: Routing) -> None:
        self._base = base
        self._terms = terms
        self._routing = routing

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        y: mx.array = self._base(x, indices, sorted_indices=sorted_indices)
        for term in self._terms:
            if sorted_indices and not (term.pair is not None and term.choice.is_total):
                y = self._added_sorted(term, y, x, indices)
            else:
                z = _product_of_experts(term, x, indices, sorted_indices)
                y = term.added(y, z, x.dtype)
        return y

    def _added_sorted(self, term: Term, y: mx.array, x: mx.array, indices: mx.array) -> mx.array:
        choice = term.choice
        owners = self._routing.owners(choice.num_rows)
        rows = choice.num_rows, 1
        if term.pair is not None:
            z = term.pair.scale * _through_experts(x, term.pair.a, term.pair.b, indices, True)
        else:
            assert term.stack is not None
            z = _from_stack(term.stack, x, choice.places(*rows)[owners], indices)
            scales = choice.scales(term.stack.scales, z.dtype, *rows)
            z = scales[owners].reshape(-1, 1, 1) * z
        total = y + z.astype(x.dtype)
        if choice.is_total:
            return total
        return mx.where(choice.mask(*rows)[owners].reshape(-1, 1, 1), total, y)


def _padded(arrays: Sequence[mx.array], axis: int) -> list[mx.array]:
    longest = max(array.shape[axis] for array in arrays)
    padded: list[mx.array] = []
    for array in arrays:
        widths = [(0, 0)] * array.ndim
        widths[axis] = (0, longest - array.shape[axis])
        padded.append(mx.pad(array, widths))
    return padded


def _product(term: Term, x: mx.array) -> mx.array:
    if term.pair is not None:
        return (x @ term.pair.a) @ term.pair.b
    assert term.stack is not None
    return _gathered(term, x, term.stack.a, term.stack.b)


def _product_transposed(term: Term, x: mx.array) -> mx.array:
    if term.pair is not None:
        return (x @ term.pair.b.T) @ term.pair.a.T
    assert term.stack is not None
    return _gathered(term, x, term.stack.b.swapaxes(1, 2), term.stack.a.swapaxes(1, 2))


def _gathered(term: Term, x: mx.array, first: mx.array, second: mx.array) -> mx.array:
    """``x`` · first · second with each row's own; ``x`` is [rows, …, tokens, width] or flat."""
    wide = x if x.ndim > 2 else x[:, None]
    places = term.choice.places(wide.shape[0], wide.ndim - 2)
    z = mx.gather_mm(wide, first, rhs_indices=places)
    z = mx.gather_mm(z, second, rhs_indices=places)
    return z if x.ndim > 2 else z[:, 0]


def _looked_up(term: Term, ids: mx.array) -> mx.array:
    if term.pair is not None:
        return term.pair.a[ids] @ term.pair.b
    assert term.stack is not None
    places = term.choice.places(ids.shape[0], ids.ndim)
    found = term.stack.a[places, ids]
    wide = found if found.ndim > 2 else found[:, None]
    of_rows = term.choice.places(ids.shape[0], max(1, ids.ndim - 1))
    z = mx.gather_mm(wide, term.stack.b, rhs_indices=of_rows)
    return z if found.ndim > 2 else z[:, 0]


def _product_of_experts(term: Term, x: mx.array, indices: mx.array, is_sorted: bool) -> mx.array:
    if term.pair is not None:
        return _through_experts(x, term.pair.a, term.pair.b, indices, is_sorted)
    assert term.stack is not None
    places = term.choice.places(indices.shape[0], indices.ndim)
    return _from_stack(term.stack, x, places, indices)


def _from_stack(stack: Stack, x: mx.array, places: mx.array, indices: mx.array) -> mx.array:
    chosen = (places * stack.a.shape[1] + indices).astype(mx.uint32)
    return _through_experts(x, stack.a.flatten(0, 1), stack.b.flatten(0, 1), chosen, False)


def _through_experts(
    x: mx.array, a: mx.array, b: mx.array, indices: mx.array, is_sorted: bool
) -> mx.array:
    z = mx.gather_mm(x, a.swapaxes(-1, -2), rhs_indices=indices, sorted_indices=is_sorted)
    return mx.gather_mm(z, b.swapaxes(-1, -2), rhs_indices=indices, sorted_indices=is_sorted)
