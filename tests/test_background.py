"""Work on threads that take only what is left."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
from spill_rig import NAMESPACE, Fast, entry, state

from mlx_troupe.actors.background import NICE, on_spare_time
from mlx_troupe.actors.disk import FolderDisk
from mlx_troupe.runtime.device import RowId, SnapshotId
from mlx_troupe.runtime.prefix.entries import Origin
from mlx_troupe.runtime.spill.queue import Candidate
from mlx_troupe.runtime.spill.state import HostState
from mlx_troupe.runtime.spill.store import SpillEntry, SpillStore

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
