"""Grammars through the whole company: the byte tokenizer and a device that says what it likes."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import trio
from company import company, read, run, settle, until

from mlx_troupe.actors import grammars as compiling
from mlx_troupe.actors.testing import ScriptedDevice
from mlx_troupe.runtime.errors import InvalidRequest, Overloaded
from mlx_troupe.runtime.grammars import (
    ChoiceGrammar,
    ContextFreeGrammar,
    Grammar,
    JsonGrammar,
    RegexGrammar,
)
from mlx_troupe.runtime.model_info import ModelInfo
from mlx_troupe.runtime.requests import (
    Channel,
    ChatPrompt,
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    Message,
    SamplingRequest,
    TextDelta,
    TextPrompt,
)
from mlx_troupe.runtime.text.matching import GrammarCompiler
from mlx_troupe.runtime.text.testing import END_THINK, EOS, ByteTokenizer

MODEL = ModelInfo("scripted", 300, 4096, frozenset({EOS}), namespace="s")
NAMED = JsonGrammar(
    json.dumps(
        {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
            "required": ["name", "age"],
            "additionalProperties": False,
        }
    ),
    any_whitespace=False,
)
BEYOND = JsonGrammar('{"type": "array", "uniqueItems": true}', param="response_format")


def babble(ids: tuple[int, ...]) -> int:
    """Some token, another one after each text."""
    return (len(ids) * 7919 + sum(ids) * 31) % MODEL.vocab_size


def device(script: Callable[[tuple[int, ...]], int] = babble) -> ScriptedDevice:
    """A device for the byte tokenizer; it takes no time."""
    return ScriptedDevice(MODEL, script, decode_seconds=0.0, prefill_token_seconds=0.0)


def chat(grammar: Grammar | None, *messages: Message, **more: Any) -> GenerationRequest:
    """A chat whose answer has a grammar."""
    asked = messages or (Message("user", "Who?"),)
    more = {"max_tokens": 200, **more}
    return GenerationRequest(
        ChatPrompt(asked), SamplingRequest(temperature=0.0), grammar=grammar, **more
    )


async def test_an_answer_ends_with_stop_as_soon_as_it_is_complete() -> None:
    """Nothing of the device's babble is left, and no end token is waited for."""
    async with company(device(), tokenizer=ByteTokenizer()) as (runtime, scripted):
        text, end = await run(runtime, chat(NAMED))
        await settle(runtime)
        value = json.loads(text)
        assert set(value) == {"name", "age"}
        assert isinstance(end, Finished)
        assert end.reason is FinishReason.STOP
        assert end.usage.completion_tokens == len(text.encode())
        assert not scripted.rows


async def test_an_answer_that_is_cut_ends_with_length() -> None:
    """The limit holds, and a complete answer of exactly that length ends with stop."""
    exact = ChoiceGrammar(("abcde",))
    async with company(device(), tokenizer=ByteTokenizer()) as (runtime, _):
        text, end = await run(runtime, chat(exact, max_tokens=4))
        assert isinstance(end, Finished)
        assert (text, end.reason) == ("abcd", FinishReason.LENGTH)
        text, end = await run(runtime, chat(exact, max_tokens=5))
        assert isinstance(end, Finished)
        assert (text, end.reason) == ("abcde", FinishReason.STOP)


async def test_many_rows_with_and_without_grammars_share_the_company() -> None:
    """Twelve requests over four places, every second one with another choice."""
    results: dict[int, str] = {}
    async with company(device(), tokenizer=ByteTokenizer()) as (runtime, _):

        async def ask(n: int) -> None:
            grammar = ChoiceGrammar((f"no {n}", f"yes {n}")) if n % 2 else None
            results[n] = (await run(runtime, chat(grammar, Message("user", f"{n}?"))))[0]

        async with trio.open_nursery() as nursery:
            for n in range(12):
                nursery.start_soon(ask, n)
    assert all(results[n] in (f"no {n}", f"yes {n}") for n in range(1, 12, 2))
    assert not any(results[n].startswith(("no", "yes")) for n in range(0, 12, 2))


@pytest.mark.parametrize("opened", [True, False])
async def test_reasoning_is_free_and_the_content_follows_the_grammar(opened: bool) -> None:
    """The model thinks what it likes, closes the block, and then has to answer."""
    thought = b"Well, {1}. Hm"
    opening = b"" if opened else b"<think>"

    def think(ids: tuple[int, ...]) -> int:
        said = bytes(i for i in ids if i < 256).rpartition(b"assistant: ")[2].lstrip(b"\n")
        plan = [*opening, *thought, END_THINK]
        return plan[len(said)] if len(said) < len(plan) else babble(ids)

    request = GenerationRequest(
        ChatPrompt((Message("user", "Who?"),), {"think": opened}),
        SamplingRequest(temperature=0.0),
        max_tokens=300,
        grammar=NAMED,
    )
    parts = dict.fromkeys(Channel, "")
    async with (
        company(device(think), tokenizer=ByteTokenizer(thinks=True)) as (runtime, _),
        runtime.generate(request) as generation,
    ):
        async for event in generation:
            if isinstance(event, TextDelta):
                parts[event.channel] += event.text
        assert isinstance(event, Finished)
    assert parts[Channel.REASONING] == thought.decode()
    assert set(json.loads(parts[Channel.CONTENT])) == {"name", "age"}


