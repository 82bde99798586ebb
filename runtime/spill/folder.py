"""The files of a spill folder: how one is written so that it is whole or not there, and read back.

Holds no state; called on worker threads. Turns OSError into faults. A file is written under a
temporary name, made durable, renamed, and the folder made durable; what stops in between leaves a
temporary file, locked as long as its writer lives. Names that are not of this making are not
touched.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from .faults import Absent, Corrupt, FolderGone, Unreadable, Unwritable, write_fault
from .files import Files
from .format import Draft, read_header, read_state
from .header import Header
from .index import FileKey
from .slots import SUFFIX, file_name
from .state import HostState

_ENTRY = re.compile(r"[0-9a-f]{40}" + re.escape(SUFFIX))
_BAD = re.compile(r"[0-9a-f]{40}\.bad")
_TEMPORARY = re.compile(r"\.[0-9a-f]{40}\.[0-9a-f]{16}\.tmp")


def make_key(namespace_digest: str, packed_ids: bytes) -> FileKey:
    """The name of an entry."""
    return FileKey(sha256(namespace_digest.encode() + packed_ids).hexdigest()[:40])


class SpillFolder:
    """One folder."""

    def __init__(self, path: Path, files: Files) -> None:
        self._path = path
        self._files = files

    def make(self) -> None:
        """Make the folder where there is none. Raises SpillFault."""
        try:
            self._files.make_folder(self._path)
        except OSError as error:
            raise write_fault(error) from error

    def names(self) -> tuple[str, ...]:
        """Files with entries, or that once were such. Raises FolderGone."""
        return tuple(n for n in self._all() if _ENTRY.fullmatch(n) or _BAD.fullmatch(n))

    def look(self, name: str) -> tuple[int, int] | None:
        """A file's bytes and when it was last used in nanoseconds; None = it is gone."""
        try:
            return self._files.look(self._path / name)
        except OSError:
            return None

    def remove_leftovers(self) -> int:
        """Remove what earlier stores left half-written or set aside; says how many files.

        Temporary files that are still being written, by whatever process, are left alone.
        """
        removed = 0
        for name in self._all():
            with suppress(OSError):
                path = self._path / name
                if _BAD.fullmatch(name) or (
                    _TEMPORARY.fullmatch(name) and not self._files.is_being_written(path)
                ):
                    self._files.remove(path)
                    removed += 1
        return removed

    def header(self, key: FileKey) -> Header:
        """The checked header of an entry's file. Raises SpillFault."""
        with self._reading(key) as (file, size):
            return _checked(read_header(file, size), key)

    def state(self, key: FileKey, *, verify: bool) -> tuple[Header, HostState]:
        """Header and state of an entry's file. Raises SpillFault."""
        with self._reading(key) as (file, size):
            header = _checked(read_header(file, size), key)
            return header, read_state(file, header, verify=verify)

    def write(self, key: FileKey, draft: Draft, count: Callable[[int], None]) -> None:
        """Write an entry's file; it is durable on return. ``count`` hears of bytes as they go.

        Raises SpillFault: there is no new file then.
        """
        temporary = self._path / f".{key}.{secrets.token_hex(8)}.tmp"
        final = self._path / file_name(key)
        with self._writing(temporary, final):
            fd = self._files.create(temporary)
            try:
                for part in draft.parts:
                    rest = part
                    while rest:
                        written = self._files.write(fd, rest)
                        count(written)
                        rest = rest[written:]
                self._files.sync(fd)
                self._files.rename(temporary, final)  # still locked: it is no leftover
            finally:
                self._files.close(fd)
            self._files.sync_folder(self._path)

    def set_aside(self, name: str) -> str | None:
        """Rename a damaged file so that nobody reads it again; None if it could not be."""
        new = name.removesuffix(SUFFIX) + ".bad"
        try:
            self._files.rename(self._path / name, self._path / new)
        except OSError:
            return None
        return new

    def remove(self, name: str) -> None:
        """Remove a file that may be gone already. Raises SpillFault."""
        try:
            self._files.remove(self._path / name)
        except FileNotFoundError:
            return
        except OSError as error:
            raise Unwritable(str(error)) from error

    def touch(self, name: str, used_ns: int) -> None:
        """Note when a file was last used, where that can be noted."""
        with suppress(OSError):
            self._files.touch(self._path / name, used_ns)

    def _all(self) -> tuple[str, ...]:
        try:
            return self._files.list(self._path)
        except OSError as error:
            raise FolderGone(str(error)) from error

    @contextmanager
    def _reading(self, key: FileKey) -> Iterator[tuple[BinaryIO, int]]:
        try:
            with self._files.open(self._path / file_name(key)) as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(0)
                yield file, size
        except FileNotFoundError as error:
            self._all()
            raise Absent(str(error)) from error
        except OSError as error:
            raise Unreadable(repr(error)) from error
        except ValueError as error:  # a state that cannot be, under a header that is in order
            raise Corrupt(str(error)) from error

    @contextmanager
    def _writing(self, *paths: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            for path in paths:
                with suppress(OSError):
                    self._files.remove(path)
            if isinstance(error, FileNotFoundError):
                self._all()
            raise write_fault(error) from error


def _checked(header: Header, key: FileKey) -> Header:
    if make_key(header.namespace, header.ids) != key:
        raise Corrupt("a file under the name of another entry")
    return header
