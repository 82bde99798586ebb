"""The permanent actors of one runtime: their mailboxes, what each is built of, who restarts them.

Everything runs on trio's thread but for the device's own. Mailboxes, desks and the view of the
device outlive the actors, which the supervisor builds anew after a crash.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count

import trio

from mlx_troupe.runtime.budgets import budgets, cache_bytes, check_limits
from mlx_troupe.runtime.errors import Overloaded
from mlx_troupe.runtime.plans import SnapshotId, StepId
from mlx_troupe.runtime.prefix.index import PrefixCore
from mlx_troupe.runtime.scheduling.core import SchedulerCore
from mlx_troupe.runtime.settings import Settings

from .adapters import AdapterDesk
from .desk import SpillDesk
from .device_messages import GpuCommand
from .disk import Disk
from .explaining import Explainer
from .gate import Bounds, Gate
from .gpu import GpuActor, GpuView
from .kvcache import KVCacheActor
from .mailbox import Mailbox
from .messages import CacheMessage, SchedulerMessage
from .scheduler import SchedulerActor
from .supervisor import Child, Supervisor
from .worker import Worker


class Cast:
    """Who works for a runtime, wired.

    Args:
        disk: of the SSD tier, if there is one.
        lost: told why, when the company cannot go on.
    """

    def __init__(
        self, settings: Settings, worker: Worker, disk: Disk | None, lost: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._worker = worker
        self._snapshots = count(1)
        self._steps = count(0)
        self.bounds = Bounds(settings.batch, settings.queue)
        # Full: a client is refused with 429 before it has an actor.
        self.gate = Gate(self.bounds.places)
        # Never full: the gate bounds submits and cancels, everything else is few.
        self.to_scheduler = Mailbox[SchedulerMessage](self.bounds.scheduler)
        # Full: a lookup counts as a miss, an offer is dropped. Returned leases have spare room.
        self.to_cache = Mailbox[CacheMessage](self.bounds.cache)
        # Full is a crash: two steps and the releases of one cache are all that is ever in it.
        self._to_gpu = Mailbox[GpuCommand](65_536)
        self.view = GpuView()
        self.adapters = AdapterDesk(settings.adapters, self.view)
        self.ssd = SpillDesk(settings, disk, self.view, self._new_snapshot, self.to_cache)
        self.explainer = Explainer(
            self.to_cache, self.bounds.cache_spare, self.adapters.table, self.ssd, self.copied
        )
        # Rebuilt by the supervisor; these two are read for figures before it has started.
        self.scheduler = self._build_scheduler()
        self.cache = self._build_cache()
        self.supervisor = Supervisor(
            (
                Child("gpu", self._build_gpu, restarts=1, window=600.0),
                Child("scheduler", self._build_scheduler),
                Child("kvcache", self._build_cache),
                Child("adapters", lambda: self.adapters.build(self._to_gpu)),
                *self.ssd.children(self._to_gpu),
            ),
            self.view.bell,
            lost,
        )

    def ask_cache(self, message: CacheMessage) -> None:
        """Post to the prefix cache, for a client. Raises Overloaded when it has too much to do."""
        try:
            self.to_cache.post(message, spare=self.bounds.cache_spare)
        except trio.WouldBlock:
            raise Overloaded("the prefix cache is busy", retry_after=1.0) from None

    async def copied(self) -> None:
        """Wait until the cache was offered the states of all rows that have ended by now."""
        await self.scheduler.copied()

    def _build_gpu(self) -> GpuActor:
        return GpuActor(
            self._to_gpu,
            self._worker,
            self.view,
            scheduler=self.to_scheduler,
            cache=self.to_cache,
            step_timeout=self._settings.step_timeout,
            prefill_timeout=self._settings.prefill_timeout,
            mounts=self.adapters.table.wanted,
            check=partial(check_limits, self._settings),
        )

    def _build_scheduler(self) -> SchedulerActor:
        core = SchedulerCore(
            batch=self._settings.batch,
            queue=self._settings.queue,
            cache=cache_bytes(self._settings) > 0,
            new_snapshot=self._new_snapshot,
            new_step=lambda: StepId(next(self._steps)),
            kv_limit=lambda model: budgets(self._settings, model).kv_bytes,
            resolve=self.adapters.table.resolve,
            checkpoint=self._settings.generation_checkpoint,
        )
        self.scheduler = SchedulerActor(
            self.to_scheduler,
            core,
            gpu=self._to_gpu,
            cache=self.to_cache,
            view=self.view,
            gate=self.gate,
            cache_spare=self.bounds.cache_spare,
            prefetches=self.ssd.is_there,
        )
        return self.scheduler

    def _build_cache(self) -> KVCacheActor:
        self.cache = KVCacheActor(
            self.to_cache,
            PrefixCore(cache_bytes(self._settings)),
            scheduler=self.to_scheduler,
            gpu=self._to_gpu,
            view=self.view,
            max_leases=self.bounds.leases,
            tier=self.ssd.tier(),
        )
        return self.cache

    def _new_snapshot(self) -> SnapshotId:
        return SnapshotId(next(self._snapshots))
