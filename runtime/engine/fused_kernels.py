"""What lies between the matrix products of a decode step, as one GPU kernel each.

A small kernel costs the host more to launch than the device to run, so that a lone row's step takes
as long as its kernels are many. Three of these take the place of a dozen operations a layer. One
body serves CUDA and Metal, tried at load against MLX's own operations (:func:`work`). Pure
functions, on the device thread; knows no modules, rows or caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from .activations import LOG2_E
from .kernel_words import TYPES, make_kernel

_MOST_THREADS = 1024
_GATE_THREADS = 256
_TRIAL_TOLERANCE = {mx.float32: 1e-3, mx.float16: 3e-3, mx.bfloat16: 2e-2}
"""Of the largest value."""

_ADD_NORM = """
    constexpr int WARPS = THREADS / 32;
    constexpr int PACKS = SIZE / 4;
    constexpr int TURNS = (PACKS + THREADS - 1) / THREADS;
    SHARED float sums[WARPS];
    const size_t base = size_t(BLOCK_X) * SIZE;
    float kept[TURNS * 4];
    float square = 0.0f;
    for (int turn = 0; turn < TURNS; ++turn) {
        const int i = (turn * THREADS + TID) * 4;
        if (i >= SIZE) continue;
        const Pack<T, 4> a = *(const GLOBAL Pack<T, 4>*)(x + base + i);
        const Pack<T, 4> b = *(const GLOBAL Pack<T, 4>*)(residual + base + i);
        Pack<T, 4> sum;
        for (int c = 0; c < 4; ++c) {
            sum.v[c] = static_cast<T>(static_cast<float>(a.v[c]) + static_cast<float>(b.v[c]));
            const float value = static_cast<float>(sum.v[c]);
            kept[turn * 4 + c] = value;
            square += value * value;
        }
        *(GLOBAL Pack<T, 4>*)(total + base + i) = sum;
    }
    for (int n = 16; n > 0; n /= 2) square += XOR(square, n);
    if (TID % 32 == 0) sums[TID / 32] = square;
    BARRIER;
    float all = 0.0f;
    for (int w = 0; w < WARPS; ++w) all += sums[w];
    const float factor = RSQRT(all / SIZE + settings[0]);
    for (int turn = 0; turn < TURNS; ++turn) {
        const int i = (turn * THREADS + TID) * 4;
        if (i >= SIZE) continue;
        const Pack<T, 4> w = *(const GLOBAL Pack<T, 4>*)(weight + i);
        Pack<T, 4> made;
        for (int c = 0; c < 4; ++c) {
            const T scaled = static_cast<T>(kept[turn * 4 + c] * factor);
            made.v[c] = static_cast<T>(static_cast<float>(w.v[c]) * static_cast<float>(scaled));
        }
        *(GLOBAL Pack<T, 4>*)(normed + base + i) = made;
    }
"""

_HEADS = """
    constexpr int ALL = HEADS + 2 * KV_HEADS;
    constexpr int HALF = ROTATED / 2;
    SHARED float held[D];
    SHARED float sums[D / 32];
    const int row = BLOCK_Y;
    const int head = BLOCK_X;
    const int key = head - HEADS;
    float value = static_cast<float>(joint[(size_t(row) * ALL + head) * D + TID]);
    if (key < KV_HEADS) {
        if (NORMED) {
            float square = value * value;
            for (int n = 16; n > 0; n /= 2) square += XOR(square, n);
            if (TID % 32 == 0) sums[TID / 32] = square;
            BARRIER;
            float all = 0.0f;
            for (int w = 0; w < D / 32; ++w) all += sums[w];
            const T scaled = static_cast<T>(value * RSQRT(all / D + settings[2]));
            const T weight = key < 0 ? query_norm[TID] : key_norm[TID];
            value = static_cast<float>(weight) * static_cast<float>(scaled);
            value = static_cast<float>(static_cast<T>(value));
        }
        held[TID] = value;
        BARRIER;
        if (TID < ROTATED) {
            const bool second = PAIRED ? TID % 2 == 1 : TID >= HALF;
            const int pair = PAIRED ? TID / 2 : TID % HALF;
            const int partner = PAIRED ? TID ^ 1 : (second ? TID - HALF : TID + HALF);
            const float turn = FROM_BASE
                ? EXP2(-(static_cast<float>(pair) / static_cast<float>(HALF)) * settings[0])
                : 1.0f / frequencies[pair];
            const float angle = settings[1] * static_cast<float>(offsets[row]) * turn;
            const float other = held[partner];
            value = value * COS(angle) + (second ? other : -other) * SIN(angle);
        }
    }
    const T made = static_cast<T>(value);
    if (key < 0) {
        queries[(size_t(row) * HEADS + head) * D + TID] = made;
    } else if (key < KV_HEADS) {
        keys[(size_t(row) * KV_HEADS + key) * D + TID] = made;
    } else {
        values[(size_t(row) * KV_HEADS + key - KV_HEADS) * D + TID] = made;
    }
