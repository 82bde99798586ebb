"""The scheduler's core on the scripted device: any order of events, and each promise by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar

import pytest
from core_rig import FLOORED, PLAIN, RECURRENT, ROTATING, Rig
from core_walk import Walk, endless
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from mlx_troupe.runtime.model_info import ModelInfo
from mlx_troupe.runtime.plans import Cold, FromRow, FromSnapshot, RowId, StepPlan
from mlx_troupe.runtime.requests import FinishReason
from mlx_troupe.runtime.scheduling.chunks import MAX_CHUNK, MIN_CHUNK, ChunkSizer
from mlx_troupe.runtime.scheduling.effects import ReturnLease, RowBroken, RowEnded, Started

BASES = tuple(
    tuple(1 + i * k % 5 for i in range(n)) for n, k in ((0, 1), (20, 2), (70, 3), (300, 7))
)
SELECTIONS = ((), (), ("a",), ("b",), ("a", "b"), ("b", "a"))


class AnyOrder(Walk):
    """Whatever happens in whatever order: rows say what they would alone, and nothing leaks."""

    model: ClassVar[ModelInfo] = PLAIN

    def __init__(self) -> None:
        super().__init__(Rig(self.model, batch=3, queue=3, budget=2_000))
        for adapter_id in "ab":
            self.rig.mount(adapter_id)

    @rule(
        base=st.sampled_from(BASES),
        rest=st.lists(st.integers(1, 3), min_size=1, max_size=40),
        limit=st.integers(1, 6),
        stop_ids=st.sets(st.integers(1, 12), max_size=2),
        adapters=st.sampled_from(SELECTIONS),
    )
    def submit(
        self,
        base: tuple[int, ...],
        rest: list[int],
        limit: int,
        stop_ids: set[int],
        adapters: tuple[str, ...],
    ) -> None:
        row = self.rig.submit((*base, *rest), limit, frozenset(stop_ids), adapters)
        if row is not None:
            self.rows.append(row)
        self.rig.plan()

    @precondition(lambda self: self.rows)
    @rule()
    def poison(self) -> None:
        self.rig.device.poisoned.add(self.rows[-1])

    @precondition(lambda self: self.rig.core.in_flight)
    @rule(again=st.booleans())
    def settle(self, again: bool) -> None:
        self.rig.settle()
        if again and self.rig.core.in_flight:
            self.rig.settle()
        self.rig.plan()

    @rule(adapter_id=st.sampled_from("ab"))
    def mount(self, adapter_id: str) -> None:
        self.rig.mount(adapter_id)
        self.rig.plan()

    @rule(adapter_id=st.sampled_from("ab"))
    def unmount(self, adapter_id: str) -> None:
        if adapter_id in self.rig.adapters.mounted:
            self.rig.unmount(adapter_id)
        self.rig.plan()

    @rule()
    def lose_cache(self) -> None:
        self.rig.lose_cache()


class AnyOrderRotating(AnyOrder):
    """The same with states that cannot be cut beyond a window."""

    model = ROTATING


class AnyOrderRecurrent(AnyOrder):
    """The same with states that can never be cut."""

    model = RECURRENT


class AnyOrderFloored(AnyOrder):
    """The same with states that are encoded for good from a length on."""

    model = FLOORED


for machine in (AnyOrder, AnyOrderRotating, AnyOrderRecurrent, AnyOrderFloored):
    machine.TestCase.settings = settings(
        max_examples=40,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
TestPlain = AnyOrder.TestCase
TestRotating = AnyOrderRotating.TestCase
TestRecurrent = AnyOrderRecurrent.TestCase
TestFloored = AnyOrderFloored.TestCase


# ---- each promise by name ----------------------------------------------------------------


def ramp(n: int, start: int = 1) -> tuple[int, ...]:
    """``n`` ids that share no prefix with those of another start."""
    return tuple((start * 101 + i * 7) % 900 + 1 for i in range(n))


def ends_after(tokens: int, prompt: int) -> Callable[[tuple[int, ...]], int]:
    """A script whose token number ``tokens`` is the end token, for prompts of one length."""
    return lambda ids: 0 if len(ids) == prompt + tokens - 1 else ids[-1] % 999 + 1


def steps_of(rig: Rig, *, limit: int = 1_000) -> list[StepPlan]:
    """Run to the end; every plan that was launched meanwhile."""
    seen = len(rig.device.plans)
    for _ in range(limit):
        if rig.step() is None:
            return rig.device.plans[seen:]
        rig.check()
    raise AssertionError("the rows never ended")


def kinds(rig: Rig) -> list[str]:
    return [store.kind for store in rig.stored]


def test_rows_are_admitted_by_number() -> None:
    """Whoever came first starts first, also when places become free at the same time."""
    rig = Rig(script=endless, batch=2, queue=20)
    rows = [rig.submit(ramp(20, i), limit=3) for i in range(10)]
    started = [start.row for plan in steps_of(rig) for start in plan.start]
    assert started == rows


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    """batch + queue rows are taken, one more is not; a place that becomes free is given again."""
    rig = Rig(script=endless, batch=2, queue=3)
    rows = [rig.submit(ramp(20, i)) for i in range(6)]
    assert rows[5] is None
    assert None not in rows[:5]
    assert rig.refused[0].waiting == 3
    assert rig.refused[0].retry_after >= 1.0
    assert rows[4] is not None
    rig.cancel(rows[4])
    assert rig.submit(ramp(20, 7)) is not None
    rig.drain()


def test_retry_after_grows_with_what_waits() -> None:
    """Slow steps and a long queue mean a later retry."""
    rig = Rig(script=endless, batch=1, queue=8)
    rig.device.decode_seconds = 2.0
    rig.submit(ramp(4), limit=5)
    steps_of(rig)
    for i in range(10):
        rig.submit(ramp(4, i))
    assert rig.refused[0].retry_after > 100.0


def test_a_row_forks_from_one_that_is_in_prefill() -> None:
    """A prompt that shares a prefix with one in prefill waits for it and takes it from there."""
    rig = Rig(script=endless)
    shared = ramp(300)
    leader = rig.submit((*shared, *ramp(2500, 2)))
    follower = rig.submit((*shared, *ramp(20, 3)))
    assert leader is not None
    assert follower is not None
    while rig.lookups:
        rig.answer()
    first, second = rig.plan()
    assert [start.row for start in first.start] == [leader]
    assert [part.count for part in first.prefill] == [300], "stopped where the prefixes part"
    assert second.start[0].source == FromRow(leader, 300)
    rig.drain()
    assert rig.cached(follower) == 300
    assert rig.core.stats().shared_tokens == 300


def test_sixteen_rows_of_one_template_compute_it_once() -> None:
    """All rows that arrive together share one prefill of what they have in common."""
    rig = Rig(script=endless, batch=16, queue=16)
    shared = ramp(200)
    for i in range(16):
        rig.submit((*shared, *ramp(10, i + 2)))
    rig.drain()
    stats = rig.core.stats()
    assert stats.shared_tokens == 15 * 200
    assert stats.prefilled_tokens == 200 + 16 * 9


def test_a_leader_with_a_short_rest_is_not_stopped() -> None:
    """Where the state can be cut, a few tokens more cost less than one more step."""
    rig = Rig(script=endless)
    shared = ramp(300)
    leader = rig.submit((*shared, *ramp(10, 2)))
    follower = rig.submit((*shared, *ramp(20, 3)))
    assert leader is not None
    assert follower is not None
    rig.drain()
    assert [part.count for part in rig.device.plans[0].prefill] == [309]
    assert rig.cached(follower) == 300


@pytest.mark.parametrize("model", [RECURRENT, ROTATING], ids=["recurrent", "rotating"])
@pytest.mark.parametrize("cached", [True, False])
def test_rows_that_cannot_be_cut_share_at_exact_boundaries(model: ModelInfo, cached: bool) -> None:
    """One template, equal prompts among them: its state is computed once, each prompt once."""
    rig = Rig(model, endless, batch=8, queue=8, budget=100_000 if cached else 0)
    shared = ramp(300)
    for i in (2, 3, 2, 4, 2, 3):
        rig.submit((*shared, *ramp(40, i)))
    rig.drain()
    assert rig.core.stats().prefilled_tokens == 300 + 3 * 39
    assert rig.core.stats().shared_tokens == 2 * 300 + 3 * 339


@pytest.mark.parametrize("running", [True, False])
def test_an_encoded_state_is_never_cut_below_its_threshold(running: bool) -> None:
    """A row that shares 18 tokens with a state of 70 starts cold, one that shares 25 does not."""
    rig = Rig(FLOORED, endless)
    shared = ramp(30)
    rig.submit((*shared, *ramp(40, 2)), limit=200 if running else 4)
    while rig.core.stats().prefilled_tokens < 69:
        rig.step()
    if not running:
        rig.drain()
    short = rig.submit((*shared[:18], *ramp(20, 3)))
    long = rig.submit((*shared[:25], *ramp(20, 4)))
    rig.drain()
    assert rig.cached(short) == 0
    assert rig.cached(long) == 25


def test_a_leader_past_what_is_shared_is_not_waited_for() -> None:
    """A state that cannot be cut and is already longer serves nobody: the row starts at once."""
    rig = Rig(RECURRENT, endless, prefill_token_seconds=0.01)
    rig.submit(ramp(10, 9), limit=200)
    rig.step()
    shared = ramp(100)
    rig.submit((*shared, *ramp(900, 2)))
    while max(len(row.state) for row in rig.device.rows.values()) <= 100:
        rig.step()
    late = rig.submit((*shared, *ramp(50, 3)))
    assert late is not None
    while rig.lookups:
        rig.answer()
    assert late in [start.row for plan in rig.plan() for start in plan.start]


def test_an_interrupted_leader_hands_over_what_it_has() -> None:
    """A row that waits for a prefix in prefill loses nothing when its leader is cancelled."""
    rig = Rig(script=endless, prefill_token_seconds=0.01)
    rig.submit(ramp(10, 9), limit=200)
    rig.step()
    shared = ramp(300)
    leader = rig.submit((*shared, *ramp(50, 2)))
    follower = rig.submit((*shared, *ramp(50, 3)))
    assert leader is not None
    assert follower is not None
    rig.step()
    rig.step()
    computed = max(len(row.state) for id, row in rig.device.rows.items() if id == leader)
    assert 16 <= computed < 300
    rig.cancel(leader)
    rig.drain()
    assert rig.cached(follower) >= computed


def test_a_running_row_never_waits_for_more_than_a_chunk() -> None:
    """While a row decodes, every step decodes it and prefills at most one chunk.

    Two rows wait for their first token and one runs, so a chunk may take four times 200 ms.
    """
    rig = Rig(script=endless)
    running = rig.submit(ramp(10), limit=60)
    assert running is not None
    rig.step()
    rig.submit(ramp(4000, 2), limit=2)
    rig.submit(ramp(3000, 3), limit=2)
    chunks: list[int] = []
    while not rig.is_over(running):
        chunk = max(rig.core.sizer.budget(pending=2, running=1), 64)
        done = rig.step()
        assert done is not None
        plan = rig.device.plans[-1]
        chunks.append(sum(part.count for part in plan.prefill))
        assert chunks[-1] <= max(chunk, rig.core.sizer.budget(pending=2, running=1))
        assert done.seconds <= 0.8 + 0.01
    plans = [plan for plan in rig.device.plans if plan.prefill and running in plan.decode]
    assert len(plans) > 10, "prefill was not interleaved with decoding"
    decodes = [i for i, plan in enumerate(rig.device.plans) if running in plan.decode]
    assert all(b - a == 1 for a, b in pairwise(decodes)), "a step left the running row out"
    rig.drain()


def test_prefill_is_not_chunked_small_when_nobody_waits() -> None:
    """With no row decoding, a long prompt goes in steps of 2,048."""
    rig = Rig(script=endless)
    rig.submit(ramp(4001), limit=1)
    steps_of(rig)
    assert [p.count for plan in rig.device.plans for p in plan.prefill] == [2048, 1952]


def test_a_short_prompt_is_not_stuck_behind_a_long_one() -> None:
    """Its first token comes within five steps, although a long prefill came first."""
    rig = Rig(script=endless)
    rig.submit(ramp(10), limit=100)
    rig.step()
    rig.submit(ramp(4000, 2), limit=2)
    rig.step()
    short = rig.submit(ramp(12, 3), limit=2)
    assert short is not None
    for _ in range(5):
        rig.step()
    assert rig.tokens(short)
    rig.drain()


def test_a_long_prompt_is_not_starved_by_short_ones() -> None:
    """Short prompts that keep coming take at most half of each step."""
    rig = Rig(script=endless, batch=32, queue=300)
    rig.submit(ramp(10), limit=400)
    rig.step()
    long = rig.submit(ramp(2000, 2), limit=1)
    assert long is not None
    for step in range(30):
        for i in range(9):
            rig.submit(ramp(28, 3 + step * 9 + i), limit=1)
        rig.step()
    assert rig.is_over(long)
    rig.drain()


@pytest.mark.parametrize("model", [PLAIN, ROTATING, RECURRENT, FLOORED], ids=lambda m: m.name)
def test_interrupted_prefill_is_kept_and_used(model: ModelInfo) -> None:
    """A cancelled prompt tried again starts where it was interrupted."""
    rig = Rig(model, endless, prefill_token_seconds=0.005)
    other = rig.submit(ramp(10, 9), limit=300)
    rig.step()
    row = rig.submit(ramp(1000), limit=2)
    assert other is not None
    assert row is not None
    for _ in range(4):
        rig.step()
    computed = len(rig.device.rows[row].state)
    assert 50 < computed < 999
    rig.cancel(row)
    for _ in range(3):
        rig.step()
    assert kinds(rig) == ["partial"]
    assert len(rig.stored[0].ids) >= computed
    again = rig.submit(ramp(1000), limit=2)
    assert again is not None
    rig.step()
    assert rig.cached(again) == len(rig.stored[0].ids)
    rig.cancel(other)
    rig.drain()


@pytest.mark.parametrize("model", [PLAIN, ROTATING, RECURRENT, FLOORED], ids=lambda m: m.name)
@pytest.mark.parametrize("steps", range(2, 6))
def test_what_a_cancelled_row_generated_is_kept(model: ModelInfo, steps: int) -> None:
    """Even with two steps under way, the state that is kept holds all but the last of them."""
    rig = Rig(model, endless)
    row = rig.submit(ramp(40), limit=50)
    assert row is not None
    for _ in range(steps):
        rig.step()
    rig.plan()
    said = len(rig.tokens(row))
    assert rig.core.in_flight == 2
    rig.cancel(row)
    rig.drain()
    assert kinds(rig) == ["final"]
    kept = rig.stored[0].ids
    assert len(kept) >= 40 + said
    assert kept == (*ramp(40), *(kept[39] % 999 + 1 + i for i in range(len(kept) - 40)))


def test_a_prompt_gets_an_entry_of_its_own_where_states_cannot_be_cut() -> None:
    """Its state is copied at the prompt's end, before the first decode changes it."""
    rig = Rig(RECURRENT, endless)
    row = rig.submit(ramp(300), limit=3)
    assert row is not None
    rig.drain()
    assert kinds(rig) == ["prompt", "final"]
    assert rig.stored[0].ids == ramp(300)[:-1]
    again = rig.submit(ramp(300), limit=3)
    assert again is not None
    rig.drain()
    assert rig.cached(again) == 299


