"""The folder and the books kept in step: what is found, what fails to be read, what must go.

Owns the lock, the books and the counters of a store. The lock is never held while the disk works;
so a file may go, or come, between a look at the books and one at the folder, and every method here
is right whichever way that falls.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from .books import Books
from .crowded import CrowdedOut
from .faults import (
    Absent,
    Corrupt,
    FolderGone,
    ForeignVersion,
    NoMemory,
    SpillFault,
    TooLarge,
    Unfit,
    Unreadable,
)
from .folder import SpillFolder, make_key
from .header import Header
from .index import FileKey
from .slots import SUFFIX, Slot, file_name

log = logging.getLogger(__name__)


class Shelf:
    """One folder's entries; a method may be called on any thread."""

    def __init__(
        self, folder: SpillFolder, max_bytes: int | None, clock: Callable[[], float]
    ) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self.lock = threading.Lock()
        self.books = Books()
        self.crowded = CrowdedOut()
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self._told: set[str] = set()
        self._clock = clock

    def sync(self) -> None:
        """Learn what others added to the folder and took away. Raises FolderGone."""
        with self.lock:
            known = self.books.names()
        try:
            names = self.folder.names()
        except FolderGone:
            self._lose_all()
            raise
        there = set(names)
        with self.lock:
            orphans = self.books.forget_names(known - there)
            if known - there:
                # Somebody else made room.
                self.crowded.forget()
            new = [name for name in names if not self.books.knows(name)]
        self._remove_orphans(orphans)
        self._admit(new)

    def enter(self, key: FileKey, header: Header, used_ns: int) -> bool:
        """Enter a file; False if what it continues is not here, or not the same any more."""
        parent = make_key(header.namespace, header.ids[: 4 * header.first])
        with self.lock:
            return self.books.add(key, header, parent if header.first else None, used_ns)

    def reject(self, key: FileKey, size: int, fault: SpillFault) -> None:
        """A file cannot be read: it is forgotten, so that it is met with once only."""
        match fault:
            case Corrupt():
                new = self.folder.set_aside(file_name(key))
                self.count("quarantined", int(new is not None))
                self.forget(key)
                self._bury(new or file_name(key), size)
            case Absent():
                self.forget(key)
            case Unfit():
                self.forget(key)
                self._remove_orphans((file_name(key),))
            case ForeignVersion() | Unreadable():
                with self.lock:
                    self.books.bury(key)
                self._bury(file_name(key), size)
            case FolderGone():
                self._lose_all()

    def forget(self, key: FileKey) -> None:
        """An entry's file is not the one in the books; what continues it is of no use any more."""
        with self.lock:
            orphans = self.books.forget(key)
        self._remove_orphans(orphans)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files. Raises SpillFault at the first that cannot be removed."""
        for name in names:
            self.folder.remove(name)

    @contextmanager
    def room(self, size: int) -> Iterator[None]:
        """Room for ``size`` more bytes under the cap, spoken for meanwhile. Raises SpillFault.

        Who has to go for it is noted as crowded out.
        """
        with self.lock:
            names: tuple[str, ...] = ()
            if self.max_bytes is not None and size <= self.max_bytes:
                names = self.books.make_room(size, self.max_bytes)
            fits = self.max_bytes is None or self.books.bytes + size <= self.max_bytes
            self.books.reserve(size)
        try:
            self.evict(names)
            if not fits:
                raise TooLarge(f"no room for {size} bytes under a cap of {self.max_bytes}")
            yield
        finally:
            with self.lock:
                self.books.reserve(-size)

    def evict(self, names: tuple[str, ...]) -> None:
        """Remove files that were given up for room. Raises SpillFault, as :meth:`remove`."""
        with self.lock:
            keys = [FileKey(n.removesuffix(SUFFIX)) for n in names if n.endswith(SUFFIX)]
            self.crowded.note(keys, "made_way")
        self.remove(names)
        self.count("evictions", len(names))

    def touch(self, key: FileKey) -> None:
        """Note a use, on the file too."""
        with self.lock:
            used_ns = self.books.touch(key, int(self._clock() * 1e9))
        self.folder.touch(file_name(key), used_ns)

    def note_unwanted(self, key: FileKey) -> None:
        """Note on a file that nobody wants it, unless it was used again.

        Its time is that: what a file says is never changed, for others name it by its digest.
        """
        with self.lock:
            is_wanted = self.books.is_wanted(key)
        if not is_wanted:
            self.folder.touch(file_name(key), 0)

    def count(self, name: str, number: int = 1) -> None:
        """Add to a counter."""
        with self.lock:
            self.counts[name] += number

    def count_fault(self, fault: SpillFault, where: str = "") -> None:
        """Count one that nobody else hears of, and tell of the first of its kind."""
        with self.lock:
            self.faults[fault.code] += 1
            self.counts["unheard"] += 1
            is_new = fault.code not in self._told
            self._told.add(fault.code)
        if is_new:
            log.warning("SSD cache: %s%s", where, fault)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the fault that ends the block."""
        try:
            try:
                yield
            except MemoryError as error:
                raise NoMemory("no memory for a state") from error
        except SpillFault as fault:
            with self.lock:
                self.faults[fault.code] += 1
            raise

    @contextmanager
    def pinned(self, key: FileKey | None, upto: int | None = None) -> Iterator[tuple[Slot, ...]]:
        """The files of an entry, not to be evicted meanwhile."""
        with self.lock:
            chain = () if key is None else self.books.chain(key, upto)
            for slot in chain:
                slot.pins += 1
        try:
            yield chain
        finally:
            with self.lock:
                names = self.books.unpin(chain)
            with suppress(SpillFault):
                self.remove(names)

    def _admit(self, names: Iterable[str]) -> None:
        """Enter files that somebody else wrote, parents before what continues them."""
        found: list[tuple[int, FileKey, Header]] = []
        for name in names:
            if (looked := self.folder.look(name)) is None:
                continue
            size, used_ns = looked
            key = FileKey(name.removesuffix(SUFFIX))
            if name == key:  # one that was set aside
                self._bury(name, size)
                continue
            try:
                header = self.folder.header(key)
                # As note_unwanted left it.
                header = header if used_ns else replace(header, session="")
                found.append((used_ns, key, header))
            except Absent:
                continue
            except SpillFault as fault:
                self.count_fault(fault, f"{name} is of no use: ")
                self.reject(key, size, fault)
        for used_ns, key, header in sorted(found, key=lambda item: item[2].length):
            if not self.enter(key, header, used_ns):
                self._reject_orphan(key, header)
        with self.lock:
            self.books.order(key for _, key, _ in sorted(found, key=lambda item: item[:2]))

    def _reject_orphan(self, key: FileKey, header: Header) -> None:
        parent = file_name(make_key(header.namespace, header.ids[: 4 * header.first]))
        with self.lock:
            is_dead, is_known = self.books.is_dead(parent), self.books.knows(parent)
        if is_dead:
            self._bury(file_name(key), header.size)
        elif is_known or self.folder.look(parent) is None:
            self._remove_orphans((file_name(key),))
        # else it came while the folder was read, and is found the next time

    def _bury(self, name: str, size: int) -> None:
        with self.lock:
            self.books.add_dead(name, size)

    def _lose_all(self) -> None:
        with self.lock:
            self.books.clear()
            self.crowded.forget()

    def _remove_orphans(self, names: Iterable[str]) -> None:
        for name in names:
            self.count("orphans")
            with suppress(SpillFault):
                self.folder.remove(name)
