"""The scheduler's decisions: admission, sharing of prefixes, step plans, endings.

A synchronous state machine with one owner (``actors/scheduler.py``), one task, no clock, no
channel. Every method returns the effects that the actor must perform. It knows ids and counts;
it does not know text, arrays, or who is listening.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import assert_never

import numpy as np

from ..adapter_table import base_only
from ..device import (
    FromSnapshot,
    ModelInfo,
    RowFailed,
    RowId,
    SnapshotId,
    SnapshotMade,
    SnapshotSkipped,
    StepDone,
    StepId,
    StepPlan,
)
from ..errors import RequestError
from ..prefix.entries import Hit
from ..requests import FinishReason
from .chunks import ChunkSizer
from .effects import (
    Discard,
    Effect,
    QueueFull,
    ReturnLease,
    RowBroken,
    RowEnded,
    RowSpec,
    SchedulerStats,
    Started,
    TokenMade,
)
from .keeps import Keeps
from .planning import Planned, Planner
from .rows import Phase, Row

PIPELINE = 2
"""Steps under way at most: one running and one queued."""


class SchedulerCore:
    """Waiting queue, running rows and the next step.

    Args:
        batch: most rows that are prefilled or decoded at a time.
        queue: most rows that wait; one more is refused.
        cache: whether a prefix cache exists to ask and to feed.
        new_snapshot: gives an id that was never used before.
        new_step: likewise for steps.
        resolve: the revisions that adapter ids (None: the server's default) stand for now, in
            order. It raises a RequestError for an id that is not mounted.
    """

    def __init__(
        self,
        *,
        batch: int,
        queue: int,
        cache: bool,
        new_snapshot: Callable[[], SnapshotId],
        new_step: Callable[[], StepId],
        resolve: Callable[[tuple[str, ...] | None], tuple[str, ...]] = base_only,
    ) -> None:
        self.batch = batch
        self.queue = queue
        self.model: ModelInfo | None = None
        self._cache = cache
        self._new_step = new_step
        self._resolve = resolve
        self._rows: dict[RowId, Row] = {}
        self._waiting: deque[Row] = deque()
        self._steps: deque[Planned] = deque()
        self._keeps = Keeps()
        self._numbers = 0
        self.sizer = ChunkSizer()
        self._planner = Planner(self.sizer, new_snapshot=new_snapshot, cache=cache)
        self._counts = dict.fromkeys(
            ("submitted", "finished", "cancelled", "failed", "refused", "steps"), 0
        )
        self._generated = 0

    # ---- what comes in -------------------------------------------------------------------

    def ready(self, model: ModelInfo) -> tuple[Effect, ...]:
        """The device holds a model and is idle."""
        self.model = model
        return tuple(self._admit())

    def submit(self, spec: RowSpec) -> tuple[Effect, ...] | QueueFull:
        """A request wants a row. Full queue: nothing is kept and :class:`QueueFull` says so."""
        busy = self.model is None or len(self._live()) >= self.batch
        if busy and len(self._waiting) >= self.queue:
            self._counts["refused"] += 1
            return QueueFull(len(self._waiting), self.retry_after())
        self._numbers += 1
        self._counts["submitted"] += 1
        row = Row(spec, self._numbers, np.asarray(spec.prompt, dtype=np.int64))
        self._rows[spec.row] = row
        self._waiting.append(row)
        return tuple(self._admit())

    def found(self, row_id: RowId, hit: Hit | None) -> tuple[Effect, ...]:
        """The prefix cache answered (``None``: a miss, or it did not answer in time)."""
        row = self._rows.get(row_id)
        if row is None or row.phase is not Phase.LOOKING:
            return () if hit is None else (ReturnLease(hit.lease),)
        assert self.model is not None
        again = self._keeps.ask_again(row, 0 if hit is None else hit.length, self.model)
        if again is not None:
            return (*again, *(() if hit is None else (ReturnLease(hit.lease),)))
        row.move(Phase.READY)
        if hit is not None:
            row.hit = FromSnapshot(hit.snapshot, hit.length)
            row.lease = hit.lease
        return ()

    def cancel(self, row_id: RowId, *, served: bool = False) -> tuple[Effect, ...]:
        """Nobody wants this row any more. What it computed is kept for the next try.

        ``served``: its client has all that it asked for, so the row counts as finished.
        """
        row = self._rows.get(row_id)
        if row is None or row.phase is Phase.ENDING:
            return ()
        self._counts["finished" if served else "cancelled"] += 1
        row.cancelled = True
        match row.phase:
            case Phase.WAITING:
                self._waiting.remove(row)
                del self._rows[row_id]
                return ()
            case Phase.LOOKING | Phase.READY:
                del self._rows[row_id]
                return (*_lease_back(row), *self._admit())
            case Phase.PREFILL | Phase.DECODE:
                row.move(Phase.ENDING)
                return ()
            case _:
                assert_never(row.phase)

    def settled(self, done: StepDone) -> tuple[Effect, ...]:
        """A step's results. Those of a step that this core did not launch are ignored."""
        if not self._steps or self._steps[0].plan.step != done.step:
            made = (kept for kept in done.kept if isinstance(kept, SnapshotMade))
            return tuple(Discard(kept.snapshot) for kept in made)
        planned = self._steps.popleft()
        self._counts["steps"] += 1
        self.sizer.saw(
            prefilled=planned.prefilled, decoded=len(planned.plan.decode), seconds=done.seconds
        )
        effects: list[Effect] = [ReturnLease(lease) for lease in planned.leases]
        for failed in done.failed:
            effects += self._row_failed(failed)
        for sampled in done.sampled:
            effects += self._sampled(sampled.row, sampled.token)
        for kept in done.kept:
            effects += self._kept(kept)
        return (*effects, *self._admit())

    def device_lost(self, reason: str) -> tuple[Effect, ...]:
        """Every state on the device is gone: fail the rows that had one, keep those that wait."""
        self.model = None
        effects: list[Effect] = []
        for row in self._live():
            if row.phase is not Phase.ENDING:
                self._counts["failed"] += 1
                effects.append(RowBroken(row.id, reason))
            effects += _lease_back(row)
            del self._rows[row.id]
        for planned in self._steps:
            effects += [ReturnLease(lease) for lease in planned.leases]
        self._steps.clear()
        self._keeps.clear()
        return tuple(effects)

    def cache_lost(self) -> None:
        """What the prefix cache lent is about to be released: rows not yet started forget it."""
        for row in self._rows.values():
            row.hit = None
            row.lease = None
            if row.phase is Phase.LOOKING:
                row.move(Phase.READY)

    def reselect(self) -> tuple[Effect, ...]:
        """Rows about to start take the adapters that are mounted now; to be called before plans.

        One whose adapter was replaced since it left the queue asks for a prefix anew, so that its
        weights and its state are of one revision; one whose adapter is gone fails.
        """
        ready = [row for row in self._rows.values() if row.phase is Phase.READY]
        effects = [effect for row in ready for effect in self._reselect(row)]
        return (*effects, *self._admit()) if effects else ()

    def everyone(self) -> tuple[RowId, ...]:
        """Rows that somebody still waits for, by admission."""
        return tuple(row.id for row in self._rows.values() if not row.cancelled)

    # ---- what goes out -------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Steps launched and not settled."""
        return len(self._steps)

    def plan(self) -> tuple[StepPlan, tuple[Effect, ...]] | None:
        """The next step, or None when there is nothing to do or the pipeline is full."""
        if self.model is None or len(self._steps) >= PIPELINE:
            return None
        if self._steps and not self.model.launches_ahead and self._prefills():
            return None
        planned = self._planner.plan(self._live(), self.model, self._new_step)
        if planned is None:
            return None
        self._steps.append(planned)
        for keep in planned.keeps:
            self._keeps.begin(keep)
        for row_id in planned.plan.end:
            row = self._rows.pop(row_id)
            if not row.cancelled:
                self._counts["finished"] += 1
        started = [Started(row.id, row.cached, self._lane()) for row in planned.started]
        return planned.plan, (*started, *self._admit())

    def retry_after(self) -> float:
        """Seconds until a refused request may find room, at least 1."""
        # A typical row of 128 tokens leaves every 1/batch of its time; the caller is last.
        per_row = max(self.sizer.decode_seconds, 0.01) * 128
        return max(1.0, per_row * (len(self._waiting) + 1) / self.batch)

    def stats(self) -> SchedulerStats:
        """Counts for ``/stats``."""
        phases = [row.phase for row in self._rows.values()]
        return SchedulerStats(
            waiting_rows=phases.count(Phase.WAITING)
            + phases.count(Phase.LOOKING)
            + phases.count(Phase.READY),
            prefill_rows=phases.count(Phase.PREFILL),
            decode_rows=phases.count(Phase.DECODE),
            ending_rows=phases.count(Phase.ENDING),
            submitted=self._counts["submitted"],
            finished=self._counts["finished"],
            cancelled=self._counts["cancelled"],
            failed=self._counts["failed"],
            refused=self._counts["refused"],
            generated_tokens=self._generated,
            prefilled_tokens=self._planner.prefilled_tokens,
            shared_tokens=self._planner.shared_tokens,
            steps=self._counts["steps"],
            prefill_chunk=self.sizer.chunk,
            decode_step_seconds=self.sizer.decode_seconds,
        )

    # ---- inside --------------------------------------------------------------------------

    def _live(self) -> list[Row]:
        return [row for row in self._rows.values() if row.phase is not Phase.WAITING]

    def _prefills(self) -> bool:
        return any(row.phase in (Phase.READY, Phase.PREFILL) for row in self._rows.values())

    def _lane(self) -> str:
        batched = self.model is not None and self.model.batchable and self.batch > 1
        return "batched" if batched else "serial"

    def _admit(self) -> Iterator[Effect]:
        if self.model is None:
            return
        live = len(self._live())
        while self._waiting and live < self.batch:
            row = self._waiting.popleft()
            refused = self._select(row)
            if refused is not None:
                yield refused
                continue
            live += 1
            row.move(Phase.LOOKING)
            yield from self._look_up(row)

    def _look_up(self, row: Row) -> Iterator[Effect]:
        if self._cache and len(row.spec.prompt) > 1:
            yield self._keeps.ask(row)
        else:
            row.move(Phase.READY)

    def _select(self, row: Row) -> RowBroken | None:
        try:
            row.adapters = self._resolve(row.spec.adapters)
        except RequestError as error:
            del self._rows[row.id]
            self._counts["failed"] += 1
            return RowBroken(row.id, error.message, error.param)
        return None

    def _reselect(self, row: Row) -> Iterator[Effect]:
        before = row.adapters
        refused = self._select(row)
        if refused is None and row.adapters == before:
            return
        yield from _lease_back(row)
        row.hit = None
        if refused is not None:
            yield refused
            return
        row.move(Phase.LOOKING)
        yield from self._look_up(row)

    def _sampled(self, row_id: RowId, token: int) -> Iterator[Effect]:
        row = self._rows.get(row_id)
        if row is None:
            return
        row.in_flight -= 1
        if row.phase is Phase.ENDING:
            # Nobody hears it, but it is in the state that is about to be kept: a state that is
            # further than one token ahead of its known ids could not always be cut back.
            if row.cancelled and not self._is_end(row, row.generated[-1:]):
                row.generated.append(token)
            return
        row.generated.append(token)
        self._generated += 1
        yield TokenMade(row_id, token)
        if self._is_end(row, [token]):
            row.move(Phase.ENDING)
            yield RowEnded(row_id, FinishReason.STOP)
        elif len(row.generated) >= row.spec.limit:
            row.move(Phase.ENDING)
            yield RowEnded(row_id, FinishReason.LENGTH)

    def _is_end(self, row: Row, tokens: list[int]) -> bool:
        assert self.model is not None
        return any(t in self.model.eos_ids or t in row.spec.stop_ids for t in tokens)

    def _row_failed(self, failed: RowFailed) -> Iterator[Effect]:
        row = self._rows.pop(failed.row, None)
        if row is None:
            return
        yield from _lease_back(row)
        if row.phase is not Phase.ENDING:
            self._counts["failed"] += 1
            yield RowBroken(failed.row, failed.reason)

    def _kept(self, kept: SnapshotMade | SnapshotSkipped) -> Iterator[Effect]:
        placed, waiting = self._keeps.settle(kept)
        yield from placed
        for row in waiting:
            # After the state was offered, so that the cache answers with it.
            if self._rows.get(row.id) is row and row.phase is Phase.LOOKING:
                yield self._keeps.ask(row)

    def check_integrity(self) -> None:
        """Raise AssertionError if the state contradicts itself; tests call it after each step."""
        assert len(self._steps) <= PIPELINE, "more steps under way than the pipeline holds"
        assert len(self._live()) <= self.batch, "more live rows than the batch allows"
        assert all(r.phase is Phase.WAITING for r in self._waiting), "a queued row does not wait"
        waiting = {r.id for r in self._rows.values() if r.phase is Phase.WAITING}
        assert waiting == {r.id for r in self._waiting}, "the queue lost a row"
        for row in self._rows.values():
            assert 0 <= row.in_flight <= PIPELINE, "a row is in more steps than there are"
            assert len(row.generated) <= row.spec.limit, "a row passed its limit"
            assert row.launched_tokens <= row.spec.limit, "a row was planned past its limit"
            assert row.phase is Phase.ENDING or not row.cancelled, "a cancelled row goes on"


def _lease_back(row: Row) -> tuple[ReturnLease, ...]:
    lease, row.lease = row.lease, None
    return () if lease is None else (ReturnLease(lease),)