@pytest.mark.parametrize("model", [PLAIN, ROTATING], ids=lambda m: m.name)
def test_no_prompt_entry_where_the_final_state_serves(model: ModelInfo) -> None:
    """Where a state can be cut, one entry serves the prompt and the next turn."""
    rig = Rig(model, endless)
    prompt = ramp(300) if model is PLAIN else ramp(16)
    rig.submit(prompt, limit=4)
    rig.drain()
    assert kinds(rig) == ["final"]


@pytest.mark.parametrize("model", [PLAIN, ROTATING, RECURRENT, FLOORED], ids=lambda m: m.name)
def test_a_final_state_holds_the_prompt_and_all_that_was_processed(model: ModelInfo) -> None:
    """The last sampled token is not in it; the next turn takes all the rest from there."""
    rig = Rig(model, endless)
    row = rig.submit(ramp(40), limit=5)
    assert row is not None
    rig.drain()
    answer = rig.tokens(row)
    assert rig.stored[-1].ids == (*ramp(40), *answer[:-1])
    turn = rig.submit((*ramp(40), *answer, *ramp(9, 4)), limit=2)
    assert turn is not None
    rig.drain()
    assert rig.cached(turn) == 44


def test_a_state_of_few_tokens_is_not_kept() -> None:
    """Under sixteen tokens it is cheaper to compute again."""
    rig = Rig(script=endless)
    rig.submit(ramp(8), limit=3)
    rig.drain()
    assert rig.stored == []


