"""What the actors say to each other: closed unions of frozen values, one per receiver.

Commands are imperative, events are in the past tense. No array, no text, no task in them; a
:class:`~mlx_troupe.actors.reply.Reply` or a send end is the only live thing that may ride along.
``device_messages.py`` has those to the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import trio

from mlx_troupe.runtime.adapters import AdapterInfo
from mlx_troupe.runtime.model_info import ModelInfo
from mlx_troupe.runtime.plans import RowId, SnapshotId, StepDone
from mlx_troupe.runtime.prefix.entries import Hit
from mlx_troupe.runtime.prefix.explain import Explanation
from mlx_troupe.runtime.scheduling.effects import (
    LookUp,
    Missed,
    ReturnLease,
    RowEvent,
    RowSpec,
    Store,
)

from .reply import Reply
from .spill_messages import Closed, Flush, FlushDisk, Forget, Prefetch, Restore, Restored, Save

# ---- to the scheduler ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit:
    """A request wants a row. ``events`` has room for everything that the row can ever say.

    The reply is settled with None once the row is queued, or with
    :class:`~mlx_troupe.runtime.errors.Overloaded`.
    """

    spec: RowSpec
    events: trio.MemorySendChannel[RowEvent]
    reply: Reply[None]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody wants this row any more; the last word of every request, and the end of its place.

    ``served``: the client has all that it asked for. Unknown rows are ignored.
    """

    row: RowId
    served: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """The prefix cache's answer; None is a miss."""

    row: RowId
    hit: Hit | None


@dataclass(frozen=True, slots=True)
class StepSettled:
    """A step's results."""

    done: StepDone


@dataclass(frozen=True, slots=True)
class DeviceReady:
    """The device holds a model and no rows."""

    model: ModelInfo


@dataclass(frozen=True, slots=True)
class DeviceLost:
    """Every row and every kept state is gone."""

    reason: str


@dataclass(frozen=True, slots=True)
class CacheLost:
    """The prefix cache was restarted empty; its states may be released by whoever plans steps."""

    snapshots: tuple[SnapshotId, ...]


SchedulerMessage: TypeAlias = (
    Submit | Cancel | Found | StepSettled | DeviceReady | DeviceLost | CacheLost
)

# ---- to the prefix cache; what the scheduler's core asks of it comes as the core said it --------


@dataclass(frozen=True, slots=True)
class Explain:
    """What the cache has for a prompt now, and why no more; it changes nothing.

    The reply is the explanation and how many tokens the disk could serve; None without a model.
    """

    ids: tuple[int, ...]
    adapters: tuple[str, ...]
    session: str | None
    reply: Reply[tuple[Explanation, int] | None]


@dataclass(frozen=True, slots=True)
class CloseSession:
    """What only this session used may go first; the reply says whether anything was known of it."""

    session: str
    reply: Reply[bool]


@dataclass(frozen=True, slots=True)
class EndAllLeases:
    """Whoever held leases was restarted."""


@dataclass(frozen=True, slots=True)
class Pressed:
    """The device's memory is nearly used up: see what can be given up."""


@dataclass(frozen=True, slots=True)
class Clear:
    """Forget everything that is not lent; the reply is the number of entries forgotten."""

    reply: Reply[int]


CacheMessage: TypeAlias = (
    LookUp
    | Store
    | ReturnLease
    | EndAllLeases
    | Missed
    | Pressed
    | Clear
    | CloseSession
    | Explain
    | Prefetch
    | Restored
    | Flush
    | DeviceReady
    | DeviceLost
)

# ---- to the spill actor --------------------------------------------------------------------


SpillMessage: TypeAlias = Save | Forget | Restore | Closed | FlushDisk | DeviceLost

# ---- to the adapters -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MountAdapter:
    """Mount the adapter in a folder under an id; what had the id before is replaced.

    The reply is what was mounted, or an AdapterError, and then nothing has changed.
    """

    adapter: str
    path: Path
    reply: Reply[AdapterInfo]


@dataclass(frozen=True, slots=True)
class UnmountAdapter:
    """Take an adapter from requests that start from now on.

    The reply is how many modules it changed, or an AdapterError when it is not mounted.
    """

    adapter: str
    reply: Reply[int]


AdapterMessage: TypeAlias = MountAdapter | UnmountAdapter
