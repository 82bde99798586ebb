"""Turning logits into token ids, every row by its own parameters and its own random numbers.

Owns the plan of the batch at hand: which rows are drawn together, and their parameters as arrays,
made once for as long as the batch stays the same. What a row itself brings is its ``RowSampler``.
Runs on the device thread. Knows no rows beyond their order in the batch and no cache.

A draw depends on the row's logits, its seed and its token position alone, whatever shares the
batch. On a GPU everything returned is lazy. On a CPU a draw that is not greedy reads the logits and
so waits for them (``selection`` says why); :meth:`Sampler.reads` tells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any

import mlx.core as mx
import numpy as np

from ..requests import Sampling
from . import allowing, penalty_kernel, sampling_kernel
from .filters import Needs, Parameters, choose, parameters_of
from .logprobs import Scores, score
from .masks import Masks
from .processors import Past, Processors
from .randomness import uniforms
from .row_sampler import RowSampler
from .selection import DeviceKit, HostKit, Kit


@dataclass(frozen=True, slots=True)
class Draws:
    """One drawn token for each row of a batch.

    Attributes:
        tokens: uint32 [B], always valid ids: the next step's input.
        reported: int32 [B], the same ids, or -1 where the row's logits were not finite.
        faults: rows whose processor raised, by their place in the batch, with the reason.
        scores: log-probabilities, if any row asked for them.
    """

    tokens: mx.array
    reported: mx.array
    faults: dict[int, str] = field(default_factory=dict)
    scores: Scores | None = None


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that are drawn together.

    ``places`` [N] are theirs in the batch, ``numbers`` the slice of the random numbers for them.
    With a ``table`` one kernel does it all.
    """

    needs: Needs
    places: Any
    numbers: slice
    parameters: Parameters
    table: mx.array | None


class _Plan:
    """How the batch at hand is drawn; the arrays in it serve every step of the batch."""

    def __init__(
        self, rows: Sequence[RowSampler], kit: Kit, removable: Any, *, fused: bool
    ) -> None:
        self.rows = list(rows)
        self.processors, self.faults = _processors(self.rows, fused=fused)
        sorted_out: dict[Needs | None, list[int]] = {}
        for place, row in enumerate(rows):
            if not row.greedy:
                kind = row.needs.coarse() if kit.coarse else row.needs
                alike = fused and not row.needs.curve
                sorted_out.setdefault(None if alike else kind, []).append(place)
        self.order: list[int] = []
        self.groups: list[_Group] = []
        for shared, places in sorted_out.items():
            first = len(self.order)
            self.order += places
            needs = reduce(or_, (rows[place].needs for place in places))
            asked = [rows[place].sampling for place in places]
            parameters = parameters_of(kit, asked, removable)
            numbers = slice(first, len(self.order))
            table = sampling_kernel.table_of(asked, removable.shape[0]) if shared is None else None
            self.groups.append(_Group(needs, kit.xp.array(places), numbers, parameters, table))
        self.keys = [rows[place].key for place in self.order]
        self.scored = [(p, row.logprobs) for p, row in enumerate(rows) if row.logprobs is not None]
        self.all_drawn = len(self.order) == len(rows)
        self.plain = not self.order and not self.scored
        # Drawn tokens stand behind the best ones of all rows, if there are any of these.
        back = list(range(len(rows)))
        for index, place in enumerate(self.order):
            back[place] = index if self.all_drawn else len(rows) + index
        self.back = kit.xp.array(back)

    def fits(self, rows: Sequence[RowSampler]) -> bool:
        """Whether it was made for exactly these rows."""
        return len(rows) == len(self.rows) and all(map(_is_same, rows, self.rows))


