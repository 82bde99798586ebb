"""The kernels for decode steps and for sampling on a GPU: equal to MLX, and how much faster.

    python bench/kernels.py [--repeat 8]

Checks shapes, types, rings and windows against MLX's own attention with a mask in float32, then
times 28 layers of a Llama-3B shape: the kernel, masked attention, and attention without a mask over
just the tokens that are there. On CUDA random sampler chains draw by the kernel and on the host
with the same numbers, then 16 rows are timed. Needs CUDA or Metal.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from rig import ready

ready()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

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
    (3, 28, 4, 128, 1024, None, None),
    (2, 16, 1, 256, 2048, None, 700),
    (40, 20, 4, 64, 512, None, None),
    (1, 24, 8, 128, 32768, None, None),
)


def main() -> None:
    """Check, then measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=8)
    options = parser.parse_args()
    from mlx_troupe.runtime.engine import fused_kernels

    if mx.default_device() != mx.gpu:
        sys.exit("this needs a GPU")
    wrong: list[tuple[mx.Dtype, object]] = [
        (kind, shape) for kind in TOLERANCES for shape in SHAPES if not agrees(kind, shape)
    ]
    print(f"{len(TOLERANCES) * len(SHAPES)} shapes checked, wrong: {wrong or 'none'}", flush=True)
    wrong += [(kind, "blocks") for kind in TOLERANCES if not fused_kernels.work(kind)]
    for rows, depth, lengths in (
        (1, 512, [380]),
        (32, 512, [380] * 32),
        (64, 512, [380] * 64),
        (1, 32768, [16500]),
    ):
        measure(rows, depth, lengths, options.repeat)
    other = check_draws() if mx.cuda.is_available() else 0
    sys.exit(bool(wrong or other))


def check_draws() -> int:
    """Print how many draws the host makes otherwise, and how long a step's draws take."""
    from mlx_troupe.runtime.engine import sampling_kernel

    print("the kernel is in use:", sampling_kernel.works(), flush=True)
    draw = random.Random(3)
    drawn = other = 0
    for size in (300, 5000, 128256):
        for kind in TOLERANCES:
            made, wrong = draws_otherwise(size, kind, [a_chain(draw) for _ in range(48)])
            drawn, other = drawn + made, other + len(wrong)
            for sampling in wrong:
                print(f"other than on the host: {size} {kind} {sampling}")
    print(f"{drawn} draws, {other} other than on the host", flush=True)
    rows = [a_chain(draw) for _ in range(16)]
    x = mx.random.normal((16, 128256)).astype(mx.bfloat16)
    numbers, removable = mx.random.uniform(shape=(16, 2)), mx.ones((128256,), mx.bool_)
    places, table = mx.arange(16, dtype=mx.int32), sampling_kernel.table_of(rows, 128256)
    mx.eval(x, numbers, removable, places, table)
    for _ in range(3):
        began = time.perf_counter()
        mx.eval([sampling_kernel.draw(x, places, table, removable, numbers) for _ in range(10)])
        seconds = (time.perf_counter() - began) / 10
    print(f"16 rows of 128256: {seconds * 1e6:.0f} µs", flush=True)
    return other + check_penalties(draw) + check_masks()


