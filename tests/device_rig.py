"""Drives an MLXDevice plan by plan, as the scheduler does, without one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_troupe.runtime.engine.executor import MLXDevice
from mlx_troupe.runtime.engine.opening import Options
from mlx_troupe.runtime.engine.snapshots import arrays_of
from mlx_troupe.runtime.kvschemes import KVScheme, PlainKV
from mlx_troupe.runtime.plans import (
    Cold,
    KeepRow,
    PrefillRow,
    RowFailed,
    RowId,
    SnapshotId,
    SnapshotMade,
    SnapshotSkipped,
    Source,
    StartRow,
    StepDone,
    StepId,
    StepPlan,
)
from mlx_troupe.runtime.requests import Sampling
from mlx_troupe.runtime.spill.state import HostLayer, HostState

GREEDY = Sampling()


def start_row(
    row: RowId, ids: Sequence[int], source: Source | None = None, sampling: Sampling = GREEDY
) -> StartRow:
    """A row from nothing, if no ``source`` is named."""
    return StartRow(row, tuple(ids), sampling, source or Cold())


class Driver:
    """An open device, all that came of its steps, and with ``ahead`` one step always under way."""

    def __init__(
        self, path: Path, *, kv: KVScheme | None = None, dtype: Any = "float32", ahead: bool = False
    ) -> None:
        self.device = MLXDevice(Options(path, name="tiny", dtype=dtype, kv=kv or PlainKV()))
        self.info = self.device.open()
        self.tokens: defaultdict[RowId, list[int]] = defaultdict(list)
        self.failed: list[RowFailed] = []
        self.kept: dict[SnapshotId, SnapshotMade | SnapshotSkipped] = {}
        self.under_way = 0
        self._ahead = ahead
        self._steps = 0

    def settle(self) -> StepDone:
        """The oldest step's result, written down."""
        done = self.device.settle()
        self.under_way -= 1
        for sampled in done.sampled:
            self.tokens[sampled.row].append(sampled.token)
        self.failed += done.failed
        self.kept |= {kept.snapshot: kept for kept in done.kept}
        return done

    def drain(self) -> None:
        """Settle everything."""
        while self.under_way:
            self.settle()

    def step(self, **parts: Any) -> StepDone:
        """Launch a step and settle it; ``ahead``, settle the one before it (the first: nothing)."""
        self._steps += 1
        done = StepDone(StepId(0), 0.0)
        self.device.launch(StepPlan(StepId(self._steps), **parts))
        self.under_way += 1
        if self.under_way == 2:
            done = self.settle()
        self.device.push()
        return done if self._ahead else self.settle()

    def start(
        self,
        row: RowId,
        ids: Sequence[int],
        source: Source | None = None,
        sampling: Sampling = GREEDY,
        chunk: int = 2048,
        **parts: Any,
    ) -> StepDone:
        """Start a row and prefill what its source lacks; ``parts`` go with the first chunk."""
        have = 0 if source is None or isinstance(source, Cold) else source.length
        end = len(ids) - 1
        starts = {"start": (start_row(row, ids, source, sampling),), **parts}
        first, *rest = [min(chunk, end - at) for at in range(have, end, chunk)] or [0]
        if first:
            starts["prefill"] = (PrefillRow(row, first),)
        done = self.step(**starts)
        for count in rest:
            done = self.step(prefill=(PrefillRow(row, count),))
        return done

    def decode(self, count: int, *rows: RowId, **first: Any) -> list[int]:
        """``count`` tokens for each of ``rows``, all settled; none of them may fail.

        Returns what the first of them has said since.
        """
        before, said = len(self.failed), len(self.tokens[rows[0]])
        for i in range(count):
            self.step(decode=rows, **(first if i == 0 else {}))
        self.drain()
        assert not [failed for failed in self.failed[before:] if failed.row in rows]
        return self.tokens[rows[0]][said:]

    def keep(self, row: RowId, length: int, snapshot: SnapshotId) -> SnapshotMade:
        """Keep the first ``length`` tokens of a row, which must be possible."""
        self.step(keep=(KeepRow(row, length, snapshot),))
        self.drain()
        kept = self.kept[snapshot]
        assert isinstance(kept, SnapshotMade), kept
        return kept

    def export(self, snapshot: SnapshotId, slice_: int = 2) -> HostState:
        """A whole kept state, ``slice_`` layers at a time."""
        layers: list[HostLayer] = []
        while part := self.device.export(snapshot, len(layers), slice_):
            layers += part
        return HostState(self._whole(snapshot)[1], tuple(layers))

    def assert_same_state(self, one: SnapshotId, other: SnapshotId) -> None:
        """Two kept states have every bit in common, every number beside it, every kind of cache."""
        (first, length), (second, as_long) = self._whole(one), self._whole(other)
        assert length == as_long
        assert [_told(c.state) for c in first] == [_told(c.state) for c in second]
        assert [type(c) for c in first] == [type(c) for c in second]
        for x, y in zip(_bytes(first), _bytes(second), strict=True):
            assert np.array_equal(x, y)

    def _whole(self, snapshot: SnapshotId) -> tuple[list[Any], int]:
        parts = self.device._parts
        assert parts is not None
        return parts.states._snapshots.whole(snapshot)


def _bytes(caches: list[Any]) -> list[np.ndarray]:
    return [np.array(x.reshape(-1).view(mx.uint8)) for x in arrays_of(caches)]


def _told(value: Any) -> Any:
    if isinstance(value, mx.array):
        return str(value.dtype), tuple(value.shape)
    return [_told(v) for v in value] if isinstance(value, list | tuple) else value
