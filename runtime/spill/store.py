"""The states that outlive the process: save, load, drop, and their cap in bytes.

Owns one folder and the books about it. Called on worker threads, several at a time; only what asks
the books alone (:meth:`SpillStore.lookup`, ``nearest``, ``has``, ``crowded_out``, ``note_use``,
``close_session``, ``stats``) never touches the disk and may be called anywhere. The lock is never
held while the disk works. Two stores on one folder, in one process or two, do each other no harm:
files are complete when they get their name and are never changed, so the worst is a miss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..prefix.entries import Kind, Origin, model_of
from .crowded import Crowded
from .faults import Absent, Corrupt, SpillFault, Unfit
from .files import Files
from .folder import SpillFolder, make_key
from .header import Header, namespace_digest, pack_ids, unpack_ids
from .index import FileKey, Neighbours, SpillHit
from .shelf import Shelf
from .slots import Slot
from .state import HostState, StateMismatch, join
from .values import Restored, StoreStats
from .writer import Writer


def key_of(namespace: str, ids: Sequence[int]) -> FileKey:
    """The name of the state of exactly ``ids`` in a namespace."""
    return make_key(namespace_digest(namespace), pack_ids(ids))


@dataclass(frozen=True, slots=True)
class SpillEntry:
    """What a state is the state of.

    Attributes:
        namespace: states of different namespaces are never interchangeable.
        ids: all tokens of the state, those of the parents of a delta included.
        kind: what it was taken at.
        cuttable: it can be cut to any shorter length.
        session: the chat that it belongs to.
    """

    namespace: str
    ids: tuple[int, ...]
    kind: Kind
    cuttable: bool
    session: str | None = None

    @property
    def key(self) -> FileKey:
        """Its name."""
        return key_of(self.namespace, self.ids)


_COUNTS = (
    "hits",
    "misses",
    "saves",
    "bytes_written",
    "loads",
    "bytes_read",
    "evictions",
    "drops",
    "leftovers",
    "quarantined",
    "orphans",
    "unheard",
)


class SpillStore:
    """States in a folder. Whatever goes wrong is a :class:`SpillFault`, counted."""

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int | None = None,
        verify: bool = True,
        clock: Callable[[], float] = time.time,
        files: Files | None = None,
    ) -> None:
        """``verify``: loads hash every tensor; a header is always checked. Touches no disk."""
        self._path = folder
        self._verify = verify
        self._clock = clock
        self._folder = SpillFolder(folder, Files() if files is None else files)
        self._shelf = Shelf(self._folder, max_bytes, clock)
        self._writer = Writer(self._shelf, self._folder)
        self._closed: list[FileKey] = []

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return self._path

    def open(self) -> None:
        """Make the folder if need be, find out what is in it and bring it under the cap.

        Raises SpillFault: the folder cannot be made, read or brought under the cap. The store may
        be used all the same; it misses until the folder is in order.
        """
        with self._shelf.counted():
            self._folder.make()
            self._shelf.count("leftovers", self._folder.remove_leftovers())
            self._shelf.sync()
            with self._shelf.room(0):
                pass

    def lookup(self, ids: Sequence[int], namespace: str, *, trim_floor: int = 0) -> SpillHit | None:
        """The longest usable prefix of ``ids`` on disk, at most all but the last of them.

        A state of ``trim_floor`` tokens or more is not cut to fewer.
        """
        digest = namespace_digest(namespace)
        with self._shelf.lock:
            hit = self._shelf.books.lookup(ids, digest, trim_floor)
            self._shelf.counts["misses" if hit is None else "hits"] += 1
        return hit

    def nearest(self, ids: Sequence[int], namespace: str) -> Neighbours:
        """What shares most of ``ids``, usable or not."""
        own, setup = namespace_digest(namespace), namespace_digest(model_of(namespace))
        with self._shelf.lock:
            return self._shelf.books.nearest(ids, own, setup)

    def count(self, namespace: str) -> int:
        """Entries of the same setup as a namespace, whatever the adapters."""
        with self._shelf.lock:
            return self._shelf.books.count(namespace_digest(model_of(namespace)))

    def has(self, key: FileKey) -> bool:
        """Whether an entry is here, as far as is known: a delta may continue it."""
        with self._shelf.lock:
            return key in self._shelf.books

    def crowded_out(self, ids: Sequence[int], namespace: str) -> Crowded | None:
        """Whether the state of ``ids`` is not here for want of room, and in which way."""
        with self._shelf.lock:
            crowded = self._shelf.crowded
            return crowded.why(key_of(namespace, ids)) if len(crowded) else None

    def note_use(self, ids: Sequence[int], namespace: str) -> bool:
        """The state of ``ids`` was used in memory: what serves as much here, if anything, goes
        later. Nothing is noted on the file."""
        digest = namespace_digest(namespace)
        with self._shelf.lock:
            hit = self._shelf.books.lookup((*ids, 0), digest, 0)
            if hit is None or hit.length != len(ids):
                return False
            self._shelf.books.touch(hit.key, int(self._clock() * 1e9))
            return True

    def close_session(self, session: str) -> bool:
        """What is here of a chat is nobody's from now on and goes first; False if nothing is.

        A restart knows of it once :meth:`note_closed` was called.
        """
        with self._shelf.lock:
            closed = self._shelf.books.close_session(session)
            self._closed += closed
            return bool(closed)

    def note_closed(self) -> None:
        """Note on the files which chats were closed."""
        with self._shelf.lock:
            closed, self._closed = self._closed, []
        for key in closed:
            self._shelf.note_unwanted(key)

    def written(self, within: float) -> tuple[tuple[float, int], ...]:
        """The files written within so many seconds that are still here: seconds ago, and bytes."""
        now = self._clock()
        with self._shelf.lock:
            written = self._shelf.books.written_since(now - within)
        return tuple((max(0.0, now - created), size) for created, size in written)

    def continued(self, origin: Origin | None) -> int:
        """How many tokens of a row's next state need not be brought: its last file holds them."""
        return self._writer.parents.length(origin)

    def save(self, entry: SpillEntry, state: HostState, origin: Origin | None = None) -> int:
        """Write a state; returns the bytes once they are durable, 0 if it was here already.

        A state with ``first`` > 0 is a delta behind the entry of its first ids, which with
        an ``origin`` must be the row's last file. Of a whole one, too, only what lies behind an
        earlier entry is written, if that is the state's beginning to the byte; ``origin`` saves
        comparing it with the row's last file. Where the files together would be over the cap and
        the whole state is not, it is written whole; Unfit then asks for it. What a row kept on the
        way is dropped when a later state of it is durable that does not cover it, unless unheard.
        """
        with self._shelf.counted():
            header = self._header(entry, state)
            self._shelf.sync()
            if self._renew(entry.key, header):
                return 0
            last = self._writer.parents.last(origin)
            written = self._writer.write(entry.ids, header, state, origin)
            unheard = origin is not None and origin.unheard
            if last is not None and last.runs and not (entry.cuttable or unheard):
                with suppress(SpillFault):
                    self.drop(last.key)
            self._shelf.touch(entry.key)
            self._shelf.count("saves")
            return written.size

    def load(self, key: FileKey, *, upto: int | None = None) -> Restored:
        """Read a state back; with ``upto`` the shortest of those it continues that holds as much.

        A damaged file is set aside; what continues it can never be had again and is removed.
        """
        with self._shelf.counted(), self._shelf.pinned(key, upto) as chain:
            if not chain:
                raise Absent(f"no entry {key}")
            header, parts = self._read_chain(chain)
            try:
                state = join(*parts)
            except StateMismatch as error:
                fault = Corrupt(str(error))
                self._shelf.reject(chain[-1].key, chain[-1].size, fault)
                raise fault from error
            size = sum(slot.size for slot in chain)
            self._shelf.touch(chain[-1].key)
            self._shelf.count("loads")
            self._shelf.count("bytes_read", size)
            ids, session = unpack_ids(header.ids), chain[-1].session
            return Restored(state, ids, header.kind, header.cuttable, size, session)

    def drop(self, key: FileKey) -> None:
        """Give an entry up; its file stays, not to be found, as long as others need it."""
        with self._shelf.counted():
            with self._shelf.lock:
                self._shelf.counts["drops"] += key in self._shelf.books
                names = self._shelf.books.drop(key)
                if names:
                    self._shelf.crowded.forget()
            self._shelf.remove(names)

    def clear(self) -> None:
        """Remove every file of ours, whoever wrote it."""
        with self._shelf.counted():
            with self._shelf.lock:
                self._shelf.books.clear()
                self._shelf.crowded.forget()
            self._shelf.remove(self._folder.names())
            self._folder.remove_leftovers()

    def stats(self) -> StoreStats:
        """Live figures and counters; cheap enough for every scrape."""
        with self._shelf.lock:
            return StoreStats(
                entries=len(self._shelf.books),
                dead_files=self._shelf.books.dead,
                bytes=self._shelf.books.bytes,
                max_bytes=self._shelf.max_bytes,
                longest_tokens=self._shelf.books.longest,
                faults=tuple(sorted(self._shelf.faults.items())),
                **{name: self._shelf.counts[name] for name in _COUNTS},
            )

    def check_integrity(self) -> None:
        """Raise AssertionError, in words, where the books do not agree. For tests."""
        with self._shelf.lock:
            self._shelf.books.check_integrity()

    def _read_chain(self, chain: tuple[Slot, ...]) -> tuple[Header, list[HostState]]:
        header: Header | None = None
        parts: list[HostState] = []
        for slot in chain:
            above = header
            try:
                header, state = self._folder.state(slot.key, verify=self._verify)
                if header.parent != (above.digest if above is not None else ""):
                    raise Unfit("a delta behind another state than it was written for")
            except SpillFault as fault:
                self._shelf.reject(slot.key, slot.size, fault)
                raise
            parts.append(state)
        assert header is not None, "a chain has a first file"
        return header, parts

    def _header(self, entry: SpillEntry, state: HostState) -> Header:
        if state.length != len(entry.ids):
            raise Unfit(f"a state of {state.length} tokens for {len(entry.ids)} ids")
        return Header(
            namespace=namespace_digest(entry.namespace),
            ids=pack_ids(entry.ids),
            first=state.first,
            length=state.length,
            kind=entry.kind,
            cuttable=entry.cuttable,
            parent="",
            created=self._clock(),
            layers=(),
            setup=namespace_digest(model_of(entry.namespace)),
            session=entry.session or "",
        )

    def _renew(self, key: FileKey, header: Header) -> bool:
        """Note the use of an entry that is here already; False if it is not."""
        with self._shelf.lock:
            if key not in self._shelf.books:
                return False
            self._shelf.books.add(key, header, None, 0)
        self._shelf.touch(key)
        return True
