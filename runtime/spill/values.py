"""What the store answers: a state that was read back, and its figures.

Frozen values, safe to send to any thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..prefix.entries import Kind
from .state import HostState


@dataclass(frozen=True, slots=True)
class Restored:
    """A state that was read back, of exactly ``ids``; ``read_bytes`` came from the disk.

    ``session``: the chat that it belongs to, unless that was closed.
    """

    state: HostState
    ids: tuple[int, ...]
    kind: Kind
    cuttable: bool
    read_bytes: int
    session: str | None = None


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Live figures, and counters since the store was made.

    Attributes:
        entries: states that a lookup can find; dead_files: files of ours that serve nobody.
        bytes: of all files; max_bytes: what they are held under, None = no cap.
        longest_tokens: the longest state that would survive the process.
        hits, misses: lookups.
        saves: states written; bytes_written: bytes handed to the system, for nothing too.
        loads: states read; bytes_read: of them.
        evictions: files given up for room; drops: entries given up on request.
        leftovers: temporary files removed; quarantined: damaged files set aside; orphans: deltas
            removed because what they continue is gone.
        unheard: faults that no call ended with: met with in passing, or made good.
        faults: (code, how often) of all that went wrong, loads of missing entries included.
    """

    entries: int
    dead_files: int
    bytes: int
    max_bytes: int | None
    longest_tokens: int
    hits: int
    misses: int
    saves: int
    bytes_written: int
    loads: int
    bytes_read: int
    evictions: int
    drops: int
    leftovers: int
    quarantined: int
    orphans: int
    unheard: int
    faults: tuple[tuple[str, int], ...]
