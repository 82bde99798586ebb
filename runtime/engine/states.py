"""Where the state of a new row comes from, and where states are kept.

Owns the snapshots and keeps them under their limit: a copy that would go beyond it is not begun.
Runs on the device thread and never waits. A state that several ask for in one step (forks of one
prompt, a fork and a snapshot) is copied once; each gets handles of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx.nn import Module
from mlx_lm.models.cache import make_prompt_cache

from ..device import DeviceStats, StateSlice
from ..errors import NoRoom, StateRefused
from ..plans import (
    Cold,
    FromRow,
    FromSnapshot,
    KeepRow,
    RowId,
    SnapshotId,
    SnapshotMade,
    SnapshotSkipped,
    StartRow,
)
from ..spill.state import HostLayer, nbytes
from .adapters import Adapters
from .arrivals import Arrival
from .forward import Forward
from .hosting import Hosting
from .kvplan import KVPlan
from .lazy import start as start_computing
from .row_sampler import RowSampler
from .rows import Row
from .snapshots import CannotCut, Snapshots, arrays_of, clone_all, num_bytes


class States:
    """Makes rows and keeps snapshots for one model; these take at most ``limit`` bytes."""

    def __init__(
        self,
        model: Module,
        vocab_size: int,
        adapters: Adapters,
        plan: KVPlan,
        hosting: Hosting,
        limit: int | None = None,
    ) -> None:
        self._model = model
        self._hosting = hosting
        self._plan = plan
        self._adapters = adapters
        self._vocab_size = vocab_size
        self._snapshots = Snapshots()
        self._limit = limit
        self._most = 0
        self._made_with: dict[SnapshotId, tuple[str, ...]] = {}
        self._arriving: dict[SnapshotId, Arrival] = {}
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
            caches = clone_all(self._copied(row, keep.length, forward, room=self._room()))
        except _Full as full:
            return SnapshotSkipped(keep.snapshot, str(full), full.nbytes)
        except Exception as error:
            return SnapshotSkipped(keep.snapshot, str(error))
        return self._put(keep.snapshot, caches, keep.length, row.revisions)

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

    def export(
        self, snapshot: SnapshotId, first: int, count: int, since: int
    ) -> tuple[HostLayer, ...]:
        """See :meth:`~mlx_troupe.runtime.device.Device.export`."""
        caches, length = self._snapshots.whole(snapshot)
        if not length:
            raise StateRefused(f"snapshot {snapshot} is not kept")
        return self._hosting.export(caches, length, first, count, since)

    def restore(self, part: StateSlice) -> SnapshotMade | None:
        """See :meth:`~mlx_troupe.runtime.device.Device.import_state`."""
        snapshot, state, first = part.snapshot, part.state, part.first_layer
        if self._snapshots.length(snapshot):
            raise StateRefused(f"snapshot {snapshot} is kept already")
        arrival = self._arriving.pop(snapshot, None)
        if not first:
            room = self._room()
            if room is not None and nbytes(state) > room:
                raise NoRoom(f"a state of {nbytes(state)} bytes, and {room} are left")
            arrival = self._hosting.begin(state)
        elif arrival is None or not arrival.goes_on(state, first):
            raise StateRefused(f"layer {first} of snapshot {snapshot} is not the next")
        arrival.take(part.count)
        if not arrival.is_whole:
            self._arriving[snapshot] = arrival
            return None
        return self._put(snapshot, arrival.caches(), state.length, part.adapters)

    def release(self, snapshots: tuple[SnapshotId, ...]) -> None:
        """Forget kept states; unknown ids are ignored."""
        self._snapshots.release(snapshots)
        for snapshot in snapshots:
            self._made_with.pop(snapshot, None)
            self._arriving.pop(snapshot, None)

    def stats(self, rows: Mapping[RowId, Row], forward: Forward) -> DeviceStats:
        """Live figures of memory, rows and snapshots."""
        lone = sum(num_bytes(r.caches) for r in rows.values() if r.caches is not None)
        return DeviceStats(
            active_bytes=mx.get_active_memory(),
            cache_bytes=mx.get_cache_memory(),
            peak_bytes=mx.get_peak_memory(),
            kv_bytes=lone + forward.batch_bytes,
            snapshot_bytes=self._taken(),
            rows=len(rows),
            batched_rows=forward.num_batched,
            snapshots=len(self._snapshots),
            most_snapshot_bytes=self._most,
        )

    def _taken(self) -> int:
        """Bytes of snapshots, of those that are still arriving too."""
        return self._snapshots.nbytes + sum(a.nbytes for a in self._arriving.values())

    def _room(self) -> int | None:
        """Bytes that further snapshots may take; None = as many as there are."""
        return None if self._limit is None else self._limit - self._taken()

    def _put(
        self, snapshot: SnapshotId, caches: list[Any], length: int, adapters: tuple[str, ...]
    ) -> SnapshotMade:
        made = self._snapshots.put(snapshot, caches, length)
        self._made_with[snapshot] = adapters
        self._most = max(self._most, self._taken())
        return made

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

    def _copied(
        self, row: Row, length: int, forward: Forward, room: int | None = None
    ) -> list[Any]:
        shared = self._copies.get((row.id, length))
        copy = shared or forward.copy(row, length)
        if room is not None and (size := num_bytes(copy)) > room:
            raise _Full(size)
        if shared is None:
            self._copies[row.id, length] = copy
            # Started here, before the step's forward: once it is under way it holds no reference
            # to the row's buffers, and the forward may write into them in place.
            start_computing(arrays_of(copy))
        return copy


class _Full(Exception):
    """A copy of so many bytes that is not begun."""

    def __init__(self, nbytes: int) -> None:
        super().__init__("there is no room for it")
        self.nbytes = nbytes


def _check_length(length: int, start: StartRow) -> None:
    if not 0 < length < len(start.ids):
        raise ValueError(f"a source of {length} tokens for a prompt of {len(start.ids)}")


def _check_adapters(made_with: tuple[str, ...], start: StartRow) -> None:
    if made_with != start.adapters:
        raise CannotCut("the state was computed with other adapters")