class Sampler:
    """Samples batches of one model.

    Args:
        vocab_size: number of logits of a row.
        exempt: gives the ids that XTC never removes; asked once, by the first row with XTC.
        kit: what computes; None = what suits the device.
    """

    def __init__(
        self,
        vocab_size: int,
        exempt: Callable[[], frozenset[int]] = frozenset,
        kit: Kit | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._exempt = exempt
        self._removable: Any = None
        if kit is None:
            kit = HostKit() if mx.default_device() == mx.cpu else DeviceKit()
        self._kit = kit
        self._on_host = kit.xp is np
        self._plan: _Plan | None = None
        self._palette = allowing.Palette()

    def reads(self, rows: Sequence[RowSampler]) -> bool:
        """Whether a draw of these rows waits for their logits."""
        if not self._on_host or len(rows) == 1:
            return self._on_host
        return any(not row.greedy or row.logprobs is not None for row in rows)

    def rest(self) -> None:
        """Forget the batch at hand and its arrays."""
        self._plan = None
        self._palette.forget()

    def draw(
        self,
        logits: mx.array,
        rows: Sequence[RowSampler],
        positions: Sequence[int],
        inputs: mx.array,
        masks: Masks | None = None,
    ) -> Draws:
        """One token a row.

        Args:
            logits: [B, V].
            rows: the B samplers in the order of the batch.
            positions: tokens (prompt and generated) that each row holds at this draw.
            inputs: [B] the tokens that made these logits.
            masks: tokens that the rows' grammars allow; applied after the processors.
        """
        plan = self._plan
        if plan is None or not plan.fits(rows):
            fused = isinstance(self._kit, DeviceKit) and sampling_kernel.serves(logits)
            plan = self._plan = _Plan(rows, self._kit, self._removable_for(rows), fused=fused)
        if plan.processors is not None:
            logits = plan.processors.apply(logits, inputs)
        if plan.plain and not self._on_host and len(rows) > 1 and allowing.works(logits.dtype):
            chosen = None if masks is None else self._palette.find(masks)
            tokens, reported = allowing.best(logits, chosen)
            return Draws(tokens, reported, plan.faults)
        # The maximum of a row that holds a NaN is NaN.
        finite = mx.isfinite(mx.max(logits, axis=-1))
        allowed = logits if masks is None else allowing.restricted(logits, masks, self._palette)
        values = self._values(allowed, rows)
        tokens = self._choose(allowed, values, plan, positions)
        reported = mx.where(finite, tokens.astype(mx.int32), -1)
        scores = None
        if plan.scored:
            drawn = np.asarray(tokens) if self._on_host else tokens
            scores = score(self._kit, values, drawn, plan.scored)
        return Draws(tokens, reported, plan.faults, scores)

    def _removable_for(self, rows: Sequence[RowSampler]) -> Any:
        """bool [V]: what XTC may remove; all of it while nobody has XTC."""
        if self._removable is not None:
            return self._removable
        removable = np.ones(self._vocab_size, dtype=bool)
        if not any(row.needs.xtc for row in rows):
            return self._kit.xp.array(removable)
        removable[sorted(i for i in self._exempt() if 0 <= i < self._vocab_size)] = False
        self._removable = self._kit.xp.array(removable)
        return self._removable

    def _values(self, logits: mx.array, rows: Sequence[RowSampler]) -> Any:
        """Logits [B, V] in the form that the kit takes, float32."""
        values = logits.astype(mx.float32)
        if not self.reads(rows):
            return values
        mx.eval(values)
        return np.asarray(values)

    def _choose(
        self, logits: mx.array, values: Any, plan: _Plan, positions: Sequence[int]
    ) -> mx.array:
        if not plan.order:
            if len(plan.rows) > 1:
                return mx.argmax(logits, axis=-1)
            if self._on_host and (best := _clear_best(values, logits.dtype)) is not None:
                return mx.array([best], dtype=mx.uint32)
            # mlx-lm's own choice, to the bit: rounded differences may tie where logits do not.
            return mx.argmax(logits - mx.logsumexp(logits, axis=-1, keepdims=True), axis=-1)
        places = [positions[place] for place in plan.order]
        numbers: Any = uniforms(mx.array(list(zip(plan.keys, places, strict=True)), mx.uint32))
        if not self._on_host:
            drawn: mx.array = self._pick(logits, values, plan, numbers).astype(mx.uint32)
            return drawn
        # What is not finite is found by whoever reads the report.
        with np.errstate(all="ignore"):
            ids = self._pick(logits, values, plan, np.asarray(numbers))
        return mx.array(ids.astype(np.uint32))

    def _pick(self, logits: mx.array, values: Any, plan: _Plan, numbers: Any) -> Any:
        xp = self._kit.xp
        parts = [] if plan.all_drawn else [xp.argmax(values, axis=-1)]
        for group in plan.groups:
            own = numbers[group.numbers]
            parts.append(self._pick_group(logits, values, group, own))
        if plan.all_drawn and len(parts) == 1:
            return parts[0]
        return xp.concatenate(parts)[plan.back]

    def _pick_group(self, logits: mx.array, values: Any, group: _Group, numbers: Any) -> Any:
        if group.table is not None:
            removable = group.parameters.removable
            return sampling_kernel.draw(logits, group.places, group.table, removable, numbers)
        x = values[group.places]
        # A copy, so it may be changed.
        x -= self._kit.xp.max(x, axis=-1, keepdims=True)
        return choose(self._kit, group.needs, x, group.parameters, numbers)


def _clear_best(values: Any, kind: mx.Dtype) -> int | None:
    """The best of [1, V] if it is the best of the log-probabilities too, however these round.

    The best one's is above -16, as no vocabulary has e^16 tokens. There neighbours are at most 8
    epsilons apart, so that nothing 32 epsilons below can be rounded to the same. Exponentials of a
    whole vocabulary, for the normaliser, take as long as a layer of a small model.
    """
    x = values[0]
    best = int(x.argmax())
    rivals = np.count_nonzero(x >= x[best] - 32 * mx.finfo(kind).eps)
    return best if rivals == 1 else None


def _is_same(one: RowSampler, other: RowSampler) -> bool:
    return one is other


def _processors(
    rows: Sequence[RowSampler], *, fused: bool
) -> tuple[Processors | None, dict[int, str]]:
    """Processors of those rows that ask for any, and the rows that have none to be had."""
    recent: dict[int, mx.array] = {}
    faults: dict[int, str] = {}
    asked: list[tuple[int, Sampling, Past | None]] = []
    for place, row in enumerate(rows):
        if not row.processes:
            continue
        try:
            held = row.recent()
        except Exception as error:
            faults[place] = f"a logits processor failed: {error}"
            continue
        if held is not None:
            recent[place] = held
        asked.append((place, row.sampling, row.past))
    batch = len(rows) if fused and penalty_kernel.works() else 0
    return (Processors(asked, recent, batch) if asked else None), faults