def test_an_end_token_exactly_on_the_budget_is_a_stop() -> None:
    """A row that ends by itself with its last allowed token did not run out of room."""
    rig = Rig(script=ends_after(4, prompt=20))
    row = rig.submit(ramp(20), limit=4)
    assert row is not None
    rig.drain()
    assert rig.said[row][-1] == RowEnded(row, FinishReason.STOP)
    assert len(rig.tokens(row)) == 4


def test_a_row_that_ends_by_count_is_not_planned_again() -> None:
    """No step computes a token that nobody may have."""
    rig = Rig(script=endless)
    row = rig.submit(ramp(20), limit=4)
    assert row is not None
    rig.drain()
    assert sum(row in plan.decode for plan in rig.device.plans) == 4


@pytest.mark.parametrize("model", [PLAIN, ROTATING, RECURRENT, FLOORED], ids=lambda m: m.name)
def test_a_token_after_the_end_is_never_seen(model: ModelInfo) -> None:
    """A step that ran ahead of an end token leaves no trace in the events or the kept state."""
    rig = Rig(model, ends_after(3, prompt=40))
    row = rig.submit(ramp(40), limit=50)
    assert row is not None
    rig.drain()
    assert sum(row in plan.decode for plan in rig.device.plans) == 4, "one step ran ahead"
    tokens = rig.tokens(row)
    assert tokens[-1] == 0
    assert len(tokens) == 3
    assert rig.stored[-1].ids == (*ramp(40), *tokens[:-1], 0)[: len(rig.stored[-1].ids)]
    assert len(rig.stored[-1].ids) == 42


