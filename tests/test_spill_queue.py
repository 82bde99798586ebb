"""What is written to the disk and in which order: the queue's core alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_troupe.runtime.plans import RowId, SnapshotId
from mlx_troupe.runtime.prefix.entries import Origin
from mlx_troupe.runtime.spill.budget import HOUR, WriteBudget
from mlx_troupe.runtime.spill.candidates import Candidate
from mlx_troupe.runtime.spill.queue import SaveQueue


def state(
    snapshot: int,
    *ids: int,
    nbytes: int = 10,
    cuttable: bool = True,
    namespace: str = "n",
    origin: Origin | None = None,
) -> Candidate:
    return Candidate(SnapshotId(snapshot), namespace, ids, nbytes, "final", cuttable, origin)


def of(row: int, *, runs: bool = True) -> Origin:
    return Origin(RowId(row), runs)


def take(q: SaveQueue, now: float = 0) -> Candidate:
    candidate = q.take(now)
    assert candidate is not None
    return candidate


def queue(bound: int = 1000, keep: int = 1000, budget: int | None = None) -> SaveQueue:
    return SaveQueue(bound, keep, WriteBudget(budget))


def test_states_are_written_oldest_first() -> None:
    """Each is taken once, in the order of the offers."""
    q = queue()
    assert q.offer(state(1, 1), 0) == q.offer(state(2, 2), 0) == "queued"
    assert q.offer(state(2, 2), 0) == "here"
    taken = []
    while (candidate := q.take(0)) is not None:
        taken.append(candidate.snapshot)
        q.exported(candidate)
        q.written(candidate, 10, 0)
    assert taken == [1, 2]
    assert (len(q), q.bytes, q.counts["written"]) == (0, 0, 2)


def test_a_longer_state_takes_the_place_of_what_it_covers() -> None:
    """Only where it can be cut, in the same namespace, and where the shorter one still waits."""
    q = queue()
    q.offer(state(1, 1, 2), 0)
    q.offer(state(2, 1, 2, 3, cuttable=False), 0)
    q.offer(state(3, 1, 2, 3, 4, namespace="other"), 0)
    assert len(q) == 3
    q.offer(state(4, 1, 2, 3, 4), 0)
    assert len(q) == 2
    assert q.counts["superseded"] == 2


def test_states_of_running_rows_are_taken_by_those_who_ask_for_them() -> None:
    """Whatever waits beside them, and of each row one at a time; its last state comes behind."""
    q = queue()
    q.offer(state(1, 1), 0)
    q.offer(state(2, 2, cuttable=False, origin=of(7)), 0)
    first = q.take(0, urgent=True)
    assert first is not None
    assert first.snapshot == 2
    q.offer(state(3, 2, 3, cuttable=False, origin=of(7)), 0)
    q.offer(state(4, 4, origin=of(8)), 0)
    other = q.take(0, urgent=True)
    assert other is not None
    assert other.snapshot == 4
    assert q.take(0, urgent=True) is None
    q.offer(state(5, 2, 3, 4, cuttable=False, origin=of(7, runs=False)), 0)
    assert take(q).snapshot == 1
    assert q.take(0) is None
    q.failed(first)
    assert take(q).snapshot == 5
    q.check_integrity()


def test_a_rows_newer_state_takes_the_place_of_one_that_waits() -> None:
    """Where it cannot be cut, too, but never that of a state that was not kept on the way."""
    q = queue()
    q.offer(state(1, 1, cuttable=False, origin=of(7, runs=False)), 0)
    q.offer(state(2, 1, 2, cuttable=False, origin=of(7)), 0)
    q.offer(state(3, 1, 2, cuttable=False, origin=of(8)), 0)
    q.offer(state(4, 1, 2, 3, cuttable=False, origin=of(7)), 0)
    assert (len(q), q.counts["superseded"]) == (3, 1)
    q.offer(state(5, 1, 2, 3, 4, cuttable=False, origin=of(7, runs=False)), 0)
    assert (len(q), q.counts["superseded"]) == (3, 2)
    assert [take(q).snapshot, q.take(0)] == [1, None]


def test_a_state_whose_end_nobody_heard_takes_no_place_but_where_it_covers() -> None:
    """Its row's earlier state may be the one that is needed."""
    unheard = Origin(RowId(7), runs=False, unheard=True)
    for cuttable in (False, True):
        q = queue()
        q.offer(state(1, 2, cuttable=cuttable, origin=of(7)), 0)
        q.offer(state(2, 2, 3, cuttable=cuttable, origin=unheard), 0)
        assert len(q) == 1 + (not cuttable)


