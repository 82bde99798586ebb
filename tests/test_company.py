"""The whole cast on the scripted device and trio's virtual clock."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import trio
from company import SETTINGS, ask, company, counted, nothing_left, read, run, settle, until, words
from core_rig import PLAIN, mixed, solo

from mlx_troupe.actors.gpu import ModelRefused
from mlx_troupe.actors.inline_worker import InlineWorker
from mlx_troupe.actors.system import Runtime, open_runtime
from mlx_troupe.actors.testing import ScriptedDevice
from mlx_troupe.runtime.errors import (
    ContextLengthExceeded,
    GenerationFailed,
    InvalidRequest,
    ModelError,
    Overloaded,
    Unavailable,
)
from mlx_troupe.runtime.model_info import ModelInfo
from mlx_troupe.runtime.plans import RowId
from mlx_troupe.runtime.requests import (
    Channel,
    ChatPrompt,
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    Message,
    Prompt,
    Sampling,
    SamplingRequest,
    TextDelta,
    TextPrompt,
    TokenPrompt,
)
from mlx_troupe.runtime.scheduling.effects import RowSpec
from mlx_troupe.runtime.text.testing import END_THINK, EOS, THINK, ByteTokenizer


async def test_one_request_runs_from_prompt_to_finish(autojump_clock: object) -> None:
    """A prompt goes in, text and a Finished with the right counts come out."""
    async with company() as (runtime, _):
        text, end = await run(runtime, ask(1, 2, 3))
    assert text == " 4 5 6 7 8"
    assert isinstance(end, Finished)
    assert end.reason is FinishReason.LENGTH
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (3, 5)
    assert end.usage.lane == "batched"


async def test_a_model_that_cannot_share_a_batch_says_so(autojump_clock: object) -> None:
    """Its requests are served in the serial lane, and the figures tell why."""
    model = ModelInfo("s", 1000, 4096, frozenset({0}), batchable=False, lone_reason="recurrent")
    async with company(ScriptedDevice(model)) as (runtime, _):
        _, end = await run(runtime, ask(1, 2, 3))
        batch = runtime.stats()["batch"]
    assert isinstance(end, Finished)
    assert end.usage.lane == "serial"
    assert isinstance(batch, dict)
    assert (batch["batched"], batch["lone_reason"]) == (False, "recurrent")


async def test_what_steps_waited_for_grammars_is_told(
    autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the millisecond, as the device says it."""
    plain = ScriptedDevice.stats
    monkeypatch.setattr(
        ScriptedDevice, "stats", lambda self: replace(plain(self), grammar_seconds=1.23456)
    )
    async with company() as (runtime, _):
        await run(runtime, ask(1, 2, 3))
        batch = runtime.stats()["batch"]
    assert isinstance(batch, dict)
    assert batch["grammar_wait_seconds"] == 1.235


def prompts(n: int, seed: int = 5) -> list[tuple[int, ...]]:
    """Prompts of mixed lengths, some of which share a prefix."""
    rng = random.Random(seed)
    shared = tuple(rng.randint(1, 9) for _ in range(40))
    return [
        shared[: rng.choice((0, 20, 40))]
        + tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 90)))
        for _ in range(n)
    ]


async def test_forty_at_once_say_what_each_says_alone(autojump_clock: object) -> None:
    """Rows that join, wait, share and leave in one batch get their solo text and reason."""
    device = ScriptedDevice(PLAIN, mixed)
    ends: dict[int, tuple[str, Finished | Failed]] = {}

    async def client(runtime: Runtime, i: int, prompt: tuple[int, ...]) -> None:
        await trio.sleep(0.013 * (i % 7))
        ends[i] = await run(runtime, ask(*prompt, max_tokens=4 + i))

    asked = prompts(40)
    async with company(device, batch=16, queue=64) as (runtime, _):
        async with trio.open_nursery() as nursery:
            for i, prompt in enumerate(asked):
                nursery.start_soon(client, runtime, i, prompt)
        await settle(runtime)
        nothing_left(runtime, device)
    for i, prompt in enumerate(asked):
        tokens, reason = solo(RowSpec(RowId(0), prompt, Sampling(), 4 + i), PLAIN, mixed)
        text, end = ends[i]
        assert text == words(tokens)
        assert isinstance(end, Finished)
        assert end.reason is reason
        assert end.usage.completion_tokens == len(tokens)


