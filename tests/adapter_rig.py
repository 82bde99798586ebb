"""A device whose rows have adapters: folders, tokens, and the logits of every decode by row."""

from __future__ import annotations

import gc
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
from lora_rig import ATTENTION_AND_MLP, EXPERTS, logits_of, make_mlx_adapter, write_folder
from ragged_rig import assert_equal
from tiny import make_checkpoint, prompt

from mlx_troupe.runtime.engine.adapters import Adapters
from mlx_troupe.runtime.engine.compiled import CompiledDecode
from mlx_troupe.runtime.engine.executor import MLXDevice
from mlx_troupe.runtime.engine.fusing import fuse_projections
from mlx_troupe.runtime.engine.opening import Options
from mlx_troupe.runtime.plans import (
    Cold,
    PrefillRow,
    RowFailed,
    RowId,
    Source,
    StartRow,
    StepId,
    StepPlan,
)
from mlx_troupe.runtime.requests import Sampling

EMBEDDING = ("model.embed_tokens",)
HEAD = ("lm_head",)
MODELS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "llama": ("llama", {}, ATTENTION_AND_MLP),
    "untied": ("llama", {}, ATTENTION_AND_MLP + EMBEDDING + HEAD),
    "tied": ("llama", {"tie_word_embeddings": True}, ATTENTION_AND_MLP + EMBEDDING),
    "4-bit": ("llama", {"bits": 4}, ATTENTION_AND_MLP + HEAD),
    "4-bit tied": ("llama", {"bits": 4, "tie_word_embeddings": True}, EMBEDDING),
    "sliding": ("sliding", {}, ATTENTION_AND_MLP),
    "experts": ("qwen3_moe", {}, EXPERTS),
    "4-bit experts": ("qwen3_moe", {"bits": 4}, EXPERTS),
    "recurrent": ("mamba", {}, ("mixer.in_proj", "mixer.x_proj", "mixer.out_proj")),
}


