"""Which states are not in the folder because its cap has no room for them.

Without this, whoever asks for a state to be safe would have it written over and over, each time in
the place of another one that is then asked for in turn. Owned by the shelf, under its lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Literal, TypeAlias

from .index import FileKey

Crowded: TypeAlias = Literal["made_way", "too_large"]
"""It was written and had to go for others, or it would not fit if it were alone."""

MOST = 4096
"""States that are remembered; of more, those that were noted first are forgotten."""


class CrowdedOut:
    """States that were crowded out of one folder, until they are written again."""

    def __init__(self) -> None:
        self._why: OrderedDict[FileKey, Crowded] = OrderedDict()

    def __len__(self) -> int:
        return len(self._why)

    def note(self, keys: Iterable[FileKey], why: Crowded) -> None:
        """There is no room for these."""
        for key in keys:
            self._why[key] = why
            self._why.move_to_end(key)
        while len(self._why) > MOST:
            self._why.popitem(last=False)

    def returned(self, key: FileKey) -> None:
        """It was written."""
        self._why.pop(key, None)

    def forget(self) -> None:
        """There may be room again."""
        self._why.clear()

    def why(self, key: FileKey) -> Crowded | None:
        """Why a state is not here; None: not for want of room, as far as is remembered."""
        return self._why.get(key)
