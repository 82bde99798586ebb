"""MLX's process-wide memory limits, and giving unused memory back to the system.

Owns the limits between :meth:`MemoryLimits.set` and :meth:`MemoryLimits.restore`; they are the
process's, so there is one owner: the device. Runs on the device thread.
"""

from __future__ import annotations

import gc
import os

import mlx.core as mx

from ..heap import trim_heaps

_CACHE_SHARE = 20
_CUDA_CACHE_SHARE = 8
_LEAST_CACHE, _MOST_CACHE = 256 << 20, 2 << 30

_NODES_PER_GRAPH = "50"
"""Of MLX's CUDA graphs. On an H200 the first launch waits too long for a hundred, MLX's own choice:
decode steps of 16 rows took 4.5 ms instead of 5.6 on average, and far more evenly."""


class MemoryLimits:
    """Bounds MLX's cache of free buffers, and on Metal wires memory as mlx-lm does."""

    def __init__(self) -> None:
        self._cache: int | None = None
        self._memory: int | None = None
        self._wired: int | None = None

    def set(self, budget_bytes: int | None = None) -> None:
        """Set the limits once: a twentieth of the memory, within 256 MiB and 2 GiB, is cached.

        With memory of its own (CUDA) an eighth: at its limit the cache costs a call of the driver
        for each of a step's arrays, which is more than the step itself.

        ``budget_bytes`` is what the operator lets MLX take of it; beyond that an allocation first
        gives back what is cached and waits for what is running.
        """
        if self._cache is not None:
            return
        info = mx.device_info()
        size = int(info.get("memory_size", info.get("total_memory", 0)))
        least = _LEAST_CACHE
        if budget_bytes is not None:
            self._memory = mx.set_memory_limit(budget_bytes)
            size, least = budget_bytes, min(least, budget_bytes // _CACHE_SHARE)
        share = min(_MOST_CACHE, max(least, size // _CACHE_SHARE))
        if mx.cuda.is_available():
            share = max(share, size // _CUDA_CACHE_SHARE)
            # MLX reads it once, when a GPU first computes.
            os.environ.setdefault("MLX_MAX_OPS_PER_BUFFER", _NODES_PER_GRAPH)
        self._cache = mx.set_cache_limit(share)
        if mx.metal.is_available():
            wired = int(info["max_recommended_working_set_size"])
            self._wired = mx.set_wired_limit(min(wired, budget_bytes or wired))

    def restore(self) -> None:
        """Put back what was there before."""
        if self._cache is not None:
            mx.set_cache_limit(self._cache)
        if self._memory is not None:
            mx.set_memory_limit(self._memory)
        if self._wired is not None:
            mx.set_wired_limit(self._wired)
        self._cache = self._memory = self._wired = None


def device_memory() -> int:
    """Bytes of memory that the default device has for everything."""
    info = mx.device_info()
    if mx.default_device() == mx.gpu:
        return int(info.get("max_recommended_working_set_size", info.get("memory_size", 0)))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def give_back() -> None:
    """Free what MLX and malloc keep for later: on Linux CPU arrays come from glibc's heap."""
    # Requests that were cut leave cycles of frames behind, which nothing else would free for long.
    gc.collect()
    mx.clear_cache()
    trim_heaps()
