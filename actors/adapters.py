"""The adapters actor: what is mounted under which id, and the order in which that changes.

One task on trio's thread around :class:`AdapterTable`, one mount or unmount at a time. The weights
stay on the device, which it tells what to mount and what to forget. It waits for the device's
answers; running rows do not: a mount happens between two of their steps, and a revision that was
replaced or unmounted is freed with the last row that started with it.

Order is what keeps rows right. An id stands for a new revision only after the device has mounted
it, and the device is told to unmount the old one only after no id stands for it any more. Whoever
plans a row reads the table and posts the plan to the device without waiting in between, so a plan
never names a revision that was unmounted before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import assert_never

import trio

from mlx_troupe.runtime.adapter_fit import fit
from mlx_troupe.runtime.adapter_table import AdapterTable, mountings
from mlx_troupe.runtime.adapters import AdapterDescription, AdapterInfo
from mlx_troupe.runtime.errors import AdapterError, Overloaded, TroupeError, Unavailable

from .device_messages import GpuCommand, Mount, Unmount
from .gpu import GpuView
from .mailbox import Mailbox
from .messages import AdapterMessage, MountAdapter, UnmountAdapter
from .reply import Reply

ASKS = 16
"""Mounts and unmounts that may wait for their turn."""


class AdaptersActor:
    """Mounts and unmounts.

    Args:
        mailbox: a full one refuses the client with 429.
        table: outlives the actor, so that a crash forgets nothing. Only the actor changes it.
    """

    def __init__(
        self, mailbox: Mailbox[AdapterMessage], table: AdapterTable, *, gpu: Mailbox[GpuCommand]
    ) -> None:
        self._mailbox = mailbox
        self._table = table
        self._gpu = gpu
        self._in_hand: AdapterMessage | None = None
        # Mounted by the device and not in the table yet.
        self._arrived: AdapterInfo | None = None

    async def run(self) -> None:
        """Serve until cancelled."""
        await self._unmount_retired()
        while True:
            self._in_hand = await self._mailbox.receive()
            match self._in_hand:
                case MountAdapter():
                    await self._mount(self._in_hand)
                case UnmountAdapter():
                    await self._unmount(self._in_hand)
                case _:
                    assert_never(self._in_hand)
            self._in_hand = None

    def abandon(self, reason: str) -> None:
        """Everyone who asked is answered; what nobody can select is left to the next one."""
        left = [] if self._in_hand is None else [self._in_hand]
        for message in (*left, *self._mailbox.drain()):
            message.reply.fail(Unavailable(reason))
        if self._arrived is not None:
            self._table.retire(self._arrived.revision)

    async def _mount(self, message: MountAdapter) -> None:
        reply: Reply[AdapterInfo] = Reply()
        try:
            self._table.check_room(message.adapter)
            self._gpu.post(Mount(message.adapter, message.path, reply))
            self._arrived = await reply.wait()
        except TroupeError as error:
            message.reply.fail(error)
            return
        self._table.put(self._arrived)
        message.reply.set(self._arrived)
        self._arrived = None
        await self._unmount_retired()

    async def _unmount(self, message: UnmountAdapter) -> None:
        try:
            info = self._table.remove(message.adapter)
        except AdapterError as error:
            message.reply.fail(error)
            return
        await self._unmount_retired()
        message.reply.set(info.mounted_layers)

    async def _unmount_retired(self) -> None:
        for revision in self._table.retired:
            reply: Reply[int] = Reply()
            self._gpu.post(Unmount(revision, reply))
            try:
                await reply.wait()
            except Unavailable:
                # The device is lost, and every revision with it.
                return
            self._table.freed(revision)


class AdapterDesk:
    """What stays when the actor is restarted, and where the front door asks.

    Args:
        at_start: folders that the first load mounts under their own names.
        view: what the device says of itself.

    Raises:
        AdapterError: a folder whose name is no id, or two of the same name.
    """

    def __init__(self, at_start: Sequence[Path], view: GpuView) -> None:
        self._view = view
        # Full: the client is refused with 429.
        self._mailbox = Mailbox[AdapterMessage](ASKS)
        self.table = AdapterTable(mountings(at_start), view.loaded)

    def build(self, gpu: Mailbox[GpuCommand]) -> AdaptersActor:
        """A new incarnation of the actor."""
        return AdaptersActor(self._mailbox, self.table, gpu=gpu)

    @property
    def mounted(self) -> tuple[AdapterInfo, ...]:
        """Everything that requests may name."""
        return tuple(self.table.mounted.values())

    def check(self, adapter: AdapterDescription) -> None:
        """Raise AdapterError for an adapter that the loaded model cannot take."""
        fit(adapter, {target.name: target for target in self._view.adapter_targets})

    async def mount(self, adapter_id: str, folder: Path) -> AdapterInfo:
        """Ask the actor. Raises AdapterError, Overloaded or Unavailable."""
        reply: Reply[AdapterInfo] = Reply()
        self._post(MountAdapter(adapter_id, folder, reply))
        return await reply.wait()

    async def unmount(self, adapter_id: str) -> int:
        """Ask the actor. Raises AdapterError, Overloaded or Unavailable."""
        reply: Reply[int] = Reply()
        self._post(UnmountAdapter(adapter_id, reply))
        return await reply.wait()

    def _post(self, message: AdapterMessage) -> None:
        try:
            self._mailbox.post(message)
        except trio.WouldBlock:
            raise Overloaded("too many adapters wait to be mounted", retry_after=1.0) from None
