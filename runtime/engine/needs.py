"""What a model needs of memory: of a loaded one, or by its files before anything is loaded.

Pure questions on whatever thread asks; owns nothing. :func:`fit` reads the headers of the weights:
arrays are described, never computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn import Module
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from ..budgets import SAFE_SHARE, max_safe_context, prefill_bytes
from ..device import ModelInfo
from ..errors import ModelError
from ..kvschemes import PLAIN_KV, KVScheme
from ..settings import Dtype
from .kvplan import make_plan
from .memory import device_memory
from .models import load_checkpoint, read_config, state_kind

PREFILL_BYTES = 30
"""Of each hidden and each intermediate unit, for a token in prefill: 0.55 MB for an 8B model."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a model is likely to fit, by its files alone; advice, never a limit.

    Attributes:
        weights_bytes: of the weights as they would be loaded.
        kv_bytes_per_token: of one more token's state.
        prefill_bytes: of the largest prefill step beside both.
        safe_bytes: what these three may take together, of ``memory_bytes``.
        context_window: the model's; None if unknown.
        context_tokens: the longest single row within ``safe_bytes``; None = state does not grow.
    """

    weights_bytes: int
    kv_bytes_per_token: int
    prefill_bytes: int
    memory_bytes: int
    safe_bytes: int
    context_window: int | None
    context_tokens: int | None

    @property
    def fits(self) -> bool:
        """Whether at least a short row is within what is safe."""
        return self.context_tokens is None or self.context_tokens > 0


def weights_bytes(model: Module) -> int:
    """Bytes of a model's weights."""
    weights: Any = tree_flatten(model.parameters())
    return sum(weight.nbytes for _, weight in weights)


def prefill_bytes_per_token(config: Mapping[str, Any]) -> int:
    """Bytes that a token in prefill takes beside weights and state, roughly; 0 if unknown."""
    text = config.get("text_config")
    for source in (config, text if isinstance(text, dict) else {}):
        hidden, inner = source.get("hidden_size"), source.get("intermediate_size")
        if isinstance(hidden, int):
            return PREFILL_BYTES * (hidden + (inner if isinstance(inner, int) else 4 * hidden))
    return 0


def with_needs(info: ModelInfo, model: Module, path: Path) -> ModelInfo:
    """A loaded model's description with what it needs of memory."""
    return replace(
        info,
        memory_bytes=device_memory(),
        weights_bytes=weights_bytes(model),
        prefill_bytes_per_token=prefill_bytes_per_token(read_config(path)),
    )


def fit(path: Path, memory_bytes: int, *, dtype: Dtype = "auto", kv: KVScheme = PLAIN_KV) -> Fit:
    """The estimate for a model directory on a machine with ``memory_bytes``.

    Raises ModelError for a directory that could not be loaded either.
    """
    checkpoint = load_checkpoint(path, dtype, kv, lazy=True)
    model: Any = checkpoint.model
    plan, caches = make_plan(model, kv, path), make_prompt_cache(model)
    try:
        model(mx.array([[0]]), cache=caches)
    except Exception as error:
        raise ModelError(f"{path} cannot be run: {error}") from error
    layers = plan.applied(plan.converted(caches, max(1, plan.start)))
    info = ModelInfo(
        path.name,
        0,
        None,
        frozenset(),
        trim_window=state_kind(model).trim_window,
        kv_bytes_per_token=sum(alike.layers * alike.bytes_per_token for alike in layers),
        fixed_bytes=sum(alike.layers * alike.fixed_bytes for alike in layers),
        kv_layers=layers,
        weights_bytes=weights_bytes(model),
        prefill_bytes_per_token=prefill_bytes_per_token(read_config(path)),
    )
    return Fit(
        weights_bytes=info.weights_bytes,
        kv_bytes_per_token=info.kv_bytes_per_token,
        prefill_bytes=prefill_bytes(info),
        memory_bytes=memory_bytes,
        safe_bytes=int(SAFE_SHARE * memory_bytes),
        context_window=checkpoint.context_window,
        context_tokens=max_safe_context(info, memory_bytes),
    )
