"""Adapter folders for tests: mlx-lm's, made by its own tuner, and PEFT-shaped ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tiny import load_oracle

import mlx.core as mx  # isort: skip
import mlx.nn as nn  # isort: skip
from mlx.utils import tree_flatten, tree_map_with_path  # isort: skip
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters  # isort: skip

ATTENTION_AND_MLP = (
    "self_attn.q_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.down_proj",
)
EXPERTS = ("self_attn.q_proj", "mlp.switch_mlp.gate_proj", "mlp.switch_mlp.down_proj")


def make_mlx_adapter(
    path: Path,
    checkpoint: Path,
    *,
    seed: int = 1,
    rank: int = 4,
    scale: float = 2.0,
    keys: Sequence[str] | None = ATTENTION_AND_MLP,
    layers: int = 8,
    dtype: mx.Dtype = mx.float32,
    dora: bool = False,
) -> Path:
    """An adapter with lively weights for a checkpoint, as ``mlx_lm.lora`` would leave it."""
    model = load_oracle(checkpoint)
    model.freeze()
    parameters: dict[str, Any] = {"rank": rank, "scale": scale, "dropout": 0.0}
    if keys is not None:
        parameters["keys"] = list(keys)
    linear_to_lora_layers(model, layers, parameters, use_dora=dora)
    model.update(tree_map_with_path(_lively(seed), model.trainable_parameters()))
    weights = {name: w.astype(dtype) for name, w in tree_flatten(model.trainable_parameters())}
    config = {
        "fine_tune_type": "dora" if dora else "lora",
        "num_layers": layers,
        "lora_parameters": parameters,
    }
    return write_folder(path, config, weights)


def make_peft_adapter(
    path: Path,
    shapes: Mapping[str, tuple[int, int]],
    *,
    seed: int = 1,
    rank: int = 4,
    embeddings: Sequence[str] = (),
    **config: Any,
) -> Path:
    """A PEFT folder with a pair for each of ``shapes``: inputs and outputs by PEFT's name."""
    weights: dict[str, mx.array] = {}
    for place, (name, (inputs, outputs)) in enumerate(shapes.items()):
        keys = mx.random.split(mx.random.key(100 * seed + place))
        a = mx.random.normal((rank, inputs), key=keys[0]) / inputs**0.5
        b = mx.random.normal((outputs, rank), key=keys[1]) / rank**0.5
        ends = (".lora_A.weight", ".lora_B.weight")
        if name in embeddings:
            ends = (".lora_embedding_A", ".lora_embedding_B")
        weights |= {f"base_model.model.{name}{end}": w for end, w in zip(ends, (a, b), strict=True)}
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "bias": "none"}
    return write_folder(path, settings | config, weights, "adapter_model.safetensors")


def write_folder(
    path: Path,
    config: object,
    weights: Mapping[str, mx.array],
    name: str = "adapters.safetensors",
) -> Path:
    """Any folder at all."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(path / name), dict(weights))
    return path


def with_adapter(checkpoint: Path, *folders: Path) -> nn.Module:
    """The checkpoint with adapters as mlx-lm alone loads them (one only, if they overlap)."""
    model = load_oracle(checkpoint)
    for folder in folders:
        load_adapters(model, str(folder))
    model.eval()
    return model


def logits_of(model: Any, ids: Sequence[int]) -> mx.array:
    """Logits [tokens, vocabulary] of a whole text in one pass, without a cache."""
    logits: mx.array = model(mx.array([ids]))[0]
    mx.eval(logits)
    return logits


def _lively(seed: int) -> Any:
    def draw(name: str, weight: mx.array) -> mx.array:
        if name.endswith(".m"):
            return weight
        key = mx.random.key(seed * 7919 + sum(map(ord, name)))
        return mx.random.normal(weight.shape, key=key) * 0.15

    return draw
