"""The ledger of memory in ``/stats.prompt_cache``: who holds the device's bytes.

A pure function over what the device and the prefix index say of themselves.
"""

from __future__ import annotations

from mlx_troupe.runtime.device import DeviceStats
from mlx_troupe.runtime.model_info import ModelInfo
from mlx_troupe.runtime.prefix.entries import PrefixStats


def ledger(device: DeviceStats, cache: PrefixStats, model: ModelInfo | None) -> dict[str, int]:
    """Bytes by owner.

    ``indexed`` and ``lent_only`` (replaced or dropped while a request still reads it) are the
    index's own count, ``states`` the device's: the difference is on its way between them, or is
    kept until it is written to the disk. ``most_states`` is the most that ever was, and never more
    than the budget. ``rows`` is what running rows own, a state too that they took over from the
    cache. ``unaccounted`` is what the device holds beyond weights, rows and states;
    ``free_buffers`` goes back to the system at rest.
    """
    weights = model.weights_bytes if model else 0
    known = weights + device.kv_bytes + device.snapshot_bytes
    return {
        "indexed_bytes": cache.bytes - cache.detached_bytes,
        "lent_only_bytes": cache.detached_bytes,
        "states": device.snapshots,
        "states_bytes": device.snapshot_bytes,
        "most_states_bytes": device.most_snapshot_bytes,
        "rows_bytes": device.kv_bytes,
        "weights_bytes": weights,
        "active_bytes": device.active_bytes,
        "unaccounted_bytes": max(0, device.active_bytes - known),
        "free_buffers_bytes": device.cache_bytes,
    }
