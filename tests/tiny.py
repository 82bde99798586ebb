"""Tiny seeded checkpoints for tests: real mlx-lm models with random but lively weights.

Weights are drawn with a spread that keeps activations near one, and embeddings are not tied, so
that greedy decoding wanders: a test of ids would pass on a broken cache if every id were equal.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import tiny_families
from tiny_families import ATTENTION, EOS, VOCAB, WINDOW, Draw

from mlx_troupe.runtime.engine.blas import ensure_fast_blas

ensure_fast_blas()

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
from mlx.utils import tree_map_with_path  # noqa: E402
from mlx_lm.utils import _get_classes, load_model, quantize_model, save_model  # noqa: E402

_LEFT_ALONE = (".mixer.A_log", ".D", ".layer_scalar", ".router.scale", ".per_expert_scale")

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": tiny_families.FAMILIES["llama"],
    "sliding": {
        "model_type": "llama",
        **ATTENTION,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": WINDOW,
    },
    "qwen3": tiny_families.FAMILIES["qwen3"],
    "mamba": tiny_families.FAMILIES["mamba"],
    "lfm2": {
        "model_type": "lfm2",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1],
        "rope_theta": 10000.0,
        "eos_token_id": EOS,
    },
}


def make_checkpoint(
    path: Path, family: str = "llama", seed: int = 0, *, bits: int | None = None, **config: Any
) -> Path:
    """Write a checkpoint that mlx-lm can load and return its directory.

    ``config`` overrides the family's; ``bits`` quantizes it (groups of 32). Every weight depends
    on its name, its shape and ``seed`` alone.
    """
    path.mkdir(parents=True, exist_ok=True)
    known = FAMILIES | tiny_families.FAMILIES | tiny_families.ONE_BY_ONE
    settings = known[family] | config
    model_class, args_class = _get_classes(settings)
    model = model_class(args_class.from_dict(settings))
    draw = tiny_families.DRAWS.get(family, Draw())
    draw = replace(draw, seed=draw.seed + seed)
    model.update(tree_map_with_path(lambda n, w: _weight(n, w, draw), model.parameters()))
    if bits is not None:
        model, settings = quantize_model(model, dict(settings), group_size=32, bits=bits)
    save_model(path, model)
    (path / "config.json").write_text(json.dumps(settings))
    return path


def load_oracle(path: Path) -> nn.Module:
    """The checkpoint as mlx-lm alone loads it."""
    model, _ = load_model(path)
    return model


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """``length`` token ids that are none of the special ones."""
    key = mx.random.key(1000 + seed)
    ids: list[int] = mx.random.randint(2, VOCAB, (length,), key=key).tolist()  # type: ignore[assignment]
    return tuple(ids)


def _weight(name: str, weight: mx.array, draw: Draw) -> mx.array:
    for norm, gain in (("model.norm", draw.last_norm), (".q_norm", draw.query_norm)):
        if name.endswith(f"{norm}.weight") and gain is not None:
            return mx.full(weight.shape, gain)
    key = mx.random.key(zlib.crc32(f"{draw.seed}:{name}".encode()))
    if "norm" in name or name.endswith(_LEFT_ALONE):
        return weight
    if name.endswith("linear_attn.A_log"):
        # Slow decay: what was read twenty tokens ago still counts.
        return mx.log(mx.random.uniform(0.02, 0.3, weight.shape, key=key))
    noise = mx.random.normal(weight.shape, key=key)
    if weight.ndim < 2 or "embed" in name:
        return noise * (draw.embedding if "embed" in name else 0.1)
    gain = 2.0 if "head" in name else 1.3
    inputs = weight.shape[-1] if "switch" in name else weight[0].size
    return noise * float(gain / inputs**0.5)
