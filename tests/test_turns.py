"""Prefill under contention: who advances, and how soon a first token comes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from company import ask, company, read
from core_rig import PLAIN, RECURRENT, Rig
from core_walk import endless, ids
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlx_troupe.actors import text_tools
from mlx_troupe.actors.testing import ScriptedDevice
from mlx_troupe.runtime.model_info import ModelInfo
from mlx_troupe.runtime.plans import RowId, StepPlan
from mlx_troupe.runtime.scheduling.effects import RowSpec
from mlx_troupe.runtime.scheduling.pipeline import PIPELINE
from mlx_troupe.runtime.scheduling.rows import Phase, Row
from mlx_troupe.runtime.scheduling.turns import goes_before, most_steps, share

BUDGET = 64
LONG = replace(PLAIN, context_window=100_000)


class Watched:
    """A rig with steps of a fixed budget that keeps account of every row's bound."""

    def __init__(self, model: ModelInfo = LONG, **options: Any) -> None:
        self.rig = Rig(model, endless, budget=0, **options)
        self.rig.core.sizer.budget = lambda **_: BUDGET  # type: ignore[method-assign]
        self.by_size: dict[RowId, int] = {}
        self.by_age: dict[RowId, int] = {}
        self.taken: dict[RowId, int] = {}
        self.rows: dict[RowId, Row] = {}

    def submit(self, n: int, limit: int = 3, start: int | None = None) -> RowId | None:
        number = start or len(self.rig.said) + 1
        return self.rig.submit(ids(n, number), limit)

    def plan(self) -> None:
        """Launch steps, charging each to the rows that wait for their first token."""
        while (planned := self.rig.core.plan()) is not None:
            plan, effects = planned
            for start in plan.start:
                self._open_account(self.rig.core._rows[start.row])
            self._charge(plan)
            self.rig.device.launch(plan)
            self.rig.perform(effects)

    def _waiting(self) -> list[Row]:
        return [row for id, row in self.rows.items() if id not in self.taken]

    def _open_account(self, row: Row) -> None:
        left = {id: other for id, other in self.rows.items() if id not in self.taken}
        older = [other.fresh for other in left.values() if other.number < row.number]
        ahead = [other.fresh for other in left.values() if goes_before(other, row)]
        self.by_age[row.id] = most_steps(row.fresh, older, BUDGET)
        self.by_size[row.id] = most_steps(row.fresh, ahead, BUDGET)
        for other in left.values():
            if goes_before(row, other):
                self.by_size[other.id] += most_steps(row.fresh, (), BUDGET)
            if row.number < other.number:
                self.by_age[other.id] += most_steps(row.fresh, (), BUDGET)
        self.rows[row.id] = row

    def _charge(self, plan: StepPlan) -> None:
        counts = {part.row: part.count for part in plan.prefill}
        assert sum(counts.values()) <= BUDGET, "a running row waits for more than a chunk"
        running = [row for row in self.rig.core._rows.values() if row.phase is Phase.DECODE]
        left_out = [row for row in running if row.id not in plan.decode]
        assert all(r.launched_tokens >= r.spec.limit for r in left_out), "a row was left out"
        pending = [row for row in self._waiting() if row.id in counts or row.phase is Phase.PREFILL]
        if pending:
            oldest = min(pending, key=lambda row: row.number)
            least = min(BUDGET // 2, counts.get(oldest.id, 0) + oldest.remaining)
            assert counts.get(oldest.id, 0) >= least, "the oldest row does not advance"
        for row in self._waiting():
            self.by_size[row.id] -= 1
            self.by_age[row.id] -= 1
            within = min(self.by_size[row.id], self.by_age[row.id])
            assert within >= 0, f"a row of {row.fresh} tokens waits longer than its bound"
        for id in plan.decode:
            self.taken.setdefault(id, plan.step)
        for id in plan.end:
            self.taken.setdefault(id, plan.step)


class Contention(RuleBasedStateMachine):
    """Long and short prompts that come, go on, and are cancelled, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.watched = Watched(batch=6, queue=6)
        self.made: list[RowId] = []

    @rule(n=st.sampled_from((2, 9, 30, 33, 64, 65, 130, 400, 700, 2000, 5000)))
    def submit(self, n: int) -> None:
        row = self.watched.submit(n)
        self.made += [row] if row is not None else []
        self.watched.plan()

    @precondition(lambda self: self.made)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        self.watched.rig.cancel(data.draw(st.sampled_from(self.made)))
        self.watched.plan()

    @precondition(lambda self: self.watched.rig.core.in_flight)
    @rule(steps=st.integers(1, 6))
    def settle(self, steps: int) -> None:
        for _ in range(steps):
            if self.watched.rig.core.in_flight:
                self.watched.rig.settle()
            self.watched.plan()

    @invariant()
    def holds(self) -> None:
        self.watched.rig.check()

    def teardown(self) -> None:
        while self.watched.rig.core.in_flight:
            self.watched.rig.settle()
            self.watched.plan()
        self.watched.rig.drain()


Contention.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestContention = Contention.TestCase


def row_of(number: int, fresh: int, remaining: int) -> Row:
    """A row in prefill."""
    spec = RowSpec(RowId(number), (1,) * (fresh + 1), None, 1)  # type: ignore[arg-type]
    row = Row(spec, number, None, Phase.PREFILL)  # type: ignore[arg-type]
    row.fresh, row.processed = fresh, fresh - remaining
    return row


@given(
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=8),
    budget=st.integers(16, 600),
    data=st.data(),
)
@settings(max_examples=200, deadline=None)
def test_a_share_gives_both_claims_their_half(sizes: list[int], budget: int, data: Any) -> None:
    """The budget is never exceeded, nobody gets too much, and both claims get half or all."""
    rows = [
        row_of(number, size, data.draw(st.integers(1, size))) for number, size in enumerate(sizes)
    ]
    shared = share(rows, budget)
    counts = {row.number: count for row, count in shared}
    assert sum(counts.values()) <= budget
    assert all(0 < count <= row.remaining for row, count in shared)
    oldest = rows[0]
    assert counts[0] >= min(oldest.remaining, budget // 2)
    short = [row for row in rows[1:] if 2 * row.fresh <= oldest.fresh]
    if short:
        first = min(short, key=lambda row: (row.fresh, row.number))
        assert counts.get(first.number, 0) >= min(first.remaining, budget // 2)
    elif len(shared) > 1:
        assert counts[0] == oldest.remaining, "a step is divided for nobody's good"
    if sum(counts.values()) < budget:
        left = budget - sum(counts.values())
        cut = [row for row in rows if counts.get(row.number, 0) < row.remaining]
        assert all(row.remaining > left for row in cut), "room is left that somebody could use"


@pytest.mark.parametrize("longs", [1, 2, 4])
def test_a_short_prompt_behind_long_ones_starts_at_once(longs: int) -> None:
    """However many long prefills are there, it waits for the steps under way and its own."""
    watched = Watched(batch=8)
    for _ in range(longs):
        assert watched.submit(20_000) is not None
    watched.plan()
    for _ in range(20):
        watched.rig.settle()
        watched.plan()
    short = watched.submit(30)
    assert short is not None
    settled = 0
    while not watched.rig.tokens(short):
        watched.plan()
        watched.rig.settle()
        settled += 1
    assert settled <= most_steps(29, (), BUDGET) + PIPELINE == 1 + PIPELINE


def test_long_prompts_are_computed_one_after_the_other() -> None:
    """Two of a length do not share their steps: the first is not made to wait for the second."""
    watched = Watched()
    first, second = watched.submit(2000), watched.submit(2000)
    assert first is not None
    assert second is not None
    while not watched.rig.tokens(first):
        watched.plan()
        watched.rig.settle()
    parts = [part.row for plan in watched.rig.device.plans for part in plan.prefill]
    assert parts.index(second) >= 2000 // BUDGET


def test_a_stream_of_short_prompts_takes_half_of_a_long_ones_time_at_most() -> None:
    """However many come, the long one advances by half a budget in every step."""
    watched = Watched(batch=32, queue=1000)
    long = watched.submit(3200)
    assert long is not None
    steps = 0
    while not watched.rig.tokens(long):
        for _ in range(4):
            watched.submit(40, limit=1)
        watched.plan()
        watched.rig.settle()
        steps += 1
    assert steps <= 3200 // (BUDGET // 2) + PIPELINE + 1


def test_a_short_prompt_does_not_wait_for_a_prefix_that_stands_still() -> None:
    """Its system prompt is also that of a long prompt, which waits behind another long one."""
    watched = Watched()
    watched.submit(20_000, start=5)
    head = ids(300, 7)
    watched.rig.submit((*head, *ids(20_000, 8)), 2)
    watched.plan()
    watched.rig.settle()
    short = watched.rig.submit((*head, *ids(20, 9)), 2)
    assert short is not None
    settled = 0
    while not watched.rig.tokens(short):
        watched.plan()
        watched.rig.settle()
        settled += 1
    assert settled <= most_steps(319, (), BUDGET) + PIPELINE


def test_a_short_prompt_is_not_computed_in_a_step_of_seconds() -> None:
    """Where nothing runs a step may take 5 s, but not if it holds somebody's first token back."""
    model = replace(LONG, launches_ahead=False)
    rig = Rig(model, endless, budget=0, prefill_token_seconds=0.004)
    rig.submit(ids(20_000, 1), 2)
    for _ in range(6):
        rig.step()
    assert sum(part.count for part in rig.device.plans[-1].prefill) == 1024
    short = rig.submit(ids(40, 2), 2)
    assert short is not None
    seconds = 0.0
    while not rig.tokens(short):
        done = rig.step()
        assert done is not None
        seconds += done.seconds
    assert seconds <= 1.0


@pytest.mark.parametrize("ahead", [True, False], ids=["gpu", "cpu"])
def test_a_long_prefill_is_hardly_later_for_a_short_prompt(ahead: bool) -> None:
    """A prompt of 200 tokens and 16 of answer in its middle cost 32,000 tokens less than 5 %."""
    seconds: list[float] = []
    for disturbed in (False, True):
        model = replace(LONG, launches_ahead=ahead)
        rig = Rig(model, endless, budget=0, prefill_token_seconds=0.003)
        rig.device.decode_seconds = 0.05
        long = rig.submit(ids(32_000, 1), 1)
        assert long is not None
        spent = 0.0
        while not rig.is_over(long):
            if disturbed and spent > 48 and len(rig.said) == 1:
                rig.submit(ids(200, 2), 16)
            done = rig.step()
            assert done is not None
            # What a pass over the weights costs, whatever it processes.
            spent += done.seconds + 0.05
        seconds.append(spent)
    assert seconds[1] <= 1.05 * seconds[0], seconds


def test_a_recurrent_model_keeps_the_bound() -> None:
    """Its rows are never cut and never share a step's pass; the turns are the same."""
    watched = Watched(replace(RECURRENT, context_window=100_000))
    watched.submit(20_000)
    watched.plan()
    watched.rig.settle()
    short = watched.submit(300)
    assert short is not None
    settled = 0
    while not watched.rig.tokens(short):
        watched.plan()
        watched.rig.settle()
        settled += 1
    assert settled <= most_steps(299, (), BUDGET) + PIPELINE + 1


async def test_first_tokens_in_virtual_time(
    autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prefills of minutes, a row that decodes, and a newcomer who waits for under a second."""
    import trio

    # Ids checked on a real thread would take any amount of virtual time.
    monkeypatch.setattr(text_tools, "LONG_PROMPT", 1 << 30)
    device = ScriptedDevice(replace(LONG, name="scripted", namespace="s"), decode_seconds=0.05)
    device.prefill_token_seconds = 0.003
    async with company(device) as (runtime, _), trio.open_nursery() as nursery:

        async def run(n: int, start: int, max_tokens: int) -> None:
            async with runtime.generate(ask(*ids(n, start), max_tokens=max_tokens)) as generation:
                await read(generation)

        nursery.start_soon(run, 10, 3, 5_000)
        await trio.sleep(1)
        nursery.start_soon(run, 30_000, 1, 2)
        nursery.start_soon(run, 30_000, 2, 2)
        await trio.sleep(10)
        for n in range(5):
            began = trio.current_time()
            await run(30, 10 + n, 1)
            assert trio.current_time() - began < 3.0
        nursery.cancel_scope.cancel()
