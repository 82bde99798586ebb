"""Sampling: the same filters as mlx-lm, and draws that do not depend on the company."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm import sample_utils

from mlx_troupe.runtime.engine.processors import Processors
from mlx_troupe.runtime.engine.randomness import mix
from mlx_troupe.runtime.engine.row_sampler import RowSampler
from mlx_troupe.runtime.engine.sampling import Draws, Sampler
from mlx_troupe.runtime.engine.selection import DeviceKit, HostKit, Kit
from mlx_troupe.runtime.requests import Hlg, Sampling

VOCAB = tiny.VOCAB
EXEMPT = frozenset({1, 7, 100_000})
PROMPT = (3, 4, 5)
KITS = (HostKit(), DeviceKit())

pytestmark = pytest.mark.mlx
on_both = pytest.mark.parametrize("kit", KITS, ids=["host", "device"])


@pytest.fixture(scope="module", autouse=True)
def interpreted() -> Iterator[None]:
    """mlx-lm's filters as written: compiled on a CPU each would cost seconds."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def logits_of(seed: int, spread: float = 3.0) -> mx.array:
    """[1, V] random logits."""
    return mx.random.normal((1, VOCAB), key=mx.random.key(seed)) * spread


def draw(rows: list[tuple[Sampling, mx.array, int]], kit: Kit = KITS[0]) -> Draws:
    """One draw for rows of (parameters, logits [1, V], position)."""
    samplers = [RowSampler(sampling, PROMPT, VOCAB) for sampling, _, _ in rows]
    inputs = mx.array([PROMPT[-1]] * len(rows), dtype=mx.uint32)
    logits = mx.concatenate([x for _, x, _ in rows])
    return Sampler(VOCAB, lambda: EXEMPT, kit).draw(
        logits, samplers, [p for _, _, p in rows], inputs
    )


def support(sampling: Sampling, logits: mx.array, draws: int = 400, kit: Kit = KITS[0]) -> set[int]:
    """Every token that many positions draw."""
    many = draw([(sampling, logits, position) for position in range(draws)], kit)
    return set(many.tokens.tolist())


def allowed(logprobs: mx.array) -> set[int]:
    """Tokens that a filter of mlx-lm left."""
    return set(np.flatnonzero(np.isfinite(np.array(logprobs[0]))).tolist())


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 50, VOCAB, 10 * VOCAB]),
    min_p=st.sampled_from([0.0, 0.05, 0.3]),
    xtc_probability=st.sampled_from([0.0, 0.5, 1.0]),
    xtc_threshold=st.sampled_from([0.0, 0.1, 0.5]),
    seed=st.integers(-(2**63), 2**64),
    logit_bias=st.sampled_from([(), ((3, 2.0), (90, -100.0))]),
    repetition_penalty=st.sampled_from([0.0, 1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    hlg=st.sampled_from([None, None, Hlg(), Hlg(shoulder=0.0, toe=0.0)]),
    curve=st.sampled_from([None, None, ((-6.0, -9.0), (0.0, 0.0)), ((-9.0, -2.0), (-1.0, -1.0))]),
)


@on_both
@given(st.lists(st.tuples(samplings, st.integers(0, 5), st.integers(1, 9)), min_size=2, max_size=6))
@settings(max_examples=40, deadline=None)
def test_a_draw_is_the_same_alone_and_in_any_batch(
    kit: Kit, rows: list[tuple[Sampling, int, int]]
) -> None:
    """Composition and order of the batch change nothing, whatever the parameters."""
    full = [(sampling, logits_of(seed), position) for sampling, seed, position in rows]
    together = draw(full, kit).tokens.tolist()
    assert draw(full[::-1], kit).tokens.tolist() == together[::-1]
    assert [draw([row], kit).tokens.tolist()[0] for row in full] == together


@on_both
def test_sixteen_different_samplers_at_once(kit: Kit) -> None:
    """Each row of a batch with every kind of chain draws what it draws alone, step after step."""
    chains = [
        Sampling(),
        Sampling(0.7),
        Sampling(1.0, min_p=0.05),
        Sampling(0.8, top_p=0.95),
        Sampling(1.0, top_p=0.9, min_p=0.02),
        Sampling(0.6, top_k=20),
        Sampling(0.6, top_p=0.95, top_k=20),
        Sampling(1.2, top_k=50),
        Sampling(1.0, xtc_probability=0.5),
        Sampling(0.9, top_p=0.98, xtc_probability=0.5),
        Sampling(1.0, hlg=Hlg()),
        Sampling(1.5, min_p=0.1, hlg=Hlg(shoulder=0.0)),
        Sampling(0.9, curve=((-8.0, -16.0), (-3.0, -2.0), (-0.5, -1.0), (0.0, 0.0))),
        Sampling(0.3, top_p=0.5),
        Sampling(0.9, top_k=64, xtc_probability=1.0, xtc_threshold=0.05),
        Sampling(2.0, top_p=0.99),
    ]
    penalties: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.5, "logit_bias": ((3, 2.0),)},
        {"frequency_penalty": 0.3, "frequency_context_size": 0},
    ]
    asked = [
        dataclasses.replace(chain, seed=n, **penalties[n % 4]) for n, chain in enumerate(chains)
    ]
    together = Sampler(VOCAB, lambda: EXEMPT, kit)
    rows = [RowSampler(sampling, PROMPT, VOCAB) for sampling in asked]
    alone = [(Sampler(VOCAB, lambda: EXEMPT, kit), RowSampler(s, PROMPT, VOCAB)) for s in asked]
    inputs = mx.array([PROMPT[-1]] * len(asked), dtype=mx.uint32)
    for step in range(4):
        logits = mx.concatenate([logits_of(16 * step + n) for n in range(len(asked))])
        positions = [3 + step] * len(asked)
        single = [
            sampler.draw(logits[n : n + 1], [row], positions[:1], inputs[n : n + 1]).tokens
            for n, (sampler, row) in enumerate(alone)
        ]
        inputs = together.draw(logits, rows, positions, inputs).tokens
        assert mx.array_equal(inputs, mx.concatenate(single))


