"""Drives a scheduler core, a prefix core and the scripted device by hand: no trio, no clock."""

from __future__ import annotations

from collections import deque
from itertools import count
from typing import Any

from mlx_troupe.actors.testing import Script, ScriptedDevice
from mlx_troupe.runtime.adapter_table import AdapterTable, Loaded
from mlx_troupe.runtime.adapters import AdapterInfo
from mlx_troupe.runtime.model_info import ModelInfo
from mlx_troupe.runtime.plans import RowId, SnapshotId, StepDone, StepId, StepPlan
from mlx_troupe.runtime.prefix.entries import namespace_of
from mlx_troupe.runtime.prefix.index import PrefixCore
from mlx_troupe.runtime.requests import FinishReason, Sampling
from mlx_troupe.runtime.scheduling.core import SchedulerCore
from mlx_troupe.runtime.scheduling.effects import (
    Discard,
    Effect,
    LookUp,
    QueueFull,
    ReturnLease,
    RowBroken,
    RowEnded,
    RowEvent,
    RowSpec,
    Started,
    Store,
    TokenMade,
)

PLAIN = ModelInfo("plain", 1000, 4096, frozenset({0}), namespace="plain")
ROTATING = ModelInfo("rotating", 1000, 4096, frozenset({0}), trim_window=20, namespace="rotating")
FLOORED = ModelInfo("floored", 1000, 4096, frozenset({0}), trim_floor=20, namespace="floored")
RECURRENT = ModelInfo(
    "recurrent",
    1000,
    4096,
    frozenset({0}),
    batchable=False,
    lone_reason="its state is recurrent",
    trim_window=0,
    ragged_prefill=False,
    namespace="recurrent",
)


def mixed(ids: tuple[int, ...]) -> int:
    """A script that depends on the whole row and ends it now and then."""
    return (sum(ids) * 31 + len(ids) * 17 + ids[-1] * 5) % 13


def solo(spec: RowSpec, model: ModelInfo, script: Script) -> tuple[list[int], FinishReason]:
    """What a row must say, computed for it alone."""
    tokens: list[int] = []
    while len(tokens) < spec.limit:
        tokens.append(script((*spec.prompt, *tokens)))
        if tokens[-1] in model.eos_ids | spec.stop_ids:
            return tokens, FinishReason.STOP
    return tokens, FinishReason.LENGTH


