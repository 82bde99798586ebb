"""Rows in blocks of a pool against each row alone, and against the plain layout bit for bit."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from ragged_rig import Troupe, assert_equal, hand_over, model_named, ragged_run, solo_prefill
from tiny import prompt

from mlx_troupe.runtime.engine import batch as batch_module
from mlx_troupe.runtime.engine import steps
from mlx_troupe.runtime.engine.batch import RowBatch
from mlx_troupe.runtime.engine.kvplan import KVPlan
from mlx_troupe.runtime.engine.layouts import KVLayout
from mlx_troupe.runtime.engine.paged import PagedLayout
from mlx_troupe.runtime.engine.pages import Pages
from mlx_troupe.runtime.plans import RowId

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.mlx

BLOCKS = KVPlan(block=16)
"""Small enough that tests' rows cross blocks and leave holes."""


class WholeStep(steps.Step):
    """A step as GPUs get it: attention reads whole capacities, by the fused kernel."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.on_cpu = False


def pages_of(batch: RowBatch) -> Pages:
    """The block tables that a batch's paged layers share."""
    pages: Pages = next(layer._pages for layer in batch.layers if isinstance(layer, PagedLayout))
    return pages


@pytest.mark.parametrize("step", [steps.Step, WholeStep], ids=["filled", "whole"])
@pytest.mark.parametrize("block", [16, 256])
@pytest.mark.parametrize("name", ["llama", "llama-4-kv-heads", "sliding", "qwen3_5"])
def test_paged_rows_equal_solo_rows(
    name: str, block: int, step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joins, leaves, capacity moves and four columns at once leave every logit as it was."""
    monkeypatch.setattr(batch_module, "Step", step)
    ragged_run(model_named(name), KVPlan(block=block))


@pytest.mark.parametrize("step", [steps.Step, WholeStep], ids=["filled", "whole"])
def test_paged_rows_equal_plain_ones_bit_for_bit(
    step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same joins, leaves and steps in both layouts: equal logits, to the last bit."""
    monkeypatch.setattr(batch_module, "Step", step)
    model = model_named("llama")
    both = Troupe(model), Troupe(model, BLOCKS)
    draw = random.Random(2)
    for move in range(12):
        rows = both[0].batch.rows
        leaving = draw.choice(rows) if len(rows) > 2 else None
        columns, length = draw.choice((1, 1, 3)), draw.choice((0, 5, 15, 16, 60, 130))
        for troupe in both:
            if leaving is not None:
                troupe.drop(leaving)
            troupe.add(move, length)
        plain, paged = (troupe.forward(columns) for troupe in both)
        assert both[0].batch.rows == both[1].batch.rows
        assert mx.array_equal(plain, paged).item()
        for troupe in both:
            troupe.batch.commit(columns)


def test_only_layers_that_see_everything_are_paged() -> None:
    """Rings are as long as their window anyway, and recurrent states have no tokens."""
    kinds = {
        name: [type(layer) is PagedLayout for layer in RowBatch(model_named(name), BLOCKS).layers]
        for name in ("llama", "sliding", "qwen3_5")
    }
    assert kinds == {
        "llama": [True] * 3,
        "sliding": [False, True, False],
        "qwen3_5": [False, True, False, True],
    }
    assert all(type(layer) is KVLayout for layer in RowBatch(model_named("llama")).layers)


def test_random_moves_keep_blocks_apart() -> None:
    """No block has two owners whatever happens; the pool follows the rows up and down."""
    troupe = Troupe(model_named("llama"), BLOCKS)
    pages = pages_of(troupe.batch)
    draw = random.Random(5)
    for move in range(40):
        rows = troupe.batch.rows
        if len(rows) > 1 and draw.random() < (0.25 if move < 20 else 0.8):
            troupe.drop(draw.choice(rows), poisoned=draw.random() < 0.5)
        else:
            left = 2 * (40 - move)
            troupe.add(100 + move, draw.choice((0, 3, 15, 16, 17, 90)), steps=left)
        columns = draw.choice((1, 1, 2))
        troupe.step(columns, [draw.randint(0, columns) for _ in troupe.batch.rows])
        pages.check_integrity()
        needed = sum(-(-(troupe.batch.length(row) + 2) // 16) for row in troupe.batch.rows)
        assert pages.size <= 2 * needed + 2
    for row in troupe.batch.rows:
        troupe.drop(row)
    assert troupe.batch.arrays == []
    assert pages.size == 1
    troupe.add(1, 40)
    troupe.step()


def test_memory_follows_what_rows_fill() -> None:
    """A row just past a power of two takes a block more, not twice its length."""
    model = model_named("llama")
    sizes: dict[int, int] = {}
    for block in (0, 16):
        batch = RowBatch(model, KVPlan(block=block or None))
        batch.join(RowId(0), solo_prefill(model, prompt(260)))
        mx.eval(model(mx.array([[3]]), cache=batch.begin(1)), batch.arrays)
        sizes[block] = batch.nbytes
    per_token = sizes[0] // 512
    assert sizes[16] == per_token * 16 * (1 + 17)


def test_a_poisoned_row_hurts_nobody() -> None:
    """NaN in one row's blocks stays there, and their next owners compute right."""
    poison_and_reuse(Troupe(model_named("llama"), BLOCKS))


def poison_and_reuse(troupe: Troupe) -> None:
    """A row of NaN among others leaves; two rows that grow take its blocks."""
    for row, length in enumerate((30, 47, 29)):
        troupe.add(row, length)
    troupe.step()
    troupe.poison(1)
    troupe.drop(1, poisoned=True)
    for _ in range(6):
        troupe.step()
    troupe.add(7, 3)
    troupe.step(4)
    troupe.add(8, 16)
    troupe.step()


@pytest.mark.parametrize("length", [0, 1, 16, 33, 70])
def test_an_exported_row_goes_on_alone(length: int) -> None:
    """What export returns, cut or whole, continues as if never batched, and may come back."""
    model = model_named("llama")
    troupe = Troupe(model, BLOCKS)
    row = troupe.add(1, length)
    troupe.add(2, 21)
    for _ in range(5):
        troupe.step()
    text, expected = troupe.texts[row], troupe.expected[row]
    for cut in (length + 5, length + 3, length):
        caches = troupe.batch.export(row, cut)
        logits = [model(mx.array([[token]]), cache=caches)[0] for token in text[cut : cut + 3]]
        at = cut - length
        assert_equal(mx.concatenate(logits), expected[at : at + 3])
    caches = troupe.batch.export(row, length + 5)
    troupe.batch.leave(row)
    troupe.batch.join(row, caches)
    troupe.step()


def test_rows_are_prefilled_together_and_handed_over() -> None:
    """Right-padded rows with and without a past, in one pass, then one by one in other batches."""
    model = model_named("llama")
    nursery, batch = Troupe(model, BLOCKS), Troupe(model, BLOCKS)
    hand_over(nursery, batch)
    batch.step(4)


def share_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block in use is given away once more."""
    honest = Pages._give

    def careless(self: Pages, chains: Any, wanted: Any) -> list[int]:
        given = honest(self, chains, wanted)
        if given and len(chains) > 1 and len(chains[0].blocks) > 1:
            chains[-1].blocks[0] = chains[0].blocks[0]
        return given

    monkeypatch.setattr(Pages, "_give", careless)


def lose_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer does not write one step's keys and values."""
    honest, calls = PagedLayout.write, [0]

    def forgetful(self: PagedLayout, *args: Any) -> None:
        calls[0] += 1
        if calls[0] != 5:
            honest(self, *args)

    monkeypatch.setattr(PagedLayout, "write", forgetful)


def stay_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the pool shrinks, tables are renumbered but blocks stay where they were."""
    honest = PagedLayout._resized

    def lazy(self: PagedLayout, pool: mx.array, resize: Any) -> mx.array:
        kept = resize.kept and tuple(range(len(resize.kept)))
        return honest(self, pool, type(resize)(resize.size, kept, resize.wiped))

    monkeypatch.setattr(PagedLayout, "_resized", lazy)


def shrinking_run(model: Any) -> None:
    """A ragged run, and then so many rows leave that the pool is packed anew."""
    ragged_run(model, BLOCKS)
    troupe = Troupe(model, BLOCKS)
    for row, length in enumerate((120, 110, 20, 100, 30)):
        troupe.add(row, length)
    troupe.step()
    for row in (0, 1, 3):
        troupe.drop(row)
    troupe.step()


@pytest.mark.parametrize("mutant", [share_a_block, lose_a_token, stay_behind])
def test_the_comparison_catches_broken_tables(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared block, a lost token and blocks left behind each fail the very run that passes."""
    model = model_named("llama")
    shrinking_run(model)
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match="differ"):
        shrinking_run(model)


def test_blocks_that_are_not_wiped_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the zeroing, the NaN of a row that left reaches the next owner of its block."""
    honest = PagedLayout._resized

    def dirty(self: PagedLayout, pool: mx.array, resize: Any) -> mx.array:
        return honest(self, pool, type(resize)(resize.size, resize.kept, ()))

    monkeypatch.setattr(PagedLayout, "_resized", dirty)
    with pytest.raises(AssertionError, match="no numbers"):
        poison_and_reuse(Troupe(model_named("llama"), BLOCKS))
