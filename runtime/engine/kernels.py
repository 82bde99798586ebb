"""Decode attention for rows of different lengths, as one GPU kernel without a mask.

MLX's fused attention takes a mask for ragged rows, and building and reading it costs more than the
attention itself. These kernels take each row's length instead, read no slot that the row has not
filled, and split long rows over many blocks. One body serves CUDA and Metal; a few words differ.
Pure functions, on the device thread.

A block takes ``CHUNK`` slots of one row's key head: scores of all its query heads, their softmax
over the chunk in powers of two, the weighted sum of the values. With more than one chunk a second
kernel joins the parts (the usual rescaling by the largest maximum).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx

from .activations import LOG2_E

WIDTHS = (64, 128, 256)
TYPES = (mx.float16, mx.bfloat16, mx.float32)
_THREADS = 128
_CHUNKS = (64, 128, 256, 512, 1024)
_BLOCKS = 1024
"""About as many blocks as keep a large GPU busy; more parts than that only cost joining."""
_SHARED_BYTES = 44 << 10 if not mx.metal.is_available() else 30 << 10
_UNBOUNDED = 1 << 30
_TRIAL_TOLERANCE = 1e-2
"""CUDA multiplies float32 matrices in TF32 by default."""

_PACK = """
template <typename T, int N> struct alignas(N * sizeof(T)) Pack { T v[N]; };
"""
_CUDA = (
    """
#define TID int(threadIdx.x)
#define BLOCK_X int(blockIdx.x)
#define BLOCK_Y int(blockIdx.y)
#define SHARED __shared__
#define GLOBAL
#define BARRIER __syncthreads()
#define XOR(x, n) __shfl_xor_sync(0xffffffffu, x, n)
#define EXP2(x) exp2f(x)
#define MAX(a, b) fmaxf(a, b)
#define NEVER (-__int_as_float(0x7f800000))
"""
    + _PACK
)
_METAL = (
    """
#define TID int(thread_position_in_threadgroup.x)
#define BLOCK_X int(threadgroup_position_in_grid.x)
#define BLOCK_Y int(threadgroup_position_in_grid.y)
#define SHARED threadgroup
#define GLOBAL device
#define BARRIER threadgroup_barrier(mem_flags::mem_threadgroup)
#define XOR(x, n) simd_shuffle_xor(x, n)
#define EXP2(x) exp2(x)
#define MAX(a, b) max(a, b)
#define NEVER (-INFINITY)
"""
    + _PACK
)

_ATTEND = """
    constexpr int WARPS = THREADS / 32;
    constexpr int R = HEADS / KV_HEADS;
    constexpr int KEYS = THREADS / 8;
    constexpr int VPL = D / 32;
    constexpr bool IN_REGISTERS = R * D <= 512;
    SHARED float q[R * D];
    SHARED float scores[R * CHUNK];
    SHARED float parts[WARPS * R * D];
    SHARED float top[R];
    SHARED float total[R];

    const int split = BLOCK_X;
    const int row = BLOCK_Y / KV_HEADS;
    const int kv_head = BLOCK_Y % KV_HEADS;
    const int head = row * HEADS + kv_head * R;
    const int lane = TID % 32;
    const int warp = TID / 32;
    const int offset = offsets[row];
    const int first = split * CHUNK;
    const int filled = offset + 1 < DEPTH ? offset + 1 : DEPTH;
    const int count = filled - first < CHUNK ? filled - first : CHUNK;
    if (count <= 0) {
#if JOINED
        if (TID < R) {
            tops[(head + TID) * SPLITS + split] = NEVER;
            totals[(head + TID) * SPLITS + split] = 0.0f;
        }
#endif
        return;
    }
    const size_t base = (size_t(row * KV_HEADS + kv_head) * DEPTH + first) * D;

    for (int i = TID; i < R * D; i += THREADS) {
        q[i] = static_cast<float>(queries[head * D + i]) * float(SCALE);
    }
    BARRIER;

    const int part = TID % 8;
    float mine[IN_REGISTERS ? R * D / 8 : 1];
    if (IN_REGISTERS) {
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < D / 32; ++i)
                for (int c = 0; c < 4; ++c)
                    mine[(r * (D / 32) + i) * 4 + c] = q[r * D + i * 32 + part * 4 + c];
    }
    for (int start = 0; start < count; start += KEYS) {
        const int j = start + TID / 8;
        const int at = j < count ? j : count - 1;
        float dot[R];
        for (int r = 0; r < R; ++r) dot[r] = 0.0f;
        for (int i = 0; i < D / 32; ++i) {
            const Pack<T, 4> k =
                *(const GLOBAL Pack<T, 4>*)(keys + base + size_t(at) * D + i * 32 + part * 4);
            for (int c = 0; c < 4; ++c) {
                const float x = static_cast<float>(k.v[c]);
                for (int r = 0; r < R; ++r) {
                    const float y = IN_REGISTERS ? mine[(r * (D / 32) + i) * 4 + c]
                                                 : q[r * D + i * 32 + part * 4 + c];
                    dot[r] += x * y;
                }
            }
        }
        for (int r = 0; r < R; ++r) {
            dot[r] += XOR(dot[r], 1);
            dot[r] += XOR(dot[r], 2);
            dot[r] += XOR(dot[r], 4);
        }
        if (part == 0 && j < count) {
            int age = offset - (first + j);
            if (RING > 0) {
                age %= (RING > 0 ? RING : 1);
                age = age < 0 ? age + RING : age;
            }
            const bool seen = age >= 0 && age < WINDOW && age <= offset;
            for (int r = 0; r < R; ++r) scores[r * CHUNK + j] = seen ? dot[r] : NEVER;
        }
    }
    BARRIER;

    for (int r = warp; r < R; r += WARPS) {
        float largest = NEVER;
        for (int j = lane; j < count; j += 32) largest = MAX(largest, scores[r * CHUNK + j]);
        for (int n = 16; n > 0; n /= 2) largest = MAX(largest, XOR(largest, n));
        const float shift = largest == NEVER ? 0.0f : largest;
        float sum = 0.0f;
        for (int j = lane; j < count; j += 32) {
            const float weight = EXP2(scores[r * CHUNK + j] - shift);
            scores[r * CHUNK + j] = weight;
            sum += weight;
        }
        for (int n = 16; n > 0; n /= 2) sum += XOR(sum, n);
        if (lane == 0) {
            top[r] = largest;
            total[r] = sum;
        }
    }
    BARRIER;

    float acc[R * VPL];
    for (int i = 0; i < R * VPL; ++i) acc[i] = 0.0f;
