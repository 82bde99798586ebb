"""One request's row as the scheduler sees it: one object, one owner, legal transitions as data.

Runs inside the scheduler's core. Knows counts and ids, never arrays or text.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from ..model_info import ModelInfo
from ..plans import Cold, FromRow, FromSnapshot, RowId, Source, StepId
from ..prefix.entries import LeaseId
from .effects import ReturnLease, RowSpec

MIN_SHARED = 16
"""Fewer shared tokens than this are not worth waiting for or copying."""


class Phase(Enum):
    """Where a row stands. Only the transitions of :data:`LEGAL` happen."""

    WAITING = auto()
    LOOKING = auto()
    READY = auto()
    PREFILL = auto()
    DECODE = auto()
    ENDING = auto()


LEGAL: frozenset[tuple[Phase, Phase]] = frozenset(
    {
        (Phase.WAITING, Phase.LOOKING),
        (Phase.LOOKING, Phase.READY),
        (Phase.LOOKING, Phase.WAITING),
        (Phase.READY, Phase.WAITING),
        (Phase.READY, Phase.LOOKING),
        (Phase.READY, Phase.PREFILL),
        (Phase.READY, Phase.DECODE),
        (Phase.PREFILL, Phase.DECODE),
        (Phase.PREFILL, Phase.READY),
        (Phase.DECODE, Phase.READY),
        (Phase.PREFILL, Phase.ENDING),
        (Phase.DECODE, Phase.ENDING),
    }
)


@dataclass(slots=True, eq=False)
class Row:
    """A row from submission to its last step.

    Attributes:
        processed: tokens in the device's state once every launched step has run.
        ids: what it starts from: its prompt, and what is replayed.
        fresh: tokens that were to be prefilled when the row started.
        in_flight: decodes that were launched and whose token is not known yet.
        generated: tokens known so far, replayed ones among them; the last one is not in the state
            unless a step ran ahead.
        replayed: how many of them come from an earlier row of the same request.
        kept: tokens of the state that was kept last on the way.
        donor: the row whose state it started from.
        orphaned: that row has failed since.
        cold: it starts from nothing, whatever there is.
        before: steps launched before it had to start over; what they say of it is out of date.
        hit: what the prefix cache lent, until the row has started.
        asked_at: how many states the cache had been offered when it was asked for this row.
        asking: questions to the cache that it has not answered yet.
        room: tokens of state that were reserved for it.
        waits: its next token does not fit into what rows may reserve together.
        adapters: revisions that the row runs with, in order; settled when it starts.
    """

    spec: RowSpec
    number: int
    ids: npt.NDArray[np.int64]
    phase: Phase = Phase.WAITING
    processed: int = 0
    fresh: int = 0
    in_flight: int = 0
    cached: int = 0
    generated: list[int] = field(default_factory=list)
    hit: FromSnapshot | None = None
    lease: LeaseId | None = None
    keep_prompt: bool = False
    asked_at: int = 0
    asking: int = 0
    room: int = 0
    waits: bool = False
    cancelled: bool = False
    adapters: tuple[str, ...] = ()
    replayed: int = 0
    kept: int = 0
    donor: RowId | None = None
    orphaned: bool = False
    cold: bool = False
    before: frozenset[StepId] = frozenset()

    @property
    def id(self) -> RowId:
        """The row's id."""
        return self.spec.row

    @property
    def prompt_goal(self) -> int:
        """Tokens to process before the first decode: all that it starts from but the last."""
        return len(self.spec.prompt) + self.replayed - 1

    @property
    def start_ids(self) -> tuple[int, ...]:
        """What the row starts from, as :attr:`ids`."""
        return self.spec.prompt + tuple(self.generated[: self.replayed])

    @property
    def remaining(self) -> int:
        """Prompt tokens still to be prefilled."""
        return max(0, self.prompt_goal - self.processed)

    @property
    def launched_tokens(self) -> int:
        """Tokens generated or being generated."""
        return len(self.generated) + self.in_flight

    @property
    def known(self) -> tuple[int, ...]:
        """Prompt and generated ids whose state is certain: all but the last sampled one."""
        return (self.spec.prompt + tuple(self.generated))[: self.num_known]

    @property
    def num_known(self) -> int:
        """How many those are."""
        return min(self.processed, len(self.spec.prompt) + len(self.generated) - 1)

    def check_integrity(self) -> None:
        """Raise AssertionError if the row's state contradicts itself."""
        assert self.in_flight >= 0, "a row heard more tokens than were asked for"
        assert len(self.generated) <= self.spec.limit, "a row passed its limit"
        assert self.launched_tokens <= self.spec.limit, "a row was planned past its limit"
        assert self.phase is Phase.ENDING or not self.cancelled, "a cancelled row goes on"

    def select(self, adapters: tuple[str, ...]) -> None:
        """Before it starts: run with these adapters, and replay what was said with the same."""
        replay = self.spec.replay
        said = () if replay is None or replay.adapters != adapters else replay.ids
        self.adapters = adapters
        self.replayed, self.generated = len(said), list(said)
        self.ids = np.asarray(self.spec.prompt + said, dtype=np.int64)

    def move(self, to: Phase) -> None:
        """Change phase; raises ValueError on a transition that :data:`LEGAL` does not list."""
        if (self.phase, to) not in LEGAL:
            raise ValueError(f"row {self.id} cannot go from {self.phase.name} to {to.name}")
        self.phase = to


