"""The core of the prefix cache: which kept state serves a prompt best, and which must go.

Owns the byte budget of the memory tier, the leases and the counters, and decides what is kept in
its ``Holdings``. Run by the ``KVCache`` actor's task and by nobody else; it never waits. Knows not
what a state is made of and touches no device: it names snapshots, and every call that makes some
of them useless returns those, exactly once, for the caller to release.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..plans import SnapshotId
from .entries import Entry, Hit, Kind, LeaseId, PrefixStats, PutResult, model_of
from .explain import Explanation, Gone, explain
from .holdings import Holdings
from .leases import Leases
from .tree import RadixTree
from .worth import inherit, note_use

_COUNTS = (
    *("hits", "misses", "tokens_reused", "puts", "refused"),
    *("evictions", "evicted_tokens", "handed_over", "pressed_out", "missed"),
)


class PrefixCore:
    """Entries under a byte budget; which ones go first is in ``worth.py``.

    ``trim_window`` is a property of the model, and so of the namespace: the longest state that can
    still be cut to a shorter prefix (None = any, 0 = none).

    A leased state is never released. One that is replaced, cleared or dropped meanwhile can no
    longer be found, counts in ``bytes`` as long as the lease lasts, and is released with it. Room
    is made only of states without a lease; ``bytes`` may exceed the budget by what leases hold,
    until they end.

    A part of the budget may be set aside for states that are not entries. The newest entry never
    gives way to that: it may be as large as the budget.
    """

    def __init__(self, budget_bytes: int) -> None:
        """``budget_bytes`` 0 turns the cache off: lookups miss and puts are refused."""
        if budget_bytes < 0:
            raise ValueError(f"a budget of {budget_bytes} bytes is less than nothing")
        self._budget = budget_bytes
        self._aside = 0
        self._held = Holdings()
        self._leases = Leases()
        self._gone = Gone()
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        """Entries that a lookup can find."""
        return len(self._held)

    @property
    def bytes(self) -> int:
        """Bytes of all states not yet released, found or only leased."""
        return self._held.bytes

    @property
    def leases(self) -> int:
        """Leases not yet ended."""
        return len(self._leases)

    def lookup(
        self,
        ids: Sequence[int],
        namespace: str,
        *,
        trim_window: int | None,
        trim_floor: int = 0,
        session: str | None = None,
    ) -> Hit | None:
        """The longest usable prefix of ``ids``, leased until :meth:`end_lease`.

        Usable is at most ``len(ids) - 1`` tokens: the last one is the input of the first decode.
        A state that is longer than what it shares with ``ids`` is used only if it can be cut. One
        of ``trim_floor`` tokens or more is not cut to fewer, which counts as a miss.

        Raises:
            ValueError: another ``trim_window`` than the namespace's entries were put with.
        """
        found = self._find(ids, namespace, trim_window, trim_floor)
        if found is None:
            self._counts["misses"] += 1
            return None
        entry, length = found
        self._held.touch(entry)
        note_use(entry, session)
        self._counts["hits"] += 1
        self._counts["tokens_reused"] += length
        return Hit(entry.snapshot, length, self._leases.lend(entry))

    def peek(
        self,
        ids: Sequence[int],
        namespace: str,
        *,
        trim_window: int | None,
        trim_floor: int = 0,
    ) -> int:
        """How many tokens :meth:`lookup` would find; leases, counts and moves nothing."""
        found = self._find(ids, namespace, trim_window, trim_floor)
        return 0 if found is None else found[1]

    def explain(
        self,
        ids: Sequence[int],
        namespace: str,
        *,
        trim_window: int | None,
        trim_floor: int = 0,
        session: str | None = None,
    ) -> Explanation:
        """How far ``ids`` are served now, and why no further; changes nothing."""
        usable = self.peek(ids, namespace, trim_window=trim_window, trim_floor=trim_floor)
        model = model_of(namespace)
        others = [n for n in self._held.namespaces if n != namespace and model_of(n) == model]
        uncut = self.peek(ids, namespace, trim_window=trim_window)
        return explain(
            ids,
            usable,
            own=self._held.nearest(ids, namespace),
            others=[near for n in others if (near := self._held.nearest(ids, n)) is not None],
            gone=tuple(self._gone.nearest(ids, namespace)),
            encoded=uncut > usable,
            session=session,
        )

    def put(
        self,
        ids: Sequence[int],
        namespace: str,
        snapshot: SnapshotId,
        nbytes: int,
        *,
        kind: Kind,
        trim_window: int | None,
        session: str | None = None,
    ) -> PutResult:
        """Keep the state of exactly ``ids``; says what must be released in exchange.

        An entry with the same ids is replaced. If the new state can be cut, the entries that it
        extends are given up, for it serves all that they did; if an entry that can be cut extends
        the new state, the new state is refused. So is one that is larger than the budget.

        Raises:
            ValueError: no ids, a negative size, a snapshot that the core already has, or another
                ``trim_window`` than the namespace's entries were put with.
        """
        self._check_put(ids, snapshot, nbytes)
        tree = self._held.tree(namespace, trim_window)
        if nbytes > self._budget or self._budget == 0:
            return self._refuse(snapshot)
        if tree is None:
            tree = RadixTree(trim_window)
        same = tree.exact(ids)
        if same is None and (cover := tree.covering(ids)) is not None:
            self._held.touch(cover)
            return self._refuse(snapshot)
        entry = Entry(snapshot, namespace, len(ids), nbytes, kind, tree.can_cut(len(ids)))
        entry.session = session
        replaced = tree.prefixes(ids) if entry.cuttable else ()
        if same is not None:
            replaced = (same, *replaced)
        inherit(entry, replaced)
        release = self._held.detach(replaced)
        self._held.add(tree, ids, entry)
        self._counts["puts"] += 1
        return PutResult(True, release + self._make_room(keep=entry))

    def end_lease(self, lease: LeaseId, *, taken: bool = False) -> tuple[SnapshotId, ...]:
        """Give a lease back; returns what became releasable.

        ``taken``: a row runs that goes on from the state. One of more than half the budget is then
        given up, since the row's own, which is going to be offered, has no room beside it.
        A lease that is not (or no longer) known here is ignored: its core was restarted.
        """
        entry = self._leases.end(lease)
        if entry is None:
            return ()
        if released := self._held.release(entry):
            return released
        if taken and 2 * entry.nbytes > self._budget:
            self._counts["handed_over"] += 1
            return self._held.detach((entry,))
        return self._make_room()

    def end_all_leases(self) -> tuple[SnapshotId, ...]:
        """Give back every lease, when whoever held them is gone."""
        return tuple(snapshot for lease in self._leases.all() for snapshot in self.end_lease(lease))

    def set_aside(self, nbytes: int) -> tuple[SnapshotId, ...]:
        """Leave so much of the budget to others; says what gives way to them."""
        self._aside = min(nbytes, self._budget)
        return self._make_room()

    def make_room(self, nbytes: int, *, missed: bool = False) -> tuple[SnapshotId, ...]:
        """Have so much free, for a state about to be made, or like one that there was none for."""
        self._counts["missed"] += missed
        return self._evict(self._budget - max(nbytes, self._aside))

    def relieve(self, nbytes: int) -> tuple[SnapshotId, ...]:
        """Give up entries of so many bytes, if there are such without a lease."""
        before = self._counts["evictions"]
        release = self._evict(self._held.bytes - nbytes)
        self._counts["pressed_out"] += self._counts["evictions"] - before
        return release

    def close_session(self, session: str) -> bool:
        """Nobody goes on with this chat: what only it used goes first. False if it is not known."""
        return self._held.close_session(session)

    def clear(self) -> tuple[SnapshotId, ...]:
        """Forget all entries; leased states follow when their lease ends."""
        return self._held.detach(self._held.entries)

    def drop(self, snapshot: SnapshotId) -> tuple[SnapshotId, ...]:
        """Forget one entry; as with :meth:`clear`. An unknown snapshot is ignored."""
        entry = self._held.entry(snapshot)
        return () if entry is None else self._held.detach((entry,))

    def snapshots(self) -> tuple[SnapshotId, ...]:
        """Every state not yet released, leased ones included."""
        return tuple(entry.snapshot for entry in (*self._held.entries, *self._held.detached))

    def stats(self) -> PrefixStats:
        """Live figures and counters; cheap enough for every scrape."""
        return PrefixStats(
            entries=len(self),
            prompt_entries=self._held.kinds["prompt"],
            final_entries=self._held.kinds["final"],
            partial_entries=self._held.kinds["partial"],
            bytes=self._held.bytes,
            budget_bytes=self._budget,
            detached_bytes=sum(entry.nbytes for entry in self._held.detached),
            leases=len(self._leases),
            sessions=len(self._held.sessions),
            set_aside_bytes=self._aside,
            **{name: self._counts[name] for name in _COUNTS},
        )

    def _find(
        self, ids: Sequence[int], namespace: str, trim_window: int | None, trim_floor: int
    ) -> tuple[Entry, int] | None:
        tree = self._held.tree(namespace, trim_window)
        found = tree.longest(ids[:-1]) if tree is not None else None
        if found is None or found[1] < trim_floor <= found[0].length:
            return None
        return found

    def _check_put(self, ids: Sequence[int], snapshot: SnapshotId, nbytes: int) -> None:
        if not ids:
            raise ValueError("a state of no tokens serves nobody")
        if nbytes < 0:
            raise ValueError(f"a state of {nbytes} bytes is less than nothing")
        if snapshot in self._held:
            raise ValueError(f"snapshot {snapshot} is here already")

    def _refuse(self, snapshot: SnapshotId) -> PutResult:
        self._counts["refused"] += 1
        return PutResult(False, (snapshot,))

    def _make_room(self, keep: Entry | None = None) -> tuple[SnapshotId, ...]:
        """Evict until the budget holds, and what is set aside of it as far as may be."""
        release = self._evict(self._budget, keep)
        return release + self._evict(self._budget - self._aside, keep or self._held.newest)

    def _evict(self, limit: int, keep: Entry | None = None) -> tuple[SnapshotId, ...]:
        """Evict until all take ``limit`` at most; passes over leased entries and ``keep``."""
        release: tuple[SnapshotId, ...] = ()
        while self._held.bytes > limit:
            victim = self._held.next_victim(keep)
            if victim is None:
                break
            self._counts["evictions"] += 1
            self._gone.add(victim.namespace, self._held.ids_of(victim), victim.session)
            self._counts["evicted_tokens"] += self._held.lost_without(victim)
            release += self._held.detach((victim,))
        return release

    def check_integrity(self) -> None:
        """Raise AssertionError, in words, where the books do not agree. For tests; walks all."""
        self._held.check_integrity()
        held = (*self._held.entries, *self._held.detached)
        self._leases.check_integrity(held)
        loose = [entry for entry in held if entry.leases == 0]
        within = self._held.bytes <= self._budget
        assert within or len(loose) <= 1, "over budget by more than leases and the newest state"
