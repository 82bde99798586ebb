"""The spill actor: kept states on their way to the disk, and on their way back.

Its tasks run on trio's thread: one takes messages, one brings states back (``restores.py``), some
write. Nobody who computes waits for any of them. A state leaves the device in slices between
steps, and is written on a thread; one that is asked for goes before those that only want to be
safe. What is wrong with the disk is counted and told once, and to everyone else it is a miss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import assert_never

import trio

from mlx_troupe.runtime.device import SnapshotId
from mlx_troupe.runtime.errors import StateRefused, Unavailable
from mlx_troupe.runtime.spill.faults import SpillFault, TooLarge, Unfit
from mlx_troupe.runtime.spill.queue import Candidate, SaveQueue
from mlx_troupe.runtime.spill.state import HostLayer, HostState, nbytes

from .device_messages import Export, GpuCommand, Release
from .disk import Disk
from .gpu import GpuView
from .mailbox import Mailbox
from .messages import CacheMessage, DeviceLost, SpillMessage
from .reply import Bell, Reply
from .restores import Restores
from .spill_messages import FlushDisk, FlushReport, Forget, Restore, Save
from .telling import Complaints

QUEUE_BYTES = 2 << 30
"""Bytes of states that may wait to be written; one more is dropped and counted."""
SLICE_BYTES = 8 << 20
"""How much of a state leaves the device at a time, in whole layers."""
ALL_LAYERS = 1 << 20
BUSY_EXPORT_RATE = 256 << 20
"""Bytes a second that leave the device while rows run, so that copies cost steps a few per cent."""
BUSY_REST = 4.0
"""While rows run, the pause after a write, in units of its own time: on a machine without cores to
spare, a writer that never rests would take its share from the steps."""
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
        self._view = view
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
        # The folder cannot be opened: nothing is written until it is tried again.
        self._is_shut = False

    async def run(self) -> None:
        """Serve until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._listen, nursery)
            nursery.start_soon(self._lose_patience)
            await self._open()
            nursery.start_soon(self._restores.run)
            nursery.start_soon(self._save_all)
            for _ in range(CHECKPOINTS):
                nursery.start_soon(self._save_checkpoints)

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
                case Save() | DeviceLost():
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
                case FlushDisk():
                    self._flushes.append(message)
                    nursery.start_soon(self._flush, message)
                case DeviceLost():
                    self.queue.lost()
                case _:
                    assert_never(message)
            self._release()
            self._bell.ring()

    def _release(self) -> None:
        """Tell the device of states that nobody needs any more."""
        freed = self.queue.take_freed()
        if freed:
            self._gpu.post(Release(freed))

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
                self._ready()
                return
            self._ready()
            self._bell.ring()
            await trio.sleep(REOPEN_AFTER)

    async def _lose_patience(self) -> None:
        await trio.sleep(OPEN_PATIENCE)
        self._ready()

    # ---- to the disk ---------------------------------------------------------------------

    async def _save_all(self) -> None:
        while True:
            candidate = None if self._restores.is_busy else self._next()
            if candidate is None:
                await self._bell.wait()
                continue
            seconds = await self._save(candidate)
            self._release()
            self._bell.ring()
            await self._rest(BUSY_REST * seconds)

    async def _save_checkpoints(self) -> None:
        """Save states of rows that run. No rests: the rows' own pace is one."""
        while True:
            candidate = self._next(urgent=True)
            if candidate is None:
                await self._bell.wait()
                continue
            await self._save(candidate)
            self._release()
            self._bell.ring()

    def _next(self, *, urgent: bool = False) -> Candidate | None:
        before = len(self.queue)
        candidate = self.queue.take(trio.current_time(), urgent=urgent)
        self._release()
        if len(self.queue) != before:
            # Some were given up, and a flush may have waited for nothing else.
            self._bell.ring()
        return candidate

    async def _save(self, candidate: Candidate, *, whole: bool = False) -> float:
        """Write a state, or learn why not; how many seconds the disk took.

        ``whole``: it is not to continue what is on the disk.
        """
        if self._disk.holds(candidate):
            self.queue.needless(candidate)
            return 0.0
        try:
            state = await self._export(candidate, whole)
        except (StateRefused, Unavailable) as error:
            # It was released by somebody's crash, lost with its device, or has no form as bytes.
            self._complaints.warn("export", f"a kept state cannot be exported: {error.message}")
            self.queue.failed(candidate)
            return 0.0
        self.queue.exported(candidate)
        self._release()
        await self._after_restores(candidate)
        began = trio.current_time()
        if not self.queue.may_write(candidate, _file_bytes(state), began):
            return 0.0
        try:
            written = await self._disk.save(candidate, state)
        except SpillFault as fault:
            if isinstance(fault, Unfit) and state.first:
                # Its form has changed (a row's keys are encoded from some length on), or what it
                # was to continue is gone.
                return await self._save(candidate, whole=True)
            self._complaints.fault(fault)
            if isinstance(fault, TooLarge):
                self.queue.unfitting(candidate)
            else:
                self.queue.failed(candidate)
        else:
            self._complaints.forget()
            self.queue.written(candidate, written, trio.current_time())
        return trio.current_time() - began

    async def _export(self, candidate: Candidate, whole: bool) -> HostState:
        layers: list[HostLayer] = []
        model = self._view.model
        self.queue.copies = model is None or model.launches_ahead
        goes_on = candidate.is_urgent and not whole
        since = self._disk.continued(candidate) if goes_on else 0
        length = len(candidate.ids)
        self.queue.copying(candidate, candidate.nbytes * (length - since) // length)
        # A CPU copies nothing to let bytes go, so it need not be asked between many steps; and what
        # a running row has gained is little.
        copies = (model is None or model.launches_ahead) and not since
        count = 1 if copies else ALL_LAYERS
        while True:
            await self._after_restores(candidate)
            reply: Reply[tuple[HostLayer, ...]] = Reply()
            self._gpu.post(Export(candidate.snapshot, len(layers), count, reply, since))
            part = await reply.wait()
            layers += part
            if len(part) < count:
                state = HostState(length, tuple(layers), since)
                self.queue.copying(candidate, nbytes(state))
                return state
            size = sum(len(array.data) for layer in part for array in layer.arrays)
            if not candidate.is_urgent:
                await self._rest(size / BUSY_EXPORT_RATE)
            count = max(1, SLICE_BYTES * count // max(size, 1))

    async def _after_restores(self, candidate: Candidate) -> None:
        while not candidate.is_urgent and self._restores.is_busy:
            await self._bell.wait()

    async def _rest(self, seconds: float) -> None:
        """Leave the machine to the rows that run, unless somebody waits or states would be lost."""
        until = trio.current_time() + seconds
        while trio.current_time() < until:
            if self._flushes or self.queue.is_pressed or not self._view.stats.rows:
                return
            with trio.move_on_at(until):
                await self._bell.wait()

    # ---- all of it -----------------------------------------------------------------------

    async def _flush(self, flush: FlushDisk) -> None:
        began = trio.current_time()
        with trio.move_on_at(flush.until):
            while len(self.queue) and not self._is_shut:
                await self._bell.wait()
        flush.reply.set(self._report(flush, trio.current_time() - began))
        self._flushes.remove(flush)

    def _report(self, flush: FlushDisk, seconds: float) -> FlushReport:
        absent = [each for each in flush.candidates if not self._disk.holds(each)]
        missing = len(absent)
        stats = self._disk.stats()
        # One that was postponed is missing, unless it was written when it was asked for again.
        dropped = self._since_last("dropped", "over_budget")
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
            crowded=sum(self._disk.crowded_out(each) is not None for each in absent),
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


def _file_bytes(state: HostState) -> int:
    """At most what a file of a state takes: its arrays, its ids, and what is said of each array."""
    return nbytes(state) + 8 * state.length + 1024 * (1 + len(state.layers))
