"""Which saved entry serves a prompt best: the prefix trees of all namespaces on disk.

Owns the trees. Pure and fast; ``books.py`` calls it under the store's lock. Other than the memory
tier it files an entry beside a longer one that could serve the same: they are files that lie there
anyway, and the shorter one is sooner read.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple, NewType

from ..plans import SnapshotId
from ..prefix.entries import Entry, Kind
from ..prefix.tree import RadixTree

FileKey = NewType("FileKey", str)
"""The name of an entry: made of its namespace and its token ids alone."""


@dataclass(frozen=True, slots=True)
class SpillHit:
    """The first ``length`` tokens of ``key`` may be used, a state of ``state_length`` tokens."""

    key: FileKey
    length: int
    state_length: int


@dataclass(frozen=True, slots=True)
class Near:
    """An entry of ``length`` tokens, the first ``shared`` of which are those of a prompt."""

    shared: int
    length: int


class Neighbours(NamedTuple):
    """What shares most of a prompt, usable or not: of its own namespace, of the same setup under
    other adapters, and of all other setups."""

    own: Near | None = None
    adapters: Near | None = None
    setups: Near | None = None


class SpillIndex:
    """Entries by namespace digest and ids; at most one for the same of both."""

    def __init__(self) -> None:
        self._trees: dict[str, RadixTree] = {}
        # Of each namespace: what it is one of, whatever the adapters.
        self._setups: dict[str, str] = {}
        self._entries: dict[FileKey, Entry] = {}
        self._keys: dict[Entry, FileKey] = {}
        self._clock = count(1)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: FileKey) -> bool:
        return key in self._entries

    @property
    def longest(self) -> int:
        """Tokens of the longest state."""
        return max((entry.length for entry in self._entries.values()), default=0)

    def count(self, setup: str) -> int:
        """Entries of one setup."""
        return sum(len(self._trees[n]) for n in self._trees if self._setups[n] == setup)

    def add(
        self,
        key: FileKey,
        namespace: str,
        ids: bytes,
        size: int,
        *,
        setup: str,
        kind: Kind,
        cuttable: bool,
    ) -> None:
        """File an entry as the most recently used; ``ids`` packed in four bytes each.

        One that does not say its ``setup`` (an older version wrote it) is taken for one without
        adapters, whose namespace is its setup.
        """
        if setup:
            self._setups[namespace] = setup
        else:
            self._setups.setdefault(namespace, namespace)
        packed = array("I", ids)
        snapshot = SnapshotId(next(self._clock))
        entry = Entry(snapshot, namespace, len(packed), size, kind, cuttable, used=snapshot)
        self._trees.setdefault(namespace, RadixTree(None)).insert(packed, entry)
        self._entries[key] = entry
        self._keys[entry] = key

    def remove(self, key: FileKey) -> None:
        """Take an entry out; an unknown one is ignored."""
        if (entry := self._entries.pop(key, None)) is None:
            return
        del self._keys[entry]
        tree = self._trees[entry.namespace]
        tree.remove(entry)
        if not len(tree):
            del self._trees[entry.namespace], self._setups[entry.namespace]

    def touch(self, key: FileKey) -> None:
        """Note that an entry is now the most recently used; an unknown one is ignored."""
        if (entry := self._entries.get(key)) is not None:
            entry.used = next(self._clock)
            self._trees[entry.namespace].touch(entry)

    def lookup(self, ids: Sequence[int], namespace: str, trim_floor: int = 0) -> SpillHit | None:
        """The longest usable prefix of ``ids``, at most all but the last of them.

        A state of ``trim_floor`` tokens or more is not cut to fewer.
        """
        tree = self._trees.get(namespace)
        found = tree.longest(ids[:-1]) if tree is not None else None
        if found is None or found[1] < trim_floor <= found[0].length:
            return None
        entry, length = found
        return SpillHit(self._keys[entry], length, entry.length)

    def nearest(self, ids: Sequence[int], namespace: str, setup: str) -> Neighbours:
        """What shares most of ``ids``, usable or not."""
        near: dict[str, Near] = {}
        for name in self._trees:
            kin = "adapters" if self._setups[name] == setup else "setups"
            kin = "own" if name == namespace else kin
            found = self._near(ids, name)
            if found is not None and (kin not in near or found.shared > near[kin].shared):
                near[kin] = found
        return Neighbours(**near)

    def _near(self, ids: Sequence[int], namespace: str) -> Near | None:
        tree = self._trees.get(namespace)
        found = tree.nearest(ids) if tree is not None else None
        return None if found is None else Near(found[1], found[0].length)

    def prefixes(self, ids: Sequence[int], namespace: str) -> tuple[FileKey, ...]:
        """Entries whose ids are a proper prefix of ``ids``, the longest first."""
        tree = self._trees.get(namespace)
        return () if tree is None else tuple(self._keys[entry] for entry in tree.prefixes(ids))

    def check_integrity(self) -> None:
        """Raise AssertionError, in words, where the trees and the lists disagree. For tests."""
        assert sum(map(len, self._trees.values())) == len(self._entries), "an entry is in no tree"
        for key, entry in self._entries.items():
            assert self._keys[entry] == key, "an entry is filed under another name"
            assert entry in self._trees[entry.namespace], "an entry is in another tree"
        for tree in self._trees.values():
            assert len(tree), "an empty tree was left behind"
            tree.check_links()