def test_a_stop_id_of_the_request_ends_like_an_end_token() -> None:
    """It is reported, and nothing after it."""
    rig = Rig(script=endless)
    row = rig.submit((5, 6, 7), limit=9, stop_ids=frozenset({10}))
    assert row is not None
    rig.drain()
    assert rig.tokens(row) == [8, 9, 10]


def test_a_poisoned_row_fails_alone() -> None:
    """Its neighbours in the batch go on; it keeps nothing."""
    rig = Rig(script=endless)
    rows = [rig.submit(ramp(20, i), limit=6) for i in range(3)]
    assert rows[1] is not None
    rig.device.poisoned.add(rows[1])
    rig.drain()
    assert rig.said[rows[1]][-1] == RowBroken(rows[1], "poisoned")
    assert [len(rig.tokens(row)) for row in rows if row is not None] == [6, 0, 6]
    assert kinds(rig) == ["final", "final"]
    assert rig.core.stats().failed == 1


def forked_from_a_bad_row(matcher: Any = None) -> tuple[Rig, RowId, RowId]:
    """A row that fails in its first decode, and one that was planned to start from it by then."""
    rig = Rig(script=endless)
    bad = rig.submit((*ramp(60), 1), limit=6)
    assert bad is not None
    rig.device.poisoned.add(bad)
    rig.answer()
    rig.plan_one()
    fork = rig.submit((*ramp(60), *ramp(9, 3)), limit=6, matcher=matcher)
    assert fork is not None
    rig.answer()
    assert rig.plan_one().start[0].source == FromRow(bad, 60)
    return rig, bad, fork


