"""The MLX device under observation: every row's prompt, pieces, draws and logits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_troupe.runtime.engine.executor import MLXDevice
from mlx_troupe.runtime.engine.opening import Options
from mlx_troupe.runtime.engine.row_sampler import RowSampler
from mlx_troupe.runtime.engine.sampling import Sampler
from mlx_troupe.runtime.kvschemes import (
    KVScheme,
)
from mlx_troupe.runtime.plans import (
    FromRow,
    FromSnapshot,
    RowId,
    Sampled,
    SnapshotId,
    StartRow,
    StepDone,
    StepPlan,
)


@dataclass(slots=True)
class Seen:
    """One row as the device had it.

    ``pieces`` are the lengths that its state had between passes; ``logits`` by the number of tokens
    that the row held, before bias, penalties and masks.
    """

    start: StartRow
    pieces: list[int] = field(default_factory=list)
    sampled: list[Sampled] = field(default_factory=list)
    logits: dict[int, mx.array] = field(default_factory=dict)
    companions: list[int] = field(default_factory=list)
    failed: str = ""

    @property
    def ids(self) -> list[int]:
        """Tokens drawn, one more than wanted where the end was found a step late."""
        return [sampled.token for sampled in self.sampled]


class Watched(MLXDevice):
    """The MLX device; it remembers every row by its prompt."""

    def __init__(self, path: Path, kv: KVScheme, *, replay: bool | None = None) -> None:
        options = Options(path, name="tiny", dtype="float32", batch=24, kv=kv, replay=replay)
        super().__init__(options)
        self.seen: dict[RowId, Seen] = {}
        self.samplers: dict[int, tuple[RowSampler, Seen]] = {}
        self.gate = threading.Event()
        self.gate.set()
        self._kept: dict[SnapshotId, list[int]] = {}

    def launch(self, plan: StepPlan) -> None:
        """Carry it out and keep account of the pieces in which rows are computed."""
        for keep in plan.keep:
            self._kept[keep.snapshot] = cut(self.seen[keep.row].pieces, keep.length)
        for start in plan.start:
            self.seen[start.row] = Seen(start, self._before(start))
        for part in plan.prefill:
            pieces = self.seen[part.row].pieces
            pieces.append((pieces[-1] if pieces else 0) + part.count)
        for row in plan.decode:
            seen = self.seen[row]
            seen.pieces.append((seen.pieces[-1] if seen.pieces else 0) + 1)
            seen.companions.append(len(plan.decode) - 1)
        super().launch(plan)
        for start in plan.start:
            if (made := self._rows.get(start.row)) is not None:
                self.samplers[id(made.sampler)] = (made.sampler, self.seen[start.row])

    def settle(self) -> StepDone:
        """Wait, for the gate too, and note what was drawn."""
        self.gate.wait(30)
        done = super().settle()
        for sampled in done.sampled:
            self.seen[sampled.row].sampled.append(sampled)
        for failed in done.failed:
            self.seen[failed.row].failed = failed.reason
        return done

    def by_prompt(self, ids: Sequence[int]) -> Seen:
        """The last row that started with this prompt."""
        return [seen for seen in self.seen.values() if seen.start.ids == tuple(ids)][-1]

    def _before(self, start: StartRow) -> list[int]:
        match start.source:
            case FromRow(row, length):
                return cut(self.seen[row].pieces, length)
            case FromSnapshot(snapshot, length):
                return cut(self._kept[snapshot], length)
            case _:
                return []


def cut(pieces: Sequence[int], length: int) -> list[int]:
    return [*(end for end in pieces if end < length), length]


@contextmanager
def recorded(nudge: Callable[[int, mx.array], mx.array] | None = None) -> Iterator[list[Any]]:
    """Collect what every draw is given; ``nudge`` may change the logits at a position."""
    drawn: list[Any] = []
    draw = Sampler.draw

    def recording(
        self: Sampler, logits: mx.array, rows: Any, positions: Any, *rest: Any, **more: Any
    ) -> Any:
        if nudge is not None:
            logits = nudge(positions[0], logits)
        drawn.append((logits, tuple(rows), tuple(positions)))
        return draw(self, logits, rows, positions, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampler, "draw", recording)
        yield drawn


def sort_out(drawn: Sequence[Any], device: Watched) -> None:
    """Give each row its logits."""
    for logits, rows, positions in drawn:
        for place, (sampler, position) in enumerate(zip(rows, positions, strict=True)):
            if (known := device.samplers.get(id(sampler))) is not None:
                known[1].logits[position] = logits[place]
