"""The composition matrix: every feature with every other, each row against itself alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import trio
from composition_check import Verdict, compare
from composition_rig import Company
from composition_values import KV, Model, make_model
from matrix import (
    AXES,
    BYPASSED,
    MEANINGLESS,
    README,
    REFUSALS,
    Case,
    Refusal,
    make_cases,
    pairwise,
    readme_with_table,
)

from mlx_troupe.actors.gpu import ModelRefused
from mlx_troupe.actors.system import open_runtime
from mlx_troupe.http.cli.errors import leaves
from mlx_troupe.runtime.engine import masks, processors, sampling
from mlx_troupe.runtime.engine.adapters import Adapters
from mlx_troupe.runtime.settings import Settings
from mlx_troupe.runtime.text.testing import ByteTokenizer

pytestmark = pytest.mark.mlx

CASES = make_cases()
MOST_FLIPS = 4
PAIR: list[Case] = [
    dict(zip(AXES, ("plain", "plain", *values), strict=True))
    for values in (
        ("penalties", "given", "top 5", "none", "one", "joins", "cold"),
        ("filters", "none", "chosen", "regex", "none", "others cancelled", "cold"),
    )
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """A checkpoint of each family, with adapters, written once."""
    return cache(lambda family: make_model(tmp_path_factory.mktemp("matrix"), family))


async def run_and_compare(
    model: Model, kv: str, cases: Sequence[Case], *, replays: bool = False
) -> Verdict:
    """The cases of one model, in company and alone."""
    company = Company(model, kv, cases, replays=replays)
    await company.run()
    return compare(company)


@pytest.mark.parametrize(("kv", "family"), CASES)
async def test_each_row_says_what_it_says_alone(
    kv: str, family: str, model: Callable[[str], Model]
) -> None:
    """Tokens, logits, figures, text and usage; whatever the others ask for and wherever they go."""
    verdict = await run_and_compare(model(family), kv, CASES[kv, family])
    assert not verdict.problems, "\n".join(verdict.problems)
    assert verdict.rows >= len(CASES[kv, family])
    assert verdict.flipped <= MOST_FLIPS


@pytest.mark.parametrize(("kv", "family"), [("plain", "plain"), ("turbo k8v3", "shared KV")])
async def test_replayed_steps_say_the_same(
    kv: str, family: str, model: Callable[[str], Model]
) -> None:
    """As a GPU runs them; each row is compared with itself alone, where nothing is replayed."""
    verdict = await run_and_compare(model(family), kv, CASES[kv, family], replays=True)
    assert not verdict.problems, "\n".join(verdict.problems)
    assert verdict.flipped <= MOST_FLIPS


@pytest.mark.parametrize("refusal", REFUSALS, ids=str)
async def test_what_does_not_go_together_is_refused_by_both_names(
    refusal: Refusal, model: Callable[[str], Model]
) -> None:
    """Before anything is served."""
    kv, family = refusal.first[1], refusal.second[1]
    settings = Settings(model(family).path, "tiny", dtype="float32", kv=KV[kv])
    with pytest.RaisesGroup(ModelRefused, flatten_subgroups=True) as caught:
        async with open_runtime(settings, tokenizer=ByteTokenizer()):
            await trio.sleep_forever()
    told = " ".join(map(str, leaves(caught.value)))
    assert all(word in told for word in refusal.told), told


@pytest.mark.parametrize("refusal", BYPASSED, ids=str)
async def test_what_is_left_out_is_told_by_both_names(
    refusal: Refusal, model: Callable[[str], Model]
) -> None:
    """Requests are served without it; ``/stats`` says why."""
    kv = KV[refusal.first[1]]
    settings = Settings(model("plain").path, "tiny", dtype="float32", kv=kv)
    async with open_runtime(settings, tokenizer=ByteTokenizer()) as runtime:
        await runtime.wait_ready()
        told: Any = runtime.stats()["prompt_cache"]
    assert all(word in told["off"] for word in refusal.told), told


def test_every_pair_of_values_is_in_a_case_or_in_the_list_of_what_is_not() -> None:
    """None is silently left out; and each model meets every value of every other axis."""
    cases = [case for of_model in CASES.values() for case in of_model]
    met = {frozenset(pair) for case in cases for pair in combinations(case.items(), 2)}
    listed = {frozenset((r.first, r.second)) for r in REFUSALS} | set(map(frozenset, MEANINGLESS))
    for a, b in combinations(AXES, 2):
        for x in AXES[a]:
            for y in AXES[b]:
                pair = frozenset(((a, x), (b, y)))
                assert (pair in met) is not (pair in listed), pair
    for of_model in CASES.values():
        for axis, values in AXES.items():
            if axis not in ("kv", "family"):
                assert {case[axis] for case in of_model} == set(values)


def test_the_generator_is_frugal_and_says_the_same_twice() -> None:
    """No case without a pair that the ones before it lacked."""
    axes = {"a": "123", "b": "1234", "c": "12", "d": "12"}
    cases = list(pairwise(axes, lambda case: (case.get("a"), case.get("b")) != ("1", "1"), seed=3))
    assert cases == list(
        pairwise(axes, lambda case: (case.get("a"), case.get("b")) != ("1", "1"), seed=3)
    )
    assert len(cases) <= 16
    met: set[frozenset[tuple[str, str]]] = set()
    for case in cases:
        assert (case["a"], case["b"]) != ("1", "1")
        pairs = {frozenset(pair) for pair in combinations(case.items(), 2)}
        assert not pairs <= met
        met |= pairs


def test_the_readme_shows_this_table() -> None:
    """``python tests/matrix.py`` writes it."""
    text = README.read_text("utf-8")
    assert readme_with_table(text) == text


# ---- broken compositions -----------------------------------------------------------------


def shift_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has its neighbour's adapters."""
    honest = Adapters.shown
    monkeypatch.setattr(
        Adapters, "shown", lambda self, chains: honest(self, [*chains[1:], *chains[:1]])
    )


