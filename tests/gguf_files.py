"""Writes small GGUF files for tests: a byte-exact writer that knows no MLX and no product code.

Quantized blocks are made from integers and scales that the test chose, so that what they decode
to is known without a quantizer.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

TYPE_IDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q6_K": 14, "BF16": 30}
ALIGNMENT = 32
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as it lies in the file; ``shape`` is row-major."""

    kind: str
    shape: tuple[int, ...]
    data: bytes


def f32(values: npt.ArrayLike) -> RawTensor:
    """Float32 as it is."""
    array = np.asarray(values, "<f4")
    return RawTensor("F32", array.shape, array.tobytes())


def f16(values: npt.ArrayLike) -> RawTensor:
    """Float16, rounded by numpy."""
    array = np.asarray(values, "<f2")
    return RawTensor("F16", array.shape, array.tobytes())


def bf16(values: npt.ArrayLike) -> RawTensor:
    """Bfloat16 by cutting float32 off."""
    array = np.asarray(values, "<f4")
    return RawTensor("BF16", array.shape, (array.view("<u4") >> 16).astype("<u2").tobytes())


def random_blocks(kind: str, rows: int, columns: int, seed: int) -> tuple[RawTensor, Floats]:
    """A random quantized tensor and float32[rows, columns] of what it stands for."""
    rng = np.random.default_rng(seed)
    shape = (rows, columns // 32, 32)
    values: np.ndarray[Any, Any]
    scale = rng.uniform(0.001, 0.1, (*shape[:2], 1)).astype("<f2")
    low = rng.uniform(-1, 0, (*shape[:2], 1)).astype("<f2")
    if kind == "Q8_0":
        ints = rng.integers(-127, 128, shape)
        body = ints.astype(np.int8).view(np.uint8)
        parts, values = [scale.view(np.uint8), body], ints * scale.astype(np.float32)
    else:
        ints = rng.integers(0, 16, shape)
        body = (ints[..., :16] | (ints[..., 16:] << 4)).astype(np.uint8)
        wide = scale.astype(np.float32)
        if kind == "Q4_0":
            parts, values = [scale.view(np.uint8), body], (ints - 8) * wide
        else:
            parts = [scale.view(np.uint8), low.view(np.uint8), body]
            values = ints * wide + low.astype(np.float32)
    values = values.astype(np.float32)
    data = np.concatenate(parts, axis=-1).tobytes()
    return RawTensor(kind, (rows, columns), data), values.reshape(rows, columns)


def permute(weight: Floats, heads: int) -> Floats:
    """Rows of a q or k projection in the order that llama's GGUF files keep them."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _scalar(value: Any) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<Ii" if value < 0 else "<II", 5 if value < 0 else 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _string(value)
    raise TypeError(type(value))


def _value(value: Any) -> bytes:
    if not isinstance(value, list):
        return _scalar(value)
    kind = _scalar(value[0])[:4]
    return (
        struct.pack("<I", 9)
        + kind
        + struct.pack("<Q", len(value))
        + b"".join(_scalar(item)[4:] for item in value)
    )


@dataclass(slots=True)
class GgufSpec:
    """What a file is to hold; ``version`` and ``magic`` can be made wrong."""

    metadata: dict[str, Any]
    tensors: dict[str, RawTensor]
    version: int = 3
    magic: bytes = b"GGUF"
    extra_names: list[str] = field(default_factory=list)

    def write(self, path: Path) -> Path:
        """Write the file. ``extra_names`` are listed again as copies of the first tensor."""
        listed = list(self.tensors.items())
        listed += [(name, listed[0][1]) for name in self.extra_names]
        head = self.magic + struct.pack("<IQQ", self.version, len(listed), len(self.metadata))
        head += b"".join(_string(key) + _value(value) for key, value in self.metadata.items())
        body = b""
        for name, tensor in listed:
            body += b"\0" * (-len(body) % ALIGNMENT)
            shape = tensor.shape[::-1]
            head += _string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
            head += struct.pack("<IQ", TYPE_IDS[tensor.kind], len(body))
            body += tensor.data
        path.write_bytes(head + b"\0" * (-len(head) % ALIGNMENT) + body)
        return path


CONTROL, USER, BYTE = 3, 4, 6


def byte_level_metadata(pre: str = "smollm", /, **changes: Any) -> dict[str, Any]:
    """A byte-level BPE: two control tokens, all 256 bytes, a few words and their merges."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [chr(256 + index) for index in range(256 - len(printable))]
    alphabet = [chr(byte) for byte in printable] + others
    pairs = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "12 3", "Ġ 1"]
    words = [pair.replace(" ", "") for pair in pairs]
    tokens = ["<|end|>", "<|start|>", *alphabet, *words]
    found = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL, CONTROL, *[1] * (len(tokens) - 2)],
        "tokenizer.ggml.merges": pairs,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }
    return found | changes


def model_metadata(arch: str, vocab: int, **changes: Any) -> dict[str, Any]:
    """Metadata of a two-layer model of width 64 with 2 query heads and 1 key/value head of 32."""
    found = {
        "general.architecture": arch,
        f"{arch}.embedding_length": 64,
        f"{arch}.block_count": 2,
        f"{arch}.feed_forward_length": 96,
        f"{arch}.attention.head_count": 2,
        f"{arch}.attention.head_count_kv": 1,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.context_length": 512,
        f"{arch}.rope.freq_base": 10000.0,
        f"{arch}.vocab_size": vocab,
    }
    return found | changes


def model_tensors(arch: str, vocab: int, seed: int = 0) -> dict[str, Floats]:
    """Random float32 weights of that model by GGUF name, in mlx-lm's row order."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Floats:
        return (rng.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)

    def vector(width: int) -> Floats:
        return (1 + rng.standard_normal(width) / 8).astype(np.float16).astype(np.float32)

    found = {"token_embd.weight": matrix(vocab, 64), "output_norm.weight": vector(64)}
    for layer in ("blk.0", "blk.1"):
        found |= {
            f"{layer}.attn_norm.weight": vector(64),
            f"{layer}.attn_q.weight": matrix(64, 64),
            f"{layer}.attn_k.weight": matrix(32, 64),
            f"{layer}.attn_v.weight": matrix(32, 64),
            f"{layer}.attn_output.weight": matrix(64, 64),
            f"{layer}.ffn_norm.weight": vector(64),
            f"{layer}.ffn_gate.weight": matrix(96, 64),
            f"{layer}.ffn_up.weight": matrix(96, 64),
            f"{layer}.ffn_down.weight": matrix(64, 96),
        }
        if arch == "qwen2":
            widths = {"q": 64, "k": 32, "v": 32}
            found |= {f"{layer}.attn_{part}.bias": vector(w) for part, w in widths.items()}
        if arch == "qwen3":
            found |= {f"{layer}.attn_{part}_norm.weight": vector(32) for part in "qk"}
    return found


def in_file_order(arch: str, tensors: dict[str, Floats]) -> dict[str, Floats]:
    """The same weights with llama's q and k rows permuted."""
    if arch != "llama":
        return tensors
    heads = {"attn_q": 2, "attn_k": 1}
    parts = {name: name.split(".")[-2] for name in tensors}
    return {
        name: permute(value, heads[parts[name]]) if parts[name] in heads else value
        for name, value in tensors.items()
    }
