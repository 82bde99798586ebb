"""How many bytes may be written to the disk in an hour, whatever they are.

Owned by the ``Spill`` actor's desk, on trio's thread; never waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

HOUR = 3600.0


class WriteBudget:
    """At most so many bytes in any hour; None = as many as come."""

    def __init__(self, bytes_per_hour: int | None) -> None:
        if bytes_per_hour is not None and bytes_per_hour < 0:
            raise ValueError(f"a budget of {bytes_per_hour} bytes is less than nothing")
        self.bytes_per_hour = bytes_per_hour
        self._written: deque[tuple[float, int]] = deque()
        self._spent = 0
        self._remembers = False

    def remember(self, written: Iterable[tuple[float, int]], now: float) -> None:
        """What was written before the process began, as seconds ago and bytes; once and for all."""
        if not self._remembers:
            self._remembers = True
            for ago, nbytes in sorted(written, reverse=True):
                self.charge(nbytes, now - ago)

    def spent(self, now: float) -> int:
        """Bytes written within the hour before ``now`` (seconds of any clock that only rises)."""
        while self._written and self._written[0][0] <= now - HOUR:
            self._spent -= self._written.popleft()[1]
        return self._spent

    def allows(self, nbytes: int, now: float) -> bool:
        """Whether as many more bytes may be written now."""
        limit = self.bytes_per_hour
        return limit is None or self.spent(now) + nbytes <= limit

    def is_scarce(self, now: float) -> bool:
        """Whether more than half of it is spent."""
        return self.bytes_per_hour is not None and 2 * self.spent(now) > self.bytes_per_hour

    def charge(self, nbytes: int, now: float) -> None:
        """So many bytes were written."""
        if self.bytes_per_hour is not None:
            self._written.append((now, nbytes))
            self._spent += nbytes
