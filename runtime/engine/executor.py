"""The MLX device: carries out step plans on one model.

Owns the weights, the rows and the kept snapshots. Every call comes from the one thread that called
:meth:`MLXDevice.open`, because MLX's streams and lazy arrays belong to it. Knows no queue, no
prefix index and no text.

A launch builds lazy graphs and starts them with ``mx.async_eval``; a settle reads back one small
array of ids. On a CPU ``async_eval`` returns only when nearly all is computed, so there a decode is
started by the push that follows the settle of the step before it. Copies of row states are started
before the forward of their step, so that the forward finds nobody else holding the buffers it
writes into.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..adapter_fit import AdapterTarget
from ..adapters import AdapterInfo
from ..device import DeviceStats, StateSlice
from ..errors import Unavailable
from ..model_info import KVLayers, ModelInfo
from ..plans import (
    PrefillRow,
    RowFailed,
    RowId,
    Sampled,
    SnapshotId,
    SnapshotMade,
    SnapshotSkipped,
    StartRow,
    StepDone,
    StepId,
    StepPlan,
)
from ..spill.state import HostLayer
from .drawing import Drawn, Fault, read
from .forward import Forward
from .memory import MemoryLimits, give_back
from .opening import Options, Parts, cannot_run, described, load_parts
from .positions import forget_positions
from .rows import Row
from .states import States
from .warmup import warm_up

MAX_UNDER_WAY = 2
DECODES_PER_CLEARING = 256
LONG_PREFILL = 512


@dataclass(slots=True)
class _Step:
    id: StepId
    launched: float
    prefilled: int = 0
    drawn: list[Drawn] = field(default_factory=list)
    fences: list[mx.array] = field(default_factory=list)
    failed: list[RowFailed] = field(default_factory=list)
    kept: list[tuple[Row | None, SnapshotMade | SnapshotSkipped]] = field(default_factory=list)


class MLXDevice:
    """One model on one MLX device. See :class:`mlx_troupe.runtime.device.Device`."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._parts: Parts | None = None
        self._forward: Forward | None = None
        self._rows: dict[RowId, Row] = {}
        self._steps: deque[_Step] = deque(maxlen=MAX_UNDER_WAY)
        self._settled = 0.0
        self._decodes = 0
        self._limits = MemoryLimits()

    @property
    def model(self) -> Any:
        """The loaded mlx-lm model, for whoever compares with it on the same thread."""
        return None if self._parts is None else self._parts.model

    def open(self) -> ModelInfo:
        """Load and warm up. Raises ModelError."""
        options = self._options
        self._limits.set(options.memory_budget)
        self._parts = parts = load_parts(options)
        try:
            self._forward = parts.make_forward()
            layers = self._warm_up(parts)
        except Exception as error:
            raise cannot_run(options.path, error) from error
        return described(parts, options, layers)

    def launch(self, plan: StepPlan) -> None:
        """Start a step without waiting for its result."""
        if len(self._steps) == MAX_UNDER_WAY:
            raise RuntimeError(f"{MAX_UNDER_WAY} steps are under way already")
        parts, forward = self._opened()
        states = parts.states
        step = _Step(plan.step, time.perf_counter())
        for keep in plan.keep:
            kept = states.keep(keep, self._rows, forward)
            step.kept.append((self._rows.get(keep.row), kept))
        for start in plan.start:
            self._start(start, states, forward, step)
        states.end_copies()
        for row in plan.end:
            self._end(row)
        self._prefill(plan.prefill, forward, step)
        self._decode(plan.decode, forward, step)
        self._steps.append(step)

    def overlaps(self, plan: StepPlan) -> bool:
        """On a CPU only steps that merely decode: the others compute while they are launched."""
        return mx.default_device() == mx.gpu or not (plan.keep or plan.start or plan.prefill)

    def push(self) -> None:
        """Begin the draws of the step launched last."""
        if self._forward is not None:
            faults = self._forward.push()
            if faults:
                self._fail(faults, self._steps[-1])

    def settle(self) -> StepDone:
        """Wait for the oldest step under way and return what came of it."""
        if not self._steps:
            raise RuntimeError("no step is under way")
        step = self._steps[0]
        if any(drawn.reported is None for drawn in step.drawn):
            self.push()
        mx.eval(step.fences)
        sampled = self._read(step)
        self._steps.popleft()
        self._clear_buffers(step)
        now = time.perf_counter()
        since = max(step.launched, self._settled)
        self._settled = now
        kept = tuple(self._confirm(row, result) for row, result in step.kept)
        return StepDone(step.id, now - since, tuple(sampled), tuple(step.failed), kept)

    def release(self, snapshots: tuple[SnapshotId, ...]) -> None:
        """Forget kept states. Unknown ids are ignored."""
        if self._parts is not None:
            self._parts.states.release(snapshots)

    def export(
        self, snapshot: SnapshotId, first_layer: int, count: int, since: int = 0
    ) -> tuple[HostLayer, ...]:
        """Some layers of a kept state as bytes. Raises StateRefused."""
        return self._opened()[0].states.export(snapshot, first_layer, count, since)

    def import_state(self, part: StateSlice) -> SnapshotMade | None:
        """Keep a state that was exported, or some more layers of one. Raises StateRefused."""
        return self._opened()[0].states.restore(part)

    def drop_rows(self) -> None:
        """Forget every row, every step under way and the states that it was about to report."""
        for step in self._steps:
            self.release(tuple(result.snapshot for _, result in step.kept))
        self._rows.clear()
        self._steps.clear()
        if self._parts is not None:
            self._forward = self._parts.make_forward()
            self._parts.adapters.forget()

    def mount(self, adapter_id: str, path: Path) -> AdapterInfo:
        """Load an adapter. Raises AdapterError, and then nothing has changed."""
        return self._opened()[0].adapters.mount(adapter_id, path)

    def unmount(self, revision: str) -> int:
        """Take an adapter from rows that start from now on."""
        parts, forward = self._opened()
        changed = parts.adapters.unmount(revision)
        forward.forget_adapters()
        return changed

    def adapter_targets(self) -> tuple[AdapterTarget, ...]:
        """The modules that adapters may change."""
        return () if self._parts is None else self._parts.adapters.targets

    def stats(self) -> DeviceStats:
        """Live figures; cheap."""
        if self._parts is None or self._forward is None:
            return DeviceStats()
        stats = self._parts.states.stats(self._rows, self._forward)
        return replace(stats, grammar_seconds=self._parts.masks.waited)

    def idle(self) -> None:
        """Give unused memory back to the system."""
        if self._forward is not None:
            self._forward.rest()
        if self._parts is not None:
            self._parts.adapters.rest()
            forget_positions(self._parts.model)
        give_back()

    def close(self) -> None:
        """Forget everything."""
        self._rows.clear()
        self._steps.clear()
        if self._parts is not None:
            self._parts.masks.close()
        self._parts = self._forward = None
        self._limits.restore()
        give_back()

    def _opened(self) -> tuple[Parts, Forward]:
        if self._parts is None or self._forward is None:
            raise Unavailable("the device is not open")
        return self._parts, self._forward

    def _warm_up(self, parts: Parts) -> tuple[KVLayers, ...]:
        """Run a few tokens through every path; how their keys and values are kept."""
        # Compiling the batched kernels takes seconds on a GPU and nothing on a CPU.
        together = parts.info.batchable and self._options.batch > 1
        warm_up(self, 2 if together and mx.default_device() == mx.gpu else 1)
        layers = parts.plan.live_layers(*self._opened()[1].held(self._rows[RowId(-1)]))
        self.drop_rows()
        self._decodes = 0
        return layers

    def _start(self, start: StartRow, states: States, forward: Forward, step: _Step) -> None:
        try:
            self._rows[start.row] = states.make_row(start, self._rows, forward)
        except Exception as error:
            step.failed.append(RowFailed(start.row, f"the row could not start: {error}"))

    def _end(self, row_id: RowId) -> None:
        row = self._rows.pop(row_id, None)
        if row is not None and self._forward is not None:
            self._forward.drop(row)

    def _prefill(self, chunks: tuple[PrefillRow, ...], forward: Forward, step: _Step) -> None:
        known: list[tuple[Row, int]] = []
        for chunk in chunks:
            if (row := self._rows.get(chunk.row)) is None:
                step.failed.append(RowFailed(chunk.row, "the row is not on the device"))
            else:
                known.append((row, chunk.count))
        if known:
            fences, faults = forward.prefill(known)
            step.fences += fences
            step.prefilled = sum(count for _, count in known)
            self._fail(faults, step)

    def _decode(self, rows: tuple[RowId, ...], forward: Forward, step: _Step) -> None:
        known: list[Row] = []
        for row_id in rows:
            row = self._rows.get(row_id)
            if row is None:
                step.failed.append(RowFailed(row_id, "the row is not on the device"))
            elif row.unprefilled:
                left = f"{row.unprefilled} prompt tokens are not prefilled"
                self._fail([Fault(row, left)], step)
            else:
                known.append(row)
        if known:
            step.drawn, faults = forward.decode(known)
            self._decodes += 1
            self._fail(faults, step)

    def _read(self, step: _Step) -> list[Sampled]:
        sampled: list[Sampled] = []
        for drawn in step.drawn:
            tokens, faults = read(drawn)
            sampled += tokens
            self._fail(faults, step)
        return sampled

    def _fail(self, faults: list[Fault], step: _Step) -> None:
        step.failed += [self._evict(fault) for fault in faults]

    def _evict(self, fault: Fault) -> RowFailed:
        row = fault.row
        row.failed = True
        if self._rows.get(row.id) is row:
            self._end(row.id)
        return RowFailed(row.id, fault.reason, fault.param)

    def _confirm(
        self, row: Row | None, result: SnapshotMade | SnapshotSkipped
    ) -> SnapshotMade | SnapshotSkipped:
        # A state copied before its row was found to be broken must not outlive the row.
        if row is not None and row.failed and isinstance(result, SnapshotMade):
            self.release((result.snapshot,))
            return SnapshotSkipped(result.snapshot, "the row failed")
        return result

    def _clear_buffers(self, step: _Step) -> None:
        if step.prefilled >= LONG_PREFILL or self._decodes >= DECODES_PER_CLEARING:
            self._decodes = 0
            mx.clear_cache()