async def test_streams_closed_at_random_moments_leave_nothing_behind(
    autojump_clock: object,
) -> None:
    """Two hundred clients go whenever they like; counts return to the start, answers stay right."""
    device = ScriptedDevice(prefill_token_seconds=0.002)
    rng = random.Random(11)

    async def client(runtime: Runtime, prompt: tuple[int, ...], patience: float) -> None:
        with trio.move_on_after(patience):
            try:
                await run(runtime, ask(*prompt, max_tokens=30))
            except Overloaded:
                return

    async with company(device, batch=8, queue=24) as (runtime, _):
        before = await run(runtime, ask(*range(1, 50), max_tokens=9))
        for wave in range(5):
            async with trio.open_nursery() as nursery:
                for prompt in prompts(40, seed=wave):
                    nursery.start_soon(client, runtime, prompt, rng.random() * 1.5)
                    await trio.sleep(rng.random() * 0.01)
            await settle(runtime)
            nothing_left(runtime, device)
        after = await run(runtime, ask(*range(1, 50), max_tokens=9))
        assert after[0] == before[0]
        await settle(runtime)
        assert await runtime.clear_cache() > 0
        await trio.sleep(0.1)
        assert device.snapshots == {}


# ---- readers ------------------------------------------------------------------------------


async def test_text_is_merged_for_a_slow_reader_and_none_is_lost(autojump_clock: object) -> None:
    """What piled up comes in one event; slow or fast, the text is the same."""
    async with company() as (runtime, _), runtime.generate(ask(1, max_tokens=100)) as generation:
        await trio.sleep(0.5)
        first = await generation.next_event()
        rest, end = await read(generation)
    assert isinstance(first, TextDelta)
    assert len(first.text.split()) > 10
    assert first.text + rest == counted(1, 100)
    assert isinstance(end, Finished)


async def test_a_slow_reader_holds_nobody_up(autojump_clock: object) -> None:
    """A client that does not read delays neither the batch nor the end of its own row."""
    async with company() as (runtime, device), runtime.generate(ask(1, max_tokens=50)) as slow:
        began = trio.current_time()
        await run(runtime, ask(2, max_tokens=50))
        assert trio.current_time() - began < 1.0
        await settle(runtime)
        assert not device.rows
        assert (await read(slow))[0] == counted(1, 50)


async def test_a_client_that_reads_nothing_for_two_minutes_is_cut(autojump_clock: object) -> None:
    """Its row ends, and the stream says why after the text that was made."""
    device = ScriptedDevice(decode_seconds=1.0)
    async with company(device) as (runtime, _), runtime.generate(ask(1, max_tokens=500)) as stuck:
        await until(lambda: runtime.stats()["requests"] == {"active": 0}, pause=0.5)
        assert 119 < trio.current_time() < 130
        text, end = await read(stuck)
    assert isinstance(end, Failed)
    assert "120 s" in end.error.message
    assert text == counted(1, len(text.split()))


async def test_a_client_that_reads_now_and_then_is_not_cut(autojump_clock: object) -> None:
    """Only a reader that takes nothing at all for the whole time is gone."""
    device = ScriptedDevice(decode_seconds=1.0)
    async with company(device) as (runtime, _):
        text = ""
        async with runtime.generate(ask(1, max_tokens=400)) as generation:
            async for event in generation:
                text += event.text if isinstance(event, TextDelta) else ""
                await trio.sleep(100)
    assert text == counted(1, 400)


