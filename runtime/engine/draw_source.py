"""The CUDA text of ``sampling_kernel``: one block takes one row through all filters and draws.

A threshold is found by a histogram of the distances from the best token, in 64ths of a nat, and
then by halving within one bin; the token at a share of the weight by sums of tiles.
"""

from __future__ import annotations

HEADER = """
typedef unsigned long long u64;
typedef unsigned int u32;
#define THREADS 1024
#define TILE 1024
#define BINS 2048
#define LISTED 4096
#define COLUMNS 11
#define ALL 0x7f800000u
#define WARP (threadIdx.x / 32)
#define LANE (threadIdx.x % 32)
#define EVERY 0xffffffffu

struct Shared {
    u64 bins[BINS];
    u32 list[LISTED];
    u64 tiles[1024];
    u64 parts[32];
    u64 before;
    u32 found;
    u32 listed;
};

__device__ inline u64 plus(u64 a, u64 b) { return a + b; }
__device__ inline u64 lesser(u64 a, u64 b) { return a < b ? a : b; }

template <u64 OP(u64, u64)> __device__ u64 join_warp(u64 value) {
    for (int n = 16; n > 0; n /= 2) value = OP(value, __shfl_xor_sync(EVERY, value, n));
    return value;
}

template <u64 OP(u64, u64)> __device__ u64 join_block(u64 value, Shared& s) {
    value = join_warp<OP>(value);
    __syncthreads();
    if (LANE == 0) s.parts[WARP] = value;
    __syncthreads();
    return join_warp<OP>(s.parts[LANE]);
}

template <u64 OP(u64, u64), typename F>
__device__ u64 over_row(int size, u64 start, Shared& s, F f) {
    u64 value = start;
    for (int i = threadIdx.x; i < size; i += THREADS) value = OP(value, f(i));
    return join_block<OP>(value, s);
}

__device__ inline u64 scan_warp(u64 value) {
    for (int n = 1; n < 32; n *= 2) {
        const u64 left = __shfl_up_sync(EVERY, value, n);
        if (LANE >= n) value += left;
    }
    return value;
}

// The first of `count` entries at which what came before it and their sum exceed the target; one
// warp. `before` becomes what lies before that entry.
template <typename F>
__device__ int first_beyond(int count, u64 target, u64& before, F f) {
    for (int start = 0; start < count; start += 32) {
        const int i = start + LANE;
        const u64 own = i < count ? f(i) : 0;
        const u64 reached = before + scan_warp(own);
        const u32 beyond = __ballot_sync(EVERY, reached > target);
        if (beyond) {
            const int lane = __ffs(beyond) - 1;
            before = __shfl_sync(EVERY, reached - own, lane);
            return start + lane;
        }
        before = __shfl_sync(EVERY, reached, 31);
    }
    return count;
}

template <typename F> __device__ u64 sum_tiles(int size, Shared& s, F weight) {
    const int tiles = (size + TILE - 1) / TILE;
    u64 all = 0;
    __syncthreads();
    for (int tile = WARP; tile < tiles; tile += THREADS / 32) {
        u64 sum = 0;
        const int end = (tile + 1) * TILE < size ? (tile + 1) * TILE : size;
        for (int i = tile * TILE + LANE; i < end; i += 32) sum += weight(i);
        sum = join_warp<plus>(sum);
        if (LANE == 0) s.tiles[tile] = sum;
        all += sum;
    }
    return join_block<plus>(LANE == 0 ? all : 0, s);
}

// After sum_tiles: the first index whose cumulative weight exceeds the target.
template <typename F> __device__ u32 locate(int size, u64 target, Shared& s, F weight) {
    if (WARP == 0) {
        u64 before = 0;
        const int tile = first_beyond((size + TILE - 1) / TILE, target, before,
                                      [&](int i) { return s.tiles[i]; });
        const int start = tile * TILE;
        const int count = size - start < TILE ? size - start : TILE;
        const int at =
            first_beyond(count, target, before, [&](int i) { return weight(start + i); });
        if (LANE == 0) s.found = start + at;
    }
    __syncthreads();
    return s.found;
}

__device__ inline u32 bin_of(float distance) {
    return distance < (BINS - 1) / 64.0f ? u32(distance * 64.0f) : BINS - 1;
}

// The smallest distance, as bits, such that all that are no farther weigh the limit; ALL if none.
template <typename D, typename F>
__device__ u32 select(int size, u64 limit, Shared& s, D distance, F weight) {
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += THREADS) s.bins[i] = 0;
    if (threadIdx.x == 0) s.listed = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < size; i += THREADS) {
        const u64 w = weight(i);
        if (w) atomicAdd(&s.bins[bin_of(distance(i))], w);
    }
    __syncthreads();
    if (WARP == 0) {
        u64 before = 0;
        const int bin = first_beyond(BINS, limit - 1, before, [&](int i) { return s.bins[i]; });
        if (LANE == 0) {
            s.found = bin;
            s.before = before;
        }
    }
    __syncthreads();
    const u32 bin = s.found;
    const u64 before = s.before;
    if (bin >= BINS) return ALL;
    for (int i = threadIdx.x; i < size; i += THREADS) {
        if (bin_of(distance(i)) != bin || !weight(i)) continue;
        const u32 place = atomicAdd(&s.listed, 1u);
        if (place < LISTED) s.list[place] = i;
    }
    __syncthreads();
    const u32 listed = s.listed;
    u32 low = __float_as_uint(bin / 64.0f);
    u32 high = bin == BINS - 1 ? ALL : __float_as_uint((bin + 1) / 64.0f);
    while (low < high) {
        const u32 middle = (low + high) / 2;
        u64 sum = 0;
        if (listed <= LISTED) {
            for (u32 n = threadIdx.x; n < listed; n += THREADS) {
                const int i = s.list[n];
                if (__float_as_uint(distance(i)) <= middle) sum += weight(i);
            }
        } else {
            for (int i = threadIdx.x; i < size; i += THREADS)
                if (bin_of(distance(i)) == bin && __float_as_uint(distance(i)) <= middle)
                    sum += weight(i);
        }
        if (before + join_block<plus>(sum, s) >= limit) high = middle;
        else low = middle + 1;
    }
    return low;
}

__device__ inline float roll_off(float distance, float scale) {
    const float safe = fmaxf(scale, 1e-6f);
    return scale > 0.0f ? safe * log1pf(distance / safe) : distance;
}

// The score of a token this far below the best one: at a temperature, or on the HLG curve.
__device__ inline float score(float distance, const float* p) {
    if (p[10] == 0.0f) return -distance * p[0];
    const float u = p[9] - distance;
    const float straight = fminf(fmaxf(u, -p[6]), p[6]) * p[0];
    const float above = fmaxf(u - p[6], 0.0f) * p[0];
    const float below = fmaxf(-p[6] - u, 0.0f) * p[0];
    return straight + roll_off(above, p[7]) - roll_off(below, p[8]);
}

__device__ inline u64 counted(float share) { return __float2ull_rn(share * 17592186044416.0f); }
"""

