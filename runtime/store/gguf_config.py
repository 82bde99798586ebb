"""Writes the config.json of a GGUF file's metadata in the words of mlx-lm's model classes.

Knows the three architectures that can be read (llama, qwen2, qwen3) and their rope scalings.
"""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ..errors import ModelError
from .gguf_reader import GgufFile
from .gguf_weights import quantization, rope_factors

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_CLASS_NAMES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_WINDOW = 8192

T = TypeVar("T", int, float, str)


class Metadata:
    """Typed look-ups in a GGUF file's metadata; ``arch`` keys get the architecture's prefix."""

    def __init__(self, file: GgufFile) -> None:
        self._values = file.metadata
        self._name = file.path.name
        self.arch = self.get("general.architecture", "")
        if self.arch not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise ModelError(
                f"{self._name}: architecture {self.arch or '(none)'} cannot be read "
                f"(readable: {known})"
            )

    def get(self, key: str, default: T) -> T:
        """The value of ``key``, or ``default``; raises ModelError if it is of another type."""
        value = self._values.get(key, default)
        if isinstance(default, float) and isinstance(value, int):
            value = float(value)
        if not isinstance(value, type(default)):
            raise ModelError(f"{self._name}: metadata {key} is not a {type(default).__name__}")
        return value

    def of(self, key: str, default: T) -> T:
        """The same for a key of this architecture (``llama.block_count`` …)."""
        return self.get(f"{self.arch}.{key}", default)

    def need(self, key: str) -> int:
        """A positive integer that a model cannot do without."""
        value = self.of(key, 0)
        if value <= 0:
            raise ModelError(f"{self._name}: metadata {self.arch}.{key} is missing")
        return value


def head_counts(metadata: Metadata) -> tuple[int, int]:
    """Query heads and key/value heads."""
    heads = metadata.need("attention.head_count")
    return heads, metadata.of("attention.head_count_kv", heads)


def build_config(file: GgufFile, eos: tuple[int, ...]) -> dict[str, object]:
    """config.json as a dict. Raises ModelError for what mlx-lm's classes cannot express."""
    metadata = Metadata(file)
    heads, kv_heads = head_counts(metadata)
    hidden = metadata.need("embedding_length")
    head_dim = metadata.of("attention.key_length", hidden // heads)
    _refuse_unreadable(metadata, head_dim)
    bits = quantization(file)
    config: dict[str, object] = {
        "architectures": [_CLASS_NAMES[metadata.arch]],
        "model_type": metadata.arch,
        "hidden_size": hidden,
        "num_hidden_layers": metadata.need("block_count"),
        "intermediate_size": metadata.need("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": float(f"{metadata.of('attention.layer_norm_rms_epsilon', 1e-5):.6g}"),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": metadata.need("context_length"),
        "rope_theta": metadata.of("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "eos_token_id": list(eos),
    }
    scaling = _rope_scaling(file, metadata, head_dim)
    if scaling is not None:
        config["rope_scaling"] = scaling
    if bits is not None:
        config["quantization"] = bits
        config["quantization_config"] = bits
    return config


def _refuse_unreadable(metadata: Metadata, head_dim: int) -> None:
    if metadata.of("expert_count", 0):
        raise ModelError("mixture-of-experts GGUF files cannot be read")
    rotated = metadata.of("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ModelError(f"rope over {rotated} of {head_dim} dimensions cannot be read")
    if metadata.of("attention.value_length", head_dim) != head_dim:
        raise ModelError("keys and values of different widths cannot be read")


def _rope_scaling(file: GgufFile, metadata: Metadata, head_dim: int) -> dict[str, object] | None:
    factors = rope_factors(file)
    if factors is not None:
        return _llama3_scaling(factors, metadata.of("rope.freq_base", 10000.0), head_dim)
    kind = metadata.of("rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling: dict[str, object] = {
        "rope_type": kind,
        "type": kind,
        "factor": metadata.of("rope.scaling.factor", 1.0),
    }
    if kind == "yarn":
        window = metadata.need("rope.scaling.original_context_length")
        return scaling | {"original_max_position_embeddings": window}
    if kind != "linear":
        raise ModelError(f"rope scaling {kind} cannot be read")
    return scaling


def _llama3_scaling(
    factors: npt.NDArray[np.float32], base: float, head_dim: int
) -> dict[str, object]:
    """The scaling whose divisors are ``factors``: Llama 3's, its factor being the largest."""
    factor = float(factors.max(initial=1.0))
    wanted = llama3_factors(factor, base, head_dim)
    if factors.shape != wanted.shape or not np.allclose(factors, wanted, rtol=1e-3):
        raise ModelError("rope_freqs.weight does not follow Llama 3's rule and cannot be read")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "original_max_position_embeddings": _LLAMA3_WINDOW,
        **_LLAMA3,
    }


def llama3_factors(factor: float, base: float, head_dim: int) -> npt.NDArray[np.float64]:
    """Llama 3's divisor of each rope frequency: 1 for short waves, ``factor`` for long ones.

    Returns float64[head_dim / 2].
    """
    waves = 2 * math.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    smooth = np.clip((_LLAMA3_WINDOW / waves - low) / (high - low), 0.0, 1.0)
    between = 1 / ((1 - smooth) / factor + smooth)
    return np.where(waves > _LLAMA3_WINDOW / low, factor, between)
