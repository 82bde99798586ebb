"""Encoded rows in ragged batches, each against its single-request run under the same scheme.

See ``kv_rig.Company`` for what equal means.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest
from kv_rig import (
    FAMILIES,
    SCHEMES,
    Company,
    model_and_folder,
    plan_of,
    solo_prefill,
    solo_run,
)
from tiny import prompt

from mlx_troupe.runtime.engine import attention, codecs, layouts, steps
from mlx_troupe.runtime.engine.batch import RowBatch
from mlx_troupe.runtime.engine.codecs import AffineCodec
from mlx_troupe.runtime.engine.kvplan import KVPlan
from mlx_troupe.runtime.engine.nesting import flatten
from mlx_troupe.runtime.engine.snapshots import CannotCut, arrays_of, clone_all, compact, cut
from mlx_troupe.runtime.kvschemes import AffineKV, KVScheme, PerLayerKV, TurboKV
from mlx_troupe.runtime.plans import RowId

pytestmark = pytest.mark.mlx


def with_start(scheme: AffineKV | PerLayerKV | TurboKV, start: int) -> KVScheme:
    return dataclasses.replace(scheme, start=start)


def ragged_run(company: Company) -> None:
    """Capacities and windows are crossed, rows join and leave, several columns are taken back."""
    for row, length in enumerate((3, 60, 17, 1, 126, 40, 0, 62)):
        company.add(row, length)
    for _ in range(3):
        company.step()
    company.step(4)
    company.batch.leave(RowId(1))
    company.batch.leave(RowId(4))
    company.add(9, 2)
    company.step(3, [1, 0, 3, 2, 1, 3, 2][: len(company.batch.rows)])
    for _ in range(4):
        company.step()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("start", [0, 45])
def test_ragged_rows_equal_solo_rows(family: str, scheme: str, start: int) -> None:
    """Every scheme on plain and sliding layers, encoded from the start or half-way."""
    ragged_run(Company(family, with_start(SCHEMES[scheme], start)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", ["affine4", "affine8"])
@pytest.mark.parametrize("side", [codecs, attention], ids=["batch", "lone rows"])
def test_unpacked_attention_says_what_packed_says(
    side: ModuleType, family: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA, where MLX multiplies no packed keys: in the batch, or in the solo runs."""
    monkeypatch.setattr(side, "packed_products", lambda: False)
    ragged_run(Company(family, with_start(SCHEMES[scheme], 45)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", ["affine4", "k8v3"])
def test_replayed_steps_of_encoded_rows(family: str, scheme: str) -> None:
    """Traces of plain, mixed and encoded groups say what single rows say."""
    company = Company(family, with_start(SCHEMES[scheme], 12), replay=True)
    for row, length in enumerate((4, 9, 30)):
        company.add(row, length)
    for _ in range(14):
        company.step()
    assert company.replays >= 8


@pytest.mark.parametrize("scheme", ["affine8", "k8v3"])
def test_rows_convert_each_at_its_own_offset(scheme: str) -> None:
    """Plain and encoded rows run together; each turns when its own tokens reach the threshold."""
    company = Company("plain", with_start(SCHEMES[scheme], 12))
    lengths = {RowId(row): length for row, length in enumerate((4, 9, 11, 12, 30))}
    for row, length in lengths.items():
        company.add(row, length)
    for step in range(1, 12):
        company.step()
        for row, length in lengths.items():
            assert company.batch._groups.is_encoded(row) == (length + step >= 12)
    kinds = {group.encoded for segment in company.batch.segments for group in [segment.group]}
    assert kinds == {True}


def test_tokens_taken_back_do_not_convert() -> None:
    """Eight columns cross the threshold, two are kept: the row stays plain."""
    company = Company("plain", AffineKV(4, start=12))
    company.add(0, 8)
    company.add(1, 3)
    company.step(8, [2, 1])
    assert not company.batch._groups.is_encoded(RowId(0))
    company.step(4, [2, 1] if company.batch.rows[0] == 0 else [1, 2])
    assert company.batch._groups.is_encoded(RowId(0))
    assert not company.batch._groups.is_encoded(RowId(1))
    company.step(2)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_encoded_bytes_are_for_good(family: str, scheme: str) -> None:
    """Out of the batch, into another one and out again: not a byte is encoded anew."""
    company = Company(family, SCHEMES[scheme])
    for row, length in enumerate((37, 5, 70)):
        company.add(row, length)
    company.step()
    row = RowId(0)
    first = company.batch.export(row, 38)
    mx.eval(arrays_of(first))
    company.batch.leave(row)
    company.batch.join(row, clone_all(first), 38)
    company.step(2)
    other = RowBatch(company.model, company.plan)
    other.adopt(row, company.batch)
    again = other.export(row, 38)
    for before, after in zip(arrays_of(first), arrays_of(again), strict=True):
        assert mx.array_equal(before, after).item()
    held = [c for c, k in zip(flatten(again), company.plan.codecs, strict=True) if k]
    assert all(
        codec.is_held_by(cache)
        for cache, codec in zip(held, [k for k in company.plan.codecs if k], strict=True)
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("start", [0, 30])
def test_an_exported_row_goes_on_alone(family: str, scheme: str, start: int) -> None:
    """At every point, a conversion that is due included, the row continues as if never batched."""
    company = Company(family, with_start(SCHEMES[scheme], start))
    company.add(0, 27, steps=53)
    company.add(1, 50)
    for taken in range(1, 7):
        company.step()
        at = 27 + taken
        caches = company.batch.export(RowId(0), at)
        encoded = start <= at
        for cache, codec in zip(flatten(caches), company.plan.codecs, strict=True):
            assert codec is None or codec.is_held_by(cache) == encoded
        company.check_alone(RowId(0), caches)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_copies_and_cuts_of_a_lone_encoded_row(family: str, scheme: str) -> None:
    """A compact copy, a cut one and the row itself go on independently, byte for byte."""
    model, _ = model_and_folder(family)
    plan = plan_of(family, SCHEMES[scheme])
    text = prompt(40, seed=5)
    caches = solo_prefill(model, plan, text[:14])
    expected, _ = solo_run(model, plan, clone_all(caches), text[14:30], 14)
    copy = compact(cut(caches, 14, 14))
    shorter = compact(cut(caches, 14, 9))
    mx.eval(arrays_of(copy), arrays_of(shorter))
    for _ in range(2):
        got, _ = solo_run(model, plan, clone_all(copy), text[14:30], 14)
        assert mx.array_equal(got, expected).item()
    again, _ = solo_run(model, plan, clone_all(shorter), text[9:14], 9)
    assert bool(mx.isfinite(again).all().item())
    for whole, part in zip(arrays_of(copy), arrays_of(shorter), strict=True):
        assert mx.array_equal(whole[..., :9, :], part).item()
    with pytest.raises(CannotCut):
        cut(caches, 14, 15)


@pytest.mark.parametrize("length", [3, 15, 16, 17, 33, 50])
@pytest.mark.parametrize("singles", [0, 1, 20])
def test_every_state_of_a_quantised_ring_joins(length: int, singles: int) -> None:
    """Unwrapped, wrapped, longer than its window: the row joins from any state, and leaves."""
    company = Company("sliding", AffineKV(8))
    text = prompt(length + singles + 40, seed=2)
    caches = solo_prefill(company.model, company.plan, text[:length])
    _, caches = (
        solo_run(company.model, company.plan, caches, text[length : length + singles], length)
        if singles
        else (None, caches)
    )
    row, held = RowId(2), length + singles
    company.texts[row], company.solo[row] = text, clone_all(caches)
    company.batch.join(row, caches, held)
    company.add(7, 21)
    for _ in range(3):
        company.step()
    company.check_alone(row, company.batch.export(row, held + 3))


def test_random_joins_leaves_and_steps() -> None:
    """Thirty random moves with conversion on the way, every logit compared."""
    company = Company("sliding", AffineKV(8, start=25))
    draw = random.Random(3)
    for move in range(30):
        rows = company.batch.rows
        if len(rows) > 1 and draw.random() < 0.4:
            company.batch.leave(draw.choice(rows), poisoned=draw.random() < 0.3)
        else:
            company.add(100 + move, draw.randrange(60), steps=70)
        company.step(draw.choice((1, 1, 2)))


@pytest.mark.parametrize("scheme", ["affine4", "k8v3"])
def test_a_poisoned_row_hurts_nobody(scheme: str) -> None:
    """NaN in an encoded row stays there, and the next user of its slot computes right."""
    company = Company("plain", SCHEMES[scheme])
    for row, length in enumerate((30, 25, 40)):
        company.add(row, length)
    company.step()
    bad = RowId(1)
    layer = company.batch.layers[0]
    assert isinstance(layer, layouts.KVLayout)
    place = company.batch._groups.place(bad)
    assert place is not None
    for array in layer.buffers[place.group]:
        if mx.issubdtype(array.dtype, mx.floating):
            array[place.slot] = float("nan")
    caches = company.batch.begin(1)
    logits = company.model(mx.array([[3]] * 3), cache=caches)
    finite = {row: bool(mx.isfinite(logits[i]).all()) for i, row in enumerate(company.batch.rows)}
    assert finite == {RowId(0): True, RowId(1): False, RowId(2): True}
    company.batch.leave(bad, poisoned=True)
    company.add(8, 27)
    company.step()
    company.step(4)


def convert_too_late(patch: pytest.MonkeyPatch) -> None:
    """Rows pass the threshold by five tokens before anybody notices."""
    honest = RowBatch.commit

    def late(self: RowBatch, columns: Any) -> None:
        plan, self._plan = self._plan, KVPlan(self._plan.codecs, self._plan.start + 5)
        honest(self, columns)
        self._plan = plan

    patch.setattr(RowBatch, "commit", late)


def lose_a_scale(patch: pytest.MonkeyPatch) -> None:
    """One array of the encoded form is not written."""
    honest = layouts._scatter

    def forgetful(buffers: Any, *rest: Any) -> Any:
        written = honest(buffers, *rest)
        return written if len(written) == 2 else (written[0], buffers[1], *written[2:])

    patch.setattr(layouts, "_scatter", forgetful)


def swap_keys_and_values(patch: pytest.MonkeyPatch) -> None:
    """What is encoded on the way between groups is put in the wrong order."""
    honest = AffineCodec.encode
    patch.setattr(AffineCodec, "encode", lambda self, keys, values: honest(self, values, keys))


def leak_a_slot(patch: pytest.MonkeyPatch) -> None:
    """The mask lets one slot behind each row's last token in."""
    honest = steps.Step._make_mask

    def leaky(self: Any, segment: Any, used: int, *rest: Any) -> mx.array:
        mask = honest(self, segment, used, *rest)
        first = self.offsets[segment.start : segment.stop].reshape(-1, 1, 1, 1)
        return mask | (mx.arange(used) == first + self.columns)

    patch.setattr(steps.Step, "_make_mask", leaky)


@pytest.mark.parametrize(
    "mutant", [convert_too_late, lose_a_scale, swap_keys_and_values, leak_a_slot]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_comparison_catches_broken_schemes(
    mutant: Callable[[pytest.MonkeyPatch], None], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fault fails the very run that passes, within its looser bound."""
    company = Company(family, AffineKV(4, start=45))
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match="differ"):
        ragged_run(company)


def test_turbo_mutants_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost scale and a forgotten rotation fail the run that passes."""
    company = Company("plain", TurboKV(start=45))
    with monkeypatch.context() as patch:
        lose_a_scale(patch)
        with pytest.raises(AssertionError, match="differ"):
            ragged_run(company)
