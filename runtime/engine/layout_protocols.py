"""What a batch asks of a layer's buffers, whatever is in them.

A batch owns one :class:`BatchLayout` for each layer. Protocols and a message; no state. On the
device thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from ..plans import RowId
from .codecs import Image, Stored
from .groups import GroupKey, Place, Relayout
from .steps import Step


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes on their way to slots ``[slot, slot + count)``."""

    slot: int
    stored: Stored
    detached: bool


class BatchLayout(Protocol):
    """One layer's share of a batch."""

    @property
    def arrays(self) -> list[mx.array]:
        """Every buffer that lives."""
        ...

    @property
    def most_columns(self) -> int | None:
        """Columns that a step may have at most; None = any number."""
        ...

    def take(self, cache: Any) -> tuple[Image | None, int]:
        """A lone row's state, and the oldest position that it holds. Raises TypeError."""
        ...

    def give(self, image: Image | None, length: int, oldest: int, held: int) -> Any:
        """A single-row cache with the first ``length`` of ``held`` tokens. Raises CannotTrim."""
        ...

    def oldest_held(self, written: int, oldest: int) -> int:
        """The oldest position still held once ``written`` tokens went in."""
        ...

    def image(self, place: Place) -> Image | None:
        """A view of a slot, the whole of it; None if nothing was ever written."""
        ...

    def fitted(self, image: Image, length: int, capacity: int) -> Image:
        """The part of another batch's image that a slot of this capacity takes."""
        ...

    def gather(
        self, relayout: Relayout, joining: Mapping[RowId, Image | None]
    ) -> dict[GroupKey, list[Piece]]:
        """What the changes move, by group, read before any of them."""
        ...

    def apply(self, relayout: Relayout, moved: Mapping[GroupKey, list[Piece]]) -> None:
        """Carry the changes out."""
        ...

    def cache(self, step: Step) -> Any:
        """What stands for a cache in one forward pass of all rows."""
        ...

    def commit(self, counts: Sequence[int]) -> None:
        """The step's rows keep that many of its columns; before lengths grow by them."""
        ...


class Attending(Protocol):
    """A layer that takes a step's keys and values and attends to all that it has."""

    def write(self, step: Step, keys: mx.array, values: mx.array) -> None:
        """Put a step's new tokens ([B, heads, columns, width]) behind each row's last."""
        ...

    def attend(
        self,
        step: Step,
        queries: mx.array,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
        softcap: float | None = None,
    ) -> mx.array:
        """Attention of all rows; shapes as in ``attention.AttentionView``."""
        ...
