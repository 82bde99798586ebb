"""The scheduler actor: a thin loop around :class:`SchedulerCore`.

One task on trio's thread. It takes messages, lets the core decide, performs what the core returns
and keeps one step running and one queued on the GPU. It never awaits anything but its mailbox.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from typing import assert_never

import trio

from mlx_troupe.runtime.errors import Overloaded, RequestError, Unavailable
from mlx_troupe.runtime.plans import RowId, SnapshotId, SnapshotMade, StepDone
from mlx_troupe.runtime.scheduling.core import SchedulerCore
from mlx_troupe.runtime.scheduling.effects import (
    Discard,
    Effect,
    LookUp,
    Missed,
    QueueFull,
    ReturnLease,
    RowBroken,
    RowEnded,
    RowEvent,
    RowSpec,
    Started,
    Store,
    TokenMade,
)

from .device_messages import DropRows, GpuCommand, Launch, Release, Settle
from .gate import Gate
from .gpu import GpuView
from .mailbox import Mailbox
from .messages import (
    CacheLost,
    CacheMessage,
    Cancel,
    DeviceLost,
    DeviceReady,
    EndAllLeases,
    Found,
    SchedulerMessage,
    StepSettled,
    Submit,
)
from .reply import Bell
from .spill_messages import Prefetch

log = logging.getLogger(__name__)

COPY_STEPS = 4
"""Steps after which the state of a row that has ended is copied: two under way when it ends, one
that was planned meanwhile, and its own."""


class SchedulerActor:
    """Owns every row from its submission to its last event.

    Args:
        mailbox: its bound leaves room for the submit and the cancel of every place in ``gate``,
            for step results and for cache answers, so it is never full.
        gate: a place is given back here, when its cancel has been taken.
        cache_spare: room in the cache's mailbox that only returned leases may use.
        prefetches: the cache is told of requests that wait, since it may have to read for them.
    """

    def __init__(
        self,
        mailbox: Mailbox[SchedulerMessage],
        core: SchedulerCore,
        *,
        gpu: Mailbox[GpuCommand],
        cache: Mailbox[CacheMessage],
        view: GpuView,
        gate: Gate,
        cache_spare: int,
        prefetches: bool = False,
    ) -> None:
        self.core = core
        self._mailbox = mailbox
        self._gpu = gpu
        self._cache = cache
        self._view = view
        self._gate = gate
        self._cache_spare = cache_spare
        self._prefetches = prefetches
        self._moved = Bell()
        self._events: dict[RowId, trio.MemorySendChannel[RowEvent]] = {}
        self._settling = False
        self._in_hand: SchedulerMessage | None = None
        # States that the device has made and that nobody has been told of yet.
        self._made: set[SnapshotId] = set()

    async def run(self) -> None:
        """Serve until cancelled. A new incarnation first clears what an old one left behind."""
        self._gpu.post(DropRows())
        self._cache.post(EndAllLeases())
        if self._view.model is not None:
            self._perform(self.core.ready(self._view.model))
        while True:
            self._take(await self._mailbox.receive())
            for message in self._mailbox.drain():
                self._take(message)
            self._pump()
            self._moved.ring()

    async def copied(self) -> None:
        """Wait until the cache was offered the states of all rows that have ended by now."""
        before = self.core.stats().steps
        while (now := self.core.stats()).steps < before + COPY_STEPS:
            if not now.ending_rows and not self.core.in_flight:
                return
            await self._moved.wait()

    def abandon(self, reason: str) -> None:
        """Fail every row in hand and every submission not yet taken."""
        for row_id in tuple(self._events):
            with suppress(trio.BrokenResourceError):
                self._events[row_id].send_nowait(RowBroken(row_id, reason))
            self._forget(row_id)
        left = [] if self._in_hand is None else [self._in_hand]
        for message in (*left, *self._mailbox.drain()):
            match message:
                case Submit():
                    message.reply.fail(Unavailable(reason))
                    message.events.close()
                case CacheLost(snapshots):
                    self._gpu.post(Release(snapshots))
                case Cancel():
                    self._gate.leave()
                case StepSettled(done):
                    if message is not self._in_hand:
                        self._made.update(_made_by(done))
                case DeviceReady() | DeviceLost() | Found():
                    # The next incarnation reads the device's state from the view, and the old
                    # one's lookups and rows end with it.
                    pass
                case _:
                    assert_never(message)
        if self._made:
            self._gpu.post(Release(tuple(self._made)))

    def _take(self, message: SchedulerMessage) -> None:
        self._in_hand = message
        match message:
            case Submit():
                self._submit(message)
            case Cancel(row, served):
                self._forget(row)
                self._perform(self.core.cancel(row, served=served))
                self._gate.leave()
            case Found(row, hit):
                self._perform(self.core.found(row, hit))
            case StepSettled(done):
                self._settling = False
                self._made.update(_made_by(done))
                self._perform(self.core.settled(done))
            case DeviceReady(model):
                self._perform(self.core.ready(model))
            case DeviceLost(reason):
                self._settling = False
                self._perform(self.core.device_lost(reason))
            case CacheLost(snapshots):
                self.core.cache_lost()
                self._gpu.post(Release(snapshots))
            case _:
                assert_never(message)
        self._in_hand = None

    def _submit(self, message: Submit) -> None:
        result = self.core.submit(message.spec)
        if isinstance(result, QueueFull):
            message.events.close()
            message.reply.fail(
                Overloaded(
                    f"{result.waiting} requests are waiting already; try again later",
                    retry_after=result.retry_after,
                )
            )
            return
        self._events[message.spec.row] = message.events
        message.reply.set(None)
        self._perform(result)
        if self._prefetches:
            self._prefetch(message.spec)

    def _pump(self) -> None:
        self._perform(self.core.reselect())
        while (planned := self.core.plan()) is not None:
            plan, effects = planned
            self._gpu.post(Launch(plan))
            self._perform(effects)
        if self.core.in_flight == 1 and not self._settling:
            self._settling = True
            self._gpu.post(Settle())

    def _perform(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            match effect:
                case Started() | TokenMade() | RowEnded() | RowBroken():
                    self._send(effect)
                case LookUp():
                    self._look_up(effect)
                case Store():
                    self._store(effect)
                case ReturnLease():
                    self._cache.post(effect)
                case Missed():
                    with suppress(trio.WouldBlock):
                        self._cache.post(effect, spare=self._cache_spare)
                case Discard(snapshot):
                    self._made.discard(snapshot)
                    self._gpu.post(Release((snapshot,)))
                case _:
                    assert_never(effect)

    def _store(self, offer: Store) -> None:
        self._made.discard(offer.snapshot)
        try:
            self._cache.post(offer, spare=self._cache_spare)
        except trio.WouldBlock:
            self._gpu.post(Release((offer.snapshot,)))

    def _prefetch(self, spec: RowSpec) -> None:
        """Only a hint: which adapters the row will have is decided when it leaves the queue."""
        with suppress(RequestError, trio.WouldBlock):
            revisions = self.core.resolve(spec.adapters)
            self._cache.post(Prefetch(spec.prompt, revisions), spare=self._cache_spare)

    def _look_up(self, lookup: LookUp) -> None:
        try:
            self._cache.post(lookup, spare=self._cache_spare)
        except trio.WouldBlock:
            self._perform(self.core.found(lookup.row, None))

    def _send(self, event: RowEvent) -> None:
        channel = self._events.get(event.row)
        if channel is None:
            return
        try:
            channel.send_nowait(event)
        except trio.BrokenResourceError:
            # The reader closed its end: that is how a request is cancelled.
            self._forget(event.row)
            self._perform(self.core.cancel(event.row))
            return
        if isinstance(event, RowEnded | RowBroken):
            self._forget(event.row)

    def _forget(self, row: RowId) -> None:
        channel = self._events.pop(row, None)
        if channel is not None:
            channel.close()


def _made_by(done: StepDone) -> Iterator[SnapshotId]:
    return (kept.snapshot for kept in done.kept if isinstance(kept, SnapshotMade))
