"""The prefix index: what it finds, what it gives up, and that it gives nothing up twice."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlx_troupe.runtime.plans import SnapshotId
from mlx_troupe.runtime.prefix.entries import Hit, Kind, LeaseId, PutResult
from mlx_troupe.runtime.prefix.index import PrefixCore

WINDOWS: dict[str, int | None] = {
    "plain": None,
    "other": None,
    "ring": 4,
    "recurrent": 0,
    "long ring": 300,
}

namespaces = st.sampled_from(("plain", "other", "ring", "recurrent"))
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple)
sessions = st.sampled_from((None, "one", "two"))
kinds: st.SearchStrategy[Kind] = st.sampled_from(("prompt", "final", "partial"))


@dataclass(eq=False)
class Kept:
    """An entry of the brute-force model."""

    ids: tuple[int, ...]
    namespace: str
    snapshot: SnapshotId
    nbytes: int
    leases: int = 0
    uses: int = 1
    session: str | None = None
    shared: bool = False
    closed: bool = False

    @property
    def cuttable(self) -> bool:
        window = WINDOWS[self.namespace]
        return window is None or len(self.ids) <= window

    def usable(self, ids: tuple[int, ...], namespace: str) -> int:
        if namespace != self.namespace:
            return 0
        shared = 0
        while shared < min(len(ids) - 1, len(self.ids)) and ids[shared] == self.ids[shared]:
            shared += 1
        return shared if self.cuttable or shared == len(self.ids) else 0

    def extends(self, other: Kept) -> bool:
        same_place = self.namespace == other.namespace and len(self.ids) > len(other.ids)
        return same_place and self.ids[: len(other.ids)] == other.ids


@dataclass
class BruteForce:
    """The cache as a list, least recently used first; every question is a loop over it."""

    budget: int
    aside: int = 0
    entries: list[Kept] = field(default_factory=list)
    detached: list[Kept] = field(default_factory=list)
    closing: list[Kept] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(kept.nbytes for kept in (*self.entries, *self.detached))

    def lookup(
        self, ids: tuple[int, ...], namespace: str, session: str | None = None
    ) -> tuple[Kept, int] | None:
        longest = max((kept.usable(ids, namespace) for kept in self.entries), default=0)
        if not longest:
            return None
        best = [kept for kept in self.entries if kept.usable(ids, namespace) == longest][-1]
        self.touch(best)
        best.leases += 1
        best.uses = min(64, best.uses + 1)
        best.shared |= session is None or session != best.session
        return best, longest

    def touch(self, kept: Kept) -> None:
        kept.closed = False
        self.entries.remove(kept)
        self.entries.append(kept)

    def put(self, new: Kept) -> tuple[bool, set[SnapshotId]]:
        if self.budget == 0 or new.nbytes > self.budget:
            return False, {new.snapshot}
        same = [k for k in self.entries if (k.ids, k.namespace) == (new.ids, new.namespace)]
        covers = [k for k in self.entries if k.cuttable and k.extends(new)]
        if covers and not same:
            self.touch(covers[-1])
            return False, {new.snapshot}
        stale = [k for k in self.entries if new.cuttable and new.extends(k)]
        for old in same + stale:
            new.uses = max(new.uses, old.uses)
            new.shared |= old.shared or old.session not in (None, new.session)
        free = self.detach(same + stale)
        self.entries.append(new)
        return True, free | self.make_room(new)

    def make_room(self, newest: Kept | None = None) -> set[SnapshotId]:
        free = self.evict(self.budget, newest)
        newest = newest or next(reversed(self.entries), None)
        return free | self.evict(self.budget - self.aside, newest)

    def evict(self, limit: int, newest: Kept | None = None) -> set[SnapshotId]:
        free: set[SnapshotId] = set()
        while self.bytes > limit and (victim := self.victim(newest)) is not None:
            free |= self.detach([victim])
        return free

    def victim(self, newest: Kept | None) -> Kept | None:
        loose = [k for k in self.entries if not k.leases and k is not newest]
        closed = [k for k in self.closing if k in loose and k.closed]
        if closed:
            return closed[0]
        weighed = loose[: min(16, max(1, len(self.entries) // 2))]
        if not weighed:
            return None
        least = min(self.worth(k) for k in weighed)
        older: list[Kept] = []
        for kept in weighed:
            if self.worth(kept) == least:
                break
            older.append(kept)
        for spared in older:
            spared.uses = max(1, spared.uses // 2)
        return kept

    def worth(self, kept: Kept) -> float:
        others = (k for k in self.entries if k is not kept)
        served = max((k.usable((*kept.ids, -1), kept.namespace) for k in others), default=0)
        uses = kept.uses * (2 if kept.session else 1)
        return (len(kept.ids) - served) * uses / max(1, kept.nbytes)

    def close(self, session: str) -> bool:
        mine = [k for k in self.entries if k.session == session]
        for kept in mine:
            kept.session = None
            if not kept.shared:
                kept.closed = True
                self.closing = [k for k in self.closing if k is not kept] + [kept]
        return bool(mine)

    def detach(self, gone: list[Kept]) -> set[SnapshotId]:
        for kept in gone:
            self.entries.remove(kept)
            self.detached.append(kept)
        return self.sweep()

    def sweep(self) -> set[SnapshotId]:
        free = {kept.snapshot for kept in self.detached if not kept.leases}
        self.detached = [kept for kept in self.detached if kept.leases]
        return free

    def end_lease(self, kept: Kept, *, taken: bool = False) -> set[SnapshotId]:
        kept.leases -= 1
        if kept.leases:
            return set()
        if kept in self.detached:
            return self.sweep()
        return self.detach([kept]) if taken and kept.nbytes > self.budget / 2 else self.make_room()


class PrefixMachine(RuleBasedStateMachine):
    """The core against the list, one random operation at a time."""

    @initialize(budget=st.sampled_from((0, 1, 20, 60, 10_000)))
    def open(self, budget: int) -> None:
        self.core = PrefixCore(budget)
        self.model = BruteForce(budget)
        self.live: set[SnapshotId] = set()
        self.released: set[SnapshotId] = set()
        self.leases: dict[LeaseId, Kept] = {}
        self.reused = self.hits = self.misses = 0
        self.next_snapshot = 0

    def check_released(self, got: tuple[SnapshotId, ...], expected: set[SnapshotId]) -> None:
        assert len(set(got)) == len(got), "named twice in one answer"
        assert set(got) == expected
        assert not self.released & expected, "released twice"
        assert expected <= self.live, "released although never put"
        self.live -= expected
        self.released |= expected

    @rule(
        ids=prompts,
        namespace=namespaces,
        nbytes=st.integers(0, 25),
        kind=kinds,
        again=st.booleans(),
        session=sessions,
    )
    def put(
        self,
        ids: tuple[int, ...],
        namespace: str,
        nbytes: int,
        kind: Kind,
        again: bool,
        session: str | None,
    ) -> None:
        if again and self.model.entries:
            oldest = self.model.entries[0]
            ids, namespace = oldest.ids, oldest.namespace
        snapshot = SnapshotId(self.next_snapshot)
        self.next_snapshot += 1
        self.live.add(snapshot)
        got = self.core.put(
            ids,
            namespace,
            snapshot,
            nbytes,
            kind=kind,
            trim_window=WINDOWS[namespace],
            session=session,
        )
        kept, free = self.model.put(Kept(ids, namespace, snapshot, nbytes, session=session))
        assert got.kept == kept
        self.check_released(got.release, free)

    @rule(session=sessions)
    def close_session(self, session: str | None) -> None:
        if session is not None:
            assert self.core.close_session(session) == self.model.close(session)

    @rule(ids=prompts, namespace=namespaces, keep_lease=st.booleans(), session=sessions)
    def lookup(
        self, ids: tuple[int, ...], namespace: str, keep_lease: bool, session: str | None
    ) -> None:
        window = WINDOWS[namespace]
        hit = self.core.lookup(ids, namespace, trim_window=window, session=session)
        found = self.model.lookup(ids, namespace, session)
        if found is None:
            assert hit is None
            self.misses += 1
            return
        kept, length = found
        assert hit is not None
        assert (hit.snapshot, hit.length) == (kept.snapshot, length)
        assert hit.lease not in self.leases
        self.hits += 1
        self.reused += length
        self.leases[hit.lease] = kept
        if not keep_lease:
            self.end(hit.lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), taken=st.booleans())
    def end_lease(self, data: st.DataObject, taken: bool) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.leases))), taken=taken)

    def end(self, lease: LeaseId, *, taken: bool = False) -> None:
        got = self.core.end_lease(lease, taken=taken)
        self.check_released(got, self.model.end_lease(self.leases.pop(lease), taken=taken))
        assert self.core.end_lease(lease) == ()

    @rule(nbytes=st.integers(0, 70))
    def set_aside(self, nbytes: int) -> None:
        self.model.aside = min(nbytes, self.model.budget)
        self.check_released(self.core.set_aside(nbytes), self.model.make_room())

    @rule(nbytes=st.integers(0, 70))
    def make_room(self, nbytes: int) -> None:
        limit = self.model.budget - max(nbytes, self.model.aside)
        self.check_released(self.core.make_room(nbytes), self.model.evict(limit))

    @rule(nbytes=st.integers(0, 70))
    def relieve(self, nbytes: int) -> None:
        limit = self.model.bytes - nbytes
        self.check_released(self.core.relieve(nbytes), self.model.evict(limit))

    @rule()
    def end_all_leases(self) -> None:
        got = self.core.end_all_leases()
        free: set[SnapshotId] = set()
        for kept in self.leases.values():
            free |= self.model.end_lease(kept)
        self.leases.clear()
        self.check_released(got, free)

    @rule()
    def clear(self) -> None:
        free = self.model.detach(list(self.model.entries))
        self.check_released(self.core.clear(), free)

    @precondition(lambda self: self.model.entries)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        kept = data.draw(st.sampled_from(self.model.entries))
        free = self.model.detach([kept])
        self.check_released(self.core.drop(kept.snapshot), free)
        assert self.core.drop(kept.snapshot) == ()

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.check_integrity()
        stats = self.core.stats()
        assert self.core.bytes == stats.bytes == self.model.bytes
        assert len(self.core) == stats.entries == len(self.model.entries)
        assert stats.prompt_entries + stats.final_entries + stats.partial_entries == len(self.core)
        assert stats.leases == len(self.leases)
        assert (stats.hits, stats.misses) == (self.hits, self.misses)
        assert stats.tokens_reused == self.reused
        held = {kept.snapshot for kept in (*self.model.entries, *self.model.detached)}
        assert held == self.live, "a live snapshot is held by nobody"

    def teardown(self) -> None:
        if hasattr(self, "core"):
            self.end_all_leases()
            self.clear()
            assert not self.live, "a snapshot was never released"
            assert self.core.bytes == 0


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def keep(
    core: PrefixCore,
    ids: tuple[int, ...],
    snapshot: int,
    nbytes: int = 1,
    window: int | None = None,
) -> PutResult:
    return core.put(ids, "model", SnapshotId(snapshot), nbytes, kind="final", trim_window=window)


def find(core: PrefixCore, ids: tuple[int, ...], window: int | None = None) -> Hit | None:
    return core.lookup(ids, "model", trim_window=window)


def lengths(core: PrefixCore, ids: tuple[int, ...], window: int | None = None) -> tuple[int, int]:
    """Snapshot and length of a hit whose lease is given back at once."""
    hit = find(core, ids, window)
    assert hit is not None
    core.end_lease(hit.lease)
    return hit.snapshot, hit.length


def test_a_hit_refreshes_recency() -> None:
    """The hot entry stays and the one that was not asked for goes (CACHE-10)."""
    core = PrefixCore(3)
    for number in (1, 2, 3):
        keep(core, (number, 9), number)
    assert lengths(core, (1, 9, 5)) == (1, 2)
    assert keep(core, (4, 9), 4) == PutResult(True, (SnapshotId(2),))
    assert lengths(core, (1, 9, 5)) == (1, 2)
    assert find(core, (2, 9, 5)) is None


def test_a_prefix_of_one_token_is_found() -> None:
    """One shared token is a prefix like any other (CACHE-10)."""
    core = PrefixCore(10)
    keep(core, (7,), 1)
    assert lengths(core, (7, 8)) == (1, 1)
    assert find(core, (7,)) is None


@pytest.mark.parametrize(("window", "expected"), [(None, 4), (5, 4), (4, None), (0, None)])
def test_the_whole_prompt_is_never_reused(window: int | None, expected: int | None) -> None:
    """The last token is always left to decode, so its own state must be cut by one."""
    core = PrefixCore(10)
    keep(core, (1, 2, 3, 4, 5), 1, window=window)
    hit = find(core, (1, 2, 3, 4, 5), window)
    assert (hit.length if hit else None) == expected


def test_a_longer_state_that_cannot_be_cut_yields_to_a_shorter_one() -> None:
    """A ring past its window serves only its own length; the boundary before it still serves."""
    core = PrefixCore(10)
    keep(core, (1, 2), 1, window=4)
    keep(core, (1, 2, 3, 4, 5, 6), 2, window=4)
    assert lengths(core, (1, 2, 3, 4, 9), 4) == (1, 2)
    assert lengths(core, (1, 2, 3, 4, 5, 6, 7), 4) == (2, 6)


def test_a_branch_that_nobody_ended_at_is_found() -> None:
    """The common part of two prompts serves a third, though no entry ends there."""
    core = PrefixCore(10)
    keep(core, (1, 2, 3, 4, 5), 1)
    keep(core, (1, 2, 3, 6, 7), 2)
    assert lengths(core, (1, 2, 3, 8, 8)) == (2, 3)
    assert lengths(core, (1, 2, 9)) == (2, 2)


def test_a_longer_entry_takes_the_place_of_what_it_extends() -> None:
    """A growing chat holds one state, not one for every turn."""
    core = PrefixCore(10)
    keep(core, (1, 2), 1)
    assert keep(core, (1, 2, 3), 2) == PutResult(True, (SnapshotId(1),))
    assert keep(core, (1, 2), 3) == PutResult(False, (SnapshotId(3),))
    assert len(core) == 1


def test_turns_that_cannot_be_cut_are_all_kept() -> None:
    """Recurrent states serve at their own boundary only, so a longer one replaces none."""
    core = PrefixCore(10)
    keep(core, (1, 2), 1, window=0)
    assert keep(core, (1, 2, 3), 2, window=0) == PutResult(True, ())
    assert lengths(core, (1, 2, 9), 0) == (1, 2)


def test_a_leased_state_outlives_its_entry() -> None:
    """Replaced while somebody reads it, a state counts, and is released with its lease."""
    core = PrefixCore(10)
    keep(core, (1, 2), 1, 4)
    hit = find(core, (1, 2, 3))
    assert hit is not None
    assert keep(core, (1, 2), 2, 4) == PutResult(True, ())
    assert (core.bytes, len(core)) == (8, 1)
    assert core.end_lease(hit.lease) == (SnapshotId(1),)
    assert core.bytes == 4


def test_a_leased_state_is_passed_over_and_evicted_when_its_lease_ends() -> None:
    """Leases may force the budget; the excess goes as soon as they end, the oldest first."""
    core = PrefixCore(10)
    keep(core, (1, 1), 1, 8)
    hit = find(core, (1, 1, 1))
    assert hit is not None
    assert keep(core, (2, 2), 2, 5) == PutResult(True, ())
    assert core.bytes == 13
    assert core.end_lease(hit.lease) == (SnapshotId(1),)
    assert lengths(core, (2, 2, 2)) == (2, 2)


def test_namespaces_do_not_see_each_other() -> None:
    """The same ids under another adapter are other states (CACHE-02)."""
    core = PrefixCore(10)
    core.put((1, 2), "base", SnapshotId(1), 1, kind="prompt", trim_window=None)
    assert core.lookup((1, 2, 3), "adapter", trim_window=None) is None


def test_a_budget_of_nothing_turns_the_cache_off() -> None:
    """Even a state of no bytes is refused, and handed back to be released."""
    core = PrefixCore(0)
    assert keep(core, (1, 2), 1, 0) == PutResult(False, (SnapshotId(1),))
    assert find(core, (1, 2, 3)) is None
    assert core.stats().misses == 1


def test_a_state_larger_than_the_budget_evicts_nobody() -> None:
    """It is refused before anything is given up for it."""
    core = PrefixCore(10)
    keep(core, (1, 2), 1, 10)
    assert keep(core, (1, 2, 3), 2, 11) == PutResult(False, (SnapshotId(2),))
    assert len(core) == 1


def test_the_end_of_a_lease_of_an_earlier_core_ends_no_other() -> None:
    """A restarted cache is not confused by what was under way to the one before."""
    before, after = PrefixCore(10), PrefixCore(10)
    keep(before, (1, 2), 1)
    keep(after, (1, 2), 1)
    old, new = find(before, (1, 2, 3)), find(after, (1, 2, 3))
    assert old is not None
    assert new is not None
    assert after.end_lease(old.lease) == ()
    assert after.clear() == ()
    assert after.end_lease(new.lease) == (SnapshotId(1),)


def test_misuse_is_an_error_in_words() -> None:
    """No ids, a negative size, a snapshot twice, two windows for one namespace."""
    core = PrefixCore(10)
    keep(core, (1, 2), 1)
    with pytest.raises(ValueError, match="no tokens"):
        keep(core, (), 2)
    with pytest.raises(ValueError, match="less than nothing"):
        keep(core, (1,), 2, -1)
    with pytest.raises(ValueError, match="here already"):
        keep(core, (3, 4), 1)
    with pytest.raises(ValueError, match="trim window None"):
        keep(core, (3, 4), 2, window=0)
    with pytest.raises(ValueError, match="less than nothing"):
        PrefixCore(-1)


@pytest.mark.parametrize("window", [None, 300, 0])
def test_long_prompts_are_matched_to_the_token(window: int | None) -> None:
    """Edges of hundreds of ids, as real prompts have, split and join at the right id."""
    rng = random.Random(5)
    core, model = PrefixCore(10_000), BruteForce(10_000)
    name = {None: "plain", 300: "long ring", 0: "recurrent"}[window]
    stems = [tuple(rng.choices(range(60_000), k=500)) for _ in range(4)]
    for number in range(120):
        stem = rng.choice(stems)[: rng.choice((1, 128, 129, 499, 500))]
        ids = stem + tuple(rng.choices(range(3), k=rng.randrange(4)))
        snapshot = SnapshotId(number)
        got = core.put(ids, name, snapshot, 1, kind="prompt", trim_window=window)
        assert (got.kept, set(got.release)) == model.put(Kept(ids, name, snapshot, 1))
        asked = (*rng.choice(stems)[: rng.randrange(1, 500)], 0, 1)
        hit, found = core.lookup(asked, name, trim_window=window), model.lookup(asked, name)
        assert (hit and (hit.snapshot, hit.length)) == (found and (found[0].snapshot, found[1]))
        core.check_integrity()


def test_a_state_is_not_cut_below_the_floor() -> None:
    """An encoded state of 6 tokens serves 4 of them from a floor of 4 on, and none of fewer."""
    core = PrefixCore(100)
    core.put((1, 2, 3, 4, 5, 6), "m", SnapshotId(1), 6, kind="final", trim_window=None)

    def length(*ids: int, floor: int = 4) -> int:
        hit = core.lookup(ids, "m", trim_window=None, trim_floor=floor)
        return 0 if hit is None else hit.length

    assert length(1, 2, 3, 4, 9) == 4
    assert length(1, 2, 3, 9, 9) == 0
    assert length(1, 2, 3, 9, 9, floor=0) == 3
    assert length(1, 2, 3, 9, 9, floor=7) == 3
    assert length(1, 2, 3, 4, 5, 6, 7) == 6


def session_puts(core: PrefixCore, *puts: tuple[tuple[int, ...], str | None]) -> None:
    for number, (ids, session) in enumerate(puts, 1):
        core.put(
            ids, "model", SnapshotId(number), 1, kind="final", trim_window=None, session=session
        )


def test_states_that_are_alike_go_in_order_of_use() -> None:
    """Nothing told apart by length, size or use: the least recently used goes, each time."""
    core = PrefixCore(20)
    for number in range(1, 21):
        keep(core, (number, 9, 9), number)
    for number in range(21, 41):
        assert keep(core, (number, 9, 9), number).release == (SnapshotId(number - 20),)


def test_what_many_share_stays_longer_and_not_for_ever() -> None:
    """A prompt that served eight others outlives idle ones that are newer, then fades."""
    core = PrefixCore(8)
    keep(core, (1, 2, 3), 1)
    for _ in range(8):
        assert lengths(core, (1, 2, 3, 4)) == (1, 3)
    gone: list[int] = []
    for number in range(2, 40):
        gone += keep(core, (number, 9, 9), number).release
    assert gone[0] != 1
    assert 1 in gone[3:12]


def test_what_is_cheap_to_make_again_goes_first() -> None:
    """The tail behind a prefix that others hold too is worth less than a prompt of its own."""
    core = PrefixCore(4)
    keep(core, tuple(range(100, 150)), 1)
    keep(core, (*range(50), 60), 2)
    keep(core, (*range(50), 70), 3)
    keep(core, (*range(50), 80), 4)
    assert keep(core, (5, 5), 5).release == (SnapshotId(2),)


def test_a_closed_session_goes_first_but_what_others_used_stays() -> None:
    """Closing moves nothing but the order in which states go."""
    core = PrefixCore(4)
    session_puts(core, ((1, 1), None), ((2, 2), "a"), ((3, 3), "a"), ((4, 4), "b"))
    assert lengths(core, (2, 2, 9)) == (2, 2)
    assert core.close_session("a")
    assert not core.close_session("a")
    assert len(core) == 4
    assert keep(core, (5, 5), 5).release == (SnapshotId(3),)
    assert keep(core, (6, 6), 6).release == (SnapshotId(1),)


def test_a_closed_session_that_is_asked_for_again_is_like_any_other() -> None:
    """The id is a hint: a hit brings the state back into the order of use."""
    core = PrefixCore(2)
    session_puts(core, ((1, 1), "a"), ((2, 2), None))
    core.close_session("a")
    assert lengths(core, (1, 1, 9)) == (1, 2)
    assert keep(core, (3, 3), 3).release == (SnapshotId(2),)


def test_the_next_turn_of_an_open_session_is_expected() -> None:
    """Of two states alike the one of no session goes, even if it is newer."""
    core = PrefixCore(4)
    session_puts(core, ((1, 1), "a"), ((2, 2), None), ((3, 3), None), ((4, 4), None))
    assert core.stats().sessions == 1
    assert keep(core, (5, 5), 5).release == (SnapshotId(2),)


def test_what_is_set_aside_takes_room_from_all_but_the_newest_entry() -> None:
    """Others' bytes push entries out, oldest first; a single large one may stay."""
    core = PrefixCore(10)
    for first in range(3):
        keep(core, (first, 7), first, nbytes=3)
    assert core.set_aside(5) == (SnapshotId(0), SnapshotId(1))
    assert core.stats().set_aside_bytes == 5
    keep(core, (9, 7), 9, nbytes=9)
    assert (len(core), core.bytes) == (1, 9)
    assert core.set_aside(99) == ()
    assert core.make_room(2) == (SnapshotId(9),)


def test_a_state_of_more_than_half_the_budget_goes_with_the_row_that_took_it() -> None:
    """There would be no room for both it and the row's own, longer one."""
    core = PrefixCore(10)
    keep(core, (1, 2, 3), 1, nbytes=6)
    hit = find(core, (1, 2, 3, 4))
    assert hit is not None
    assert core.end_lease(hit.lease) == ()
    hit = find(core, (1, 2, 3, 4))
    assert hit is not None
    assert core.end_lease(hit.lease, taken=True) == (SnapshotId(1),)
    assert core.stats().handed_over == 1


def test_pressure_takes_what_is_worth_least_and_no_leased_state() -> None:
    """It asks for bytes, and gets as many as are free to go."""
    core = PrefixCore(100)
    for first in range(4):
        keep(core, (first, 7), first, nbytes=3)
    hit = find(core, (0, 7, 8))
    assert hit is not None
    assert core.relieve(4) == (SnapshotId(1), SnapshotId(2))
    assert core.relieve(1000) == (SnapshotId(3),)
    assert (core.stats().pressed_out, core.stats().evictions) == (3, 3)
    core.end_lease(hit.lease)
