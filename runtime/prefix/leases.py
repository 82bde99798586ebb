"""Who may still read which state: leases of the prefix cache.

Part of ``index.py``'s core, on its task. Knows entries by identity, and nothing of their release.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import count

from .entries import Entry, LeaseId

# Shared by all cores of the process: the end of a lease that was sent to a core before it was
# restarted must not end somebody else's lease in the new one.
_ids = count(1)


class Leases:
    """Leases not yet ended; each entry counts its own in ``Entry.leases``."""

    def __init__(self) -> None:
        self._entries: dict[LeaseId, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def lend(self, entry: Entry) -> LeaseId:
        """One more lease on a state."""
        lease = LeaseId(next(_ids))
        self._entries[lease] = entry
        entry.leases += 1
        return lease

    def end(self, lease: LeaseId) -> Entry | None:
        """Take a lease back; whose it was, if that was the last one on it and it is known here."""
        entry = self._entries.pop(lease, None)
        if entry is None:
            return None
        entry.leases -= 1
        return None if entry.leases else entry

    def all(self) -> tuple[LeaseId, ...]:
        """Every lease."""
        return tuple(self._entries)

    def check_integrity(self, entries: Iterable[Entry]) -> None:
        """Raise AssertionError unless these entries, and no others, have what they count."""
        held = Counter(entry.snapshot for entry in self._entries.values())
        for entry in entries:
            assert entry.leases == held.pop(entry.snapshot, 0), "an entry miscounts its leases"
        assert not held, "a lease is on a state that is gone"
