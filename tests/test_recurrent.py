"""Recurrent and hybrid rows in one batch against each row alone with mlx-lm's own caches."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, make_prompt_cache
from ragged_rig import (
    OTHERS,
    RECURRENT,
    Troupe,
    assert_equal,
    hand_over,
    model_named,
    poison_one_of_three,
    ragged_run,
)

from mlx_troupe.runtime.engine import recurrent
from mlx_troupe.runtime.engine.batch import CannotTrim, RowBatch, why_not_batchable
from mlx_troupe.runtime.engine.compiled import can_replay
from mlx_troupe.runtime.engine.kvplan import KVPlan
from mlx_troupe.runtime.engine.nesting import flatten, nest
from mlx_troupe.runtime.engine.recurrent import RecurrentLayout
from mlx_troupe.runtime.engine.selfcheck import may_prefill_together
from mlx_troupe.runtime.engine.snapshots import arrays_of
from mlx_troupe.runtime.plans import RowId

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.mlx

HYBRID = "qwen3_5"
MASKED = ["mamba2", "lfm2", "qwen3_5"]
"""Families whose recurrent layers heed a mask of padding."""
MASKING_OTHERS = ("granitemoehybrid", "falcon_h1", "qwen3_next")
LONE = {
    "plamo2": "a way of its own",
    # An empty state differs from one of zeros: its first token is not damped.
    "recurrent_gemma": "disagree",
}


@pytest.mark.parametrize("name", [*RECURRENT, "jamba", "falcon_h1", "granitemoehybrid"])
def test_recurrent_rows_equal_solo_rows(name: str) -> None:
    """Joins, leaves, capacity moves and four columns at once leave every logit as it was."""
    ragged_run(model_named(name))


def test_random_joins_leaves_and_steps() -> None:
    """Random moves on a hybrid, every logit compared; empty rows join among full ones."""
    troupe = Troupe(model_named(HYBRID))
    draw = random.Random(3)
    for move in range(14):
        rows = troupe.batch.rows
        if len(rows) > 1 and draw.random() < 0.4:
            troupe.drop(draw.choice(rows), poisoned=draw.random() < 0.3)
        else:
            troupe.add(100 + move, draw.choice((0, 1, 5, 61, 63)), steps=28)
        troupe.step(draw.choice((1, 1, 2)))


@pytest.mark.parametrize("name", RECURRENT)
def test_an_exported_row_goes_on_alone(name: str) -> None:
    """The state as it is and that of one token ago continue as if never batched; no older one."""
    model = model_named(name)
    troupe = Troupe(model)
    row = troupe.add(1, 9)
    troupe.add(2, 21)
    for _ in range(4):
        troupe.step()
    text, expected = troupe.texts[row], troupe.expected[row]
    for cut in (13, 12):
        caches = troupe.batch.export(row, cut)
        logits = [model(mx.array([[token]]), cache=caches)[0] for token in text[cut : cut + 3]]
        assert_equal(mx.concatenate(logits), expected[cut - 9 : cut - 6])
    with pytest.raises(CannotTrim, match="11"):
        troupe.batch.export(row, 11)
    troupe.step()


def test_what_is_one_token_ago_follows_the_rows() -> None:
    """After others left and joined, a row's state of one token ago is still its own."""
    model = model_named(HYBRID)
    troupe = Troupe(model)
    for row, length in enumerate((4, 30, 62, 7)):
        troupe.add(row, length)
    troupe.step()
    for move in range(4):
        troupe.drop(troupe.batch.rows[0])
        troupe.add(10 + move, 20 + 20 * move)
        troupe.step()
        for row in troupe.batch.rows:
            length = troupe.batch.length(row) - 1
            caches = troupe.batch.export(row, length)
            got = model(mx.array([[troupe.texts[row][length]]]), cache=caches)[0]
            assert_equal(got, troupe.expected[row][length - troupe.starts[row]][None])


def test_the_step_before_is_not_always_one_token_ago() -> None:
    """After a move, several columns or a prefill no older state is offered."""
    model = model_named(HYBRID)
    troupe, other = Troupe(model), Troupe(model)
    troupe.add(1, 9)
    troupe.add(2, 5)
    with pytest.raises(CannotTrim):
        troupe.batch.export(RowId(1), 8)
    troupe.step(3)
    with pytest.raises(CannotTrim):
        troupe.batch.export(RowId(1), 11)
    troupe.step()
    other.adopt(troupe, 1)
    with pytest.raises(CannotTrim):
        other.batch.export(RowId(1), 12)
    other.step()
    troupe.step()
    assert [type(c) for c in other.batch.export(RowId(1), 13)] == [
        type(c) for c in make_prompt_cache(model)
    ]


@pytest.mark.parametrize("name", RECURRENT)
def test_a_step_can_be_taken_back(name: str) -> None:
    """By all rows, or by some of them, whether it was of one column or several."""
    troupe = Troupe(model_named(name))
    for row, length in enumerate((0, 13, 62)):
        troupe.add(row, length)
    troupe.step(4, [0, 0, 0])
    troupe.step()
    troupe.step(1, [0, 0, 0])
    troupe.step(1, [1, 0, 1])
    troupe.step(3, [0, 3, 3])
    troupe.step()
    with pytest.raises(ValueError, match="kept"):
        troupe.step(4, [1, 4, 2])


@pytest.mark.parametrize("name", MASKED)
def test_accepted_columns_are_replayed(name: str) -> None:
    """A step of which a part is wanted: taken back, and run again with the counts told."""
    troupe = Troupe(model_named(name))
    draw = random.Random(8)
    for row, length in enumerate((2, 13, 60)):
        troupe.add(row, length, steps=52)
    for _ in range(6):
        troupe.step(4, [0, 0, 0])
        troupe.prefill({row: draw.randrange(1, 5) for row in troupe.batch.rows})


