"""Which blocks of a pool the rows of a batch hold: a table on the host, shared by its layers.

Block 0 is nobody's and stays zero: it stands where a row has no block of its own. Runs on the
device thread; knows slots and lengths, not arrays of a model.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from .groups import Place, Relayout, Segment
from .seats import Seats
from .steps import Step


class Chain:
    """A row's blocks, in the order of its tokens."""

    def __init__(self) -> None:
        self.blocks: list[int] = []


@dataclass(frozen=True, slots=True)
class Resize:
    """What becomes of a pool before a step.

    ``kept`` are the blocks that live on, in their new order, None where all stay in place; then it
    has ``size`` blocks, new ones zero; then ``wiped`` ones are zeroed.
    """

    size: int
    kept: tuple[int, ...] | None = None
    wiped: tuple[int, ...] = ()


class Pages:
    """Block tables of one batch; ``block`` is how many tokens a block holds.

    All layers call :meth:`move` and :meth:`settle` with the same objects: the first call counts.
    """

    def __init__(self, block: int) -> None:
        self.block = block
        self.size = 1
        self._seats: Seats[Chain] = Seats()
        self._clean: set[int] = set()
        self._relayout: Relayout | None = None
        self._step: Step | None = None
        self._resize = Resize(1)
        self._chains: list[Chain] = []
        self._where = mx.zeros((0,))
        self._tables: dict[int, mx.array] = {}

    def __bool__(self) -> bool:
        return bool(self._seats)

    def chain(self, place: Place) -> Chain:
        """The blocks of a slot's row. Raises KeyError or IndexError where there is none."""
        chain = self._seats.at(place)
        if chain is None:
            raise KeyError(place)
        return chain

    def move(self, relayout: Relayout) -> None:
        """Rows moved, joined (without blocks yet) or left; no bytes move for it."""
        if relayout is self._relayout:
            return
        self._relayout = relayout
        joined = {
            Place(change.group, copy.slot): Chain()
            for change in relayout.changes
            for copy in change.copies
            if copy.source is None
        }
        self._seats.move(relayout, joined)
        if not self._seats:
            self.size, self._chains = 1, []
            self._clean.clear()

    def settle(self, step: Step) -> Resize:
        """Blocks for all that the step writes; what every layer's pool must do for it first."""
        if step is not self._step:
            self._step = step
            chains = [c for c in self._seats.in_order(step.segments) if c is not None]
            self._seats.put(step.segments, chains)
            lengths = [n for segment in step.segments for n in segment.lengths]
            self._resize = self._provide(chains, [n + step.columns for n in lengths])
            self._where = mx.array(self._positions(chains, lengths, step.columns))
            self._chains = chains
            self._tables = {}
        return self._resize

    @property
    def where(self) -> mx.array:
        """int32 [B · columns]: where in the pool the settled step's tokens go, row by row."""
        return self._where

    def table(self, segment: Segment, used: int) -> mx.array:
        """int32 [n, blocks]: those of a group's rows that hold their first ``used`` tokens."""
        if segment.start not in self._tables:
            chains = self._chains[segment.start : segment.stop]
            table = np.zeros((len(chains), -(-used // self.block)), np.int32)
            for row, chain in zip(table, chains, strict=True):
                held = chain.blocks[: len(row)]
                row[: len(held)] = held
            self._tables[segment.start] = mx.array(table)
        return self._tables[segment.start]

    def check_integrity(self) -> None:
        """Raise AssertionError with the broken rule in words. For tests."""
        held = [block for chain in self._chains for block in chain.blocks]
        assert len(held) == len(set(held)), "two rows share a block"
        assert all(0 < block < self.size for block in held), "a row has a block that is no one's"
        assert not self._clean.intersection(held), "a block in use counts as clean"

    def _provide(self, chains: list[Chain], tokens: list[int]) -> Resize:
        wanted = [-(-count // self.block) for count in tokens]
        missing = sum(
            max(0, n - len(chain.blocks)) for n, chain in zip(wanted, chains, strict=True)
        )
        held = [block for chain in chains for block in chain.blocks]
        if not missing and chains == self._chains:
            return Resize(self.size)
        needed = 1 + len(held) + missing
        kept: tuple[int, ...] | None = None
        if needed * 2 < self.size:
            kept, self.size = (0, *held), needed
            numbers = iter(range(1, needed))
            for chain in chains:
                chain.blocks = [next(numbers) for _ in chain.blocks]
            self._clean = set(range(1 + len(held), needed))
        elif needed > self.size:
            grown = max(needed, self.size * 5 // 4)
            self._clean.update(range(self.size, grown))
            self.size = grown
        given = self._give(chains, wanted)
        wiped = tuple(block for block in given if block not in self._clean)
        self._clean.difference_update(given)
        return Resize(self.size, kept, wiped)

    def _give(self, chains: list[Chain], wanted: list[int]) -> list[int]:
        held = {block for chain in chains for block in chain.blocks}
        free = iter([block for block in range(1, self.size) if block not in held])
        given: list[int] = []
        for chain, count in zip(chains, wanted, strict=True):
            while len(chain.blocks) < count:
                chain.blocks.append(next(free))
                given.append(chain.blocks[-1])
        return given

    def _positions(
        self, chains: list[Chain], lengths: list[int], columns: int
    ) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        places = [
            chain.blocks[at // self.block] * self.block + at % self.block
            for chain, length in zip(chains, lengths, strict=True)
            for at in range(length, length + columns)
        ]
        return np.array(places, np.int32)
