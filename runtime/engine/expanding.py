"""Quantized weights that are expanded for a step of many rows, on CUDA.

MLX's quantized product there costs almost as much again for every row, where expanding a weight and
multiplying it on the tensor cores costs the same for all. From how many rows on, and what memory
that takes, is measured at load. Runs on the device thread; owns those figures.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

_ROWS = (4, 8, 16, 32, 64)
_REPEATS = 4


@dataclass(frozen=True, slots=True)
class Expanding:
    """What came of it. ``many``: from so many rows on weights are expanded; infinity = never.

    ``nbytes``: what a step's expanded weights take at once, at the most.
    """

    many: float = math.inf
    nbytes: int = 0


class ExpandingLinear(nn.QuantizedLinear):
    """A QuantizedLinear that expands its weight for ``many`` rows or more."""

    many: float = math.inf

    def __call__(self, x: mx.array) -> mx.array:
        if x.size < self.many * x.shape[-1]:
            return super().__call__(x)
        made = _multiplied(self, x)
        return made + self.bias if "bias" in self else made


class ExpandingEmbedding(nn.QuantizedEmbedding):
    """A QuantizedEmbedding that does so as an output layer."""

    many: float = math.inf

    def as_linear(self, x: mx.array) -> mx.array:
        """Logits [..., V] of ``x`` [..., K]."""
        if x.size < self.many * x.shape[-1]:
            made: mx.array = super().as_linear(x)
            return made
        return _multiplied(self, x)


_EXPANDING: dict[type, type] = {
    nn.QuantizedLinear: ExpandingLinear,
    nn.QuantizedEmbedding: ExpandingEmbedding,
}


def expanded(module: Any) -> mx.array:
    """The weight [N, K] of a quantized module in the type of its scales."""
    return mx.dequantize(
        module.weight,
        module.scales,
        module.get("biases"),
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
    )


def may_expand(modules: Iterable[nn.Module]) -> bool:
    """Whether there are weights that a step of many rows may expand on this machine."""
    on_cuda = mx.cuda.is_available() and mx.default_device() == mx.gpu
    return on_cuda and any(type(module) is nn.QuantizedLinear for module in modules)


def expand_for_many(modules: Iterable[nn.Module]) -> Expanding:
    """Make the quantized ones of these modules expanding ones where that is faster."""
    found: list[Any] = [module for module in modules if type(module) in _EXPANDING]
    if not may_expand(found):
        return Expanding()
    linear = [module for module in found if type(module) is nn.QuantizedLinear]
    many = faster_from(max(linear, key=_size))
    if many == math.inf:
        return Expanding()
    for module in found:
        module.__class__, module.many = _EXPANDING[type(module)], many
    return Expanding(many, _taken(found, int(many)))


def _size(module: Any) -> int:
    return int(module.weight.size)


def faster_from(module: Any) -> float:
    """The least number of rows from which expanding wins each time."""
    best = math.inf
    for rows in reversed(_ROWS):
        x = _input(module, rows)
        if _seconds(partial(_multiplied, module, x)) >= _seconds(partial(module, x)):
            break
        best = rows
    return best


def _taken(modules: list[Any], rows: int) -> int:
    """Bytes that one step's expanded weights take at once: as many as MLX lets lie about."""
    inputs = [_input(module, rows) for module in modules]
    mx.eval([module.parameters() for module in modules])
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    # Each product waits for the one before and is used up, as in a step.
    total = mx.zeros(())
    for module, x in zip(modules, inputs, strict=True):
        total = _multiplied(module, x + total.astype(x.dtype)).sum()
    mx.eval(total)
    return max(0, int(mx.get_peak_memory()) - int(before))


def _input(module: Any, rows: int) -> mx.array:
    inner = module.weight.shape[1] * 32 // module.bits
    x = mx.ones((rows, 1, inner), module.scales.dtype)
    mx.eval(x)
    return x


def _multiplied(module: Any, x: mx.array) -> mx.array:
    return x @ expanded(module).T


def _seconds(product: Callable[[], mx.array]) -> float:
    """The least of some runs; the first compiles."""
    taken: list[float] = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        mx.eval(product(), product())
        taken.append(time.perf_counter() - began)
    return min(taken)
