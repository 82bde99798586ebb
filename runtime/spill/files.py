"""The system calls that the store makes, behind one small seam.

Stateless; called on worker threads, for every method may wait for the disk. Knows names and bytes,
not what they mean. All that a method raises is OSError.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO

# macOS refuses to write 2 GiB at once, and a stop should not have to wait for more than this.
_MOST_BYTES = 64 << 20


class Files:
    """The disk. A subclass may refuse, forget or stop anywhere."""

    def make_folder(self, folder: Path) -> None:
        """Make the folder, for its owner alone, where there is none."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def list(self, folder: Path) -> tuple[str, ...]:
        """The names in the folder."""
        return tuple(os.listdir(folder))

    def look(self, path: Path) -> tuple[int, int]:
        """A file's bytes, and when it was last used in nanoseconds."""
        stat = path.lstat()
        if not S_ISREG(stat.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return stat.st_size, stat.st_mtime_ns

    def open(self, path: Path) -> BinaryIO:
        """A file to read, unbuffered."""
        return open(path, "rb", buffering=0)

    def create(self, path: Path) -> int:
        """A new file to write, for its owner alone, locked as long as it is open."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with suppress(OSError):  # a file system without locks: others may take it for a leftover
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return fd

    def is_being_written(self, path: Path) -> bool:
        """Whether somebody, in any process, has the file open from :meth:`create`."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def write(self, fd: int, data: memoryview) -> int:
        """Append some of ``data``; says how much."""
        return os.write(fd, data[:_MOST_BYTES])

    def sync(self, fd: int) -> None:
        """Return when the file's content survives a power cut."""
        full_sync = getattr(fcntl, "F_FULLFSYNC", None)
        if full_sync is not None:  # macOS: fsync alone leaves data in the drive's own cache
            try:
                fcntl.fcntl(fd, full_sync)
            except OSError:  # a file system that has no such thing
                os.fsync(fd)
        else:
            os.fsync(fd)

    def close(self, fd: int) -> None:
        """Give a file from :meth:`create` back."""
        os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file another name, in place of what had it."""
        os.replace(old, new)

    def sync_folder(self, folder: Path) -> None:
        """Return when the folder's names survive a power cut."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def touch(self, path: Path, used_ns: int) -> None:
        """Note when a file was last used."""
        os.utime(path, ns=(used_ns, used_ns))

    def remove(self, path: Path) -> None:
        """Remove a file; one that is gone already is fine."""
        path.unlink(missing_ok=True)
