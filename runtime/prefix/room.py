"""How much of the memory tier stays free of entries, and how much must leave under pressure.

Pure arithmetic for the ``KVCache`` actor, which owns the one :class:`Headroom`.

All states that are kept share one limit, and the device keeps none beyond it. Entries of the index
are most of them. The others: states that entries gave way to and whose bytes are still being
written, those on their way back from the disk, and, for the moment between two messages, those
just made while those that make room for them are not released yet. For this moment a headroom is
left. It grows when a state was not kept for want of room, and shrinks slowly with those that were.
"""

from __future__ import annotations

from ..device import DeviceStats
from ..model_info import ModelInfo

LEAST_SHARE = 32
MOST_SHARE = 2
"""The headroom is at least one part in so many of the limit, and at most one in so many."""
FADE = 1024
"""A state that was kept takes one part in so many of it away."""
PRESSED = 0.85
"""Of the device's memory, what may be in use before kept states are given up for it; half of what
the weights leave may be in any case."""


class Headroom:
    """Bytes that are left free for states about to be made."""

    def __init__(self, limit: int) -> None:
        self._least = limit // LEAST_SHARE
        self._most = limit // MOST_SHARE
        self.bytes = self._least

    def missed(self, nbytes: int) -> None:
        """A state of so many bytes was not kept: there was no room."""
        self.bytes = min(self._most, self.bytes + nbytes)

    def kept(self) -> None:
        """A state was kept."""
        self.bytes = max(self._least, self.bytes - self.bytes // FADE)


def excess(device: DeviceStats, kept_bytes: int, model: ModelInfo) -> int:
    """Bytes of kept states that must go to bring a device out of pressure; 0 = none.

    ``kept_bytes`` is what the cache still holds on to; beyond that states are being released and
    ``device`` does not know it yet.
    """
    memory = model.memory_bytes
    if not memory:
        return 0
    most = max(int(PRESSED * memory), (memory + model.weights_bytes) // 2)
    leaving = max(0, device.snapshot_bytes - kept_bytes)
    return max(0, device.active_bytes - leaving - most)
