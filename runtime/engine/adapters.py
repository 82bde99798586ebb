"""The mounted adapters of a model, and the model as a step's rows see it.

Owns which revisions are mounted, and the stacks out of which rows with different adapters take
their pairs. Rows hold on to what they use, so that an unmounted adapter lives as long as its last
row. A step without an adapter runs the model as it was loaded; otherwise the modules that its
rows' adapters change are replaced while the step's graph is built, and no longer. Runs on the
device thread, never waits but to load. Knows no requests and no namespaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from ..adapter_fit import AdapterTarget
from ..adapters import AdapterInfo
from ..errors import AdapterError
from .adapter_files import Adapter, load_adapter, targets_of
from .adapter_stacks import Stacks
from .adapter_views import Chain, Mixture, View, alike, blended

__all__ = ["Adapters", "Chain", "Mixture"]

_MAX_VIEWS = 4
"""Views kept for the next step: one for decoding, others for chunks of long prompts."""
_MAX_MIXTURES = 2
"""Mixtures kept for the next step; they are small and soon made."""
_STAYS_FOR = 16
"""Batches of another make-up for which an adapter stays stacked that none of them uses."""
_TRIAL_TOKENS = 64
"""Enough for experts to be sorted, and different from the trial's rows."""


class Adapters:
    """Mounts adapters and shows the model with those of a step's rows."""

    def __init__(self, model: nn.Module, *, together: bool) -> None:
        self._model = model
        self._trial_rows = 2 if together else 1
        self._targets = targets_of(model)
        self._mounted: dict[str, Adapter] = {}
        self._stacks = Stacks(model, ())
        self._batches = 0
        self._last_used: WeakKeyDictionary[Adapter, int] = WeakKeyDictionary()
        self._views: dict[tuple[Chain, ...], View] = {}
        self._mixtures: dict[tuple[Chain, ...], Mixture] = {}

    @property
    def targets(self) -> tuple[AdapterTarget, ...]:
        """The modules that can be adapted."""
        return tuple(self._targets.values())

    @property
    def are_gone(self) -> bool:
        """No adapter is mounted, and no row has one of those that were."""
        return not (self._mounted or self._stacks.alive)

    def mount(self, adapter_id: str, path: Path) -> AdapterInfo:
        """Load a folder and try it on the model. Raises AdapterError; then nothing has changed."""
        adapter = load_adapter(self._model, self._targets, adapter_id, path)
        if (known := self._mounted.get(adapter.info.revision)) is not None:
            return replace(known.info, id=adapter_id, path=adapter.info.path)
        self._try(adapter)
        self._mounted[adapter.info.revision] = adapter
        return adapter.info

    def unmount(self, revision: str) -> int:
        """Rows that start from now on cannot have it. Returns how many modules it changed."""
        adapter = self._mounted.pop(revision, None)
        self.forget()
        return 0 if adapter is None else adapter.info.mounted_layers

    def chain(self, revisions: Sequence[str]) -> Chain:
        """The adapters of a new row. Raises AdapterError for one that is not mounted."""
        missing = [revision for revision in revisions if revision not in self._mounted]
        if missing:
            raise AdapterError(f"adapter {missing[0]} is not mounted")
        return tuple(self._mounted[revision] for revision in revisions)

    def shown(self, chains: Sequence[Chain]) -> AbstractContextManager[object]:
        """The model with each row's adapters, in the order of its batch axis, while entered."""
        if not any(chains):
            return nullcontext()
        key = tuple(chains)
        if (view := self._views.get(key)) is None:
            _make_room(self._views, _MAX_VIEWS)
            differ = len({chain for chain in chains if chain}) > 1
            view = blended(self._model, key, self._stacked(key)) if differ else None
            view = self._views[key] = view or alike(self._model, key)
        return view

    def mixture(self, chains: Sequence[Chain]) -> Mixture | None:
        """The adapters of a replayed step's rows, which are none or all given as arrays."""
        if not any(chains):
            return None
        key = tuple(chains)
        if (mixture := self._mixtures.get(key)) is None:
            _make_room(self._mixtures, _MAX_MIXTURES)
            mixture = self._mixtures[key] = Mixture(self._model, key, self._stacked(key))
        return mixture

    def forget(self) -> None:
        """A row with adapters is gone, or an adapter is: nothing kept may hold on to it."""
        self._views.clear()
        self._mixtures.clear()

    def rest(self) -> None:
        """Nothing is running: drop what can be made again."""
        self.forget()
        self._stacks = Stacks(self._model, ())

    def _stacked(self, chains: tuple[Chain, ...]) -> Stacks:
        """Stacks that hold these rows' adapters.

        Those of before stay in, as steps alternate, until half of all have not been used for long.
        """
        wanted = [adapter for chain in chains for adapter in chain]
        self._batches += 1
        self._last_used.update(dict.fromkeys(wanted, self._batches))
        alive = self._stacks.alive
        used = [a for a in alive if self._batches - self._last_used[a] < _STAYS_FOR]
        if not self._stacks.hold(wanted) or 2 * len(used) <= len(alive):
            # Views and mixtures of before would keep the old stacks.
            self.forget()
            self._stacks = Stacks(self._model, [*used, *wanted])
        return self._stacks

    def _try(self, adapter: Adapter) -> None:
        """Build the graph of a pass, of which nothing is computed: shapes are checked by that."""
        chains: tuple[Chain, ...] = ((adapter,), ())[: self._trial_rows]
        experts = any(self._targets[name].kind == "experts" for name in adapter.pairs)
        model: Any = self._model
        stacks = Stacks(model, [adapter])
        views = [alike(model, chains), blended(model, chains, stacks)]
        for view, length in product(views, (1, _TRIAL_TOKENS if experts else 3)):
            tokens = mx.zeros((len(chains), length), mx.uint32)
            try:
                with view:
                    model(tokens, cache=make_prompt_cache(model))
            except Exception as error:
                message = f"{adapter.info.path} cannot be used with this model: {error}"
                raise AdapterError(message) from error
            only_heads = adapter.heads.keys() - adapter.pairs.keys()
            if missing := [name for name in only_heads if not view.was_head(name)]:
                raise AdapterError(
                    f"{adapter.info.path} changes the output layer, "
                    f"which {missing[0]} is not in this model"
                )


def _make_room(kept: dict[tuple[Chain, ...], Any], most: int) -> None:
    while len(kept) >= most:
        del kept[next(iter(kept))]