def test_a_state_that_is_refused_takes_nobodys_place() -> None:
    """Whether it is postponed or has no room; what it would replace makes room for it."""
    q = queue(bound=25, budget=100)
    q.offer(state(1, 1), 0)
    q.offer(state(2, 2), 0)
    q.budget.charge(60, 0)
    assert q.offer(state(3, 1, 2), 0) == "postponed"
    assert q.offer(state(3, 1, 2, nbytes=16), 0) == "full"
    assert (len(q), q.counts["superseded"]) == (2, 0)
    assert q.offer(state(4, 2, 3, nbytes=15), 0) == "postponed"
    assert q.offer(state(4, 2, 3, nbytes=15), 0) == "queued"
    assert (len(q), q.bytes, q.counts["superseded"]) == (2, 25, 1)
    q.check_integrity()


def test_a_scarce_budget_has_room_for_running_rows() -> None:
    """They were asked for by the operator, and are not asked for again."""
    q = queue(budget=15)
    q.budget.charge(8, 0)
    assert q.offer(state(1, 1), 0) == "postponed"
    assert q.offer(state(2, 2, nbytes=7, origin=of(7)), 0) == "queued"
    assert q.take(0, urgent=True) is not None


def test_no_more_bytes_wait_than_may() -> None:
    """A state beyond the bound is refused and counted; it fits again when one was written."""
    q = queue(bound=25)
    q.offer(state(1, 1), 0)
    q.offer(state(2, 2), 0)
    assert q.offer(state(3, 3), 0) == "full"
    assert q.counts["dropped"] == 1
    hand = take(q)
    assert q.offer(state(3, 3), 0) == "full"
    q.exported(hand)
    q.written(hand, 10, 0)
    assert q.offer(state(3, 3), 0) == "queued"


def test_a_state_that_memory_let_go_stays_until_it_is_written() -> None:
    """Then, and not before, the device may forget it; one that never waited at once."""
    q = queue()
    q.offer(state(1, 1), 0)
    q.let_go([SnapshotId(1), SnapshotId(9)])
    assert q.take_freed() == (9,)
    hand = take(q)
    assert q.take_freed() == ()
    q.exported(hand)
    assert (q.take_freed(), q.owned_bytes, q.copied_bytes) == ((), 10, 0)
    q.copies = True
    assert q.copied_bytes == 10
    q.written(hand, 10, 0)
    assert (q.take_freed(), q.owned_bytes, q.copied_bytes) == ((1,), 0, 0)


def test_a_copy_takes_what_was_asked_for_of_a_state() -> None:
    """Other states in hand take all that they take on the device."""
    q = queue()
    q.copies = True
    q.offer(state(1, 1, 2, nbytes=100, origin=of(7)), 0)
    q.offer(state(2, 9), 0)
    delta, whole = q.take(0, urgent=True), take(q)
    assert delta is not None
    assert q.copied_bytes == 110
    q.copying(delta, 3)
    assert q.copied_bytes == 13
    q.written(delta, 3, 0)
    q.failed(whole)
    assert q.copied_bytes == 0


def test_states_without_room_on_the_disk_are_told_apart_while_memory_has_them() -> None:
    """Once memory has let go of one it was given up; and each is told once."""
    q = queue()
    for number in range(1, 5):
        q.offer(state(number, number), 0)
        q.unfitting(take(q))
    q.let_go((SnapshotId(2),))
    q.offer(state(9, 9), 0)
    gone = take(q)
    q.let_go((gone.snapshot,))
    q.unfitting(gone)
    assert q.counts["dropped"] == 5
    assert q.take_unfit() == {1, 3, 4}
    assert not q.take_unfit()
    q.offer(state(10, 10), 0)
    q.unfitting(take(q))
    q.lost()
    assert not q.take_unfit()


