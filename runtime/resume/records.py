"""What interrupted answers had come to, in memory, the least recently used first to go.

One owner, one task (``actors/system.py``'s loop). Knows token ids and figures, no text, no states.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from ..plans import TokenLogprobs

TOKEN_BYTES = 40
"""What an id costs in memory, roughly."""
FIGURE_BYTES = 120


@dataclass(frozen=True, slots=True)
class Record:
    """The tokens that a request had been given when it was interrupted.

    Attributes:
        identity: of the request.
        seed: that it was sampled with.
        ids: generated so far, in order.
        figures: empty, or the log-probabilities of each.
    """

    identity: str
    seed: int
    ids: tuple[int, ...]
    figures: tuple[TokenLogprobs, ...] = ()

    @property
    def nbytes(self) -> int:
        """What it costs in memory, roughly."""
        told = sum(FIGURE_BYTES * (1 + len(figure.top)) for figure in self.figures)
        return TOKEN_BYTES * len(self.ids) + told


class Records:
    """Records by identity, under a budget of bytes."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget = budget_bytes
        self._bytes = 0
        self._kept: OrderedDict[str, Record] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def identities(self) -> AbstractSet[str]:
        """Of all records, as they are."""
        return self._kept.keys()

    @property
    def nbytes(self) -> int:
        """Of all records."""
        return self._bytes

    def keep(self, record: Record) -> bool:
        """Remember how far an answer came; False if as much of it is known already."""
        held = self._kept.get(record.identity)
        if not record.ids or (held is not None and len(held.ids) >= len(record.ids)):
            return False
        self.remove(record.identity)
        self._kept[record.identity] = record
        self._bytes += record.nbytes
        while self._bytes > self._budget:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= dropped.nbytes
        return True

    def find(self, identity: str) -> Record | None:
        """How far an answer came."""
        record = self._kept.get(identity)
        if record is not None:
            self._kept.move_to_end(identity)
        return record

    def remove(self, identity: str) -> None:
        """The answer was given to its end."""
        record = self._kept.pop(identity, None)
        if record is not None:
            self._bytes -= record.nbytes
