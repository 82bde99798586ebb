"""Broken layouts: each breaks one thing that a comparison of logits must notice."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlx_troupe.runtime.engine import layouts, steps


def leak_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask lets one slot behind each row's last token in."""
    honest = steps.Step._make_mask

    def leaky(self: Any, segment: Any, used: int, *rest: Any) -> mx.array:
        mask = honest(self, segment, used, *rest)
        first = self.offsets[segment.start : segment.stop].reshape(-1, 1, 1, 1)
        return mask | (mx.arange(used) == first + self.columns)

    monkeypatch.setattr(steps.Step, "_make_mask", leaky)


def lose_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer's keys are not written in one step."""
    honest, calls = layouts._scatter, [0]

    def forgetful(buffers: Any, *rest: Any) -> Any:
        calls[0] += 1
        before = mx.array(buffers[0])
        keys, *others = honest(buffers, *rest)
        return (before if calls[0] == 5 else keys, *others)

    monkeypatch.setattr(layouts, "_scatter", forgetful)


def forget_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sliding layers see all that their ring holds."""
    honest = steps.Step.mask

    def boundless(self: Any, segment: Any, used: int, ring: Any, window: Any, *rest: Any) -> Any:
        return honest(self, segment, used, ring, None, *rest)

    monkeypatch.setattr(steps.Step, "mask", boundless)


def shift_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """New tokens take the position behind their own."""
    honest = layouts.RowsCache.__init__

    def shifted(self: Any, *args: Any) -> None:
        honest(self, *args)
        self.offset = self.offset + 1

    monkeypatch.setattr(layouts.RowsCache, "__init__", shifted)
