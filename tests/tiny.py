"""Tiny seeded checkpoints for tests: real mlx-lm models with random but lively weights.

Weights are drawn with a spread that keeps activations near one, and embeddings are not tied, so
that greedy decoding wanders: a test of ids would pass on a broken cache if every id were equal.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

from mlx_troupe.runtime.engine.blas import ensure_fast_blas

ensure_fast_blas()

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
from mlx.utils import tree_map_with_path  # noqa: E402
from mlx_lm.utils import _get_classes, load_model, quantize_model, save_model  # noqa: E402

EOS = 1
VOCAB = 128

_ATTENTION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "eos_token_id": EOS,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_ATTENTION},
    "sliding": {
        "model_type": "llama",
        **_ATTENTION,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 16,
    },
    "qwen3": {"model_type": "qwen3", **_ATTENTION, "head_dim": 16},
    "mamba": {
        "model_type": "mamba",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "state_size": 8,
        "num_hidden_layers": 2,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
        "tie_word_embeddings": False,
        "eos_token_id": EOS,
    },
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

# lfm2 ties its embeddings, which makes some seeds repeat one token for ever.
_FIRST_SEED = {"lfm2": 3}


def make_checkpoint(
    path: Path, family: str = "llama", seed: int = 0, *, bits: int | None = None, **config: Any
) -> Path:
    """Write a checkpoint that mlx-lm can load and return its directory.

    ``config`` overrides the family's; ``bits`` quantizes it (groups of 32). Every weight depends
    on its name, its shape and ``seed`` alone.
    """
    path.mkdir(parents=True, exist_ok=True)
    settings = FAMILIES[family] | config
    model_class, args_class = _get_classes(settings)
    model = model_class(args_class.from_dict(settings))
    first = seed + _FIRST_SEED.get(family, 0)
    model.update(tree_map_with_path(lambda n, w: _weight(n, w, first), model.parameters()))
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


def _weight(name: str, weight: mx.array, seed: int) -> mx.array:
    if "norm" in name or name.endswith(("A_log", ".D")):
        return weight
    key = mx.random.key(zlib.crc32(f"{seed}:{name}".encode()))
    noise = mx.random.normal(weight.shape, key=key)
    if weight.ndim < 2 or "embed" in name:
        return noise * (1.0 if "embed" in name else 0.1)
    gain = 2.0 if "head" in name else 1.3
    return noise * (gain / weight[0].size ** 0.5)
