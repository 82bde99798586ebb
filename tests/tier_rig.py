"""One prompt three ways: computed anew, from a state in memory, and from one that was on the disk.

Every run is teacher-forced: whatever is drawn, the next input is the prompt's own next id. So the
logits of two runs compare position by position, to the last bit. A restart is another device and
another store on the same folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import tiny
import tiny_hybrids
from device_rig import Driver, start_row
from kv_rig import CONFIG, FLIP, TOLERANCE
from spill_rig import Fast
from tiny_families import FAMILIES as TINY

from mlx_troupe.runtime.device import StateSlice
from mlx_troupe.runtime.engine.sampling import Sampler
from mlx_troupe.runtime.kvschemes import (
    PLAIN_KV,
    AffineKV,
    KVScheme,
    PagedKV,
    PerLayerKV,
    TurboKV,
)
from mlx_troupe.runtime.plans import (
    FromSnapshot,
    KeepRow,
    PrefillRow,
    RowId,
    SnapshotId,
    SnapshotMade,
    StepDone,
)
from mlx_troupe.runtime.spill.state import HostState
from mlx_troupe.runtime.spill.store import SpillEntry, SpillStore

NEXT = 8
"""Tokens whose logits are compared."""
WINDOW = 16
THRESHOLD = 30
DECODED = 3
"""Tokens of a batched row's state that were decoded, not prefilled."""
HEADS = {"head_dim": 64}
LISTS = {**tiny_hybrids.HYBRIDS["falcon_h1"], **HEADS, "model_type": "falcon_h1"}
HYBRID = {"text_config": {**TINY["qwen3_5"]["text_config"], **HEADS}}
LAYOUTS: dict[str, tuple[str, dict[str, Any], KVScheme]] = {
    "plain": ("llama", HEADS, PLAIN_KV),
    "affine 4": ("llama", HEADS, AffineKV(4)),
    "affine 8": ("llama", HEADS, AffineKV(8)),
    "by layer": ("llama", HEADS, PerLayerKV()),
    "turbo": ("llama", HEADS, TurboKV()),
    "delayed": ("llama", HEADS, AffineKV(8, start=THRESHOLD)),
    "paged": ("llama", HEADS, PagedKV(16)),
    "rotating": ("sliding", {**HEADS, "sliding_window": WINDOW}, PLAIN_KV),
    "rotating affine 8": ("sliding", {**HEADS, "sliding_window": WINDOW}, AffineKV(8)),
    "rotating turbo": ("sliding", {**HEADS, "sliding_window": WINDOW}, TurboKV(4, 5)),
    "mamba": ("mamba", {}, PLAIN_KV),
    "mamba 2": ("mamba2", {}, PLAIN_KV),
    "hybrid": ("qwen3_5", HYBRID, PLAIN_KV),
    "hybrid affine 8": ("qwen3_5", HYBRID, AffineKV(8)),
    "hybrid of lists": ("llama", LISTS, PLAIN_KV),
}
"""The name of every kind of state, and a model that has it."""

BESIDE = tiny.prompt(9, seed=77)
"""The prompt of the row that shares the batch."""

NAMESPACES = {"half": "alone", "lone": "alone", "batched": "batched"}
"""Of kept states: the whole one may be written as what it has beyond the half, if that is the same
to the byte."""

Logits = list[np.ndarray]
Ids = tuple[int, ...]
Kept = dict[str, tuple[SnapshotId, int]]


@dataclass(slots=True)
class Runs:
    """The logits of one length's runs.

    ``lone``: from all of the prompt but its last token, alone; ``batched``: the same beside another
    row, from a state that a batch made; ``suffix``: from a state of the first half, the other half
    in one pass behind it; ``cut``: the same from the whole state, where that can be cut.
    """

    lone: Logits
    batched: Logits
    suffix: Logits
    cut: Logits | None = None


@dataclass(slots=True)
class Results:
    """All runs by length."""

    cold: dict[int, Runs] = field(default_factory=dict)
    memory: dict[int, Runs] = field(default_factory=dict)
    disk: dict[int, Runs] = field(default_factory=dict)


@contextmanager
def recorded() -> Iterator[Logits]:
    """The logits of every draw, float32 [rows, vocabulary]."""
    seen: Logits = []
    draw = Sampler.draw

    def recording(self: Sampler, logits: mx.array, *rest: Any, **more: Any) -> Any:
        seen.append(np.array(logits.astype(mx.float32)))
        return draw(self, logits, *rest, **more)

    Sampler.draw = recording  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        Sampler.draw = draw  # type: ignore[method-assign]


