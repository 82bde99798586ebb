"""What a model needs of memory: of a loaded one, or by its files before anything is loaded.

Pure questions on whatever thread asks; owns nothing. :func:`fit` reads the headers of the weights:
arrays are described, never computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn import Module
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, make_prompt_cache

from ..budgets import SAFE_SHARE, max_safe_context, prefill_bytes
from ..errors import ModelError
from ..kvschemes import PLAIN_KV, KVScheme
from ..model_info import ModelInfo
from ..settings import Dtype
from .codecs import PLAIN
from .expanding import may_expand
from .kvplan import KVPlan, make_plan
from .memory import device_memory
from .models import load_checkpoint, read_config, state_kind
from .nesting import flatten

PREFILL_BYTES = 30
"""Of each hidden and each intermediate unit, for a token in prefill: 0.55 MB for an 8B model."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a model is likely to fit, by its files alone; advice, never a limit.

    Attributes:
        weights_bytes: of the weights as they would be loaded.
        kv_bytes_per_token: of one more token's state.
        unpacked_bytes_per_token: what attention takes for a token beside its state.
        expands_weights: steps of many rows take more for weights that they expand; how much is
            measured when the model is loaded.
        prefill_bytes: of the largest prefill step beside these.
        safe_bytes: what all that is estimated may take together, of ``memory_bytes``.
        context_window: the model's; None if unknown.
        context_tokens: the longest single row within ``safe_bytes``; None = state does not grow.
    """

    weights_bytes: int
    kv_bytes_per_token: int
    unpacked_bytes_per_token: int
    expands_weights: bool
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


def unpacked_bytes_per_token(plan: KVPlan, caches: Sequence[Any]) -> int:
    """Bytes that attention takes for each token of its rows beside their states, roughly.

    It unpacks what is encoded, where that cannot be multiplied, and gathers what lies in blocks.
    ``caches``: plain ones that hold something, evaluated or not. Counted are two layers, the one
    that is attended to and the next: MLX lets more lie about only while that is little.
    """
    leaves = flatten(caches)
    pairs = zip(leaves, plan.codecs or (None,) * len(leaves), strict=True)
    sizes = [
        sum(x.nbytes // x.shape[2] for x in PLAIN.stored_in(cache) or ())
        for cache, codec in pairs
        if (codec is not None and codec.unpacks) or (plan.block and type(cache) is KVCache)
    ]
    return sum(sorted(sizes)[-2:])


def with_needs(info: ModelInfo, model: Module, plan: KVPlan, path: Path) -> ModelInfo:
    """A loaded model's description with what it needs of memory."""
    anything: Any = model
    caches = make_prompt_cache(model)
    # Never evaluated: the shapes alone are wanted.
    anything(mx.array([[0]]), cache=caches)
    return replace(
        info,
        memory_bytes=device_memory(),
        weights_bytes=weights_bytes(model),
        prefill_bytes_per_token=prefill_bytes_per_token(read_config(path)),
        unpacked_bytes_per_token=unpacked_bytes_per_token(plan, caches),
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
    unpacked = unpacked_bytes_per_token(plan, caches)
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
        unpacked_bytes_per_token=unpacked,
    )
    return Fit(
        weights_bytes=info.weights_bytes,
        kv_bytes_per_token=info.kv_bytes_per_token,
        unpacked_bytes_per_token=unpacked,
        expands_weights=may_expand(model.modules()),
        prefill_bytes=prefill_bytes(info),
        memory_bytes=memory_bytes,
        safe_bytes=int(SAFE_SHARE * memory_bytes),
        context_window=checkpoint.context_window,
        context_tokens=max_safe_context(info, memory_bytes),
    )
