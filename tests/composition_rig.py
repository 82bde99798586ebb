"""One model of the composition matrix: its cases run together through the front door, and each row
again by itself on a device of its own.

A row is compared with the same request alone. Under a scheme that encodes keys and values, a prompt
that is read in several pieces is another computation than one read at once (the later piece sees
the earlier one encoded), so there the single row takes its prompt in the pieces in which the row
in company had it; otherwise in one.
"""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import trio
import trio.testing
from company import settle, until
from lora_rig import make_mlx_adapter
from matrix import Case
from tiny import EOS, VOCAB, make_checkpoint

from mlx_troupe.actors.system import Runtime, open_runtime
from mlx_troupe.runtime.budgets import cache_bytes
from mlx_troupe.runtime.device import (
    Cold,
    FromRow,
    FromSnapshot,
    PrefillRow,
    RowId,
    Sampled,
    SnapshotId,
    StartRow,
    StepDone,
    StepId,
    StepPlan,
)
from mlx_troupe.runtime.engine.executor import MLXDevice
from mlx_troupe.runtime.engine.sampling import RowSampler, Sampler
from mlx_troupe.runtime.grammars import ChoiceGrammar, Grammar, JsonGrammar, RegexGrammar
from mlx_troupe.runtime.kvschemes import (
    PLAIN_KV,
    AffineKV,
    KVScheme,
    PagedKV,
    PerLayerKV,
    PlainKV,
    TurboKV,
)
from mlx_troupe.runtime.requests import (
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    HlgRequest,
    SamplingRequest,
    ScoredToken,
    TextDelta,
    TokenPrompt,
)
from mlx_troupe.runtime.scheduling.core import PIPELINE
from mlx_troupe.runtime.settings import Settings
from mlx_troupe.runtime.text.matching import GrammarCompiler
from mlx_troupe.runtime.text.testing import ByteTokenizer

TOLERANCE = 1e-3
"""Of logits and log-probabilities, where a row's keys and values are the single row's."""
FLIP = 0.3
"""Of those of a row one of whose keys, off by its last bit, was put to another code."""
FREE_TOKENS = 12
GRAMMAR_TOKENS = 40
START = 30
LONG = 258
HEAD = 33

KV: dict[str, KVScheme] = {
    "plain": PLAIN_KV,
    "affine 4": AffineKV(4),
    "affine 8": AffineKV(8),
    "by layer": PerLayerKV(),
    "turbo k8v3": TurboKV(),
    "paged": PagedKV(16),
    "delayed": AffineKV(8, start=START),
}
HEADS: dict[str, Any] = {"head_dim": 64}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", HEADS),
    "sliding": ("sliding", HEADS),
    "softcap": ("gemma2", HEADS),
    "hybrid": ("qwen3_5", {}),
    "experts": ("qwen3_moe", HEADS),
    "shared KV": ("gemma4_text", {**HEADS, "global_head_dim": 64}),
    "row by row": ("stablelm", {"hidden_size": 256}),
}
KV_CONFIG = '[{"layer_idx": 1, "bits": 4, "group_size": 32}]'

SAMPLING: dict[str, SamplingRequest] = {
    "greedy": SamplingRequest(temperature=0.0),
    "filters": SamplingRequest(
        temperature=0.9, top_p=0.95, top_k=40, min_p=0.01, xtc_probability=0.5, xtc_threshold=0.05
    ),
    "penalties": SamplingRequest(
        temperature=0.7,
        repetition_penalty=1.3,
        repetition_context_size=8,
        presence_penalty=0.6,
        frequency_penalty=0.4,
        frequency_context_size=0,
        logit_bias=((5, 2.0), (70, -3.0), (101, 1.5)),
    ),
    "hlg": SamplingRequest(temperature=0.8, hlg=HlgRequest(enabled=True, toe=3.0)),
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5, "pattern": "^[a-z]+$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "ok"],
    "additionalProperties": False,
}
PATTERN = "[a-z]{4}-[0-9]{2,6}(\\.[A-F]{3})?"
CHOICES = ("no way at all", "not today", "maybe tomorrow", "mayflower")
GRAMMARS: dict[str, Grammar | None] = {
    "none": None,
    "json_schema": JsonGrammar(json.dumps(SCHEMA), any_whitespace=False),
    "regex": RegexGrammar(PATTERN),
    "choice": ChoiceGrammar(CHOICES),
}
ADAPTERS: dict[str, tuple[str, ...]] = {"none": (), "one": ("b",), "two": ("b", "a")}
LOGPROBS = {"off": None, "chosen": 0, "top 5": 5}