class Forced(Driver):
    """A device whose rows read a given text, whatever they draw. ``chunk``: tokens of a prefill."""

    def __init__(self, path: Path, kv: KVScheme, logits: Logits, chunk: int) -> None:
        super().__init__(path, kv=kv)
        self._logits = logits
        self._chunk = chunk
        self._rows = count(1)
        self._snapshots = count(1)

    def begin(
        self, ids: Sequence[int], source: FromSnapshot | None = None, pause: int = 0
    ) -> tuple[RowId, SnapshotId]:
        """A row, prefilled but for its last id; a chunk ends at ``pause``, where it is kept."""
        row, snapshot = RowId(next(self._rows)), SnapshotId(next(self._snapshots))
        self.step(start=(start_row(row, ids, source),))
        have = 0 if source is None else source.length
        if pause:
            self._prefill(row, have, pause)
            self.keep(row, pause, snapshot)
        self._prefill(row, pause or have, len(ids) - 1)
        assert not self.failed, self.failed
        return row, snapshot

    def read(
        self, row: RowId, text: Sequence[int], *company: RowId, keep: int = 0
    ) -> tuple[Logits, SnapshotId]:
        """The row's logits while it reads ``text``, which begins with its pending token.

        ``keep`` tokens of its state are kept before the first.
        """
        found: Logits = []
        snapshot = SnapshotId(next(self._snapshots))
        for at, token in enumerate(text):
            if at:
                self.force(row, token)
            self._logits.clear()
            asked = {"keep": (KeepRow(row, keep, snapshot),)} if keep and not at else {}
            done = self.step(decode=(row, *company), **asked)
            found.append(self._of(row, done))
        assert not keep or isinstance(self.kept[snapshot], SnapshotMade), self.kept[snapshot]
        return found, snapshot

    def force(self, row: RowId, token: int) -> None:
        """Whatever the row drew, this is what it reads next."""
        self.device._rows[row].pending = (mx.array([token], dtype=mx.uint32), 0)

    def end(self, *rows: RowId) -> None:
        """Rows leave."""
        self.step(end=rows)

    def restore(self, state: HostState) -> SnapshotId:
        """A state that was read back."""
        snapshot = SnapshotId(next(self._snapshots))
        self.device.import_state(StateSlice(snapshot, state))
        return snapshot

    def _prefill(self, row: RowId, first: int, last: int) -> None:
        for at in range(first, last, self._chunk):
            self.step(prefill=(PrefillRow(row, min(self._chunk, last - at)),))

    def _of(self, row: RowId, done: StepDone) -> np.ndarray:
        places = [sampled.row for sampled in done.sampled]
        (logits,) = self._logits
        found: np.ndarray = logits[places.index(row)]
        return found


