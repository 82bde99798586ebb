"""What masks do to logits: forbidden tokens become -inf, or at once the best allowed one is taken.

On CUDA each is one kernel instead of some seven operations, each of which costs the host as much as
a layer's, at a time when the device waits for it. Most masks are equal to earlier ones, and sending
one costs more than using it: a :class:`Palette` owns those that the device holds already. On the
device thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .kernel_words import make_cuda_kernel
from .masks import ALL, WORD, Masks

MOST = 512
"""Masks on the device: 8 MiB for a vocabulary of 128k tokens."""
_THREADS = 1024


@dataclass(frozen=True, slots=True)
class Chosen:
    """Masks on the device: those of a batch's rows are at ``places`` int32 [B] of ``table``."""

    table: mx.array
    places: mx.array


class Palette:
    """Masks that the device holds; when there may be no room for a batch's it begins anew."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._held: list[bytes] = []
        self._table: mx.array | None = None

    def forget(self) -> None:
        """Give the memory back."""
        self._places, self._held, self._table = {}, [], None

    def find(self, masks: Masks) -> Chosen:
        """Where a batch's masks are; those that were not there are sent now."""
        rows, width = masks.words.shape
        # An error on the way makes the next one begin anew.
        table, self._table = self._table, None
        if table is None or table.shape[1] != width or len(self._held) + rows > table.shape[0]:
            self.forget()
            table = mx.zeros((max(MOST, 2 * rows), width), mx.uint32)
        before = len(self._held)
        places = [self._place(*each) for each in zip(masks.keys, masks.words, strict=True)]
        if new := self._held[before:]:
            sent = np.frombuffer(b"".join(new), dtype=np.uint32).reshape(-1, width)
            table[before : len(self._held)] = mx.array(sent)
        self._table = table
        return Chosen(table, mx.array(places, dtype=mx.int32))

    def _place(self, key: int, words: npt.NDArray[np.uint32]) -> int:
        mask = words.tobytes()
        place = self._places.get(key)
        # A key alone proves nothing.
        if place is None or self._held[place] != mask:
            place = self._places[key] = len(self._held)
            self._held.append(mask)
        return place


def restricted(logits: mx.array, masks: Masks, palette: Palette) -> mx.array:
    """Logits [B, V] as they are for tokens that are allowed, and -inf for all others."""
    if works(logits.dtype):
        return _restrict(logits, palette.find(masks))
    return _step_by_step(logits, mx.array(masks.words))


def best(logits: mx.array, chosen: Chosen | None) -> tuple[mx.array, mx.array]:
    """The likeliest allowed token of each row of ``logits`` [B, V], uint32 [B]; a GPU's own way.

    And int32 [B], the same, or -1 where the row's logits are not finite. Only where :func:`works`.
    """
    rows, size = logits.shape
    bound = chosen is not None
    if chosen is None:
        chosen = _all()
    tokens, reported = _kernel("troupe_best", ("tokens", "reported"), _BEST)(
        inputs=[logits, chosen.table, chosen.places, _sizes(size, chosen.table.shape[1])],
        template=[("T", logits.dtype), ("BOUND", bound)],
        grid=(rows * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(rows,), (rows,)],
        output_dtypes=[mx.uint32, mx.int32],
    )
    return tokens, reported


def _step_by_step(logits: mx.array, words: mx.array) -> mx.array:
    bits = mx.left_shift(mx.array(1, mx.uint32), mx.arange(WORD, dtype=mx.uint32))
    allowed = mx.bitwise_and(words[:, :, None], bits) != 0
    allowed = allowed.reshape(logits.shape[0], -1)[:, : logits.shape[-1]]
    return mx.where(allowed, logits, mx.array(-mx.inf, logits.dtype))


