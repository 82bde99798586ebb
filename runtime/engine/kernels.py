"""Decode attention for rows of different lengths, as one GPU kernel without a mask.

MLX's fused attention takes a mask for ragged rows, and building and reading it costs more than the
attention itself. These kernels take each row's length instead, read no slot that the row has not
filled, and split long rows over many blocks. Pure functions, on the device thread.

A block takes ``CHUNK`` slots of one row's key head for up to ``SHARE`` of its query heads. A few
lanes take a slot's key and value with one load each, several slots at once, and keep a softmax of
their own in powers of two, with the weighted sum of the values; at the end all are rescaled to the
largest maximum and added up. With more than one chunk a second kernel joins the parts likewise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx

from .activations import LOG2_E
from .kernel_words import TYPES, make_kernel

WIDTHS = (64, 128, 256)
_THREADS = (512, 256, 128)
_THREADS_AT_ONCE = 1 << 16
"""More than about five hundred for each multiprocessor have no registers at the same time."""
_FEW = 64
"""So few blocks are cut further: each multiprocessor has at most one of them."""
_MOST_THREADS = 256 if mx.metal.is_available() else 512
_MOST_SHARED = 4
_LOADED = 16
"""Bytes of one load."""
_MOST_HELD = 24
"""Values of queries and of sums, each, that a thread of the largest blocks has registers for."""
_CHUNKS = (256, 512, 1024, 2048, 4096)
_WHOLE = 1024
_BLOCKS = 1024
"""About as many blocks as keep a large GPU busy; more parts than that only cost joining."""
_UNBOUNDED = 1 << 30
_TRIAL_TOLERANCE = 1e-2
"""CUDA multiplies float32 matrices in TF32 by default."""

_ATTEND = """
    constexpr int V = 16 / sizeof(T);
    constexpr int LANES = D / V < 32 ? D / V : 32;
    constexpr int LOADS = D / (V * LANES);
    constexpr int MINE = V * LOADS;
    constexpr int GROUPS = THREADS / LANES;
    constexpr int WARPS = THREADS / 32;
    constexpr int R = HEADS / KV_HEADS;
    constexpr int SHARES = (R + SHARE - 1) / SHARE;
    SHARED float parts[WARPS * D];
    SHARED float tops[WARPS * SHARE];
    SHARED float totals[WARPS * SHARE];

    const int split = BLOCK_X;
    const int kv_head = BLOCK_Y / SHARES;
    const int first_head = BLOCK_Y % SHARES * SHARE;
    const int row = kv_head / KV_HEADS;
    const int head = kv_head * R + first_head;
    const int valid = R - first_head < SHARE ? R - first_head : SHARE;
    const int lane = TID % LANES;
    const int warp = TID / 32;
    const int offset = offsets[row];
    const int first = split * CHUNK;
    const int filled = offset + 1 < DEPTH ? offset + 1 : DEPTH;
    const int count = filled - first < CHUNK ? filled - first : CHUNK;
    if (count <= 0) {
#if JOINED
        if (TID < valid) {
            out_tops[(head + TID) * SPLITS + split] = NEVER;
            out_totals[(head + TID) * SPLITS + split] = 0.0f;
        }
#endif
        return;
    }

    float mine[SHARE * MINE], acc[SHARE * MINE], top[SHARE], total[SHARE];
