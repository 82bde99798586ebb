"""One model of the composition matrix: its cases run together, through the front door."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace

import trio
import trio.testing
from company import settle, until
from composition_values import (
    ADAPTERS,
    FREE_TOKENS,
    GRAMMAR_TOKENS,
    GRAMMARS,
    HEAD,
    KV,
    LOGPROBS,
    LONG,
    SAMPLING,
    Model,
    others,
)
from matrix import Case
from tiny import EOS, VOCAB
from watched_device import Watched, recorded, sort_out

from mlx_troupe.actors.system import Runtime, open_runtime
from mlx_troupe.runtime.grammars import RegexGrammar
from mlx_troupe.runtime.kvschemes import start_of
from mlx_troupe.runtime.requests import (
    Failed,
    Finished,
    GenerationRequest,
    SamplingRequest,
    ScoredToken,
    TextDelta,
    TokenPrompt,
)
from mlx_troupe.runtime.scheduling.pipeline import PIPELINE
from mlx_troupe.runtime.settings import Settings
from mlx_troupe.runtime.text.testing import ByteTokenizer


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
        self.device = Watched(model.path, self.kv, replay=replays or None)
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
                await self._before(runtime, case, ids, 2, others(case))
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
        if start_of(self.kv):
            # An end is found a step late, and the step that encodes a row cannot be taken back.
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
                await until(lambda: runtime.cast.scheduler.core.in_flight >= self.ahead)
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
            adapters=ADAPTERS[case["adapters"]] if same else others(case),
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
        runtime.cast.scheduler.core.check_integrity()
        runtime.cast.cache.core.check_integrity()
        assert not runtime.cast.scheduler.core.everyone(), "rows are left in the scheduler"
        assert runtime.cast.cache.core.leases == 0, "a lease was not returned"
        stats = self.device.stats()
        assert stats.rows == 0, "rows are left on the device"
        assert stats.snapshots == len(runtime.cast.cache.core.snapshots()), "a kept state leaked"
