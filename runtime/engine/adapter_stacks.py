"""The pairs of several adapters side by side, module by module, for steps whose rows differ.

Owns the stacked weights and what can be said of them without their values. Runs on the device
thread. Knows adapters and a model's modules, not rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import mlx.core as mx

from .adapter_files import Adapter
from .adapter_pairs import Pair, Part, Stack, Traced
from .fusing import JointProduct, product_of

Use: TypeAlias = Literal["pairs", "heads"]


class Site(NamedTuple):
    """Where a stack belongs: a module, or several that one joint product computes."""

    names: tuple[str, ...]
    use: Use


class Stacks:
    """The stacks of these adapters for all modules that any of them changes.

    Does not keep its adapters alive; once one of them is gone, what was stacked is too.
    ``pattern`` says all that a step's graph depends on: two of the same pattern differ in the
    values of their arrays only.
    """

    def __init__(self, model: Any, adapters: Sequence[Adapter]) -> None:
        ordered = list(dict.fromkeys(adapters))
        made = {site: _stack(model, site, ordered) for site in _sites(model, ordered)}
        # A bound method would make a cycle, and the stacks would outlive their owner.
        self._adapters = [weakref.ref(adapter, lambda _: made.clear()) for adapter in ordered]
        self._stacks = made
        self.spans = list(dict.fromkeys((stack.spans, stack.width) for stack in made.values()))
        self.pattern = "\n".join(
            f"{site} {_shape(stack.a)} {_shape(stack.b)} "
            f"{self.spans.index((stack.spans, stack.width))}"
            for site, stack in made.items()
        )

    @property
    def alive(self) -> list[Adapter]:
        """Its adapters that still are, in order."""
        return [adapter for ref in self._adapters if (adapter := ref()) is not None]

    @property
    def arrays(self) -> list[mx.array]:
        """All stacked weights, in an order that the pattern tells."""
        return [array for stack in self._stacks.values() for array in (stack.a, stack.b)]

    def hold(self, adapters: Sequence[Adapter]) -> bool:
        """Whether these are among its adapters, and none of those is gone."""
        alive = self.alive
        return len(alive) == len(self._adapters) and set(adapters) <= set(alive)

    def counts(self, chains: Sequence[Sequence[Adapter]]) -> list[list[int]]:
        """[rows, adapters]: how often each row takes each."""
        return [[chain.count(adapter) for adapter in self.alive] for chain in chains]

    def sites(self, arrays: Sequence[mx.array] | None = None) -> Mapping[Site, Stack | Traced]:
        """The stacks, or these arrays in their places."""
        if arrays is None:
            return self._stacks
        halves = zip(self._stacks.items(), arrays[::2], arrays[1::2], strict=True)
        return {site: Traced(stack, a, b) for (site, stack), a, b in halves}


def table(adapter: Adapter, use: Use) -> Mapping[str, Pair]:
    """An adapter's pairs of one use."""
    return adapter.pairs if use == "pairs" else adapter.heads


def place_of(model: Any, name: str) -> tuple[Any, Any]:
    """The container of a module, and its key there."""
    *path, last = name.split(".")
    container = model
    for part in path:
        container = container[int(part)] if isinstance(container, list) else container[part]
    return container, int(last) if isinstance(container, list) else last


def module_of(model: Any, name: str) -> Any:
    """A module by its name."""
    container, key = place_of(model, name)
    return container[key]


def _sites(model: Any, adapters: Sequence[Adapter]) -> Iterator[Site]:
    """Every module that is changed, in an order that does not depend on the adapters' files."""
    uses: tuple[Use, ...] = ("pairs", "heads")
    for use in uses:
        joined: dict[object, list[str]] = {}
        for name in sorted({name for adapter in adapters for name in table(adapter, use)}):
            product = product_of(module_of(model, name))
            joined.setdefault(name if product is None else product, []).append(name)
        yield from (Site(tuple(names), use) for names in joined.values())


def _stack(model: Any, site: Site, adapters: Sequence[Adapter]) -> Stack:
    parts: list[Part] = []
    of_experts = False
    for name in site.names:
        module = module_of(model, name)
        before, behind = _around(module, product_of(module))
        pairs = [(n, table(adapter, site.use).get(name)) for n, adapter in enumerate(adapters)]
        found = [Part(n, pair, before, behind) for n, pair in pairs if pair is not None]
        of_experts = found[0].pair.a.ndim == 3
        parts += found
    return Stack(parts, of_experts=of_experts)


def _around(module: Any, product: JointProduct | None) -> tuple[int, int]:
    """Outputs of a joint product before and behind those of one of its modules."""
    return (0, 0) if product is None else product.around(module.index)


def _shape(array: mx.array) -> str:
    return f"{array.dtype} {array.shape}"
