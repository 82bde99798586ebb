"""A model with the adapters of a step's rows in it, and the stacks that rows choose from.

A :class:`View` puts stand-ins into the model's modules while it is entered and takes them out
again. Runs on the device thread, while a step's graph is built. Knows adapters and the order of
rows, not who they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from .adapter_files import Adapter
from .adapter_layers import (
    AdaptedEmbedding,
    AdaptedExperts,
    AdaptedLinear,
    Choice,
    Pair,
    Routing,
    Stack,
    Term,
    Terms,
)

Chain: TypeAlias = tuple[Adapter, ...]
"""The adapters of one row, in order."""
Part: TypeAlias = Literal["pairs", "heads"]


class Stacks:
    """Pairs of several adapters by module, stacked when first asked for.

    Does not keep its adapters alive; once one of them is gone, what was stacked is too.
    """

    def __init__(self, adapters: Sequence[Adapter]) -> None:
        made: dict[tuple[str, Part], Stack] = {}
        # A bound method would make a cycle, and the stacks would outlive their owner.
        self._adapters = [
            weakref.ref(adapter, lambda _: made.clear()) for adapter in dict.fromkeys(adapters)
        ]
        self._made = made

    @property
    def alive(self) -> list[Adapter]:
        """Its adapters that still are, in order."""
        return [adapter for ref in self._adapters if (adapter := ref()) is not None]

    def hold(self, adapters: Sequence[Adapter]) -> bool:
        """Whether these are among its adapters, and none of those is gone."""
        alive = self.alive
        return len(alive) == len(self._adapters) and set(adapters) <= set(alive)

    def stack(self, name: str, part: Part, *, of_experts: bool) -> Stack:
        """The pairs of a module, in the order of those adapters that have one."""
        if (stack := self._made.get((name, part))) is None:
            tables = (_table(adapter, part) for adapter in self.alive)
            pairs = [table[name] for table in tables if name in table]
            stack = self._made[name, part] = Stack(pairs, of_experts=of_experts)
        return stack


class View:
    """The model with the adapters of ``chains`` in it, one chain a row, while entered.

    ``stacked`` gives stacks that hold the adapters of all chains; it is asked only for rows that
    differ in theirs.
    """

    def __init__(
        self,
        model: nn.Module,
        chains: tuple[Chain, ...],
        stacked: Callable[[tuple[Chain, ...]], Stacks],
    ) -> None:
        self._chains = chains
        adapters = list(dict.fromkeys(adapter for chain in chains for adapter in chain))
        differ = len({chain for chain in chains if chain}) > 1
        self._stacks = stacked(chains) if differ else None
        self._order = adapters if self._stacks is None else self._stacks.alive
        self._choices: dict[tuple[Adapter, ...], list[Choice]] = {}
        self._places: list[tuple[Any, Any, Any, Any]] = []
        self._embeddings: dict[str, AdaptedEmbedding] = {}
        self._routings: dict[str, Routing] = {}
        names = (n for adapter in adapters for n in (*adapter.pairs, *adapter.heads))
        for name in dict.fromkeys(names):
            self._replace(model, name, partial(self._stand_in, model, name))

    def __enter__(self) -> None:
        for container, key, _, stand_in in self._places:
            container[key] = stand_in

    def __exit__(self, *_: object) -> None:
        for container, key, module, _ in self._places:
            container[key] = module

    def was_head(self, name: str) -> bool:
        """Whether an embedding was used as the output layer."""
        return self._embeddings[name].was_head

    def _replace(self, model: nn.Module, name: str, make: Callable[[Any], Any]) -> Any:
        container, key = _place_of(model, name)
        module = container[key]
        stand_in = make(module)
        self._places.append((container, key, module, stand_in))
        return stand_in

    def _stand_in(self, model: nn.Module, name: str, module: Any) -> Any:
        if isinstance(module, (nn.Linear, nn.QuantizedLinear)):
            return AdaptedLinear(module, self._terms(name, "pairs"))
        if isinstance(module, (nn.Embedding, nn.QuantizedEmbedding)):
            terms, head = self._terms(name, "pairs"), self._terms(name, "heads")
            stand_in = self._embeddings[name] = AdaptedEmbedding(module, terms, head)
            return stand_in
        terms = self._terms(name, "pairs", of_experts=True)
        return AdaptedExperts(module, terms, self._routing(model, name.rpartition(".")[0]))

    def _routing(self, model: nn.Module, name: str) -> Routing:
        if name not in self._routings:
            container, key = _place_of(model, name)
            routing = self._routings[name] = Routing(container[key])
            if isinstance(container[key], (SwitchGLU, SwitchMLP)):
                self._replace(model, name, lambda _: routing)
        return self._routings[name]

    def _terms(self, name: str, part: Part, *, of_experts: bool = False) -> Terms:
        having = tuple(adapter for adapter in self._order if name in _table(adapter, part))
        terms: list[Term] = []
        for choice in self._chosen(having):
            if len(choice.chosen) == 1:
                terms.append(Term(choice, _table(having[choice.chosen[0]], part)[name]))
            else:
                assert self._stacks is not None
                stack = self._stacks.stack(name, part, of_experts=of_experts)
                terms.append(Term(choice, None, stack))
        return tuple(terms)

    def _chosen(self, having: tuple[Adapter, ...]) -> list[Choice]:
        """What the rows take of these adapters: each row's first, each row's second, and so on."""
        if having not in self._choices:
            place = {adapter: number for number, adapter in enumerate(having)}
            taken = [[place[a] for a in chain if a in place] for chain in self._chains]
            self._choices[having] = [
                Choice([one[turn] if turn < len(one) else None for one in taken])
                for turn in range(max(map(len, taken)))
            ]
        return self._choices[having]


def _table(adapter: Adapter, part: Part) -> Mapping[str, Pair]:
    return adapter.pairs if part == "pairs" else adapter.heads


def _place_of(model: Any, name: str) -> tuple[Any, Any]:
    """The container of a module, and its key there."""
    *path, last = name.split(".")
    container = model
    for part in path:
        container = container[int(part)] if isinstance(container, list) else container[part]
    return container, int(last) if isinstance(container, list) else last