def test_a_fork_of_a_row_that_has_just_failed_starts_over() -> None:
    """The step is planned before the failure is known; only the row at fault fails."""
    rig, bad, fork = forked_from_a_bad_row()
    rig.drain()
    assert isinstance(rig.said[bad][-1], RowBroken)
    assert len(rig.tokens(fork)) == 6
    starts = [start for plan in rig.device.plans for start in plan.start if start.row == fork]
    assert [type(start.source) for start in starts] == [FromRow, Cold]
    assert rig.cached(fork) == 0
    assert rig.core.stats().failed == 1


class Counting:
    """A matcher that allows everything and counts the tokens that it has followed."""

    def __init__(self, followed: int = 0) -> None:
        self.followed = followed

    def allowed(self) -> range:
        return range(1 << 16)

    def take(self, token: int) -> bool:
        self.followed += 1
        return False

    def copy(self) -> Counting:
        return Counting(self.followed)


def test_a_row_that_starts_over_begins_its_grammar_anew() -> None:
    """Each start has a matcher of its own, however far the device took the one before."""
    rig, _, fork = forked_from_a_bad_row(Counting(3))
    (first,) = rig.device.plans[-1].start
    assert isinstance(first.matcher, Counting)
    first.matcher.followed += 1
    for _ in range(2):
        rig.settle()
    plan = rig.plan_one()
    (again,) = plan.start
    assert (again.row, first.row) == (fork, fork)
    assert isinstance(again.matcher, Counting)
    # The device has carried the plan out already.
    assert again.matcher.followed == 3 + plan.decode.count(fork)


