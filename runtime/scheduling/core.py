"""The scheduler's decisions: admission, sharing of prefixes, step plans, endings.

A synchronous state machine with one owner (``actors/scheduler.py``), one task, no clock, no
channel. Every method returns the effects that the actor must perform. It knows ids and counts;
it does not know text, arrays, or who is listening.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import assert_never

import numpy as np

from ..adapter_table import base_only
from ..model_info import ModelInfo
from ..plans import RowFailed, RowId, Sampled, SnapshotId, SnapshotMade, StepDone, StepId, StepPlan
from ..prefix.entries import Hit
from ..requests import FinishReason
from .admission import Admission
from .chunks import ChunkSizer
from .effects import (
    Discard,
    Effect,
    QueueFull,
    ReturnLease,
    RowBroken,
    RowSpec,
    SchedulerStats,
)
from .endings import begin, can_start_over, donor_of, end, start_over, take_token
from .keeps import Keeps
from .pipeline import PIPELINE, Pipeline, give_back
from .planning import Planner
from .reserve import Reserve, youngest_waiting
from .rows import Phase, Row, lease_back
from .tally import Tally


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
        kv_limit: most bytes of state that rows of a model may reserve; None = no limit.
        checkpoint: tokens after which the state of a row that asks for it is kept; 0 = never.
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
        kv_limit: Callable[[ModelInfo], int | None] = lambda _: None,
        checkpoint: int = 0,
    ) -> None:
        self.model: ModelInfo | None = None
        self.resolve = resolve
        self._new_step = new_step
        self._kv_limit = kv_limit
        self._rows: dict[RowId, Row] = {}
        self._reserve = Reserve()
        self._admission = Admission(
            batch=batch, queue=queue, reserve=self._reserve, resolve=resolve
        )
        self._steps = Pipeline()
        self._keeps = Keeps(cache=cache)
        self._numbers = 0
        self.sizer = ChunkSizer()
        self._planner = Planner(
            self.sizer,
            reserve=self._reserve,
            new_snapshot=new_snapshot,
            cache=cache,
            checkpoint=checkpoint,
        )
        self._tally = Tally()

    # ---- what comes in -------------------------------------------------------------------

    def ready(self, model: ModelInfo) -> tuple[Effect, ...]:
        """The device holds a model and is idle."""
        self.model = model
        self._reserve.limit(self._kv_limit(model), model)
        return tuple(self._admit())

    def submit(self, spec: RowSpec) -> tuple[Effect, ...] | QueueFull:
        """A request wants a row. Full queue: nothing is kept and :class:`QueueFull` says so."""
        said = () if spec.replay is None else spec.replay.ids
        row = Row(spec, self._numbers, np.asarray(spec.prompt + said, dtype=np.int64))
        if not self._admission.has_room(row, None if self.model is None else self._live()):
            self._tally.refused += 1
            return QueueFull(len(self._admission), self.retry_after())
        self._numbers += 1
        self._tally.submitted += 1
        self._rows[spec.row] = row
        self._admission.append(row)
        return tuple(self._admit())

    def found(self, row_id: RowId, hit: Hit | None) -> tuple[Effect, ...]:
        """The prefix cache answered (``None``: a miss, or it did not answer in time)."""
        row = self._rows.get(row_id)
        if row is None:
            return () if hit is None else (ReturnLease(hit.lease),)
        return self._keeps.answered(row, hit, self.model)

    def cancel(self, row_id: RowId, *, served: bool = False) -> tuple[Effect, ...]:
        """Nobody wants this row any more. What it computed is kept for the next try.

        ``served``: its client has all that it asked for, so the row counts as finished.
        """
        row = self._rows.get(row_id)
        if row is None or row.phase is Phase.ENDING:
            return ()
        self._tally.finished += served
        self._tally.cancelled += not served
        row.cancelled = True
        match row.phase:
            case Phase.WAITING:
                self._admission.remove(row)
                del self._rows[row_id]
            case Phase.LOOKING | Phase.READY:
                del self._rows[row_id]
            case Phase.PREFILL | Phase.DECODE:
                row.move(Phase.ENDING)
            case _:
                assert_never(row.phase)
        return (*lease_back(row), *self._admit())

    def settled(self, done: StepDone) -> tuple[Effect, ...]:
        """A step's results. Those of a step that this core did not launch are ignored."""
        planned = self._steps.settle(done)
        if planned is None:
            made = (kept for kept in done.kept if isinstance(kept, SnapshotMade))
            return tuple(Discard(kept.snapshot) for kept in made)
        self._tally.steps += 1
        self.sizer.saw(
            prefilled=planned.prefilled,
            decoded=len(planned.plan.decode),
            seconds=done.seconds,
            pairs=planned.pairs,
        )
        lost = {failed.row for failed in done.failed}
        effects: list[Effect] = [*give_back(planned, lost)]
        self._orphan(lost)
        for failed in done.failed:
            if (row := self._row_in(done.step, failed.row)) is not None:
                effects += self._row_failed(row, failed, done.step)
        for sampled in done.sampled:
            if (row := self._row_in(done.step, sampled.row)) is not None:
                effects += self._sampled(row, sampled)
        for kept in done.kept:
            effects += self._keeps.settle(kept)
        return (*effects, *self._admit())

    def device_lost(self, reason: str) -> tuple[Effect, ...]:
        """Every state on the device is gone: fail the rows that had one, keep those that wait."""
        self.model = None
        live = self._live()
        effects: list[Effect] = [effect for row in live for effect in lease_back(row)]
        self._admission.put_back(row for row in live if row.phase in (Phase.LOOKING, Phase.READY))
        for row in self._live():
            del self._rows[row.id]
            if row.phase is not Phase.ENDING:
                self._tally.failed += 1
                effects.append(RowBroken(row.id, reason))
        self._keeps.clear()
        return (*effects, *self._steps.lose())

    def cache_lost(self) -> None:
        """What the prefix cache lent is about to be released: rows not yet started forget it."""
        for row in self._rows.values():
            row.hit = row.lease = None
            row.asking = 0
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
        if self.model is None or self._steps.is_full:
            return None
        if self._steps and not self.model.launches_ahead and self._prefills():
            return None
        planned = self._planner.plan(self._live(), self.model, self._new_step)
        shortened = self._make_room() if planned is None else ()
        if shortened:
            planned = self._planner.plan(self._live(), self.model, self._new_step)
        if planned is None:
            return None
        self._steps.begin(planned)
        for keep in planned.keeps:
            self._keeps.begin(keep)
        for start in planned.plan.start:
            self._rows[start.row].donor = donor_of(start)
        for row_id in planned.plan.end:
            row = self._rows.pop(row_id)
            self._tally.finished += not row.cancelled
        started = [event for row in planned.started for event in begin(row, self._lane())]
        return planned.plan, (*shortened, *started, *self._admit())

    def retry_after(self) -> float:
        """Seconds until a refused request may find room, at least 1."""
        return self._admission.retry_after(self.sizer.decode_seconds)

    def stats(self) -> SchedulerStats:
        """Counts for ``/stats``."""
        return self._tally.stats(self._rows.values(), self._planner, self.sizer, self._reserve)

    # ---- inside --------------------------------------------------------------------------

    def _live(self) -> list[Row]:
        return [row for row in self._rows.values() if row.phase is not Phase.WAITING]

    def _prefills(self) -> bool:
        return any(row.phase in (Phase.READY, Phase.PREFILL) for row in self._rows.values())

    def _lane(self) -> str:
        batched = self.model is not None and self.model.batchable and self._admission.batch > 1
        return "batched" if batched else "serial"

    def _admit(self) -> Iterator[Effect]:
        if self.model is None:
            return
        while (row := self._admission.next(self._live())) is not None:
            if (refused := self._select(row)) is not None:
                yield refused
                continue
            row.move(Phase.LOOKING)
            yield from self._keeps.look_up(row)

    def _select(self, row: Row) -> RowBroken | None:
        refused = self._admission.select(row)
        if refused is not None:
            del self._rows[row.id]
            self._tally.failed += 1
        return refused

    def _reselect(self, row: Row) -> Iterator[Effect]:
        before = row.adapters
        refused = self._select(row)
        if refused is None and row.adapters == before:
            return
        yield from lease_back(row)
        if refused is not None:
            yield refused
            return
        row.move(Phase.LOOKING)
        yield from self._keeps.look_up(row)

    def _row_in(self, step: StepId, row_id: RowId) -> Row | None:
        """The row that a result of ``step`` speaks of, if it still runs as it did in that step."""
        row = self._rows.get(row_id)
        return None if row is None or step in row.before else row

    def _sampled(self, row: Row, sampled: Sampled) -> tuple[Effect, ...]:
        if self.model is None:
            return ()
        events = take_token(row, sampled, self.model.eos_ids)
        self._tally.generated += bool(events)
        return events

    def _make_room(self) -> tuple[Effect, ...]:
        """Where every row waits for another one's bytes: the youngest is complete as it is."""
        row = None if self._steps else youngest_waiting(self._live())
        if row is None:
            return ()
        self._tally.shortened += 1
        return (end(row, FinishReason.LENGTH),)

    def _orphan(self, failed: set[RowId]) -> None:
        for row in self._rows.values():
            row.orphaned = row.orphaned or row.donor in failed

    def _row_failed(self, row: Row, failed: RowFailed, step: StepId) -> Iterator[Effect]:
        if can_start_over(row):
            start_over(row, (step, *self._steps.ids))
            return
        del self._rows[row.id]
        yield from lease_back(row)
        if row.phase is not Phase.ENDING:
            self._tally.failed += 1
            yield RowBroken(row.id, failed.reason, failed.param)

    def check_integrity(self) -> None:
        """Raise AssertionError if the state contradicts itself; tests call it after each step."""
        assert len(self._steps) <= PIPELINE, "more steps under way than the pipeline holds"
        assert len(self._live()) <= self._admission.batch, "more live rows than the batch allows"
        self._admission.check_integrity(self._rows.values())
        self._reserve.check_integrity(self._rows.values())
        for row in self._rows.values():
            assert row.in_flight <= PIPELINE, "a row is in more steps than there are"
            row.check_integrity()