class Folders:
    """Checkpoints and adapters of ``MODELS``, each written once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[object, Path] = {}

    def checkpoint(self, name: str) -> Path:
        family, config, _ = MODELS[name]
        path = self._root / name.replace(" ", "-")
        if name not in self._made:
            self._made[name] = make_checkpoint(path, family, **config)
        return self._made[name]

    def adapter(self, name: str, letter: str, keys: Sequence[str] | None = None) -> Path:
        """Adapters of one model differ by their letter: in weights, rank and scale."""
        keys = MODELS[name][2] if keys is None else tuple(keys)
        path = self._root / f"{name}-{letter}-{len(keys)}".replace(" ", "-")
        if path not in self._made:
            seed = ord(letter)
            rank, scale = 2 + 3 * (seed % 3), 0.5 + seed % 4
            self._made[path] = make_mlx_adapter(
                path, self.checkpoint(name), seed=seed, rank=rank, scale=scale, keys=keys
            )
        return self._made[path]


@contextmanager
def desks(folders: Folders, *, replayed: bool = False) -> Iterator[Callable[[str], Desk]]:
    """Opens devices of models by name; ``replayed``: their steps are, as on a GPU."""
    with ExitStack() as opened:

        def start(name: str) -> Desk:
            desk = Desk(folders.checkpoint(name))
            opened.callback(desk.device.close)
            if replayed:
                desk.replay()
            return desk

        yield start


class Desk:
    """A device, its rows' tokens, and the logits of every decode by row."""

    def __init__(self, path: Path) -> None:
        self.device = MLXDevice(Options(path, name="tiny", dtype="keep"))
        self.device.open()
        self.tokens: defaultdict[int, list[int]] = defaultdict(list)
        self.logits: defaultdict[int, list[mx.array]] = defaultdict(list)
        self.prompts: dict[int, tuple[int, ...]] = {}
        self.failed: list[RowFailed] = []
        self.replays = 0
        self._steps = 0
        forward: Any = self.device._forward
        run = forward._run

        def recording(rows: Any, tokens: mx.array, caches: Any) -> mx.array:
            logits: mx.array = run(rows, tokens, caches)
            if tokens.shape[1] == 1:
                for place, row in enumerate(rows):
                    self.logits[row.id].append(logits[place, -1])
            return logits

        forward._run = recording

    @property
    def adapters(self) -> Adapters:
        forward: Any = self.device._forward
        assert isinstance(forward._adapters, Adapters)
        return forward._adapters

    def replay(self) -> None:
        """Compute as on a GPU."""
        forward: Any = self.device._forward
        assert fuse_projections(self.device.model) > 0
        batch = forward._batch
        self.compiled = CompiledDecode(self.device.model, batch, self.adapters)
        forward._compiled = self.compiled
        replay = self.compiled.logits

        def recording(tokens: mx.array, chains: Any) -> mx.array | None:
            if (logits := replay(tokens, chains)) is not None:
                self.replays += 1
                for place, row in enumerate(batch.rows):
                    self.logits[row].append(logits[place, -1])
            return logits

        self.compiled.logits = recording  # type: ignore[method-assign]

    def mount(self, folder: Path) -> str:
        return self.device.mount(folder.name, folder).revision

    def step(self, **parts: Any) -> None:
        self._steps += 1
        self.device.launch(StepPlan(StepId(self._steps), **parts))
        self.device.push()
        done = self.device.settle()
        for sampled in done.sampled:
            self.tokens[sampled.row].append(sampled.token)
        self.failed += done.failed

    def start(
        self,
        rows: dict[int, tuple[str, ...]],
        lengths: Sequence[int] = (9, 30, 17, 4, 41, 12),
        source: Source | None = None,
        **parts: Any,
    ) -> None:
        """Start rows with these adapters and prefill them together."""
        have = 0 if source is None or isinstance(source, Cold) else source.length
        starts: list[StartRow] = []
        chunks: list[PrefillRow] = []
        for row, adapters in rows.items():
            ids = prompt(lengths[row % len(lengths)], seed=row)
            self.prompts[row] = ids
            starts.append(StartRow(RowId(row), ids, Sampling(), source or Cold(), adapters))
            chunks.append(PrefillRow(RowId(row), len(ids) - 1 - have))
        self.step(start=tuple(starts), prefill=tuple(chunks), **parts)

    def decode(self, count: int, *rows: int, **parts: Any) -> None:
        for _ in range(count):
            self.step(decode=tuple(RowId(row) for row in rows), **parts)
            parts = {}

    def end(self, *rows: int) -> None:
        self.step(end=tuple(RowId(row) for row in rows))

    def text(self, row: int) -> tuple[int, ...]:
        return self.prompts[row] + tuple(self.tokens[row])

    def compare(self, row: int, alone: Any) -> None:
        """A row's logits at each position with those of ``alone``, reading the same text."""
        expected = logits_of(alone, self.text(row)[:-1])[len(self.prompts[row]) - 1 :]
        assert_equal(mx.stack(self.logits[row]), expected)


def summed(path: Path, *folders: Path) -> Path:
    """One adapter that does what several do: their ranks side by side, their scales inside."""
    loaded: list[tuple[float, Any]] = []
    for folder in folders:
        scale = json_of(folder)["lora_parameters"]["scale"]
        loaded.append((scale, mx.load(str(folder / "adapters.safetensors"))))
    weights: dict[str, mx.array] = {}
    for name in loaded[0][1]:
        parts = [w[name] if name.endswith("_a") else scale * w[name] for scale, w in loaded]
        weights[name] = mx.concatenate(parts, axis=1 if name.endswith("_a") else 0)
    config = json_of(folders[0])
    rank = next(w.shape[1] for name, w in weights.items() if name.endswith("_a"))
    config["lora_parameters"] |= {"scale": 1.0, "rank": rank}
    return write_folder(path, config, weights)


def json_of(folder: Path) -> Any:
    return json.loads((folder / "adapter_config.json").read_text())


def settled_memory(one: Desk) -> int:
    """Bytes of live arrays at rest, but for what the test itself recorded."""
    one.logits.clear()
    one.device.idle()
    gc.collect()
    return one.device.stats().active_bytes
