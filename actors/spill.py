"""The spill actor: kept states on their way to the disk, and on their way back.

Its tasks run on trio's thread: one takes messages, one brings states back (``restores.py``), some
write (``saves.py``). Nobody who computes waits for any of them. What is wrong with the disk is
counted and told once, and to everyone else it is a miss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import assert_never

import trio

from mlx_troupe.runtime.errors import Unavailable
from mlx_troupe.runtime.plans import SnapshotId
from mlx_troupe.runtime.spill.budget import HOUR
from mlx_troupe.runtime.spill.faults import SpillFault
from mlx_troupe.runtime.spill.queue import SaveQueue

from .device_messages import GpuCommand, Release
from .disk import Disk
from .gpu import GpuView
from .mailbox import Mailbox
from .messages import CacheMessage, DeviceLost, SpillMessage
from .reply import Bell
from .restores import Restores
from .saves import Saves
from .spill_messages import Closed, FlushDisk, FlushReport, Forget, Restore, Save
from .telling import Complaints

QUEUE_BYTES = 2 << 30
"""Bytes of states that may wait to be written; one more is dropped and counted."""
CHECKPOINTS = 4
"""States of running rows that are saved at once. What is asked for between two steps comes together
so that rows need not wait for one another."""
OPEN_PATIENCE = 10.0
"""Seconds that the first requests wait for the folder to be read; then they do without."""
REOPEN_AFTER = 30.0
"""Seconds until a folder that could not be opened is tried again."""


class SpillActor:
    """Writes states, brings them back, and says when all is safe.

    Args:
        mailbox: unbounded; what is in it is small, and each state is in it at most twice. The
            bound is that of ``queue``, in bytes.
        cache: as of :class:`~.restores.Restores`.
        counts: of restores and faults; outlives the actor.
        ready: called once it makes no sense to wait for the folder any longer.
    """

    def __init__(
        self,
        mailbox: Mailbox[SpillMessage],
        disk: Disk,
        queue: SaveQueue,
        *,
        gpu: Mailbox[GpuCommand],
        cache: Mailbox[CacheMessage],
        view: GpuView,
        new_snapshot: Callable[[], SnapshotId],
        counts: Counter[str],
        ready: Callable[[], None],
    ) -> None:
        self.queue = queue
        self._mailbox = mailbox
        self._disk = disk
        self._gpu = gpu
        self._counts = counts
        self._ready = ready
        self._flushes: list[FlushDisk] = []
        self._bell = Bell()
        self._complaints = Complaints(counts)
        self._restores = Restores(
            disk,
            gpu=gpu,
            cache=cache,
            view=view,
            new_snapshot=new_snapshot,
            counts=counts,
            bell=self._bell,
            complaints=self._complaints,
        )
        self._saves = Saves(
            queue,
            disk,
            self._restores,
            gpu=gpu,
            view=view,
            bell=self._bell,
            complaints=self._complaints,
            is_hurried=lambda: bool(self._flushes),
        )
        # The folder cannot be opened: nothing is written until it is tried again.
        self._is_shut = False
        # Closed chats that the disk is being told of.
        self._noting = 0

    async def run(self) -> None:
        """Serve until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._listen, nursery)
            nursery.start_soon(self._lose_patience)
            await self._open()
            nursery.start_soon(self._restores.run)
            nursery.start_soon(partial(self._saves.run, urgent=False))
            for _ in range(CHECKPOINTS):
                nursery.start_soon(partial(self._saves.run, urgent=True))

    def abandon(self, reason: str) -> None:
        """Saves are lost; whoever waits is answered, and states that only waited are let go."""
        self._ready()
        for message in self._mailbox.drain():
            match message:
                case Forget(snapshots):
                    self.queue.let_go(snapshots)
                case Restore(entry):
                    self._restores.ask(entry)
                case FlushDisk():
                    self._flushes.append(message)
                case Save() | Closed() | DeviceLost():
                    pass
                case _:
                    assert_never(message)
        arrived = self._restores.abandon()
        for flush in self._flushes:
            flush.reply.fail(Unavailable(reason))
        self._counts["dropped"] += len(self.queue)
        left = (*self.queue.take_freed(), *self.queue.owned, *arrived)
        if left:
            self._gpu.post(Release(left))

    # ---- what comes in -------------------------------------------------------------------

    async def _listen(self, nursery: trio.Nursery) -> None:
        while True:
            message = await self._mailbox.receive()
            match message:
                case Save(candidate):
                    if not self._disk.holds(candidate):
                        self.queue.offer(candidate, trio.current_time())
                case Forget(snapshots):
                    self.queue.let_go(snapshots)
                case Restore(entry):
                    self._restores.ask(entry)
                case Closed(session):
                    self.queue.close_session(session)
                    self._noting += 1
                    nursery.start_soon(self._note_closed)
                case FlushDisk():
                    self._flushes.append(message)
                    nursery.start_soon(self._flush, message)
                case DeviceLost():
                    self.queue.lost()
                case _:
                    assert_never(message)
            self._saves.release()
            self._bell.ring()

    async def _note_closed(self) -> None:
        await self._disk.note_closed()
        self._noting -= 1
        self._bell.ring()

    async def _open(self) -> None:
        while True:
            try:
                await self._disk.open()
            except SpillFault as fault:
                self._complaints.fault(
                    fault, f"cannot be used, tried again every {REOPEN_AFTER:g} s: "
                )
                self._is_shut = True
            else:
                self._is_shut = False
                self.queue.budget.remember(self._disk.written(HOUR), trio.current_time())
                self._ready()
                return
            self._ready()
            self._bell.ring()
            await trio.sleep(REOPEN_AFTER)

    async def _lose_patience(self) -> None:
        await trio.sleep(OPEN_PATIENCE)
        self._ready()

    # ---- all of it -----------------------------------------------------------------------

    async def _flush(self, flush: FlushDisk) -> None:
        began = trio.current_time()
        with trio.move_on_at(flush.until):
            while (len(self.queue) or self._noting) and not self._is_shut:
                await self._bell.wait()
        flush.reply.set(self._report(flush, trio.current_time() - began))
        self._flushes.remove(flush)

    def _report(self, flush: FlushDisk, seconds: float) -> FlushReport:
        absent = [each for each in flush.candidates if not self._disk.holds(each)]
        missing = len(absent)
        stats = self._disk.stats()
        # One that was postponed is missing, unless it was written when it was asked for again.
        dropped = self._since_last("dropped", "over_budget")
        crowded = {each.snapshot for each in absent if self._disk.crowded_out(each) is not None}
        # They were given up for it, and are told as what they are now.
        dropped -= len(self.queue.take_unfit() & crowded)
        failed = self._since_last("failed")
        return FlushReport(
            durable=not (missing or len(self.queue) or dropped or failed),
            flushed=len(flush.candidates) - missing,
            missing=missing,
            pending=len(self.queue),
            pending_bytes=self.queue.bytes,
            on_device=self.queue.on_device,
            dropped=dropped,
            failed=failed,
            crowded=len(crowded),
            seconds=seconds,
            entries=stats.entries,
            longest_tokens=stats.longest_tokens,
        )

    def _since_last(self, *names: str) -> int:
        """Counted under these names since the last report."""
        now = sum(self._counts[name] for name in names)
        key = f"reported_{names[0]}"
        before, self._counts[key] = self._counts[key], now
        return now - before
