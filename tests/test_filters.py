"""What each filter keeps, at the size of a real vocabulary, against mlx-lm and against doubles."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm import sample_utils

from mlx_troupe.runtime.engine.filters import (
    Parameters,
    bend,
    choose,
    kept_of_all,
    needs_of,
    parameters_of,
    weigh,
)
from mlx_troupe.runtime.engine.randomness import pick
from mlx_troupe.runtime.engine.sampling_kernel import table_of
from mlx_troupe.runtime.engine.selection import DeviceKit, HostKit, Kit
from mlx_troupe.runtime.requests import Hlg, Sampling

VOCAB = 5003
KITS = (HostKit(), DeviceKit())
EXEMPT = (2, 77)

pytestmark = pytest.mark.mlx
on_both = pytest.mark.parametrize("kit", KITS, ids=["host", "device"])


@pytest.fixture(scope="module", autouse=True)
def interpreted() -> Iterator[None]:
    """mlx-lm's filters as written: compiled on a CPU each would cost seconds."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def logits_of(seed: int, spread: float, size: int = VOCAB) -> np.ndarray[Any, Any]:
    """[1, V] random logits."""
    drawn: np.ndarray[Any, Any] = np.random.default_rng(seed).normal(size=(1, size)) * spread
    return drawn.astype(np.float32)


def as_kit(kit: Kit, values: np.ndarray[Any, Any]) -> Any:
    """An array of the kit's kind."""
    return kit.xp.array(values)


def scores(kit: Kit, logits: np.ndarray[Any, Any]) -> Any:
    """Log-probabilities relative to the best token."""
    return as_kit(kit, logits - logits.max(axis=-1, keepdims=True))


def parameters(kit: Kit, sampling: Sampling, size: int = VOCAB) -> Parameters:
    """One row's parameters."""
    removable = np.ones(size, dtype=bool)
    removable[list(EXEMPT)] = False
    return parameters_of(kit, [sampling], as_kit(kit, removable))


def kept(kit: Kit, sampling: Sampling, logits: np.ndarray[Any, Any], number: float = 0.0) -> Any:
    """Ids that the row's chain leaves, by the path that looks at all of them."""
    rows, needs = parameters(kit, sampling), replace(needs_of(sampling, VOCAB), few=0)
    left = kept_of_all(
        kit, needs, scores(kit, logits), rows, as_kit(kit, np.array([[number]], np.float32))
    )
    return set(range(VOCAB)) if left is None else set(np.flatnonzero(np.array(left)[0]).tolist())


def mlx_lm_kept(sampling: Sampling, logits: np.ndarray[Any, Any]) -> set[int]:
    """Ids that mlx-lm's chain leaves."""
    x: Any = mx.array(logits)
    x = x - mx.logsumexp(x, axis=-1, keepdims=True)
    if 0 < sampling.top_p < 1:
        x = sample_utils.apply_top_p(x, sampling.top_p)
    if sampling.min_p:
        x = sample_utils.apply_min_p(x, sampling.min_p)
    if sampling.xtc_probability:
        x = sample_utils.apply_xtc(x, 1.0, sampling.xtc_threshold, list(EXEMPT))
    if 0 < sampling.top_k < VOCAB:
        x = sample_utils.apply_top_k(x, sampling.top_k)
    return set(np.flatnonzero(np.isfinite(np.array(x[0]))).tolist())


chains = st.builds(
    Sampling,
    temperature=st.just(1.0),
    top_p=st.sampled_from([0.0, 0.05, 0.5, 0.9, 0.97, 1.0]),
    top_k=st.sampled_from([0, 1, 7, 200, 1000, VOCAB - 1, VOCAB, 10 * VOCAB]),
    min_p=st.sampled_from([0.0, 0.001, 0.1, 0.7, 1.0]),
    xtc_probability=st.sampled_from([0.0, 1.0]),
    xtc_threshold=st.sampled_from([0.0, 0.01, 0.1, 0.5]),
)


