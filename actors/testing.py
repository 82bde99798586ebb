"""The test kit that ships: a scripted device, for virtual time.

With it and ``inline_worker.py``, scheduler, cache, supervision and HTTP run on pytest-trio's
autojump clock without MLX and without a thread. ``ScriptedDevice`` keeps the device's contract
strictly and raises when a plan breaks it, so a test fails where the fault is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from mlx_troupe.runtime.adapter_fit import AdapterTarget, fit
from mlx_troupe.runtime.adapters import AdapterInfo, inspect_adapter
from mlx_troupe.runtime.device import DeviceStats
from mlx_troupe.runtime.model_info import ModelInfo
from mlx_troupe.runtime.plans import (
    Cold,
    FromRow,
    FromSnapshot,
    RowFailed,
    RowId,
    Sampled,
    SnapshotId,
    SnapshotMade,
    SnapshotSkipped,
    StartRow,
    StepDone,
    StepPlan,
    TokenLogprobs,
)
from mlx_troupe.runtime.text.matching import MatchFailed, TokenMatcher

from .scripted_states import ScriptedStates

Call: TypeAlias = Literal["open", "launch", "settle"]
Script = Callable[[tuple[int, ...]], int]
"""The next token after all ids of a row so far."""


def count_up(ids: tuple[int, ...]) -> int:
    """A script that never ends by itself: the last id plus one, within 1 … 999."""
    return ids[-1] % 999 + 1


@dataclass(slots=True)
class ScriptedRow:
    """A row's state is simply its ids: what was processed, and what was sampled."""

    prompt: tuple[int, ...]
    state: tuple[int, ...]
    adapters: tuple[str, ...] = ()
    matcher: TokenMatcher | None = None
    sampled: list[int] = field(default_factory=list)
    logprobs: int | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and everything sampled."""
        return self.prompt + tuple(self.sampled)

    def figures(self, token: int, vocab_size: int) -> TokenLogprobs | None:
        """A token's log-probability is its place in the row, below 0; others follow by 0.5."""
        if self.logprobs is None:
            return None
        chosen = -float(len(self.ids))
        others = [(token + n) % vocab_size for n in range(self.logprobs)]
        return TokenLogprobs(chosen, tuple((i, chosen - n / 2) for n, i in enumerate(others)))

    def follow(self, token: int) -> tuple[int, bool]:
        """The first allowed token from ``token`` on, around the vocabulary; whether it ends all."""
        if self.matcher is None:
            return token, False
        allowed = self.matcher.allowed()
        token = next((other for other in allowed if other >= token), allowed[0])
        ends = self.matcher.take(token)
        if ends:
            self.matcher = None
        return token, ends


class ContractBroken(AssertionError):
    """A plan that the device's contract does not allow."""


