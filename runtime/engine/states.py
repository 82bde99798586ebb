"""Where the state of a new row comes from, and where states are kept.

Owns the snapshots. Runs on the device thread and never waits. A state that several ask for in one
step (forks of one prompt, a fork and a snapshot) is copied once; each gets handles of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx.nn import Module
from mlx_lm.models.cache import make_prompt_cache

from ..device import (
    Cold,
    DeviceStats,
    FromRow,
    FromSnapshot,
    KeepRow,
    RowId,
    SnapshotId,
    SnapshotMade,
    SnapshotSkipped,
    StartRow,
)
from ..errors import StateRefused
from ..spill.state import HostLayer, HostState
from .adapters import Adapters
from .forward import Forward
from .hosting import Hosting
from .kvplan import KVPlan
from .lazy import start as start_computing
from .rows import Row
from .sampling import RowSampler
from .snapshots import CannotCut, Snapshots, arrays_of, clone_all, num_bytes


class States:
    """Makes rows and keeps snapshots for one model."""

    def __init__(
        self,
        model: Module,
        vocab_size: int,
        adapters: Adapters,
        plan: KVPlan,
        hosting: Hosting,
    ) -> None:
        self._model = model
        self._hosting = hosting
        self._plan = plan
        self._adapters = adapters
        self._vocab_size = vocab_size
        self._snapshots = Snapshots()
        self._made_with: dict[SnapshotId, tuple[str, ...]] = {}
        self._copies: dict[tuple[RowId, int], list[Any]] = {}

    def end_copies(self) -> None:
        """The step's keeps and starts are done: forget the copies that they shared."""
        self._copies.clear()

    def keep(
        self, keep: KeepRow, rows: Mapping[RowId, Row], forward: Forward
    ) -> SnapshotMade | SnapshotSkipped:
        """Start a copy of a row's state; a state that cannot be had is skipped with the reason."""
        row = rows.get(keep.row)
        if row is None:
            return SnapshotSkipped(keep.snapshot, f"row {keep.row} is gone")
        try:
            caches = clone_all(self._copied(row, keep.length, forward))
        except Exception as error:
            return SnapshotSkipped(keep.snapshot, str(error))
        self._made_with[keep.snapshot] = row.revisions
        return self._snapshots.put(keep.snapshot, caches, keep.length)

    def make_row(self, start: StartRow, rows: Mapping[RowId, Row], forward: Forward) -> Row:
        """A row with its first state.

        Raises ValueError, CannotCut or AdapterError with the reason in words.
        """
        if start.row in rows:
            raise ValueError(f"row {start.row} exists already")
        if not start.ids:
            raise ValueError("the prompt is empty")
        if min(start.ids) < 0 or max(start.ids) >= self._vocab_size:
            raise ValueError(f"a prompt id is outside the vocabulary of {self._vocab_size}")
        sampler = RowSampler(start.sampling, start.ids, self._vocab_size, start.logprobs)
        adapters = self._adapters.chain(start.adapters)
        caches, length = self._source(start, rows, forward)
        row = Row(start.row, start.ids, sampler, caches, processed=length, matcher=start.matcher)
        row.adapters = adapters
        return row

    def export(self, snapshot: SnapshotId, first: int, count: int) -> tuple[HostLayer, ...]:
        """See :meth:`~mlx_troupe.runtime.device.Device.export`."""
        caches, length = self._snapshots.whole(snapshot)
        if not length:
            raise StateRefused(f"snapshot {snapshot} is not kept")
        return self._hosting.export(caches, length, first, count)

    def restore(
        self, snapshot: SnapshotId, state: HostState, adapters: tuple[str, ...]
    ) -> SnapshotMade:
        """See :meth:`~mlx_troupe.runtime.device.Device.import_state`."""
        if self._snapshots.length(snapshot):
            raise StateRefused(f"snapshot {snapshot} is kept already")
        made = self._snapshots.put(snapshot, self._hosting.rebuild(state), state.length)
        self._made_with[snapshot] = adapters
        return made

    def release(self, snapshots: tuple[SnapshotId, ...]) -> None:
        """Forget kept states; unknown ids are ignored."""
        self._snapshots.release(snapshots)
        for snapshot in snapshots:
            self._made_with.pop(snapshot, None)

    def stats(self, rows: Mapping[RowId, Row], forward: Forward) -> DeviceStats:
        """Live figures of memory, rows and snapshots."""
        lone = sum(num_bytes(r.caches) for r in rows.values() if r.caches is not None)
        return DeviceStats(
            active_bytes=mx.get_active_memory(),
            cache_bytes=mx.get_cache_memory(),
            peak_bytes=mx.get_peak_memory(),
            kv_bytes=lone + forward.batch_bytes,
            snapshot_bytes=self._snapshots.nbytes,
            rows=len(rows),
            batched_rows=forward.num_batched,
            snapshots=len(self._snapshots),
        )

    def _source(
        self, start: StartRow, rows: Mapping[RowId, Row], forward: Forward
    ) -> tuple[list[Any], int]:
        match start.source:
            case Cold():
                return make_prompt_cache(self._model), 0
            case FromSnapshot(snapshot, length):
                _check_length(length, start)
                _check_adapters(self._made_with.get(snapshot, ()), start)
                self._plan.check_cut(self._snapshots.length(snapshot), length)
                return self._snapshots.take(snapshot, length), length
            case FromRow(row, length):
                _check_length(length, start)
                if (source := rows.get(row)) is None:
                    raise CannotCut(f"row {row} is gone")
                _check_adapters(source.revisions, start)
                return clone_all(self._copied(source, length, forward)), length

    def _copied(self, row: Row, length: int, forward: Forward) -> list[Any]:
        copy = self._copies.get((row.id, length))
        if copy is None:
            copy = self._copies[row.id, length] = forward.copy(row, length)
            # Started here, before the step's forward: once it is under way it holds no reference
            # to the row's buffers, and the forward may write into them in place.
            start_computing(arrays_of(copy))
        return copy


def _check_length(length: int, start: StartRow) -> None:
    if not 0 < length < len(start.ids):
        raise ValueError(f"a source of {length} tokens for a prompt of {len(start.ids)}")


def _check_adapters(made_with: tuple[str, ...], start: StartRow) -> None:
    if made_with != start.adapters:
        raise CannotCut("the state was computed with other adapters")
