"""The SSD tier as actors see it: an index that answers at once, and a folder that takes its time.

A :class:`Disk` outlives the actor that works on it, so that a crash forgets nothing that is
written. Anyone on trio's thread may ask its index; only the ``Spill`` actor calls what waits.
:class:`FolderDisk` is the real one: its files are read and written on worker threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import trio

from mlx_troupe.runtime.heap import cut_heap
from mlx_troupe.runtime.prefix.entries import Kind
from mlx_troupe.runtime.settings import Settings
from mlx_troupe.runtime.spill.candidates import Candidate
from mlx_troupe.runtime.spill.crowded import Crowded
from mlx_troupe.runtime.spill.index import FileKey, Neighbours
from mlx_troupe.runtime.spill.state import HostState
from mlx_troupe.runtime.spill.store import SpillEntry, SpillStore

from .background import on_spare_time

T = TypeVar("T")

READS = 2
"""Files read at once: one, and one that nobody waits for any more, for it may never end."""
WRITES = 5
"""Files written at once: one of a kept state, and all that may come of running rows together."""


@dataclass(frozen=True, slots=True)
class OnDisk:
    """A state of ``length`` tokens on the disk, the first ``useful`` of which are of use.

    ``name`` tells it from all others of its folder.
    """

    name: str
    useful: int
    length: int = field(compare=False)
    namespace: str = field(compare=False)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A state that was read, of exactly ``ids``: at least the useful ones. ``session``: whose."""

    state: HostState
    ids: tuple[int, ...]
    kind: Kind
    session: str | None = None


@dataclass(frozen=True, slots=True)
class DiskStats:
    """Live figures; ``evictions``, ``quarantined`` files and ``unheard`` faults (those that no
    call ended with) are counted since the start."""

    folder: str
    entries: int = 0
    bytes: int = 0
    max_bytes: int | None = None
    evictions: int = 0
    quarantined: int = 0
    unheard: int = 0
    longest_tokens: int = 0


class Disk(Protocol):
    """States in a folder."""

    def find(self, ids: Sequence[int], namespace: str, trim_floor: int) -> OnDisk | None:
        """The state that serves most of ``ids[:-1]``."""
        ...

    def nearest(self, ids: Sequence[int], namespace: str) -> Neighbours:
        """What shares most of ``ids``, usable or not."""
        ...

    def count(self, namespace: str) -> int:
        """States of the same setup as a namespace, whatever the adapters."""
        ...

    def holds(self, candidate: Candidate) -> bool:
        """Whether a state, or one that covers it, is on the disk."""
        ...

    def crowded_out(self, candidate: Candidate) -> Crowded | None:
        """Whether a state is not on the disk for want of room, and in which way."""
        ...

    def note_use(self, candidate: Candidate) -> bool:
        """Memory lent a state: what serves as much here goes later. As :meth:`holds` else."""
        ...

    def close_session(self, session: str) -> bool:
        """What is here of a chat is nobody's from now on and goes first; False if nothing is.

        :meth:`note_closed` has it outlive the process.
        """
        ...

    def continued(self, candidate: Candidate) -> int:
        """How many of a state's first tokens may be left out of what :meth:`save` is given."""
        ...

    def stats(self) -> DiskStats:
        """Cheap."""
        ...

    def written(self, within: float) -> tuple[tuple[float, int], ...]:
        """Seconds ago and bytes of what was written within so many seconds and is still here."""
        ...

    async def open(self) -> None:
        """Read what is in the folder. Raises SpillFault; may be called again."""
        ...

    async def save(self, candidate: Candidate, state: HostState) -> int:
        """Write a state and say how many bytes that took. Raises SpillFault."""
        ...

    async def load(self, entry: OnDisk) -> Loaded:
        """Read a state. Raises SpillFault."""
        ...

    async def note_closed(self) -> None:
        """Note on the disk which chats were closed, where that can be noted."""
        ...

    async def reject(self, entry: OnDisk) -> None:
        """The device does not take what was read: it is not found again. Raises SpillFault."""
        ...


def folder_disk(settings: Settings) -> FolderDisk | None:
    """The folder that the settings name, not opened yet."""
    if settings.ssd_cache is None:
        return None
    store = SpillStore(
        settings.ssd_cache,
        max_bytes=settings.ssd_cache_max_bytes,
        verify=settings.ssd_cache_verify,
    )
    return FolderDisk(store)


