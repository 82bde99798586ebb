"""The decode-attention kernel on a GPU: equal to masked attention, and how much faster.

    python bench/kernels.py [--repeat 8]

Checks shapes, types, rings and windows against MLX's own attention with a mask in float32, then
times 28 layers of a Llama-3B shape: the kernel, masked attention, and attention without a mask over
just the tokens that are there. Needs CUDA or Metal.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from rig import ready

ready()

import mlx.core as mx  # noqa: E402

TOLERANCES = {mx.bfloat16: 2e-2, mx.float16: 4e-3, mx.float32: 2e-3}
SHAPES = (
    # rows, heads, key heads, width, depth, ring, window
    (1, 24, 8, 128, 512, None, None),
    (32, 24, 8, 128, 512, None, None),
    (5, 9, 3, 64, 64, None, None),
    (4, 16, 2, 128, 2048, None, None),
    (2, 8, 4, 256, 4096, None, None),
    (6, 8, 2, 64, 144, 144, 128),
    (6, 8, 2, 64, 64, 144, 128),
    (2, 64, 8, 128, 256, None, 100),
    (1, 24, 8, 128, 32768, None, None),
)


def main() -> None:
    """Check, then measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=8)
    options = parser.parse_args()
    if mx.default_device() != mx.gpu:
        sys.exit("this needs a GPU")
    wrong = [(kind, shape) for kind in TOLERANCES for shape in SHAPES if not agrees(kind, shape)]
    print(f"{len(TOLERANCES) * len(SHAPES)} shapes checked, wrong: {wrong or 'none'}", flush=True)
    for rows, depth, lengths in (
        (1, 512, [380]),
        (32, 512, [380] * 32),
        (64, 512, [380] * 64),
        (1, 32768, [16500]),
    ):
        measure(rows, depth, lengths, options.repeat)
    sys.exit(bool(wrong))


def agrees(kind: mx.Dtype, shape: tuple[int, int, int, int, int, int | None, int | None]) -> bool:
    """Whether the kernel is within the type's tolerance of masked attention in float32."""
    from mlx_troupe.runtime.engine.kernels import fits, ragged_attention

    rows, heads, kv_heads, width, depth, ring, window = shape
    queries, keys, values = arrays(kind, rows, heads, kv_heads, width, depth)
    most = depth if ring is None or depth < ring else 1000
    draw = random.Random(depth)
    offsets = mx.array([draw.randrange(most) for _ in range(rows)], dtype=mx.int32)
    if not fits(queries, keys, values):
        return False
    got = ragged_attention(queries, keys, values, offsets, width**-0.5, ring, window)
    held, last = mx.arange(depth)[None], offsets[:, None]
    if ring is not None:
        held = last - (last + ring * 1000 - held) % ring
    seen = (held <= last) & (held >= 0)
    if window is not None:
        seen = seen & (held > last - window)
    expected = mx.fast.scaled_dot_product_attention(
        *(x.astype(mx.float32) for x in (queries, keys, values)),
        scale=width**-0.5,
        mask=seen[:, None, None],
    )
    difference = mx.abs(got.astype(mx.float32) - expected).max().item()
    return bool(difference < TOLERANCES[kind])


def arrays(
    kind: mx.Dtype, rows: int, heads: int, kv_heads: int, width: int, depth: int
) -> tuple[mx.array, mx.array, mx.array]:
    """Random queries, keys and values."""
    return (
        mx.random.normal((rows, heads, 1, width)).astype(kind),
        mx.random.normal((rows, kv_heads, depth, width)).astype(kind),
        mx.random.normal((rows, kv_heads, depth, width)).astype(kind),
    )


def measure(rows: int, depth: int, lengths: list[int], repeat: int) -> None:
    """Print milliseconds of 28 layers."""
    from mlx_troupe.runtime.engine.kernels import ragged_attention

    layers = [arrays(mx.bfloat16, rows, 24, 8, 128, depth) for _ in range(28)]
    offsets = mx.array(lengths, dtype=mx.int32)
    mask = (mx.arange(depth)[None] <= offsets[:, None])[:, None, None]
    most, scale = max(lengths), 128**-0.5
    mx.eval(layers, mask, offsets)
    plain = mx.fast.scaled_dot_product_attention
    sides: dict[str, Callable[[mx.array, mx.array, mx.array], mx.array]] = {
        "kernel": lambda q, k, v: ragged_attention(q, k, v, offsets, scale),
        "masked": lambda q, k, v: plain(q, k, v, scale=scale, mask=mask),
        "no mask": lambda q, k, v: plain(q, k[:, :, :most], v[:, :, :most], scale=scale),
    }
    times: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(repeat):
        for side, attend in sides.items():
            began = time.perf_counter()
            mx.eval([attend(*layer) for layer in layers])
            times[side].append(time.perf_counter() - began)
    medians = {side: round(statistics.median(t) * 1e3, 2) for side, t in times.items()}
    print(f"{rows} rows of {depth}, ms:", medians, flush=True)


if __name__ == "__main__":
    main()
