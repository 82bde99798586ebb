"""How a state gets into the folder: behind a file that holds its first tokens, or whole.

Part of a store, on its worker threads; several may write at a time. Owns what is known of parents,
and whether the disk is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from ..prefix.entries import Origin
from .faults import DiskFull, TooLarge, Unfit
from .folder import SpillFolder, make_key
from .format import Draft, draft
from .header import Header
from .index import FileKey
from .parents import Parents
from .sharing import left_out_bytes
from .shelf import Shelf
from .slots import file_name
from .state import HostState, cut_tokens


class Writer:
    """Writes the files of one shelf."""

    def __init__(self, shelf: Shelf, folder: SpillFolder) -> None:
        self.parents = Parents(shelf, folder)
        self._shelf = shelf
        self._folder = folder
        self._is_full = False

    def write(
        self, ids: Sequence[int], header: Header, state: HostState, origin: Origin | None
    ) -> Header:
        """Write and enter a state of ``ids``; returns its file's header. Raises SpillFault.

        Unfit for a delta also where it would be over the cap with what it continues, and the whole
        state would not.
        """
        key = make_key(header.namespace, header.ids)
        written = self._behind(key, ids, header, state, origin)
        if written is None:
            written = self._put(key, draft(header, state))
        with self._shelf.lock:
            self._shelf.crowded.returned(key)
        self.parents.note(origin, key, written.digest)
        return written

    def _behind(
        self,
        key: FileKey,
        ids: Sequence[int],
        header: Header,
        state: HostState,
        origin: Origin | None,
    ) -> Header | None:
        """Write what an earlier file lacks; None if there is none, or no room for both."""
        with self.parents.pinned(header, ids, state, origin) as above:
            if not above:
                return None
            rest = cut_tokens(state, above[-1].length, state.length)
            made = draft(self.parents.continued(above[-1], header, rest, origin), rest)
            total = made.header.size + sum(slot.size for slot in above)
            if self._fits(total):
                return self._put(key, made)
            if not self._fits(made.header.size + left_out_bytes(rest)):
                self._refuse(key, total)
            if state.first:
                raise Unfit("there is no room for a chain of files, but for a whole state")
            return None

    def _put(self, key: FileKey, made: Draft) -> Header:
        size = made.header.size
        if not self._fits(size):
            self._refuse(key, size)
        with self._shelf.room(size):
            self._write(key, made)
            if not self._shelf.enter(key, made.header, 0):
                self._shelf.remove((file_name(key),))
                raise Unfit("what a delta continues went while it was written")
        return made.header

    def _fits(self, size: int) -> bool:
        """Whether there were room for so much if nothing else were here."""
        return self._shelf.max_bytes is None or size <= self._shelf.max_bytes

    def _refuse(self, key: FileKey, size: int) -> NoReturn:
        with self._shelf.lock:
            self._shelf.crowded.note((key,), "too_large")
        raise TooLarge(f"a state of {size} bytes under a cap of {self._shelf.max_bytes}")

    def _write(self, key: FileKey, made: Draft) -> None:
        try:
            self._folder.write(key, made, self._count)
        except DiskFull as full:
            # Room is made once: while the disk stays full no more of the cache is given for it.
            with self._shelf.lock:
                was_full, self._is_full = self._is_full, True
                most = self._shelf.books.bytes - made.header.size
                names = () if was_full else self._shelf.books.make_room(0, most)
            if not names:
                raise
            self._shelf.count_fault(full)
            self._shelf.evict(names)
            self._folder.write(key, made, self._count)
        with self._shelf.lock:
            self._is_full = False

    def _count(self, written: int) -> None:
        self._shelf.count("bytes_written", written)