class FolderDisk:
    """A :class:`SpillStore` whose slow calls run on worker threads."""

    def __init__(self, store: SpillStore) -> None:
        self._store = store
        self._reads = trio.CapacityLimiter(READS)
        self._writes = trio.CapacityLimiter(WRITES)

    def find(self, ids: Sequence[int], namespace: str, trim_floor: int) -> OnDisk | None:
        """As :meth:`Disk.find`."""
        hit = self._store.lookup(ids, namespace, trim_floor=trim_floor)
        return None if hit is None else OnDisk(hit.key, hit.length, hit.state_length, namespace)

    def nearest(self, ids: Sequence[int], namespace: str) -> Neighbours:
        """As :meth:`Disk.nearest`."""
        return self._store.nearest(ids, namespace)

    def count(self, namespace: str) -> int:
        """As :meth:`Disk.count`."""
        return self._store.count(namespace)

    def holds(self, candidate: Candidate) -> bool:
        """As :meth:`Disk.holds`."""
        # A lookup leaves out the last id.
        hit = self._store.lookup((*candidate.ids, 0), candidate.namespace)
        return hit is not None and hit.length == len(candidate.ids)

    def crowded_out(self, candidate: Candidate) -> Crowded | None:
        """As :meth:`Disk.crowded_out`."""
        return self._store.crowded_out(candidate.ids, candidate.namespace)

    def note_use(self, candidate: Candidate) -> bool:
        """As :meth:`Disk.note_use`."""
        return self._store.note_use(candidate.ids, candidate.namespace)

    def close_session(self, session: str) -> bool:
        """As :meth:`Disk.close_session`."""
        return self._store.close_session(session)

    def continued(self, candidate: Candidate) -> int:
        """As :meth:`Disk.continued`."""
        return self._store.continued(candidate.origin)

    def stats(self) -> DiskStats:
        """As :meth:`Disk.stats`."""
        stats = self._store.stats()
        return DiskStats(
            str(self._store.folder),
            stats.entries,
            stats.bytes,
            stats.max_bytes,
            stats.evictions,
            stats.quarantined,
            stats.unheard,
            stats.longest_tokens,
        )

    def written(self, within: float) -> tuple[tuple[float, int], ...]:
        """As :meth:`Disk.written`."""
        return self._store.written(within)

    async def open(self) -> None:
        """As :meth:`Disk.open`."""
        await self._on_thread(self._store.open, self._reads)

    async def save(self, candidate: Candidate, state: HostState) -> int:
        """As :meth:`Disk.save`."""
        entry = SpillEntry(
            candidate.namespace,
            candidate.ids,
            candidate.kind,
            candidate.cuttable,
            candidate.session,
        )
        work = partial(self._store.save, entry, state, candidate.origin)
        # What a crash would cost a row that runs grows with every second that a write takes.
        return await self._on_thread(work, self._writes, hurried=candidate.is_urgent)

    async def load(self, entry: OnDisk) -> Loaded:
        """As :meth:`Disk.load`."""
        key = FileKey(entry.name)
        work = partial(self._store.load, key, upto=entry.useful)
        found = await self._on_thread(work, self._reads)
        return Loaded(found.state, found.ids, found.kind, found.session)

    async def note_closed(self) -> None:
        """As :meth:`Disk.note_closed`."""
        await self._on_thread(self._store.note_closed, self._writes)

    async def reject(self, entry: OnDisk) -> None:
        """As :meth:`Disk.reject`."""
        # Before the next is read, which is not to wait for a write.
        await self._on_thread(partial(self._store.drop, FileKey(entry.name)), self._reads)

    async def _on_thread(
        self, work: Callable[[], T], lanes: trio.CapacityLimiter, *, hurried: bool = True
    ) -> T:
        """Wait for the disk; one that may never answer is left to itself on cancellation.

        What a state's bytes took on the thread's heap is given back: the thread may end, or idle.
        """

        def work_then_tidy() -> T:
            try:
                return work()
            finally:
                cut_heap()

        job = work_then_tidy if hurried else partial(on_spare_time, work_then_tidy)
        return await trio.to_thread.run_sync(job, limiter=lanes, abandon_on_cancel=True)
