"""The prefix cache actor: which prompt prefixes have a kept state, and what it costs.

One task on trio's thread. It takes messages and answers them; what is kept is decided by its
``MemoryTier`` and, where there is a disk, its ``SsdTier``. It owns who waits for a restore, and
knows ids, sizes and leases: the states themselves stay on the device under their snapshot ids.
"""

from __future__ import annotations

import math
from typing import assert_never

import trio

from mlx_troupe.runtime.errors import Unavailable
from mlx_troupe.runtime.model_info import ModelInfo
from mlx_troupe.runtime.prefix.entries import Hit, namespace_of
from mlx_troupe.runtime.prefix.explain import Explanation
from mlx_troupe.runtime.prefix.index import PrefixCore
from mlx_troupe.runtime.scheduling.effects import LookUp, Missed, ReturnLease, Store
from mlx_troupe.runtime.spill.candidates import Candidate

from .device_messages import GpuCommand, Release
from .gpu import GpuView
from .mailbox import Mailbox
from .memory_tier import MemoryTier
from .messages import (
    CacheLost,
    CacheMessage,
    Clear,
    CloseSession,
    DeviceLost,
    DeviceReady,
    EndAllLeases,
    Explain,
    Found,
    Pressed,
    SchedulerMessage,
)
from .spill_messages import Flush, Prefetch, Restored
from .tier import SsdTier, Waiting


