"""Values of the prefix index: what it keeps, what it answers and what it counts.

Plain data, run by no task of its own. ``index.py`` owns every :class:`Entry`; all other values
here are frozen and may be sent anywhere. Nothing here knows what a state is made of: a snapshot is
an id and a size in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NewType, TypeAlias

from ..plans import RowId, SnapshotId

LeaseId = NewType("LeaseId", int)
"""A promise not to release a snapshot; unique for the life of the process."""

Kind: TypeAlias = Literal["prompt", "final", "partial"]
"""What a state was taken at: a prompt's boundary, a row's end, or an interrupted prefill."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The row that a state is of.

    Attributes:
        runs: it was kept on the way, for the case of a crash, and is of no more use once a later
            one of the row is safe that is not unheard.
        unheard: its client left, perhaps before the last tokens in it: who goes on from what the
            client had may need an earlier state.
    """

    row: RowId
    runs: bool
    unheard: bool = False


def namespace_of(model: str, adapters: tuple[str, ...]) -> str:
    """The namespace of states that a model computed with these adapter revisions, in order."""
    return "\n".join((model, *adapters))


def model_of(namespace: str) -> str:
    """The model of a namespace."""
    return namespace.split("\n")[0]


def adapters_of(namespace: str) -> tuple[str, ...]:
    """The adapter revisions of a namespace, in order."""
    return tuple(namespace.split("\n")[1:])


@dataclass(eq=False, slots=True)
class Entry:
    """One kept state; compared by identity.

    Attributes:
        snapshot: the device's name for the state.
        namespace: states of different namespaces are never interchangeable.
        length: tokens that the state holds, equal to the number of its ids.
        nbytes: what the state costs on the device.
        kind: what it was taken at.
        cuttable: the state can be cut to any shorter length.
        used: rising number of the last put or hit; larger is more recent.
        leases: how many leases hold it.
        uses: how often it was of use; old uses fade (``worth.py``).
        session: the client's name for the chat that it belongs to, a hint for eviction only.
        shared: others than that session used it.
    """

    snapshot: SnapshotId
    namespace: str
    length: int
    nbytes: int
    kind: Kind
    cuttable: bool
    used: int = 0
    leases: int = 0
    uses: int = 1
    session: str | None = None
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Hit:
    """The first ``length`` tokens of ``snapshot`` may be used until ``lease`` is ended."""

    snapshot: SnapshotId
    length: int
    lease: LeaseId


@dataclass(frozen=True, slots=True)
class PutResult:
    """Whether the new state was kept, and what must now be released on the device.

    A state that was not kept is itself among ``release``.
    """

    kept: bool
    release: tuple[SnapshotId, ...]


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """Live figures and counters since the start.

    Attributes:
        entries: states that a lookup can find.
        prompt_entries, final_entries, partial_entries: the same by kind.
        bytes: device memory of all states not yet released, leased ones included.
        budget_bytes: what ``bytes`` is held under, leases permitting.
        detached_bytes: of ``bytes``, states that no lookup finds any more and a lease still holds.
        leases: leases not yet ended.
        hits, misses: lookups.
        puts: states kept; refused: states not kept.
        evictions: states given up for room.
        evicted_tokens: of these, tokens that no other state can serve.
        sessions: sessions that a state belongs to and that are not closed.
        tokens_reused: sum of the lengths of all hits.
        set_aside_bytes: of ``budget_bytes``, what is left to states that are not entries.
        handed_over: states of more than half the budget that a row took with it.
        pressed_out: of ``evictions``, those for want of memory on the device.
        missed: states that the device did not keep, since there was no room for them.
    """

    entries: int
    prompt_entries: int
    final_entries: int
    partial_entries: int
    bytes: int
    budget_bytes: int
    detached_bytes: int
    leases: int
    hits: int
    misses: int
    puts: int
    refused: int
    evictions: int
    evicted_tokens: int
    sessions: int
    tokens_reused: int
    set_aside_bytes: int = 0
    handed_over: int = 0
    pressed_out: int = 0
    missed: int = 0
