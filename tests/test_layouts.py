"""Ragged rows in one batch against each row alone with mlx-lm's own caches."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ChunkedKVCache, make_prompt_cache
from mutants import forget_the_window, leak_a_slot, lose_a_token
from ragged_rig import (
    MODELS,
    WINDOW,
    Troupe,
    model_named,
    poison_one_of_three,
    ragged_run,
    solo_prefill,
)
from tiny import load_oracle, make_checkpoint, prompt

from mlx_troupe.runtime.engine import batch as batch_module
from mlx_troupe.runtime.engine import layouts, steps
from mlx_troupe.runtime.engine.batch import RowBatch, why_not_batchable
from mlx_troupe.runtime.plans import RowId

if TYPE_CHECKING:
    from collections.abc import Callable

    import mlx.nn as nn

pytestmark = pytest.mark.mlx


class WholeStep(steps.Step):
    """A step as GPUs get it: attention reads whole capacities, by the fused kernel."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.on_cpu = False


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("step", [steps.Step, WholeStep], ids=["filled", "whole"])
def test_ragged_rows_equal_solo_rows(name: str, step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Joins, leaves, capacity moves and four columns at once leave every logit as it was."""
    monkeypatch.setattr(batch_module, "Step", step)
    ragged_run(model_named(name))


@pytest.mark.parametrize("name", ["llama", "llama-4-kv-heads", "sliding"])
@pytest.mark.parametrize("rows", [2, 4])
def test_as_many_rows_as_kv_heads(name: str, rows: int) -> None:
    """A mask that is broadcast along the wrong axis shows when rows and key heads are as many."""
    troupe = Troupe(model_named(name))
    for row in range(rows):
        troupe.add(row, 5 + 9 * row)
    troupe.step()
    troupe.step(4)
    troupe.step()


def test_a_step_keeps_only_what_is_committed() -> None:
    """Columns taken back by the commit are computed again, with equal logits, in rings too."""
    troupe = Troupe(model_named("sliding"))
    for row, length in enumerate((2, 13, 30, 61)):
        troupe.add(row, length, steps=52)
    draw = random.Random(5)
    for _ in range(12):
        troupe.step(4, [draw.randrange(5) for _ in troupe.batch.rows])


def test_random_joins_leaves_and_steps() -> None:
    """Twenty random moves on the sliding model, every logit compared."""
    troupe = Troupe(model_named("sliding"))
    draw = random.Random(11)
    for move in range(20):
        rows = troupe.batch.rows
        if len(rows) > 1 and draw.random() < 0.4:
            troupe.drop(draw.choice(rows))
        else:
            troupe.add(100 + move, draw.randrange(70), steps=50)
        troupe.step(draw.choice((1, 1, 2)))


def test_a_poisoned_row_hurts_nobody() -> None:
    """NaN in one row stays there, and the next user of its slot computes right."""
    model = model_named("sliding")
    for poisoned_row in (0, 1, 2):
        troupe = Troupe(model)
        poison_one_of_three(troupe, poisoned_row)
        troupe.step()


def blank_caches(model: nn.Module, length: int) -> list[Any]:
    """Plain caches of zeros: sizes matter here, values do not."""
    caches = make_prompt_cache(model)
    for cache in caches:
        cache.update_and_fetch(mx.zeros((1, 2, length, 16)), mx.zeros((1, 2, length, 16)))
    return caches


def test_memory_follows_need() -> None:
    """Fifteen rows of 60 tokens and one of 4,000 hold at most 2.5 × what they need."""
    model = model_named("llama")
    batch = RowBatch(model)
    short, long = blank_caches(model, 60), blank_caches(model, 4000)
    for row in range(15):
        batch.join(RowId(row), short)
    batch.join(RowId(15), long)
    logits = model(mx.array([[3]] * 16), cache=batch.begin(1))
    mx.eval(logits)
    batch.commit(1)
    per_token = long[0].keys[..., :1, :].nbytes * 2 * len(long)
    assert 0 < batch.nbytes <= 2.5 * per_token * (15 * 61 + 4001)
    for row in range(15):
        batch.leave(RowId(row))
    mx.eval(model(mx.array([[3]]), cache=batch.begin(1)))
    assert batch.nbytes <= 2 * per_token * 4002
    batch.leave(RowId(15))
    assert batch.nbytes == 0
    assert batch.rows == ()


def test_rings_hold_no_more_than_window_and_slack() -> None:
    """A sliding layer of a long row is as long as its ring."""
    model = model_named("sliding")
    batch = RowBatch(model)
    batch.join(RowId(0), solo_prefill(model, prompt(300)))
    mx.eval(model(mx.array([[3]]), cache=batch.begin(1)))
    depths = {array.shape[2] for array in batch.arrays}
    assert depths == {512, WINDOW + layouts.SLACK}
    with pytest.raises(ValueError, match="columns"):
        batch.begin(layouts.SLACK + 2)


@pytest.mark.parametrize("mutant", [leak_a_slot, lose_a_token, forget_the_window])
def test_the_comparison_catches_broken_layouts(
    mutant: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A leaked slot, a lost token and a missing window each fail the very run that passes."""
    model = model_named("sliding")
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match="differ"):
        ragged_run(model)


@pytest.mark.parametrize("name", MODELS)
def test_good_families_may_share(name: str) -> None:
    """The check at load passes the families of this file."""
    assert why_not_batchable(model_named(name)) is None


def test_a_state_without_a_layout_is_refused_by_name(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a model whose caches no layout knows run one by one, and the reason says which."""
    model = load_oracle(make_checkpoint(tmp_path / "m", "llama"))
    monkeypatch.setattr(type(model), "make_cache", lambda _: [ChunkedKVCache(8)], raising=False)
    reason = why_not_batchable(model)
    assert reason is not None
    assert "llama" in reason
    assert "ChunkedKVCache" in reason


def test_the_self_check_finds_a_broken_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that disagree at load are refused; so are rows that raise."""
    with monkeypatch.context() as patch:
        leak_a_slot(patch)
        assert "disagree" in (why_not_batchable(model_named("llama")) or "")
    monkeypatch.setattr(layouts.RowsCache, "make_mask", lambda *_, **__: mx.zeros((1, 1)))
    assert "fail" in (why_not_batchable(model_named("llama")) or "")