def test_only_so_many_bytes_stay_for_the_disk_alone() -> None:
    """Beyond the bound a state that memory let go is given up."""
    q = queue(keep=15)
    q.offer(state(1, 1), 0)
    q.offer(state(2, 2), 0)
    q.let_go([SnapshotId(1), SnapshotId(2)])
    assert q.take_freed() == (2,)
    assert q.counts["dropped"] == 1
    assert [s.snapshot for s in [q.take(0)] if s] == [1]


def test_no_hour_sees_more_bytes_written_than_its_budget() -> None:
    """What does not fit is given up, and may be offered again when the hour has passed."""
    q = queue(budget=25)
    for number in (1, 2):
        q.offer(state(number, number), 0)
    for _ in range(2):
        hand = take(q)
        q.exported(hand)
        q.written(hand, 10, 0)
    assert q.offer(state(3, 3), 1) == "postponed"
    assert q.offer(state(3, 3), 1) == "queued"
    assert q.take(1) is None
    assert q.counts["over_budget"] == 1
    q.offer(state(3, 3), HOUR)
    assert q.take(HOUR) is not None


def test_a_state_that_takes_more_than_it_seemed_to_is_not_written_beyond_the_budget() -> None:
    """The budget is asked again when the size is known."""
    q = queue(budget=25)
    q.offer(state(1, 1), 0)
    hand = take(q)
    q.exported(hand)
    assert not q.may_write(hand, 26, 0)
    assert (len(q), q.counts["over_budget"]) == (0, 1)
    q.offer(state(2, 2), 0)
    hand = take(q)
    assert q.may_write(hand, 25, 0)
    assert len(q) == 1


def test_the_budget_judges_a_running_row_by_what_is_written_of_its_state() -> None:
    """Its state is large, and all but a little of it is on the disk."""
    q = queue(budget=100)
    q.budget.charge(60, 0)
    q.offer(state(1, 1, nbytes=60, origin=of(7)), 0)
    delta = q.take(0, urgent=True)
    assert delta is not None
    assert q.may_write(delta, 5, 0)
    q.written(delta, 5, 0)
    q.offer(state(2, 2, nbytes=60, origin=of(7, runs=False)), 0)
    assert q.take(0) is None
    q.check_integrity()


def test_a_state_above_the_bound_is_taken_where_nothing_else_waits() -> None:
    """Beside anything else it is refused, and beside it everything else is."""
    q = queue(bound=25)
    assert q.offer(state(1, 1, nbytes=100), 0) == "queued"
    assert q.offer(state(2, 2, nbytes=1), 0) == "full"
    hand = take(q)
    assert q.offer(state(2, 2, nbytes=1), 0) == "full"
    q.written(hand, 100, 0)
    assert q.offer(state(2, 2, nbytes=1), 0) == "queued"
    assert q.offer(state(1, 1, nbytes=100), 0) == "full"
    q.check_integrity()


def test_the_second_half_of_a_budget_is_for_states_that_are_asked_for_again() -> None:
    """A state is refused once, and remembered by its ids, whatever its snapshot is."""
    q = queue(budget=15)
    q.offer(state(1, 1), 0)
    hand = take(q)
    q.exported(hand)
    q.written(hand, 8, 0)
    assert q.offer(state(2, 7, 8, nbytes=1), 1) == "postponed"
    assert q.offer(state(3, 7, 9, nbytes=1), 1) == "postponed"
    assert q.offer(state(4, 7, 8, nbytes=1), 1) == "queued"


