"""Records of interrupted answers in a folder: one small file each, whole or not at all.

Every method may wait for the disk: worker threads call them, one at a time but for ``read``. What
is read is compared with its digest; a file that is anything but what was written counts as none.
Token ids are not readable as text, and files are their owner's alone.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from hashlib import blake2b
from itertools import count
from pathlib import Path

import msgspec

from ..plans import TokenLogprobs
from ..spill.files import Files
from .records import Record

MAX_FILES = 1024
MAX_BYTES = 64 << 20
"""Of records in the folder; of more, those that were written first go. Log-probabilities make a
record large: some megabytes, for 20 of each of 8,192 tokens."""
SUFFIX = ".answer"
_MAGIC = b"mlx-troupe answer 1\n"
_DIGEST_BYTES = 32


def answers_in(cache: Path) -> Path:
    """Where in an SSD cache's folder the records are."""
    return cache / "answers"


class _Body(msgspec.Struct, array_like=True):
    """What a file holds behind its digest."""

    identity: str
    seed: int
    ids: tuple[int, ...]
    figures: tuple[tuple[float, tuple[tuple[int, float], ...]], ...]


class RecordFiles:
    """A folder of records."""

    def __init__(self, folder: Path, files: Files | None = None) -> None:
        self._folder = folder
        # Their bytes, in the order of writing, as far as this process knows.
        self._written: OrderedDict[str, int] = OrderedDict()
        self._files = files or Files()
        self._names = count()

    def open(self) -> None:
        """Make the folder and remove what is left over in it. Raises OSError."""
        # A parent that a path brings along would be anybody's to list.
        self._files.make_folder(self._folder.parent)
        self._files.make_folder(self._folder)
        found: list[tuple[int, str, int]] = []
        for name in self._files.list(self._folder):
            path = self._folder / name
            if name.endswith(SUFFIX):
                with suppress(OSError):
                    size, written_ns = self._files.look(path)
                    found.append((written_ns, path.stem, size))
            elif name.endswith(".part") and not self._files.is_being_written(path):
                self._files.remove(path)
        self._written.update((identity, size) for _, identity, size in sorted(found))
        self._prune()

    def write(self, record: Record) -> None:
        """Keep a record, in place of an earlier one of its request. Raises OSError."""
        try:
            size = self._write(record)
        except FileNotFoundError:
            # Only now is the cache's own folder there, which others make.
            self._files.list(self._folder.parent)
            self._files.make_folder(self._folder)
            size = self._write(record)
        self._written[record.identity] = size
        self._written.move_to_end(record.identity)
        self._prune()

    def _prune(self) -> None:
        taken = sum(self._written.values())
        while len(self._written) > 1 and (len(self._written) > MAX_FILES or taken > MAX_BYTES):
            identity, size = self._written.popitem(last=False)
            taken -= size
            with suppress(OSError):
                self._files.remove(self._path(identity))

    def _write(self, record: Record) -> int:
        told = tuple((figure.chosen, figure.top) for figure in record.figures)
        body = msgspec.msgpack.encode(_Body(record.identity, record.seed, record.ids, told))
        data = memoryview(_MAGIC + _digest(body) + body)
        size = len(data)
        part = self._folder / f"{record.identity}.{next(self._names)}.part"
        try:
            fd = self._files.create(part)
            try:
                while data:
                    data = data[self._files.write(fd, data) :]
                self._files.sync(fd)
                self._files.rename(part, self._path(record.identity))
            finally:
                self._files.close(fd)
            self._files.sync_folder(self._folder)
            return size
        except OSError:
            with suppress(OSError):
                self._files.remove(part)
            raise

    def read(self, identity: str) -> Record | None:
        """A record; None where there is none that is whole."""
        try:
            with self._files.open(self._path(identity)) as file:
                data = file.read()
        except OSError:
            return None
        digest = data[len(_MAGIC) : len(_MAGIC) + _DIGEST_BYTES]
        body = data[len(_MAGIC) + _DIGEST_BYTES :]
        if not data.startswith(_MAGIC) or _digest(body) != digest:
            return None
        try:
            found = msgspec.msgpack.decode(body, type=_Body)
        except msgspec.DecodeError:
            return None
        if found.identity != identity or len(found.figures) not in (0, len(found.ids)):
            return None
        figures = tuple(TokenLogprobs(chosen, top) for chosen, top in found.figures)
        return Record(identity, found.seed, found.ids, figures)

    def remove(self, identity: str) -> None:
        """Forget a record; none is fine. Raises OSError."""
        self._written.pop(identity, None)
        self._files.remove(self._path(identity))

    def clear(self) -> None:
        """Remove all records, and what was left half-written. Raises OSError."""
        for name in self._files.list(self._folder):
            path = self._folder / name
            if name.endswith(SUFFIX) or (
                name.endswith(".part") and not self._files.is_being_written(path)
            ):
                self._files.remove(path)

    def _path(self, identity: str) -> Path:
        return self._folder / f"{identity}{SUFFIX}"


def _digest(body: bytes) -> bytes:
    return blake2b(body, digest_size=_DIGEST_BYTES).digest()
