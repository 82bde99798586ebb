"""What the prefix cache knows of the SSD tier: what to fetch, what to save, what to let go.

Part of the ``KVCache`` actor, on its task; it decides and posts, and never waits. The index of the
disk is read where it is; bytes move only through the ``Spill`` actor.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from mlx_troupe.runtime.budgets import kept_bytes
from mlx_troupe.runtime.model_info import ModelInfo
from mlx_troupe.runtime.plans import SnapshotId
from mlx_troupe.runtime.prefix.entries import Hit
from mlx_troupe.runtime.scheduling.effects import LookUp
from mlx_troupe.runtime.spill.candidates import Candidate
from mlx_troupe.runtime.spill.queue import SaveQueue

from .disk import Disk, OnDisk
from .mailbox import Mailbox
from .messages import (
    DeviceLost,
    SpillMessage,
)
from .reply import Reply
from .spill_messages import Closed, FlushDisk, FlushReport, Forget, Restore, Save

RESTORES = 16
"""States that may be on their way back at once; one more is a miss."""
WORTH = 16
"""Reading a token's state costs about a sixteenth of computing it, so a state is fetched only where
at least a sixteenth of its tokens is gained."""


@dataclass(slots=True)
class _Kept:
    """A state in memory, when it was last used, and when it was last offered to the disk."""

    candidate: Candidate
    used: float
    offered: float


@dataclass(frozen=True, slots=True)
class Waiting:
    """A lookup that waits for a state, and what memory has for it."""

    lookup: LookUp
    hit: Hit | None


class SsdTier:
    """The memory tier's side of the disk.

    Args:
        spill: takes anything; see there.
        queue: the states that wait there now, for what they take.
        budget: bytes of the memory tier. A state that is larger is not fetched.
        demote_after: seconds without use after which a state that is safe leaves memory; 0 = never.
        counts: of demotions; outlives the actor.
    """

    def __init__(
        self,
        disk: Disk,
        *,
        spill: Mailbox[SpillMessage],
        queue: Callable[[], SaveQueue],
        budget: int,
        demote_after: float,
        counts: Counter[str],
    ) -> None:
        self._disk = disk
        self._spill = spill
        self._queue = queue
        self._budget = budget
        self._demote_after = demote_after
        self._counts = counts
        # In the order of use, so that the idle ones stand at the front.
        self._kept: OrderedDict[SnapshotId, _Kept] = OrderedDict()
        self._restoring: dict[OnDisk, list[Waiting]] = {}
        self._coming: dict[OnDisk, int] = {}
        # Fetched for requests that have not asked yet, or under way for them.
        self._early: dict[OnDisk, int] = {}
        self._early_kept: dict[SnapshotId, int] = {}

    @property
    def owned_bytes(self) -> int:
        """What states that memory let go of take on the device until they are written."""
        return self._queue().owned_bytes

    @property
    def held_bytes(self) -> int:
        """That, copies of what is being written, and room for states on their way back."""
        return self.owned_bytes + self._queue().copied_bytes + sum(self._coming.values())

    # ---- from the disk -------------------------------------------------------------------

    def fetch(self, lookup: LookUp, namespace: str, hit: Hit | None, model: ModelInfo) -> bool:
        """Whether the disk has more than ``hit`` for a row, which then waits for it."""
        if hit is not None:
            self._early_kept.pop(hit.snapshot, None)
        entry = self._better(lookup.ids, namespace, 0 if hit is None else hit.length, model)
        if entry is None or not self._begin(entry, model):
            return False
        self._early.pop(entry, None)
        self._restoring[entry].append(Waiting(lookup, hit))
        return True

    def prefetch(self, ids: tuple[int, ...], namespace: str, have: int, model: ModelInfo) -> None:
        """Fetch what the disk has for a request that still waits for its turn.

        No more of that than a quarter of the memory tier, and half of the restores at once.
        """
        entry = self._better(ids, namespace, have, model)
        if entry is None or entry in self._restoring or 2 * len(self._restoring) >= RESTORES:
            return
        nbytes = kept_bytes(model, entry.length)
        early = sum(self._early_kept.values()) + sum(self._early.values())
        if early + nbytes <= self._budget // 4 and self._begin(entry, model):
            self._early[entry] = nbytes

    def usable(self, ids: tuple[int, ...], namespace: str, model: ModelInfo) -> int:
        """How many tokens of a prompt the disk could serve."""
        entry = self._find(ids, namespace, model)
        return 0 if entry is None else entry.useful

    def restored(self, entry: OnDisk, state: Candidate | None) -> list[Waiting]:
        """A restore has ended; returns who waited for it."""
        if self._early.pop(entry, None) is not None and state is not None:
            self._early_kept[state.snapshot] = state.nbytes
        self._coming.pop(entry, None)
        return self._restoring.pop(entry, [])

    def _better(
        self, ids: tuple[int, ...], namespace: str, have: int, model: ModelInfo
    ) -> OnDisk | None:
        entry = self._find(ids, namespace, model)
        if entry is None:
            return None
        gain = entry.useful - have
        return entry if gain > 0 and gain * WORTH >= entry.length else None

    def _find(self, ids: tuple[int, ...], namespace: str, model: ModelInfo) -> OnDisk | None:
        entry = self._disk.find(ids, namespace, model.trim_floor)
        # All others would make way for one that memory could not keep.
        fits = entry is not None and kept_bytes(model, entry.length) <= self._budget
        return entry if fits else None

    def _begin(self, entry: OnDisk, model: ModelInfo) -> bool:
        if entry in self._restoring:
            return True
        if len(self._restoring) >= RESTORES:
            return False
        self._restoring[entry] = []
        self._coming[entry] = kept_bytes(model, entry.length)
        self._spill.post(Restore(entry))
        return True

    # ---- to the disk ---------------------------------------------------------------------

    def keep(self, candidate: Candidate, now: float) -> None:
        """Memory keeps a state: the disk had better have it too."""
        self._kept[candidate.snapshot] = _Kept(candidate, now, now)
        if self._disk.crowded_out(candidate) != "too_large":
            self._spill.post(Save(candidate))

    def use(self, snapshot: SnapshotId, now: float) -> None:
        """A state was lent. One that is asked for again is worth another offer."""
        kept = self._kept.get(snapshot)
        if kept is None:
            return
        kept.used = now
        self._kept.move_to_end(snapshot)
        if (
            not self._disk.note_use(kept.candidate)
            and self._disk.crowded_out(kept.candidate) != "too_large"
        ):
            self._offer(kept, now)

    def let_go(self, snapshots: tuple[SnapshotId, ...]) -> None:
        """Memory gives up states; the spill actor says when the device may."""
        for snapshot in snapshots:
            self._kept.pop(snapshot, None)
            self._early_kept.pop(snapshot, None)
        self._spill.post(Forget(snapshots))

    def flush(self, reply: Reply[FlushReport], until: float, now: float) -> None:
        """Offer every state that is not on the disk, and have the reply say how that went.

        One that the disk had no room for is not, until it is used: it would take another's place.
        """
        for kept in self._kept.values():
            if not self._disk.crowded_out(kept.candidate):
                self._offer(kept, now)
        candidates = tuple(kept.candidate for kept in self._kept.values())
        self._spill.post(FlushDisk(reply, candidates, until))

    def close_session(self, session: str) -> bool:
        """Nobody goes on with a chat; False if the disk has nothing of it."""
        for kept in self._kept.values():
            if kept.candidate.session == session:
                kept.candidate = replace(kept.candidate, session=None)
        closed = self._disk.close_session(session)
        self._spill.post(Closed(session))
        return closed

    def idle(self, now: float) -> tuple[SnapshotId, ...]:
        """States that nobody used for long and that are safe, which may leave memory now.

        One that is not safe yet is offered once more, and looked at again after as long a time.
        """
        if not self._demote_after:
            return ()
        gone = []
        for snapshot, kept in self._kept.items():
            if now - kept.used < self._demote_after:
                break
            if self._disk.holds(kept.candidate):
                gone.append(snapshot)
            elif now - kept.offered >= self._demote_after:
                kept.offered = now
                if not self._disk.crowded_out(kept.candidate):
                    self._offer(kept, now)
        self._counts["demotions"] += len(gone)
        return tuple(gone)

    def idle_in(self, now: float) -> float:
        """Seconds until :meth:`idle` is worth another call."""
        if not self._demote_after or not self._kept:
            return float("inf")
        oldest = next(iter(self._kept.values())).used
        # A state that is being written is safe soon: look again well before its next offer.
        return max(oldest + self._demote_after - now, self._demote_after / 8)

    def lost(self) -> list[Waiting]:
        """All states in memory are gone; returns who waited for one more."""
        waiting = [one for all_of_one in self._restoring.values() for one in all_of_one]
        self._restoring = {entry: [] for entry in self._restoring}
        self._kept.clear()
        self._early.clear()
        self._early_kept.clear()
        return waiting

    def device_lost(self, message: DeviceLost) -> None:
        """Nothing that waits to be written can still be had."""
        self._spill.post(message)

    def _offer(self, kept: _Kept, now: float) -> None:
        if not self._disk.holds(kept.candidate):
            kept.offered = now
            self._spill.post(Save(kept.candidate))
