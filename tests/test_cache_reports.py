"""Faults that others' prompt caches had, each in its smallest form (``CACHE-…``, ``MEM-…``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from company import WordTokenizer, ask, company, counted, run
from tiny import make_checkpoint, prompt

from mlx_troupe.actors.system import open_runtime
from mlx_troupe.http.app import create_app
from mlx_troupe.runtime.engine import states
from mlx_troupe.runtime.requests import Finished, GenerationRequest, SamplingRequest, TokenPrompt
from mlx_troupe.runtime.settings import Settings
from mlx_troupe.runtime.text.testing import ByteTokenizer

QUESTIONS = 12
SHARED = prompt(100, 1)


def question(number: int) -> GenerationRequest:
    """One of twelve over the same hundred tokens."""
    ids = (*SHARED, *prompt(10 + number, 50 + number))
    return GenerationRequest(TokenPrompt(ids), SamplingRequest(temperature=0.0), max_tokens=12)


async def answers(folder: Path, order: list[list[int]], **settings: Any) -> dict[int, set[str]]:
    """What each question is answered; each inner list is asked at once."""
    said: dict[int, set[str]] = {number: set() for number in range(QUESTIONS)}

    async def one(number: int) -> None:
        text, end = await run(runtime, question(number))
        assert isinstance(end, Finished)
        said[number].add(text)

    path = Settings(folder, "tiny", batch=QUESTIONS, **settings)
    async with open_runtime(path, tokenizer=WordTokenizer()) as runtime:
        for together in order:
            async with trio.open_nursery() as nursery:
                for number in together:
                    nursery.start_soon(one, number)
    return said


@pytest.mark.mlx
@pytest.mark.parametrize("family", ["llama", "sliding", "lfm2"])
@pytest.mark.parametrize("budget", [1 << 30, 100_000], ids=["roomy", "crowded"])
async def test_questions_over_one_prefix_are_answered_as_without_a_cache(
    tmp_path: Path, family: str, budget: int
) -> None:
    """One after another, all at once, and again: nothing of one shows up in another.

    (CACHE-04, 05, 06, 08.) In a crowded cache states are evicted that others still read.
    """
    folder = make_checkpoint(tmp_path, family)
    one_by_one = [[number] for number in range(QUESTIONS)]
    cold = await answers(folder, one_by_one, prompt_cache_bytes=0)
    assert len(set.union(*cold.values())) > QUESTIONS // 2
    rounds = [*one_by_one, list(range(QUESTIONS)), list(range(0, QUESTIONS, 2)), *one_by_one]
    assert await answers(folder, rounds, prompt_cache_bytes=budget) == cold


async def test_a_full_cache_under_load_stalls_nobody(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Five hundred prompts, two at a time, through room for three; then a small one (CACHE-13)."""
    async with company(prompt_cache_bytes=150, batch=2) as (runtime, _):

        async def client(first: int) -> None:
            for number in range(first, 500, 2):
                ids = (*range(1, 1 + number % 37), *range(100 + number % 11, 130))
                text, _ = await run(runtime, ask(*ids, max_tokens=3))
                assert text == counted(129, 3)

        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client, 0)
            nursery.start_soon(client, 1)
        assert runtime.cast.cache.core.stats().evictions > 100
        each = (trio.current_time() - began) / 250
        with trio.fail_after(10 * each):
            await run(runtime, ask(5, 6, 7, max_tokens=4))


async def chat(client: Any, **body: Any) -> dict[str, Any]:
    """The usage of a chat's answer, with its explanation."""
    reply = await client.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "how are you"}], "max_tokens": 3, **body},
        headers={"X-Cache-Explain": "1"},
    )
    answer = await reply.get_json()
    assert reply.status_code == 200, answer
    usage: dict[str, Any] = answer["usage"]
    return usage


def cached(usage: dict[str, Any]) -> int:
    """How many of the prompt's tokens were not computed."""
    found: int = usage["prompt_tokens_details"]["cached_tokens"]
    return found


async def test_settings_of_a_template_share_what_they_leave_alone(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Thinking off, on, off: reused up to the first token that differs, and told so (CACHE-12)."""
    tokenizer = ByteTokenizer(thinks=True)
    async with company(tokenizer=tokenizer) as (runtime, _):
        client = create_app(runtime).test_client()
        plain = await chat(client)
        thinks = await chat(client, chat_template_kwargs={"think": True})
        assert cached(thinks) == plain["prompt_tokens"]
        again = await chat(client)
        assert cached(again) == plain["prompt_tokens"] - 1
        assert again["cache"]["reason"] is None
        other = await chat(client, messages=[{"role": "user", "content": "how old are you"}])
        assert cached(other) == len("user: how ")
        told = other["cache"]
        assert (told["reason"], told["before"], told["after"]) == ("text", "er: how ", "old are ")
        turned = [("system", "be kind"), ("user", "how are you")]
        await chat(client, messages=[{"role": r, "content": c} for r, c in turned])
        turned = [("system", "be kind and brief"), ("user", "how are you")]
        moved = await chat(client, messages=[{"role": r, "content": c} for r, c in turned])
        assert cached(moved) == len("system: be kind")
        assert moved["cache"]["after"] == " and bri"


async def test_a_hit_does_not_change_what_is_counted(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The prompt is as long as it is, whoever computed it (CACHE-14)."""
    async with company(tokenizer=ByteTokenizer()) as (runtime, _):
        client = create_app(runtime).test_client()
        cold, warm = await chat(client), await chat(client)
        for usage in (cold, warm):
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            assert usage["prompt_tokens"] == cold["prompt_tokens"]
        assert (cached(cold), cached(warm)) == (0, cold["prompt_tokens"] - 1)


@pytest.mark.mlx
async def test_a_state_that_there_is_no_memory_for_costs_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy after the last token fails: the answer is whole, and so is the next (MEM-07)."""
    folder = make_checkpoint(tmp_path)
    async with open_runtime(Settings(folder, "tiny"), tokenizer=WordTokenizer()) as runtime:
        whole, end = await run(runtime, question(0))
        assert isinstance(end, Finished)
        await runtime.cast.scheduler.copied()
        await runtime.clear_cache()

        def refuse(caches: list[Any]) -> list[Any]:
            raise RuntimeError("[malloc] Unable to allocate 1 bytes")

        with monkeypatch.context() as patch:
            patch.setattr(states, "clone_all", refuse)
            for _ in range(2):
                text, end = await run(runtime, question(0))
                assert text == whole
                assert isinstance(end, Finished)
                assert end.usage.cached_tokens == 0
                await runtime.cast.scheduler.copied()
        assert (await run(runtime, question(0)))[0] == whole
        assert runtime.cast.supervisor.crashes.get("gpu", 0) == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_over_the_window_is_refused_before_any_stream(
    stream: bool, autojump_clock: trio.testing.MockClock
) -> None:
    """With both numbers; nothing is cut away in silence (MEM-03, 04, 05)."""
    async with company() as (runtime, _):
        window = runtime.model.context_window if runtime.model else None
        assert window
        body = {"prompt": [5] * (window + 1), "stream": stream}
        reply = await create_app(runtime).test_client().post("/v1/completions", json=body)
        error = (await reply.get_json())["error"]
        assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
        assert str(window) in error["message"].replace(",", "")
        assert str(window + 1) in error["message"].replace(",", "")
