"""Kept states on their way to the disk.

Part of the ``Spill`` actor, in several tasks on trio's thread. A state leaves the device in slices
between steps and is written on a thread. What is asked for (``restores.py``) goes first, and while
rows run there are pauses; the states of these rows wait for neither.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import trio

from mlx_troupe.runtime.errors import StateRefused, Unavailable
from mlx_troupe.runtime.spill.candidates import Candidate
from mlx_troupe.runtime.spill.faults import SpillFault, TooLarge, Unfit
from mlx_troupe.runtime.spill.queue import SaveQueue
from mlx_troupe.runtime.spill.state import HostLayer, HostState, nbytes

from .device_messages import Export, GpuCommand, Release
from .disk import Disk
from .gpu import GpuView
from .mailbox import Mailbox
from .reply import Bell, Reply
from .restores import Restores
from .telling import Complaints

SLICE_BYTES = 8 << 20
"""How much of a state leaves the device at a time, in whole layers."""
ALL_LAYERS = 1 << 20
BUSY_EXPORT_RATE = 256 << 20
"""Bytes a second that leave the device while rows run, so that copies cost steps a few per cent."""
BUSY_REST = 4.0
"""While rows run, the pause after a write, in units of its own time: on a machine without cores to
spare, a writer that never rests would take its share from the steps."""


class Saves:
    """Writes the states of a queue.

    Args:
        restores: these go before all but the states of rows that run.
        bell: rings for it when something has changed, and by it when a state is dealt with.
        is_hurried: whether somebody waits for the queue to be empty.
    """

    def __init__(
        self,
        queue: SaveQueue,
        disk: Disk,
        restores: Restores,
        *,
        gpu: Mailbox[GpuCommand],
        view: GpuView,
        bell: Bell,
        complaints: Complaints,
        is_hurried: Callable[[], bool],
    ) -> None:
        self._queue = queue
        self._disk = disk
        self._restores = restores
        self._gpu = gpu
        self._view = view
        self._bell = bell
        self._complaints = complaints
        self._is_hurried = is_hurried

    async def run(self, *, urgent: bool) -> None:
        """Write one state after the other until cancelled: those of rows that run, or the others.

        The former get no rests: the rows' own pace is one.
        """
        while True:
            waits = self._restores.is_busy and not urgent
            candidate = None if waits else self._next(urgent=urgent)
            if candidate is None:
                await self._bell.wait()
                continue
            seconds = await self._save(candidate)
            self.release()
            self._bell.ring()
            if not urgent:
                await self._rest(BUSY_REST * seconds)

    def release(self) -> None:
        """Tell the device of states that nobody needs any more."""
        freed = self._queue.take_freed()
        if freed:
            self._gpu.post(Release(freed))

    def _next(self, *, urgent: bool) -> Candidate | None:
        before = len(self._queue)
        candidate = self._queue.take(trio.current_time(), urgent=urgent)
        self.release()
        if len(self._queue) != before:
            # Some were given up, and a flush may have waited for nothing else.
            self._bell.ring()
        return candidate

    async def _save(self, candidate: Candidate, *, whole: bool = False) -> float:
        """Write a state, or learn why not; how many seconds the disk took.

        ``whole``: it is not to continue what is on the disk.
        """
        if self._disk.holds(candidate):
            self._queue.needless(candidate)
            return 0.0
        try:
            state = await self._export(candidate, whole)
        except (StateRefused, Unavailable) as error:
            # It was released by somebody's crash, lost with its device, or has no form as bytes.
            self._complaints.warn("export", f"a kept state cannot be exported: {error.message}")
            self._queue.failed(candidate)
            return 0.0
        self._queue.exported(candidate)
        self.release()
        await self._after_restores(candidate)
        began = trio.current_time()
        if not self._queue.may_write(candidate, _file_bytes(state), began):
            return 0.0
        try:
            written = await self._write(candidate, state)
        except SpillFault as fault:
            if isinstance(fault, Unfit) and state.first:
                # Its form has changed (a row's keys are encoded from some length on), or what it
                # was to continue is gone.
                return await self._save(candidate, whole=True)
            self._complaints.fault(fault)
            if isinstance(fault, TooLarge):
                self._queue.unfitting(candidate)
            else:
                self._queue.failed(candidate)
        else:
            self._complaints.forget()
            self._queue.written(candidate, written, trio.current_time())
        return trio.current_time() - began

    async def _write(self, candidate: Candidate, state: HostState) -> int:
        session = self._queue.session_of(candidate)
        written = await self._disk.save(replace(candidate, session=session), state)
        if session is not None and self._queue.session_of(candidate) is None:
            # Its chat was closed meanwhile.
            self._disk.close_session(session)
            await self._disk.note_closed()
        return written

    async def _export(self, candidate: Candidate, whole: bool) -> HostState:
        layers: list[HostLayer] = []
        model = self._view.model
        self._queue.copies = model is None or model.launches_ahead
        goes_on = candidate.is_urgent and not whole
        since = self._disk.continued(candidate) if goes_on else 0
        length = len(candidate.ids)
        self._queue.copying(candidate, candidate.nbytes * (length - since) // length)
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
                self._queue.copying(candidate, nbytes(state))
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
            if self._is_hurried() or self._queue.is_pressed or not self._view.stats.rows:
                return
            with trio.move_on_at(until):
                await self._bell.wait()


def _file_bytes(state: HostState) -> int:
    """At most what a file of a state takes: its arrays, its ids, and what is said of each array."""
    return nbytes(state) + 8 * state.length + 1024 * (1 + len(state.layers))
