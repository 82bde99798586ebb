"""From a forward pass's logits to tokens under way, for free rows and for rows with a grammar.

Owns what was built and is not started yet. Runs on the device thread and waits for nothing but
masks. A batch of free rows is drawn with its launch, unless the draw itself would wait for the
logits. In a batch with a grammar the draw waits for the push: by then the tokens of the step before
are known, and the masks are made while the forward pass runs. On a GPU, where a launch takes the
host as long as the step itself, the tokens are awaited and followed by the rows' matchers on the
thread of the masks, beside the next launch: it touches no array but the report of what was drawn,
which is begun by then and nobody else's. Knows no plans, no steps and no caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import mlx.core as mx

from ..plans import Sampled
from ..text.matching import MatchFailed
from .lazy import ids_of, start
from .logprobs import Scores
from .masks import MaskMaker, Masks, Ticket
from .rows import Row
from .sampling import Sampler

NOT_FINITE = "the model produced non-finite logits"
NO_MATCH = "the answer's grammar could not be followed"


class Fault(NamedTuple):
    """Why a row must fail; ``param`` names the field of its request that is to blame, if one is."""

    row: Row
    reason: str
    param: str | None = None


@dataclass(slots=True)
class Drawn:
    """Tokens under way: ``reported`` int32 [B] holds one for each of ``rows``, -1 = not finite.

    None until the push where the draw waits for it. ``scores`` are there when a row asked for any,
    ``followed`` where somebody else waits for the tokens.
    """

    rows: tuple[Row, ...]
    reported: mx.array | None = None
    scores: Scores | None = None
    followed: Future[list[_Followed]] | None = None


@dataclass(frozen=True, slots=True)
class _Followed:
    """What a row drew, whether its grammar ends there, and why the row must fail, if it must."""

    token: int
    ends: bool = False
    fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class _Undrawn:
    drawn: Drawn
    logits: mx.array
    inputs: mx.array
    positions: tuple[int, ...]
    state: list[mx.array]


class Drawing:
    """Draws the tokens of one forward's rows."""

    def __init__(self, sampler: Sampler, masks: MaskMaker) -> None:
        self._sampler = sampler
        self._masks = masks
        self._launches = mx.default_device() == mx.gpu
        self._undrawn: list[_Undrawn] = []
        self._unstarted: list[mx.array] = []

    def rest(self) -> None:
        """No rows are left: keep nothing of the last ones."""
        self._sampler.rest()

    def draw(
        self, rows: Sequence[Row], inputs: mx.array, logits: mx.array, state: list[mx.array]
    ) -> tuple[Drawn, list[Fault]]:
        """One token a row, from ``logits`` [B, V] that the tokens ``inputs`` [B] made.

        ``state`` is what the forward pass leaves behind, computed along with the tokens. The faults
        of a draw that waits come from :meth:`push`.
        """
        positions = tuple(row.processed for row in rows)
        bound = any(row.matcher is not None for row in rows)
        undrawn = _Undrawn(Drawn(tuple(rows)), logits, inputs, positions, state)
        if bound or self._sampler.reads([row.sampler for row in rows]):
            self._undrawn.append(undrawn)
            if self._launches:
                self._ask_for_masks(rows)
                start([logits, *state])
            return undrawn.drawn, []
        faults = self._sample(undrawn)
        if self._launches:
            self._start()
        return undrawn.drawn, faults

    def push(self) -> list[Fault]:
        """Build the draws that waited for it, and start all that were built."""
        undrawn, self._undrawn = self._undrawn, []
        for waiting in undrawn:
            self._ask_for_masks(waiting.drawn.rows)
        if undrawn and not self._launches:
            # Computes the forward pass here and now, beside the masks.
            start([array for u in undrawn for array in (u.logits, *u.state)])
        faults: list[Fault] = []
        for waiting in undrawn:
            faults += self._sample(waiting, self._take_masks(waiting.drawn.rows))
        self._start()
        if self._launches:
            for waiting in undrawn:
                self._look_ahead(waiting.drawn)
        return faults

    def _look_ahead(self, drawn: Drawn) -> None:
        """Have the tokens followed, and begin the masks of the next ones, beside what comes."""
        if any(row.matcher is not None for row in drawn.rows):
            drawn.followed = self._masks.follow(partial(_follow, drawn))
            self._ask_for_masks(drawn.rows)

    def _ask_for_masks(self, rows: Sequence[Row]) -> None:
        """For rows that have asked already those are under way."""
        asking = [r for r in rows if not (r.failed or r.matcher is None or r.mask is not None)]
        if asking:
            made = self._masks.begin(lambda: [row.matcher for row in asking])
            for place, row in enumerate(asking):
                row.mask = Ticket(made, place)

    def _take_masks(self, rows: Sequence[Row]) -> Masks | None:
        tickets = [row.mask for row in rows]
        for row in rows:
            row.mask = None
        return self._masks.gather(tickets) if any(tickets) else None

    def _start(self) -> None:
        unstarted, self._unstarted = self._unstarted, []
        if unstarted:
            start(unstarted)

    def _sample(self, undrawn: _Undrawn, masks: Masks | None = None) -> list[Fault]:
        rows = undrawn.drawn.rows
        draws = self._sampler.draw(
            undrawn.logits, [r.sampler for r in rows], undrawn.positions, undrawn.inputs, masks
        )
        self._unstarted += [draws.tokens, draws.reported, *undrawn.state]
        if (scores := draws.scores) is not None:
            self._unstarted += scores.arrays
            undrawn.drawn.scores = scores
        for place, row in enumerate(rows):
            row.pending = (draws.tokens, place)
        undrawn.drawn.reported = draws.reported
        faults = [Fault(rows[place], reason) for place, reason in draws.faults.items()]
        if masks is not None:
            faults += [_no_match(rows[place], error) for place, error in masks.faults.items()]
        return [fault for fault in faults if not fault.row.failed]


def read(drawn: Drawn) -> tuple[list[Sampled], list[Fault]]:
    """Wait for tokens; what the rows sampled, each followed by its matcher, and who failed."""
    followed = _follow(drawn) if drawn.followed is None else drawn.followed.result()
    figures = {} if drawn.scores is None else drawn.scores.read()
    sampled: list[Sampled] = []
    faults: list[Fault] = []
    for place, (row, what) in enumerate(zip(drawn.rows, followed, strict=True)):
        if row.failed:
            continue
        if what.fault is not None:
            faults.append(what.fault)
        else:
            sampled.append(Sampled(row.id, what.token, what.ends, figures.get(place)))
    return sampled, faults


def _follow(drawn: Drawn) -> list[_Followed]:
    assert drawn.reported is not None
    tokens = ids_of(drawn.reported)
    return [_take(row, token) for row, token in zip(drawn.rows, tokens, strict=True)]


def _take(row: Row, token: int) -> _Followed:
    if row.failed:
        return _Followed(token)
    if token < 0:
        return _Followed(token, fault=Fault(row, NOT_FINITE))
    try:
        return _Followed(token, row.follow(token))
    except Exception as error:
        return _Followed(token, fault=_no_match(row, error))


def _no_match(row: Row, error: Exception) -> Fault:
    param = error.param if isinstance(error, MatchFailed) else None
    return Fault(row, f"{NO_MATCH}: {error}", param)