async def test_reading_one_channel_counts_as_reading(autojump_clock: object) -> None:
    """Text of another channel that has piled up behind it starts to wait anew."""
    device = speaker([THINK, *b"hm", END_THINK, *b"ok" * 200], CHAT_TOKENS)
    device.decode_seconds = 1.0
    tokenizer = ByteTokenizer(thinks=True)
    async with (
        company(device, tokenizer=lambda: tokenizer) as (runtime, _),
        runtime.generate(GenerationRequest(CHAT, max_tokens=300)) as generation,
    ):
        await trio.sleep(100)
        first = await generation.next_event()
        await trio.sleep(100)
        second = await generation.next_event()
        _, end = await read(generation)
    assert isinstance(first, TextDelta)
    assert first.channel is Channel.REASONING
    assert isinstance(second, TextDelta)
    assert second.channel is Channel.CONTENT
    assert isinstance(end, Finished)


# ---- disconnects --------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["WAITING", "LOOKING", "PREFILL", "DECODE"])
async def test_a_disconnect_ends_the_row_before_the_next_step(
    autojump_clock: object, phase: str
) -> None:
    """Wherever its row stands, it is in no step that is planned after the client has gone."""
    device = ScriptedDevice(prefill_token_seconds=0.01)
    prompt = tuple(range(1, 400))
    async with company(device, batch=2) as (runtime, _), trio.open_nursery() as nursery:
        others = 2 if phase == "WAITING" else 1
        for i in range(others):
            nursery.start_soon(run, runtime, ask(500 + i, max_tokens=300))
        await trio.sleep(0.1)
        core = runtime.cast.scheduler.core
        scope = trio.CancelScope()
        phases: set[str] = set()

        async def client() -> None:
            with scope:
                await run(runtime, ask(*prompt, max_tokens=300))

        def reached() -> bool:
            phases.update(row.phase.name for row in core._rows.values() if len(row.ids) > 100)
            return phase in phases

        if phase == "LOOKING":
            runtime.cast.cache._look_up = lambda message: None  # type: ignore[method-assign]
        nursery.start_soon(client)
        await until(reached)
        row = max(core._rows)
        planned = core._steps.ids[-1]
        scope.cancel()
        await trio.sleep(5)
        later = [plan for plan in device.plans if plan.step > planned]
        assert later
        for plan in later:
            assert row not in plan.decode
            assert row not in [part.row for part in plan.prefill]
        assert row not in core._rows
        assert row not in device.rows
        if phase in ("PREFILL", "DECODE"):
            _, end = await run(runtime, ask(*prompt, max_tokens=3))
            assert isinstance(end, Finished)
            assert end.usage.cached_tokens >= 16, "what it had computed is lost"
        nursery.cancel_scope.cancel()


async def test_a_retry_after_a_disconnect_goes_on_where_it_was(autojump_clock: object) -> None:
    """Nothing that was prefilled is computed twice."""
    device = ScriptedDevice(prefill_token_seconds=0.01)
    prompt = tuple(range(1, 900))
    async with company(device) as (runtime, _), trio.open_nursery() as nursery:
        nursery.start_soon(run, runtime, ask(999, max_tokens=2_000))
        await trio.sleep(0.1)
        with trio.move_on_after(6.0):
            await run(runtime, ask(*prompt))
        await trio.sleep(1)
        prefilled = runtime.cast.scheduler.core.stats().prefilled_tokens
        assert prefilled > 100
        text, end = await run(runtime, ask(*prompt))
        assert isinstance(end, Finished)
        assert end.usage.cached_tokens == prefilled
        assert runtime.cast.scheduler.core.stats().prefilled_tokens == 898
        assert text == counted(899, 5)
        nursery.cancel_scope.cancel()


async def test_a_second_turn_reuses_the_first(autojump_clock: object) -> None:
    """The history's state is taken whole: prompt and answer but for the last token."""
    async with company() as (runtime, _):
        history = tuple(range(100, 200))
        await run(runtime, ask(*history, max_tokens=20))
        await trio.sleep(1)
        answer = tuple(range(200, 220))
        _, end = await run(runtime, ask(*history, *answer, 7, 8, 9))
    assert isinstance(end, Finished)
    assert end.usage.cached_tokens == 119


