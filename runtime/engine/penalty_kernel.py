"""The penalties of all rows of a batch in one CUDA kernel.

What ``processors`` does in some forty small operations, each of which costs the host as much as a
layer's: one block copies a row's logits, takes the newest token into its history, and penalises
each token of the history once. Histories of more than ``MOST`` tokens are left to ``processors``.
Pure functions, on the device thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias

import mlx.core as mx

from .kernel_words import make_cuda_kernel

MOST = 1024
_THREADS = 1024

Asked: TypeAlias = tuple[float, int]
"""A penalty that does something and its window, 0 = all; a window of -1: the row has none."""
NONE: Asked = (0.0, -1)

_PENALISE = """
    __shared__ int seen[1024];
    const int size = sizes[0], width = sizes[1];
    const size_t start = size_t(blockIdx.x) * size;
    const T* from = logits + start;
    T* to = changed + start;
    for (int i = threadIdx.x; i < size; i += blockDim.x) to[i] = from[i];
    const int row = history[blockIdx.x];
    if (row < 0) return;
    for (int j = threadIdx.x; j < width; j += blockDim.x) {
        const int token = j < width - 1 ? tokens[row * width + j + 1] : int(inputs[blockIdx.x]);
        seen[j] = token;
        newer[row * width + j] = token;
    }
    __syncthreads();

    const float* p = table + row * 6;
    for (int j = threadIdx.x; j < width; j += blockDim.x) {
        const int token = seen[j];
        if (token < 0) continue;
        const int age = width - 1 - j;
        bool newest = true;
        int times = 0;
        for (int other = 0; other < width; ++other) {
            if (seen[other] != token) continue;
            newest = newest && other <= j;
            times += width - 1 - other < p[5];
        }
        if (!newest) continue;
        T x = from[token];
        if (age < p[1]) {
            const float by = static_cast<float>(static_cast<T>(p[0]));
            const float held = static_cast<float>(x);
            x = static_cast<T>(held < 0.0f ? held * by : held / by);
        }
        if (age < p[3]) {
            x = static_cast<T>(static_cast<float>(x) - static_cast<float>(static_cast<T>(p[2])));
        }
        const float each = static_cast<float>(static_cast<T>(p[4]));
        for (int n = 0; n < times; ++n) x = static_cast<T>(static_cast<float>(x) - each);
        to[token] = x;
    }
"""


def table_of(rows: Sequence[tuple[Asked, ...]]) -> mx.array:
    """float32 [R, 6]: of each row its repetition, presence and frequency penalty and window."""
    columns = [
        [value for amount, window in row for value in (amount, window or MOST)] for row in rows
    ]
    return mx.array(columns, dtype=mx.float32)


def penalise(
    logits: mx.array, inputs: mx.array, tokens: mx.array, history: mx.array, table: mx.array
) -> tuple[mx.array, mx.array]:
    """New logits and new histories.

    Args:
        logits: [B, V], float16, bfloat16 or float32.
        inputs: integers [B], the tokens that made them.
        tokens: int32 [R, W], the newest last, negative where there are not so many.
        history: int32 [B], each row's place in ``tokens`` or -1.
        table: [R, 6] of :func:`table_of`.
    """
    rows, size = logits.shape
    sizes = mx.array([size, tokens.shape[1]], dtype=mx.int32)
    changed, newer = _kernel()(
        inputs=[logits, inputs, tokens, history, table, sizes],
        template=[("T", logits.dtype)],
        grid=(rows * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[logits.shape, tokens.shape],
        output_dtypes=[logits.dtype, mx.int32],
    )
    return changed, newer


@cache
def _kernel() -> Callable[..., Any]:
    inputs = ["logits", "inputs", "tokens", "history", "table", "sizes"]
    return make_cuda_kernel("troupe_penalise", inputs, ["changed", "newer"], _PENALISE)


@cache
def works() -> bool:
    """Whether there is CUDA, compiles the kernel and gets what the penalties are by definition."""
    if not mx.cuda.is_available() or mx.default_device() != mx.gpu:
        return False
    try:
        return _agrees()
    except Exception:
        return False


def _agrees() -> bool:
    logits = [[4.0, -2.0, 1.0, 3.0, 0.5], [1.0, 2.0, 3.0, 4.0, 5.0]]
    asked = ((2.0, 0), (0.25, 3), (1.0, 0))
    changed, newer = penalise(
        mx.array(logits),
        mx.array([1, 2], dtype=mx.uint32),
        mx.array([[-1, 3, 0, 0]], dtype=mx.int32),
        mx.array([0, -1], dtype=mx.int32),
        table_of([asked]),
    )
    # Token 0 came twice and token 1 once within the last three, token 3 before them.
    expected = [[-0.25, -5.25, 1.0, 0.5, 0.5], logits[1]]
    return bool(newer.tolist() == [[3, 0, 0, 1]] and changed.tolist() == expected)