# ---- what is seen of a device ------------------------------------------------------------


@dataclass(slots=True)
class Seen:
    """One row as the device had it.

    ``pieces`` are the lengths that its state had between passes; ``logits`` by the number of tokens
    that the row held, before bias, penalties and masks.
    """

    start: StartRow
    pieces: list[int] = field(default_factory=list)
    sampled: list[Sampled] = field(default_factory=list)
    logits: dict[int, mx.array] = field(default_factory=dict)
    companions: list[int] = field(default_factory=list)
    failed: str = ""

    @property
    def ids(self) -> list[int]:
        """Tokens drawn, one more than wanted where the end was found a step late."""
        return [sampled.token for sampled in self.sampled]


class Watched(MLXDevice):
    """The MLX device; it remembers every row by its prompt."""

    def __init__(self, path: Path, kv: KVScheme) -> None:
        super().__init__(path, name="tiny", dtype="float32", batch=24, kv=kv)
        self.seen: dict[RowId, Seen] = {}
        self.samplers: dict[int, tuple[RowSampler, Seen]] = {}
        self.gate = threading.Event()
        self.gate.set()
        self._kept: dict[SnapshotId, list[int]] = {}

    def launch(self, plan: StepPlan) -> None:
        """Carry it out and keep account of the pieces in which rows are computed."""
        for keep in plan.keep:
            self._kept[keep.snapshot] = _cut(self.seen[keep.row].pieces, keep.length)
        for start in plan.start:
            self.seen[start.row] = Seen(start, self._before(start))
        for part in plan.prefill:
            pieces = self.seen[part.row].pieces
            pieces.append((pieces[-1] if pieces else 0) + part.count)
        for row in plan.decode:
            seen = self.seen[row]
            seen.pieces.append((seen.pieces[-1] if seen.pieces else 0) + 1)
            seen.companions.append(len(plan.decode) - 1)
        super().launch(plan)
        for start in plan.start:
            if (made := self._rows.get(start.row)) is not None:
                self.samplers[id(made.sampler)] = (made.sampler, self.seen[start.row])

    def settle(self) -> StepDone:
        """Wait, for the gate too, and note what was drawn."""
        self.gate.wait(30)
        done = super().settle()
        for sampled in done.sampled:
            self.seen[sampled.row].sampled.append(sampled)
        for failed in done.failed:
            self.seen[failed.row].failed = failed.reason
        return done

    def by_prompt(self, ids: Sequence[int]) -> Seen:
        """The last row that started with this prompt."""
        return [seen for seen in self.seen.values() if seen.start.ids == tuple(ids)][-1]

    def _before(self, start: StartRow) -> list[int]:
        match start.source:
            case FromRow(row, length):
                return _cut(self.seen[row].pieces, length)
            case FromSnapshot(snapshot, length):
                return _cut(self._kept[snapshot], length)
            case _:
                return []


def _cut(pieces: Sequence[int], length: int) -> list[int]:
    return [*(end for end in pieces if end < length), length]


@contextmanager
def recorded(nudge: Callable[[int, mx.array], mx.array] | None = None) -> Iterator[list[Any]]:
    """Collect what every draw is given; ``nudge`` may change the logits at a position."""
    drawn: list[Any] = []
    draw = Sampler.draw

    def recording(
        self: Sampler, logits: mx.array, rows: Any, positions: Any, *rest: Any, **more: Any
    ) -> Any:
        if nudge is not None:
            logits = nudge(positions[0], logits)
        drawn.append((logits, tuple(rows), tuple(positions)))
        return draw(self, logits, rows, positions, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampler, "draw", recording)
        yield drawn


