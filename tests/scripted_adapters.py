"""Adapter folders small enough to write in a test, in mlx-lm's format."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

QUERY = "model.layers.0.self_attn.q_proj"


def write_adapter(
    folder: Path,
    seed: int = 0,
    *,
    modules: dict[str, tuple[int, int]] | None = None,
    rank: int = 2,
    scale: float = 4.0,
) -> Path:
    """An adapter of ``modules`` (name to inputs and outputs); its content follows from ``seed``."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, np.ndarray] = {}
    for name, (inputs, outputs) in (modules or {QUERY: (8, 8)}).items():
        tensors[f"{name}.lora_a"] = rng.normal(size=(inputs, rank)).astype(np.float32)
        tensors[f"{name}.lora_b"] = rng.normal(size=(rank, outputs)).astype(np.float32)
    save_file(tensors, folder / "adapters.safetensors")
    config = {
        "fine_tune_type": "lora",
        "num_layers": 1,
        "lora_parameters": {"rank": rank, "scale": scale, "dropout": 0.0},
    }
    (folder / "adapter_config.json").write_text(json.dumps(config), "utf-8")
    return folder