DRAW = """
    __shared__ Shared s;
    const int size = sizes[0];
    const T* x = logits + size_t(places[blockIdx.x]) * size;
    const float* p = table + size_t(blockIdx.x) * COLUMNS;
    const float infinity = __uint_as_float(ALL);

    float top = -infinity;
    for (int i = threadIdx.x; i < size; i += THREADS) top = fmaxf(top, static_cast<float>(x[i]));
    for (int n = 16; n > 0; n /= 2) top = fmaxf(top, __shfl_xor_sync(EVERY, top, n));
    if (LANE == 0) s.parts[WARP] = __float_as_uint(top);
    __syncthreads();
    top = __uint_as_float(u32(s.parts[LANE]));
    for (int n = 16; n > 0; n /= 2) top = fmaxf(top, __shfl_xor_sync(EVERY, top, n));

    const auto distance = [&](int i) { return top - static_cast<float>(x[i]); };
    const auto key = [&](int i) { return __float_as_uint(distance(i)); };
    // What is forbidden, or not a number, weighs nothing.
    const auto mass = [&](int i) {
        const float d = distance(i);
        return d < infinity ? counted(expf(-d)) : u64(0);
    };

    u32 edge = __float_as_uint(p[2]);
    if (p[1] < 1.0f) {
        const u64 all = over_row<plus>(size, 0, s, mass);
        const u64 limit = u64(double(p[1]) * double(all));
        const u32 nucleus = select(size, limit ? limit : 1, s, distance, mass);
        edge = nucleus < edge ? nucleus : edge;
    }
    u64 least = ~u64(0);
    u32 nearest = 0;
    if (numbers[2 * blockIdx.x + 1] <= p[5]) {
        const auto left = [&](int i) { return key(i) <= edge ? mass(i) : u64(0); };
        const u64 bar = u64(double(p[4]) * double(over_row<plus>(size, 0, s, left)));
        least = over_row<lesser>(size, ~u64(0), s, [&](int i) {
            const u64 m = left(i);
            return m > bar ? m : ~u64(0);
        });
    }
    const bool strikes = least != ~u64(0);
    const auto alive = [&](int i) {
        return key(i) <= edge && !(strikes && removable[i] && mass(i) > least);
    };
    if (strikes) {
        const auto nearness = [&](int i) { return alive(i) ? key(i) : ALL; };
        nearest = u32(over_row<lesser>(size, ALL, s, nearness));
    }
    u32 last = ALL;
    u32 last_tied = size;
    if (p[3] > 0.0f) {
        const u64 most = u64(p[3]);
        last = select(size, most, s, distance, [&](int i) { return u64(alive(i)); });
        const u64 nearer =
            over_row<plus>(size, 0, s, [&](int i) { return u64(alive(i) && key(i) < last); });
        const auto tied = [&](int i) { return u64(alive(i) && key(i) == last); };
        // Of equals those with the lowest ids stay.
        if (sum_tiles(size, s, tied) > most - nearer)
            last_tied = locate(size, most - nearer - 1, s, tied);
    }
    const float base = score(__uint_as_float(nearest), p);
    const auto weight = [&](int i) {
        const u32 k = key(i);
        if (k >= ALL || k > last || (k == last && i > last_tied) || !alive(i)) return u64(0);
        return counted(expf(score(distance(i), p) - base));
    };
    const u64 total = sum_tiles(size, s, weight);
    const u64 target = u64(double(numbers[2 * blockIdx.x]) * double(total));
    const u32 drawn = total ? locate(size, target, s, weight) : 0;
    if (threadIdx.x == 0) tokens[blockIdx.x] = drawn;
"""