def sort_out(drawn: Sequence[Any], device: Watched) -> None:
    """Give each row its logits."""
    for logits, rows, positions in drawn:
        for place, (sampler, position) in enumerate(zip(rows, positions, strict=True)):
            if (known := device.samplers.get(id(sampler))) is not None:
                known[1].logits[position] = logits[place]


# ---- a model's cases, together -----------------------------------------------------------


@dataclass(slots=True)
class Asked:
    """One request of a case and what its client was told."""

    case: Case
    request: GenerationRequest
    text: str = ""
    scores: list[ScoredToken] = field(default_factory=list)
    end: Finished | Failed | None = None

    @property
    def prompt(self) -> tuple[int, ...]:
        """Its ids."""
        assert isinstance(self.request.prompt, TokenPrompt)
        return self.request.prompt.ids


@dataclass(slots=True)
class Model:
    """A checkpoint on disk with adapters for it."""

    family: str
    path: Path
    adapters: dict[str, Path]


def _others(case: Case) -> tuple[str, ...]:
    """Adapters that the case's row does not have."""
    return ADAPTERS["two" if case["adapters"] == "one" else "one"]


def make_model(folder: Path, family: str) -> Model:
    """A tiny checkpoint with heads of 64, two adapters and a ``kv_config.json``."""
    name, config = FAMILIES[family]
    if family == "hybrid":
        config = _deeper_config(name)
    path = make_checkpoint(folder / "model", name, **config)
    (path / "kv_config.json").write_text(KV_CONFIG)
    adapters = {
        adapter: make_mlx_adapter(folder / adapter, path, seed=seed, keys=None, layers=99)
        for seed, adapter in enumerate("ab", 1)
    }
    return Model(family, path, adapters)


def _deeper_config(name: str) -> dict[str, Any]:
    from tiny_families import FAMILIES as known

    return {"text_config": {**known[name]["text_config"], **HEADS}}


