"""Rows under a KV scheme: tiny models with heads of 64, their solo runs, and batches of them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from tiny import load_oracle, make_checkpoint, prompt

from mlx_troupe.runtime.engine.adapters import Adapters
from mlx_troupe.runtime.engine.attention import install_attention
from mlx_troupe.runtime.engine.batch import RowBatch
from mlx_troupe.runtime.engine.compiled import CompiledDecode
from mlx_troupe.runtime.engine.kvplan import KVPlan, make_plan
from mlx_troupe.runtime.engine.positions import install_rope
from mlx_troupe.runtime.engine.snapshots import clone_all
from mlx_troupe.runtime.kvschemes import AffineKV, KVScheme, PerLayerKV, TurboKV
from mlx_troupe.runtime.plans import RowId

TOLERANCE = 1e-3
FLIP = 0.3
MOST_FLIPS = 4
WINDOW = 16
SCHEMES: dict[str, AffineKV | PerLayerKV | TurboKV] = {
    "affine8": AffineKV(8),
    "affine4": AffineKV(4),
    "config": PerLayerKV(),
    "k8v3": TurboKV(),
    "k4v5": TurboKV(4, 5),
}
CONFIG = '[{"layer_idx": 1, "bits": 4}, {"layer_idx": 2, "bits": 8, "group_size": 32}]'
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"head_dim": 64}),
    "sliding": ("sliding", {"head_dim": 64, "sliding_window": WINDOW}),
}


def checkpoint(folder: Path, family: str, **config: Any) -> Path:
    """A tiny checkpoint with heads of 64 and a ``kv_config.json``."""
    name, settings = FAMILIES[family]
    path = make_checkpoint(folder, name, **(settings | config))
    (path / "kv_config.json").write_text(CONFIG)
    return path


@cache
def model_and_folder(family: str) -> tuple[nn.Module, Path]:
    """One of ``FAMILIES``, made once, with our attention entry point in its module."""
    path = checkpoint(Path(tempfile.mkdtemp(prefix="kv")) / family, family)
    model = load_oracle(path)
    mx.eval(model.parameters())
    install_attention()
    install_rope(model)
    return model, path


def plan_of(family: str, scheme: KVScheme) -> KVPlan:
    """The plan for one of ``FAMILIES``."""
    return make_plan(*_model_scheme_folder(family, scheme))


def _model_scheme_folder(family: str, scheme: KVScheme) -> tuple[nn.Module, KVScheme, Path]:
    model, path = model_and_folder(family)
    return model, scheme, path


def solo_prefill(model: nn.Module, plan: KVPlan, ids: Sequence[int]) -> list[Any]:
    """A lone row's caches after ``ids`` in one chunk, converted as ``generate_step`` does."""
    caches: list[Any] = make_prompt_cache(model)
    if ids:
        model(mx.array([ids]), cache=caches)
        caches = plan.converted(caches, len(ids))
        mx.eval([c.state for c in caches])
    return caches


def solo_run(
    model: nn.Module, plan: KVPlan, caches: list[Any], ids: Sequence[int], at: int
) -> tuple[mx.array, list[Any]]:
    """Teacher-forced logits [len(ids), V], one token at a time from ``at`` tokens on."""
    rows: list[mx.array] = []
    for place, token in enumerate(ids, 1):
        rows.append(model(mx.array([[token]]), cache=caches)[0, 0])
        caches = plan.converted(caches, at + place)
    return mx.stack(rows), caches


def assert_equal(got: mx.array, expected: mx.array, tolerance: float = TOLERANCE) -> None:
    """Logits within ``tolerance``, and numbers at all."""
    assert bool(mx.isfinite(got).all().item()), "logits that are no numbers"
    difference = mx.abs(got - expected).max()
    assert bool(difference <= tolerance), f"logits differ by {difference.item()}"


