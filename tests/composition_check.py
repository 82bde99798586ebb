"""Each row of a company again, by itself on a device of its own, and what the two have in common.

Under a scheme that encodes keys and values, a prompt that is read in several pieces is another
computation than one read at once (the later piece sees the earlier one encoded), so there the
single row takes its prompt in the pieces in which the row in company had it; otherwise in one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np
from composition_rig import Asked, Company
from composition_values import ADAPTERS, CHOICES, PATTERN
from tiny import EOS
from watched_device import Seen, Watched, cut, recorded, sort_out

from mlx_troupe.runtime.budgets import cache_bytes
from mlx_troupe.runtime.kvschemes import PagedKV, PlainKV
from mlx_troupe.runtime.plans import (
    Cold,
    FromRow,
    FromSnapshot,
    PrefillRow,
    RowId,
    StepId,
    StepPlan,
)
from mlx_troupe.runtime.requests import Finished, FinishReason
from mlx_troupe.runtime.text.matching import GrammarCompiler
from mlx_troupe.runtime.text.testing import ByteTokenizer

TOLERANCE = 1e-3
"""Of logits and log-probabilities, where a row's keys and values are the single row's."""
FLIP = 0.3
"""Of those of a row one of whose keys, off by its last bit, was put to another code."""


class Single:
    """A device on which one row runs at a time."""

    def __init__(self, company: Company) -> None:
        self.device = Watched(company.model.path, company.kv)
        info = self.device.open()
        for adapter, path in company.model.adapters.items():
            self.device.mount(adapter, path)
        self._compiler = GrammarCompiler(ByteTokenizer(), info.vocab_size, info.eos_ids)
        self._in_pieces = not isinstance(company.kv, PlainKV | PagedKV)
        self._steps = 0
        self._rows = 0

    def run(
        self,
        asked: Asked,
        together: Seen,
        count: int,
        nudge: Callable[[int, mx.array], mx.array] | None = None,
    ) -> Seen:
        """The row of a request alone, for ``count`` tokens or to its end."""
        self._rows += 1
        row = RowId(1_000_000 + self._rows)
        grammar = asked.request.grammar
        matcher = None if grammar is None else self._compiler.compile(grammar)
        start = replace(together.start, row=row, source=Cold(), matcher=matcher)
        last = len(start.ids) - 1
        with recorded(nudge) as drawn:
            self._step(start=(start,))
            ends = cut([n for n in together.pieces if n < last], last)
            for before, end in zip([0, *ends], ends if self._in_pieces else [last], strict=False):
                if end > before:
                    self._step(prefill=(PrefillRow(row, end - before),))
            seen = self.device.seen[row]
            while len(seen.sampled) < count:
                self._step(decode=(row,))
                if seen.sampled[-1].ends or seen.sampled[-1].token == EOS:
                    break
            self._step(end=(row,))
            sort_out(drawn, self.device)
        return seen

    def close(self) -> None:
        """Give everything back."""
        self.device.close()

    def _step(self, **parts: Any) -> None:
        self._steps += 1
        self.device.launch(StepPlan(StepId(self._steps), **parts))
        self.device.push()
        done = self.device.settle()
        assert not done.failed, done.failed


@dataclass(slots=True)
class Verdict:
    """What the comparison of one model's rows came to."""

    problems: list[str] = field(default_factory=list)
    rows: int = 0
    tokens: int = 0
    flipped: int = 0
    near_ties: int = 0


def compare(company: Company) -> Verdict:
    """Every row of every case with its own single run."""
    verdict = Verdict()
    single = Single(company)
    encoded = not isinstance(company.kv, PlainKV | PagedKV)
    for asked in company.asked:
        name = ", ".join(asked.case.values())
        told = list(Comparison(asked, company, single, verdict, encoded=encoded).problems())
        verdict.problems += [f"[{name}] {problem}" for problem in told]
        verdict.rows += 1
    single.close()
    return verdict


