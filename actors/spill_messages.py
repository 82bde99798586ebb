"""Messages about states that go to the disk and come back, whoever gets them.

Frozen values like all others; ``messages.py`` has the unions that they belong to.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_troupe.runtime.plans import SnapshotId
from mlx_troupe.runtime.spill.candidates import Candidate

from .disk import OnDisk
from .reply import Reply

# ---- to the prefix cache -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prefetch:
    """A request with these ids waits for its turn: bring what the disk has for it. No answer."""

    ids: tuple[int, ...]
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Restored:
    """What became of a restore: a state was kept on the device, or (None) cannot be had."""

    entry: OnDisk
    state: Candidate | None


@dataclass(frozen=True, slots=True)
class FlushReport:
    """How far all kept states are safe.

    Attributes:
        durable: nothing waits, is missing, or was dropped or failed since the last report.
        flushed, missing: kept states that are on the disk, and that are not.
        pending, pending_bytes: states that still wait to be written; on_device: those of them
            that only the device has.
        dropped, failed: states that were given up since the last report.
        crowded: of those missing, those that the disk's cap has no room for; these are not among
            the dropped.
        seconds: what it took.
        entries: states on the disk; longest_tokens: of the longest of them.
    """

    durable: bool
    flushed: int
    missing: int
    pending: int
    pending_bytes: int
    on_device: int
    dropped: int
    failed: int
    seconds: float
    entries: int
    longest_tokens: int
    crowded: int = 0


@dataclass(frozen=True, slots=True)
class Flush:
    """Write every kept state that is not on the disk; answered by ``until`` of trio's clock."""

    reply: Reply[FlushReport]
    until: float


# ---- to the spill actor --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Save:
    """A state was kept: write it, some time. No answer."""

    candidate: Candidate


@dataclass(frozen=True, slots=True)
class Forget:
    """The memory tier has let go of states: release them, now or once they are written."""

    snapshots: tuple[SnapshotId, ...]


@dataclass(frozen=True, slots=True)
class Restore:
    """Bring a state back; answered with :class:`Restored`."""

    entry: OnDisk


@dataclass(frozen=True, slots=True)
class Closed:
    """Nobody goes on with a chat: its states are nobody's, those to come too. No answer."""

    session: str


@dataclass(frozen=True, slots=True)
class FlushDisk:
    """Answer when nothing waits to be written any more, or when it is ``until``.

    ``candidates`` are the states that are kept, all of them offered before.
    """

    reply: Reply[FlushReport]
    candidates: tuple[Candidate, ...]
    until: float