class ScriptedDevice(ScriptedStates):
    """A device whose model is a Python function and whose time is an argument.

    Args:
        model: what it claims to be.
        script: the model.
        decode_seconds, prefill_token_seconds, open_seconds: what things cost in virtual time.

    Faults to order: ``fail_next`` is raised once, by the next call or by the next one that
    ``fail_on`` names; rows in ``poisoned`` fail at their first decode.

    Adapters change nothing that it says. Any readable adapter folder can be mounted, unless
    ``targets`` names the modules that the model claims to have.
    """

    def __init__(
        self,
        model: ModelInfo | None = None,
        script: Script = count_up,
        *,
        decode_seconds: float = 0.01,
        prefill_token_seconds: float = 0.0005,
        open_seconds: float = 0.0,
    ) -> None:
        super().__init__(model or ModelInfo("scripted", 1000, 4096, frozenset({0}), namespace="s"))
        self.script = script
        self.decode_seconds = decode_seconds
        self.prefill_token_seconds = prefill_token_seconds
        self.open_seconds = open_seconds
        self.rows: dict[RowId, ScriptedRow] = {}
        self.plans: list[StepPlan] = []
        self.opened = 0
        self.fail_next: Exception | None = None
        self.fail_on: Call | None = None
        self.poisoned: set[RowId] = set()
        self.targets: tuple[AdapterTarget, ...] = ()
        self.mounted: dict[str, AdapterInfo] = {}
        self._under_way: deque[StepDone] = deque()
        self._seen: set[RowId] = set()
        self._failed: set[RowId] = set()

    def open(self) -> ModelInfo:
        """Always succeeds, unless ``fail_next`` is set."""
        self._maybe_fail("open")
        self.opened += 1
        return self.model

    def launch(self, plan: StepPlan) -> None:
        """Carry the plan out at once and remember its result for :meth:`settle`."""
        self._maybe_fail("launch")
        if len(self._under_way) >= 2:
            raise ContractBroken("three steps under way")
        self.plans.append(plan)
        failed: list[RowFailed] = []
        kept = tuple(self._keep(keep.row, keep.length, keep.snapshot) for keep in plan.keep)
        for start in plan.start:
            self._start(start, failed)
        for row in plan.end:
            if self.rows.pop(row, None) is None and row not in self._failed:
                raise ContractBroken(f"row {row} ended and is not there")
        for part in plan.prefill:
            self._prefill(part.row, part.count, failed)
        sampled: list[Sampled] = []
        for row in plan.decode:
            self._decode(row, sampled, failed)
        tokens = sum(part.count for part in plan.prefill)
        seconds = tokens * self.prefill_token_seconds + bool(plan.decode) * self.decode_seconds
        self._under_way.append(StepDone(plan.step, seconds, tuple(sampled), tuple(failed), kept))

    def overlaps(self, plan: StepPlan) -> bool:
        """Always: a step's result is there when it is launched."""
        return True

    def push(self) -> None:
        """Nothing is left to begin."""

    def settle(self) -> StepDone:
        """The oldest result."""
        self._maybe_fail("settle")
        return self._under_way.popleft()

    def seconds(self) -> float:
        """What the oldest step under way costs in virtual time."""
        return self._under_way[0].seconds if self._under_way else 0.0

    def drop_rows(self) -> None:
        """Forget rows, steps under way and the states they were about to report."""
        for done in self._under_way:
            self.release(tuple(kept.snapshot for kept in done.kept))
        self._under_way.clear()
        self.rows.clear()

    def mount(self, adapter_id: str, path: Path) -> AdapterInfo:
        """Read the folder as the real device does; every byte on disk is one in memory."""
        found = inspect_adapter(path)
        if self.targets:
            fit(found, {target.name: target for target in self.targets})
        size, layers = found.size_bytes, len(found.modules)
        self.mounted[found.revision] = info = AdapterInfo(
            adapter_id, str(path), found.revision, found.rank, found.scale, layers, size, size
        )
        return info

    def unmount(self, revision: str) -> int:
        """Forget a revision; rows keep what they started with."""
        info = self.mounted.pop(revision, None)
        return 0 if info is None else info.mounted_layers

    def adapter_targets(self) -> tuple[AdapterTarget, ...]:
        """Whatever ``targets`` says."""
        return self.targets

    def stats(self) -> DeviceStats:
        """Counts; every id counts as one byte, and nothing else takes any."""
        held = self.snapshot_bytes
        live = sum(len(row.state) for row in self.rows.values())
        return DeviceStats(
            active_bytes=held + live,
            kv_bytes=live,
            snapshot_bytes=held,
            rows=len(self.rows),
            batched_rows=len(self.rows),
            snapshots=len(self.snapshots),
            most_snapshot_bytes=self.most_snapshot_bytes,
        )

    def idle(self) -> None:
        """Nothing to give back."""

    def close(self) -> None:
        """Forget everything."""
        self.drop_rows()
        self.snapshots.clear()
        self.arriving.clear()
        self.made_with.clear()
        self.mounted.clear()

    def _maybe_fail(self, call: Call) -> None:
        if self.fail_on not in (None, call):
            return
        error, self.fail_next = self.fail_next, None
        if error is not None:
            raise error

    def _keep(
        self, row_id: RowId, length: int, snapshot: SnapshotId
    ) -> SnapshotMade | SnapshotSkipped:
        if row_id in self._failed:
            return SnapshotSkipped(snapshot, "no such row")
        row = self.rows.get(row_id)
        if row is None:
            raise ContractBroken(f"row {row_id} is kept and is not there")
        if length > len(row.state):
            raise ContractBroken(f"row {row_id} has {len(row.state)} tokens, not {length}")
        held = len(row.state)
        if length < held - 1 and not self.model.can_trim(held):
            return SnapshotSkipped(snapshot, "cannot be cut")
        if length < self.model.trim_floor <= held:
            return SnapshotSkipped(snapshot, "cannot be cut")
        if not self.has_room(length):
            return SnapshotSkipped(snapshot, "there is no room for it", length)
        return self.keep_state(snapshot, row.state[:length], row.adapters)

    def _start(self, start: StartRow, failed: list[RowFailed]) -> None:
        if start.row in self._seen - self._failed:
            raise ContractBroken(f"row id {start.row} was used before")
        self._seen.add(start.row)
        self._failed.discard(start.row)
        if missing := [name for name in start.adapters if name not in self.mounted]:
            self._fail(start.row, f"adapters {missing} are not mounted", failed)
            return
        made_with = start.adapters
        match start.source:
            case Cold():
                state: tuple[int, ...] = ()
            case FromSnapshot(snapshot, length):
                if snapshot not in self.snapshots:
                    raise ContractBroken(f"snapshot {snapshot} is not there")
                state = self._cut(self.snapshots[snapshot], length)
                made_with = self.made_with[snapshot]
            case FromRow(donor, length):
                if donor in self._failed:
                    # Planned before the donor's failure was known.
                    self._fail(start.row, "the row that it starts from is gone", failed)
                    return
                if donor not in self.rows:
                    raise ContractBroken(f"row {donor} is not there to start from")
                state = self._cut(self.rows[donor].state, length)
                made_with = self.rows[donor].adapters
        if state != start.ids[: len(state)] or len(state) >= len(start.ids):
            raise ContractBroken(f"row {start.row} starts from a state that is not its prefix")
        if made_with != start.adapters:
            raise ContractBroken(f"row {start.row} starts from a state of other adapters")
        self.rows[start.row] = ScriptedRow(
            start.ids, state, start.adapters, start.matcher, logprobs=start.logprobs
        )

    def _cut(self, state: tuple[int, ...], length: int) -> tuple[int, ...]:
        if length > len(state):
            raise ContractBroken("a source is shorter than what was asked of it")
        if not self.model.can_cut(len(state), length):
            raise ContractBroken("a source that cannot be cut was cut")
        return state[:length]

    def _fail(
        self, row_id: RowId, reason: str, failed: list[RowFailed], param: str | None = None
    ) -> None:
        self.rows.pop(row_id, None)
        self._failed.add(row_id)
        failed.append(RowFailed(row_id, reason, param))

    def _prefill(self, row_id: RowId, count: int, failed: list[RowFailed]) -> None:
        if row_id in self._failed:
            self._fail(row_id, "no such row", failed)
            return
        row = self.rows[row_id]
        end = len(row.state) + count
        if count < 1 or end >= len(row.prompt):
            raise ContractBroken(f"row {row_id} cannot prefill {count} more tokens")
        row.state = row.prompt[:end]

    def _decode(self, row_id: RowId, sampled: list[Sampled], failed: list[RowFailed]) -> None:
        if row_id in self._failed:
            self._fail(row_id, "no such row", failed)
            return
        row = self.rows.get(row_id)
        if row is None:
            raise ContractBroken(f"row {row_id} decodes and is not there")
        if len(row.state) != len(row.ids) - 1:
            raise ContractBroken(f"row {row_id} decodes before its prompt is processed")
        if row_id in self.poisoned:
            self._fail(row_id, "poisoned", failed)
            return
        try:
            token, ends = row.follow(self.script(row.ids))
        except MatchFailed as error:
            self._fail(row_id, str(error), failed, error.param)
            return
        row.state = row.ids
        row.sampled.append(token)
        sampled.append(Sampled(row_id, token, ends, row.figures(token, self.model.vocab_size)))
