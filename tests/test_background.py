"""Work on threads that take only what is left."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from spill_rig import NAMESPACE, Fast, entry, state

from mlx_troupe.actors.background import NICE, on_spare_time
from mlx_troupe.actors.disk import FolderDisk
from mlx_troupe.runtime.plans import RowId, SnapshotId
from mlx_troupe.runtime.prefix.entries import Origin
from mlx_troupe.runtime.spill.candidates import Candidate
from mlx_troupe.runtime.spill.index import FileKey
from mlx_troupe.runtime.spill.state import HostState
from mlx_troupe.runtime.spill.store import Restored, SpillEntry, SpillStore

LINUX = sys.platform == "linux"


def nice() -> int:
    """Of the calling thread, where threads have such a thing."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id() if LINUX else 0)


def test_the_work_gives_way_and_its_caller_does_not() -> None:
    """On Linux a thread's priority is its own; the next work has a thread of its own, too."""
    before = nice()
    assert on_spare_time(nice) == (max(before, NICE) if LINUX else before)
    assert nice() == before
    assert on_spare_time(threading.get_ident) != threading.get_ident()


def test_what_it_raises_is_raised() -> None:
    """To whoever waits."""

    def broken() -> None:
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        on_spare_time(broken)


class Recording(SpillStore):
    """Notes the priority that it writes with."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, files=Fast())
        self.seen: list[int] = []

    def save(self, entry: SpillEntry, state: HostState, origin: Origin | None = None) -> int:
        self.seen.append(nice())
        return super().save(entry, state, origin)


async def test_kept_states_are_written_on_spare_time_and_states_of_running_rows_at_once(
    tmp_path: Path,
) -> None:
    """What a crash would cost a row that runs grows with every second that a write takes."""
    store = Recording(tmp_path)
    store.open()
    disk = FolderDisk(store)
    for ids, origin in (((1, 2, 3), None), ((4, 5, 6), Origin(RowId(1), runs=True))):
        what = Candidate(SnapshotId(1), NAMESPACE, ids, 8, "final", cuttable=True, origin=origin)
        await disk.save(what, state(entry(*ids)))
    before = nice()
    assert store.seen == [max(before, NICE) if LINUX else before, before]


class Stuck(SpillStore):
    """Its writes, and the reads of one file, end when they are told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, files=Fast())
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.stuck: FileKey | None = None

    def save(self, entry: SpillEntry, state: HostState, origin: Origin | None = None) -> int:
        if self.stuck is not None:
            self.begun.release()
            self.go_on.wait()
        return super().save(entry, state, origin)

    def load(self, key: FileKey, *, upto: int | None = None) -> Restored:
        if key == self.stuck:
            self.begun.release()
            self.go_on.wait()
        return super().load(key, upto=upto)


async def test_a_read_waits_for_no_write_and_for_no_read_that_was_given_up(tmp_path: Path) -> None:
    """Four states of running rows and one other are written, one read is left to itself."""
    store = Stuck(tmp_path)
    store.open()
    disk = FolderDisk(store)
    whole = Candidate(SnapshotId(1), NAMESPACE, (1, 2, 3), 8, "final", cuttable=True)
    for ids in ((1, 2, 3), (4, 5, 6)):
        await disk.save(replace(whole, ids=ids), state(entry(*ids)))
    good, bad = (disk.find((*ids, 7), NAMESPACE, 0) for ids in ((1, 2, 3), (4, 5, 6)))
    assert good is not None
    assert bad is not None
    store.stuck = FileKey(bad.name)

    async def write(number: int) -> None:
        ids = (7, 8, number)
        await disk.save(replace(whole, ids=ids), state(entry(*ids)))

    async def begun() -> None:
        assert await trio.to_thread.run_sync(store.begun.acquire, True, 20), "it waits for others"

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(disk.load, bad)
            await begun()
            nursery.cancel_scope.cancel()
        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(write, number)
                await begun()
            with trio.fail_after(20):
                assert (await disk.load(good)).ids == (1, 2, 3)
            store.go_on.set()
    finally:
        store.go_on.set()