@on_both
def test_figures_are_a_log_softmax_of_the_processed_logits(kit: Kit) -> None:
    """For rows that ask, whoever shares the batch: the drawn token's and the likeliest, falling."""
    biased = Sampling(temperature=1.0, top_k=2, seed=3, logit_bias=((5, 4.0),))
    asked = [(Sampling(), 4), (Sampling(), None), (biased, 0), (biased, 20)]
    rows = [RowSampler(sampling, PROMPT, VOCAB, top) for sampling, top in asked]
    logits = mx.concatenate([logits_of(n) for n in (1, 2, 3, 3)])
    inputs = mx.array([PROMPT[-1]] * len(rows), dtype=mx.uint32)
    draws = Sampler(VOCAB, lambda: EXEMPT, kit).draw(logits, rows, [3] * len(rows), inputs)
    assert draws.scores is not None
    figures = draws.scores.read()
    assert sorted(figures) == [0, 2, 3]
    processed = np.array(logits).astype(np.float64)
    processed[2:, 5] += 4.0
    exact = processed - np.log(np.exp(processed).sum(axis=-1, keepdims=True))
    for place, (_, top) in enumerate(asked):
        if top is None:
            continue
        found, token = figures[place], draws.tokens.tolist()[place]
        assert found.chosen == pytest.approx(exact[place, token], abs=1e-4)
        best = np.argsort(-exact[place], kind="stable")[:top]
        assert [i for i, _ in found.top] == best.tolist()
        assert [x for _, x in found.top] == pytest.approx(exact[place, best].tolist(), abs=1e-4)
    assert figures[2].chosen == figures[3].chosen


def test_seed_and_position_decide_the_draw() -> None:
    """Other seeds and other positions draw other tokens from the same logits."""
    flat = mx.zeros((1, VOCAB))
    warm = Sampling(temperature=1.0, seed=3)
    by_position = draw([(warm, flat, p) for p in range(64)]).tokens.tolist()
    by_seed = draw([(dataclasses.replace(warm, seed=s), flat, 0) for s in range(64)]).tokens
    assert len(set(by_position)) > 30
    assert len(set(by_seed.tolist())) > 30
    assert len({mix(s) for s in range(-1000, 1000)}) == 2000


