"""A disk in memory, for tests on virtual time: slow, full or broken as they order it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import trio

from mlx_troupe.runtime.prefix.entries import model_of
from mlx_troupe.runtime.spill.candidates import Candidate
from mlx_troupe.runtime.spill.faults import Absent, SpillFault
from mlx_troupe.runtime.spill.index import Near, Neighbours
from mlx_troupe.runtime.spill.state import HostState, nbytes

from .disk import DiskStats, Loaded, OnDisk


class ScriptedDisk:
    """States by their ids, for as long as the object lives: several runtimes may share it.

    Args:
        save_seconds, load_seconds, open_seconds: what things cost in virtual time.

    ``fault`` is raised by all that waits, as long as it is set; ``crash`` is raised once, by the
    next save or load, as no disk would. ``log`` says what was begun, in order.
    """

    def __init__(
        self, *, save_seconds: float = 0.0, load_seconds: float = 0.0, open_seconds: float = 0.0
    ) -> None:
        self.save_seconds = save_seconds
        self.load_seconds = load_seconds
        self.open_seconds = open_seconds
        self.states: dict[str, tuple[Candidate, HostState]] = {}
        self.fault: SpillFault | None = None
        self.crash: Exception | None = None
        self.log: list[str] = []
        self.is_open = False
        self._names = count(1)

    def find(self, ids: Sequence[int], namespace: str, trim_floor: int) -> OnDisk | None:
        """By looking at every state."""
        best: OnDisk | None = None
        for name, (kept, _) in self.states.items() if self.is_open else ():
            shared = _shared(kept.ids, ids[:-1]) if kept.namespace == namespace else 0
            whole = shared == len(kept.ids)
            may_cut = kept.cuttable and not shared < trim_floor <= len(kept.ids)
            if (whole or may_cut) and shared > (0 if best is None else best.useful):
                best = OnDisk(name, shared, len(kept.ids), namespace)
        return best

    def nearest(self, ids: Sequence[int], namespace: str) -> Neighbours:
        """By looking at every state."""
        near: dict[str, Near] = {}
        for kept, _ in self.states.values() if self.is_open else ():
            is_kin = model_of(kept.namespace) == model_of(namespace)
            name = "own" if kept.namespace == namespace else ("adapters" if is_kin else "setups")
            found = Near(_shared(kept.ids, ids), len(kept.ids))
            if found.shared > (near[name].shared if name in near else 0):
                near[name] = found
        return Neighbours(**near)

    def count(self, namespace: str) -> int:
        """By looking at every state."""
        models = [model_of(kept.namespace) for kept, _ in self.states.values()]
        return models.count(model_of(namespace))

    def holds(self, candidate: Candidate) -> bool:
        """By looking at every state."""
        return any(
            kept.covers(candidate)
            or (kept.namespace == candidate.namespace and kept.ids == candidate.ids)
            for kept, _ in self.states.values()
        )

    def stats(self) -> DiskStats:
        """Counts."""
        size = sum(nbytes(state) for _, state in self.states.values())
        longest = max((len(kept.ids) for kept, _ in self.states.values()), default=0)
        return DiskStats("scripted", len(self.states), size, longest_tokens=longest)

    def written(self, within: float) -> tuple[tuple[float, int], ...]:
        """All that is here was there from the start."""
        return ()

    async def open(self) -> None:
        """Find what earlier runtimes left."""
        await self._spend("open", self.open_seconds)
        self.is_open = True

    def crowded_out(self, candidate: Candidate) -> None:
        """It has room for everything."""

    def note_use(self, candidate: Candidate) -> bool:
        """Nothing ever goes."""
        return self.holds(candidate)

    def close_session(self, session: str) -> bool:
        """Nothing ever goes, so who wants it is all that changes."""
        closed = {n: kept for n, kept in self.states.items() if kept[0].session == session}
        for name, (kept, state) in closed.items():
            self.states[name] = replace(kept, session=None), state
        return bool(closed)

    def continued(self, candidate: Candidate) -> int:
        """Every state is kept whole."""
        return 0

    async def save(self, candidate: Candidate, state: HostState) -> int:
        """Keep a state."""
        await self._spend(f"save {len(candidate.ids)}", self.save_seconds)
        self.states[f"{next(self._names)}"] = candidate, state
        return nbytes(state)

    async def load(self, entry: OnDisk) -> Loaded:
        """Give a state back. One that was taken away meanwhile is a fault."""
        await self._spend(f"load {entry.length}", self.load_seconds)
        if entry.name not in self.states:
            raise Absent(entry.name)
        kept, state = self.states[entry.name]
        return Loaded(state, kept.ids, kept.kind, kept.session)

    async def note_closed(self) -> None:
        """What is in memory outlives everything."""
        await self._spend("note closed", 0.0)

    async def reject(self, entry: OnDisk) -> None:
        """Forget a state."""
        await self._spend(f"reject {entry.length}", 0.0)
        self.states.pop(entry.name, None)

    async def _spend(self, what: str, seconds: float) -> None:
        self.log.append(what)
        await trio.sleep(seconds)
        crash, self.crash = self.crash, None
        if crash is not None:
            raise crash
        if self.fault is not None:
            raise self.fault


def _shared(left: Sequence[int], right: Sequence[int]) -> int:
    for place, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return place
    return min(len(left), len(right))
