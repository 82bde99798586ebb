"""Drives the MLX device as the scheduler does: one step running, one queued. For measurements."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Sequence
from itertools import count, zip_longest
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_troupe.runtime.plans import RowId, StepDone
    from mlx_troupe.runtime.text.matching import TokenMatcher


def ready() -> None:
    """Make the project importable where it is not installed, and put a fast BLAS before MLX."""
    if importlib.util.find_spec("mlx_troupe") is None:
        root = Path(__file__).resolve().parent.parent
        package = ModuleType("mlx_troupe")
        package.__path__ = [str(root)]
        sys.modules["mlx_troupe"] = package
    from mlx_troupe.runtime.engine.blas import ensure_fast_blas

    ensure_fast_blas()


class Rig:
    """One open device and the ids that it needs."""

    def __init__(self, path: Path, **options: object) -> None:
        from mlx_troupe.runtime.engine.executor import MLXDevice
        from mlx_troupe.runtime.engine.opening import Options

        self.device = MLXDevice(Options(path, name="bench", **options))  # type: ignore[arg-type]
        self.info = self.device.open()
        self.model = self.device.model
        self._rows = count(1)
        self._steps = count(0)

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        matchers: Sequence[TokenMatcher | None] = (),
        adapters: Sequence[tuple[str, ...]] = (),
    ) -> tuple[RowId, ...]:
        """Prefill rows for these prompts, one after the other.

        The first ones have matchers, and the first ones the adapters of these revisions.
        """
        from mlx_troupe.runtime import plans as d
        from mlx_troupe.runtime.requests import Sampling

        ids = tuple(d.RowId(next(self._rows)) for _ in prompts)
        for row, prompt, matcher, chain in zip_longest(ids, prompts, matchers, adapters):
            start = d.StartRow(
                row, tuple(prompt), Sampling(), d.Cold(), chain or (), matcher=matcher
            )
            self.step(start=(start,))
            for done in range(0, len(prompt) - 1, 2048):
                size = min(2048, len(prompt) - 1 - done)
                self.step(prefill=(d.PrefillRow(row, size),))
        return ids

    def end(self, rows: tuple[RowId, ...]) -> None:
        """Drop rows."""
        self.step(end=rows)

    def rate(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        matchers: Sequence[TokenMatcher | None] = (),
        adapters: Sequence[tuple[str, ...]] = (),
    ) -> float:
        """Tokens per second of all rows while they decode together."""
        from mlx_troupe.runtime import plans as d

        rows = self.start(prompts, matchers, adapters)

        def launch() -> None:
            self.device.launch(d.StepPlan(d.StepId(next(self._steps)), decode=rows))

        launch()
        self.device.push()
        launch()
        self.device.settle()
        self.device.push()
        began = time.perf_counter()
        made = 0
        for _ in range(tokens):
            launch()
            made += len(self.device.settle().sampled)
            self.device.push()
        seconds = time.perf_counter() - began
        self.device.settle()
        self.end(rows)
        return made / seconds

    def step(self, **parts: Any) -> StepDone:
        """One step, waited for."""
        from mlx_troupe.runtime import plans as d

        self.device.launch(d.StepPlan(d.StepId(next(self._steps)), **parts))
        self.device.push()
        return self.device.settle()
