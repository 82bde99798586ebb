"""Tiny models, their solo runs, and a batch whose every logit is compared with those."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, make_prompt_cache
from tiny import load_oracle, make_checkpoint, prompt
from tiny_hybrids import HYBRIDS

from mlx_troupe.runtime.engine.adapters import Adapters
from mlx_troupe.runtime.engine.attention import install_attention
from mlx_troupe.runtime.engine.batch import RowBatch
from mlx_troupe.runtime.engine.compiled import CompiledDecode
from mlx_troupe.runtime.engine.kvplan import PLAIN_PLAN, KVPlan
from mlx_troupe.runtime.engine.positions import install_rope
from mlx_troupe.runtime.engine.snapshots import arrays_of
from mlx_troupe.runtime.plans import RowId

TOLERANCE = 1e-3
WINDOW = 16
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-4-kv-heads": ("llama", {"num_key_value_heads": 4}),
    "sliding": ("sliding", {}),
    "short-window": ("sliding", {"sliding_window": 7}),
    "mistral": ("llama", {"model_type": "mistral", "head_dim": 16}),
    "qwen3": ("qwen3", {}),
}
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, {}) for name in ("mamba", "mamba2", "lfm2", "qwen3_5")
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    name: ("llama", {"model_type": name, **config}) for name, config in HYBRIDS.items()
}


@cache
def model_named(name: str) -> nn.Module:
    """One of the models above, made once, with our attention entry point in its module."""
    family, config = (MODELS | RECURRENT | OTHERS)[name]
    with tempfile.TemporaryDirectory() as folder:
        model = load_oracle(make_checkpoint(Path(folder) / name, family, **config))
        mx.eval(model.parameters())
    object.__setattr__(model, "solo_runs", {})
    install_attention()
    install_rope(model)
    return model


def solo_prefill(model: nn.Module, ids: Sequence[int]) -> list[Any]:
    """mlx-lm's own caches after ``ids``, taken in as generate_step does."""
    caches = make_prompt_cache(model)
    if ids:
        model(mx.array([ids]), cache=caches)
        mx.eval(arrays_of(caches))
    return caches


def solo_logits(model: nn.Module, ids: tuple[int, ...], prompt_length: int) -> mx.array:
    """Teacher-forced logits [len(ids) - prompt_length, vocabulary], one token at a time."""
    known = model.solo_runs
    if (ids, prompt_length) not in known:
        caches = solo_prefill(model, ids[:prompt_length])
        steps = [model(mx.array([[token]]), cache=caches)[0, 0] for token in ids[prompt_length:]]
        known[ids, prompt_length] = mx.stack(steps)
        mx.eval(known[ids, prompt_length])
    return known[ids, prompt_length]


def assert_equal(got: mx.array, expected: mx.array) -> None:
    """Design §5: logits within 1e-3, ids equal wherever the solo gap is at least twice that."""
    assert bool(mx.isfinite(got).all().item()), "logits that are no numbers"
    difference = mx.abs(got - expected).max().item()
    assert difference <= TOLERANCE, f"logits differ by {difference}"
    top = mx.sort(expected, axis=-1)
    clear = (top[..., -1] - top[..., -2]) > 2 * TOLERANCE
    same = got.argmax(-1) == expected.argmax(-1)
    assert bool((same | ~clear).all().item()), "ids differ"