def test_what_an_earlier_step_says_of_a_row_that_started_over_is_out_of_date() -> None:
    """Two steps were planned with it; the second one's failure is not that of its second start."""
    rig, _, fork = forked_from_a_bad_row()
    rig.settle()
    ahead = rig.plan_one()
    assert fork in ahead.decode or any(part.row == fork for part in ahead.prefill)
    rig.settle()
    again = rig.plan_one()
    assert [start.row for start in again.start] == [fork]
    assert any(failed.row == fork for failed in rig.settle().failed)
    assert not rig.is_over(fork)
    rig.drain()
    assert len(rig.tokens(fork)) == 6


def test_forks_of_forks_start_over_too() -> None:
    """And from nothing each, so that a second fault of their own is the last."""
    rig, bad, fork = forked_from_a_bad_row()
    second = rig.submit((*ramp(60), *ramp(9, 3), 5), limit=6)
    assert second is not None
    rig.answer()
    rig.device.poisoned.add(second)
    rig.drain()
    assert [len(rig.tokens(row)) for row in (bad, fork, second)] == [0, 6, 0]
    assert isinstance(rig.said[second][-1], RowBroken)
    assert rig.core.stats().failed == 2


def test_a_row_that_starts_over_can_be_cancelled() -> None:
    """Before its second start it leaves at once."""
    rig, _, fork = forked_from_a_bad_row()
    rig.settle()
    rig.settle()
    rig.cancel(fork)
    rig.drain()
    assert rig.core.stats().cancelled == 1


def test_a_fork_that_fails_by_itself_is_at_fault() -> None:
    """Its donor is well: nobody starts over."""
    rig = Rig(script=endless)
    donor = rig.submit((*ramp(60), 1), limit=9)
    rig.step()
    fork = rig.submit((*ramp(60), 2), limit=6)
    assert donor is not None
    assert fork is not None
    rig.device.poisoned.add(fork)
    rig.drain()
    assert len(rig.tokens(donor)) == 9
    assert isinstance(rig.said[fork][-1], RowBroken)
    assert sum(start.row == fork for plan in rig.device.plans for start in plan.start) == 1


def test_a_lost_device_fails_what_was_on_it_and_keeps_what_waits() -> None:
    """Rows of the batch fail; the queue is served when the device is back."""
    rig = Rig(script=endless, batch=2, queue=4)
    rows = [rig.submit(ramp(20, i), limit=6) for i in range(4)]
    rig.step()
    rig.lose_device()
    assert [rig.is_over(row) for row in rows if row is not None] == [True, True, False, False]
    assert rig.core.in_flight == 0
    rig.drain()
    assert [len(rig.tokens(row)) for row in rows[2:] if row is not None] == [6, 6]


