"""Curves that clients draw: from the wire to a resolved row, and what they do to its tokens."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_troupe.http.testing import MODEL
from mlx_troupe.http.wire.chat import chat_call
from mlx_troupe.http.wire.parsing import parse_json
from mlx_troupe.runtime.curves import MAX_POINTS, Points, fault_of
from mlx_troupe.runtime.defaults import SamplingDefaults, resolve_sampling
from mlx_troupe.runtime.engine.curves import curves_of, transfer
from mlx_troupe.runtime.engine.filters import choose, needs_of, parameters_of, weigh
from mlx_troupe.runtime.engine.selection import DeviceKit, HostKit, Kit
from mlx_troupe.runtime.errors import InvalidRequest
from mlx_troupe.runtime.requests import Hlg, HlgRequest, Sampling, SamplingRequest

VOCAB = 5003
BENT: Points = ((-12.0, -30.0), (-4.0, -3.0), (-1.0, -2.5), (0.0, 0.0))
FLAT: Points = ((-9.0, -5.0), (-5.0, -5.0), (-1.0, 0.0))

on_both = pytest.mark.parametrize("kit", [HostKit(), DeviceKit()], ids=["host", "device"])
pytestmark = pytest.mark.mlx


def asked(curve: Any, **more: Any) -> SamplingRequest:
    """What a chat with this ``curve`` asks for."""
    body = {"messages": [{"role": "user", "content": "hi"}], "curve": curve, **more}
    return chat_call(parse_json(json.dumps(body).encode()), MODEL).request.sampling


def curve_at(kit: Kit, points: Points, x: Any) -> Any:
    """The curve at ``x`` [V] in doubles, as one row of a kit's array."""
    curves = curves_of(kit, [points])
    y = transfer(kit, kit.xp.array(np.asarray(x, dtype=np.float32)[None]), curves)
    return np.array(y)[0].astype(np.float64)


def weights(kit: Kit, sampling: Sampling, x: Any) -> Any:
    """Weights of one row's tokens."""
    rows = parameters_of(kit, [sampling], kit.xp.array(np.ones(x.shape[-1], dtype=bool)))
    return np.array(weigh(kit, needs_of(sampling, x.shape[-1]), kit.xp.array(x), rows))[0]


@st.composite
def some_points(draw: st.DrawFn) -> Points:
    """Whatever may be asked for, in hundredths of a nat."""
    count = draw(st.integers(2, MAX_POINTS))
    hundredths = st.integers(-3000, 0)
    xs = draw(st.lists(hundredths, min_size=count, max_size=count, unique=True))
    ys = draw(st.lists(hundredths, min_size=count, max_size=count))
    return tuple((x / 50, y / 50) for x, y in zip(sorted(xs), sorted(ys), strict=True))


@on_both
@given(some_points())
@settings(max_examples=60, deadline=None)
def test_a_curve_goes_through_its_points_and_never_falls(kit: Kit, points: Points) -> None:
    """And has the best token's log-probability stay where it is."""
    assert fault_of(points) is None
    xs, ys = np.array(points).T
    at = curve_at(kit, points, np.append(xs, 0.0))
    assert at[-1] == pytest.approx(0, abs=1e-3)
    assert np.allclose(at[:-1] - at[0], ys - ys[0], atol=1e-3)
    dense = curve_at(kit, points, np.linspace(xs[0] - 3, 0, 4001))
    assert np.diff(dense).min() > -1e-4


@on_both
def test_a_curve_is_smooth_and_straight_beyond_its_ends(kit: Kit) -> None:
    """No kink at a point; on the left the first side goes on."""
    x = np.linspace(-20, 0, 20_001)
    slopes = np.diff(curve_at(kit, BENT, x)) / np.diff(x)
    assert np.abs(np.diff(slopes)).max() < 0.05
    beyond = slopes[x[1:] < -12.01]
    assert np.allclose(beyond, 27 / 8, atol=2e-2)


def test_both_kits_draw_the_same_curve_as_doubles() -> None:
    """By another formula: Hermite's four blends of ends and slopes, the slopes as published."""
    xs, ys = np.array(BENT).T
    h, side = np.diff(xs), np.diff(ys) / np.diff(xs)
    inner = [
        3
        * (h[k - 1] + h[k])
        / ((2 * h[k] + h[k - 1]) / side[k - 1] + (h[k] + 2 * h[k - 1]) / side[k])
        for k in (1, 2)
    ]
    m = [side[0], *inner, side[-1]]
    x = np.linspace(-12, -1e-6, 1501)
    k = np.searchsorted(xs, x, side="right") - 1
    t = (x - xs[k]) / h[k]
    wanted = (
        (1 + 2 * t) * (1 - t) ** 2 * ys[k]
        + t * (1 - t) ** 2 * h[k] * np.take(m, k)
        + t**2 * (3 - 2 * t) * ys[k + 1]
        + t**2 * (t - 1) * h[k] * np.take(m, k + 1)
    )
    for kit in (HostKit(), DeviceKit()):
        assert np.allclose(curve_at(kit, BENT, x), wanted, atol=2e-5)