@pytest.mark.parametrize("name", MASKED)
def test_rows_are_prefilled_together_and_handed_over(name: str) -> None:
    """Right-padded rows with and without a past, in one pass, then one by one in other batches."""
    model = model_named(name)
    nursery, batch = Troupe(model), Troupe(model)
    hand_over(nursery, batch)
    assert nursery.batch.rows == (1,)
    batch.step()


@pytest.mark.parametrize("name", [*RECURRENT])
def test_a_poisoned_row_hurts_nobody(name: str) -> None:
    """NaN in one row's state stays there, and the next user of its slot computes right."""
    for poisoned_row in (0, 1, 2):
        troupe = Troupe(model_named(name))
        poison_one_of_three(troupe, poisoned_row)
        troupe.add(8, 0)
        troupe.step()


def test_exports_own_their_bytes() -> None:
    """A kept state is as large as one row, and the batch's later steps do not reach it."""
    troupe = Troupe(model_named("mamba2"))
    row = troupe.add(3, 20)
    troupe.add(4, 20)
    troupe.step()
    caches = troupe.batch.export(row, 21)
    before = [mx.array(x) for x in arrays_of(caches)]
    mx.eval(before)
    for _ in range(3):
        troupe.step()
    for old, now in zip(before, arrays_of(caches), strict=True):
        assert now.shape[0] == 1
        assert mx.array_equal(old, now).item()


def test_the_last_row_frees_everything() -> None:
    """Nothing of a batch without rows is left."""
    troupe = Troupe(model_named(HYBRID))
    for row in range(3):
        troupe.add(row, 10 * row)
    troupe.step()
    for row in range(3):
        troupe.drop(row)
    assert troupe.batch.arrays == []
    troupe.add(5, 4)
    troupe.step()


def go_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the last row leaves or another takes its place, the states stay where they were."""
    honest = RecurrentLayout._reseat

    def stale(self: Any, step: Any) -> None:
        seats = self._seats.in_order(step.segments)
        if not self._rows or not all(isinstance(seat, int) for seat in seats):
            honest(self, step)
            return
        self._now.cache = [x[: len(seats)] for x in self._now.cache]
        self._seats.put(step.segments, range(len(seats)))

    monkeypatch.setattr(RecurrentLayout, "_reseat", stale)


def lose_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer's state is that of the step before."""
    honest, calls = RecurrentLayout.commit, [0]

    def forgetful(self: Any, counts: Any) -> None:
        honest(self, counts)
        calls[0] += 1
        if calls[0] == 9 and self._before is not None:
            self._now.cache = list(self._before)

    monkeypatch.setattr(RecurrentLayout, "commit", forgetful)


def swap_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows that are put together anew change places."""
    honest = recurrent._places

    def swapped(*args: Any) -> list[int]:
        first, *others = honest(*args)
        return [*others[:1], first, *others[1:]]

    monkeypatch.setattr(recurrent, "_places", swapped)


@pytest.mark.parametrize("mutant", [go_stale, lose_an_update, swap_rows])
@pytest.mark.parametrize("name", RECURRENT)
def test_the_comparison_catches_broken_layouts(
    mutant: Callable[[pytest.MonkeyPatch], None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stale state, a lost update and swapped rows each fail the very run that passes."""
    model = model_named(name)
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match="differ"):
        ragged_run(model)


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_families_may_share(name: str) -> None:
    """The check at load lets them decode together, and be prefilled so where padding is masked."""
    model = model_named(name)
    assert why_not_batchable(model) is None
    assert may_prefill_together(model) is (name in MASKED)


@pytest.mark.parametrize("name", OTHERS)
def test_other_families_are_tried_at_load(name: str) -> None:
    """Those that work share steps, padding only where it is masked; the others say why not."""
    model = model_named(name)
    reason = why_not_batchable(model)
    if name in LONE:
        assert reason is not None
        assert name in reason
        assert LONE[name] in reason
        return
    assert reason is None
    assert may_prefill_together(model) is (name in MASKING_OTHERS)


def test_the_check_at_load_finds_rows_that_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows whose states are mixed up at load are refused."""
    swap_rows(monkeypatch)
    assert "disagree" in (why_not_batchable(model_named("mamba")) or "")


def test_only_layers_of_keys_and_values_are_replayed() -> None:
    """Where steps cannot be replayed, a lone row gains nothing by a batch and stays alone."""
    assert can_replay(RowBatch(model_named("llama")))
    assert can_replay(RowBatch(model_named("sliding")))
    assert not can_replay(RowBatch(model_named(HYBRID)))
    assert not can_replay(RowBatch(model_named("llama"), KVPlan(block=16)))


def test_lists_of_caches_are_flattened_and_nested() -> None:
    """A layer with two kinds of state is two layers for the batch, and a list for the model."""
    like = [CacheList(ArraysCache(size=2), KVCache()), KVCache()]  # type: ignore[no-untyped-call]
    leaves = flatten(like)
    assert [type(c) for c in leaves] == [ArraysCache, KVCache, KVCache]
    again = nest(leaves, like)
    assert [type(c) for c in again] == [CacheList, KVCache]
    assert flatten(again) == leaves


def test_other_states_are_refused() -> None:
    """A strange cache, and a state of which a part is missing, do not join."""
    layout = RecurrentLayout(2)
    half: Any = ArraysCache(size=2)  # type: ignore[no-untyped-call]
    half[0] = mx.zeros((1, 3))
    for cache in (half, KVCache(), ArraysCache(size=3)):  # type: ignore[no-untyped-call]
        with pytest.raises(TypeError):
            layout.take(cache)
