"""States on their way to the prefix cache, and the rows that had better wait for them.

Part of the scheduler's core. The next turn of a chat arrives within milliseconds of the end of the
last one: its lookup would overtake the copy of the state that serves it. Here a row learns that
such a state is still being copied, or was offered to the cache since it was asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import assert_never

import numpy as np

from ..model_info import ModelInfo
from ..plans import FromSnapshot, SnapshotId, SnapshotMade, SnapshotSkipped
from ..prefix.entries import Hit
from .effects import Discard, LookUp, Missed, ReturnLease, Store
from .planning import PendingKeep
from .rows import MIN_SHARED, Phase, Row, shared_length

RECENT = 64
"""States offered to the cache that are remembered for lookups already on their way."""


class Keeps:
    """Copies under way, copies lately offered, and who waits for which."""

    def __init__(self, *, cache: bool) -> None:
        self._cache = cache
        self._copying: dict[SnapshotId, PendingKeep] = {}
        self._waiting: dict[SnapshotId, list[Row]] = {}
        self._offered: deque[PendingKeep] = deque(maxlen=RECENT)
        self._num_offered = 0

    def begin(self, pending: PendingKeep) -> None:
        """A copy was planned."""
        self._copying[pending.snapshot] = pending

    def clear(self) -> None:
        """The device lost everything."""
        self._copying.clear()
        self._waiting.clear()

    def settle(
        self, kept: SnapshotMade | SnapshotSkipped
    ) -> tuple[Store | Discard | Missed | LookUp, ...]:
        """A copy is made or not: what becomes of it, and of the rows that waited for it."""
        placed = tuple(self._place(kept, self._copying.pop(kept.snapshot, None)))
        waiting = self._waiting.pop(kept.snapshot, [])
        # After the state was offered, so that the cache answers with it.
        asking = [r for r in waiting if r.phase is Phase.LOOKING and not r.cancelled]
        return (*placed, *map(self.ask, asking))

    def ask(self, row: Row) -> LookUp:
        """The row's question to the cache, marked with what the cache knows by now."""
        row.asked_at = self._num_offered
        row.asking += 1
        return LookUp(row.id, row.start_ids, row.adapters, row.spec.session)

    def look_up(self, row: Row) -> tuple[LookUp, ...]:
        """The first question for a row that left the queue; without a cache it is ready at once."""
        if self._cache and len(row.ids) > 1:
            return (self.ask(row),)
        row.move(Phase.READY)
        return ()

    def answered(
        self, row: Row, hit: Hit | None, model: ModelInfo | None
    ) -> tuple[LookUp | ReturnLease, ...]:
        """The cache's answer (None: a miss, or it came too late); the row is ready, or asks again.

        An answer to a question before the last one is not for it: its states may be gone.
        """
        back = () if hit is None else (ReturnLease(hit.lease),)
        row.asking = max(0, row.asking - 1)
        if row.asking or row.phase is not Phase.LOOKING or model is None:
            return back
        again = self.ask_again(row, 0 if hit is None else hit.length, model)
        if again is not None:
            return (*again, *back)
        row.move(Phase.READY)
        if hit is not None:
            row.hit = FromSnapshot(hit.snapshot, hit.length)
            row.lease = hit.lease
        return ()

    def ask_again(self, row: Row, length: int, model: ModelInfo) -> tuple[LookUp, ...] | None:
        """Whether a state unknown to the cache when it was asked serves ``row`` better.

        None: no. Otherwise the row asks again, now or (empty) when the copy has settled.
        """
        better = self._better(row, length, model)
        if better is None:
            return None
        if better.snapshot not in self._copying:
            return (self.ask(row),)
        self._waiting.setdefault(better.snapshot, []).append(row)
        return ()

    def _better(self, row: Row, length: int, model: ModelInfo) -> PendingKeep | None:
        since = min(self._num_offered - row.asked_at, len(self._offered))
        lately = list(self._offered)[len(self._offered) - since :]
        best: PendingKeep | None = None
        for pending in (*self._copying.values(), *lately):
            if pending.adapters != row.adapters:
                continue
            common = shared_length(row.ids, np.asarray(pending.ids, dtype=np.int64))
            usable = min(common, row.prompt_goal)
            whole = common == len(pending.ids)
            if usable >= length + MIN_SHARED and (whole or model.can_cut(len(pending.ids), usable)):
                best, length = pending, usable
        return best

    def _place(
        self, kept: SnapshotMade | SnapshotSkipped, pending: PendingKeep | None
    ) -> Iterator[Store | Discard | Missed]:
        match kept:
            case SnapshotMade(snapshot, length, nbytes):
                if pending is None or length != len(pending.ids):
                    yield Discard(snapshot)
                    return
                self._num_offered += 1
                self._offered.append(pending)
                yield Store(
                    snapshot,
                    pending.ids,
                    nbytes,
                    pending.kind,
                    pending.adapters,
                    pending.session,
                    pending.origin,
                )
            case SnapshotSkipped(nbytes=nbytes):
                if nbytes:
                    yield Missed(nbytes)
            case _:
                assert_never(kept)