"""

_GATED = """
    const int i = (BLOCK_X * THREADS + TID) * 4;
    if (i >= SIZE) return;
    const size_t from = size_t(BLOCK_Y) * 2 * SIZE + i;
    const Pack<T, 4> gate = *(const GLOBAL Pack<T, 4>*)(joint + from);
    const Pack<T, 4> up = *(const GLOBAL Pack<T, 4>*)(joint + from + SIZE);
    Pack<T, 4> made;
    for (int c = 0; c < 4; ++c) {
        const float g = static_cast<float>(gate.v[c]);
        const float open = g / (1.0f + EXP2(g * float(-LOG2_E)));
        made.v[c] = static_cast<T>(open * static_cast<float>(up.v[c]));
    }
    *(GLOBAL Pack<T, 4>*)(out + size_t(BLOCK_Y) * SIZE + i) = made;
"""


@dataclass(frozen=True, slots=True)
class Rotation:
    """A rotary embedding, as ``mx.fast.rope`` takes it: of ``base`` or else ``frequencies``."""

    dims: int
    traditional: bool
    base: float | None
    scale: float = 1.0
    frequencies: mx.array | None = None


def fits_add_norm(x: mx.array, residual: mx.array, weight: mx.array) -> bool:
    """Whether :func:`add_norm` serves these."""
    return (
        x.shape == residual.shape
        and x.dtype == residual.dtype == weight.dtype
        and weight.size % 4 == 0
        and work(x.dtype)
    )


def add_norm(
    x: mx.array, residual: mx.array, weight: mx.array, eps: float
) -> tuple[mx.array, mx.array]:
    """``x`` + ``residual`` [..., K], and the RMS norm of that; ``weight`` [K], all of one type."""
    size = weight.size
    threads = min(_MOST_THREADS, -(-size // 128) * 32)
    kernel = _kernel(
        "troupe_add_norm", ("x", "residual", "weight", "settings"), ("total", "normed"), _ADD_NORM
    )
    total, normed = kernel(
        inputs=[x, residual, weight, _floats(eps)],
        template=[("T", x.dtype), ("SIZE", size), ("THREADS", threads)],
        grid=(x.size // size * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[x.shape, x.shape],
        output_dtypes=[x.dtype, x.dtype],
    )
    return total, normed


def fits_heads(
    joint: mx.array, heads: int, kv_heads: int, rotation: Rotation, norms: Sequence[mx.array]
) -> bool:
    """Whether :func:`split_heads` serves these."""
    width, rest = divmod(joint.shape[-1], heads + 2 * kv_heads)
    return (
        rest == 0
        and width % 32 == 0
        and width <= _MOST_THREADS
        and rotation.dims <= width
        and rotation.dims % 2 == 0
        and all(norm.dtype == joint.dtype for norm in norms)
        and work(joint.dtype)
    )


def split_heads(
    joint: mx.array,
    offsets: mx.array,
    heads: int,
    kv_heads: int,
    rotation: Rotation,
    norms: Sequence[mx.array] = (),
    eps: float = 0.0,
) -> tuple[mx.array, mx.array, mx.array]:
    """Queries [B, H, 1, D], keys and values [B, G, 1, D] of one token a row, of their projections.

    ``joint`` [B, 1, (H + 2G)·D] has all three behind one another. Queries and keys are turned to
    the positions ``offsets`` int32 [B], after an RMS norm of each head if there are ``norms``, the
    weights [D] of queries and of keys.
    """
    rows, width = joint.shape[0], joint.shape[-1] // (heads + 2 * kv_heads)
    frequencies = rotation.frequencies
    # MLX's rope takes the logarithm in float32 too.
    base = float(np.log2(np.float32(rotation.base or 1.0)))
    settings = _floats(base, rotation.scale, eps)
    turns = settings if frequencies is None else frequencies
    queries, keys, values = _kernel(
        "troupe_heads",
        ("joint", "offsets", "frequencies", "query_norm", "key_norm", "settings"),
        ("queries", "keys", "values"),
        _HEADS,
    )(
        inputs=[joint, offsets, turns, *(norms or (joint, joint)), settings],
        template=[
            ("T", joint.dtype),
            ("HEADS", heads),
            ("KV_HEADS", kv_heads),
            ("D", width),
            ("ROTATED", rotation.dims),
            ("PAIRED", rotation.traditional),
            ("FROM_BASE", frequencies is None),
            ("NORMED", bool(norms)),
        ],
        grid=((heads + 2 * kv_heads) * width, rows, 1),
        threadgroup=(width, 1, 1),
        output_shapes=[(rows, n, 1, width) for n in (heads, kv_heads, kv_heads)],
        output_dtypes=[joint.dtype] * 3,
    )
    return queries, keys, values


def fits_gated(joint: mx.array) -> bool:
    """Whether :func:`gated` serves this."""
    return joint.shape[-1] % 8 == 0 and work(joint.dtype)


def gated(joint: mx.array) -> mx.array:
    """``silu(gate) · up`` [..., N] of ``joint`` [..., 2N], which has the one behind the other."""
    size = joint.shape[-1] // 2
    blocks = -(-size // (4 * _GATE_THREADS))
    (made,) = _kernel("troupe_gated", ("joint",), ("out",), _GATED)(
        inputs=[joint],
        template=[("T", joint.dtype), ("SIZE", size), ("THREADS", _GATE_THREADS)],
        grid=(blocks * _GATE_THREADS, joint.size // joint.shape[-1], 1),
        threadgroup=(_GATE_THREADS, 1, 1),
        output_shapes=[(*joint.shape[:-1], size)],
        output_dtypes=[joint.dtype],
    )
    opened: mx.array = made
    return opened


@cache
def work(kind: mx.Dtype) -> bool:
    """Whether this GPU compiles the kernels for a type and gets what MLX's operations get."""
    if mx.default_device() != mx.gpu or kind not in TYPES:
        return False
    try:
        return _agree(kind)
    except Exception:
        return False