@on_both
def test_frequencies_follow_the_distribution(kit: Kit) -> None:
    """Draws have the softmax's frequencies, at the row's temperature."""
    logits = mx.array([[math.log(p) for p in (0.5, 0.3, 0.15, 0.05)] + [-1e9] * (VOCAB - 4)])
    for temperature in (1.0, 0.5):
        drawn = draw([(Sampling(temperature=temperature), logits, p) for p in range(4000)], kit)
        counts = np.bincount(np.array(drawn.tokens), minlength=VOCAB)[:4] / 4000
        weights = np.array([0.5, 0.3, 0.15, 0.05]) ** (1 / temperature)
        assert np.abs(counts - weights / weights.sum()).max() < 0.03


@on_both
@pytest.mark.parametrize("seed", range(4))
def test_filters_keep_what_mlx_lm_keeps(kit: Kit, seed: int) -> None:
    """top-p, min-p and top-k, alone and chained, never draw what mlx-lm's filters remove."""
    logits = logits_of(seed)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    base = Sampling(temperature=2.5)
    nucleus = sample_utils.apply_top_p(logprobs, 0.8)
    likely = sample_utils.apply_min_p(nucleus, 0.05)
    cases = {
        dataclasses.replace(base, top_p=0.8): nucleus,
        dataclasses.replace(base, min_p=0.05): sample_utils.apply_min_p(logprobs, 0.05),
        dataclasses.replace(base, top_k=5): sample_utils.apply_top_k(logprobs, 5),
        dataclasses.replace(base, top_p=0.8, min_p=0.05): likely,
        dataclasses.replace(base, top_p=0.8, min_p=0.05, top_k=3): sample_utils.apply_top_k(
            likely, 3
        ),
    }
    for sampling, filtered in cases.items():
        drawn, wanted = support(sampling, logits, kit=kit), allowed(filtered)
        assert drawn <= wanted
        assert len(drawn) >= min(3, len(wanted))


@on_both
def test_xtc_keeps_the_least_likely_of_the_top_and_spares_special_tokens(kit: Kit) -> None:
    """Of the tokens above the threshold only the last stays, apart from the exempt ones."""
    probabilities = [0.0] * VOCAB
    probabilities[7], probabilities[10], probabilities[11], probabilities[12] = 0.3, 0.3, 0.2, 0.15
    probabilities[13] = 0.05
    logits = mx.log(mx.array([probabilities]))
    always = Sampling(temperature=1.0, xtc_probability=1.0, xtc_threshold=0.1)
    assert support(always, logits, kit=kit) == {7, 12, 13}
    assert support(dataclasses.replace(always, top_k=2), logits, kit=kit) == {7, 12}
    never = dataclasses.replace(always, xtc_probability=0.0)
    assert support(never, logits, kit=kit) == {7, 10, 11, 12, 13}
    half = dataclasses.replace(always, xtc_probability=0.5)
    drawn = draw([(half, logits, p) for p in range(400)], kit).tokens.tolist()
    assert 20 < sum(token == 10 for token in drawn) < 100


@on_both
def test_top_k_beyond_the_vocabulary_is_off_and_ties_are_cut_exactly(kit: Kit) -> None:
    """k ≥ V equals no k; of equal logits exactly k are kept, the lowest ids, so k=1 is argmax."""
    logits = logits_of(1)
    warm = Sampling(temperature=1.0, seed=5)
    plain = draw([(warm, logits, p) for p in range(50)], kit).tokens.tolist()
    huge = dataclasses.replace(warm, top_k=VOCAB)
    assert draw([(huge, logits, p) for p in range(50)], kit).tokens.tolist() == plain
    flat = mx.zeros((1, VOCAB))
    assert support(dataclasses.replace(warm, top_k=3), flat, kit=kit) == {0, 1, 2}
    tied = mx.where(mx.arange(VOCAB) == 40, 0.0, flat)
    one = dataclasses.replace(warm, top_k=1, temperature=2.0)
    assert support(one, tied, kit=kit) == {int(mx.argmax(tied).item())}


