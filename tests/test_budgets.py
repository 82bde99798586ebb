"""Limits that the operator sets on memory: who waits, who is refused, and that nobody is stuck."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from company import SETTINGS, ask, company, nothing_left, read, settle, until
from core_rig import PLAIN, Rig, mixed
from core_walk import Walk, endless, ids
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from mlx_troupe.actors.system import Runtime
from mlx_troupe.actors.testing import ScriptedDevice
from mlx_troupe.runtime.budgets import (
    LONE_STEP,
    budgets,
    cache_bytes,
    check_limits,
    in_words,
    kept_bytes,
    lone_tokens,
    max_safe_context,
    state_bytes,
)
from mlx_troupe.runtime.defaults import token_limit
from mlx_troupe.runtime.engine.groups import capacity_for
from mlx_troupe.runtime.errors import ContextLengthExceeded, ModelError, Unavailable
from mlx_troupe.runtime.model_info import KVLayers, ModelInfo
from mlx_troupe.runtime.requests import Finished, FinishReason
from mlx_troupe.runtime.scheduling.effects import RowEnded, Started
from mlx_troupe.runtime.settings import Settings

COSTLY = replace(PLAIN, kv_bytes_per_token=10)
TOKENS = 512
LIMIT = TOKENS * COSTLY.kv_bytes_per_token


def capacity(rig: Rig) -> int:
    """Tokens of capacity that the device's rows take, one by one."""
    held = [len(row.state) for row in rig.device.rows.values()]
    if len(held) == 1:
        return -(-held[0] // LONE_STEP) * LONE_STEP
    return sum(map(capacity_for, held))


class Tight(Walk):
    """Any order of events under a limit that three rows can hardly share."""

    def __init__(self) -> None:
        super().__init__(Rig(COSTLY, mixed, batch=4, queue=4, budget=2_000, kv_limit=LIMIT))

    @rule(
        n=st.sampled_from((1, 30, 60, 63, 64, 100, 120, 127, 128, 129, 200, 250, 300)),
        limit=st.sampled_from((1, 2, 5, 40, 80, 150)),
        shared=st.booleans(),
    )
    def submit(self, n: int, limit: int, shared: bool) -> None:
        prompt = ids(n, 1 + len(self.rows) % 3 if shared else 10 + len(self.rows))
        row = self.rig.submit(prompt, min(limit, TOKENS - n))
        self.rows += [row] if row is not None else []
        self.rig.plan()

    @rule(steps=st.integers(1, 40))
    def settle(self, steps: int) -> None:
        for _ in range(steps):
            if self.rig.core.in_flight:
                self.rig.settle()
            self.rig.plan()

    @invariant()
    def limits_hold(self) -> None:
        assert capacity(self.rig) <= TOKENS, "the device holds more than the limit"
        stats = self.rig.core.stats()
        assert stats.reserved_bytes <= LIMIT


Tight.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestTight = Tight.TestCase


def tight(**options: Any) -> Rig:
    """A rig under the limit, without a cache."""
    return Rig(COSTLY, endless, **({"budget": 0, "kv_limit": LIMIT} | options))


def test_a_joiner_that_does_not_fit_waits_for_one_that_ends() -> None:
    """300 tokens take a slot of 512, which is all there is; the next one starts when it is free."""
    rig = tight()
    first, second = rig.submit(ids(257, 1), 20), rig.submit(ids(10, 2), 4)
    assert first is not None
    assert second is not None
    while not rig.is_over(first):
        rig.step()
        assert second not in rig.device.rows or rig.is_over(first)
    rig.drain()
    assert len(rig.tokens(second)) == 4
    assert rig.shortened == []


def test_nobody_overtakes_a_joiner_that_does_not_fit() -> None:
    """A small request behind a large one waits too: the large one would wait for ever."""
    rig = tight()
    rig.submit(ids(60, 1), 100)
    large, small = rig.submit(ids(400, 2), 2), rig.submit(ids(5, 3), 2)
    rig.drain()
    order = [start.row for plan in rig.device.plans for start in plan.start]
    assert order.index(large) < order.index(small)  # type: ignore[arg-type]


def test_a_row_that_outgrows_the_limit_waits_and_goes_on_where_it_was() -> None:
    """Two rows of 128 and one of 256: the first to need more waits until the large one ends."""
    rig = tight()
    large = rig.submit(ids(250, 1), 3)
    rows = [rig.submit(ids(126, 2), 60), rig.submit(ids(126, 3), 60)]
    assert None not in rows
    assert large is not None
    waited = False
    while not rig.is_over(large):
        rig.step()
        waited |= rig.core.stats().rows_without_room > 0
    rig.drain()
    assert waited or rig.core.stats().steps > 0
    assert [len(rig.tokens(row)) for row in rows if row is not None] == [60, 60]
    assert rig.shortened == []


def test_when_all_wait_the_youngest_ends_and_the_oldest_goes_on() -> None:
    """Four rows fill the limit in slots of 256 and all need 512: three go on in turn."""
    rig = tight(kv_limit=2 * LIMIT)
    rows = [rig.submit(ids(250, 1 + i), 100) for i in range(4)]
    rig.drain()
    assert rig.shortened == [rows[3]]
    assert [len(rig.tokens(row)) for row in rows[:3] if row is not None] == [100] * 3
    ends = [plan.end for plan in rig.device.plans if plan.end]
    assert ends == [(rows[3],), (rows[0],), (rows[1], rows[2])], "the older goes on first"
    assert len(rig.tokens(rows[3])) == 7, "it had the rest of its slot"  # type: ignore[arg-type]
    assert rig.said[rows[3]][-1] == RowEnded(rows[3], FinishReason.LENGTH)  # type: ignore[index,arg-type]
    assert rig.core.stats().shortened == 1


def test_while_a_row_waits_nobody_younger_takes_what_is_left() -> None:
    """Neither a newcomer nor a younger row that would grow: it would wait for ever."""
    rig = tight(batch=8, kv_limit=1900 * COSTLY.kv_bytes_per_token)
    large, old = rig.submit(ids(600, 1), 60), rig.submit(ids(510, 2), 20)
    young = rig.submit(ids(60, 3), 20)
    while not rig.core.stats().rows_without_room:
        rig.step()
    newcomer = rig.submit(ids(9, 4), 2)
    assert large is not None
    assert old is not None
    assert young is not None
    assert newcomer is not None
    while not rig.is_over(large):
        rig.step()
        assert len(rig.tokens(old)) <= 3, "there is no room for it"
        assert len(rig.tokens(young)) <= 5, "it grew before an older row that waits"
        assert not rig.said[newcomer], "it joined before a row that waits"
    rig.drain()
    assert [len(rig.tokens(row)) for row in (large, old, young, newcomer)] == [60, 20, 20, 2]


def test_a_row_alone_has_all_of_the_limit() -> None:
    """It is not held to powers of two, and ends with ``length`` when even that is full."""
    rig = Rig(COSTLY, endless, budget=0, kv_limit=768 * 10)
    row = rig.submit(ids(600, 1), 400)
    assert row is not None
    rig.drain()
    assert rig.shortened == [row]
    assert len(rig.tokens(row)) == 768 - 600 + 1


def test_a_queue_of_rows_that_do_not_fit_is_bounded_too() -> None:
    """The batch has places left, but the request would wait: it counts as waiting."""
    rig = tight(batch=8, queue=1)
    rig.submit(ids(400, 1), 5)
    assert rig.submit(ids(400, 2), 5) is not None
    assert rig.submit(ids(400, 3), 5) is None
    rig.drain()


def test_a_cancel_lets_the_next_one_in() -> None:
    """Also when the one that goes had not fitted yet."""
    rig = tight()
    rig.submit(ids(250, 1), 100)
    rig.step()
    large, small = rig.submit(ids(400, 2), 2), rig.submit(ids(5, 3), 2)
    assert large is not None
    assert small is not None
    rig.cancel(large)
    rig.step()
    assert isinstance(rig.said[small][0], Started)
    rig.drain()


def test_without_a_limit_nothing_is_reserved_or_refused() -> None:
    """Estimates advise: state that no machine could hold is attempted."""
    model = replace(COSTLY, kv_bytes_per_token=10**15, memory_bytes=10**9)
    rig = Rig(model, endless, budget=0)
    row = rig.submit(ids(600, 1), 40)
    assert row is not None
    rig.drain()
    assert len(rig.tokens(row)) == 40
    plain = Settings(Path("/nowhere"), "m")
    assert budgets(plain, model).context_tokens is None
    assert token_limit(600, None, plain, model) == 4096 - 600
    assert max_safe_context(model, 10**9) == 0


def test_a_prompt_that_could_never_fit_is_refused_with_the_numbers() -> None:
    """Whatever limit it is, by name; what fits has its answer clipped to what is left."""
    by_kv = Settings(Path("/nowhere"), "m", kv_budget_bytes=7_000)
    with pytest.raises(ContextLengthExceeded) as caught:
        token_limit(600, 5, by_kv, COSTLY, param="prompt")
    assert caught.value.code == "context_over_budget"
    assert caught.value.param == "prompt"
    for figure in ("600 tokens", "--kv-budget", "512 tokens", "10 bytes", "7e-06 GB"):
        assert figure in caught.value.message
    assert token_limit(500, None, by_kv, COSTLY) == 12
    assert token_limit(500, 5, by_kv, COSTLY) == 5
    model = replace(COSTLY, weights_bytes=10_000, prefill_bytes_per_token=1)
    by_memory = Settings(
        Path("/nowhere"), "m", prompt_cache_bytes=0, memory_budget_bytes=10_000 + 2048 + 3_000
    )
    with pytest.raises(ContextLengthExceeded) as caught:
        token_limit(256, 5, by_memory, model)
    assert caught.value.code == "memory_admission"
    assert token_limit(200, None, by_memory, model) == 56


def test_a_memory_budget_is_shared_by_all_that_the_model_takes() -> None:
    """Kept states have a quarter at most; the tighter limit counts, by its name."""
    model = replace(COSTLY, weights_bytes=1_000_000)
    limited = Settings(Path("/nowhere"), "m", memory_budget_bytes=4_000_000)
    assert cache_bytes(limited) == 1_000_000
    assert budgets(limited, model).kv_bytes == 2_000_000
    # Weights that a step of many rows expands are memory that no row can have.
    expanding = replace(model, expanded_bytes=700_000)
    assert budgets(limited, expanding).kv_bytes == 1_300_000
    window = [
        max_safe_context(replace(m, context_window=None), 4_000_000) for m in (model, expanding)
    ]
    assert window == [200_000 // 256 * 256, 130_000 // 256 * 256]
    both = replace(limited, kv_budget_bytes=500_000)
    assert (budgets(both, model).kv_bytes, budgets(both, model).cause) == (500_000, "--kv-budget")
    assert "--memory-budget 0.004 GB, --kv-budget 0.0005 GB" in in_words(both, model)
    assert in_words(Settings(Path("/nowhere"), "m"), model) == ""


@given(
    full=st.integers(0, 40), sliding=st.integers(0, 40), unpacked=st.integers(0, 200),
    left=st.integers(0, 10**7),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_what_attention_unpacks_is_part_of_a_memory_budget(
    full: int, sliding: int, unpacked: int, left: int
) -> None:
    """A row as long as the limit allows fits with it; the advice leaves room for it, too."""
    layers = (KVLayers("full", "", 1, full), KVLayers("sliding", "", 1, sliding))
    model = ModelInfo(
        "m", 9, None, frozenset(), kv_bytes_per_token=full + sliding, kv_layers=layers,
        trim_window=500, unpacked_bytes_per_token=unpacked,
    )  # fmt: skip
    limited = Settings(Path("/nowhere"), "m", prompt_cache_bytes=0, memory_budget_bytes=left)
    enforced = budgets(limited, model)
    longest = enforced.context_tokens
    advised = max_safe_context(model, left)
    if longest is None or advised is None:
        assert not full
        return
    assert state_bytes(model, longest, alone=True) + longest * unpacked <= left
    assert advised <= longest
    alone = budgets(limited, replace(model, unpacked_bytes_per_token=0))
    assert (alone.kv_bytes, alone.usable_bytes) == (left, left)


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ({"kv_budget_bytes": 2_559}, "--kv-budget 2.56e-06 GB leaves room for none"),
        ({"kv_budget_bytes": 2_560}, ""),
        ({"memory_budget_bytes": 1_000_000}, "--memory-budget 0.001 GB leaves 0 GB, and"),
        # Kept states take a quarter.
        ({"memory_budget_bytes": 1_336_000}, r"leaves 2e-06 GB, and the state .* 2.56e-06 GB"),
        ({"memory_budget_bytes": 1_337_000}, ""),
        ({"memory_budget_bytes": 1_337_000, "kv_budget_bytes": 10}, "--kv-budget 1e-08 GB"),
        ({}, ""),
    ],
)
def test_a_limit_without_room_for_any_request_is_refused(limits: dict[str, int], told: str) -> None:
    """A server that would refuse every request says so at start, by the flag at fault."""
    model = replace(COSTLY, weights_bytes=1_000_000)
    limited = Settings(Path("/nowhere"), "m", **limits)  # type: ignore[arg-type]
    if not told:
        check_limits(limited, model)
        return
    with pytest.raises(ModelError, match=told):
        check_limits(limited, model)


async def test_a_limit_without_room_ends_the_company_at_start(autojump_clock: object) -> None:
    """As a model that cannot be loaded does, and in words."""
    device = ScriptedDevice(ModelInfo("m", 1000, 4096, frozenset({0}), kv_bytes_per_token=10))
    limited = replace(SETTINGS, kv_budget_bytes=2_559)
    with pytest.RaisesGroup(
        pytest.RaisesExc(Unavailable, match="--kv-budget"), flatten_subgroups=True
    ):
        async with company(device, limited):
            pass


@given(limit=st.integers(0, 10**7), window=st.integers(1, 3000), per=st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_the_tokens_of_a_limit_are_what_fits(limit: int, window: int, per: int) -> None:
    """One step more would not, with sliding layers too."""
    layers = (KVLayers("full", "", 2, per), KVLayers("sliding", "", 3, per))
    model = ModelInfo(
        "m", 9, None, frozenset(), kv_bytes_per_token=5 * per, kv_layers=layers,
        trim_window=window - 1,
    )  # fmt: skip
    tokens = lone_tokens(model, limit)
    assert tokens is not None
    assert state_bytes(model, tokens, alone=True) <= limit
    assert state_bytes(model, tokens + LONE_STEP, alone=True) > limit


def test_a_state_that_does_not_grow_is_not_limited() -> None:
    """A purely recurrent model costs the same however long its rows are."""
    model = replace(PLAIN, kv_bytes_per_token=0)
    limited = Settings(Path("/nowhere"), "m", kv_budget_bytes=10)
    assert budgets(limited, model).context_tokens is None
    assert token_limit(4000, None, limited, model) == 96


def admission(runtime: Runtime) -> dict[str, Any]:
    """The section of ``/stats``."""
    found = runtime.stats()["admission"]
    assert isinstance(found, dict)
    return found


async def test_budgets_in_the_running_company(autojump_clock: object) -> None:
    """Refused, clipped, held back and told: as a client and a dashboard see it."""
    import trio

    device = ScriptedDevice(
        ModelInfo("m", 1000, 4096, frozenset({0}), kv_bytes_per_token=10, weights_bytes=77)
    )
    limited = replace(SETTINGS, kv_budget_bytes=LIMIT, prompt_cache_bytes=0)
    async with company(device, limited) as (runtime, _):
        with pytest.raises(ContextLengthExceeded, match="512 tokens"):
            async with runtime.generate(ask(*ids(512, 1))):
                pass
        async with runtime.generate(ask(*ids(500, 1), max_tokens=None)) as generation:
            _, last = await read(generation)
        assert isinstance(last, Finished)
        assert (last.reason, last.usage.completion_tokens) == (FinishReason.LENGTH, 12)
        answers: list[Finished] = []

        async def run(n: int, start: int) -> None:
            async with runtime.generate(ask(*ids(n, start), max_tokens=40)) as generation:
                _, last = await read(generation)
                assert isinstance(last, Finished)
                answers.append(last)

        async with trio.open_nursery() as nursery:
            for start in range(2, 8):
                nursery.start_soon(run, 200, start)
            await until(lambda: admission(runtime)["reserved_bytes"])
            assert admission(runtime)["reserved_bytes"] <= LIMIT
            assert device.stats().rows <= 2
        assert [answer.usage.completion_tokens for answer in answers] == [40] * 6
        stats = admission(runtime)
        assert stats["kv_budget_bytes"] == LIMIT
        assert stats["enforced_context_tokens"] == 512
        assert stats["memory_budget_bytes"] is None
        assert (stats["weights_bytes"], stats["reserved_bytes"]) == (77, 0)
        await settle(runtime)
        nothing_left(runtime, device)


async def test_without_limits_the_figures_say_so(autojump_clock: object) -> None:
    """``null`` where nothing is enforced."""
    async with company() as (runtime, _):
        stats = admission(runtime)
        assert stats["enforced_context_tokens"] is None
        assert stats["kv_limit_bytes"] is None
        assert stats["usable_bytes"] is None


def test_recurrent_state_counts_whatever_the_length_of_a_row() -> None:
    """As it is and as it was before the step under way; a limit below that holds nobody."""
    model = replace(COSTLY, fixed_bytes=1000)
    assert state_bytes(model, 1, alone=True) == 2_000 + LONE_STEP * 10
    assert state_bytes(model, 100, alone=False) == 2_000 + 128 * 10
    assert lone_tokens(model, 2_000 + 512 * 10) == 512
    assert lone_tokens(model, 1_999) == 0
    assert lone_tokens(replace(model, kv_bytes_per_token=0), 2_000) is None
    assert lone_tokens(replace(model, kv_bytes_per_token=0), 1_999) == 0


def test_a_kept_state_has_no_spare_tokens_and_its_recurrent_part_once() -> None:
    """Sliding layers keep a window of it."""
    layers = (KVLayers("full", "", 1, 4), KVLayers("sliding", "", 1, 6))
    model = replace(COSTLY, kv_layers=layers, trim_window=99, fixed_bytes=7)
    assert kept_bytes(model, 50) == 7 + 50 * 10
    assert kept_bytes(model, 300) == 7 + 300 * 4 + 100 * 6