class Company:
    """A batch under a scheme: every row's logits are compared with its solo run of that scheme.

    The bound is 1e-3. But a key that differs from the solo run's in its last bit may be put to
    another code, even a whole group with another scale, and that row is off by more (``FLIP``) from
    there on: that may happen a few times, and the row's solo run then goes on from the batch's
    bytes.
    """

    def __init__(self, family: str, scheme: KVScheme, *, replay: bool = False) -> None:
        self.model, _ = model_and_folder(family)
        self.plan = plan_of(family, scheme)
        self.batch = RowBatch(self.model, self.plan)
        self.flips = 0
        self.replays = 0
        adapters = Adapters(self.model, together=True)
        self._compiled = CompiledDecode(self.model, self.batch, adapters) if replay else None
        self.texts: dict[RowId, tuple[int, ...]] = {}
        self.solo: dict[RowId, list[Any]] = {}

    def add(self, row: int, length: int, steps: int = 40) -> RowId:
        """Join a row that was prefilled alone with ``length`` tokens."""
        name, text = RowId(row), prompt(length + steps, seed=row)
        caches = solo_prefill(self.model, self.plan, text[:length])
        self.texts[name] = text
        self.solo[name] = clone_all(caches)
        self.batch.join(name, caches, length)
        return name

    def step(self, columns: int = 1, kept: Sequence[int] | None = None) -> None:
        """One pass; each row's columns are compared with its solo run, and ``kept`` remain."""
        caches = self.batch.begin(columns)
        rows = self.batch.rows
        at = {row: self.batch.length(row) for row in rows}
        tokens = [self.texts[row][at[row] : at[row] + columns] for row in rows]
        logits = self._replayed(tokens) if columns == 1 else None
        if logits is None:
            logits = self.model(mx.array(tokens), cache=caches)
        mx.eval(logits, self.batch.arrays)
        counts = dict(zip(rows, [columns] * len(rows) if kept is None else kept, strict=True))
        off: list[RowId] = []
        for place, row in enumerate(rows):
            expected = self._solo_block(row, tokens[place], counts[row], at[row])
            assert_equal(logits[place], expected, FLIP)
            if bool(mx.abs(logits[place] - expected).max() > TOLERANCE):
                off.append(row)
        self.batch.commit([counts[row] for row in rows])
        self.flips += len(off)
        assert self.flips <= MOST_FLIPS, "logits differ too often"
        for row in off:
            self.solo[row] = self.batch.export(row, self.batch.length(row))

    def _replayed(self, tokens: Sequence[Sequence[int]]) -> mx.array | None:
        if self._compiled is None:
            return None
        given = mx.array([token for (token,) in tokens])
        logits = self._compiled.logits(given, [()] * len(tokens))
        self.replays += logits is not None
        return logits

    def check_alone(self, row: RowId, caches: list[Any], count: int = 5) -> None:
        """Caches that left the batch go on for ``count`` tokens as the row's solo run does."""
        at = self.batch.length(row) if row in self.batch.rows else caches[0].offset
        tokens = self.texts[row][at : at + count]
        got, _ = solo_run(self.model, self.plan, caches, tokens, at)
        expected, _ = solo_run(self.model, self.plan, clone_all(self.solo[row]), tokens, at)
        off = mx.abs(got - expected).max()
        assert_equal(got, expected, FLIP)
        self.flips += bool(off > TOLERANCE)
        assert self.flips <= MOST_FLIPS, "logits differ too often"

    def _solo_block(self, row: RowId, tokens: Sequence[int], kept: int, at: int) -> mx.array:
        # Columns of one step see the state as it was when the step began: conversion comes after.
        trial = clone_all(self.solo[row])
        logits: mx.array = self.model(mx.array([tokens]), cache=trial)[0]
        if kept:
            real = clone_all(self.solo[row])
            self.model(mx.array([tokens[:kept]]), cache=real)
            self.solo[row] = self.plan.converted(real, at + kept)
        return logits