async def test_a_stop_string_leaves_a_state_and_counts_as_finished(autojump_clock: object) -> None:
    """The row is ended by its client's text; what it computed serves the next turn."""
    async with company() as (runtime, device):
        text, end = await run(runtime, ask(*range(1, 41), max_tokens=50, stop=(" 45",)))
        await settle(runtime)
        stats = runtime.cast.scheduler.core.stats()
        nothing_left(runtime, device)
        assert len(device.snapshots) == 1
    assert text == counted(40, 4)
    assert isinstance(end, Finished)
    assert (end.reason, end.usage.completion_tokens) == (FinishReason.STOP, 5)
    assert (stats.finished, stats.cancelled) == (1, 0)


# ---- refusals -----------------------------------------------------------------------------


async def test_overload_is_refused_and_over_when_there_is_room(autojump_clock: object) -> None:
    """batch + queue are served; one more is told when to come back, and is then served."""
    async with company() as (runtime, device), trio.open_nursery() as nursery:
        for i in range(12):
            nursery.start_soon(run, runtime, ask(1 + i, max_tokens=50))
        await trio.sleep(0.1)
        for _ in range(100):
            with pytest.raises(Overloaded) as refused:
                await run(runtime, ask(99))
            assert refused.value.retry_after >= 1.0
        await settle(runtime)
        assert (await run(runtime, ask(1)))[0] == counted(1, 5)
        await settle(runtime)
        nothing_left(runtime, device)
        assert runtime.stats()["scheduler"]["refused"] == 100  # type: ignore[index]


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (ChatPrompt((Message("user", "x" * 60),)), "messages"),
        (TextPrompt("x" * 60), "prompt"),
        (TokenPrompt((5,) * 60), "prompt"),
    ],
)
async def test_a_prompt_that_fills_the_window_is_named_as_it_was_sent(
    prompt: Prompt, param: str, autojump_clock: object
) -> None:
    """The error points at the field that the client used, with both numbers."""
    device = ScriptedDevice(ModelInfo("s", 1000, 50, frozenset({0})))
    async with company(device, tokenizer=company_tokenizer) as (runtime, _):
        with pytest.raises(
            ContextLengthExceeded, match=r"has \d\d tokens.* is 50 tokens"
        ) as caught:
            await run(runtime, GenerationRequest(prompt))
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (ask(*[5] * 4096), ContextLengthExceeded),
        (ask(), InvalidRequest),
        (ask(1, max_tokens=0), InvalidRequest),
        (ask(1000), InvalidRequest),
        (
            GenerationRequest(TextPrompt("1"), SamplingRequest(temperature=float("nan"))),
            InvalidRequest,
        ),
        (GenerationRequest(ChatPrompt((Message("user", "1"),))), InvalidRequest),
    ],
)
async def test_a_bad_request_is_refused_before_anything_starts(
    autojump_clock: object, request_: GenerationRequest, error: type[Exception]
) -> None:
    """It raises at once, and neither scheduler nor device hear of it."""
    async with company() as (runtime, device):
        with pytest.raises(error):
            await run(runtime, request_)
        await settle(runtime)
        assert device.plans == []
        assert runtime.cast.scheduler.core.stats().submitted == 0
        nothing_left(runtime, device)


async def test_the_window_bounds_an_answer(autojump_clock: object) -> None:
    """At the end of the context window the row ends for its length."""
    async with company() as (runtime, _):
        text, end = await run(runtime, ask(*[5] * 4090, max_tokens=None))
    assert text == counted(5, 6)
    assert isinstance(end, Finished)
    assert end.reason is FinishReason.LENGTH