@on_both
@given(chains, st.integers(0, 20), st.sampled_from([0.2, 1.0, 3.0, 12.0]))
@settings(max_examples=60, deadline=None)
def test_a_chain_keeps_what_mlx_lm_keeps(
    kit: Kit, sampling: Sampling, seed: int, spread: float
) -> None:
    """All but tokens at the very edge of a top-p, where the order of a sum decides, and tokens for
    which a float32 may hold 0: XTC without a threshold spares the least that it sees.
    """
    logits = logits_of(seed, spread)
    p = np.exp((logits[0] - logits.max()).astype(np.float64))
    p /= p.sum()
    ours, theirs = kept(kit, sampling, logits), mlx_lm_kept(sampling, logits)
    differing = {i for i in ours ^ theirs if p[i] > 4 * np.finfo(np.float32).tiny}
    if 0 < sampling.top_p < 1:
        above = {i: p[p > p[i]].sum() for i in differing}
        edge = {i for i in differing if abs(above[i] - sampling.top_p) < 1e-5}
        if edge and (sampling.top_k or sampling.xtc_probability):
            # What the edge lets in or out, a later filter may exchange for one other token each.
            assert len(differing) <= 2 * len(edge) + 2
            return
        differing -= edge
    assert not differing


@on_both
@given(chains.filter(lambda s: 0 < s.top_k <= 200), st.integers(0, 9), st.floats(0.5, 6.0))
@settings(max_examples=40, deadline=None)
def test_the_best_tokens_are_drawn_as_from_the_whole_vocabulary(
    kit: Kit, sampling: Sampling, seed: int, spread: float
) -> None:
    """A small top-k is drawn among few tokens, and only among those that the chain leaves."""
    logits = logits_of(seed, spread)
    allowed, x = kept(kit, sampling, logits), scores(kit, logits)
    needs, rows = needs_of(sampling, VOCAB), parameters(kit, sampling)
    for number in (0.0, 0.3, 0.999999):
        numbers = as_kit(kit, np.array([[number, 0.0]], np.float32))
        assert int(choose(kit, needs, x, rows, numbers)[0]) in allowed


@on_both
def test_equal_logits_are_cut_by_id(kit: Kit) -> None:
    """Of many equal values the lowest ids are the best, in every block and beyond."""
    coarse = np.floor(logits_of(3, 2.0)).astype(np.float32)
    for count in (1, 64, 256):
        values, ids = kit.best(as_kit(kit, coarse), count)
        wanted = np.argsort(-coarse[0], kind="stable")[:count]
        assert np.array_equal(np.array(ids)[0], wanted)
        assert np.array_equal(np.array(values)[0], coarse[0, wanted])
    left = kept(kit, Sampling(temperature=1.0, top_k=300), coarse)
    assert left == set(np.argsort(-coarse[0], kind="stable")[:300].tolist())


@on_both
@pytest.mark.parametrize("size", [3, 511, 512, 513, 5003])
def test_a_pick_follows_its_weights(kit: Kit, size: int) -> None:
    """Every number lands in the interval of its index; what weighs nothing is never picked."""
    weights = np.random.default_rng(size).random((1, size)).astype(np.float32)
    weights[0, ::2] = 0
    reached = np.cumsum(weights[0].astype(np.float64)) / weights.sum(dtype=np.float64)
    for number in (0.0, 0.1, 0.5, 0.77, 1 - 2.0**-24):
        index = int(
            pick(kit.xp, as_kit(kit, weights), as_kit(kit, np.array([[number]], np.float32)))[0, 0]
        )
        assert weights[0, index] > 0
        assert reached[index] >= number - 1e-5
        assert index == 0 or reached[index - 1] <= number + 1e-5


