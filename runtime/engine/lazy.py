"""Starting lazy arrays and waiting for them without holding on to their buffers.

Pure functions, on the device thread.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

_async_eval: Any = mx.async_eval


def start(*arrays: mx.array | list[mx.array]) -> None:
    """Begin computing ``arrays``; returns at once."""
    _async_eval(*arrays)


def copied(array: mx.array) -> mx.array:
    """A copy [B, H, T, D] with memory of its own, lazy.

    MLX's ``contiguous`` shares memory where it can, which here may change under it.
    """
    if array.shape[2] == 1:
        return mx.contiguous(mx.concatenate([array, array], axis=2)[:, :, :1])
    return mx.concatenate([array[:, :, :1], array[:, :, 1:]], axis=2)


def fence(array: mx.array) -> mx.array:
    """A started scalar that is ready when ``array`` is.

    Waiting on the array itself would keep a second reference to a buffer that the next step
    writes into, and so make MLX copy it.
    """
    scalar = array[(slice(0, 1),) * array.ndim].astype(mx.float32) + 0
    start(scalar)
    return scalar


def ids_of(array: mx.array) -> list[int]:
    """Read back a vector of ids; waits for it."""
    ids: Any = array.tolist()
    return list(ids)