async def test_a_grammar_beyond_the_engine_is_asked_for_in_words() -> None:
    """The client is warned, and the model is told: after the system message's own words."""
    system = (Message("system", "Be brief."), Message("user", "Who?"))
    async with company(device(), tokenizer=ByteTokenizer()) as (runtime, scripted):
        for messages in ((Message("user", "Who?"),), system):
            async with runtime.generate(chat(BEYOND, *messages, max_tokens=3)) as generation:
                assert isinstance((await read(generation))[1], Finished)
                assert len(generation.warnings) == 1
                assert generation.warnings[0].startswith("response_format is not enforced: ")
                assert "uniqueItems" in generation.warnings[0]
        started = [start for plan in scripted.plans for start in plan.start]
    first, second = (bytes(i for i in start.ids if i < 256).decode() for start in started)
    assert first.startswith("system: Answer with JSON")
    assert '"uniqueItems": true' in first
    assert second.startswith("system: Be brief.\n\nAnswer with JSON")
    assert all(start.matcher is None for start in started)


@pytest.mark.parametrize(("size", "told"), [(1_000, True), (3_000, False), (6_000, False)])
async def test_words_that_would_fill_the_window_are_left_out(size: int, told: bool) -> None:
    """They may take half of what the chat leaves of it; the client is warned in any case."""
    long = JsonGrammar(json.dumps({"uniqueItems": True, "title": "t" * size}))
    async with company(device(), tokenizer=ByteTokenizer()) as (runtime, scripted):
        async with runtime.generate(chat(long, max_tokens=3)) as generation:
            assert isinstance((await read(generation))[1], Finished)
            assert len(generation.warnings) == 1
        (start,) = [start for plan in scripted.plans for start in plan.start]
    assert (b"t" * size in bytes(i for i in start.ids if i < 256)) is told


async def test_a_format_that_is_not_enforced_is_told_and_the_rest_is_enforced() -> None:
    """The client is warned; the model is told nothing, for it cannot break what is enforced."""
    loose = JsonGrammar(
        '{"type": "string", "format": "regex", "maxLength": 3}', param="guided_json"
    )
    async with company(device(), tokenizer=ByteTokenizer()) as (runtime, scripted):
        async with runtime.generate(chat(loose)) as generation:
            text, end = await read(generation)
            assert isinstance(end, Finished)
            assert end.reason is FinishReason.STOP
            assert len(json.loads(text)) <= 3
            assert generation.warnings == ("guided_json: not enforced as format: regex",)
        (start,) = [start for plan in scripted.plans for start in plan.start]
    assert bytes(i for i in start.ids if i < 256).decode().startswith("user: Who?")


async def test_a_raw_completion_is_warned_only() -> None:
    """There is nobody in a text to give an instruction to."""
    request = GenerationRequest(TextPrompt("Once"), max_tokens=3, grammar=BEYOND)
    async with company(device(), tokenizer=ByteTokenizer()) as (runtime, scripted):
        async with runtime.generate(request) as generation:
            assert isinstance((await read(generation))[1], Finished)
            assert generation.warnings
        starts = [start.ids for plan in scripted.plans for start in plan.start]
    assert starts == [tuple(b"Once")]


async def test_what_is_no_schema_starts_nothing() -> None:
    """It is the client's fault, by name, before anything is queued."""
    bad = JsonGrammar('{"type": "nope"}', param="guided_json")
    async with company(device(), tokenizer=ByteTokenizer()) as (runtime, scripted):
        with pytest.raises(InvalidRequest) as caught:
            async with runtime.generate(chat(bad)):
                raise AssertionError("it was admitted")
        assert caught.value.param == "guided_json"
        assert not scripted.plans