class KVCacheActor:
    """Serves lookups, offers and what ends them, from memory and from the disk behind it.

    Args:
        mailbox: a full one makes a lookup a miss and drops a put (its sender releases the state).
            Leases are returned through room that those two may not use.
        max_leases: states lent at once; beyond it a lookup is a miss, which bounds that room.
        tier: the disk behind the memory tier, if there is one.
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
        tier: SsdTier | None = None,
    ) -> None:
        self._memory = MemoryTier(core, gpu=gpu, disk=tier, max_leases=max_leases)
        self._mailbox = mailbox
        self._scheduler = scheduler
        self._gpu = gpu
        self._tier = tier
        self._view = view
        self._model: ModelInfo | None = view.model
        self._in_hand: CacheMessage | None = None
        # Whose restore has ended, and who have not been answered yet.
        self._waiting: list[Waiting] = []

    @property
    def core(self) -> PrefixCore:
        """The index of the memory tier, for figures; another one after the device was lost."""
        return self._memory.core

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            with trio.move_on_after(self._idle_in()) as quiet:
                message = await self._mailbox.receive()
                self._in_hand = message
                self._take(message)
                self._memory.make_way(self._model, self._view.stats)
                self._in_hand = None
            if quiet.cancelled_caught:
                self._demote()

    def abandon(self, reason: str) -> None:
        """Lookups in hand are misses; the states of the lost index are given back."""
        left = [] if self._in_hand is None else [self._in_hand]
        for message in (*left, *self._mailbox.drain()):
            match message:
                case LookUp(row):
                    self._scheduler.post(Found(row, None))
                case Store(snapshot):
                    self._gpu.post(Release((snapshot,)))
                case Restored(state=restored):
                    if restored is not None:
                        self._gpu.post(Release((restored.snapshot,)))
                case Clear(reply):
                    reply.fail(Unavailable(reason))
                case CloseSession(reply=closed):
                    closed.fail(Unavailable(reason))
                case Explain(reply=explained):
                    explained.set(None)
                case Flush(report):
                    report.fail(Unavailable(reason))
                case ReturnLease() | EndAllLeases() | Missed() | Pressed() | Prefetch():
                    pass
                case DeviceReady() | DeviceLost():
                    pass
                case _:
                    assert_never(message)
        self._answer_waiting()
        self._scheduler.post(CacheLost(self._memory.held))

    def _take(self, message: CacheMessage) -> None:
        match message:
            case LookUp():
                self._look_up(message)
            case Store():
                self._put(message)
            case ReturnLease(lease, taken):
                self._memory.end_lease(lease, taken=taken)
            case EndAllLeases():
                self._memory.end_all_leases()
            case Missed(nbytes):
                self._memory.missed(nbytes)
            case Pressed():
                pass  # it only woke us: see MemoryTier.make_way
            case Clear(reply):
                reply.set(self._memory.clear())
            case CloseSession(session, closed):
                closed.set(self._close_session(session))
            case Explain():
                message.reply.set(self._explain(message))
            case Prefetch():
                self._prefetch(message)
            case Restored():
                self._restored(message)
            case Flush():
                self._flush(message)
            case DeviceReady(model):
                self._model = model
            case DeviceLost():
                self._model = None
                self._memory.device_lost()
                self._answer_waiting()
                if self._tier is not None:
                    self._tier.device_lost(message)
            case _:
                assert_never(message)

    def _look_up(self, message: LookUp) -> None:
        hit = self._find(message)
        model, tier = self._model, self._tier
        if model is not None and tier is not None:
            namespace = namespace_of(model.namespace, message.adapters)
            if tier.fetch(message, namespace, hit, model):
                self._memory.expect_restores()
                return
        self._answer(message, hit)

    def _find(self, message: LookUp) -> Hit | None:
        """The longest usable prefix that memory has, leased."""
        if (model := self._model) is None:
            return None
        namespace = namespace_of(model.namespace, message.adapters)
        return self._memory.find(message.ids, namespace, message.session, model)

    def _explain(self, message: Explain) -> tuple[Explanation, int] | None:
        if (model := self._model) is None:
            return None
        namespace = namespace_of(model.namespace, message.adapters)
        explanation = self._memory.explain(message.ids, namespace, message.session, model)
        on_disk = 0 if self._tier is None else self._tier.usable(message.ids, namespace, model)
        return explanation, on_disk

    def _answer(self, message: LookUp, hit: Hit | None) -> None:
        if self._model is not None:
            self._memory.expect(len(message.ids), self._model)
        if hit is not None and self._tier is not None:
            self._tier.use(hit.snapshot, trio.current_time())
        self._scheduler.post(Found(message.row, hit))

    def _put(self, message: Store) -> None:
        model = self._model
        if model is None:
            return
        candidate = Candidate(
            message.snapshot,
            namespace_of(model.namespace, message.adapters),
            message.ids,
            message.nbytes,
            message.kind,
            model.can_trim(len(message.ids)),
            message.origin,
            message.session,
        )
        self._memory.keep(candidate, model)

    def _close_session(self, session: str) -> bool:
        in_memory = self.core.close_session(session)
        on_disk = self._tier is not None and self._tier.close_session(session)
        return in_memory or on_disk

    # ---- with a disk behind it -----------------------------------------------------------

    def _prefetch(self, message: Prefetch) -> None:
        model, tier = self._model, self._tier
        if model is None or tier is None:
            return
        namespace = namespace_of(model.namespace, message.adapters)
        have = self._memory.peek(message.ids, namespace, model)
        tier.prefetch(message.ids, namespace, have, model)

    def _restored(self, message: Restored) -> None:
        """A restored state is an entry like any other; those who waited ask once more."""
        tier, model, state = self._tier, self._model, message.state
        if tier is not None:
            self._waiting = tier.restored(message.entry, state)
            self._memory.make_way(model, self._view.stats)
        if state is not None and model is not None:
            self._memory.keep(state, model)
        while self._waiting:
            waiting = self._waiting[-1]
            hit = waiting.hit
            if state is not None:
                better = self._find(waiting.lookup)
                if better is not None and hit is not None:
                    self._memory.end_lease(hit.lease)
                hit = better or hit
            self._answer(waiting.lookup, hit)
            self._waiting.pop()

    def _flush(self, message: Flush) -> None:
        if self._tier is None:
            message.reply.fail(Unavailable("there is no SSD cache"))
        else:
            self._tier.flush(message.reply, message.until, trio.current_time())

    def _idle_in(self) -> float:
        return math.inf if self._tier is None else self._tier.idle_in(trio.current_time())

    def _demote(self) -> None:
        if self._tier is not None:
            self._memory.drop(self._tier.idle(trio.current_time()))

    def _answer_waiting(self) -> None:
        """Rows that wait for the disk get nothing: what they had is lost with the index."""
        if self._tier is not None:
            self._waiting += self._tier.lost()
        while self._waiting:
            self._scheduler.post(Found(self._waiting.pop().lookup.row, None))
