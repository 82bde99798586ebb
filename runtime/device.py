"""The seam between the scheduler and whatever computes: a synchronous device.

A device runs on one thread (``actors/gpu.py`` owns it) and is told *everything* by plain values
(``plans.py``): it keeps weights, rows and snapshots under ids, and answers with host integers. No
array crosses this line. ``runtime.engine`` implements it with MLX, ``actors/testing.py`` with a
script.

Three calls make a step: :meth:`Device.launch` prepares it, :meth:`Device.push` sees that it is
being computed, :meth:`Device.settle` waits for the oldest one that was launched. With one running
and one queued, the input tokens of a step are those that the step before it is still computing;
they never visit the host in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .adapter_fit import AdapterTarget
from .adapters import AdapterInfo
from .model_info import ModelInfo
from .plans import SnapshotId, SnapshotMade, StepDone, StepPlan
from .spill.state import HostLayer, HostState


@dataclass(frozen=True, slots=True)
class StateSlice:
    """Some layers of an exported state, or all of it, to be kept under a new id.

    ``count`` layers from ``first_layer`` on; None = all that are left. ``adapters``: the revisions
    that the state was computed with; they need not be mounted.
    """

    snapshot: SnapshotId
    state: HostState
    adapters: tuple[str, ...] = ()
    first_layer: int = 0
    count: int | None = None


@dataclass(frozen=True, slots=True)
class DeviceStats:
    """Live figures of the device; bytes are bytes, rows and snapshots are counts.

    ``most_snapshot_bytes`` is the most that kept states ever took, between two looks too.
    ``grammar_seconds`` is how long steps have waited for what rows' grammars allow.
    """

    active_bytes: int = 0
    cache_bytes: int = 0
    peak_bytes: int = 0
    kv_bytes: int = 0
    snapshot_bytes: int = 0
    rows: int = 0
    batched_rows: int = 0
    snapshots: int = 0
    most_snapshot_bytes: int = 0
    grammar_seconds: float = 0.0


class Device(Protocol):
    """A thing that computes steps. All calls come from one thread, one at a time."""

    def open(self) -> ModelInfo:
        """Load and warm up. Raises ModelError."""
        ...

    def launch(self, plan: StepPlan) -> None:
        """Start a step without waiting for its result. At most two are under way.

        A fault of one row is reported by its :class:`RowFailed`; an exception here means that the
        device itself is broken and every row is lost.
        """
        ...

    def overlaps(self, plan: StepPlan) -> bool:
        """Whether launching this step delays the result of the one under way by nothing much.

        Where it would, the result is fetched first.
        """
        ...

    def push(self) -> None:
        """Begin to compute what :meth:`launch` may only have prepared.

        Called after each launch; with another step under way, after that one's result was fetched.
        """
        ...

    def settle(self) -> StepDone:
        """Wait for the oldest step under way and return what came of it."""
        ...

    def release(self, snapshots: tuple[SnapshotId, ...]) -> None:
        """Forget kept states. Unknown ids are ignored."""
        ...

    def export(
        self, snapshot: SnapshotId, first_layer: int, count: int, since: int = 0
    ) -> tuple[HostLayer, ...]:
        """Up to ``count`` layers of a kept state as bytes; fewer, or none, when they end there.

        The first ``since`` tokens are left out of arrays in which tokens lie in order.

        Slices of a big state leave between steps. The bytes are nobody else's to change, and stay
        right when the state is released meanwhile. Raises StateRefused for an unknown id or for
        layers that have no form as bytes.
        """
        ...

    def import_state(self, part: StateSlice) -> SnapshotMade | None:
        """Keep a state that was exported from the same model under a new id, bit for bit.

        Slices of a big state arrive between steps, in order. The answer is None until the last of
        them is there; :meth:`release` gives up a state that is not whole. Raises StateRefused for
        what is no state of this model, NoRoom where it would take more than kept states may; then
        nothing of it is kept.
        """
        ...

    def drop_rows(self) -> None:
        """Forget every row and every step under way (a new scheduler begins)."""
        ...

    def mount(self, adapter_id: str, path: Path) -> AdapterInfo:
        """Make the adapter in a folder available to rows that start from now on.

        Rows and steps under way are not disturbed. A revision that is mounted already stays as it
        is, under however many ids; one :meth:`unmount` removes it. Raises AdapterError, and then
        nothing has changed.
        """
        ...

    def unmount(self, revision: str) -> int:
        """Take a revision from rows that start from now on; how many modules it changed.

        Rows that use it keep it until they end; its memory is freed with the last of them. 0 for a
        revision that is not mounted.
        """
        ...

    def adapter_targets(self) -> tuple[AdapterTarget, ...]:
        """The modules that adapters may change, for :func:`.adapter_fit.fit`; none before open."""
        ...

    def stats(self) -> DeviceStats:
        """Live figures; cheap."""
        ...

    def idle(self) -> None:
        """Called when nothing is running: give unused memory back to the system."""
        ...

    def close(self) -> None:
        """Forget everything, adapters too; the device may be opened again."""
        ...
