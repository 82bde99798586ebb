"""The prefix cache's states on the device: which are kept, lent, and given up, and for whom.

Part of the ``KVCache`` actor, on its task; it decides and posts, and never waits. Owns the index,
and the truth about every snapshot that was offered until its release is on its way. Knows no
messages and nobody who waits.
"""

from __future__ import annotations

from collections import OrderedDict

import trio

from mlx_troupe.runtime.budgets import kept_bytes
from mlx_troupe.runtime.device import DeviceStats
from mlx_troupe.runtime.model_info import ModelInfo
from mlx_troupe.runtime.plans import RowId, SnapshotId
from mlx_troupe.runtime.prefix.entries import Hit, LeaseId, Origin
from mlx_troupe.runtime.prefix.explain import Explanation
from mlx_troupe.runtime.prefix.index import PrefixCore
from mlx_troupe.runtime.prefix.room import Headroom, excess
from mlx_troupe.runtime.spill.candidates import Candidate

from .device_messages import GpuCommand, Release
from .mailbox import Mailbox
from .tier import SsdTier

MAX_PASSING = 256
"""Rows whose last state on the way is known; the others' stay until there is no room for them."""


class MemoryTier:
    """The index and its room.

    Args:
        disk: what stands behind it, and says when states that it still needs may be released.
        max_leases: states lent at once; beyond it nothing is found.
    """

    def __init__(
        self,
        core: PrefixCore,
        *,
        gpu: Mailbox[GpuCommand],
        disk: SsdTier | None,
        max_leases: int,
    ) -> None:
        self.core = core
        self._gpu = gpu
        self._disk = disk
        self._max_leases = max_leases
        self._budget = core.stats().budget_bytes
        self._headroom = Headroom(self._budget)
        # Every state that was put and not yet released, whatever a torn index may say of it.
        self._held: set[SnapshotId] = set()
        # What running rows kept last on the way, where the next such state does not cover it.
        self._passing: OrderedDict[RowId, SnapshotId] = OrderedDict()

    @property
    def held(self) -> tuple[SnapshotId, ...]:
        """Every state that must be released some day."""
        return tuple(self._held)

    # ---- to be found ---------------------------------------------------------------------

    def find(
        self, ids: tuple[int, ...], namespace: str, session: str | None, model: ModelInfo
    ) -> Hit | None:
        """The longest usable prefix, leased."""
        if self.core.leases >= self._max_leases:
            return None
        window, floor = model.trim_window, model.trim_floor
        return self.core.lookup(
            ids, namespace, trim_window=window, trim_floor=floor, session=session
        )

    def peek(self, ids: tuple[int, ...], namespace: str, model: ModelInfo) -> int:
        """How many tokens of a prompt could be served."""
        window, floor = model.trim_window, model.trim_floor
        return self.core.peek(ids, namespace, trim_window=window, trim_floor=floor)

    def explain(
        self, ids: tuple[int, ...], namespace: str, session: str | None, model: ModelInfo
    ) -> Explanation:
        """How far a prompt could be served, and why no further."""
        window, floor = model.trim_window, model.trim_floor
        return self.core.explain(
            ids, namespace, trim_window=window, trim_floor=floor, session=session
        )

    # ---- what is kept --------------------------------------------------------------------

    def keep(self, candidate: Candidate, model: ModelInfo) -> None:
        """File a state, here and on the disk; what it makes useless is let go."""
        self._held.add(candidate.snapshot)
        result = self.core.put(
            candidate.ids,
            candidate.namespace,
            candidate.snapshot,
            candidate.nbytes,
            kind=candidate.kind,
            trim_window=model.trim_window,
            session=candidate.session,
        )
        if result.kept and self._disk is not None:
            # Before others are let go: those that it covers need not be written any more.
            self._disk.keep(candidate, trio.current_time())
        self._release(result.release)
        if result.kept:
            self._headroom.kept()
        if result.kept and candidate.origin is not None:
            self._pass(candidate, candidate.origin)

    def end_lease(self, lease: LeaseId, *, taken: bool = False) -> None:
        """As :meth:`PrefixCore.end_lease`."""
        self._release(self.core.end_lease(lease, taken=taken))

    def end_all_leases(self) -> None:
        """Nobody who held one is left."""
        self._release(self.core.end_all_leases())

    def drop(self, snapshots: tuple[SnapshotId, ...]) -> None:
        """Let go of some entries."""
        for snapshot in snapshots:
            self._release(self.core.drop(snapshot))

    def clear(self) -> int:
        """Let go of all entries; how many."""
        entries = len(self.core)
        self._release(self.core.clear())
        return entries

    def device_lost(self) -> None:
        """No state is left, and none to release."""
        self._held.clear()
        self._passing.clear()
        self.core = PrefixCore(self._budget)

    # ---- room ----------------------------------------------------------------------------

    def make_way(self, model: ModelInfo | None, device: DeviceStats) -> None:
        """Entries give way to all else that the cache keeps alive, and to a device in need."""
        others = 0 if self._disk is None else self._disk.held_bytes
        self._release(self.core.set_aside(others + self._headroom.bytes))
        if model is not None:
            kept = self.core.bytes + (0 if self._disk is None else self._disk.owned_bytes)
            over = excess(device, kept, model)
            self._release(self.core.relieve(over) if over else ())

    def missed(self, nbytes: int) -> None:
        """The device had no room for a state of so many bytes."""
        # Nobody makes way for one that would not fit into all of it.
        room = nbytes if nbytes <= self._budget else 0
        self._headroom.missed(room)
        self._release(self.core.make_room(room, missed=True))

    def expect(self, tokens: int, model: ModelInfo) -> None:
        """A row is let in: what a large one is going to leave does not fit just so."""
        coming = kept_bytes(model, tokens)
        if self._headroom.bytes < coming <= self._budget:
            self._release(self.core.make_room(coming))

    def expect_restores(self) -> None:
        """Have room for what is on its way back from the disk."""
        if self._disk is not None:
            self._release(self.core.make_room(self._disk.held_bytes))

    def _pass(self, candidate: Candidate, origin: Origin) -> None:
        """Let go of what a row kept on the way before: it serves nobody but that row."""
        before = self._passing.pop(origin.row, None)
        if before is not None and not origin.unheard:
            self._release(self.core.drop(before))
        if origin.runs and not candidate.cuttable:
            self._passing[origin.row] = candidate.snapshot
        while len(self._passing) > MAX_PASSING:
            self._passing.popitem(last=False)

    def _release(self, snapshots: tuple[SnapshotId, ...]) -> None:
        if not snapshots:
            return
        self._held.difference_update(snapshots)
        if self._disk is not None:
            self._disk.let_go(snapshots)
        else:
            self._gpu.post(Release(snapshots))
