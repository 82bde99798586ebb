"""What is wrong with the disk: counted every time, told once.

Kept by the ``Spill`` actor, on trio's thread.
"""

from __future__ import annotations

import logging
from collections import Counter

from mlx_troupe.runtime.spill.faults import SpillFault

log = logging.getLogger(__name__)


class Complaints:
    """One line for each kind of trouble, and again only after something was written."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts
        self._told: set[str] = set()

    def fault(self, fault: SpillFault, what: str = "") -> None:
        """The disk failed; ``what`` goes before its own words."""
        self._counts["faults"] += 1
        self.warn(type(fault).__name__, f"{what}{fault}")

    def warn(self, kind: str, words: str) -> None:
        """Something else went wrong."""
        if kind not in self._told:
            self._told.add(kind)
            log.warning("SSD cache: %s", words)

    def forget(self) -> None:
        """All is well again."""
        self._told.clear()
