"""What the scheduler's core asks its actor to do, as values.

The core never sends, waits or looks at a clock; each of its methods returns a tuple of these. What
is meant for a client or for the prefix cache goes there as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from ..plans import RowId, SnapshotId, TokenLogprobs
from ..prefix.entries import Kind, LeaseId, Origin
from ..requests import FinishReason, Sampling
from ..text.matching import TokenMatcher


@dataclass(frozen=True, slots=True)
class Replay:
    """What an earlier row of the very same request said, to be said again and gone on from.

    At least one id, none of which ends the row. ``figures`` is empty, or holds each id's
    log-probabilities. It holds only for a row of the same ``adapters`` (revisions, in order).
    ``matcher`` has followed all of ``ids``.
    """

    ids: tuple[int, ...]
    figures: tuple[TokenLogprobs, ...] = ()
    adapters: tuple[str, ...] = ()
    matcher: TokenMatcher | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class RowSpec:
    """A row that a request wants: prompt ids, sampling and its limits.

    ``limit`` is the most tokens to generate, at least 1, already within the context window.
    ``stop_ids`` end the row like the model's own end tokens. ``adapters`` are ids, applied in this
    order; None leaves them to the server. Which revisions they stand for is decided when the row
    leaves the queue. ``matcher`` restricts the text, and ends the row where nothing may follow.
    ``logprobs`` is how many alternatives' log-probabilities are wanted, None for no figures.
    ``replay`` is shorter than ``limit`` and counts in it; its tokens are reported first.
    ``checkpoints``: its state is kept now and then while it runs.
    ``session`` is passed on to the prefix cache.
    """

    row: RowId
    prompt: tuple[int, ...]
    sampling: Sampling
    limit: int
    stop_ids: frozenset[int] = frozenset()
    adapters: tuple[str, ...] | None = None
    matcher: TokenMatcher | None = field(default=None, compare=False)
    logprobs: int | None = None
    replay: Replay | None = None
    checkpoints: bool = False
    session: str | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """The row left the queue; ``cached_tokens`` of its prompt need not be computed.

    It runs with ``adapters`` (revisions, in order), and ``replayed`` tokens are not computed but
    said again: they follow at once. It comes a second time, before any token, for a row that has to
    start over because the row whose state it took has failed.
    """

    row: RowId
    cached_tokens: int
    lane: str
    adapters: tuple[str, ...] = ()
    replayed: int = 0


@dataclass(frozen=True, slots=True)
class TokenMade:
    """One more token, in order; an end token is included."""

    row: RowId
    token: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class RowEnded:
    """The row is complete; its last token was already reported."""

    row: RowId
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class RowBroken:
    """The row failed; nothing more will come of it.

    ``param`` names the field of the request that cannot be served, where that is the reason.
    """

    row: RowId
    message: str
    param: str | None = None


RowEvent: TypeAlias = Started | TokenMade | RowEnded | RowBroken


@dataclass(frozen=True, slots=True)
class LookUp:
    """Ask the prefix cache for the longest usable prefix of a row's prompt.

    ``adapters``: revisions, in order, that a usable state was computed with. ``session`` is who
    asks, in the client's own words.
    """

    row: RowId
    ids: tuple[int, ...]
    adapters: tuple[str, ...] = ()
    session: str | None = None


@dataclass(frozen=True, slots=True)
class Store:
    """Offer a kept state of exactly ``ids``, computed with ``adapters``, to the prefix cache.

    No answer; what is not kept is released.
    """

    snapshot: SnapshotId
    ids: tuple[int, ...]
    nbytes: int
    kind: Kind
    adapters: tuple[str, ...] = ()
    session: str | None = None
    origin: Origin | None = None


@dataclass(frozen=True, slots=True)
class ReturnLease:
    """A lent prefix has been copied, or (not ``taken``) never will be."""

    lease: LeaseId
    taken: bool = False


@dataclass(frozen=True, slots=True)
class Discard:
    """A kept state that nobody knows what to do with: the device may forget it."""

    snapshot: SnapshotId


@dataclass(frozen=True, slots=True)
class Missed:
    """A state of so many bytes was not kept: the device had no room for it."""

    nbytes: int


Effect: TypeAlias = RowEvent | LookUp | Store | ReturnLease | Discard | Missed


@dataclass(frozen=True, slots=True)
class QueueFull:
    """The answer to a submission that finds the queue full."""

    waiting: int
    retry_after: float


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Live figures of the scheduler; counts of rows and tokens since its start.

    ``rows_without_room`` run and wait for bytes of state (``reserve.py``); ``shortened`` rows ended
    with ``length`` since all waited.
    """

    waiting_rows: int
    prefill_rows: int
    decode_rows: int
    ending_rows: int
    submitted: int
    finished: int
    cancelled: int
    failed: int
    refused: int
    generated_tokens: int
    prefilled_tokens: int
    shared_tokens: int
    steps: int
    prefill_chunk: int
    decode_step_seconds: float
    reserved_bytes: int = 0
    rows_without_room: int = 0
    shortened: int = 0
