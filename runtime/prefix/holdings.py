"""The states that the prefix cache keeps: filed by prefix, in the order of their use, and counted.

Part of ``index.py``'s core, on its task, and changed by nobody else. Owns the trees of all
namespaces and every entry until its release; says which entry is worth least. Knows no budget and
decides nothing: what is added, and how many must go, is said by the core.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import count

from ..plans import SnapshotId
from .entries import Entry, Kind
from .explain import AROUND, Nearest
from .tree import RadixTree
from .worth import choose, num_weighed


class Holdings:
    """Entries that a lookup can find, and detached ones: found no more, but still leased."""

    def __init__(self) -> None:
        self.bytes = 0
        self.kinds: Counter[Kind] = Counter()
        self.sessions: Counter[str] = Counter()
        self._trees: dict[str, RadixTree] = {}
        self._by_use: OrderedDict[SnapshotId, Entry] = OrderedDict()
        self._detached: dict[SnapshotId, Entry] = {}
        self._closed: dict[SnapshotId, Entry] = {}
        self._clock = count(1)

    def __len__(self) -> int:
        """Entries that a lookup can find."""
        return len(self._by_use)

    def __contains__(self, snapshot: SnapshotId) -> bool:
        """Whether the state is here, found or detached."""
        return snapshot in self._by_use or snapshot in self._detached

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Those that a lookup can find, the least recently used first."""
        return tuple(self._by_use.values())

    @property
    def detached(self) -> tuple[Entry, ...]:
        """Those that only a lease holds."""
        return tuple(self._detached.values())

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Those that an entry is in."""
        return tuple(self._trees)

    @property
    def newest(self) -> Entry | None:
        """The entry used last."""
        return next(reversed(self._by_use.values()), None)

    def entry(self, snapshot: SnapshotId) -> Entry | None:
        """The entry of a state, if a lookup can find it."""
        return self._by_use.get(snapshot)

    def tree(self, namespace: str, trim_window: int | None) -> RadixTree | None:
        """The entries of a namespace, by prefix. Raises ValueError for another ``trim_window``."""
        tree = self._trees.get(namespace)
        if tree is not None and tree.trim_window != trim_window:
            raise ValueError(
                f"namespace {namespace!r} has the trim window {tree.trim_window},"
                f" not {trim_window}: two models cannot share it"
            )
        return tree

    def nearest(self, ids: Sequence[int], namespace: str) -> Nearest | None:
        """The entry that shares most of ``ids``, usable or not."""
        tree = self._trees.get(namespace)
        if tree is None or (found := tree.nearest(ids)) is None:
            return None
        entry, shared = found
        rest = self.ids_of(entry)[shared : shared + AROUND]
        return Nearest(shared, rest, entry.session)

    def ids_of(self, entry: Entry) -> tuple[int, ...]:
        """The tokens of an entry's state."""
        return self._trees[entry.namespace].ids_of(entry)

    def lost_without(self, entry: Entry) -> int:
        """Tokens that no other entry could serve."""
        return self._trees[entry.namespace].lost_without(entry)

    def add(self, tree: RadixTree, ids: Sequence[int], entry: Entry) -> None:
        """File an entry as the newest in the tree of its namespace, which may be a new one."""
        # What was detached meanwhile may have emptied a tree that was here, and so removed it.
        self._trees[entry.namespace] = tree
        entry.used = next(self._clock)
        tree.insert(ids, entry)
        self._by_use[entry.snapshot] = entry
        self._count(entry, 1)
        self.bytes += entry.nbytes

    def touch(self, entry: Entry) -> None:
        """The entry is the one used last."""
        entry.used = next(self._clock)
        self._closed.pop(entry.snapshot, None)
        self._by_use.move_to_end(entry.snapshot)
        self._trees[entry.namespace].touch(entry)

    def close_session(self, session: str) -> bool:
        """What only this chat used goes first from now on. False for a chat without an entry."""
        if self.sessions.pop(session, 0) == 0:
            return False
        for entry in self._by_use.values():
            if entry.session == session:
                entry.session = None
                if not entry.shared:
                    self._closed[entry.snapshot] = entry
        return True

    def next_victim(self, keep: Entry | None) -> Entry | None:
        """The entry to give up next: without a lease, and not ``keep``."""
        weighed = num_weighed(len(self._by_use))
        for entries, most in ((self._closed, 1), (self._by_use, weighed)):
            free = (e for e in entries.values() if e.leases == 0 and e is not keep)
            if (victim := choose(free, most, self.lost_without)) is not None:
                return victim
        return None

    def detach(self, entries: Iterable[Entry]) -> tuple[SnapshotId, ...]:
        """Take entries out of the index; those that nobody leases are released at once."""
        free: list[SnapshotId] = []
        for entry in entries:
            tree = self._trees[entry.namespace]
            tree.remove(entry)
            if not len(tree):
                del self._trees[entry.namespace]
            del self._by_use[entry.snapshot]
            self._closed.pop(entry.snapshot, None)
            self._count(entry, -1)
            self._detached[entry.snapshot] = entry
            if entry.leases == 0:
                free += self.release(entry)
        return tuple(free)

    def release(self, entry: Entry) -> tuple[SnapshotId, ...]:
        """The last lease has ended: a detached entry is forgotten; any other stays as it is."""
        if self._detached.pop(entry.snapshot, None) is None:
            return ()
        self.bytes -= entry.nbytes
        return (entry.snapshot,)

    def _count(self, entry: Entry, by: int) -> None:
        self.kinds[entry.kind] += by
        if entry.session is not None:
            self.sessions[entry.session] += by
            if not self.sessions[entry.session]:
                del self.sessions[entry.session]

    def check_integrity(self) -> None:
        """Raise AssertionError, in words, where the books do not agree. For tests; walks all."""
        for namespace, tree in self._trees.items():
            assert len(tree), f"the empty tree of {namespace!r} was left behind"
            tree.check_integrity()
        filed = sum(len(tree) for tree in self._trees.values())
        assert filed == len(self._by_use), "the trees and the order of use differ in number"
        ages = [entry.used for entry in self._by_use.values()]
        assert ages == sorted(set(ages)), "the order of use is not by use"
        assert all(self._by_use.get(s) is e for s, e in self._closed.items()), "closed and gone"
        for snapshot, entry in self._by_use.items():
            assert entry.snapshot == snapshot, "an entry is filed under another snapshot"
            assert entry in self._trees[entry.namespace], "an entry is in no tree"
        for entry in self._detached.values():
            assert entry.leases, "a state that nobody can find or leases was not released"
        self._check_counts()

    def _check_counts(self) -> None:
        entries = self._by_use.values()
        assert self.kinds == Counter(e.kind for e in entries), "kinds are miscounted"
        sessions = Counter(e.session for e in entries if e.session is not None)
        assert self.sessions == sessions, "sessions are miscounted"
        held = (*entries, *self._detached.values())
        assert self.bytes == sum(entry.nbytes for entry in held), "bytes are not their sum"