class Company:
    """Runs the cases of one model through the front door.

    ``replays``: with compiled decode steps and joint projections, as on a GPU.
    """

    def __init__(
        self, model: Model, kv: str, cases: Sequence[Case], *, replays: bool = False
    ) -> None:
        self.model = model
        self.kv = KV[kv]
        self.settings = Settings(model.path, "tiny", dtype="float32", batch=24, kv=self.kv)
        self.device = Watched(model.path, self.kv)
        if replays:
            self.device._options = replace(self.device._options, replay=True)
        self.cases = cases
        self.asked: list[Asked] = []
        self.problems: list[str] = []
        self._holding = trio.Lock()
        self._rng = random.Random(f"{kv}/{model.family}")

    async def run(self) -> None:
        """All of it: earlier turns, rows that are alone, rows in company."""
        with recorded() as drawn:
            async with open_runtime(
                self.settings, device=self.device, tokenizer=ByteTokenizer()
            ) as runtime:
                info = await runtime.wait_ready()
                assert info.batchable is (self.model.family != "row by row"), info.lone_reason
                self.can_cut = info.can_trim(1000)
                self.ahead = PIPELINE if info.launches_ahead else 1
                for adapter, path in self.model.adapters.items():
                    await runtime.mount_adapter(adapter, path)
                ready = [(case, await self._prepare(runtime, case)) for case in self.cases]
                for case, prompts in ready:
                    if case["company"] == "alone":
                        await self._read(runtime, self._asked(case, prompts[0]))
                async with self._running(runtime):
                    async with trio.open_nursery() as nursery:
                        for case, prompts in ready:
                            if case["company"] != "alone":
                                nursery.start_soon(self._in_company, runtime, case, prompts)
                await settle(runtime)
                self._check_nothing_is_left(runtime)
        sort_out(drawn, self.device)

    def ids(self, length: int) -> tuple[int, ...]:
        """Some tokens, none of them special."""
        return tuple(self._rng.randrange(2, VOCAB) for _ in range(length))

    async def _prepare(self, runtime: Runtime, case: Case) -> tuple[tuple[int, ...], ...]:
        """The case's prompts, after whatever must have been said before."""
        match case["prefix"]:
            case "live row":
                head = self.ids(HEAD)
                return head + self.ids(5), head + self.ids(9)
            case "kept prompt":
                head = self.ids(LONG if not self.can_cut else 40)
                await self._before(runtime, case, head, 3)
                return (head + self.ids(6),)
            case "second turn":
                head = self.ids(28)
                said = await self._before(runtime, case, head, 12)
                return (head + tuple(said) + self.ids(5),)
            case _:
                ids = self.ids(self._rng.choice((5, 19, 26)))
                # Kept, but of other adapters: nobody may start from it.
                await self._before(runtime, case, ids, 2, _others(case))
                return (ids,)

    async def _before(
        self,
        runtime: Runtime,
        case: Case,
        ids: tuple[int, ...],
        count: int,
        adapters: tuple[str, ...] | None = None,
    ) -> list[int]:
        request = self._request({**case, "grammar": "none", "logprobs": "off"}, ids)
        if not self.can_cut:
            # An end is found a step late, and a ring that has turned cannot go back a token.
            bias = ((EOS, -100.0), *request.sampling.logit_bias)
            request = replace(request, sampling=replace(request.sampling, logit_bias=bias))
        adapters = request.adapters if adapters is None else adapters
        request = replace(request, max_tokens=count, adapters=adapters)
        asked = Asked(case, request)
        await self._read(runtime, asked)
        assert isinstance(asked.end, Finished), asked.end
        await settle(runtime)
        return self.device.by_prompt(ids).ids[: asked.end.usage.completion_tokens]

    def _request(self, case: Case, ids: tuple[int, ...]) -> GenerationRequest:
        seed = {"given": self._rng.getrandbits(40), "shared": 11, "none": None}[case["seed"]]
        grammar = GRAMMARS[case["grammar"]]
        return GenerationRequest(
            TokenPrompt(ids),
            replace(SAMPLING[case["sampling"]], seed=seed),
            max_tokens=FREE_TOKENS if grammar is None else GRAMMAR_TOKENS,
            adapters=ADAPTERS[case["adapters"]],
            grammar=grammar,
            logprobs=LOGPROBS[case["logprobs"]],
        )

    def _asked(self, case: Case, ids: tuple[int, ...]) -> Asked:
        self.asked.append(Asked(case, self._request(case, ids)))
        return self.asked[-1]

    async def _read(
        self,
        runtime: Runtime,
        asked: Asked,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        async with runtime.generate(asked.request) as generation:
            task_status.started()
            async for event in generation:
                match event:
                    case TextDelta(_, text, scores):
                        asked.text += text
                        asked.scores += scores
                    case Finished(_, _, scores):
                        asked.scores += scores
                        asked.end = event
                    case Failed():
                        asked.end = event

    @asynccontextmanager
    async def _running(self, runtime: Runtime) -> AsyncIterator[None]:
        """A row that decodes all the while, with an adapter and penalties of its own."""
        request = GenerationRequest(
            TokenPrompt(self.ids(21)),
            SamplingRequest(temperature=1.0, seed=11, repetition_penalty=1.1),
            max_tokens=3000,
            adapters=("a",),
            grammar=RegexGrammar("[ -~]{3000}"),
            logprobs=2,
        )
        async with runtime.generate(request) as generation:
            await self._tokens(request, 3)
            yield
        assert generation.prompt_tokens == 21

    async def _in_company(
        self, runtime: Runtime, case: Case, prompts: Sequence[tuple[int, ...]]
    ) -> None:
        held = self._held(runtime) if len(prompts) > 1 else nullcontext()
        async with trio.open_nursery() as nursery:
            async with held:
                match case["company"]:
                    case "others end":
                        other = Asked(case, self._neighbour(case, self.ids(12), 4))
                        await nursery.start(self._read, runtime, other)
                    case "others cancelled":
                        # Of rows that share a head it is the first, whose state the others take.
                        head = prompts[0][:HEAD] if len(prompts) > 1 else self.ids(12)
                        leaving = self._neighbour(case, head + self.ids(7), 300)
                        await nursery.start(self._cancelled, runtime, leaving)
                for ids in prompts:
                    await nursery.start(self._read, runtime, self._asked(case, ids))

    @asynccontextmanager
    async def _held(self, runtime: Runtime) -> AsyncIterator[None]:
        """Whatever is asked for in here begins in one and the same step."""
        async with self._holding:
            self.device.gate.clear()
            try:
                await until(lambda: runtime.scheduler.core.in_flight >= self.ahead)
                yield
                # The prefix cache has answered, too.
                await trio.testing.wait_all_tasks_blocked()
            finally:
                self.device.gate.set()

    def _neighbour(self, case: Case, ids: tuple[int, ...], count: int) -> GenerationRequest:
        """A row of another kind, for ``count`` tokens."""
        same = case["prefix"] == "live row" and count > 4
        return GenerationRequest(
            TokenPrompt(ids),
            SamplingRequest(temperature=0.8, seed=11, top_k=30),
            max_tokens=count,
            adapters=ADAPTERS[case["adapters"]] if same else _others(case),
            grammar=None if count == 4 else RegexGrammar("[a-z ]{300}"),
            logprobs=3,
        )

    async def _cancelled(
        self, runtime: Runtime, request: GenerationRequest, task_status: trio.TaskStatus[None]
    ) -> None:
        async with runtime.generate(request):
            task_status.started()
            await self._tokens(request, 3)

    async def _tokens(self, request: GenerationRequest, count: int) -> None:
        """Wait until a row has been drawn that many tokens, or is over."""
        assert isinstance(request.prompt, TokenPrompt)
        ids = request.prompt.ids

        def has() -> bool:
            for seen in list(self.device.seen.values()):
                if seen.start.ids == ids:
                    return len(seen.sampled) >= count or EOS in seen.ids or bool(seen.failed)
            return False

        await until(has)

    def _check_nothing_is_left(self, runtime: Runtime) -> None:
        runtime.scheduler.core.check_integrity()
        runtime.cache.core.check_integrity()
        assert not runtime.scheduler.core.everyone(), "rows are left in the scheduler"
        assert runtime.cache.core.leases == 0, "a lease was not returned"
        stats = self.device.stats()
        assert stats.rows == 0, "rows are left on the device"
        assert stats.snapshots == len(runtime.cache.core.snapshots()), "a kept state leaked"


# ---- each row by itself ------------------------------------------------------------------


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
            ends = _cut([n for n in together.pieces if n < last], last)
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
            if not self._near_tie():
                pair = self.ids[self.same], self.alone.ids[self.same]
                yield f"token {self.same} is {pair[0]} in company, {pair[1]} alone"
            self.verdict.near_ties += 1

    def _near_tie(self) -> bool:
        """Whether logits within the tolerance, alone, would have drawn the token that was drawn."""
        place, wanted = self.same, self.ids[self.same]
        order = np.arange(VOCAB)
        shapes = [
            np.where(order == wanted, 1.0, -1.0),
            np.where(order < wanted, -1.0, 1.0),
            np.where(order <= wanted, 1.0, -1.0),
            np.where(order == self.alone.ids[place], -1.0, 1.0),
        ]
        for shape in shapes:
            by = mx.array(shape * self.tolerance, mx.float32)
            at = len(self.asked.prompt) + place

            def nudge(position: int, logits: mx.array, by: mx.array = by, at: int = at) -> mx.array:
                return logits + by if position == at else logits

            if self.single.run(self.asked, self.together, place + 1, nudge).ids[-1] == wanted:
                return True
        return False

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
