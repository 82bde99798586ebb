"""Rows on their way into a batch, out of it, and in a padded prefill, against solo rows."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache
from ragged_rig import (
    WINDOW,
    Troupe,
    assert_equal,
    model_named,
    solo_logits,
    solo_prefill,
)
from tiny import prompt

from mlx_troupe.runtime.engine import layouts
from mlx_troupe.runtime.engine.batch import CannotTrim, RowBatch
from mlx_troupe.runtime.plans import RowId

pytestmark = pytest.mark.mlx


@pytest.mark.parametrize("name", ["llama", "sliding", "short-window"])
@pytest.mark.parametrize("length", [0, 1, 6, 16, 17, 33, 40, 70])
def test_an_exported_row_goes_on_alone(name: str, length: int) -> None:
    """What export returns continues, one token or several at a time, as if never batched."""
    model = model_named(name)
    troupe = Troupe(model)
    row = troupe.add(1, length)
    troupe.add(2, 21)
    for _ in range(5):
        troupe.step()
    text, expected = troupe.texts[row], troupe.expected[row]
    for cut in (length + 5, length + 3, length):
        caches = troupe.batch.export(row, cut)
        mx.eval([c.state[:2] for c in caches if c.keys is not None])
        assert all(c.offset == cut for c in caches)
        assert all(c.keys is None or c.keys.shape[2] <= cut for c in caches)
        logits = [model(mx.array([text[cut : cut + 3]]), cache=caches)[0]]
        logits += [model(mx.array([[token]]), cache=caches)[0] for token in text[cut + 3 : cut + 7]]
        logits.append(model(mx.array([text[cut + 7 : cut + 10]]), cache=caches)[0])
        at = cut - length
        assert_equal(mx.concatenate(logits), expected[at : at + 10])
    troupe.step()


@pytest.mark.parametrize("name", ["llama", "sliding"])
def test_a_row_comes_back_after_export(name: str) -> None:
    """Leaving with an export and joining with it again changes nothing, cut or whole."""
    troupe = Troupe(model_named(name))
    for row, length in enumerate((4, 30, 62)):
        troupe.add(row, length)
    for _ in range(3):
        for row in troupe.batch.rows:
            length = troupe.batch.length(row)
            caches = troupe.batch.export(row, length)
            troupe.batch.leave(row)
            troupe.batch.join(row, caches)
            assert troupe.batch.length(row) == length
        troupe.step()
        troupe.step(2)


@pytest.mark.parametrize("length", [3, 15, 16, 17, 31, 32, 33, 50, 90])
@pytest.mark.parametrize("singles", [0, 1, 5, 20])
def test_every_state_of_a_rotating_cache_joins(length: int, singles: int) -> None:
    """Unwrapped, wrapped, longer than its window: a lone sliding row joins from any state."""
    model = model_named("sliding")
    troupe = Troupe(model)
    text = prompt(length + singles + 6, seed=length)
    caches = solo_prefill(model, text[:length])
    for token in text[length : length + singles]:
        model(mx.array([[token]]), cache=caches)
    row = RowId(0)
    troupe.texts[row], troupe.starts[row] = text, length + singles
    troupe.expected[row] = solo_logits(model, text, length)[singles:]
    troupe.batch.join(row, caches)
    again = troupe.batch.export(row, length + singles)
    assert_equal(model(mx.array([text[length + singles :]]), cache=again)[0], troupe.expected[row])
    for _ in range(6):
        troupe.step()


def test_a_wrapped_row_is_cut_by_up_to_the_slack() -> None:
    """After the ring has wrapped, the last 16 tokens can be taken back, and not more."""
    model = model_named("sliding")
    troupe = Troupe(model)
    row = troupe.add(0, 1, steps=90)
    for _ in range(70):
        troupe.step()
    held = troupe.batch.length(row)
    caches = troupe.batch.export(row, held - layouts.SLACK)
    text = troupe.texts[row][held - layouts.SLACK : held]
    logits = [model(mx.array([[token]]), cache=caches)[0] for token in text]
    at = held - layouts.SLACK - 1
    assert_equal(mx.concatenate(logits), troupe.expected[row][at : at + layouts.SLACK])
    with pytest.raises(CannotTrim):
        troupe.batch.export(row, held - layouts.SLACK - 1)


def test_exports_are_copies() -> None:
    """Neither the batch's later steps nor the lone cache's reach each other's bytes."""
    model = model_named("llama")
    troupe = Troupe(model)
    row = troupe.add(3, 64)
    lone = solo_prefill(model, troupe.texts[row][:64])
    troupe.batch.leave(row)
    troupe.batch.join(row, lone)
    model(mx.array([[5]]), cache=lone)
    troupe.step()
    caches = troupe.batch.export(row, 65)
    before = mx.array(caches[0].keys)
    mx.eval(before)
    for _ in range(3):
        troupe.step()
    assert mx.array_equal(before, caches[0].keys).item()
    assert all(type(cache) is KVCache and cache.keys.shape[2] == 65 for cache in caches)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_rows_are_prefilled_together_and_handed_over(name: str) -> None:
    """Right-padded rows with and without a past, in one pass, then one by one in other batches."""
    model = model_named(name)
    nursery, batch = Troupe(model), Troupe(model)
    counts = dict(enumerate((5, 1, 12, 3)))
    for row, before in enumerate((0, 0, 7, 58)):
        nursery.add(row, before, steps=40)
    batch.add(9, 20)
    batch.step()
    for _ in range(2):
        nursery.prefill(counts)
    for row in (2, 0, 3):
        batch.adopt(nursery, row)
        batch.step()
        nursery.prefill(dict.fromkeys(nursery.batch.rows, 2))
    assert nursery.batch.rows == (1,)
    batch.step(4)
    alone = nursery.batch.export(RowId(1), 8)
    text, expected = nursery.texts[RowId(1)], nursery.expected[RowId(1)]
    assert_equal(model(mx.array([text[8:12]]), cache=alone)[0], expected[8:12])