class Comparison:
    """One request's answer, its row, and its row alone."""

    def __init__(
        self, asked: Asked, company: Company, single: Single, verdict: Verdict, *, encoded: bool
    ) -> None:
        self.asked = asked
        self.company = company
        self.single = single
        self.verdict = verdict
        self.encoded = encoded
        self.together = company.device.by_prompt(asked.prompt)

    def problems(self) -> Iterator[str]:
        """In words, whatever is not as it should be."""
        if not isinstance(self.asked.end, Finished):
            yield f"it failed: {self.asked.end}"
            return
        count = self.asked.end.usage.completion_tokens
        self.ids = self.together.ids[:count]
        self.verdict.tokens += count
        self.alone = self.single.run(self.asked, self.together, count)
        self.tolerance = TOLERANCE
        yield from self._logits()
        yield from self._ids()
        yield from self._scores()
        yield from self._answer(self.asked.end)
        yield from self._prefix(self.asked.end)
        yield from self._company()

    @property
    def same(self) -> int:
        """Tokens drawn alike before the first that differs."""
        pairs = zip(self.ids, self.alone.ids, strict=False)
        return next((n for n, (a, b) in enumerate(pairs) if a != b), len(self.ids))

    def _logits(self) -> Iterator[str]:
        first = len(self.asked.prompt)
        for n in range(min(self.same + 1, len(self.ids))):
            ours, theirs = self.together.logits.get(first + n), self.alone.logits.get(first + n)
            if ours is None or theirs is None:
                yield f"token {n} was drawn at another position"
                return
            off = float(mx.abs(ours - theirs).max().item())
            if not off <= self.tolerance:
                if not self.encoded or not off <= FLIP:
                    yield f"the logits of token {n} differ by {off}"
                    return
                self.tolerance = FLIP
                self.verdict.flipped += 1

    def _ids(self) -> Iterator[str]:
        if len(self.alone.ids) < len(self.ids) and self.same == len(self.alone.ids):
            yield f"alone it ends after {self.same} tokens, in company after {len(self.ids)}"
        elif self.same < len(self.ids):
            if self._near_tie():
                self.verdict.near_ties += 1
                return
            pair = self.ids[self.same], self.alone.ids[self.same]
            yield f"token {self.same} is {pair[0]} in company, {pair[1]} alone"

    def _near_tie(self) -> bool:
        """Whether the row alone, given the logits that it had in company, draws what it drew there.

        They are within the tolerance of its own.
        """
        at = len(self.asked.prompt) + self.same
        ours = self.together.logits[at][None]

        def nudge(position: int, logits: mx.array) -> mx.array:
            return ours if position == at else logits

        given = self.single.run(self.asked, self.together, self.same + 1, nudge)
        return given.ids == self.ids[: self.same + 1]

    def _scores(self) -> Iterator[str]:
        wanted = self.asked.request.logprobs
        told = self.asked.scores
        if wanted is None:
            if told:
                yield "figures that nobody asked for"
            return
        if [score.chosen.id for score in told] != self.ids:
            yield f"figures of {len(told)} tokens for {len(self.ids)}, or of others"
            return
        for n, (ours, sampled) in enumerate(zip(told, self.alone.sampled, strict=False)):
            if n >= self.same or sampled.logprobs is None:
                return
            theirs = [sampled.logprobs.chosen, *(figure for _, figure in sampled.logprobs.top)]
            figures = [ours.chosen.logprob, *(score.logprob for score in ours.top)]
            if len(ours.top) != wanted or len(figures) != len(theirs):
                yield f"{len(ours.top)} alternatives to token {n}"
            elif not np.allclose(figures, theirs, rtol=0, atol=2 * self.tolerance):
                yield f"the log-probabilities of token {n} are {figures}, alone {theirs}"

    def _answer(self, end: Finished) -> Iterator[str]:
        usage, case = end.usage, self.asked.case
        spoken = [i for i in self.ids if i != EOS]
        if self.asked.text != ByteTokenizer().decode(spoken):
            yield f"the text is {self.asked.text!r} for {spoken}"
        lane = "serial" if case["family"] == "row by row" else "batched"
        if usage.prompt_tokens != len(self.asked.prompt) or usage.lane != lane:
            yield f"usage {usage}"
        limit = self.asked.request.max_tokens
        stopped = self.ids[-1] == EOS or self.together.sampled[len(self.ids) - 1].ends
        if (end.reason is FinishReason.STOP) is not stopped:
            yield f"it ended with {end.reason} after {self.ids}"
        if end.reason is FinishReason.LENGTH and len(self.ids) != limit:
            yield f"it was cut after {len(self.ids)} tokens of {limit}"
        yield from _misfits(case["grammar"], self.asked.text, complete=stopped)

    def _prefix(self, end: Finished) -> Iterator[str]:
        cached, source = end.usage.cached_tokens, self.together.start.source
        if cached != (0 if isinstance(source, Cold) else source.length):
            yield f"{cached} cached tokens are told, the source was {source}"
        match self.asked.case["prefix"]:
            case "cold":
                if not isinstance(source, Cold):
                    yield f"a prompt that nobody knew came from {source}"
            case "live row":
                twins = [a for a in self.company.asked if a.case is self.asked.case]
                rows = [self.company.device.by_prompt(a.prompt) for a in twins]
                if not any(isinstance(row.start.source, FromRow) for row in rows):
                    yield "neither of two rows with one head took it from the other"
            case _:
                kept = cache_bytes(self.company.settings) > 0
                if isinstance(source, FromSnapshot) is not kept:
                    yield f"its source is {source}"
        revisions = len(ADAPTERS[self.asked.case["adapters"]])
        if len(self.together.start.adapters) != revisions:
            yield f"it ran with {self.together.start.adapters}"

    def _company(self) -> Iterator[str]:
        beside = self.together.companions[: len(self.ids)]
        if self.asked.case["company"] == "alone":
            if any(beside):
                yield "it was to be alone"
        elif not all(beside):
            yield "it was to be in company"


def _misfits(grammar: str, text: str, *, complete: bool) -> Iterator[str]:
    match grammar:
        case "json_schema" if complete:
            value = json.loads(text)
            fits = (
                list(value) == ["name", "age", "ok"]
                and re.fullmatch("[a-z]{1,5}", value["name"])
                and type(value["age"]) is int
                and 0 <= value["age"] <= 99
                and type(value["ok"]) is bool
            )
        case "regex" if complete:
            fits = re.fullmatch(PATTERN, text)
        case "choice":
            fits = text in CHOICES if complete else any(c.startswith(text) for c in CHOICES)
        case _:
            return
    if not fits:
        yield f"the answer does not fit its {grammar}: {text!r}"
