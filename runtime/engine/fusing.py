"""Projections of one input as one matrix product: queries, keys and values; gate and up.

On a GPU a small matrix product costs more to launch than to compute. :func:`fuse_projections` puts
the weights of projections that always see the same input into one array, of which the modules keep
views, and lets the first of them to be called compute for all. The rest of the model does not
notice. Results may differ in the last bit, so that exact rows do without. :func:`turn_weights`
spares each product the view of its weight's transpose: a view costs the host half as much as a
kernel. Runs on the device thread, once, at load.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class JointProduct:
    """The joint product: remembers its result until the last sibling has taken its part."""

    def __init__(self, joint: nn.Module, ends: Sequence[int]) -> None:
        self.joint: Any = joint
        self._ends = list(ends)
        self._input: mx.array | None = None
        self._outputs: list[mx.array] | None = None

    def part(self, index: int, x: mx.array) -> mx.array:
        """What sibling ``index`` makes of ``x``."""
        if self._input is not x or self._outputs is None:
            parts: Any = mx.split(self.joint(x), self._ends[:-1], axis=-1)
            self._input, self._outputs = x, parts
        made = self._outputs[index]
        if index == len(self._ends) - 1:
            self._input = self._outputs = None
        return made

    def around(self, index: int) -> tuple[int, int]:
        """How many outputs lie before and behind those of sibling ``index``."""
        return self._ends[index - 1] if index else 0, self._ends[-1] - self._ends[index]


@dataclass(frozen=True, slots=True, eq=False)
class _Turned:
    """Views that a module holds without their being parameters: [K, N], and [1, K, N]."""

    weight: mx.array
    stacked: mx.array


class TurnedLinear(nn.Linear):
    """A Linear that holds a view of its weight's transpose."""

    def __call__(self, x: mx.array) -> mx.array:
        turned: _Turned = self.turned
        if "bias" in self:
            return mx.addmm(self.bias, x, turned.weight)
        # Of equal ranks, which spares a lone row's product two more views.
        return x @ (turned.stacked if x.ndim == 3 and x.shape[0] == 1 else turned.weight)


def turn_weights(modules: Iterable[nn.Module]) -> None:
    """Make the plain ones of these modules TurnedLinear ones; their weights stay as they are."""
    found: list[Any] = [module for module in modules if type(module) is nn.Linear]
    for module in found:
        turned = module.weight.T
        module.__class__, module.turned = TurnedLinear, _Turned(turned, turned[None])
    mx.eval([[module.turned.weight, module.turned.stacked] for module in found])


class _FusedLinear(nn.Linear):
    """A Linear that takes its part of a joint product."""

    def __call__(self, x: mx.array) -> mx.array:
        return self.product.part(self.index, x)


class _FusedQuantizedLinear(nn.QuantizedLinear):
    """The same for quantised weights."""

    def __call__(self, x: mx.array) -> mx.array:
        return self.product.part(self.index, x)


_FUSED: dict[type, type] = {
    nn.Linear: _FusedLinear,
    nn.QuantizedLinear: _FusedQuantizedLinear,
}


def fuse_projections(model: nn.Module) -> int:
    """Fuse what can be; returns how many joint products there are. Idempotent."""
    made = 0
    for module in model.modules():
        children = module.children()
        for names in SIBLINGS:
            parts = [children.get(name) for name in names]
            if all(type(part) in _FUSED for part in parts) and _are_alike(parts):
                _fuse(parts)
                made += 1
    return made


def joint_products(model: nn.Module) -> list[nn.Module]:
    """The modules that compute the joint products; the model's own modules do not name them."""
    fused: list[Any] = [m for m in model.modules() if type(m) in _FUSED.values()]
    return list({id(m.product): m.product.joint for m in fused}.values())


def product_of(module: Any) -> JointProduct | None:
    """The joint product that computes a module's part, if one does."""
    return module.product if type(module) in _FUSED.values() else None


def _are_alike(parts: Sequence[Any]) -> bool:
    kinds = {
        (type(p), *_settings(p), p.weight.dtype, p.weight.shape[1:], *sorted(p)) for p in parts
    }
    return len(kinds) == 1


def _settings(part: Any) -> tuple[Any, ...]:
    return tuple(getattr(part, name, None) for name in ("bits", "group_size", "mode"))


def _fuse(parts: Sequence[Any]) -> None:
    ends = list(accumulate(part.weight.shape[0] for part in parts))
    joint = _joined(parts)
    product = JointProduct(joint, ends)
    for index, part in enumerate(parts):
        first = ends[index - 1] if index else 0
        for name in part.parameters():
            part[name] = joint[name][first : ends[index]]
        part.product, part.index = product, index
        part.__class__ = _FUSED[type(part)]
    # Evaluated one at a time, so that no more than one pair of copies lives at once.
    mx.eval([array for part in parts for array in part.parameters().values()])


def _joined(parts: Sequence[Any]) -> nn.Module:
    """A module like the parts with all their outputs."""
    first = parts[0]
    kind: Any = type(first)
    joint: Any = dict.__new__(kind)
    nn.Module.__init__(joint)
    for name in first.parameters():
        joint[name] = mx.concatenate([part[name] for part in parts])
    for name in ("bits", "group_size", "mode"):
        if hasattr(first, name):
            setattr(joint, name, getattr(first, name))
    return joint
