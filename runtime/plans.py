"""What a device is told to do in one step, and what came of it.

Plain values: the scheduler's core makes the plans, the device answers with results, and both may be
sent to any thread. They name rows and snapshots by ids and hold host integers, never an array.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NewType, TypeAlias

from .requests import Sampling
from .text.matching import TokenMatcher

RowId = NewType("RowId", int)
"""A row; unique for the life of the process, so that no event of an old row is mistaken."""
MAX_LOGPROBS = 20
"""Most alternatives whose log-probabilities a row may ask for."""
SnapshotId = NewType("SnapshotId", int)
StepId = NewType("StepId", int)


@dataclass(frozen=True, slots=True)
class Cold:
    """Start with an empty state."""


@dataclass(frozen=True, slots=True)
class FromSnapshot:
    """Start with the first ``length`` tokens of a kept state."""

    snapshot: SnapshotId
    length: int


@dataclass(frozen=True, slots=True)
class FromRow:
    """Start with the first ``length`` tokens of another row's state when the step runs."""

    row: RowId
    length: int


Source: TypeAlias = Cold | FromSnapshot | FromRow


@dataclass(frozen=True, slots=True)
class StartRow:
    """Bring a row into being. ``ids`` is its whole prompt (at least one token).

    ``adapters`` are revisions of mounted adapters, applied in this order; the source was computed
    with exactly the same. A row keeps them until it ends, mounted or not.

    ``matcher`` says which tokens the answer may consist of; it belongs to the device from now on.

    ``logprobs`` asks for each token's log-probability and those of that many alternatives, at most
    MAX_LOGPROBS; None = no figures.
    """

    row: RowId
    ids: tuple[int, ...]
    sampling: Sampling
    source: Source
    adapters: tuple[str, ...] = ()
    matcher: TokenMatcher | None = field(default=None, compare=False)
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """Process the next ``count`` prompt tokens of a row; never its last one.

    The last prompt token is the input of the row's first decode (the oracle's own convention).
    """

    row: RowId
    count: int


@dataclass(frozen=True, slots=True)
class KeepRow:
    """Copy the first ``length`` tokens of a row's state into a snapshot."""

    row: RowId
    length: int
    snapshot: SnapshotId


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One device pass. The parts run in the order of the fields.

    ``keep`` copies states, ``end`` drops rows, ``start`` makes rows (sources are resolved after
    ``keep`` and before ``end``, so a row may start from one that ends in the same step),
    ``prefill`` processes prompt tokens, ``decode`` samples one token for each row named: its input
    is the last prompt token or the token that the row sampled last.
    """

    step: StepId
    keep: tuple[KeepRow, ...] = ()
    start: tuple[StartRow, ...] = ()
    end: tuple[RowId, ...] = ()
    prefill: tuple[PrefillRow, ...] = ()
    decode: tuple[RowId, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one drawn token and of the likeliest tokens in its place.

    They are taken after logit bias, penalties and masks, before filters and temperature. ``top``
    are pairs of an id and its figure in falling order; a figure may be -inf.
    """

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """A row sampled a token. ``ends``: its matcher says that nothing may come after it.

    ``logprobs`` is there for rows that asked.
    """

    row: RowId
    token: int
    ends: bool = False
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class RowFailed:
    """A row could not go on and is gone from the device; nobody else was touched.

    ``param`` names the field of the request that is to blame; None: the fault is not the client's.
    """

    row: RowId
    reason: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class SnapshotMade:
    """A state of exactly ``length`` tokens was kept."""

    snapshot: SnapshotId
    length: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SnapshotSkipped:
    """A state could not be kept (it cannot be cut to that length, or there is no room).

    ``nbytes``: what it would have taken, where room is all that it lacked; else 0.
    """

    snapshot: SnapshotId
    reason: str
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class StepDone:
    """What came of one step. ``seconds`` is the device time that it took, as far as is known."""

    step: StepId
    seconds: float
    sampled: tuple[Sampled, ...] = ()
    failed: tuple[RowFailed, ...] = ()
    kept: tuple[SnapshotMade | SnapshotSkipped, ...] = ()
