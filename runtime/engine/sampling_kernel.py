"""The whole sampler chain of a batch in one CUDA kernel.

Sorting a vocabulary and filtering it step by step is some hundred small operations, each of which
costs the host as much as a layer's. Here one block takes one row through all filters and draws.
Weights are counted in integers (2^-44 of the best token's), so that sums do not depend on an order
and a row's draw on nothing but the row. Pure functions, on the device thread; what a row means by
its parameters is said in ``filters``. Metal has no 64-bit atomics and keeps to ``selection``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from ..requests import Hlg, Sampling
from .draw_source import DRAW, HEADER
from .filters import bends, choose, needs_of, parameters_of
from .kernel_words import make_cuda_kernel
from .selection import HostKit

_THREADS = 1024
_MOST = 1 << 20
"""Tokens of the largest vocabulary; its tiles fit in shared memory."""
_TYPES = (mx.bfloat16, mx.float16, mx.float32)


def serves(logits: mx.array) -> bool:
    """Whether the kernel draws from ``logits`` [B, V] here."""
    usable = logits.dtype in _TYPES and logits.shape[1] <= _MOST
    return usable and mx.cuda.is_available() and mx.default_device() == mx.gpu and works()


def table_of(rows: Sequence[Sampling], vocab_size: int) -> mx.array:
    """float32 [N, 11]: the rows' parameters in the kernel's order; no row has a curve of points."""
    return mx.array([_columns(row, vocab_size) for row in rows], dtype=mx.float32)


def _columns(s: Sampling, vocab_size: int) -> list[float]:
    needs, hlg = needs_of(s, vocab_size), s.hlg or Hlg()
    return [
        1 / s.temperature,
        s.top_p if needs.top_p else 2.0,
        # Compared by its bits: no distance is less than -0.0.
        abs(math.log(s.min_p)) if s.min_p > 0 else math.inf,
        s.top_k if needs.top_k else 0,
        s.xtc_threshold,
        s.xtc_probability or -1.0,
        hlg.width,
        hlg.shoulder,
        hlg.toe,
        hlg.pivot_offset,
        float(bends(s.hlg)),
    ]


def draw(
    logits: mx.array, places: mx.array, table: mx.array, removable: mx.array, numbers: mx.array
) -> mx.array:
    """One token for each of N rows, uint32 [N].

    Args:
        logits: [B, V], float16, bfloat16 or float32.
        places: int32 [N], the rows of ``logits`` to draw for.
        table: [N, 11] of :func:`table_of`.
        removable: bool [V], what XTC may remove.
        numbers: float32 [N, 2], uniform in [0, 1).
    """
    count = places.shape[0]
    size = mx.array([logits.shape[1]], dtype=mx.int32)
    made: list[mx.array] = _kernel()(
        inputs=[logits, places, table, removable, numbers, size],
        template=[("T", logits.dtype)],
        grid=(count * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(count,)],
        output_dtypes=[mx.uint32],
    )
    return made[0]


@cache
def _kernel() -> Callable[..., Any]:
    inputs = ["logits", "places", "table", "removable", "numbers", "sizes"]
    return make_cuda_kernel("troupe_draw", inputs, ["tokens"], DRAW, HEADER)


@cache
def works() -> bool:
    """Whether this GPU compiles the kernel and draws what the host's sampler draws."""
    try:
        return _agrees()
    except Exception:
        return False


TRIALS = (
    Sampling(temperature=0.7),
    Sampling(temperature=1.0, min_p=0.05, top_p=0.9),
    Sampling(temperature=0.8, top_p=0.95, top_k=20),
    Sampling(temperature=1.2, top_k=50),
    Sampling(temperature=1.0, xtc_probability=1.0, xtc_threshold=0.01),
    Sampling(temperature=1.0, hlg=Hlg()),
    Sampling(temperature=1.0, min_p=1.0),
)


def _agrees() -> bool:
    """Which side of a token's edge a number falls on is a matter of rounding."""
    size, kit = 3000, HostKit()
    logits = mx.random.normal((len(TRIALS), size), key=mx.random.key(7)) * 3
    removable = np.ones(size, dtype=bool)
    numbers = np.full((len(TRIALS), 2), 0.4, dtype=np.float32)
    places = mx.arange(len(TRIALS), dtype=mx.int32)
    table = table_of(TRIALS, size)
    got: Any = draw(logits, places, table, mx.array(removable), mx.array(numbers)).tolist()
    for row, sampling in enumerate(TRIALS):
        x = np.array(logits[row : row + 1])
        x -= x.max()
        parameters = parameters_of(kit, [sampling], removable)
        # Of the few best tokens the host draws in their order, the kernel in the vocabulary's.
        needs = replace(needs_of(sampling, size), few=0)
        near = [
            int(choose(kit, needs, x, parameters, numbers[:1] + shift)[0])
            for shift in (-1e-5, 0, 1e-5)
        ]
        if got[row] not in near:
            return False
    return True