@on_both
def test_a_curve_is_smooth_and_rises(kit: Kit) -> None:
    """Slope 1/T around the pivot, no jump and no kink at its ends, never falling."""
    sampling = Sampling(temperature=0.8, hlg=Hlg())
    x = np.linspace(-40, 0, 40_001, dtype=np.float32)[None]
    y = np.array(bend(kit, as_kit(kit, x), parameters(kit, sampling, x.size)))[0].astype(np.float64)
    slope = np.diff(y) / np.diff(x[0].astype(np.float64))
    middle = (x[0, 1:] > -9.9) & (x[0, 1:] < -2.1)
    assert np.allclose(slope[middle], 1 / 0.8, atol=1e-2)
    assert (slope > -1e-2).all()
    assert np.abs(np.diff(slope)).max() < 0.05
    assert slope[-1] < 0.8
    assert slope[0] < 0.3


@on_both
def test_a_curve_that_does_not_bend_is_a_temperature(kit: Kit) -> None:
    """Without shoulder and toe the draws are those of the temperature, to the bit."""
    logits = logits_of(5, 2.0)
    plain, straight = Sampling(temperature=0.7), Sampling(temperature=0.7, hlg=Hlg(4, 0, 0, 6))
    assert needs_of(plain, VOCAB) == needs_of(straight, VOCAB)
    x, needs = scores(kit, logits), needs_of(straight, VOCAB)
    one = weigh(kit, needs, x, parameters(kit, straight))
    assert np.array_equal(np.array(one), np.array(weigh(kit, needs, x, parameters(kit, plain))))
    half = Sampling(temperature=0.7, hlg=Hlg(4, 0, 6, 6))
    bent = np.array(weigh(kit, needs_of(half, VOCAB), x, parameters(kit, half)))
    near = np.array(x)[0] > -9
    assert np.allclose(bent[0, near], np.array(one)[0, near], rtol=1e-4)


def test_a_curve_takes_the_place_of_top_p_and_top_k() -> None:
    """Both are off with one; min-p and XTC stay."""
    needs = needs_of(Sampling(1.0, top_p=0.5, top_k=3, min_p=0.1, hlg=Hlg()), VOCAB)
    assert (needs.top_p, needs.top_k, needs.min_p, needs.few) == (False, False, True, 0)


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.01, 1.0, 5.0])
def test_both_kits_find_the_same_threshold(top_p: float, spread: float) -> None:
    """Whole or first among the likely few, which a flat distribution goes beyond."""
    x = logits_of(8, spread, 20_000)
    x -= x.max()
    p = np.exp(x)
    limit = (p.sum(dtype=np.float64) * top_p).astype(np.float32).reshape(1, 1)
    sizes = [
        int(np.array(kit.cut_by_mass(*(as_kit(kit, a) for a in (x, p, limit))).kept).sum())
        for kit in KITS
    ]
    exact = int((np.cumsum(np.sort(p[0])[::-1].astype(np.float64)) < limit[0, 0]).sum()) + 1
    assert all(abs(size - exact) <= max(1, exact // 1000) for size in sizes)


@on_both
def test_a_row_that_is_not_a_number_harms_nothing(kit: Kit) -> None:
    """Whatever the filters, an id within the vocabulary comes out."""
    broken = logits_of(1, 1.0)
    broken[0, ::7] = math.nan
    for sampling in (
        Sampling(1.0),
        Sampling(1.0, top_p=0.9),
        Sampling(1.0, top_k=20, top_p=0.5),
        Sampling(1.0, top_k=900),
        Sampling(1.0, xtc_probability=1.0, top_k=5),
        Sampling(1.0, hlg=Hlg()),
    ):
        needs, rows = needs_of(sampling, VOCAB), parameters(kit, sampling)
        numbers = as_kit(kit, np.array([[0.5, 0.0]], np.float32))
        with np.errstate(all="ignore"):
            chosen = choose(kit, needs, as_kit(kit, broken), rows, numbers)
        assert 0 <= int(chosen[0]) < VOCAB


def test_the_strictest_min_p_is_the_shortest_distance() -> None:
    """The kernel compares distances by their bits, of which those of -0.0 are beyond all others."""
    strict, loose = np.array(table_of([Sampling(1.0, min_p=1.0), Sampling(1.0, min_p=0.9)], 100))[
        :, 2
    ]
    assert strict.view(np.uint32) == 0
    assert strict.view(np.uint32) < loose.view(np.uint32)
