"""A device that several share by turns, and what each side's turns took. For measurements.

Whoever imports this has made the project importable (``rig.ready``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mlx_troupe.runtime.engine.executor import MLXDevice
from mlx_troupe.runtime.engine.opening import Options
from mlx_troupe.runtime.plans import RowId, StepDone, StepPlan

WINDOW = 2048
MIN_TURNS = 8
KINDS = ((1, "clock"), (2, "cores"))


@dataclass
class Run:
    """What one side's device did for one long prompt, its rows by the length of their prompts.

    Attributes:
        marks: after each turn, tokens of the long prompt that are done, and the seconds that all
            turns took by then, by the clock and on all cores.
        shared: for each turn, whether the short prompt had a part in it.
        passes: of prompts through the model, as (length of the prompt, tokens of the pass).
        decodes: tokens computed in decode steps.
        steps: prompt tokens of each step that was launched.
        first: for each row, when its first token was known, and how many steps had settled then.
    """

    marks: list[tuple[int, float, float]] = field(default_factory=lambda: [(0, 0.0, 0.0)])
    shared: list[bool] = field(default_factory=list)
    passes: list[tuple[int, int]] = field(default_factory=list)
    decodes: int = 0
    steps: list[int] = field(default_factory=list)
    settled: int = 0
    first: dict[int, tuple[float, int]] = field(default_factory=dict)

    def seconds(self, kind: int) -> float:
        """Until the long prompt's first token, by the clock (1) or on all cores (2)."""
        return self.marks[-1][kind]

    def windows(self, kind: int) -> np.ndarray:
        """The same for each :data:`WINDOW` tokens of the long prompt."""
        done, spent = ([mark[at] for mark in self.marks] for at in (0, kind))
        ends = np.arange(0, done[-1] + WINDOW, WINDOW).clip(max=done[-1])
        # Of several turns at one place the last counts: they belong to what was done before.
        place = dict(zip(done, spent, strict=True))
        reached = np.interp(ends[1:], list(place), list(place.values()))
        return np.diff(reached, prepend=0.0)

    def excess(self, kind: int) -> float | None:
        """What shared turns took beyond the long prompt's tokens in them, as a part of the rest.

        None where turns are too few to tell.
        """
        marks, shared = np.array(self.marks), np.array(self.shared)
        tokens, spent = np.diff(marks[:, 0]), np.diff(marks[:, kind])
        own = ~shared & (tokens > 0)
        if own.sum() < MIN_TURNS:
            return None
        middle = marks[:-1, 0] + tokens / 2
        # A token's price grows in proportion to those before it.
        line = np.polyfit(middle[own], spent[own] / tokens[own], 1, w=np.sqrt(tokens[own]))
        price = tokens[shared] @ np.polyval(line, middle[shared])
        return float((spent[shared].sum() - price) / (spent[~shared].sum() + price))


class Sharing(MLXDevice):
    """The MLX device; it computes when it is its turn, and notes what it does."""

    def __init__(self, path: Path, turn: threading.Lock, **options: Any) -> None:
        super().__init__(Options(path, name="bench", **options))
        self._turn = turn
        self._under_way = 0
        self._began = (0.0, 0.0)
        self._others = False
        self._prompts: dict[RowId, int] = {}
        self.run = Run()

    def launch(self, plan: StepPlan) -> None:
        if not self._under_way:
            self._turn.acquire()
            self._began = time.perf_counter(), time.process_time()
            self._others = False
        self._under_way += 1
        self._prompts.update((start.row, len(start.ids)) for start in plan.start)
        self.run.passes += [(self._prompts[part.row], part.count) for part in plan.prefill]
        self.run.steps.append(sum(part.count for part in plan.prefill))
        self.run.decodes += len(plan.decode)
        long = max(self._prompts.values())
        rows = (*plan.decode, *(part.row for part in plan.prefill))
        self._others |= any(self._prompts[row] != long for row in rows)
        with self._giving_way():
            super().launch(plan)

    def settle(self) -> StepDone:
        with self._giving_way():
            done = super().settle()
        self.run.settled += 1
        for sampled in done.sampled:
            now = time.perf_counter(), self.run.settled
            self.run.first.setdefault(self._prompts[sampled.row], now)
        self._under_way -= 1
        if not self._under_way:
            self._end_turn()
        return done

    @contextmanager
    def _giving_way(self) -> Iterator[None]:
        """A fault must not leave the other side waiting."""
        try:
            yield
        except BaseException:
            self._under_way = 0
            self._turn.release()
            raise

    def _end_turn(self) -> None:
        began, worked = self._began
        run, long = self.run, max(self._prompts.values())
        if run.marks[-1][0] < long:
            # One more for its first token, so that the last mark is where that is known.
            done = sum(count for length, count in run.passes if length == long)
            done += long in run.first
            _, clock, cores = run.marks[-1]
            clock += time.perf_counter() - began
            run.marks.append((done, clock, cores + time.process_time() - worked))
            run.shared.append(self._others)
        self._turn.release()
