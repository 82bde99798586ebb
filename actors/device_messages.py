"""What is said to the GPU actor, and between it and its worker: commands down, events up.

Frozen values like those of ``messages.py``. A reply rides along untouched by the worker's thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from mlx_troupe.runtime.adapter_fit import AdapterTarget
from mlx_troupe.runtime.adapter_table import Mounting
from mlx_troupe.runtime.adapters import AdapterInfo
from mlx_troupe.runtime.device import DeviceStats, StateSlice
from mlx_troupe.runtime.errors import TroupeError
from mlx_troupe.runtime.model_info import ModelInfo
from mlx_troupe.runtime.plans import SnapshotId, SnapshotMade, StepDone, StepPlan
from mlx_troupe.runtime.spill.state import HostLayer

from .reply import Reply

T = TypeVar("T")
Asked: TypeAlias = (
    Reply[AdapterInfo] | Reply[int] | Reply[tuple[HostLayer, ...]] | Reply[SnapshotMade | None]
)
"""An ask that the worker carries without touching it."""

# ---- to the GPU ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launch:
    """Start a step. With two under way the older one is waited for and answered."""

    plan: StepPlan


@dataclass(frozen=True, slots=True)
class Settle:
    """Nothing more to launch for now: wait for the step under way."""


@dataclass(frozen=True, slots=True)
class Release:
    """Kept states that nobody can ask for any more."""

    snapshots: tuple[SnapshotId, ...]


@dataclass(frozen=True, slots=True)
class DropRows:
    """A new scheduler begins: forget rows and steps under way."""


@dataclass(frozen=True, slots=True)
class Mount:
    """Mount an adapter between two steps. The worker carries the reply without touching it."""

    adapter: str
    path: Path
    reply: Reply[AdapterInfo]


@dataclass(frozen=True, slots=True)
class Unmount:
    """Unmount a revision between two steps: rows that were launched with it keep it."""

    revision: str
    reply: Reply[int]


@dataclass(frozen=True, slots=True)
class Export:
    """Some layers of a kept state as bytes, between two steps; fewer at the state's end.

    Its first ``since`` tokens are not needed. The reply is the layers, or StateRefused.
    """

    snapshot: SnapshotId
    first_layer: int
    count: int
    reply: Reply[tuple[HostLayer, ...]]
    since: int = 0


@dataclass(frozen=True, slots=True)
class Import:
    """Keep a state that was exported: some of its layers, between two steps.

    The reply is None until the last of them is there. It may be StateRefused, and NoRoom where
    the state is in order, or where nobody knows what went wrong.
    """

    part: StateSlice
    reply: Reply[SnapshotMade | None]


GpuCommand: TypeAlias = Launch | Settle | Release | DropRows | Mount | Unmount | Export | Import

# ---- between the GPU actor and its worker --------------------------------------------------


@dataclass(frozen=True, slots=True)
class Open:
    """Load (again), mount adapters and warm up.

    ``strict``: an adapter that cannot be mounted refuses the model; otherwise it is left out.
    """

    mounts: tuple[Mounting, ...] = ()
    strict: bool = True


@dataclass(frozen=True, slots=True)
class Rest:
    """Nothing is running: give memory back."""


@dataclass(frozen=True, slots=True)
class Close:
    """Forget everything; the worker ends."""


WorkerCommand: TypeAlias = GpuCommand | Open | Rest | Close


@dataclass(frozen=True, slots=True)
class Opened:
    """The model is loaded and warm; ``mounted`` are its adapters, ``targets`` what takes one."""

    model: ModelInfo
    stats: DeviceStats
    mounted: tuple[AdapterInfo, ...] = ()
    targets: tuple[AdapterTarget, ...] = ()


@dataclass(frozen=True, slots=True)
class OpenFailed:
    """The model cannot be served."""

    error: TroupeError


@dataclass(frozen=True, slots=True)
class Settled:
    """A step's results, with the device's figures after it."""

    done: StepDone
    stats: DeviceStats


@dataclass(frozen=True, slots=True)
class Rested:
    """Memory was given back."""

    stats: DeviceStats


@dataclass(frozen=True, slots=True)
class Answered(Generic[T]):
    """What a command asked for was done: its reply, the value for it, and the device's figures."""

    reply: Reply[T]
    value: T
    stats: DeviceStats

    def deliver(self) -> None:
        """Settle the reply; on trio's thread."""
        self.reply.set(self.value)


@dataclass(frozen=True, slots=True)
class Refused:
    """What a command asked for cannot be done; nothing has changed."""

    reply: Asked
    error: TroupeError


@dataclass(frozen=True, slots=True)
class Broke:
    """The device raised: rows, states and steps under way are lost."""

    error: Exception


WorkerEvent: TypeAlias = (
    Opened
    | OpenFailed
    | Settled
    | Rested
    | Answered[AdapterInfo]
    | Answered[int]
    | Answered[tuple[HostLayer, ...]]
    | Answered[SnapshotMade | None]
    | Refused
    | Broke
)
