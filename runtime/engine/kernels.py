"""Decode attention for rows of different lengths, as one GPU kernel without a mask.

MLX's fused attention takes a mask for ragged rows, and building and reading it costs more than the
attention itself. These kernels take each row's length instead, read no slot that the row has not
filled, and split long rows over many blocks. Pure functions, on the device thread.

A step's own keys and values may come beside the buffers. Then the kernel reads them from there and
puts them into their slots itself, in place: MLX would copy whole buffers at every step, as it gives
none of them up to an operation while the step before, which reads them, is still running.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from .activations import LOG2_E
from .attend_kernel import attend_kernel, join_kernel
from .kernel_words import TYPES

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
_MOST_HELD = 16
"""Values of queries and of sums, each, that a thread of the largest blocks has registers for."""
_CHUNKS = (256, 512, 1024, 2048, 4096)
_WHOLE = 1024
_BLOCKS = 1024
"""About as many blocks as keep a large GPU busy; more parts than that only cost joining."""
_UNBOUNDED = 1 << 30
_TRIAL_TOLERANCE = {mx.float32: 1e-2, mx.float16: 1e-2, mx.bfloat16: 3e-2}
"""CUDA multiplies float32 matrices in TF32 by default."""


def fits(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    own: tuple[mx.array, mx.array] | None = None,
) -> bool:
    """Whether the kernels serve these: queries [n, H, 1, D], keys and values [n, G, T, D].

    And the step's ``own`` [n, G, 1, D], if they are beside the buffers.
    """
    rows, kv_heads, _, width = keys.shape
    alone = (rows, kv_heads, 1, width)
    return (
        mx.default_device() == mx.gpu
        and queries.shape[2] == 1
        and width in WIDTHS
        and values.shape == keys.shape
        and queries.dtype == keys.dtype == values.dtype
        and queries.dtype in TYPES
        and all(x.shape == alone and x.dtype == keys.dtype for x in own or ())
        and work(queries.dtype, width)
    )


@cache
def work(kind: mx.Dtype, width: int) -> bool:
    """Whether this GPU compiles the kernels and gets what MLX's masked attention gets.

    Tried for short rows and for such as are cut, with the new tokens in their slots and beside.
    """
    try:
        return all(_agree(kind, width, depth) for depth in (96, 2 * _WHOLE))
    except Exception:
        return False


def _agree(kind: mx.Dtype, width: int, depth: int) -> bool:
    draw = mx.random.normal((3, 8, depth, width), key=mx.random.key(0)).astype(kind)
    queries, keys, values = draw[:, :4, :1], mx.contiguous(draw[:, 4:6]), mx.contiguous(draw[:, 6:])
    offsets = mx.array([0, 70, depth - 1], dtype=mx.int32)
    mask = (mx.arange(depth) <= offsets[:, None])[:, None, None]
    single = (x.astype(mx.float32) for x in (queries, keys, values))
    expected = mx.fast.scaled_dot_product_attention(*single, scale=width**-0.5, mask=mask)
    made = [ragged_attention(queries, keys, values, offsets, width**-0.5)]
    where = offsets[:, None, None, None]
    own = (mx.take_along_axis(keys, where, axis=2), mx.take_along_axis(values, where, axis=2))
    lacking = [mx.put_along_axis(x, where, mx.array(9, kind), axis=2) for x in (keys, values)]
    mx.eval(own, lacking)
    k, v = lacking
    made.append(ragged_attention(queries, k, v, offsets, width**-0.5, own=own))
    mx.eval(made)
    if not all(mx.array_equal(x, y) for x, y in zip(lacking, (keys, values), strict=True)):
        return False
    apart = [mx.abs(got.astype(mx.float32) - expected).max() for got in made]
    return all(bool((difference < _TRIAL_TOLERANCE[kind]).item()) for difference in apart)


def ragged_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    offsets: mx.array,
    scale: float,
    ring: int | None = None,
    window: int | None = None,
    own: tuple[mx.array, mx.array] | None = None,
) -> mx.array:
    """Attention of one new token in each row, [n, H, 1, D]; see :func:`fits` for the shapes.

    ``offsets`` int32 [n] are the positions of the new tokens: a row sees its slots up to its own
    position, at most ``window`` of them. In a ``ring``, position *p* lies in slot *p* mod ring. The
    new tokens' keys and values are in their slots already, or are the step's ``own`` [n, G, 1, D]
    and are put there, which MLX does not know: nothing may read these slots but what follows from
    the result, and nothing may share the buffers' memory. Not with a ring.
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
            ("AT_ONCE", 4 if queries.dtype.size == 2 and share < _MOST_SHARED else 2),
            ("OWN", own is not None),
        ],
        "grid": (splits * threads, blocks, 1),
        "threadgroup": (threads, 1, 1),
    }
    inputs = [queries, keys, values, offsets, *(own or (queries, queries))]
    if splits == 1:
        attend = attend_kernel(scale * LOG2_E, joined=False)
        whole = {"output_shapes": [queries.shape], "output_dtypes": [queries.dtype]}
        return attend(inputs=inputs, **shape, **whole)[0]
    parts = (rows, heads, splits)
    cut = attend_kernel(scale * LOG2_E, joined=True)(
        inputs=inputs,
        **shape,
        output_shapes=[(*parts, width), parts, parts],
        output_dtypes=[mx.float32] * 3,
    )
    return join_kernel()(
        inputs=cut,
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