def check_masks() -> int:
    """Print in how many batches the masks' kernels and MLX's operations differ."""
    from mlx_troupe.runtime.engine import allowing
    from mlx_troupe.runtime.engine.masks import Masks

    random_bits, wrong, palette = np.random.default_rng(5), 0, allowing.Palette()
    for kind in TOLERANCES:
        print(f"masks have kernels for {kind}: {allowing.works(kind)}", flush=True)
        for rows, size in ((1, 31), (3, 300), (16, 128256)):
            logits = (mx.random.normal((rows, size)) * 4).astype(kind)
            bits = random_bits.integers(0, 1 << 32, (rows, -(-size // 32)), dtype=np.uint32)
            masks = Masks(bits & random_bits.permutation(bits.ravel()).reshape(bits.shape), {})
            expected = allowing._step_by_step(logits, mx.array(masks.words))
            tokens, reported = allowing.best(logits, palette.find(masks))
            free, _ = allowing.best(logits, None)
            wrong += not (
                mx.array_equal(allowing.restricted(logits, masks, palette), expected)
                and mx.array_equal(tokens, mx.argmax(expected, axis=-1))
                and mx.array_equal(reported, tokens.astype(mx.int32))
                and mx.array_equal(free, mx.argmax(logits, axis=-1))
            )
    print(f"masks: {wrong} batches otherwise", flush=True)
    return wrong


def check_penalties(draw: random.Random) -> int:
    """Print in how many steps the penalties' kernel and MLX's operations differ."""
    from mlx_troupe.runtime.engine import penalty_kernel
    from mlx_troupe.runtime.engine.processors import Processors, past_of
    from mlx_troupe.runtime.requests import Sampling

    rows, size, wrong = 12, 700, 0
    asked = [
        Sampling(
            repetition_penalty=draw.choice([0.0, 1.0, 1.3]),
            repetition_context_size=draw.choice([20, 64, 700]),
            presence_penalty=draw.choice([0.0, 0.4, -0.3]),
            frequency_penalty=draw.choice([0.0, 0.2]),
            frequency_context_size=draw.choice([20, 0, 100]),
        )
        for _ in range(rows)
    ]
    prompts = [[draw.randrange(40) for _ in range(draw.randrange(1, 90))] for _ in range(rows)]

    def made(batch: int) -> Processors:
        pasts = [past_of(s, ids) for s, ids in zip(asked, prompts, strict=True)]
        recent = {n: past.recent(past.width()) for n, past in enumerate(pasts) if past is not None}
        return Processors(list(zip(range(rows), asked, pasts, strict=True)), recent, batch)

    fused, plain = made(rows), made(0)
    for _ in range(40):
        logits = mx.random.normal((rows, size)) * 4
        inputs = mx.array([draw.randrange(40) for _ in range(rows)], dtype=mx.uint32)
        one, other = fused.apply(logits, inputs), plain.apply(logits, inputs)
        wrong += bool(mx.abs(one - other).max() > 1e-4)
    used = penalty_kernel.works()
    print(f"penalties by the kernel: {used}; 40 steps of {rows} rows, {wrong} other", flush=True)
    return wrong + (not used)


def a_chain(draw: random.Random) -> Any:
    """A random sampler; any filter may be on."""
    from mlx_troupe.runtime.requests import Hlg, Sampling

    def maybe(value: float) -> float:
        return value if draw.random() < 0.5 else 0.0

    hlg = Hlg(draw.uniform(0, 4), draw.uniform(0, 4), maybe(3), draw.uniform(0, 6))
    return Sampling(
        temperature=draw.choice([0.05, 0.6, 1.0, 1.7]),
        top_p=maybe(draw.uniform(0.05, 0.999)) or 1.0,
        min_p=maybe(draw.uniform(0.001, 0.3)),
        top_k=int(maybe(draw.choice([1, 5, 40, 200, 2000]))),
        xtc_probability=maybe(0.6),
        xtc_threshold=draw.uniform(0.0, 0.3),
        hlg=hlg if draw.random() < 0.2 else None,
    )


def draws_otherwise(size: int, kind: mx.Dtype, rows: list[Any]) -> tuple[int, list[Any]]:
    """How many were drawn, and the chains of those that the host draws otherwise.

    The host draws with the same numbers, a little less and a little more: which side of a token's
    edge a number falls on is a matter of rounding. It draws in the order of the vocabulary here.
    """
    from dataclasses import replace

    import numpy as np

    from mlx_troupe.runtime.engine import sampling_kernel
    from mlx_troupe.runtime.engine.filters import choose, needs_of, parameters_of
    from mlx_troupe.runtime.engine.selection import HostKit

    logits = (mx.random.normal((len(rows), size)) * 2.5).astype(kind)
    numbers = np.random.default_rng(size).random((len(rows), 2), dtype=np.float32)
    removable = np.arange(size) % 7 != 0
    table = sampling_kernel.table_of(rows, size)
    places = mx.arange(len(rows), dtype=mx.int32)
    got = sampling_kernel.draw(logits, places, table, mx.array(removable), mx.array(numbers))
    values, kit, wrong = np.array(logits.astype(mx.float32)), HostKit(), []
    for row, sampling in enumerate(rows):
        x = values[row : row + 1] - values[row].max()
        parameters = parameters_of(kit, [sampling], removable)
        near = set()
        for shift in (-2e-5, 0, 2e-5):
            number = numbers[row : row + 1].copy()
            number[0, 0] = np.clip(number[0, 0] + shift, 0, 1 - 2**-24)
            needs = replace(needs_of(sampling, size), few=0)
            near.add(int(choose(kit, needs, x, parameters, number)[0]))
        if got[row].item() not in near:
            wrong.append(sampling)
    return len(rows), wrong


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
    scale = width**-0.5
    made = [ragged_attention(queries, keys, values, offsets, scale, ring, window)]
    if ring is None:
        # The new tokens beside buffers that lack them: the same, and then they are in there.
        where = offsets[:, None, None, None]
        own = (mx.take_along_axis(keys, where, axis=2), mx.take_along_axis(values, where, axis=2))
        lacking = [mx.put_along_axis(x, where, mx.array(9, kind), axis=2) for x in (keys, values)]
        mx.eval(own, lacking)
        k, v = lacking
        made.append(ragged_attention(queries, k, v, offsets, scale, None, window, own))
        mx.eval(made)
        if not all(mx.array_equal(x, y) for x, y in zip(lacking, (keys, values), strict=True)):
            return False
    held, last = mx.arange(depth)[None], offsets[:, None]
    if ring is not None:
        held = last - (last + ring * 1000 - held) % ring
    seen = (held <= last) & (held >= 0)
    if window is not None:
        seen = seen & (held > last - window)
    expected = mx.fast.scaled_dot_product_attention(
        *(x.astype(mx.float32) for x in (queries, keys, values)),
        scale=scale,
        mask=seen[:, None, None],
    )
    apart = [mx.abs(got.astype(mx.float32) - expected).max() for got in made]
    return all(bool(difference < TOLERANCES[kind]) for difference in apart)


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
