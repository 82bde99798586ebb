"""Turns GGUF tensors into MLX's affine packing, and their names into mlx-lm's.

GGUF's Q4_0, Q4_1 and Q8_0 are affine in groups of 32, so that the integers are kept and only their
order in memory changes: no value is rounded again. Pure numpy; bfloat16 travels as raw uint16.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import ModelError
from .gguf_reader import GgufFile, TensorInfo

GROUP = 32
BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class Array:
    """An array to be written; ``dtype`` is safetensors' name (``F16`` …) of what ``data`` holds."""

    data: npt.NDArray[np.generic]
    dtype: str


def module_path(tensor: str) -> tuple[str, str]:
    """mlx-lm's module path of a GGUF tensor and ``"weight"`` or ``"bias"``.

    Raises ModelError for a tensor that none of the readable architectures has.
    """
    match = _NAME.fullmatch(tensor)
    layer, part = (match["layer"], match["part"]) if match else (None, "")
    name = _TOP.get(part) if layer is None else _LAYER.get(part)
    if match is None or name is None:
        raise ModelError(f"tensor {tensor} is not known in this architecture")
    return (name if layer is None else f"model.layers.{layer}.{name}"), match["kind"]


def weight_names(file: GgufFile) -> tuple[str, ...]:
    """The tensors that become weights, in the file's order."""
    return tuple(name for name in file.tensors if name != _ROPE_FACTORS)


def rope_factors(file: GgufFile) -> npt.NDArray[np.float32] | None:
    """Per-frequency divisors of a rope scaling that is stored as a tensor, or None."""
    info = file.tensors.get(_ROPE_FACTORS)
    if info is None:
        return None
    if info.type != "F32":
        raise ModelError(f"tensor {info.name} is of type {info.type}, expected F32")
    return file.blocks(info.name).view("<f4").reshape(-1).astype(np.float32)


def quantization(file: GgufFile) -> dict[str, object] | None:
    """The ``quantization`` entry of config.json, or None if nothing is quantized.

    The most common width is the default; modules of another width get entries of their own.
    """
    bits = {
        module_path(name)[0]: BITS[file.tensors[name].type]
        for name in weight_names(file)
        if file.tensors[name].type in BITS
    }
    if not bits:
        return None
    widths = list(bits.values())
    default = max(sorted(set(widths)), key=widths.count)
    entry: dict[str, object] = {"group_size": GROUP, "bits": default}
    entry |= {
        path: {"group_size": GROUP, "bits": width}
        for path, width in bits.items()
        if width != default
    }
    return entry


def convert_tensor(file: GgufFile, name: str, *, permuted_heads: int | None) -> dict[str, Array]:
    """The arrays that one GGUF tensor becomes, by mlx-lm name.

    ``permuted_heads`` is the number of heads of a q or k projection whose rows GGUF interleaves
    for its own rope; they are put back into halves.
    """
    info = file.tensors[name]
    path, kind = module_path(name)
    parts = _unpack(info, file.blocks(name))
    if permuted_heads is not None:
        parts = {key: _unpermute(value, permuted_heads) for key, value in parts.items()}
    if kind == "bias" or len(info.shape) == 1:
        if info.type in BITS:
            raise ModelError(f"tensor {name} is of type {info.type}, expected a float type")
        parts = {key: Array(part.data.reshape(-1), part.dtype) for key, part in parts.items()}
    names = {"weight": kind, "scales": "scales", "biases": "biases"}
    return {f"{path}.{names[key]}": part for key, part in parts.items()}


def _unpack(info: TensorInfo, rows: npt.NDArray[np.uint8]) -> dict[str, Array]:
    match info.type:
        case "F32":
            return {"weight": Array(rows.view("<f4"), "F32")}
        case "F16":
            return {"weight": Array(rows.view("<f2"), "F16")}
        case "BF16":
            return {"weight": Array(rows.view("<u2"), "BF16")}
        case "Q4_0" | "Q4_1" | "Q8_0":
            return _unpack_affine(info.type, rows)
        case _:
            raise ModelError(f"tensor {info.name} is of type {info.type}, which cannot be read")


def _unpack_affine(kind: str, rows: npt.NDArray[np.uint8]) -> dict[str, Array]:
    """Blocks of one scale (and minimum) and 32 integers, as three arrays."""
    count = rows.shape[0]
    header = 4 if kind == "Q4_1" else 2
    blocks = rows.reshape(count, -1, header + GROUP * BITS[kind] // 8)
    scales = np.ascontiguousarray(blocks[..., :2]).view("<f2")[..., 0]
    body = blocks[..., header:]
    if kind == "Q4_1":
        biases = np.ascontiguousarray(blocks[..., 2:4]).view("<f2")[..., 0]
    else:
        biases = scales * np.float16(-8 if kind == "Q4_0" else -128)
    # Signed bytes become unsigned by flipping the sign bit, which adds 128.
    packed = body ^ np.uint8(0x80) if kind == "Q8_0" else _in_order(body)
    words = np.ascontiguousarray(packed).reshape(count, -1).view("<u4")
    return {
        "weight": Array(words, "U32"),
        "scales": Array(scales, "F16"),
        "biases": Array(biases, "F16"),
    }


def _in_order(body: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Nibbles from (j, j + 16) sharing byte j to (2 j, 2 j + 1) sharing it."""
    nibbles = np.concatenate([body & 0x0F, body >> 4], axis=-1)
    ordered: npt.NDArray[np.uint8] = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
    return ordered


def _unpermute(part: Array, heads: int) -> Array:
    data = part.data
    rows = data.shape[0] if data.shape[0] > 1 else data.shape[-1]
    if rows % (2 * heads):
        raise ModelError(f"{rows} rows of a rotated projection do not divide into {heads} heads")
    paired = data.reshape(heads, rows // heads // 2, 2, -1)
    return Array(np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(data.shape), part.dtype)