def _agree(kind: mx.Dtype) -> bool:
    draw = mx.random.normal((3, 1, 8 * 32), key=mx.random.key(1)).astype(kind)
    x, residual, weight = draw[:1], draw[1:2], draw[2, 0]
    total, normed = add_norm(x, residual, weight, 1e-5)
    pairs = [(total, x + residual), (normed, mx.fast.rms_norm(x + residual, weight, 1e-5))]
    gate, up = mx.split(draw, 2, axis=-1)
    pairs.append((gated(draw), gate * mx.sigmoid(gate) * up))
    offsets = mx.array([0, 5, 900], dtype=mx.int32)
    queries, keys, values = mx.split(draw.reshape(3, 1, 8, 32).swapaxes(1, 2), [4, 6], axis=1)
    norms = weight[:32], weight[32:64]
    for frequencies in (None, mx.arange(1, 9, dtype=mx.float32)):
        for paired in (False, True):
            base = 1e4 if frequencies is None else None
            turned = Rotation(16, paired, base, 1.0, frequencies)
            got = split_heads(draw, offsets, 4, 2, turned, norms, 1e-5)
            for mine, heads, norm in zip(got[:2], (queries, keys), norms, strict=True):
                expected = mx.fast.rms_norm(heads, norm, 1e-5)
                pairs.append((mine, _turned(expected, turned, offsets)))
            pairs.append((got[2], values))
    bare = split_heads(draw, offsets, 4, 2, turned)[0]
    pairs.append((bare, _turned(queries, turned, offsets)))
    return all(_close(mine, theirs, kind) for mine, theirs in pairs)


def _turned(x: mx.array, rotation: Rotation, offsets: mx.array) -> mx.array:
    return mx.fast.rope(
        x,
        rotation.dims,
        traditional=rotation.traditional,
        base=rotation.base,
        scale=rotation.scale,
        offset=offsets,
        freqs=rotation.frequencies,
    )


def _close(mine: mx.array, theirs: mx.array, kind: mx.Dtype) -> bool:
    if mine.shape != theirs.shape:
        return False
    mine, theirs = mine.astype(mx.float32), theirs.astype(mx.float32)
    apart, largest = mx.abs(mine - theirs).max(), mx.abs(theirs).max()
    return bool((apart <= _TRIAL_TOLERANCE[kind] * largest).item())


@cache
def _floats(*values: float) -> mx.array:
    return mx.array(values, dtype=mx.float32)


@cache
def _kernel(
    name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], source: str
) -> Callable[..., Any]:
    header = f"#define LOG2_E {LOG2_E!r}f\n"
    return make_kernel(name, list(inputs), list(outputs), source, header)
