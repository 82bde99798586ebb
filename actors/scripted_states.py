"""The kept states of a scripted device, in memory and as bytes.

Part of the test kit; ``testing.ScriptedDevice`` is built on it. A state is the ids that it was
computed from, so that whoever goes on from a wrong one is found out.
"""

from __future__ import annotations

from array import array

from mlx_troupe.runtime.device import StateSlice
from mlx_troupe.runtime.errors import NoRoom, StateRefused
from mlx_troupe.runtime.model_info import ModelInfo
from mlx_troupe.runtime.plans import SnapshotId, SnapshotMade
from mlx_troupe.runtime.spill.state import HostArray, HostLayer, HostState

_KIND = "scripted"


class ScriptedStates:
    """Kept states by id.

    They take one byte an id, and at most ``snapshot_limit`` together.

    As bytes each is ``layers`` times its ids, one array a layer. The array has a token axis unless
    the model says that a state of this length cannot be cut.
    """

    layers = 2
    snapshot_limit: int | None = None
    most_snapshot_bytes = 0

    def __init__(self, model: ModelInfo) -> None:
        self.model = model
        self.snapshots: dict[SnapshotId, tuple[int, ...]] = {}
        self.made_with: dict[SnapshotId, tuple[str, ...]] = {}
        self.arriving: dict[SnapshotId, tuple[HostState, int]] = {}

    @property
    def snapshot_bytes(self) -> int:
        """What all kept states take."""
        coming = sum(state.length for state, _ in self.arriving.values())
        return coming + sum(map(len, self.snapshots.values()))

    def has_room(self, nbytes: int) -> bool:
        """Whether a further state may be kept."""
        limit = self.snapshot_limit
        return limit is None or self.snapshot_bytes + nbytes <= limit

    def keep_state(
        self, snapshot: SnapshotId, ids: tuple[int, ...], adapters: tuple[str, ...]
    ) -> SnapshotMade:
        """Keep a state that there is room for."""
        self.snapshots[snapshot] = ids
        self.made_with[snapshot] = adapters
        self.most_snapshot_bytes = max(self.most_snapshot_bytes, self.snapshot_bytes)
        return SnapshotMade(snapshot, len(ids), len(ids))

    def release(self, snapshots: tuple[SnapshotId, ...]) -> None:
        """Forget kept states."""
        for snapshot in snapshots:
            self.snapshots.pop(snapshot, None)
            self.arriving.pop(snapshot, None)
            self.made_with.pop(snapshot, None)

    def export(
        self, snapshot: SnapshotId, first_layer: int, count: int, since: int = 0
    ) -> tuple[HostLayer, ...]:
        """The ids, once a layer. Raises StateRefused for an unknown id."""
        if (ids := self.snapshots.get(snapshot)) is None:
            raise StateRefused(f"snapshot {snapshot} is not kept")
        layer = self._layer(ids, since)
        return (layer,) * len(range(self.layers)[first_layer : first_layer + count])

    def import_state(self, part: StateSlice) -> SnapshotMade | None:
        """Keep ids that were exported. Raises StateRefused for anything else, and NoRoom."""
        snapshot, state, first_layer = part.snapshot, part.state, part.first_layer
        if snapshot in self.snapshots:
            raise StateRefused(f"snapshot {snapshot} is kept already")
        before = self.arriving.pop(snapshot, None)
        if first_layer and before != (state, first_layer):
            raise StateRefused(f"layer {first_layer} of snapshot {snapshot} is not the next")
        ids = self._ids(state)
        if not self.has_room(len(ids)):
            raise NoRoom(f"no room for {len(ids)} tokens")
        there = self.layers if part.count is None else first_layer + part.count
        if there < self.layers:
            self.arriving[snapshot] = state, there
            return None
        return self.keep_state(snapshot, ids, part.adapters)

    def _ids(self, state: HostState) -> tuple[int, ...]:
        ids: tuple[int, ...] = ()
        if state.layers and state.layers[0].arrays:
            data = state.layers[0].arrays[0].data
            ids = tuple(array("i", bytes(data))) if len(data) % 4 == 0 else ()
        if state.first or len(ids) != state.length:
            raise StateRefused(f"a state of {state.length} tokens has {len(ids)}")
        if state.layers != (self._layer(ids),) * self.layers:
            raise StateRefused("its layers are not those of this model")
        return ids

    def _layer(self, ids: tuple[int, ...], since: int = 0) -> HostLayer:
        axis = 0 if self.model.can_trim(len(ids)) else None
        told = ids if axis is None else ids[since:]
        data = HostArray("int32", (len(told),), array("i", told).tobytes())
        return HostLayer(_KIND, (), (data,), (axis,))