def test_a_row_of_nans_in_a_shared_prefill_hurts_nobody() -> None:
    """Neither in the pass, nor those who stand in its slots after it was handed over."""
    model = model_named("llama")
    nursery, batch = Troupe(model), Troupe(model)
    for row in range(3):
        nursery.add(row, 8, steps=30)
    nursery.poison(0, columns=9)
    batch.adopt(nursery, 0)
    for row in (1, 2):
        nursery.step(2)
        batch.adopt(nursery, row)
    batch.drop(0, poisoned=True)
    batch.step()


def test_a_handed_over_ring_keeps_its_turns() -> None:
    """Sliding rows change batches at any length, short of a turn, amid one and after several."""
    model = model_named("sliding")
    first, second = Troupe(model), Troupe(model)
    for row, length in enumerate((2, 14, 31, 33, 70)):
        first.add(row, length, steps=60)
    for _ in range(4):
        first.step(3)
        for row in first.batch.rows:
            second.adopt(first, row)
        second.step(2)
        first, second = second, first


def test_strangers_and_wrong_states_are_errors() -> None:
    """Joining twice, leaving unknown, exporting too much and foreign caches are refused."""
    model = model_named("sliding")
    batch = RowBatch(model)
    batch.join(RowId(1), solo_prefill(model, (3, 4, 5)))
    with pytest.raises(ValueError, match="already"):
        batch.join(RowId(1), solo_prefill(model, (3,)))
    with pytest.raises(KeyError):
        batch.leave(RowId(2))
    with pytest.raises(ValueError, match="holds 3"):
        batch.export(RowId(1), 4)
    with pytest.raises(TypeError):
        batch.join(RowId(3), [KVCache() for _ in range(3)])
    with pytest.raises(TypeError):
        batch.join(RowId(3), [RotatingKVCache(WINDOW, keep=4) for _ in range(3)])
    assert batch.rows == (1,)
