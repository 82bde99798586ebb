"""States on their way back from the disk, one after the other.

Part of the ``Spill`` actor, a task of its own on trio's thread. A thread reads a state; it then
arrives on the device in slices between steps, so that rows that run wait for a slice at most. What
cannot be had is a miss, and nobody waits for the disk longer than computing would take.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

import trio

from mlx_troupe.runtime.device import StateSlice
from mlx_troupe.runtime.errors import NoRoom, StateRefused, Unavailable
from mlx_troupe.runtime.plans import SnapshotId, SnapshotMade
from mlx_troupe.runtime.prefix.entries import adapters_of
from mlx_troupe.runtime.spill.candidates import Candidate
from mlx_troupe.runtime.spill.faults import SpillFault, Unreadable
from mlx_troupe.runtime.spill.state import HostLayer

from .device_messages import GpuCommand, Import
from .disk import Disk, Loaded, OnDisk
from .gpu import GpuView
from .mailbox import Mailbox
from .messages import CacheMessage
from .reply import Bell, Reply
from .spill_messages import Restored
from .telling import Complaints

IMPORT_BYTES = 64 << 20
"""How much of a state arrives on the device at a time, in whole layers: copying as much takes a
fraction of the time of a prefill chunk."""
PATIENCE = 5.0
PATIENCE_PER_TOKEN = 0.001
"""Seconds that a row waits for a state: about what it takes to compute one instead."""


class Restores:
    """Brings states back in the order in which they are asked for.

    Args:
        cache: has room for the answer of every restore that it asks for.
        bell: rings for it when something was asked for, and by it when something has ended.
    """

    def __init__(
        self,
        disk: Disk,
        *,
        gpu: Mailbox[GpuCommand],
        cache: Mailbox[CacheMessage],
        view: GpuView,
        new_snapshot: Callable[[], SnapshotId],
        counts: Counter[str],
        bell: Bell,
        complaints: Complaints,
    ) -> None:
        self._disk = disk
        self._gpu = gpu
        self._cache = cache
        self._view = view
        self._new_snapshot = new_snapshot
        self._counts = counts
        self._bell = bell
        self._complaints = complaints
        # With the time from which its rows compute it instead.
        self._waiting: deque[tuple[OnDisk, float]] = deque()
        self._entry: OnDisk | None = None
        self._snapshot: SnapshotId | None = None

    @property
    def is_busy(self) -> bool:
        """Whether anybody waits for a state."""
        return bool(self._waiting) or self._entry is not None

    def ask(self, entry: OnDisk) -> None:
        """Bring a state back, after those that were asked for before."""
        patience = PATIENCE + entry.length * PATIENCE_PER_TOKEN
        self._waiting.append((entry, trio.current_time() + patience))

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            while not self._waiting:
                await self._bell.wait()
            entry, deadline = self._waiting.popleft()
            self._entry = entry
            began = trio.current_time()
            answer = await self._restore(entry, deadline)
            if answer.state is not None:
                self._counts["restores"] += 1
                self._counts["restore_us_last"] = round((trio.current_time() - began) * 1e6)
            self._entry = self._snapshot = None
            self._cache.post(answer)
            self._bell.ring()

    def abandon(self) -> tuple[SnapshotId, ...]:
        """Whoever waits gets nothing; returns what has arrived of a state, to be released."""
        waiting = [entry for entry, _ in self._waiting]
        for entry in waiting if self._entry is None else (self._entry, *waiting):
            self._cache.post(Restored(entry, None))
        return () if self._snapshot is None else (self._snapshot,)

    async def _restore(self, entry: OnDisk, deadline: float) -> Restored:
        nothing = Restored(entry, None)
        loaded = await self._load(entry, deadline)
        model, load = self._view.model, self._view.loads
        if loaded is None or model is None:
            return nothing
        self._snapshot = snapshot = self._new_snapshot()
        try:
            made = await self._import(snapshot, loaded, entry, load)
        except NoRoom:
            self._counts["crowded"] += 1
            return nothing
        except StateRefused as error:
            # A device that was loaded meanwhile knows nothing of earlier slices.
            if self._view.loads == load:
                await self._reject(entry, error)
            return nothing
        except Unavailable:
            return nothing
        if self._view.model is None or self._view.loads != load:
            return nothing
        ids, cuttable = loaded.ids, model.can_trim(len(loaded.ids))
        state = Candidate(
            snapshot,
            entry.namespace,
            ids,
            made.nbytes,
            loaded.kind,
            cuttable,
            session=loaded.session,
        )
        return Restored(entry, state)

    async def _load(self, entry: OnDisk, deadline: float) -> Loaded | None:
        if trio.current_time() >= deadline:
            return None  # those before it took all of its time
        with trio.move_on_at(deadline):
            try:
                return await self._disk.load(entry)
            except SpillFault as fault:
                self._complaints.fault(fault)
                return None
        self._complaints.fault(Unreadable("the disk does not answer"))
        return None

    async def _import(
        self, snapshot: SnapshotId, loaded: Loaded, entry: OnDisk, load: int
    ) -> SnapshotMade:
        """Slices to the device, each after the one before. Raises StateRefused or Unavailable."""
        state, adapters = loaded.state, adapters_of(entry.namespace)
        first = 0
        while True:
            count = _fitting(state.layers[first:])
            reply: Reply[SnapshotMade | None] = Reply()
            self._gpu.post(Import(StateSlice(snapshot, state, adapters, first, count), reply))
            made = await reply.wait()
            if made is not None:
                return made
            if self._view.loads != load:
                raise Unavailable("the device was lost")
            first += count

    async def _reject(self, entry: OnDisk, error: StateRefused) -> None:
        self._counts["refused"] += 1
        words = f"{entry.name} is no state of this model: {error.message}"
        self._complaints.warn("refused", words)
        try:
            await self._disk.reject(entry)
        except SpillFault as fault:
            self._complaints.fault(fault)


def _fitting(layers: Sequence[HostLayer]) -> int:
    """How many layers are a slice: those that are within its bytes, and at least one."""
    taken = 0
    for count, layer in enumerate(layers):
        taken += sum(len(array.data) for array in layer.arrays)
        if taken > IMPORT_BYTES:
            return max(1, count)
    return max(1, len(layers))