#pragma unroll 4
    for (int j = warp; j < count; j += WARPS) {
        const size_t at = base + size_t(j) * D + lane * VPL;
        const Pack<T, VPL> v = *(const GLOBAL Pack<T, VPL>*)(values + at);
        for (int r = 0; r < R; ++r) {
            const float weight = scores[r * CHUNK + j];
            for (int c = 0; c < VPL; ++c) acc[r * VPL + c] += weight * static_cast<float>(v.v[c]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < VPL; ++c)
            parts[(warp * R + r) * D + lane * VPL + c] = acc[r * VPL + c];
    BARRIER;

    for (int i = TID; i < R * D; i += THREADS) {
        float sum = 0.0f;
        for (int w = 0; w < WARPS; ++w) sum += parts[w * R * D + i];
#if JOINED
        out[(size_t(head + i / D) * SPLITS + split) * D + i % D] = sum;
#else
        out[head * D + i] = static_cast<T>(sum / total[i / D]);
#endif
    }
#if JOINED
    if (TID < R) {
        tops[(head + TID) * SPLITS + split] = top[TID];
        totals[(head + TID) * SPLITS + split] = total[TID];
    }
#endif
"""

_JOIN = """
    const int head = BLOCK_X;
    float largest = NEVER;
    for (int s = 0; s < SPLITS; ++s) largest = MAX(largest, tops[head * SPLITS + s]);
    float sum = 0.0f;
    float acc = 0.0f;
    for (int s = 0; s < SPLITS; ++s) {
        const float here = tops[head * SPLITS + s];
        if (here == NEVER) continue;
        const float share = EXP2(here - largest);
        sum += share * totals[head * SPLITS + s];
        acc += share * parts[(size_t(head) * SPLITS + s) * D + TID];
    }
    out[head * D + TID] = static_cast<T>(acc / sum);
"""


def fits(queries: mx.array, keys: mx.array, values: mx.array) -> bool:
    """Whether the kernels serve these: queries [n, H, 1, D], keys and values [n, G, T, D]."""
    width, repeats = keys.shape[3], queries.shape[1] // keys.shape[1]
    return (
        mx.default_device() == mx.gpu
        and queries.shape[2] == 1
        and width in WIDTHS
        and values.shape == keys.shape
        and queries.dtype == keys.dtype == values.dtype
        and queries.dtype in TYPES
        and _shared_bytes(repeats, width, _CHUNKS[0]) <= _SHARED_BYTES
        and work()
    )


@cache
def work() -> bool:
    """Whether this GPU compiles the kernels and gets what MLX's masked attention gets."""
    draw = mx.random.normal((3, 4, 96, 64), key=mx.random.key(0))
    queries, keys, values = draw[:, :, :1], draw[:, :2], draw[:, 2:]
    offsets = mx.array([0, 70, 95], dtype=mx.int32)
    mask = (mx.arange(96) <= offsets[:, None])[:, None, None]
    try:
        got = ragged_attention(queries, keys, values, offsets, 0.125)
        expected = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=0.125, mask=mask
        )
        return bool((mx.abs(got - expected).max() < _TRIAL_TOLERANCE).item())
    except Exception:
        return False


def ragged_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    offsets: mx.array,
    scale: float,
    ring: int | None = None,
    window: int | None = None,
) -> mx.array:
    """Attention of one new token in each row, [n, H, 1, D]; see :func:`fits` for the shapes.

    ``offsets`` int32 [n] are the positions of the new tokens, whose keys and values are in their
    slots already: a row sees its slots up to its own position, at most ``window`` of them. In a
    ``ring``, position *p* lies in slot *p* mod ring.
    """
    rows, heads, _, width = queries.shape
    kv_heads, depth = keys.shape[1:3]
    chunk = _chunk_for(rows * kv_heads, depth, heads // kv_heads, width)
    splits = -(-depth // chunk)
    shape = {
        "template": [
            ("T", queries.dtype),
            ("HEADS", heads),
            ("KV_HEADS", kv_heads),
            ("D", width),
            ("DEPTH", depth),
            ("CHUNK", chunk),
            ("SPLITS", splits),
            ("RING", ring or 0),
            ("WINDOW", window or _UNBOUNDED),
            ("THREADS", _THREADS),
        ],
        "grid": (splits * _THREADS, rows * kv_heads, 1),
        "threadgroup": (_THREADS, 1, 1),
    }
    inputs = [queries, keys, values, offsets]
    if splits == 1:
        attend = _attend_kernel(scale * LOG2_E, joined=False)
        whole = {"output_shapes": [queries.shape], "output_dtypes": [queries.dtype]}
        return attend(inputs=inputs, **shape, **whole)[0]
    parts = (rows, heads, splits)
    return _join_kernel()(
        inputs=_attend_kernel(scale * LOG2_E, joined=True)(
            inputs=inputs,
            **shape,
            output_shapes=[(*parts, width), parts, parts],
            output_dtypes=[mx.float32] * 3,
        ),
        template=[("T", queries.dtype), ("D", width), ("SPLITS", splits)],
        grid=(rows * heads * width, 1, 1),
        threadgroup=(width, 1, 1),
        output_shapes=[queries.shape],
        output_dtypes=[queries.dtype],
    )[0]


def _chunk_for(heads: int, depth: int, repeats: int, width: int) -> int:
    """The smallest chunk that makes no more blocks than are of use, or the whole of a short row."""
    fitting = [c for c in _CHUNKS if _shared_bytes(repeats, width, c) <= _SHARED_BYTES]
    whole = [c for c in fitting if c >= depth]
    enough = [c for c in fitting if heads * -(-depth // c) <= _BLOCKS]
    return (whole or enough or fitting[-1:])[0]


def _shared_bytes(repeats: int, width: int, chunk: int) -> int:
    warps = _THREADS // 32
    return 4 * repeats * (width + chunk + warps * width + 2)


@cache
def _attend_kernel(scale: float, *, joined: bool) -> Callable[..., Any]:
    mantissa, exponent = math.frexp(scale)
    name = f"troupe_attend_{mantissa:.9f}_{exponent}_{joined}".replace(".", "_").replace("-", "m")
    outputs = ["out", "tops", "totals"] if joined else ["out"]
    header = f"#define SCALE {scale!r}f\n#define JOINED {int(joined)}\n"
    return _make(name, ["queries", "keys", "values", "offsets"], outputs, _ATTEND, header)


@cache
def _join_kernel() -> Callable[..., Any]:
    return _make("troupe_join", ["parts", "tops", "totals"], ["out"], _JOIN, "")


def _make(
    name: str, inputs: list[str], outputs: list[str], source: str, header: str
) -> Callable[..., Any]:
    metal = mx.metal.is_available()
    make: Any = mx.fast.metal_kernel if metal else mx.fast.cuda_kernel
    made: Callable[..., Any] = make(
        name=name,
        input_names=inputs,
        output_names=outputs,
        source=source,
        header=(_METAL if metal else _CUDA) + header,
    )
    return made
