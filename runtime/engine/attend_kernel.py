"""The body of the decode attention kernels, and of the one that joins their parts.

A block takes ``CHUNK`` slots of one row's key head for up to ``SHARE`` of its query heads. A few
lanes take a slot's key and value with one load each, several slots at once, and keep a softmax of
their own in powers of two, with the weighted sum of the values; at the end all are rescaled to the
largest maximum and added up. With more than one chunk a second kernel joins the parts likewise.

Pure; ``kernels`` owns their shapes. On the device thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from .kernel_words import make_kernel

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
            const int slot = j < count ? j : count - 1;
            const size_t at = base + size_t(slot) * D;
            const bool own = OWN && first + slot == offset;
            const GLOBAL T* key_from = own ? own_keys + size_t(kv_head) * D + lane * V : keys + at;
            const GLOBAL T* value_from =
                own ? own_values + size_t(kv_head) * D + lane * V : values + at;
            for (int i = 0; i < LOADS; ++i) {
                k[u * LOADS + i] = *(const GLOBAL Pack<T, V>*)(key_from + i * LANES * V);
                v[u * LOADS + i] = *(const GLOBAL Pack<T, V>*)(value_from + i * LANES * V);
                if (own && j < count && first_head == 0) {
                    *(GLOBAL Pack<T, V>*)(keys + at + i * LANES * V) = k[u * LOADS + i];
                    *(GLOBAL Pack<T, V>*)(values + at + i * LANES * V) = v[u * LOADS + i];
                }
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


@cache
def attend_kernel(scale: float, *, joined: bool) -> Callable[..., Any]:
    """The kernel of a chunk; ``joined``: for parts that :func:`join_kernel` joins."""
    outputs = ["out", "out_tops", "out_totals"] if joined else ["out"]
    header = f"#define SCALE {scale!r}f\n#define JOINED {int(joined)}\n"
    inputs = ["queries", "keys", "values", "offsets", "own_keys", "own_values"]
    return make_kernel("troupe_attend", inputs, outputs, _ATTEND, header)


@cache
def join_kernel() -> Callable[..., Any]:
    """The kernel that joins the parts of rows that are cut."""
    return make_kernel("troupe_join", ["parts", "tops", "totals"], ["out"], _JOIN)