@on_both
@pytest.mark.parametrize("points", [((-7.0, -7.0), (0.0, 0.0)), ((-9.0, -9.5), (-2.0, -2.5))])
def test_a_straight_curve_is_a_temperature(kit: Kit, points: Points) -> None:
    """Wherever its points lie; a slope of 2 is half of it."""
    x = np.random.default_rng(1).normal(size=(1, VOCAB)).astype(np.float32) * 4
    x -= x.max()
    plain = weights(kit, Sampling(0.7), x)
    assert np.allclose(weights(kit, Sampling(0.7, curve=points), x), plain, rtol=1e-4, atol=1e-9)
    steep = tuple((a, 2 * b) for a, b in points)
    assert np.allclose(weights(kit, Sampling(1.4, curve=steep), x), plain, rtol=1e-4, atol=1e-9)


@on_both
def test_what_is_forbidden_is_never_drawn(kit: Kit) -> None:
    """Not even by a curve that makes all unlikely tokens alike."""
    x = np.full((1, VOCAB), -np.inf, dtype=np.float32)
    x[0, [7, 70, 700]] = 0, -6, -900
    found = weights(kit, Sampling(1.0, curve=FLAT), x)
    assert np.flatnonzero(found).tolist() == [7, 70, 700]
    assert found[70] == pytest.approx(found[700])


@on_both
def test_draws_follow_the_curve(kit: Kit) -> None:
    """Shares of 4,000 evenly spread numbers, rows with different curves in one group."""
    x = np.array([[0, -1, -2, -6, -8]] * 2, np.float32)
    drawn = [Sampling(0.8, curve=FLAT), Sampling(1.2, curve=BENT)]
    rows = parameters_of(kit, drawn, kit.xp.array(np.ones(5, dtype=bool)))
    needs = needs_of(drawn[0], 5) | needs_of(drawn[1], 5)
    found = np.zeros((2, 5))
    for number in (np.arange(4000, dtype=np.float32) + 0.5) / 4000:
        numbers = kit.xp.array(np.full((2, 2), number, dtype=np.float32))
        found[[0, 1], np.array(choose(kit, needs, kit.xp.array(x), rows, numbers))] += 1 / 4000
    for row, (points, temperature) in enumerate([(FLAT, 0.8), (BENT, 1.2)]):
        shares = np.exp(curve_at(kit, points, x[row]) / temperature)
        assert np.allclose(found[row], shares / shares.sum(), atol=1e-3)


def test_a_request_is_resolved() -> None:
    """The curve is taken as it is; top-p and top-k are off, whoever asked for them."""
    wanted = asked([list(p) for p in BENT], top_p=0.9, top_k=7, temperature=0.5, min_p=0.1, seed=3)
    row = resolve_sampling(wanted, SamplingDefaults(hlg_sampling=True, top_k=40), MODEL)
    assert row == Sampling(0.5, min_p=0.1, seed=3, curve=BENT)
    assert needs_of(row, VOCAB).curve
    off = SamplingRequest(curve=BENT, hlg=HlgRequest(enabled=False))
    assert resolve_sampling(off, SamplingDefaults(), MODEL).curve == BENT
    assert asked(None).curve is None


@pytest.mark.parametrize(
    ("curve", "param"),
    [
        (True, "curve"),
        ("straight", "curve"),
        ([[-1, -1]], "curve"),
        ([[-1 - n, -1] for n in range(MAX_POINTS + 1)], "curve"),
        ([[-1, -1, -1], [0, 0]], "curve[0]"),
        ([[-1, -1], [0, 0.5]], "curve[1][1]"),
        ([[-1001, -1], [0, 0]], "curve[0][0]"),
        ([[-1, "-1"], [0, 0]], "curve[0][1]"),
    ],
)
def test_what_is_no_curve_is_refused_on_the_wire(curve: Any, param: str) -> None:
    """By name, and by the place in the list."""
    with pytest.raises(InvalidRequest) as caught:
        asked(curve)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("points", "word"),
    [
        (((0.0, 0.0),), "2 to 16"),
        (((-1.0, -1.0), (-1.0, 0.0)), "right"),
        (((0.0, 0.0), (-1.0, -1.0)), "right"),
        (((-2.0, -1.0), (-1.0, -1.5), (0.0, 0.0)), "fall"),
        (((-2.0, float("nan")), (0.0, 0.0)), "between"),
    ],
)
def test_points_that_make_no_curve_are_refused(points: Points, word: str) -> None:
    """Of library callers too, in words."""
    with pytest.raises(InvalidRequest, match=word) as caught:
        resolve_sampling(SamplingRequest(curve=points), SamplingDefaults(), MODEL)
    assert caught.value.param == "curve"


def test_two_curves_at_once_are_refused() -> None:
    """One of the server's is put aside, one of the same request is not."""
    wanted = SamplingRequest(curve=BENT, hlg=HlgRequest(enabled=True))
    with pytest.raises(InvalidRequest, match="exclude"):
        resolve_sampling(wanted, SamplingDefaults(), MODEL)
    assert (
        resolve_sampling(SamplingRequest(), SamplingDefaults(hlg_sampling=True), MODEL).hlg == Hlg()
    )


@on_both
def test_a_row_that_is_not_a_number_harms_nothing(kit: Kit) -> None:
    """An id within the vocabulary comes out."""
    x = np.zeros((1, VOCAB), dtype=np.float32)
    x[0, ::7] = np.nan
    sampling = Sampling(1.0, curve=BENT)
    rows = parameters_of(kit, [sampling], kit.xp.array(np.ones(VOCAB, dtype=bool)))
    with np.errstate(all="ignore"):
        chosen = choose(
            kit, needs_of(sampling, VOCAB), kit.xp.array(x), rows, kit.xp.array([[0.5, 0.0]])
        )
    assert 0 <= int(mx.array(chosen)[0]) < VOCAB
