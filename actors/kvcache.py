"""The prefix cache actor: which prompt prefixes have a kept state, and what it costs.

One task on trio's thread around :class:`PrefixCore`. It knows ids, sizes and leases; the states
themselves stay on the device under their snapshot ids, which it tells the GPU to release.
"""

from __future__ import annotations

from typing import assert_never

from mlx_troupe.runtime.device import ModelInfo, SnapshotId
from mlx_troupe.runtime.errors import Unavailable
from mlx_troupe.runtime.prefix.entries import namespace_of
from mlx_troupe.runtime.prefix.index import PrefixCore

from .gpu import GpuView
from .mailbox import Mailbox
from .messages import (
    CacheLost,
    CacheMessage,
    Clear,
    DeviceLost,
    DeviceReady,
    EndAllLeases,
    EndLease,
    Found,
    GpuCommand,
    Lookup,
    Put,
    Release,
    SchedulerMessage,
)


class KVCacheActor:
    """Owns the prefix index of the memory tier.

    Args:
        mailbox: a full one makes a lookup a miss and drops a put (its sender releases the state).
            Leases are returned through room that those two may not use.
        max_leases: states lent at once; beyond it a lookup is a miss, which bounds that room.
    """

    def __init__(
        self,
        mailbox: Mailbox[CacheMessage],
        core: PrefixCore,
        *,
        scheduler: Mailbox[SchedulerMessage],
        gpu: Mailbox[GpuCommand],
        view: GpuView,
        max_leases: int,
    ) -> None:
        self.core = core
        self._max_leases = max_leases
        self._budget = core.stats().budget_bytes
        self._mailbox = mailbox
        self._scheduler = scheduler
        self._gpu = gpu
        self._model: ModelInfo | None = view.model
        self._in_hand: CacheMessage | None = None
        # Every state that was put and not yet released, whatever a torn index may say of it.
        self._held: set[SnapshotId] = set()

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            message = await self._mailbox.receive()
            self._in_hand = message
            self._take(message)
            self._in_hand = None

    def abandon(self, reason: str) -> None:
        """Lookups in hand are misses; the states of the lost index are given back."""
        left = [] if self._in_hand is None else [self._in_hand]
        for message in (*left, *self._mailbox.drain()):
            match message:
                case Lookup(row):
                    self._scheduler.post(Found(row, None))
                case Put(snapshot):
                    self._gpu.post(Release((snapshot,)))
                case Clear(reply):
                    reply.fail(Unavailable(reason))
                case EndLease() | EndAllLeases() | DeviceReady() | DeviceLost():
                    pass
                case _:
                    assert_never(message)
        self._scheduler.post(CacheLost(tuple(self._held)))

    def _take(self, message: CacheMessage) -> None:
        match message:
            case Lookup():
                self._look_up(message)
            case Put():
                self._put(message)
            case EndLease(lease):
                self._release(self.core.end_lease(lease))
            case EndAllLeases():
                self._release(self.core.end_all_leases())
            case Clear(reply):
                entries = len(self.core)
                self._release(self.core.clear())
                reply.set(entries)
            case DeviceReady(model):
                self._model = model
            case DeviceLost():
                self._model = None
                self._held.clear()
                self.core = PrefixCore(self._budget)
            case _:
                assert_never(message)

    def _look_up(self, message: Lookup) -> None:
        model = self._model
        hit = None
        if model is not None and self.core.leases < self._max_leases:
            namespace = namespace_of(model.namespace, message.adapters)
            hit = self.core.lookup(
                message.ids,
                namespace,
                trim_window=model.trim_window,
                trim_floor=model.trim_floor,
            )
        self._scheduler.post(Found(message.row, hit))

    def _put(self, message: Put) -> None:
        model = self._model
        if model is None:
            return
        self._held.add(message.snapshot)
        result = self.core.put(
            message.ids,
            namespace_of(model.namespace, message.adapters),
            message.snapshot,
            message.nbytes,
            kind=message.kind,
            trim_window=model.trim_window,
        )
        self._release(result.release)

    def _release(self, snapshots: tuple[SnapshotId, ...]) -> None:
        if snapshots:
            self._held.difference_update(snapshots)
            self._gpu.post(Release(snapshots))