def shared_length(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> int:
    """Number of leading ids that ``a`` and ``b`` have in common."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


def lease_back(row: Row) -> tuple[ReturnLease, ...]:
    """The row will not start from what the cache lent it."""
    lease, row.lease, row.hit = row.lease, None, None
    return () if lease is None else (ReturnLease(lease),)


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a row's state comes from now, and what it would rather wait for.

    ``wait_for``/``wait_length``: a row in prefill that will soon hold more of this prompt.
    """

    source: Source
    length: int
    wait_for: RowId | None = None
    wait_length: int = 0


def choose_source(
    row: Row, donors: list[Row], *, model: ModelInfo, may_wait: bool = True
) -> Choice:
    """The longest prefix that ``row`` can start from: the cache's hit or another row's state."""
    if row.cold:
        return Choice(Cold(), 0)
    best = Choice(Cold(), 0) if row.hit is None else Choice(row.hit, row.hit.length)
    for donor in donors:
        if donor.adapters != row.adapters:
            continue
        now = min(shared_length(row.ids, donor.ids), row.prompt_goal, donor.processed)
        if now > max(best.length, MIN_SHARED - 1) and model.can_cut(donor.processed, now):
            best = Choice(FromRow(donor.id, now), now)
    if not may_wait:
        return best
    for donor in _soon(row, donors, best.length):
        later = min(shared_length(row.ids, donor.ids), row.prompt_goal, donor.prompt_goal)
        # A state that cannot be cut is forked the moment it is as long as what is shared.
        reachable = donor.processed < later or model.can_cut(donor.processed, later)
        if reachable and later >= max(best.wait_length + 1, best.length + MIN_SHARED):
            best = replace(best, wait_for=donor.id, wait_length=later)
    return best


def _soon(row: Row, donors: list[Row], length: int) -> list[Row]:
    """Donors that come to more of a prompt no later than ``row`` would, who has ``length``.

    The oldest in prefill advances in every step; of the others, one that is much longer than what
    ``row`` has to compute may stand still for as long as those before it take.
    """
    prefilling = [donor for donor in donors if donor.phase is Phase.PREFILL]
    oldest = min(prefilling, key=lambda donor: donor.number, default=None)
    own = row.prompt_goal - length
    return [
        donor
        for donor in prefilling
        if donor.adapters == row.adapters
        and donor.processed >= length
        and (donor is oldest or donor.fresh <= 2 * own)
    ]