def test_a_result_of_an_unknown_step_is_ignored_and_its_states_are_released() -> None:
    """What an earlier scheduler had under way reaches nobody."""
    rig, other = Rig(script=endless), Rig(script=endless)
    row = rig.submit(ramp(40), limit=2)
    assert row is not None
    while rig.step() is not None:
        pass
    kept = next(plan for plan in rig.device.plans if plan.keep)
    rig.device.launch(StepPlan(kept.step))
    done = rig.device.settle()
    assert other.core.settled(done) == ()
    other.core.check_integrity()


def test_a_start_from_the_cache_returns_its_lease_when_the_step_is_done() -> None:
    """Not before the copy was made, and not never."""
    rig = Rig(script=endless)
    rig.submit(ramp(100), limit=2)
    rig.drain()
    row = rig.submit((*ramp(100), 5), limit=2)
    assert row is not None
    rig.answer()
    (plan, *_) = rig.plan()
    assert isinstance(plan.start[0].source, FromSnapshot)
    assert rig.cache.stats().leases == 1
    rig.settle()
    assert rig.cache.stats().leases == 0
    rig.drain()


def returned(rig: Rig) -> list[bool]:
    """A step ends: of each lease that it gives back, whether a row goes on from the state."""
    effects = rig.core.settled(rig.device.settle())
    rig.perform(effects)
    return [effect.taken for effect in effects if isinstance(effect, ReturnLease)]


@pytest.mark.parametrize("fails", [False, True])
def test_a_large_state_is_handed_over_only_to_a_row_that_runs(fails: bool) -> None:
    """One whose row has failed in its first step stays for the next."""
    rig = Rig(script=endless, budget=150)
    rig.submit(ramp(100), limit=2)
    rig.drain()
    row = rig.submit((*ramp(100), 5), limit=2)
    assert row is not None
    rig.device.poisoned.update({row} if fails else ())
    rig.answer()
    assert isinstance(rig.plan_one().start[0].source, FromSnapshot)
    assert returned(rig) == [not fails]
    assert len(rig.cache) == fails
    rig.drain()


def test_a_state_is_not_handed_over_to_a_row_that_starts_from_another_row() -> None:
    """What was lent to it serves others as before."""
    rig = Rig(script=endless)
    rig.submit(ramp(100), limit=2)
    rig.drain()
    longer = (*ramp(100), *ramp(60, 7))
    rig.submit(longer, limit=50)
    rig.answer()
    rig.plan_one()
    assert returned(rig) == [True]
    rig.submit((*longer, 5), limit=2)
    rig.answer()
    assert isinstance(rig.plan_one().start[0].source, FromRow)
    assert returned(rig) == [False]
    rig.drain()


def test_a_row_that_is_cancelled_before_it_starts_returns_its_lease() -> None:
    """While both steps are under way it only waits, with a state lent to it."""
    rig = Rig(script=endless)
    rig.submit(ramp(100), limit=2)
    rig.drain()
    other = rig.submit(ramp(9, 5), limit=50)
    assert other is not None
    rig.answer()
    rig.plan()
    assert rig.core.in_flight == 2
    row = rig.submit((*ramp(100), 5), limit=2)
    assert row is not None
    rig.answer()
    assert rig.cache.stats().leases == 1
    rig.cancel(row)
    assert rig.cache.stats().leases == 0
    rig.cancel(other)
    rig.drain()


def test_without_a_cache_nothing_is_asked_or_kept() -> None:
    """A budget of zero turns it off."""
    rig = Rig(script=endless, budget=0)
    row = rig.submit(ramp(400), limit=2)
    assert row is not None
    assert not rig.lookups
    rig.drain()
    assert isinstance(rig.device.plans[0].start[0].source, Cold)
    assert rig.stored == []
    assert isinstance(rig.said[row][0], Started)


def test_counts_say_how_rows_ended() -> None:
    """Finished, cancelled, failed and refused are each counted once."""
    rig = Rig(script=endless, batch=1, queue=1)
    rows = [rig.submit(ramp(20, i)) for i in range(3)]
    assert rows[1] is not None
    rig.cancel(rows[1])
    rig.drain()
    stats = rig.core.stats()
    assert (stats.submitted, stats.finished, stats.cancelled) == (2, 1, 1)
    assert (stats.failed, stats.refused) == (0, 1)


