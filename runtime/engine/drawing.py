"""From a forward pass's logits to tokens under way, for free rows and for rows with a grammar.

Owns what was built and is not started yet. Runs on the device thread and waits for nothing but
masks. A batch of free rows is drawn with its launch, unless the draw itself would wait for the
logits. In a batch with a grammar the draw waits for the push: by then the tokens of the step before
are known, and the masks are made while the forward pass runs. On a GPU that begins with the launch,
which takes the host as long as the GPU: there the tokens before are read, and the masks begun,
ahead of it. Knows no plans, no steps and no caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import mlx.core as mx

from ..device import Sampled
from .lazy import ids_of, start
from .logprobs import Scores
from .masks import MaskMaker, Masks
from .rows import Row
from .sampling import Sampler

Fault = tuple[Row, str]

NOT_FINITE = "the model produced non-finite logits"
NO_MATCH = "the answer's grammar could not be followed"


@dataclass(slots=True)
class Drawn:
    """Tokens under way: ``reported`` int32 [B] holds one for each of ``rows``, -1 = not finite.

    None until the push where the draw waits for it. ``scores`` are there when a row asked for any,
    ``known`` once the tokens were read.
    """

    rows: tuple[Row, ...]
    reported: mx.array | None = None
    scores: Scores | None = None
    known: tuple[list[Sampled], list[Fault]] | None = None


@dataclass(frozen=True, slots=True)
class _Undrawn:
    drawn: Drawn
    logits: mx.array
    inputs: mx.array
    positions: tuple[int, ...]
    state: list[mx.array]
    masks: Future[Masks] | None


class Drawing:
    """Draws the tokens of one forward's rows."""

    def __init__(self, sampler: Sampler, masks: MaskMaker) -> None:
        self._sampler = sampler
        self._masks = masks
        self._launches = mx.default_device() == mx.gpu
        self._undrawn: list[_Undrawn] = []
        self._unstarted: list[mx.array] = []
        self._unfollowed: list[Drawn] = []

    def rest(self) -> None:
        """No rows are left: keep nothing of the last ones."""
        self._sampler.rest()
        self._unfollowed = []

    def look_ahead(self) -> None:
        """Wait for what rows with a grammar drew last, if the next launch is going to take long."""
        if self._launches:
            for drawn in self._unfollowed:
                if drawn.reported is not None:
                    read(drawn)

    def draw(
        self, rows: Sequence[Row], inputs: mx.array, logits: mx.array, state: list[mx.array]
    ) -> tuple[Drawn, list[Fault]]:
        """One token a row, from ``logits`` [B, V] that the tokens ``inputs`` [B] made.

        ``state`` is what the forward pass leaves behind, computed along with the tokens. The faults
        of a draw that waits come from :meth:`push`.
        """
        positions = tuple(row.processed for row in rows)
        bound = any(row.matcher is not None for row in rows)
        masks = self._begin_masks(rows) if bound and self._is_ahead() else None
        undrawn = _Undrawn(Drawn(tuple(rows)), logits, inputs, positions, state, masks)
        if bound or self._sampler.reads([row.sampler for row in rows]):
            self._undrawn.append(undrawn)
            if self._launches:
                start([logits, *state])
            if bound:
                self._unfollowed.append(undrawn.drawn)
            return undrawn.drawn, []
        faults = self._sample(undrawn)
        if self._launches:
            self._start()
        return undrawn.drawn, faults

    def _is_ahead(self) -> bool:
        """Whether all matchers have followed all that was drawn."""
        self._unfollowed = [drawn for drawn in self._unfollowed if drawn.known is None]
        return self._launches and not self._unfollowed

    def push(self) -> list[Fault]:
        """Build the draws that waited for it, and start all that were built."""
        undrawn, self._undrawn = self._undrawn, []
        making = [u.masks or self._begin_masks(u.drawn.rows) for u in undrawn]
        if undrawn and not self._launches:
            # Computes the forward pass here and now, beside the masks.
            start([array for u in undrawn for array in (u.logits, *u.state)])
        faults: list[Fault] = []
        for waiting, made in zip(undrawn, making, strict=True):
            faults += self._sample(waiting, None if made is None else made.result())
        self._start()
        return faults

    def _begin_masks(self, rows: Sequence[Row]) -> Future[Masks] | None:
        matchers = [None if row.failed else row.matcher for row in rows]
        return None if all(m is None for m in matchers) else self._masks.begin(matchers)

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
        faults = draws.faults if masks is None else draws.faults | masks.faults
        return [(rows[place], reason) for place, reason in faults.items() if not rows[place].failed]


def read(drawn: Drawn) -> tuple[list[Sampled], list[Fault]]:
    """Wait for tokens; what the rows sampled, each followed by its matcher, and who failed."""
    if drawn.known is None:
        drawn.known = _read(drawn)
    return drawn.known


def _read(drawn: Drawn) -> tuple[list[Sampled], list[Fault]]:
    assert drawn.reported is not None
    figures = {} if drawn.scores is None else drawn.scores.read()
    sampled: list[Sampled] = []
    faults: list[Fault] = []
    for place, token in enumerate(ids_of(drawn.reported)):
        row = drawn.rows[place]
        if row.failed:
            continue
        if token < 0:
            faults.append((row, NOT_FINITE))
            continue
        try:
            ends = row.follow(token)
        except Exception as error:
            faults.append((row, f"{NO_MATCH}: {error}"))
            continue
        sampled.append(Sampled(row.id, token, ends, figures.get(place)))
    return sampled, faults