class Tiers:
    """One layout's prompts, cold, from memory and from the disk. Use within :func:`recorded`."""

    def __init__(self, folder: Path, layout: str, logits: Logits, chunk: int = 512) -> None:
        family, config, self._kv = LAYOUTS[layout]
        self._path = tiny.make_checkpoint(folder / "model", family, **config)
        (self._path / "kv_config.json").write_text(CONFIG)
        self._cache = folder / "cache"
        self._logits = logits
        self._chunk = chunk

    def compare(self, lengths: Iterable[int]) -> Results:
        """Every run at every length, and its logits."""
        results = Results()
        texts = {length: tiny.prompt(length + NEXT, seed=length) for length in lengths}
        device, store = self.open()
        for length, text in texts.items():
            kept = self._compute(device, text, length, results)
            self._write(device, store, text, kept)
            results.memory[length] = self._go_on(device, text, length, kept)
        device.device.close()
        device, store = self.open()
        for length, text in texts.items():
            kept = self._read(device, store, text, length)
            results.disk[length] = self._go_on(device, text, length, kept)
        device.device.close()
        return results

    def open(self) -> tuple[Forced, SpillStore]:
        """As after a start of the process."""
        store = SpillStore(self._cache, files=Fast())
        store.open()
        return Forced(self._path, self._kv, self._logits, self._chunk), store

    def _compute(self, device: Forced, text: Ids, length: int, found: Results) -> Kept:
        """Cold runs, and the states that they leave."""
        row, _ = device.begin(text[: length + 1])
        alone, lone = device.read(row, text[length:], keep=length)
        device.end(row)
        row, _ = device.begin(text[: length - DECODED + 1])
        company, _ = device.begin(BESIDE)
        device.read(row, text[length - DECODED : length], company)
        device.force(row, text[length])
        beside, batched = device.read(row, text[length:], company, keep=length)
        device.end(row, company)
        row, half = device.begin(text[: length + 1], pause=length // 2)
        halves, _ = device.read(row, text[length:])
        device.end(row)
        found.cold[length] = Runs(alone, beside, halves)
        return {"half": (half, length // 2), "lone": (lone, length), "batched": (batched, length)}

    def _go_on(self, device: Forced, text: Ids, length: int, kept: Kept) -> Runs:
        """Runs from kept states, which are released."""

        def alone(kind: str, have: int) -> Logits:
            row, _ = device.begin(text[: length + 1], FromSnapshot(kept[kind][0], have))
            logits, _ = device.read(row, text[length:])
            device.end(row)
            return logits

        row, _ = device.begin(text[: length + 1], FromSnapshot(kept["batched"][0], length))
        company, _ = device.begin((*BESIDE, *BESIDE[:DECODED]))
        beside, _ = device.read(row, text[length:], company)
        device.end(row, company)
        runs = Runs(alone("lone", length), beside, alone("half", length // 2))
        if device.info.can_cut(length, length // 2):
            runs.cut = alone("lone", length // 2)
        device.device.release(tuple(snapshot for snapshot, _ in kept.values()))
        return runs

    def _write(self, device: Forced, store: SpillStore, text: Ids, kept: Kept) -> None:
        for kind, (snapshot, length) in kept.items():
            cuttable = device.info.can_trim(length)
            entry = SpillEntry(NAMESPACES[kind], text[:length], "prompt", cuttable)
            assert store.save(entry, device.export(snapshot))

    def _read(self, device: Forced, store: SpillStore, text: Ids, length: int) -> Kept:
        kept: Kept = {}
        for kind, have in (("half", length // 2), ("lone", length), ("batched", length)):
            floor = device.info.trim_floor
            hit = store.lookup(text[: have + 1], NAMESPACES[kind], trim_floor=floor)
            assert hit is not None
            assert hit.length == have
            kept[kind] = device.restore(store.load(hit.key, upto=have).state), have
        return kept


def same(one: Logits, other: Logits) -> bool:
    """Every bit of eight positions' logits."""
    return len(one) == len(other) == NEXT and all(
        np.array_equal(x.view(np.uint32), y.view(np.uint32))
        for x, y in zip(one, other, strict=True)
    )


def off(one: Logits, other: Logits) -> float:
    """The largest difference of any logit."""
    return max(float(np.abs(x - y).max()) for x, y in zip(one, other, strict=True))


def differences(layout: str, results: Results) -> list[str]:
    """In words, whatever is not as it must be.

    Where a layout encodes, what a pass sees depends on where the passes before it ended, in mlx-lm
    too. So a cut state is compared with the cold run that pauses there; a key that differs in its
    last bit may then fall to another code, once.
    """
    told, flips = [], 0
    encodes = isinstance(LAYOUTS[layout][2], AffineKV | PerLayerKV | TurboKV)
    for length, disk in results.disk.items():
        cold, memory = results.cold[length], results.memory[length]
        for name in ("lone", "batched", "suffix"):
            runs = [getattr(tier, name) for tier in (cold, memory, disk)]
            if not same(*runs[:2]):
                told.append(f"{length} {name}: memory is off by {off(*runs[:2])}")
            if not same(*runs[1:]):
                told.append(f"{length} {name}: the disk is off by {off(*runs[1:])}")
        if memory.cut is None or disk.cut is None:
            continue
        if not same(memory.cut, disk.cut):
            told.append(f"{length} cut: the disk is off by {off(memory.cut, disk.cut)}")
        if (apart := off(memory.cut, cold.suffix if encodes else cold.lone)) > TOLERANCE:
            flips += encodes and apart <= FLIP
            if flips != 1:
                told.append(f"{length} cut: memory is off by {apart}")
    return told


def tampered(state: HostState) -> HostState:
    """The leading digit of the last number of the first array is another."""
    (layer, *rest) = state.layers
    (array, *arrays) = layer.arrays
    data = bytearray(array.data)
    data[-2] ^= 0x40
    layer = replace(layer, arrays=(replace(array, data=bytes(data)), *arrays))
    return replace(state, layers=(layer, *rest))
