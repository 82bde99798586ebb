"""Which files a store has, who continues whom, what they weigh and which goes first.

Owns the tables and the prefix index. Pure: no file is touched here and nothing waits; ``store.py``
calls it under its lock. Every method that gives files up returns their names, and the caller
removes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .header import Header
from .index import FileKey, Neighbours, SpillHit, SpillIndex
from .slots import SUFFIX, Slot, file_name


class Books:
    """Entries, dead files (of other versions, damaged, unreadable) and room spoken for."""

    def __init__(self) -> None:
        self._slots: dict[FileKey, Slot] = {}
        self._dead: dict[str, int] = {}
        self._reserved = 0
        self._bytes = 0
        self._latest_ns = 0
        self._index = SpillIndex()

    def __len__(self) -> int:
        """Entries that can be found."""
        return len(self._index)

    def __contains__(self, key: FileKey) -> bool:
        return key in self._slots

    @property
    def bytes(self) -> int:
        """Bytes of all files, dead ones and those being written included."""
        return self._bytes + self._reserved

    @property
    def dead(self) -> int:
        """How many files of ours serve nobody."""
        return len(self._dead)

    @property
    def longest(self) -> int:
        """Tokens of the longest entry."""
        return self._index.longest

    def names(self) -> set[str]:
        """All files."""
        return {*map(file_name, self._slots), *self._dead}

    def knows(self, name: str) -> bool:
        """Whether a file is accounted for."""
        return name in self._dead or name.removesuffix(SUFFIX) in self._slots

    def is_dead(self, name: str) -> bool:
        """Whether a file is known to serve nobody."""
        return name in self._dead

    def lookup(self, ids: Sequence[int], namespace: str, trim_floor: int) -> SpillHit | None:
        """As :meth:`SpillIndex.lookup`."""
        return self._index.lookup(ids, namespace, trim_floor)

    def nearest(self, ids: Sequence[int], namespace: str, setup: str) -> Neighbours:
        """As :meth:`SpillIndex.nearest`."""
        return self._index.nearest(ids, namespace, setup)

    def count(self, setup: str) -> int:
        """As :meth:`SpillIndex.count`."""
        return self._index.count(setup)

    def prefixes(self, ids: Sequence[int], namespace: str) -> tuple[FileKey, ...]:
        """As :meth:`SpillIndex.prefixes`."""
        return self._index.prefixes(ids, namespace)

    def add(self, key: FileKey, header: Header, parent: FileKey | None, used_ns: int) -> bool:
        """Enter a file; False if its parent is not here or is another one than it was written for.

        One that is here already is left as it is; if it was dropped it can be found again, and if
        another chat has the same it is nobody's: closing one must not take it from the other.
        """
        if (slot := self._slots.get(key)) is not None:
            if slot.session != (header.session or None):
                slot.session = None
            if slot.unwanted:
                slot.unwanted = False
                self._file(slot, header)
            return True
        if parent is not None:
            above = self._slots.get(parent)
            if above is None or (above.digest, above.length) != (header.parent, header.first):
                return False
            above.children += 1
        slot = Slot(key, header.digest, header.first, header.length, header.size, parent, used_ns)
        slot.session, slot.created = header.session or None, header.created
        self._slots[key] = slot
        self._bytes += slot.size - self._dead.pop(file_name(key), 0)
        self._latest_ns = max(self._latest_ns, used_ns)
        self._file(slot, header)
        return True

    def add_dead(self, name: str, size: int) -> None:
        """Enter a file of ours that serves nobody; it is the first to go."""
        self._bytes += size - self._dead.pop(name, 0)
        self._dead[name] = size

    def touch(self, key: FileKey, now_ns: int) -> int:
        """Note a use; returns the time to be noted on the file."""
        self._latest_ns = max(now_ns, self._latest_ns + 1)
        if (slot := self._slots.get(key)) is not None:
            slot.used_ns = self._latest_ns
            self._index.touch(key)
        return self._latest_ns

    def close_session(self, session: str) -> tuple[FileKey, ...]:
        """Nobody goes on with this chat: its files, which are returned, are the first to go."""
        closed = [slot for slot in self._slots.values() if slot.session == session]
        for slot in closed:
            slot.session, slot.used_ns = None, 0
        return tuple(slot.key for slot in closed)

    def is_wanted(self, key: FileKey) -> bool:
        """Whether an entry was used since its chat was closed, if that was."""
        slot = self._slots.get(key)
        return slot is None or slot.used_ns > 0

    def written_since(self, created: float) -> tuple[tuple[float, int], ...]:
        """When each file since then was written, and its bytes."""
        slots = self._slots.values()
        return tuple((slot.created, slot.size) for slot in slots if slot.created > created)

    def chain(self, key: FileKey, upto: int | None = None) -> tuple[Slot, ...]:
        """The files that an entry's state is joined from, the whole one first.

        Those behind the first one that holds ``upto`` tokens are left out. Empty if there is no
        such entry.
        """
        files: list[Slot] = []
        slot = self._slots.get(key)
        while slot is not None:
            if upto is not None and slot.length >= upto:
                files.clear()
            files.append(slot)
            slot = None if slot.parent is None else self._slots[slot.parent]
        return tuple(reversed(files))

    def forget(self, key: FileKey) -> tuple[str, ...]:
        """An entry's file is no longer what it was: it goes, with all that continue it.

        Returns the names of those others alone, and of dropped ones that it was the last to need.
        """
        if key not in self._slots:
            return ()
        gone: list[str] = []
        doomed = [key]
        for above in doomed:
            doomed += [slot.key for slot in self._slots.values() if slot.parent == above]
        for each in reversed(doomed):
            gone += self._take(each)
        return tuple(name for name in gone if name != file_name(key))

    def forget_names(self, names: Iterable[str]) -> tuple[str, ...]:
        """These files are gone; returns the names of others that are of no use without them."""
        gone: list[str] = []
        for name in names:
            self._bytes -= self._dead.pop(name, 0)
            gone += self.forget(FileKey(name.removesuffix(SUFFIX)))
        return tuple(gone)

    def bury(self, key: FileKey) -> None:
        """An entry's file cannot be read now, so neither it nor what continues it can be found."""
        sizes = {slot.key: slot.size for slot in self._slots.values()}
        for name in self.forget(key):
            self.add_dead(name, sizes[FileKey(name.removesuffix(SUFFIX))])

    def clear(self) -> None:
        """All files are gone."""
        for key in tuple(self._slots):
            self._take(key)
        self._dead.clear()
        self._bytes = 0

    def order(self, keys: Iterable[FileKey]) -> None:
        """Note that entries were used in this order, before whatever is used next."""
        for key in keys:
            self._index.touch(key)

    def drop(self, key: FileKey) -> tuple[str, ...]:
        """Give an entry up; it stays on disk, not to be found, as long as others continue it."""
        slot = self._slots.get(key)
        if slot is None:
            return ()
        if not slot.children and not slot.pins:
            return self._take(key)
        slot.unwanted = True
        self._index.remove(key)
        return ()

    def make_room(self, size: int, max_bytes: int) -> tuple[str, ...]:
        """Give files up, dead ones first, then the oldest, until ``size`` more bytes fit.

        What a load or save needs, and what that continues, stays: where the rest would not be
        enough, nothing is given up.
        """
        excess = self.bytes + size - max_bytes
        gone: list[str] = []
        if excess > self._bytes - self._needed():
            return ()
        while excess > 0 and self._dead:
            name = next(iter(self._dead))
            excess -= self._dead[name]
            self._bytes -= self._dead.pop(name)
            gone.append(name)
        while excess > 0:
            ends = [s for s in self._slots.values() if not s.children and not s.pins]
            if not ends:
                break
            for slot in sorted(ends, key=lambda slot: (slot.used_ns, slot.key)):
                if excess <= 0:
                    break
                before = self._bytes
                gone += self._take(slot.key)
                excess -= before - self._bytes
        return tuple(gone)

    def _needed(self) -> int:
        """Bytes of the entries that loads and saves under way need, and of those they continue."""
        needed: set[FileKey] = set()
        for slot in self._slots.values():
            key: FileKey | None = slot.key if slot.pins else None
            while key is not None and key not in needed:
                needed.add(key)
                key = self._slots[key].parent
        return sum(self._slots[key].size for key in needed)

    def reserve(self, size: int) -> None:
        """Count bytes that are about to be written; negative once they are, or never will be."""
        self._reserved += size

    def unpin(self, slots: Sequence[Slot]) -> tuple[str, ...]:
        """A load or save no longer needs these; returns what nobody needs any more."""
        gone: list[str] = []
        for slot in reversed(slots):
            slot.pins -= 1
            is_here = self._slots.get(slot.key) is slot
            if is_here and slot.unwanted and not slot.children and not slot.pins:
                gone += self._take(slot.key)
        return tuple(gone)

    def _file(self, slot: Slot, header: Header) -> None:
        self._index.add(
            slot.key,
            header.namespace,
            header.ids,
            slot.size,
            setup=header.setup,
            kind=header.kind,
            cuttable=header.cuttable,
        )

    def _take(self, key: FileKey) -> tuple[str, ...]:
        """Take an entry out, and dropped ones that it was the last to continue."""
        gone: list[str] = []
        at: FileKey | None = key
        while at is not None and (slot := self._slots.pop(at, None)) is not None:
            self._bytes -= slot.size
            self._index.remove(at)
            gone.append(file_name(at))
            at = None
            if slot.parent is not None and (above := self._slots.get(slot.parent)) is not None:
                above.children -= 1
                above.used_ns = max(above.used_ns, slot.used_ns)  # it was of use as long
                if above.unwanted and not above.children and not above.pins:
                    at = above.key
        return tuple(gone)

    def check_integrity(self) -> None:
        """Raise AssertionError, in words, where the books do not agree. For tests; walks all."""
        self._index.check_integrity()
        sizes = sum(slot.size for slot in self._slots.values()) + sum(self._dead.values())
        assert self._bytes == sizes, "bytes are not the sum of the files"
        children = dict.fromkeys(self._slots, 0)
        for slot in self._slots.values():
            assert (slot.key in self._index) != slot.unwanted, "a dropped entry can be found"
            if slot.parent is not None:
                assert slot.parent in self._slots, "an entry continues one that is gone"
                assert self._slots[slot.parent].length == slot.first, "a gap between two entries"
                children[slot.parent] += 1
        for slot in self._slots.values():
            assert slot.children == children[slot.key], "an entry miscounts its children"
            assert slot.children or slot.pins or not slot.unwanted, "a dropped entry was left"