async def test_a_poisoned_row_fails_alone(autojump_clock: object) -> None:
    """Its client gets an error; its neighbours get their text."""
    device = ScriptedDevice()
    device.poisoned.add(RowId(2))
    ends: list[tuple[str, Finished | Failed]] = []

    async def client(runtime: Runtime, i: int) -> None:
        ends.append(await run(runtime, ask(i, max_tokens=30)))

    async with company(device) as (runtime, _):
        async with trio.open_nursery() as nursery:
            for i in range(4):
                nursery.start_soon(client, runtime, 10 * i + 1)
        await settle(runtime)
        nothing_left(runtime, device)
        assert runtime.health().status == "ok"
    failed = [end for _, end in ends if isinstance(end, Failed)]
    assert len(failed) == 1
    assert isinstance(failed[0].error, GenerationFailed)
    assert all(len(text.split()) == 30 for text, end in ends if isinstance(end, Finished))


# ---- the runtime's life -------------------------------------------------------------------


async def test_draining_lets_running_requests_end(autojump_clock: object) -> None:
    """New ones are refused, running ones finish, and drain says that it was in time."""
    async with company() as (runtime, _), runtime.generate(ask(1, max_tokens=100)) as generation:
        assert await runtime.drain(0.3) is False
        with pytest.raises(Unavailable):
            await run(runtime, ask(2))
        assert runtime.health().status == "degraded"
        assert await runtime.drain(30.0) is True
        assert (await read(generation))[0] == counted(1, 100)


async def test_draining_refuses_those_who_wait_for_the_model(autojump_clock: object) -> None:
    """A request that waited for the load does not start after admission was stopped."""
    worker = InlineWorker(ScriptedDevice(open_seconds=10))
    async with (
        open_runtime(SETTINGS, tokenizer=company_tokenizer, worker=worker) as runtime,
        trio.open_nursery() as nursery,
    ):

        async def client() -> None:
            with pytest.raises(Unavailable):
                await run(runtime, ask(1))

        nursery.start_soon(client)
        await trio.sleep(1)
        assert await runtime.drain(1.0) is True
    assert worker.device.plans == []


async def test_closing_ends_what_still_runs_with_an_error(autojump_clock: object) -> None:
    """A client outside of the runtime's block gets a last word."""
    async with trio.open_nursery() as nursery:
        ends: list[Finished | Failed] = []

        async def client(runtime: Runtime) -> None:
            ends.append((await run(runtime, ask(1, max_tokens=1000)))[1])

        async with company() as (runtime, _):
            nursery.start_soon(client, runtime)
            await trio.sleep(0.5)
    assert isinstance(ends[0], Failed)
    assert isinstance(ends[0].error, Unavailable)


async def test_figures_can_be_read_from_the_first_moment(autojump_clock: object) -> None:
    """Before anything has started, stats are zeros and health says loading."""
    worker = InlineWorker(ScriptedDevice(open_seconds=10))
    async with open_runtime(SETTINGS, tokenizer=company_tokenizer, worker=worker) as runtime:
        assert runtime.stats()["model"] is None
        assert runtime.health().status == "loading"
        await trio.sleep(1)
        assert runtime.health().status == "loading"
        await runtime.wait_ready()
        assert runtime.health().status == "ok"


async def test_a_model_that_cannot_be_loaded_ends_the_runtime(autojump_clock: object) -> None:
    """Whoever waits for it hears why, and the refusal leaves the block."""
    device = ScriptedDevice(open_seconds=1)
    device.fail_next = ModelError("its weights are torn")
    heard: list[str] = []

    async def client(runtime: Runtime) -> None:
        try:
            await run(runtime, ask(1))
        except Unavailable as error:
            heard.append(error.message)

    with pytest.RaisesGroup(pytest.RaisesGroup(pytest.RaisesGroup(ModelRefused))):
        async with open_runtime(
            SETTINGS, tokenizer=company_tokenizer, worker=InlineWorker(device)
        ) as runtime:
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(client, runtime)
                with pytest.raises(Unavailable, match="torn"):
                    await runtime.wait_ready()
                assert runtime.health().status == "failed"
                assert "torn" in runtime.health().reason
            assert len(heard) == 3
            await trio.sleep_forever()