#pragma unroll
    for (int r = 0; r < SHARE; ++r) {
        const GLOBAL T* from = queries + size_t(head + (r < valid ? r : 0)) * D;
        for (int i = 0; i < MINE; ++i) {
            const int at = (i / V * LANES + lane) * V + i % V;
            mine[r * MINE + i] = static_cast<float>(from[at]) * float(SCALE);
            acc[r * MINE + i] = 0.0f;
        }
        top[r] = NEVER;
        total[r] = 0.0f;
    }

    const size_t base = (size_t(kv_head) * DEPTH + first) * D + lane * V;
    for (int start = TID / LANES; start - TID / LANES < count; start += GROUPS * AT_ONCE) {
        Pack<T, V> k[AT_ONCE * LOADS], v[AT_ONCE * LOADS];
        for (int u = 0; u < AT_ONCE; ++u) {
            const int j = start + u * GROUPS;
            const size_t at = base + size_t(j < count ? j : count - 1) * D;
            for (int i = 0; i < LOADS; ++i) {
                k[u * LOADS + i] = *(const GLOBAL Pack<T, V>*)(keys + at + i * LANES * V);
                v[u * LOADS + i] = *(const GLOBAL Pack<T, V>*)(values + at + i * LANES * V);
            }
        }
        bool seen[AT_ONCE];
        for (int u = 0; u < AT_ONCE; ++u) {
            const int j = start + u * GROUPS;
            int age = offset - (first + j);
            if (RING > 0) {
                age %= (RING > 0 ? RING : 1);
                age = age < 0 ? age + RING : age;
            }
            seen[u] = j < count && age >= 0 && age < WINDOW && age <= offset;
        }
        float score[SHARE * AT_ONCE];
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) {
            float key[MINE];
            for (int i = 0; i < MINE; ++i)
                key[i] = static_cast<float>(k[u * LOADS + i / V].v[i % V]);
            for (int r = 0; r < SHARE; ++r) {
                float dot = 0.0f;
                for (int i = 0; i < MINE; ++i) dot += key[i] * mine[r * MINE + i];
                for (int n = LANES / 2; n > 0; n /= 2) dot += XOR(dot, n);
                score[r * AT_ONCE + u] = seen[u] ? dot : NEVER;
            }
        }
#pragma unroll
        for (int r = 0; r < SHARE; ++r) {
            float largest = top[r];
            for (int u = 0; u < AT_ONCE; ++u) largest = MAX(largest, score[r * AT_ONCE + u]);
            const float shift = largest == NEVER ? 0.0f : largest;
            const float kept = EXP2(top[r] - shift);
            total[r] *= kept;
            for (int i = 0; i < MINE; ++i) acc[r * MINE + i] *= kept;
            for (int u = 0; u < AT_ONCE; ++u) {
                const float weight = EXP2(score[r * AT_ONCE + u] - shift);
                score[r * AT_ONCE + u] = weight;
                total[r] += weight;
            }
            top[r] = largest;
        }
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) {
            float value[MINE];
            for (int i = 0; i < MINE; ++i)
                value[i] = static_cast<float>(v[u * LOADS + i / V].v[i % V]);
            for (int r = 0; r < SHARE; ++r)
                for (int i = 0; i < MINE; ++i)
                    acc[r * MINE + i] += score[r * AT_ONCE + u] * value[i];
        }
    }

#pragma unroll
    for (int r = 0; r < SHARE; ++r) {
        for (int n = LANES; n < 32; n *= 2) {
            const float largest = MAX(top[r], XOR(top[r], n));
            const float kept = EXP2(top[r] - (largest == NEVER ? 0.0f : largest));
            total[r] *= kept;
            total[r] += XOR(total[r], n);
            for (int i = 0; i < MINE; ++i) {
                acc[r * MINE + i] *= kept;
                acc[r * MINE + i] += XOR(acc[r * MINE + i], n);
            }
            top[r] = largest;
        }
        if (TID % 32 == 0) {
            tops[warp * SHARE + r] = top[r];
            totals[warp * SHARE + r] = total[r];
        }
    }
    BARRIER;

#pragma unroll
    for (int r = 0; r < SHARE; ++r) {
        if (r >= valid) break;
        float largest = NEVER, sum = 0.0f;
        for (int w = 0; w < WARPS; ++w) largest = MAX(largest, tops[w * SHARE + r]);
        const float shift = largest == NEVER ? 0.0f : largest;
        for (int w = 0; w < WARPS; ++w)
            sum += totals[w * SHARE + r] * EXP2(tops[w * SHARE + r] - shift);
        const float kept = EXP2(tops[warp * SHARE + r] - shift);
        if (TID % 32 < LANES) {
            for (int i = 0; i < MINE; ++i)
                parts[warp * D + (i / V * LANES + lane) * V + i % V] = acc[r * MINE + i] * kept;
        }
        BARRIER;
        for (int i = TID; i < D; i += THREADS) {
            float made = 0.0f;
            for (int w = 0; w < WARPS; ++w) made += parts[w * D + i];
#if JOINED
            out[(size_t(head + r) * SPLITS + split) * D + i] = made;
#else
            out[size_t(head + r) * D + i] = static_cast<T>(made / sum);
#endif
        }
        BARRIER;
#if JOINED
        if (TID == 0) {
            out_tops[(head + r) * SPLITS + split] = largest;
            out_totals[(head + r) * SPLITS + split] = sum;
        }
#endif
    }
