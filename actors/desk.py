"""What stays of the SSD tier when its actor is restarted, and where the front door asks.

Owns the disk, the mailbox, the counters and the hour's write budget; lives on trio's thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from mlx_troupe.runtime.budgets import cache_bytes, kept_bytes
from mlx_troupe.runtime.plans import SnapshotId
from mlx_troupe.runtime.prefix.entries import namespace_of
from mlx_troupe.runtime.settings import Settings
from mlx_troupe.runtime.spill.budget import WriteBudget
from mlx_troupe.runtime.spill.index import Neighbours
from mlx_troupe.runtime.spill.queue import SaveQueue

from .device_messages import GpuCommand
from .disk import Disk, DiskStats
from .gpu import GpuView
from .mailbox import Mailbox
from .messages import CacheMessage, SpillMessage
from .spill import QUEUE_BYTES, SpillActor
from .supervisor import Child
from .tier import SsdTier

RESTARTS = 50
"""Crashes within a minute that end the runtime: each has thrown away what may have caused it."""


class SpillDesk:
    """The SSD tier of one runtime; there is none without a disk, or without states in memory."""

    def __init__(
        self,
        settings: Settings,
        disk: Disk | None,
        view: GpuView,
        new_snapshot: Callable[[], SnapshotId],
        cache: Mailbox[CacheMessage],
    ) -> None:
        self._disk = disk if cache_bytes(settings) else None
        self._cache = cache
        self._view = view
        self._new_snapshot = new_snapshot
        self._memory = cache_bytes(settings)
        self._demote_after = settings.ssd_demote_idle
        self._budget = WriteBudget(settings.ssd_write_budget_bytes)
        self._counts: Counter[str] = Counter()
        # Unbounded: states that wait are bounded in bytes by the queue behind it, and each is in
        # here as one offer and one release.
        self._mailbox = Mailbox[SpillMessage]()
        # Whether requests need not wait for the folder to be read.
        self.is_ready = self._disk is None
        self._queue = self._new_queue()

    @property
    def is_there(self) -> bool:
        """Whether states go to a disk at all."""
        return self._disk is not None

    def children(self, gpu: Mailbox[GpuCommand]) -> tuple[Child, ...]:
        """The actor, for the supervisor."""
        disk = self._disk
        if disk is None:
            return ()
        return (Child("spill", lambda: self._build(disk, gpu), restarts=RESTARTS),)

    def _build(self, disk: Disk, gpu: Mailbox[GpuCommand]) -> SpillActor:
        """A new incarnation of the actor, with an empty queue."""
        self._queue = self._new_queue()
        return SpillActor(
            self._mailbox,
            disk,
            self._queue,
            gpu=gpu,
            cache=self._cache,
            view=self._view,
            new_snapshot=self._new_snapshot,
            counts=self._counts,
            ready=self._be_ready,
        )

    def _be_ready(self) -> None:
        if not self.is_ready:
            self.is_ready = True
            self._view.bell.ring()

    def tier(self) -> SsdTier | None:
        """The memory tier's side, for a new incarnation of the prefix cache."""
        if self._disk is None:
            return None
        return SsdTier(
            self._disk,
            spill=self._mailbox,
            queue=lambda: self._queue,
            budget=self._memory,
            demote_after=self._demote_after,
            counts=self._counts,
        )

    def nearest(self, ids: tuple[int, ...], adapters: tuple[str, ...]) -> Neighbours:
        """What on the disk shares most of ``ids``, for a request with these adapters."""
        model = self._view.model
        if self._disk is None or model is None:
            return Neighbours()
        return self._disk.nearest(ids, namespace_of(model.namespace, adapters))

    def fits(self, tokens: int) -> bool:
        """Whether memory could keep a state of so many tokens."""
        model = self._view.model
        return model is None or kept_bytes(model, tokens) <= self._memory

    def figures(self, answers: Mapping[str, int]) -> dict[str, object]:
        """``/stats.ssd_cache``, if there is one: bytes, counts since the start, milliseconds.

        ``answers``: the figures of interrupted answers, which wait and fail in the same folder;
        handed on as ``/stats.checkpoints``.
        """
        if self._disk is None:
            return {"checkpoints": answers}
        model = self._view.model
        usable = 0 if model is None else self._disk.count(model.namespace)
        told = self._stats(self._disk.stats(), usable, answers)
        return {"ssd_cache": told, "checkpoints": answers}

    def _stats(self, disk: DiskStats, usable: int, answers: Mapping[str, int]) -> dict[str, object]:
        counts, queue = self._counts, self._queue
        return {
            "dir": disk.folder,
            "entries": disk.entries,
            "usable_entries": usable,
            "bytes": disk.bytes,
            "max_bytes": disk.max_bytes,
            "evictions": disk.evictions,
            "quarantined": disk.quarantined,
            "restores": counts["restores"],
            "crowded_restores": counts["crowded"],
            "restore_ms_last": round(counts["restore_us_last"] / 1000, 3),
            "spills": counts["written"],
            "bytes_written": counts["bytes_written"],
            "write_budget_bytes": self._budget.bytes_per_hour,
            "demotions": counts["demotions"],
            "pending_snapshots": queue.on_device,
            "pending_spills": len(queue) + answers["pending"],
            "pending_spill_bytes": queue.bytes,
            "held_for_spill_bytes": queue.owned_bytes,
            "copied_for_spill_bytes": queue.copied_bytes,
            "dropped_spills": counts["dropped"],
            "over_budget_spills": counts["over_budget"] + counts["postponed"],
            "superseded_spills": counts["superseded"],
            "failed_spills": counts["failed"] + answers["failed"],
            "faults": counts["faults"] + counts["refused"] + disk.unheard,
            "longest_durable_prefix_tokens": disk.longest_tokens,
        }

    def _new_queue(self) -> SaveQueue:
        # States in up to an eighth of the memory tier stay until they are written, though it has
        # given them up; its entries have that much less.
        return SaveQueue(QUEUE_BYTES, self._memory // 8, self._budget, self._counts)