async def test_a_grammar_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request goes on without, and says so; the thread ends in its own time."""
    monkeypatch.setattr(compiling, "COMPILE_SECONDS", 0.0)
    given_up = threading.Event()
    compiled = GrammarCompiler.compile

    def compile_late(*args: Any) -> Any:
        assert given_up.wait(10), "the request waits for the thread"
        return compiled(*args)

    monkeypatch.setattr(GrammarCompiler, "compile", compile_late)
    async with company(device(), tokenizer=ByteTokenizer()) as (runtime, _):
        async with runtime.generate(chat(RegexGrammar("a+"), max_tokens=3)) as generation:
            assert isinstance((await read(generation))[1], Finished)
            assert "longer than" in generation.warnings[0]
        given_up.set()


async def test_a_grammar_is_not_given_up_for_the_time_that_others_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While all threads are taken it waits; when they are for too long it is told to come again."""
    monkeypatch.setattr(compiling, "WAIT_SECONDS", 0.0)
    async with company(device(), tokenizer=ByteTokenizer()) as (runtime, _):
        threads = runtime._tools.grammars.threads
        others = [object() for _ in range(compiling.COMPILING)]
        for other in others:
            threads.acquire_on_behalf_of_nowait(other)
        with pytest.raises(Overloaded):
            async with runtime.generate(chat(RegexGrammar("a+"), max_tokens=3)):
                raise AssertionError("it was admitted")
        monkeypatch.setattr(compiling, "WAIT_SECONDS", math.inf)
        monkeypatch.setattr(compiling, "COMPILE_SECONDS", math.inf)

        async def ask() -> None:
            async with runtime.generate(chat(RegexGrammar("a+"), max_tokens=3)) as generation:
                assert set((await read(generation))[0]) == {"a"}
                assert not generation.warnings

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await until(lambda: threads.statistics().tasks_waiting == 1)
            threads.release_on_behalf_of(others[0])


async def test_a_matcher_that_fails_is_its_own_request_s_failure() -> None:
    """A thread of the engine that breaks is an error, never free text; the others go on."""
    scripted = ScriptedDevice(MODEL, babble)
    async with company(scripted, tokenizer=ByteTokenizer()) as (runtime, _):
        async with (
            runtime.generate(chat(RegexGrammar("[a-z]{500}"), max_tokens=None)) as failing,
            runtime.generate(chat(NAMED)) as whole,
        ):
            assert isinstance(await failing.next_event(), TextDelta)
            matcher = scripted.rows[min(scripted.rows)].matcher
            assert matcher is not None
            assert not matcher.engine.consume_token(ord("{"))
            text, end = await read(failing)
            assert isinstance(end, Failed)
            text, end = await read(whole)
            assert isinstance(end, Finished)
            assert set(json.loads(text)) == {"name", "age"}


async def test_a_grammar_that_grows_too_large_is_the_client_s_fault_by_name() -> None:
    """The answer up to there is told; the others go on, and so does the company."""
    wide = "|".join(f'"x{n}"' for n in range(2100))
    beyond = ContextFreeGrammar(f'start: "well, " list\nlist: {wide}', "guided_grammar")
    async with (
        company(device(), tokenizer=ByteTokenizer()) as (runtime, scripted),
        runtime.generate(chat(beyond)) as failing,
        runtime.generate(chat(NAMED)) as whole,
    ):
        text, end = await read(failing)
        assert text == "well,"
        assert isinstance(end, Failed)
        assert isinstance(end.error, InvalidRequest)
        assert end.error.param == "guided_grammar"
        text, end = await read(whole)
        assert isinstance(end, Finished)
        assert set(json.loads(text)) == {"name", "age"}
        assert isinstance((await run(runtime, chat(NAMED)))[1], Finished)
        await settle(runtime)
        assert not scripted.rows


async def test_a_client_that_leaves_takes_its_grammar_along() -> None:
    """Also while it is still being compiled."""
    async with company(device(), tokenizer=ByteTokenizer()) as (runtime, scripted):
        with trio.move_on_after(0):
            async with runtime.generate(chat(NAMED)):
                raise AssertionError("nobody waited")
        async with runtime.generate(chat(RegexGrammar("a+"), max_tokens=None)) as generation:
            await generation.next_event()
        await settle(runtime)
        assert not scripted.rows


async def test_tokens_and_logits_need_not_be_the_same_in_number() -> None:
    """A model with more logits than tokens, one with fewer, and end tokens that only it knows."""
    for size, ends in ((1000, frozenset({EOS})), (200, frozenset({7})), (300, frozenset({7, EOS}))):
        model = ModelInfo("scripted", size, 4096, ends, namespace="s")
        scripted = ScriptedDevice(model, babble, decode_seconds=0.0, prefill_token_seconds=0.0)
        async with company(scripted, tokenizer=ByteTokenizer()) as (runtime, _):
            text, end = await run(runtime, chat(NAMED))
            assert isinstance(end, Finished)
            assert set(json.loads(text)) == {"name", "age"}


async def test_the_tokens_are_read_while_the_model_loads() -> None:
    """Not by the first request, whose neighbours would have to wait."""
    async with company(device(), tokenizer=lambda: ByteTokenizer()) as (runtime, _):
        tools = runtime._tools
        assert tools is not None
        (compiler,) = tools.grammars._compilers.values()
        assert compiler._vocabulary is not None
        await run(runtime, chat(NAMED))
        assert list(tools.grammars._compilers.values()) == [compiler]