"""

_JOIN = """
    const int head = BLOCK_X;
    float largest = NEVER;
    for (int s = 0; s < SPLITS; ++s) largest = MAX(largest, tops[head * SPLITS + s]);
    float sum = 0.0f;
    float acc = 0.0f;
#pragma unroll 4
    for (int s = 0; s < SPLITS; ++s) {
        const float here = tops[head * SPLITS + s];
        const float part = parts[(size_t(head) * SPLITS + s) * D + TID];
        const float share = here == NEVER ? 0.0f : EXP2(here - largest);
        sum += share * totals[head * SPLITS + s];
        acc += here == NEVER ? 0.0f : share * part;
    }
    out[head * D + TID] = static_cast<T>(acc / sum);
"""


def fits(queries: mx.array, keys: mx.array, values: mx.array) -> bool:
    """Whether the kernels serve these: queries [n, H, 1, D], keys and values [n, G, T, D]."""
    width = keys.shape[3]
    return (
        mx.default_device() == mx.gpu
        and queries.shape[2] == 1
        and width in WIDTHS
        and values.shape == keys.shape
        and queries.dtype == keys.dtype == values.dtype
        and queries.dtype in TYPES
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
    share, shares = _share_of(heads // kv_heads, rows * kv_heads)
    blocks = rows * kv_heads * shares
    chunk = _chunk_for(blocks, depth)
    splits = -(-depth // chunk)
    held = share * _held_for_each(width, queries.dtype)
    threads = _threads_for(blocks * splits, held)
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
            ("THREADS", threads),
            ("SHARE", share),
            ("AT_ONCE", 8 // queries.dtype.size),
        ],
        "grid": (splits * threads, blocks, 1),
        "threadgroup": (threads, 1, 1),
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


def _share_of(repeats: int, key_heads: int) -> tuple[int, int]:
    """Query heads of a block, evenly, and blocks of a key head."""
    most = 1 if key_heads * repeats <= _FEW else _MOST_SHARED
    shares = -(-repeats // most)
    return -(-repeats // shares), shares


def _held_for_each(width: int, kind: mx.Dtype) -> int:
    """Values of a query head that one thread has."""
    return width // min(32, width * kind.size // _LOADED)


def _threads_for(blocks: int, held: int) -> int:
    """As many as have registers, and no more than run at once; the fewest at the least."""
    roomy = [n for n in _THREADS if n <= (_MOST_THREADS if held <= _MOST_HELD else 256)]
    return next((n for n in roomy if n * blocks <= _THREADS_AT_ONCE), roomy[-1])


def _chunk_for(blocks: int, depth: int) -> int:
    """The whole of a short row, or the smallest chunk that makes no more blocks than are of use."""
    if depth <= _WHOLE:
        return depth
    enough = [chunk for chunk in _CHUNKS if blocks * -(-depth // chunk) <= _BLOCKS]
    return (enough or _CHUNKS[-1:])[0]


@cache
def _attend_kernel(scale: float, *, joined: bool) -> Callable[..., Any]:
    mantissa, exponent = math.frexp(scale)
    name = f"troupe_attend_{mantissa:.9f}_{exponent}_{joined}".replace(".", "_").replace("-", "m")
    outputs = ["out", "out_tops", "out_totals"] if joined else ["out"]
    header = f"#define SCALE {scale!r}f\n#define JOINED {int(joined)}\n"
    return make_kernel(name, ["queries", "keys", "values", "offsets"], outputs, _ATTEND, header)


@cache
def _join_kernel() -> Callable[..., Any]:
    return make_kernel("troupe_join", ["parts", "tops", "totals"], ["out"], _JOIN)
