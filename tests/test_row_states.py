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

from mlx_troupe.runtime.device import RowId
from mlx_troupe.runtime.engine import layouts
from mlx_troupe.runtime.engine.batch import CannotTrim, RaggedPrefill, RowBatch

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
def test_lone_rows_are_prefilled_together(name: str) -> None:
    """Right-padded rows with and without a past fill their own caches as if alone."""
    model = model_named(name)
    befores, counts = (0, 0, 7, 30), (5, 1, 12, 3)
    texts = [
        prompt(b + c + 4, seed=i) for i, (b, c) in enumerate(zip(befores, counts, strict=True))
    ]
    caches = [solo_prefill(model, text[:b]) for text, b in zip(texts, befores, strict=True)]
    tokens = [
        (*text[b : b + c], *(0,) * (max(counts) - c))
        for text, b, c in zip(texts, befores, counts, strict=True)
    ]
    together = model(mx.array(tokens), cache=RaggedPrefill(caches, counts).caches)
    for i, (text, b, c) in enumerate(zip(texts, befores, counts, strict=True)):
        expected = solo_logits(model, text, b)
        assert_equal(together[i, :c], expected[:c])
        assert all(cache.offset == b + c for cache in caches[i])
        assert_equal(model(mx.array([text[b + c :]]), cache=caches[i])[0], expected[c:])


def test_sliding_rows_are_not_prefilled_together() -> None:
    """Only plain caches take a padded pass."""
    with pytest.raises(TypeError):
        RaggedPrefill([solo_prefill(model_named("sliding"), (3, 4))], [2])


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
