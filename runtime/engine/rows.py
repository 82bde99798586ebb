"""One row on the device: its prompt, its state while it is alone, and its next input token.

A :class:`Row` is owned by the executor and lives on the device thread. Its counts are host
integers that run ahead of the device: they say what has been *launched*. While the row stands in
the batch its state is there and ``caches`` is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..plans import RowId
from ..text.matching import TokenMatcher
from .adapters import Chain
from .backsteps import hold, step_back
from .masks import Ticket
from .row_sampler import RowSampler
from .snapshots import CannotCut, cut


@dataclass(slots=True, eq=False)
class Row:
    """A row between its start and its end.

    Attributes:
        ids: the whole prompt.
        caches: mlx-lm's own caches, or None while the row stands in the batch.
        processed: tokens in the state, including what is under way.
        adapters: what it adds to the model's layers, in order; none once the row is dropped.
        pending: array and place of the token drawn last, None before the first draw.
        matcher: says what may be drawn; None for free text and once the text is complete.
        mask: what the matcher allows next, if that was asked for already.
        failed: the row was evicted; whatever is still under way for it is ignored.
    """

    id: RowId
    ids: tuple[int, ...]
    sampler: RowSampler
    caches: list[Any] | None
    processed: int = 0
    pending: tuple[mx.array, int] | None = None
    matcher: TokenMatcher | None = None
    mask: Ticket | None = None
    adapters: Chain = ()
    failed: bool = False
    _before: list[Any] | None = field(default=None, repr=False)

    @property
    def revisions(self) -> tuple[str, ...]:
        """Of its adapters, in order."""
        return tuple(adapter.info.revision for adapter in self.adapters)

    @property
    def unprefilled(self) -> int:
        """Prompt tokens still to be prefilled; the last one is the input of the first decode."""
        return max(0, len(self.ids) - 1 - self.processed)

    def next_prompt_tokens(self, count: int) -> tuple[int, ...]:
        """The next ``count`` prompt tokens. Raises ValueError beyond the last but one."""
        if not 0 < count <= self.unprefilled:
            raise ValueError(f"{count} prompt tokens asked for, {self.unprefilled} are left")
        return self.ids[self.processed : self.processed + count]

    def advance(self, count: int) -> None:
        """``count`` more tokens are in the state."""
        self.processed += count

    def follow(self, token: int) -> bool:
        """A token was drawn; True if the row's grammar says that nothing may come after it.

        Raises MatchFailed.
        """
        if self.matcher is None or not self.matcher.take(token):
            return False
        self.matcher = None
        return True

    def remember(self) -> None:
        """Before a decode of a lone row: hold on to what it is going to replace."""
        self._before = None
        with suppress(CannotCut):
            self._before = hold(self.caches or [])

    def forget_before(self) -> None:
        """After a prefill or a move the state before is not that of one token earlier."""
        self._before = None

    def state(self, length: int) -> list[Any]:
        """The first ``length`` tokens of a lone row's state, sharing its arrays.

        Raises CannotCut.
        """
        if self.caches is None:
            raise CannotCut("the row stands in the batch")
        if length == self.processed - 1 and self._before is not None:
            return step_back(self.caches, self._before, length)
        return cut(self.caches, self.processed, length)


def next_inputs(rows: Sequence[Row]) -> mx.array:
    """uint32 [B]: the tokens that the rows' next forward takes, drawn ones still on the device."""
    first = rows[0].pending
    if first is not None and first[0].size == len(rows):
        drawn = first[0]
        if all(
            r.pending is not None and r.pending[0] is drawn and r.pending[1] == place
            for place, r in enumerate(rows)
        ):
            return drawn
    return _gather(rows)


def _gather(rows: Sequence[Row]) -> mx.array:
    prompts: list[int] = []
    starts: dict[int, int] = {}
    parts: list[mx.array] = []
    size = 0
    for row in rows:
        if row.pending is None:
            prompts.append(row.ids[-1])
        elif id(row.pending[0]) not in starts:
            starts[id(row.pending[0])] = size
            parts.append(row.pending[0])
            size += row.pending[0].size
    if prompts:
        parts.append(mx.array(prompts, dtype=mx.uint32))
    picks: list[int] = []
    fresh = size
    for row in rows:
        if row.pending is None:
            picks.append(fresh)
            fresh += 1
        else:
            picks.append(starts[id(row.pending[0])] + row.pending[1])
    joined = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    return joined if picks == list(range(joined.size)) else joined[mx.array(picks)]
