"""Which file was written last of each row: what the row's next state continues.

Owned by a store and called on its worker threads. A row never changes the tokens that it has, so
its last file holds the first tokens of its next state to the byte; the same ids alone do not say
that, for another row may have computed them in another batch.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from ..plans import RowId
from ..prefix.entries import Origin
from .index import FileKey
from .slots import Slot

MOST = 1024
"""Rows that are remembered; of one that is not, bytes are compared."""


@dataclass(frozen=True, slots=True)
class LastFile:
    """A row's last file, by its key and the digest of its header; ``runs`` as of its state."""

    key: FileKey
    digest: str
    runs: bool

    def ends(self, chain: Sequence[Slot]) -> bool:
        """Whether this very file is the last of a chain."""
        return bool(chain) and chain[-1].digest == self.digest


class RowFiles:
    """The last files of the rows that were written last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: OrderedDict[RowId, LastFile] = OrderedDict()

    def last(self, origin: Origin | None) -> LastFile | None:
        """The last file of a state's row."""
        with self._lock:
            return None if origin is None else self._last.get(origin.row)

    def forget(self, origin: Origin | None) -> None:
        """A row's last file is not to be continued."""
        with self._lock:
            if origin is not None:
                self._last.pop(origin.row, None)

    def note(self, origin: Origin | None, key: FileKey, digest: str) -> None:
        """A state was written."""
        if origin is None:
            return
        with self._lock:
            self._last[origin.row] = LastFile(key, digest, origin.runs)
            self._last.move_to_end(origin.row)
            while len(self._last) > MOST:
                self._last.popitem(last=False)