def test_what_was_written_before_the_start_is_remembered_once() -> None:
    """Each part until its own hour is over; a second reading of the folder changes nothing."""
    budget = WriteBudget(100)
    for _ in range(2):
        budget.remember([(10.0, 50), (HOUR - 5, 30)], 0.0)
        assert budget.spent(0.0) == 80
    budget.charge(15, 1.0)
    assert budget.spent(4.0) == 95
    assert budget.spent(5.0) == 65
    assert budget.spent(HOUR - 10) == 15


def test_a_lost_device_leaves_nothing_waiting() -> None:
    """What has left the device already is still written."""
    q = queue()
    for number in (1, 2):
        q.offer(state(number, number), 0)
    hand = take(q)
    q.exported(hand)
    q.let_go([SnapshotId(2)])
    q.lost()
    assert (len(q), q.owned) == (1, ())
    q.written(hand, 10, 0)
    q.check_integrity()
    assert (len(q), q.bytes) == (0, 0)


def test_a_budget_and_its_charges_are_checked() -> None:
    """A negative budget is a mistake; without one everything is allowed."""
    with pytest.raises(ValueError, match="less than nothing"):
        WriteBudget(-1)
    free = WriteBudget(None)
    free.charge(1 << 50, 0)
    assert free.allows(1 << 50, 0)
    assert not free.is_scarce(0)


ACTIONS = st.lists(
    st.tuples(st.sampled_from(("offer", "let_go", "take", "step", "fail")), st.integers(1, 12)),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(ACTIONS, st.integers(5, 60), st.integers(0, 30), st.sampled_from((None, 40, 400)))
def test_whatever_happens_each_state_is_freed_exactly_once(
    actions: list[tuple[str, int]], bound: int, keep: int, budget: int | None
) -> None:
    """A state is freed after the memory tier let go of it, never before, never twice."""
    q = queue(bound, keep, budget)
    here: set[int] = set()
    gone: set[int] = set()
    freed: set[int] = set()
    hand: list[tuple[Candidate, bool]] = []
    written = 0
    for now, (action, number) in enumerate(actions):
        match action:
            case "offer" if number not in gone:
                here.add(number)
                ids = tuple(range(1 + number % 4)) if number % 2 else (number,)
                origin = of(number % 3, runs=number % 2 == 0) if number % 4 else None
                cuttable = number % 3 > 0
                q.offer(state(number, *ids, nbytes=number, cuttable=cuttable, origin=origin), now)
            case "let_go" if number in here:
                here.remove(number)
                gone.add(number)
                q.let_go([SnapshotId(number)])
            case "take" if (taken := q.take(now, urgent=number % 2 == 0)) is not None:
                hand.append((taken, True))
            case "step" if hand and hand[0][1]:
                q.exported(hand[0][0])
                hand.append((hand.pop(0)[0], False))
            case "step" if hand:
                q.written(hand.pop(0)[0], number, now)
                written += number
            case "fail" if hand:
                q.failed(hand.pop(0)[0])
            case _:
                pass
        q.check_integrity()
        told = q.take_freed()
        assert len(set(told)) == len(told)
        assert not freed & set(told), "freed twice"
        freed |= set(told)
        assert freed <= gone, "freed while the memory tier has it"
        assert gone - freed == set(q.owned), "neither freed nor kept for the disk"
    for candidate, _ in hand:
        q.failed(candidate)
    for urgent in (True, False):
        while (left := q.take(1e9, urgent=urgent)) is not None:
            q.exported(left)
            q.written(left, 0, 1e9)
    freed |= set(q.take_freed())
    assert freed == gone
    assert (len(q), q.bytes, q.counts["bytes_written"]) == (0, 0, written)


def test_a_row_that_is_replaced_keeps_its_place() -> None:
    """However often its newer state comes, it is behind nobody who came after it."""
    q = queue()
    q.offer(state(1, 1, cuttable=False, origin=of(7)), 0)
    q.offer(state(2, 2, cuttable=False, origin=of(8)), 0)
    q.offer(state(3, 1, 2, cuttable=False, origin=of(7)), 0)
    first, second = q.take(0, urgent=True), q.take(0, urgent=True)
    assert first is not None
    assert second is not None
    assert (first.snapshot, second.snapshot) == (3, 2)