class Troupe:
    """A batch under test: rows with a fixed text each, compared at every step."""

    def __init__(self, model: nn.Module, plan: KVPlan = PLAIN_PLAN) -> None:
        self.model = model
        self.batch = RowBatch(model, plan)
        self.texts: dict[RowId, tuple[int, ...]] = {}
        self.starts: dict[RowId, int] = {}
        self.expected: dict[RowId, mx.array] = {}

    def add(self, row: int, length: int, steps: int = 32) -> RowId:
        """Join a row of ``length`` tokens, whose text goes on for ``steps`` more."""
        name, text = RowId(row), prompt(length + steps, seed=row)
        self.texts[name], self.starts[name] = text, length
        self.expected[name] = solo_logits(self.model, text, length)
        self.batch.join(name, solo_prefill(self.model, text[:length]), length)
        return name

    def drop(self, row: int, *, poisoned: bool = False) -> None:
        self.batch.leave(RowId(row), poisoned=poisoned)

    def forward(self, columns: int) -> mx.array:
        """One pass with each row's own next tokens, not yet committed."""
        caches = self.batch.begin(columns)
        tokens = [
            self.texts[row][self.batch.length(row) : self.batch.length(row) + columns]
            for row in self.batch.rows
        ]
        logits = self.model(mx.array(tokens), cache=caches)
        mx.eval(logits, self.batch.arrays)
        return logits

    def step(self, columns: int = 1, kept: Sequence[int] | int | None = None) -> None:
        """One pass, every row's logits compared with its solo run."""
        logits = self.forward(columns)
        for i, row in enumerate(self.batch.rows):
            at = self.batch.length(row) - self.starts[row]
            assert_equal(logits[i], self.expected[row][at : at + columns])
        self.batch.commit(columns if kept is None else kept)

    def poison(self, row: int, columns: int = 1) -> None:
        """Make a row's state NaN and take a step: that row's logits are none, all others are."""
        bad = RowId(row)
        length = self.batch.length(bad)
        caches = self.batch.export(bad, length)
        for layer in caches:
            if isinstance(layer, ArraysCache):
                layer.cache = [x * mx.nan for x in layer.cache]
            else:
                layer.keys, layer.values = layer.keys * mx.nan, layer.values * mx.nan
        self.batch.leave(bad)
        self.batch.join(bad, caches, length)
        logits = self.forward(columns)
        for i, name in enumerate(self.batch.rows):
            assert bool(mx.isfinite(logits[i]).all().item()) is (name != bad)
        self.batch.commit(columns)

    def prefill(self, counts: Mapping[int, int]) -> None:
        """One pass over the rows' next tokens, right-padded, as many of each as ``counts`` says."""
        caches = self.batch.begin(max(counts.values()), {RowId(r): n for r, n in counts.items()})
        rows, longest = self.batch.rows, max(counts.values())
        at = {row: self.batch.length(row) for row in rows}
        tokens = [
            self.texts[row][at[row] : at[row] + counts[row]] + (0,) * (longest - counts[row])
            for row in rows
        ]
        logits = self.model(mx.array(tokens), cache=caches)
        for i, row in enumerate(rows):
            first = at[row] - self.starts[row]
            expected = self.expected[row][first : first + counts[row]]
            assert_equal(logits[i, : counts[row]], expected)
        self.batch.commit([counts[row] for row in rows])

    def adopt(self, other: Troupe, row: int) -> None:
        """Take a row over from another batch, with its text."""
        name = RowId(row)
        self.batch.adopt(name, other.batch)
        self.texts[name] = other.texts[name]
        self.starts[name] = other.starts[name]
        self.expected[name] = other.expected[name]


def hand_over(nursery: Troupe, batch: Troupe) -> None:
    """Four rows, with and without a past, prefilled together; three go over to another batch."""
    for row, before in enumerate((0, 0, 7, 58)):
        nursery.add(row, before, steps=40)
    batch.add(9, 20)
    batch.step()
    for _ in range(2):
        nursery.prefill(dict(enumerate((5, 1, 12, 3))))
    for row in (2, 0, 3):
        batch.adopt(nursery, row)
        batch.step()
        nursery.prefill(dict.fromkeys(nursery.batch.rows, 2))


def poison_one_of_three(troupe: Troupe, row: int) -> None:
    """NaN in one row, which leaves; the next user of its slot takes steps beside the others."""
    for other, length in enumerate((30, 25, 40)):
        troupe.add(other, length)
    troupe.step()
    troupe.poison(row)
    troupe.drop(row, poisoned=True)
    troupe.step()
    troupe.add(7, 3)
    troupe.step(4)


class Replayed(Troupe):
    """Steps of one column go through the traces as soon as there is one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.compiled = CompiledDecode(model, self.batch, Adapters(model, together=True))
        self.replays = 0

    def forward(self, columns: int) -> mx.array:
        if columns > 1:
            return super().forward(columns)
        self.batch.begin(1)
        tokens = [self.texts[row][self.batch.length(row)] for row in self.batch.rows]
        logits = self.compiled.logits(mx.array(tokens), [()] * len(tokens))
        if logits is None:
            return super().forward(columns)
        self.replays += 1
        mx.eval(logits, self.batch.arrays)
        return logits


LENGTHS = (3, 60, 17, 1, 126, 40, 0, 62)


def ragged_run(model: nn.Module, plan: KVPlan = PLAIN_PLAN) -> None:
    """Rows of many lengths: capacities and windows are crossed, rows join and leave."""
    troupe = Troupe(model, plan)
    for row, length in enumerate(LENGTHS[:4]):
        troupe.add(row, length)
    for _ in range(6):
        troupe.step()
    for row, length in enumerate(LENGTHS[4:], 4):
        troupe.add(row, length)
    troupe.step()
    troupe.step(4)
    troupe.drop(1)
    troupe.drop(4)
    for _ in range(6):
        troupe.step()
    troupe.drop(0)
    troupe.add(9, 2)
    troupe.step(4)
    for _ in range(8):
        troupe.step()
