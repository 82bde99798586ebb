"""Log-probabilities over HTTP: both shapes, whole and streamed, one entry per generated token."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
import trio
from company import company, settle

from mlx_troupe.actors.testing import ScriptedDevice
from mlx_troupe.http.app import create_app
from mlx_troupe.http.seams import HttpSettings
from mlx_troupe.http.testing import MODEL, serving
from mlx_troupe.http.wire.chat import chat_call
from mlx_troupe.http.wire.completions import CompletionShape
from mlx_troupe.runtime.errors import InvalidRequest
from mlx_troupe.runtime.model_info import ModelInfo
from mlx_troupe.runtime.plans import TokenLogprobs
from mlx_troupe.runtime.requests import Channel, Finished, FinishReason, TextDelta, Usage
from mlx_troupe.runtime.text.scores import newline_ids, scored_token
from mlx_troupe.runtime.text.testing import END_THINK, EOS, THINK, ByteTokenizer

SAYS = (THINK, *b"hm", END_THINK, *"aé€!".encode(), EOS)
"""Reasoning, then characters of one, two and three bytes, then the end token."""
TEXT, THOUGHT = "aé€!", "hm"
BYTES = ModelInfo("scripted", 300, 4096, frozenset({EOS}), namespace="s")


def script_of(answer: tuple[int, ...], prompt: int) -> Callable[[tuple[int, ...]], int]:
    """A model that says ``answer`` after ``prompt`` tokens, whatever they are."""
    return lambda ids: answer[min(len(ids) - prompt, len(answer) - 1)]


@asynccontextmanager
async def served(answer: tuple[int, ...] = SAYS) -> AsyncIterator[openai.OpenAI]:
    """The official client, in front of a company that answers any one-token prompt."""
    device = ScriptedDevice(BYTES, script_of(answer, 1))
    tokenizer = ByteTokenizer(thinks=True)
    async with (
        company(device, tokenizer=tokenizer) as (runtime, _),
        serving(create_app(runtime, HttpSettings(port=0))) as url,
    ):
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        await settle(runtime)


async def on_thread(call: Callable[[], Any]) -> Any:
    """Run a blocking client beside the server."""
    return await trio.to_thread.run_sync(call)


async def test_a_text_completion_has_an_entry_for_each_token() -> None:
    """The legacy lists: equal lengths, falling alternatives, offsets into the text."""
    async with served() as client:
        reply = await on_thread(
            lambda: client.completions.create(model="m", prompt=[7], temperature=0, logprobs=3)
        )
    choice = reply.choices[0]
    lists = choice.logprobs
    count = reply.usage.completion_tokens
    assert count == len(SAYS)
    assert [len(x) for x in (lists.tokens, lists.token_logprobs, lists.text_offset)] == [count] * 3
    assert lists.token_logprobs == [-1.0 - n for n in range(1, count + 1)]
    assert lists.tokens[4] == "a"
    assert choice.text[lists.text_offset[4]] == "a"
    assert lists.top_logprobs[4] == {"a": -6.0, "b": -6.5, "c": -7.0}


async def test_streamed_completions_lose_no_entry() -> None:
    """Chunks carry the tokens that they hold, and together the same lists as a whole answer."""
    async with served() as client:

        def both() -> tuple[Any, list[Any]]:
            asked: dict[str, Any] = {"model": "m", "prompt": [7], "temperature": 0, "logprobs": 2}
            whole = client.completions.create(**asked)
            return whole, list(client.completions.create(**asked, stream=True))

        whole, chunks = await on_thread(both)
    blocks = [c.choices[0].logprobs for c in chunks if c.choices and c.choices[0].logprobs]
    assert len(blocks) > 1
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        together = [item for block in blocks for item in getattr(block, name)]
        assert together == getattr(whole.choices[0].logprobs, name)


@pytest.mark.parametrize("top", [None, 0, -1, 4])
async def test_a_chat_has_an_entry_for_each_token(top: int | None) -> None:
    """Reasoning and end tokens too, with ids and bytes; alternatives only when asked for."""
    prompt = ByteTokenizer(thinks=True)
    length = len(prompt.encode(prompt.render([USER]), add_special_tokens=False))
    device = ScriptedDevice(BYTES, script_of(SAYS, length))
    async with (
        company(device, tokenizer=prompt) as (runtime, _),
        serving(create_app(runtime, HttpSettings(port=0))) as url,
    ):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        asked: dict[str, Any] = {"model": "m", "messages": [USER], "logprobs": True}
        asked |= {} if top is None else {"top_logprobs": top}
        whole = await on_thread(lambda: client.chat.completions.create(**asked))
        chunks = await on_thread(lambda: list(client.chat.completions.create(**asked, stream=True)))
    choice = whole.choices[0]
    entries = choice.logprobs.content
    assert choice.message.content == TEXT
    assert [entry.id for entry in entries] == list(SAYS)
    assert [entry.bytes for entry in entries][:2] == [list(b"<think>"), [ord("h")]]
    assert entries[-1].bytes is None
    visible = [byte for entry in entries[4:-1] for byte in entry.bytes]
    assert bytes(visible).decode() == TEXT
    wanted = max(0, top or 0)
    for entry in entries:
        assert len(entry.top_logprobs) == wanted
        figures = [other.logprob for other in entry.top_logprobs]
        assert figures == sorted(figures, reverse=True)
        assert not wanted or entry.top_logprobs[0].logprob == entry.logprob
    streamed = [
        entry
        for chunk in chunks
        if chunk.choices and chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [e.model_dump() for e in streamed] == [e.model_dump() for e in entries]


USER: dict[str, object] = {"role": "user", "content": "hi"}


async def test_nobody_gets_what_he_did_not_ask_for() -> None:
    """Without the field there is no block, and the row asks the device for nothing."""
    device = ScriptedDevice(BYTES, script_of(SAYS, 1))
    async with (
        company(device, tokenizer=ByteTokenizer()) as (runtime, _),
        serving(create_app(runtime, HttpSettings(port=0))) as url,
    ):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        reply = await on_thread(lambda: client.completions.create(model="m", prompt=[7]))
    assert reply.choices[0].logprobs is None
    assert [start.logprobs for plan in device.plans for start in plan.start] == [None]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 12}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 1.5}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"logprobs": "true"}, "logprobs"),
    ],
)
def test_what_a_chat_may_not_ask(fields: dict[str, Any], param: str) -> None:
    """Numbers without the boolean, out of range or of another type are refused by name."""
    with pytest.raises(InvalidRequest) as caught:
        chat_call({"messages": [USER], **fields}, MODEL)
    assert caught.value.param == param


def test_what_a_chat_may_ask() -> None:
    """0 and -1 are no alternatives; without the boolean they ask for nothing."""
    for fields, wanted in (
        ({}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": -1}, 0),
        ({"logprobs": True, "top_logprobs": 11}, 11),
        ({"logprobs": False, "top_logprobs": 0}, None),
    ):
        assert chat_call({"messages": [USER], **fields}, MODEL).request.logprobs == wanted


def test_an_impossible_token_is_still_json() -> None:
    """Minus infinity, which JSON has not, is -9999; a half character is a replacement."""
    tokenizer = ByteTokenizer()
    score = scored_token(tokenizer, 0xC3, TokenLogprobs(-math.inf, ((EOS, -0.5), (65, -1.0))))
    shape = CompletionShape("id", 0, "m", False)
    chunk = shape.delta(TextDelta(Channel.CONTENT, "x", (score,)))
    block = chunk.choices[0].logprobs
    assert block is not None
    assert block.token_logprobs == (-9999.0,)
    assert block.tokens == ("\ufffd",)
    end = shape.closing(Finished(FinishReason.STOP, Usage(1, 2, 0, "batched"), (score, score)))
    after = end.choices[0].logprobs
    assert after is not None
    assert after.text_offset == (1, 2)


def test_the_tokenizer_knows_its_line_breaks() -> None:
    """The ids that spell exactly a line break."""
    assert newline_ids(ByteTokenizer(("\n\n",))) == {10}
