"""A model with the adapters of a step's rows in it.

A :class:`View` puts stand-ins into the model's modules while it is entered and takes them out
again; a :class:`Mixture` is what a replayed step needs to know of its rows instead. Runs on the
device thread, while a step's graph is built. Knows adapters and the order of rows, not who they
are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from .adapter_files import Adapter
from .adapter_layers import (
    AdaptedEmbedding,
    AdaptedExperts,
    AdaptedLinear,
    Blend,
    Residuals,
    Routing,
    Shares,
    Takers,
    Term,
    TracedShares,
)
from .adapter_stacks import Site, Stacks, place_of, table
from .fusing import product_of

Chain: TypeAlias = tuple[Adapter, ...]
"""The adapters of one row, in order."""


class View:
    """The model with residuals in it while entered; ``residuals`` by where they belong."""

    def __init__(self, model: nn.Module, residuals: Mapping[Site, Residuals]) -> None:
        self._residuals = residuals
        self._places: list[tuple[Callable[[Any], None], Any, Any]] = []
        self._embeddings: dict[str, AdaptedEmbedding] = {}
        self._routings: dict[str, Routing] = {}
        for names in dict.fromkeys(site.names for site in residuals):
            self._adapt(model, names)

    def __enter__(self) -> None:
        for put, _, stand_in in self._places:
            put(stand_in)

    def __exit__(self, *_: object) -> None:
        for put, module, _ in self._places:
            put(module)

    def was_head(self, name: str) -> bool:
        """Whether an embedding was used as the output layer."""
        return self._embeddings[name].was_head

    def _adapt(self, model: nn.Module, names: tuple[str, ...]) -> None:
        name = names[0]
        residuals = self._residuals.get(Site(names, "pairs"))
        container, key = place_of(model, name)
        module = container[key]
        product = product_of(module)
        put = partial(operator.setitem, container, key)
        if isinstance(residuals, Blend) and product is not None:
            joint = AdaptedLinear(product.joint, residuals)
            self._places.append((partial(setattr, product, "joint"), product.joint, joint))
        elif isinstance(module, (nn.Linear, nn.QuantizedLinear)):
            self._places.append((put, module, AdaptedLinear(module, residuals)))
        elif isinstance(module, (nn.Embedding, nn.QuantizedEmbedding)):
            head = self._residuals.get(Site(names, "heads"))
            stand_in = self._embeddings[name] = AdaptedEmbedding(module, residuals, head)
            self._places.append((put, module, stand_in))
        else:
            routing = self._routing(model, name.rpartition(".")[0])
            self._places.append((put, module, AdaptedExperts(module, residuals, routing)))

    def _routing(self, model: nn.Module, name: str) -> Routing:
        if name not in self._routings:
            container, key = place_of(model, name)
            module = container[key]
            self._routings[name] = routing = Routing(module)
            if isinstance(module, (SwitchGLU, SwitchMLP)):
                self._places.append((partial(operator.setitem, container, key), module, routing))
        return self._routings[name]


class Mixture:
    """The adapters of a replayed step's rows: what the trace is for, and what goes into it."""

    def __init__(self, model: nn.Module, chains: Sequence[Chain], stacks: Stacks) -> None:
        self._model = model
        self._stacks = stacks
        self._num_rows = len(chains)
        shares = Shares(stacks.counts(chains))
        self._shares = [shares.by_row(*spans) for spans in stacks.spans]

    @property
    def pattern(self) -> str:
        """Mixtures of one pattern, and of as many rows, replay the same trace."""
        return self._stacks.pattern

    @property
    def arrays(self) -> list[mx.array]:
        """All weights that some row may take, and how much of them each does."""
        return [*self._shares, *self._stacks.arrays]

    def shown(self, arrays: Sequence[mx.array]) -> View:
        """The model with such ``arrays`` in it, of this mixture or of another like it."""
        count = len(self._shares)
        given = dict(zip(self._stacks.spans, arrays[:count], strict=True))
        shares = TracedShares(self._num_rows, given)
        stacks = self._stacks.sites(arrays[count:])
        return View(self._model, {site: Blend(shares, stack) for site, stack in stacks.items()})


def blended(model: nn.Module, chains: Sequence[Chain], stacks: Stacks) -> View:
    """The model with the adapters of ``chains``, one chain a row, whatever they are."""
    shares = Shares(stacks.counts(chains))
    return View(model, {site: Blend(shares, stack) for site, stack in stacks.sites().items()})


def alike(model: nn.Module, chains: Sequence[Chain]) -> View:
    """The same for rows that all have one chain or none, without a copy of any weight."""
    takers = Takers([bool(chain) for chain in chains])
    (chain,) = {chain for chain in chains if chain}
    residuals: dict[Site, Residuals] = {}
    for use in ("pairs", "heads"):
        for name in dict.fromkeys(name for adapter in chain for name in table(adapter, use)):
            tables = (table(adapter, use) for adapter in chain)
            terms = tuple(Term(takers, pairs[name]) for pairs in tables if name in pairs)
            residuals[Site((name,), use)] = terms
    return View(model, residuals)
