"""Builds one step out of the live rows: what is kept, ended, started, prefilled and decoded.

Runs inside the scheduler's core. Rows are taken in order of admission, never in the order in
which tasks happened to run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..model_info import ModelInfo
from ..plans import FromSnapshot, KeepRow, PrefillRow, RowId, SnapshotId, StartRow, StepId, StepPlan
from ..prefix.entries import Kind, LeaseId, Origin
from .chunks import ChunkSizer
from .reserve import Reserve
from .rows import Choice, Phase, Row, choose_source
from .turns import share, short_ones

KEEP_AT_LEAST = 16
"""States of fewer tokens are cheaper to compute again than to keep."""
PROMPT_ENTRY_AT_LEAST = 256
"""New tokens from which a prompt gets an entry of its own if its state cannot be cut later."""
TAIL = 32
"""A leader whose chunk ends this close behind a shared prefix is not stopped at it."""


@dataclass(frozen=True, slots=True)
class PendingKeep:
    """A snapshot on its way: which ids its state stands for once it is made."""

    snapshot: SnapshotId
    ids: tuple[int, ...]
    kind: Kind
    adapters: tuple[str, ...] = ()
    session: str | None = None
    origin: Origin | None = None


@dataclass(frozen=True, slots=True)
class Lent:
    """A lease of a row that starts; ``row`` is None where it starts from something else."""

    lease: LeaseId
    row: RowId | None


@dataclass(frozen=True, slots=True)
class Planned:
    """A step with what must be remembered until it settles.

    ``pairs``: of each of the ``prefilled`` tokens with those before it, summed.
    """

    plan: StepPlan
    keeps: tuple[PendingKeep, ...]
    started: tuple[Row, ...]
    leases: tuple[Lent, ...]
    prefilled: int
    pairs: int


class Planner:
    """Turns the live rows into the next step and marks on them what was launched."""

    def __init__(
        self,
        sizer: ChunkSizer,
        *,
        reserve: Reserve,
        new_snapshot: Callable[[], SnapshotId],
        cache: bool,
        checkpoint: int = 0,
    ) -> None:
        """``checkpoint``: tokens after which the state of a row that asks for it is kept again."""
        self._checkpoint = checkpoint
        self._sizer = sizer
        self._reserve = reserve
        self._new_snapshot = new_snapshot
        self._cache = cache
        self.prefilled_tokens = 0
        self.shared_tokens = 0

    def plan(
        self, rows: list[Row], model: ModelInfo, new_step: Callable[[], StepId]
    ) -> Planned | None:
        """The next step for ``rows`` (in order of admission), or None if nothing can be done."""
        rows = sorted(rows, key=lambda row: row.number)
        keeps = self._keeps(rows, model)
        starts, started, waits = self._starts(rows, model)
        ends = tuple(row.id for row in rows if row.phase is Phase.ENDING)
        prefill = self._prefill(rows, model, waits)
        pairs = _pairs(prefill, rows)
        decode = self._decode(rows, model, waits)
        if not (keeps or starts or ends or prefill or decode):
            return None
        plan = StepPlan(
            new_step(),
            keep=tuple(keep for keep, _ in keeps),
            start=tuple(starts),
            end=ends,
            prefill=tuple(prefill),
            decode=tuple(row.id for row in decode),
        )
        return Planned(
            plan,
            tuple(pending for _, pending in keeps),
            tuple(started),
            tuple(_lent(starts, started)),
            sum(part.count for part in prefill),
            pairs,
        )

    def _keeps(self, rows: list[Row], model: ModelInfo) -> list[tuple[KeepRow, PendingKeep]]:
        if not self._cache:
            return []
        kept: list[tuple[KeepRow, PendingKeep]] = []
        for row in rows:
            runs = False
            if row.phase is Phase.ENDING:
                ids = row.known
                kind: Kind = "final" if row.generated and not row.remaining else "partial"
            elif row.keep_prompt and row.processed == row.prompt_goal and not row.launched_tokens:
                row.keep_prompt = False
                ids, kind = row.spec.prompt[:-1], "prompt"
                row.kept = self._due_before(row, len(ids))
            elif self._is_due(row, row.num_known) and model.can_cut(row.processed, row.num_known):
                ids, kind, runs = row.known, "final", True
                row.kept = self._due_before(row, len(ids))
            else:
                continue
            if len(ids) >= KEEP_AT_LEAST:
                snapshot = self._new_snapshot()
                session, origin = row.spec.session, Origin(row.id, runs, row.cancelled)
                pending = PendingKeep(snapshot, ids, kind, row.adapters, session, origin)
                kept.append((KeepRow(row.id, len(ids), snapshot), pending))
        return kept

    def _is_due(self, row: Row, tokens: int) -> bool:
        """Whether a running row's state is to be kept again, when it has so many tokens."""
        if not (self._cache and self._checkpoint and row.spec.checkpoints):
            return False
        return row.phase is Phase.DECODE and tokens - row.kept >= self._checkpoint

    def _due_before(self, row: Row, tokens: int) -> int:
        """When a row's state was last due that has so many tokens now; with its records always."""
        start = len(row.spec.prompt) - 1
        return tokens - (tokens - start) % self._checkpoint if self._checkpoint else tokens

    def _starts(
        self, rows: list[Row], model: ModelInfo
    ) -> tuple[list[StartRow], list[Row], dict[RowId, list[int]]]:
        starts: list[StartRow] = []
        started: list[Row] = []
        waits: dict[RowId, list[int]] = {}
        donors = [r for r in rows if r.phase in (Phase.PREFILL, Phase.DECODE, Phase.ENDING)]
        for row in rows:
            if row.phase is not Phase.READY:
                continue
            choice = choose_source(row, donors, model=model)
            if choice.wait_for is not None:
                waits.setdefault(choice.wait_for, []).append(choice.wait_length)
                continue
            starts.append(self._start(row, choice, model))
            started.append(row)
            donors.append(row)
        return starts, started, waits

    def _start(self, row: Row, choice: Choice, model: ModelInfo) -> StartRow:
        row.processed = row.cached = choice.length
        row.fresh = row.remaining
        # A long prefill must not be lost to a crash at the answer's first tokens.
        again = row.fresh >= KEEP_AT_LEAST
        row.kept = self._due_before(row, row.prompt_goal) - (self._checkpoint if again else 0)
        row.move(Phase.PREFILL if row.remaining else Phase.DECODE)
        prompt = len(row.spec.prompt)
        uncuttable = not model.can_cut(prompt + row.spec.limit, prompt - 1)
        long = row.remaining >= PROMPT_ENTRY_AT_LEAST and not row.replayed
        row.keep_prompt = self._cache and uncuttable and long
        replay = row.spec.replay if row.replayed else None
        matcher = row.spec.matcher if replay is None else replay.matcher
        if not isinstance(choice.source, FromSnapshot):
            self.shared_tokens += choice.length
        row.hit = None
        return StartRow(
            row.id,
            row.start_ids,
            row.spec.sampling,
            choice.source,
            adapters=row.adapters,
            # The device's to advance: a row that starts over begins where it did.
            matcher=None if matcher is None else matcher.copy(),
            logprobs=row.spec.logprobs,
        )

    def _prefill(
        self, rows: list[Row], model: ModelInfo, waits: dict[RowId, list[int]]
    ) -> list[PrefillRow]:
        pending = [row for row in rows if row.phase is Phase.PREFILL]
        if not pending:
            return []
        running = sum(row.phase is Phase.DECODE for row in rows)
        parts: list[PrefillRow] = []
        for row, tokens in share(pending, self._budget(pending, running, model)):
            count = _stop_at_shared(row, tokens, waits.get(row.id, []), model)
            parts.append(PrefillRow(row.id, count))
            row.processed += count
            self.prefilled_tokens += count
            if not row.remaining:
                row.move(Phase.DECODE)
        return parts

    def _budget(self, pending: list[Row], running: int, model: ModelInfo) -> int:
        """Tokens of the next step, for rows in prefill by age beside ``running`` ones."""
        blocking = not model.launches_ahead
        short = short_ones(pending)
        # The deepest of those that have a claim to it.
        depth = max(row.processed for row in (pending[0], *short[:1]))
        budget = self._sizer.budget(
            pending=len(pending), running=running, blocking=blocking, depth=depth
        )
        if running or not short or pending[0].remaining <= budget:
            return budget
        # Whoever is about to have its first token must not wait for as much as fits where nobody
        # waits for anything.
        beside = self._sizer.budget(pending=len(pending), running=1, depth=depth)
        less = min(budget, beside)
        return less if short[0].remaining <= less // 2 else budget

    def _decode(
        self, rows: list[Row], model: ModelInfo, waits: dict[RowId, list[int]]
    ) -> list[Row]:
        chosen: list[Row] = []
        for row in rows:
            if row.phase is not Phase.DECODE or row.launched_tokens >= row.spec.limit:
                continue
            if row.keep_prompt:
                # The prompt's state is copied at the head of the next step, before it changes.
                continue
            if not model.can_cut(row.processed, 1) and self._is_due(row, row.processed):
                # Its state is kept as soon as all of its tokens are known.
                continue
            longer = row.processed + 1
            if row.processed in waits.get(row.id, ()) and not model.can_cut(longer, row.processed):
                # Who waits for the prompt's state takes it at the head of the next step.
                continue
            if not self._reserve.grants(row, rows):
                continue
            row.in_flight += 1
            row.processed += 1
            chosen.append(row)
        return chosen


def _pairs(parts: list[PrefillRow], rows: list[Row]) -> int:
    """Pairs of a token of the chunks and one before it; their rows stand behind them already."""
    ends = {row.id: row.processed for row in rows}
    return sum(part.count * (ends[part.row] - part.count // 2) for part in parts)


def _lent(starts: list[StartRow], started: list[Row]) -> Iterator[Lent]:
    """The leases of rows that start, which no longer have them."""
    for start, row in zip(starts, started, strict=True):
        lease, row.lease = row.lease, None
        if lease is not None:
            yield Lent(lease, row.id if isinstance(start.source, FromSnapshot) else None)


def _stop_at_shared(row: Row, count: int, waits: list[int], model: ModelInfo) -> int:
    """Shorten a chunk so that rows waiting for a shared prefix can fork exactly behind it."""
    end = row.processed + count
    for shared in sorted(waits):
        inside = row.processed < shared < end
        if inside and (end - shared > TAIL or not model.can_cut(end, shared)):
            return shared - row.processed
    return count