# ---- the size of a chunk -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("pass_seconds", "token_seconds", "decode_seconds", "chunk"),
    [
        (0.0, 0.0001, 0.01, 1024),
        (0.0, 0.0005, 0.01, 256),
        (0.0, 0.0033, 0.1, 48),
        (0.05, 0.003, 0.05, 48),
        (0.1, 0.005, 0.2, 48),
        (0.0, 0.0033, 0.4, 240),
        (0.0, 1.0, 0.01, MIN_CHUNK),
        (0.0, 1e-6, 0.001, MAX_CHUNK),
    ],
)
def test_a_chunk_is_what_fits_its_time(
    pass_seconds: float, token_seconds: float, decode_seconds: float, chunk: int
) -> None:
    """200 ms, or two decode steps where those take longer; a pass costs something by itself."""
    sizer = ChunkSizer()
    for turn in range(60):
        sizer.saw(prefilled=0, decoded=4, seconds=decode_seconds)
        n = sizer.chunk if turn % 3 else max(1, sizer.chunk // 2)
        took = pass_seconds + n * token_seconds + decode_seconds
        sizer.saw(prefilled=n, decoded=4, seconds=took, pairs=n * n // 2)
    assert sizer.chunk == chunk


def test_more_waiting_rows_than_running_ones_get_more_of_a_step() -> None:
    """Four times, so that one running row does not hold fifteen first tokens back."""
    sizer = ChunkSizer()
    for n in (16, 32, 64, 128, 256, 512) * 3:
        sizer.saw(prefilled=n, decoded=0, seconds=n * 0.004, pairs=n * n // 2)
    assert sizer.budget(pending=1, running=1) == 48
    assert sizer.budget(pending=2, running=1) == 192
    assert sizer.budget(pending=15, running=1) == 192
    assert sizer.budget(pending=4, running=8) == 48
    assert sizer.budget(pending=4, running=0) == MAX_CHUNK


def test_a_device_that_cannot_be_interrupted_gets_five_seconds_at_a_time() -> None:
    """Where nothing runs: whoever comes next waits for one such chunk at most."""
    sizer = ChunkSizer()
    assert sizer.budget(pending=1, running=0, blocking=True) == 512
    for n in (64, 128, 512):
        sizer.saw(prefilled=n, decoded=0, seconds=0.1 + n * 0.004, pairs=n * n // 2)
    assert sizer.budget(pending=1, running=0, blocking=True) == 1024
    assert sizer.budget(pending=1, running=0) == MAX_CHUNK
    for _ in range(40):
        sizer.saw(prefilled=512, decoded=0, seconds=512 * 0.1, pairs=512 * 256)
    assert sizer.budget(pending=1, running=0, blocking=True) == 256


def test_tiny_prefills_do_not_make_chunks_tiny() -> None:
    """Cache hits leave a few tokens each, from which a pass and a token cannot be told apart."""
    sizer = ChunkSizer()
    for turn in range(40):
        sizer.saw(prefilled=0, decoded=2, seconds=0.08)
        n = 1 + turn % 9
        sizer.saw(prefilled=n, decoded=0, seconds=0.08 + n * 0.003 + 0.002 * (turn % 3))
    assert sizer.chunk >= 32


def test_no_second_prefill_is_queued_where_it_could_not_be_taken_back() -> None:
    """A cancelled prompt costs what is being computed, not another chunk as well."""
    rig = Rig(replace(PLAIN, launches_ahead=False), script=endless)
    row = rig.submit(ramp(3000), limit=4)
    assert row is not None
    rig.answer()
    assert len(rig.plan()) == 1
    rig.cancel(row)
    rig.drain()
    assert sum(part.count for plan in rig.device.plans for part in plan.prefill) == 512


def test_a_handful_of_tokens_does_not_shrink_the_chunk() -> None:
    """A few tokens cost as much as a pass over the weights; that is not their price each."""
    sizer = ChunkSizer()
    for n in (64, 128, 256, 512):
        sizer.saw(prefilled=n, decoded=0, seconds=0.05 + n * 0.0005, pairs=n * n // 2)
    before = sizer.chunk
    for _ in range(5):
        sizer.saw(prefilled=3, decoded=0, seconds=0.0515, pairs=4)
    assert sizer.chunk >= before