async def test_a_tokenizer_that_cannot_be_loaded_ends_the_runtime(autojump_clock: object) -> None:
    """It is told like a model that cannot be loaded."""

    def broken() -> ByteTokenizer:
        raise ModelError("no tokenizer here")

    with pytest.RaisesGroup(ModelError):
        async with open_runtime(
            SETTINGS, tokenizer=broken, worker=InlineWorker(ScriptedDevice())
        ) as runtime:
            with pytest.raises(Unavailable, match="no tokenizer here"):
                await runtime.wait_ready()
            assert runtime.health().status == "failed"
            runtime.stats()
            await trio.sleep_forever()


# ---- text ---------------------------------------------------------------------------------


def company_tokenizer() -> Any:
    return ByteTokenizer()


def speaker(answer: list[int], prompt: int = 1) -> ScriptedDevice:
    """A device that says ``answer`` after a prompt of so many tokens, then an end token."""

    def script(ids: tuple[int, ...]) -> int:
        said = len(ids) - prompt
        return answer[said] if said < len(answer) else EOS

    model = ModelInfo("thinker", 300, 4096, frozenset({EOS}), namespace="t")
    return ScriptedDevice(model, script)


CHAT = ChatPrompt((Message("user", "x"),))
CHAT_TOKENS = len(b"user: x.\nassistant: ")


def text_request(text: str, max_tokens: int | None = None, **more: Any) -> GenerationRequest:
    return GenerationRequest(TextPrompt(text), max_tokens=max_tokens, **more)


async def test_reasoning_is_split_off(autojump_clock: object) -> None:
    """A thinking model's reasoning and answer come on their own channels, in order."""
    device = speaker([THINK, *b"so", END_THINK, *b"42"], CHAT_TOKENS)
    tokenizer = ByteTokenizer(thinks=True)
    async with (
        company(device, tokenizer=lambda: tokenizer) as (runtime, _),
        runtime.generate(GenerationRequest(CHAT)) as generation,
    ):
        events = [event async for event in generation]
    by_channel = dict.fromkeys(Channel, "")
    for event in events:
        if isinstance(event, TextDelta):
            by_channel[event.channel] += event.text
    assert by_channel == {Channel.REASONING: "so", Channel.CONTENT: "42"}
    assert isinstance(events[-1], Finished)
    assert events[-1].usage.completion_tokens == 7


async def test_a_stop_string_cuts_the_text(autojump_clock: object) -> None:
    """Nothing of it or after it is shown, and the row ends early."""
    device = speaker([*b"one two three"])
    async with company(device, tokenizer=company_tokenizer) as (runtime, _):
        text, end = await run(runtime, text_request("x", stop=("two",)))
        await settle(runtime)
        nothing_left(runtime, device)
    assert text == "one "
    assert isinstance(end, Finished)
    assert end.reason is FinishReason.STOP
    assert end.usage.completion_tokens == 7


async def test_a_stop_string_in_the_last_piece_of_text_is_a_stop(autojump_clock: object) -> None:
    """Text that only the end sets free is searched too, and its match is the reason given."""
    device = speaker([*b"ab", 0xE2, 0x82])
    async with company(device, tokenizer=company_tokenizer) as (runtime, _):
        text, end = await run(
            runtime, text_request("x", max_tokens=4, stop=("b\N{REPLACEMENT CHARACTER}",))
        )
    assert text == "a"
    assert isinstance(end, Finished)
    assert end.reason is FinishReason.STOP


async def test_the_next_turn_sent_at_once_finds_the_state_being_kept(
    autojump_clock: object,
) -> None:
    """A client that answers within the copy's step waits for it instead of computing all again."""
    device = ScriptedDevice(decode_seconds=0.05)
    async with company(device) as (runtime, _):
        first = tuple(range(100, 400))
        text, _ = await run(runtime, ask(*first, max_tokens=6))
        made = tuple(int(word) for word in text.split())
        _, end = await run(runtime, ask(*first, *made, 7, 8, 9))
        other = await run(runtime, ask(*first[:200], 5, 5))
    assert isinstance(end, Finished)
    assert end.usage.cached_tokens == len(first) + len(made) - 1
    assert isinstance(other[1], Finished)
    assert other[1].usage.cached_tokens == 200
