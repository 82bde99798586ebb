"""States, entries and faulty disks for the tests of the SSD store."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mlx_troupe.runtime.spill.files import Files
from mlx_troupe.runtime.spill.state import HostArray, HostLayer, HostState
from mlx_troupe.runtime.spill.store import SpillEntry, SpillStore

NAMESPACE = "model/0\nadapter"
ODD = "odd"
"""States of this namespace do not begin with those of their prefixes."""


def entry(*ids: int, namespace: str = NAMESPACE, cuttable: bool = True) -> SpillEntry:
    """An entry of these ids."""
    return SpillEntry(namespace, ids, "final", cuttable)


def values(namespace: str, ids: tuple[int, ...], first: int, salt: int) -> np.ndarray:
    """What a layer holds of tokens [first, …): different for any other tokens or namespace."""
    mix = sum(namespace.encode()) + salt + (len(ids) if namespace == ODD else 0)
    rows = [[sum(ids[: at + 1]) * 31 + mix, ids[at], at, mix] for at in range(first, len(ids))]
    return np.asarray(rows, np.uint32).astype(np.float32)


def state(made: SpillEntry, first: int = 0, *, recurrent: bool = False) -> HostState:
    """The one right state of an entry, or its delta from ``first`` on.

    Keys and values of two heads, so that a join has to weave; with ``recurrent`` a second layer
    without tokens.
    """
    keys = values(made.namespace, made.ids, first, 1)
    both = np.stack((keys, keys + 1))[None]
    tokens = len(made.ids) - first
    layers = [
        HostLayer(
            "plain",
            (("bits", 4), ("scale", 0.5), ("name", "é")),
            (
                HostArray("float32", (1, 2, tokens, 4), both.tobytes()),
                HostArray("bfloat16", (tokens, 8), keys.tobytes()),
            ),
            (2, 0),
        )
    ]
    if recurrent:
        sums = values(made.namespace, made.ids, len(made.ids) - 1, 2)
        layers.append(
            HostLayer("arrays", (), (HostArray("float32", (4,), sums[0].tobytes()),), (None,))
        )
    return HostState(len(made.ids), tuple(layers), first)


def entry_files(folder: Path) -> list[Path]:
    """Files that hold entries, the oldest first."""
    return sorted(folder.glob("*.safetensors"), key=lambda p: (p.stat().st_mtime_ns, p.name))


def folder_bytes(folder: Path) -> int:
    """What all files in a folder weigh."""
    return sum(path.stat().st_size for path in folder.iterdir())


def faults(store: SpillStore) -> dict[str, int]:
    """Counted faults by code."""
    return dict(store.stats().faults)


class Ticks:
    """A clock that moves a second whenever it is read."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


class FullDisk(Files):
    """A disk with room for ``room`` more bytes; what is removed becomes free."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, fd: int, data: memoryview) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = super().write(fd, data[: self.room])
        self.room -= written
        return written

    def remove(self, path: Path) -> None:
        size = path.stat().st_size if path.exists() else 0
        super().remove(path)
        self.room += size


class PowerCut(BaseException):
    """The machine stops here."""


class Mortal(Files):
    """A disk that stops after ``steps`` calls that change something; each byte is a call.

    ``write`` takes one byte at a time where ``bytewise`` is set. After the cut nothing changes.
    """

    CHANGES = ("make_folder", "create", "write", "sync", "rename", "sync_folder", "remove")

    def __init__(self, steps: int, *, chunk: int = 1 << 20) -> None:
        self.steps = steps
        self.chunk = chunk
        self.done: list[str] = []

    def _step(self, name: str) -> None:
        if len(self.done) >= self.steps:
            raise PowerCut(name)
        self.done.append(name)

    def create(self, path: Path) -> int:
        self._step("create")
        return super().create(path)

    def write(self, fd: int, data: memoryview) -> int:
        self._step("write")
        return super().write(fd, data[: self.chunk])

    def sync(self, fd: int) -> None:
        self._step("sync")

    def rename(self, old: Path, new: Path) -> None:
        self._step("rename")
        super().rename(old, new)

    def sync_folder(self, folder: Path) -> None:
        self._step("sync_folder")

    def remove(self, path: Path) -> None:
        self._step("remove")
        super().remove(path)


class Broken(Files):
    """A disk on which the named calls fail."""

    def __init__(self, number: int, *names: str) -> None:
        self.number = number
        self.names = set(names)

    def _fail(self, name: str) -> None:
        if name in self.names:
            raise OSError(self.number, os.strerror(self.number))

    def create(self, path: Path) -> int:
        self._fail("create")
        return super().create(path)

    def write(self, fd: int, data: memoryview) -> int:
        self._fail("write")
        return super().write(fd, data)

    def sync(self, fd: int) -> None:
        self._fail("sync")

    def rename(self, old: Path, new: Path) -> None:
        self._fail("rename")
        super().rename(old, new)

    def sync_folder(self, folder: Path) -> None:
        self._fail("sync_folder")

    def open(self, path: Path) -> BinaryIO:
        self._fail("open")
        return super().open(path)

    def list(self, folder: Path) -> tuple[str, ...]:
        self._fail("list")
        return super().list(folder)

    def remove(self, path: Path) -> None:
        self._fail("remove")
        super().remove(path)

    def touch(self, path: Path, used_ns: int) -> None:
        self._fail("touch")
        super().touch(path, used_ns)


class Fast(Files):
    """The disk without waiting for it."""

    def sync(self, fd: int) -> None:
        pass

    def sync_folder(self, folder: Path) -> None:
        pass


def opened(folder: Path, **options: object) -> SpillStore:
    """An opened store that hashes all it reads, on a disk that is not waited for."""
    defaults: dict[str, Any] = {"verify": True, "clock": Ticks(), "files": Fast()}
    store = SpillStore(folder, **{**defaults, **options})
    store.open()
    return store