@on_both
def test_a_tiny_temperature_is_argmax(kit: Kit) -> None:
    """No temperature, however small, makes a row overflow."""
    logits = logits_of(2, spread=40.0)
    best = int(mx.argmax(logits).item())
    for temperature in (0.0, 1e-38, 1e-12, 1e-5, 1e-3):
        drawn = draw([(Sampling(temperature=temperature), logits, 3)], kit)
        assert drawn.tokens.tolist() == drawn.reported.tolist() == [best]


@on_both
@pytest.mark.parametrize("bad", [mx.nan, mx.inf])
def test_a_row_that_is_not_finite_is_reported_and_the_others_are_not(kit: Kit, bad: float) -> None:
    """The id is -1 in the report, valid as an input, and its neighbours draw as ever."""
    good, warm = Sampling(), Sampling(temperature=1.0, top_p=0.9, top_k=8, seed=4)
    broken = mx.where(mx.arange(VOCAB) == 9, bad, logits_of(3))
    alone = draw([(good, logits_of(1), 2), (warm, logits_of(2), 2)], kit)
    every = [dataclasses.replace(warm, top_k=0), Sampling(temperature=1.0, xtc_probability=1.0)]
    mixed = [
        (good, logits_of(1), 2),
        (warm, broken, 2),
        (warm, logits_of(2), 2),
        (good, broken, 2),
        *((sampling, broken, 2) for sampling in every),
    ]
    drawn = draw(mixed, kit)
    assert drawn.reported.tolist()[0:3:2] == alone.reported.tolist()
    assert drawn.reported.tolist()[1:4:2] == [-1, -1]
    assert drawn.reported.tolist()[4:] == [-1, -1]
    assert all(0 <= token < VOCAB for token in drawn.tokens.tolist())
    banned = Sampling(logit_bias=((9, -math.inf),))
    assert draw([(banned, logits_of(1), 2)], kit).reported.tolist()[0] >= 0


def test_penalties_follow_mlx_lm_over_a_sliding_history() -> None:
    """Twelve tokens in a row: processed logits equal mlx-lm's with the whole history."""
    sampling = Sampling(
        repetition_penalty=1.4,
        repetition_context_size=3,
        presence_penalty=-0.3,
        presence_context_size=5,
        frequency_penalty=0.25,
        frequency_context_size=4,
    )
    theirs = sample_utils.make_logits_processors(None, 1.4, 3, -0.3, 5, 0.25, 4)
    row = RowSampler(sampling, PROMPT, VOCAB)
    processors = processors_of([row])
    history = list(PROMPT[:-1])
    for step, token in enumerate([PROMPT[-1], 9, 9, 4, 9, 2, 2, 3, 120, 9, 4, 4]):
        history.append(token)
        logits = logits_of(step)
        wanted: Any = logits[...]
        for processor in theirs:
            wanted = processor(mx.array(history, dtype=mx.uint32), wanted)
        if step % 3 == 2:
            processors = processors_of([row])
        got = processors.apply(logits, mx.array([token], dtype=mx.uint32))
        assert mx.array_equal(got, wanted)
        assert mx.array_equal(logits, logits_of(step))


def processors_of(rows: list[RowSampler]) -> Processors:
    """What a batch of these rows is processed by."""
    recent = {place: row.recent() for place, row in enumerate(rows)}
    return Processors(
        [(place, row.sampling, row.past) for place, row in enumerate(rows)],
        {place: held for place, held in recent.items() if held is not None},
    )


penalised = st.builds(
    Sampling,
    logit_bias=st.sampled_from([(), ((3, 2.0), (90, -100.0)), ((5, 0.5),)]),
    repetition_penalty=st.sampled_from([0.0, 1.0, 1.3, 0.7]),
    repetition_context_size=st.sampled_from([0, 1, 4, 20, 70]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    presence_context_size=st.sampled_from([0, 2, 20]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -0.2]),
    frequency_context_size=st.sampled_from([0, 3, 20]),
)