class Rig:
    """Performs a core's effects as the actors would, and checks every event on the way."""

    def __init__(
        self,
        model: ModelInfo = PLAIN,
        script: Script = mixed,
        *,
        batch: int = 4,
        queue: int = 4,
        budget: int = 100_000,
        prefill_token_seconds: float = 0.0005,
        kv_limit: int | None = None,
    ) -> None:
        self.model = model
        self.script = script
        self.device = ScriptedDevice(model, script, prefill_token_seconds=prefill_token_seconds)
        self.cache = PrefixCore(budget)
        self.budget = budget
        self.kv_limit = kv_limit
        self.adapters = AdapterTable((), Loaded)
        self._revisions = count(1)
        snapshots, steps = count(1), count()
        self.core = SchedulerCore(
            batch=batch,
            queue=queue,
            cache=budget > 0,
            new_snapshot=lambda: SnapshotId(next(snapshots)),
            new_step=lambda: StepId(next(steps)),
            kv_limit=lambda _: kv_limit,
            resolve=self.adapters.resolve,
        )
        self.lookups: deque[LookUp] = deque()
        self.specs: dict[RowId, RowSpec] = {}
        self.said: dict[RowId, list[RowEvent]] = {}
        self.cancelled: set[RowId] = set()
        self.shortened: list[RowId] = []
        self.stored: list[Store] = []
        self.refused: list[QueueFull] = []
        self._rows = count(1)
        self.device.open()
        self.perform(self.core.ready(model))

    # ---- what happens ---------------------------------------------------------------------

    def submit(
        self,
        prompt: tuple[int, ...],
        limit: int = 4,
        stop_ids: frozenset[int] = frozenset(),
        adapters: tuple[str, ...] | None = None,
        matcher: Any = None,
    ) -> RowId | None:
        """A new row; None when the queue refused it. Does not plan yet."""
        row = RowId(next(self._rows))
        spec = RowSpec(row, prompt, Sampling(), limit, stop_ids, adapters, matcher)
        result = self.core.submit(spec)
        if isinstance(result, QueueFull):
            self.refused.append(result)
            return None
        self.specs[spec.row] = spec
        self.said[spec.row] = []
        self.perform(result)
        return spec.row

    def cancel(self, row: RowId) -> None:
        """The client has gone."""
        if not self.is_over(row):
            self.cancelled.add(row)
        self.perform(self.core.cancel(row))

    def answer(self, *, miss: bool = False) -> None:
        """The prefix cache answers its oldest lookup."""
        asked = self.lookups.popleft()
        limits: dict[str, Any] = {
            "trim_window": self.model.trim_window,
            "trim_floor": self.model.trim_floor,
        }
        hit = None
        if not miss:
            namespace = namespace_of(self.model.namespace, asked.adapters)
            hit = self.cache.lookup(asked.ids, namespace, **limits)
        self.perform(self.core.found(asked.row, hit))

    def plan(self) -> list[StepPlan]:
        """Launch every step that the core wants now."""
        self.perform(self.core.reselect())
        plans: list[StepPlan] = []
        while (planned := self.core.plan()) is not None:
            plans.append(self._launch(*planned))
        return plans

    def plan_one(self) -> StepPlan:
        """Launch the next step, of which there must be one."""
        self.perform(self.core.reselect())
        planned = self.core.plan()
        assert planned is not None, "there is nothing to plan"
        return self._launch(*planned)

    def _launch(self, plan: StepPlan, effects: tuple[Effect, ...]) -> StepPlan:
        for start in plan.start:
            wanted = self.adapters.resolve(self.specs[start.row].adapters)
            assert start.adapters == wanted, "a row starts with what its ids stood for before"
        self.device.launch(plan)
        self.perform(effects)
        return plan

    def settle(self) -> StepDone:
        """The oldest step under way ends."""
        done = self.device.settle()
        self.perform(self.core.settled(done))
        return done

    def lose_device(self) -> None:
        """Everything on the device is gone, and with it what the index knew."""
        self.device.close()
        self.perform(self.core.device_lost("the device broke"))
        self.cache = PrefixCore(self.budget)

    def ready(self) -> None:
        """The device has loaded its model, and the adapters that belong to it."""
        for info in self.adapters.mounted.values():
            self.device.mounted[info.revision] = info
        self.perform(self.core.ready(self.model))

    def mount(self, adapter_id: str) -> None:
        """New content under an id, as the adapters' actor does it: the device first."""
        revision = f"revision {next(self._revisions)}"
        info = AdapterInfo(adapter_id, "/nowhere", revision, 1, 1.0, 1, 1, 1)
        if self.core.model is not None:
            self.device.mounted[revision] = info
        self.adapters.put(info)
        self._unmount_retired()

    def unmount(self, adapter_id: str) -> None:
        """An id stands for nothing any more."""
        self.adapters.remove(adapter_id)
        self._unmount_retired()

    def _unmount_retired(self) -> None:
        for revision in self.adapters.retired:
            self.device.unmount(revision)
            self.adapters.freed(revision)

    def lose_cache(self) -> None:
        """The index crashed; it is empty, and what it held is released."""
        snapshots = self.cache.snapshots()
        self.cache = PrefixCore(self.budget)
        self.core.cache_lost()
        self.device.release(snapshots)

    def step(self) -> StepDone | None:
        """Answer, plan, and settle one step: None when nothing was left to do."""
        while self.lookups:
            self.answer()
        self.plan()
        if self.lookups and not self.core.in_flight:
            # A row that was about to start had to ask again.
            return self.step()
        return self.settle() if self.core.in_flight else None

    def drain(self) -> None:
        """Go on until nothing happens any more, then check that nothing was left behind."""
        if self.core.model is None:
            self.ready()
        while self.step() is not None:
            self.check()
        self.check()
        assert not self.core.everyone(), "rows are left"
        assert not self.device.rows, "rows are left on the device"
        assert self.cache.stats().leases == 0, "a lease was not returned"
        assert set(self.device.snapshots) == set(self.cache.snapshots()), "a state leaked"
        for row in self.said:
            assert self.is_over(row) or row in self.cancelled, "a row ended without a word"

    # ---- what must hold -------------------------------------------------------------------

    def tokens(self, row: RowId) -> list[int]:
        """Tokens that a row has said so far."""
        return [event.token for event in self.said[row] if isinstance(event, TokenMade)]

    def cached(self, row: RowId) -> int:
        """What the row's last Started said about its prompt."""
        return [e.cached_tokens for e in self.said[row] if isinstance(e, Started)][-1]

    def is_over(self, row: RowId) -> bool:
        """Whether the row has said its last word."""
        return any(isinstance(event, RowEnded | RowBroken) for event in self.said[row])

    def check(self) -> None:
        """Invariants of both cores."""
        self.core.check_integrity()
        self.cache.check_integrity()

    def perform(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            match effect:
                case Started() | TokenMade() | RowEnded() | RowBroken():
                    self._hear(effect)
                case LookUp():
                    self.lookups.append(effect)
                case Store():
                    self._store(effect)
                case ReturnLease(lease, taken):
                    self.device.release(self.cache.end_lease(lease, taken=taken))
                case Discard(snapshot):
                    self.device.release((snapshot,))

    def _hear(self, event: RowEvent) -> None:
        said, spec = self.said[event.row], self.specs[event.row]
        assert event.row not in self.cancelled, "a cancelled row spoke"
        assert not self.is_over(event.row), "a row spoke after its last word"
        said.append(event)
        tokens, reason = solo(spec, self.model, self.script)
        made = self.tokens(event.row)
        match event:
            case Started():
                assert all(isinstance(e, Started) for e in said), "a row started in the midst"
                assert len(said) <= 2, "a row started over twice"
            case TokenMade():
                assert isinstance(said[0], Started), "a token came before the start"
                assert made == tokens[: len(made)], "a row's tokens are not those of it alone"
            case RowEnded(_, FinishReason.LENGTH) if self.kv_limit and len(made) < len(tokens):
                self.shortened.append(event.row)
            case RowEnded():
                assert self.tokens(event.row) == tokens, "a row ended early"
                assert event.reason is reason
            case RowBroken():
                pass

    def _store(self, store: Store) -> None:
        self.stored.append(store)
        assert self.device.snapshots[store.snapshot] == store.ids, "a state is not that of its ids"
        result = self.cache.put(
            store.ids,
            namespace_of(self.model.namespace, store.adapters),
            store.snapshot,
            store.nbytes,
            kind=store.kind,
            trim_window=self.model.trim_window,
        )
        self.device.release(result.release)