def _restrict(logits: mx.array, chosen: Chosen) -> mx.array:
    rows, size = logits.shape
    (made,) = _kernel("troupe_restrict", ("allowed",), _RESTRICT)(
        inputs=[logits, chosen.table, chosen.places, _sizes(size, chosen.table.shape[1])],
        template=[("T", logits.dtype)],
        grid=(-(-size // _THREADS) * _THREADS, rows, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[logits.shape],
        output_dtypes=[logits.dtype],
    )
    allowed: mx.array = made
    return allowed


_RESTRICT = """
    const int size = sizes[0], width = sizes[1];
    const size_t row = blockIdx.y;
    const int token = blockIdx.x * blockDim.x + threadIdx.x;
    if (token >= size) return;
    const unsigned int* word = table + size_t(places[row]) * width;
    const bool may = (word[token / 32] >> (token % 32)) & 1u;
    const size_t at = row * size + token;
    allowed[at] = may ? logits[at] : static_cast<T>(-__int_as_float(0x7f800000));
"""

_BEST = """
    const int size = sizes[0], width = sizes[1];
    const T* x = logits + size_t(blockIdx.x) * size;
    const unsigned int* word = BOUND ? table + size_t(places[blockIdx.x]) * width : table;
    const float infinity = __int_as_float(0x7f800000);
    float top = -infinity, most = -infinity;
    int at = size, broken = 0;
    for (int i = threadIdx.x; i < size; i += blockDim.x) {
        const float value = static_cast<float>(x[i]);
        broken |= value != value;
        top = fmaxf(top, value);
        const bool may = !BOUND || ((word[i / 32] >> (i % 32)) & 1u);
        if (may && value > most) {
            most = value;
            at = i;
        }
    }
    __shared__ float tops[32], mosts[32];
    __shared__ int ats[32], brokens[32];
    for (int round = 0; round < 2; ++round) {
        for (int n = 16; n > 0; n /= 2) {
            broken |= __shfl_xor_sync(0xffffffffu, broken, n);
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, n));
            const float other = __shfl_xor_sync(0xffffffffu, most, n);
            const int where = __shfl_xor_sync(0xffffffffu, at, n);
            // Of equals the lowest id is taken.
            if (other > most || (other == most && where < at)) {
                most = other;
                at = where;
            }
        }
        const int lane = threadIdx.x % 32;
        if (round == 0) {
            if (lane == 0) {
                const int warp = threadIdx.x / 32;
                tops[warp] = top;
                mosts[warp] = most;
                ats[warp] = at;
                brokens[warp] = broken;
            }
            __syncthreads();
            top = tops[lane];
            most = mosts[lane];
            at = ats[lane];
            broken = brokens[lane];
        }
    }
    if (threadIdx.x == 0) {
        // Where nothing can be told apart it is the first token, as for MLX's argmax.
        tokens[blockIdx.x] = at < size ? at : 0;
        reported[blockIdx.x] = broken || isinf(top) ? -1 : int(tokens[blockIdx.x]);
    }
"""


@cache
def _all() -> Chosen:
    """For rows that are free, which look at none."""
    return Chosen(mx.zeros((1, 1), mx.uint32), mx.zeros((1,), mx.int32))


@cache
def _sizes(size: int, width: int) -> mx.array:
    return mx.array([size, width], dtype=mx.int32)


@cache
def _kernel(name: str, outputs: tuple[str, ...], source: str) -> Callable[..., Any]:
    inputs = ["logits", "table", "places", "sizes"]
    return make_cuda_kernel(name, inputs, list(outputs), source)


@cache
def works(kind: mx.Dtype) -> bool:
    """Whether there is CUDA, compiles the kernels for logits of this type and they are right.

    Asked for free rows already, so that no row with a grammar has to wait for a compiler.
    """
    if not mx.cuda.is_available() or mx.default_device() != mx.gpu:
        return False
    try:
        return _agrees(kind)
    except Exception:
        return False


def _agrees(kind: mx.Dtype) -> bool:
    size = 3 * WORD + 5
    words = np.array([[ALL] * 4, [0, ALL - 5, 30, 1], [9, 0, 0, 0], [ALL] * 4], dtype=np.uint32)
    chosen = Palette().find(Masks(words, {}))
    logits = mx.random.normal((4, size), key=mx.random.key(3)).astype(kind)
    logits[2, 0] = logits[2, 3] = 1.5
    logits[3, 40] = mx.nan
    expected = _step_by_step(logits, mx.array(words))
    if not mx.array_equal(_restrict(logits, chosen), expected, equal_nan=True):
        return False
    tokens, reported = best(logits, chosen)
    free, _ = best(logits, None)
    wanted: Any = mx.argmax(expected[:3], axis=-1).tolist()
    return bool(
        reported.tolist() == [*wanted, -1]
        and tokens[:3].tolist() == wanted
        and mx.array_equal(free[:3], mx.argmax(logits[:3], axis=-1))
    )
