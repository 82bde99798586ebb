"""How fast a model is likely to decode alone: what a token reads of its weights, and how fast.

Pure questions on whatever thread asks; owns nothing. A decode step is bound by memory: it reads
every weight that it uses once. How fast this machine reads is measured with the product that a
step consists of, a vector by a matrix.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ..settings import Dtype
from .models import load_checkpoint, read_config

DENSE_SHARE, EXPERTS_SHARE = 0.82, 0.76
"""What whole steps reach of that speed, without and with experts picked for each token."""
MATRIX_BYTES = 256 << 20
"""Far more than any cache holds."""
REPEATS = 4
_PICKED = ("num_experts_per_tok", "top_k_experts", "num_experts_per_token", "moe_top_k")
_TABLES: Any = (nn.Embedding, nn.QuantizedEmbedding)
_EXPERTS: Any = (SwitchLinear, QuantizedSwitchLinear)


@dataclass(frozen=True, slots=True)
class Speed:
    """An estimate for one row; advice, never a limit.

    Attributes:
        active_bytes: of the weights that a token reads.
        bandwidth: bytes a second that this machine reads in products of that kind.
        tokens_per_second: of a row that is alone and short.
    """

    active_bytes: int
    bandwidth: float
    tokens_per_second: float


def speed_of(path: Path, *, dtype: Dtype = "auto") -> Speed:
    """The estimate for a model directory on this machine. Raises ModelError."""
    model = load_checkpoint(path, dtype, lazy=True).model
    config = read_config(path)
    active, found = active_bytes(model, config), bandwidth()
    share = EXPERTS_SHARE if _has_experts(model) else DENSE_SHARE
    return Speed(active, found, share * found / max(1, active))


def active_bytes(model: nn.Module, config: Mapping[str, Any]) -> int:
    """Bytes of the weights that one token reads.

    Of a table of embeddings it is one row, unless the table is the output layer too; of experts
    those that are picked, where the configuration says how many.
    """
    leaves: list[tuple[str, Any]] = tree_flatten(
        model.leaf_modules(), is_leaf=lambda module: isinstance(module, nn.Module)
    )
    tied = not any(name.endswith("lm_head") for name, _ in leaves)
    picked, width = _number(config, *_PICKED), _number(config, "hidden_size")
    total = 0.0
    for _, module in leaves:
        size = sum(array.nbytes for _, array in _weights(module))
        if isinstance(module, _TABLES):
            total += size if tied and _width(module) == width else 0
        elif isinstance(module, _EXPERTS):
            held = int(module.weight.shape[0])
            total += size * min(1.0, (picked or held) / held)
        else:
            total += size
    return int(total)


def bandwidth() -> float:
    """Bytes a second that this machine reads in a product of a vector and a matrix."""
    kind = mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16
    width = 4096
    matrix = mx.ones((MATRIX_BYTES // (width * kind.size), width), dtype=kind)
    vector = mx.ones((width, 1), dtype=kind)
    mx.eval(matrix, vector)
    best = float("inf")
    for _ in range(REPEATS):
        began = time.perf_counter()
        mx.eval(*(matrix @ (vector + n) for n in range(REPEATS)))
        best = min(best, time.perf_counter() - began)
    return REPEATS * matrix.nbytes / best


def _weights(module: nn.Module) -> list[tuple[str, mx.array]]:
    found: list[tuple[str, mx.array]] = tree_flatten(module.parameters())
    return found


def _width(table: nn.Module) -> int:
    weight: mx.array = table["weight"]
    packed = isinstance(table, nn.QuantizedEmbedding)
    return int(weight.shape[-1]) * 32 // int(table.bits) if packed else int(weight.shape[-1])


def _has_experts(model: nn.Module) -> bool:
    return any(isinstance(module, _EXPERTS) for _, module in model.named_modules())


def _number(config: Mapping[str, Any], *names: str) -> int | None:
    """The first of these that the configuration has, or its part about text."""
    text = config.get("text_config")
    sources = (config, text if isinstance(text, dict) else {})
    found = (source.get(name) for source in sources for name in names)
    return next((value for value in found if isinstance(value, int) and value > 0), None)
