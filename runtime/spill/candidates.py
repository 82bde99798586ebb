"""A kept state that the disk may be given: what it is the state of, and which others it covers.

Plain values, made by the prefix cache and sent to the ``Spill`` actor. They name a state by its
snapshot and know nothing of its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..plans import RowId, SnapshotId
from ..prefix.entries import Kind, Origin


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kept state of exactly ``ids`` that is not on the disk.

    ``nbytes`` is what it costs on the device; ``cuttable``: it serves all that its prefixes serve.
    ``origin``: the row that it was kept of, where that is known; ``session``: the chat.
    """

    snapshot: SnapshotId
    namespace: str
    ids: tuple[int, ...]
    nbytes: int
    kind: Kind
    cuttable: bool
    origin: Origin | None = None
    session: str | None = None

    @property
    def row(self) -> RowId | None:
        """The row that it is of."""
        return None if self.origin is None else self.origin.row

    @property
    def is_urgent(self) -> bool:
        """Whether its row goes on, so that what is made before it is safe is made once more."""
        return self.origin is not None and self.origin.runs

    def replaces(self, other: Candidate) -> bool:
        """Whether the other need not be written before this one."""
        later = self.row == other.row and len(self.ids) >= len(other.ids)
        heard = self.origin is not None and not self.origin.unheard
        return (other.is_urgent and later and heard) or self.covers(other)

    def covers(self, other: Candidate) -> bool:
        """Whether with this one on the disk the other would serve nobody."""
        length = len(other.ids)
        return (
            self.cuttable
            and self.namespace == other.namespace
            and len(self.ids) >= length
            and self.ids[:length] == other.ids
        )