@given(
    st.lists(st.tuples(penalised, st.integers(1, 90)), min_size=1, max_size=5),
    st.integers(0, 99),
    st.sampled_from([mx.float32, mx.bfloat16]),
)
@settings(max_examples=30, deadline=None)
def test_rows_of_a_batch_are_penalised_as_mlx_lm_would_alone(
    asked: list[tuple[Sampling, int]], seed: int, dtype: mx.Dtype
) -> None:
    """Whatever windows, prompts and penalties stand side by side, and whoever joins or leaves."""
    pick = np.random.default_rng(seed)
    histories = [[int(t) for t in pick.integers(0, 12, size)] for _, size in asked]
    rows = [
        RowSampler(sampling, history, VOCAB)
        for (sampling, _), history in zip(asked, histories, strict=True)
    ]
    for step in range(6):
        here = [i for i in range(len(rows)) if step < 2 or (i + step) % 3 or len(rows) == 1]
        if step % 2 == 0:
            order = list(pick.permutation(here))
            processors = processors_of([rows[i] for i in order])
        elif sorted(order) != here:
            order, processors = here, processors_of([rows[i] for i in here])
        logits = mx.concatenate([logits_of(step * 7 + i) for i in order]).astype(dtype)
        inputs = mx.array([histories[i][-1] for i in order], dtype=mx.uint32)
        got = processors.apply(logits, inputs)
        for place, i in enumerate(order):
            wanted = mlx_lm_processed(rows[i].sampling, histories[i], logits[place : place + 1])
            assert mx.array_equal(got[place], wanted[0]), (step, i)
            histories[i].append(int(pick.integers(0, 12)))


def mlx_lm_processed(s: Sampling, history: list[int], logits: mx.array) -> mx.array:
    """mlx-lm's processors on one row."""
    processors = sample_utils.make_logits_processors(
        dict(s.logit_bias) or None,
        s.repetition_penalty,
        s.repetition_context_size,
        s.presence_penalty,
        s.presence_context_size,
        s.frequency_penalty,
        s.frequency_context_size,
    )
    for processor in processors:
        logits = processor(mx.array(history, dtype=mx.uint32), logits)
    return logits


@settings(max_examples=200, deadline=None)
@given(
    level=st.floats(-30, 30),
    gaps=st.lists(
        st.sampled_from([0.0, 1e-7, 5e-7, 1e-6, 4e-6, 1e-5, 1.0]), min_size=2, max_size=6
    ),
    kind=st.sampled_from([mx.float32, mx.bfloat16]),
    rest=st.sampled_from([0.01, 1.0, 9.0]),
    seed=st.integers(0, 999),
)
def test_a_lone_greedy_row_takes_what_mlx_lm_takes(
    level: float, gaps: list[float], kind: mx.Dtype, rest: float, seed: int
) -> None:
    """Also where rounded log-probabilities tie and logits do not: to the bit, nearly for free."""
    draw_places = np.random.default_rng(seed)
    logits = np.full(VOCAB, level - rest, dtype=np.float32)
    logits[draw_places.choice(VOCAB, len(gaps), replace=False)] = level - np.cumsum(gaps)
    row = mx.array(logits).astype(kind)[None]
    expected = mx.argmax(row - mx.logsumexp(row, axis=-1, keepdims=True), axis=-1)
    assert draw([(Sampling(), row, 5)]).tokens.tolist() == expected.tolist()


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"min_p": 1.5},
        {"xtc_threshold": 0.6},
        {"xtc_probability": -1.0},
        {"repetition_penalty": -2.0},
        {"hlg": Hlg(toe=-1.0)},
        {"hlg": Hlg(width=math.nan)},
        {"curve": ((-1.0, math.nan), (0.0, 0.0))},
        {"curve": ((0.0, 0.0), (-1.0, -1.0))},
        {"logit_bias": ((VOCAB, 1.0),)},
        {"logit_bias": ((-1, 1.0),)},
    ],
)
def test_parameters_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    """A row with impossible parameters never starts."""
    with pytest.raises(ValueError, match=r"is .* outside|logit_bias|curve"):
        RowSampler(dataclasses.replace(Sampling(), **changes), PROMPT, VOCAB)


@pytest.mark.parametrize("count", [-1, 21])
def test_too_many_alternatives_are_refused(count: int) -> None:
    """The figures of more tokens than the limit are never computed."""
    with pytest.raises(ValueError, match="log-probabilities"):
        RowSampler(Sampling(), PROMPT, VOCAB, count)