def shift_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row draws with its neighbour's seed."""
    honest = sampling._Plan.__init__

    def shifted(self: Any, *args: Any, **more: Any) -> None:
        honest(self, *args, **more)
        self.keys = [*self.keys[1:], *self.keys[:1]]

    monkeypatch.setattr(sampling._Plan, "__init__", shifted)


def shift_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row's grammar holds its neighbour."""
    honest = masks.MaskMaker._make

    def shifted(self: Any, matchers: Any) -> Any:
        made = honest(self, matchers)
        return masks.Masks(np.roll(made.words, 1, axis=0), made.faults)

    monkeypatch.setattr(masks.MaskMaker, "_make", shifted)


def shift_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties look at what the first row of the batch says."""
    honest = processors.History.push

    def shifted(self: Any, inputs: Any) -> None:
        honest(self, inputs[:1] + 0 * inputs)

    monkeypatch.setattr(processors.History, "push", shifted)


def shift_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities are those of the first row that asked."""
    honest = sampling.score

    def shifted(kit: Any, values: Any, drawn: Any, wanted: Any) -> Any:
        return honest(kit, values, drawn, [(wanted[0][0], count) for _, count in wanted])

    monkeypatch.setattr(sampling, "score", shifted)


async def test_two_rows_that_the_mutants_break_are_equal_without_them(
    model: Callable[[str], Model],
) -> None:
    """Else it would be no wonder that they are noticed."""
    verdict = await run_and_compare(model("plain"), "plain", PAIR)
    assert not verdict.problems, "\n".join(verdict.problems)


@pytest.mark.parametrize(
    "mutate", [shift_adapters, shift_seeds, shift_masks, shift_history, shift_figures]
)
async def test_a_broken_composition_is_noticed(
    mutate: Callable[[pytest.MonkeyPatch], None],
    model: Callable[[str], Model],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever of one row becomes its neighbour's."""
    mutate(monkeypatch)
    verdict = await run_and_compare(model("plain"), "plain", PAIR)
    assert verdict.problems
