"""Streams over a real server on loopback: framing, errors, keepalives, slow readers."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import httpx
import openai
import pytest
import trio

from mlx_troupe.http.app import create_app
from mlx_troupe.http.seams import HttpSettings
from mlx_troupe.http.testing import USAGE, Flood, ScriptedRuntime, Wait, said, serving, thought
from mlx_troupe.runtime.errors import GenerationFailed, Overloaded, Unavailable
from mlx_troupe.runtime.requests import Channel, Failed, Finished, FinishReason, TextDelta

LOOPBACK = HttpSettings(port=0)
CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"stream": True, "messages": [{"role": "user", "content": "hi"}]}


def blocks(body: str) -> list[str]:
    """The blocks of an event stream, strictly: each ends with an empty line."""
    assert body.endswith("\n\n")
    return body.removesuffix("\n\n").split("\n\n")


def chunks(body: str) -> list[dict[str, Any]]:
    """The JSON of every data block but the last, which must be the only [DONE]."""
    *events, last = [b for b in blocks(body) if not b.startswith(":")]
    assert last == "data: [DONE]"
    assert "data: [DONE]" not in events
    assert all(e.startswith("data: ") and "\n" not in e for e in events)
    return [json.loads(e.removeprefix("data: ")) for e in events]


async def post(runtime: ScriptedRuntime, path: str, body: dict[str, Any]) -> httpx.Response:
    """One request to a fresh server."""
    async with (
        serving(create_app(runtime, LOOPBACK)) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        return await client.post(path, json=body)


async def test_chat_stream_order() -> None:
    """Role, reasoning, content, finish reason, [DONE]; one id throughout; no usage unasked."""
    runtime = ScriptedRuntime((thought("hm"), *said("Hel", "lo\n\nworld")))
    reply = await post(runtime, CHAT, ASK)
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-store"
    assert reply.headers["x-accel-buffering"] == "no"
    events = chunks(reply.text)
    deltas = [e["choices"][0]["delta"] for e in events]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"reasoning": "hm", "reasoning_content": "hm"},
        {"content": "Hel"},
        {"content": "lo\n\nworld"},
        {},
    ]
    assert [e["choices"][0]["finish_reason"] for e in events] == [None] * 4 + ["stop"]
    assert len({(e["id"], e["created"], e["model"], e["object"]) for e in events}) == 1
    assert events[0]["model"] == "org/tiny-model"
    assert all("usage" not in e for e in events)


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
async def test_no_usage_unless_asked(options: dict[str, Any] | None) -> None:
    """Empty, null and false stream options are all 'no usage'."""
    reply = await post(ScriptedRuntime(), CHAT, {**ASK, "stream_options": options})
    assert all("usage" not in e for e in chunks(reply.text))


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_usage_trailer(path: str) -> None:
    """Asked for, usage comes once, after the finish reason, without choices; else it is null."""
    body = {**ASK, "prompt": "hi", "stream_options": {"include_usage": True}}
    *events, trailer = chunks((await post(ScriptedRuntime(), path, body)).text)
    assert all(e["usage"] is None for e in events)
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert trailer["choices"] == []
    assert trailer["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 2},
        "lane": "batched",
    }


async def test_completion_stream() -> None:
    """Text chunks, then the reason, in the text completion shape."""
    runtime = ScriptedRuntime(said("a", "b", reason=FinishReason.LENGTH))
    events = chunks((await post(runtime, "/v1/completions", {"prompt": "x", "stream": True})).text)
    assert [e["choices"][0]["text"] for e in events] == ["a", "b", ""]
    assert [e["choices"][0]["finish_reason"] for e in events] == [None, None, "length"]
    assert {e["object"] for e in events} == {"text_completion"}


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ((Failed(GenerationFailed("row lost")),), "row lost"),
        ((GenerationFailed("row lost"),), "row lost"),
        ((RuntimeError("secret detail"),), "internal error"),
    ],
)
async def test_failure_in_mid_stream(script: tuple[Any, ...], message: str) -> None:
    """A failing stream ends with one error event and no [DONE]; our own faults keep quiet."""
    runtime = ScriptedRuntime((*said("Hel")[:1], *script))
    reply = await post(runtime, CHAT, ASK)
    last = blocks(reply.text)[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == message
    assert "[DONE]" not in reply.text
    assert "Hel" in reply.text
    assert runtime.active == 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("refusal", "status", "code", "retry"),
    [
        (Overloaded("the queue is full", retry_after=2.2), 429, "queue_full", "3"),
        (Unavailable("loading failed"), 503, "engine_unavailable", "5"),
        (RuntimeError("secret detail"), 500, "internal_error", None),
    ],
)
async def test_refusal_before_a_stream(
    stream: bool, refusal: Exception, status: int, code: str, retry: str | None
) -> None:
    """What the runtime refuses is a plain JSON error, streamed or not."""
    reply = await post(ScriptedRuntime(refuse=refusal), CHAT, {**ASK, "stream": stream})
    assert reply.status_code == status
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers.get("retry-after") == retry
    assert reply.json()["error"]["code"] == code
    assert "secret" not in reply.text


async def test_failure_without_a_stream() -> None:
    """A generation that fails is a 500 with the message only."""
    runtime = ScriptedRuntime((*said("Hel")[:1], Failed(GenerationFailed("row lost"))))
    reply = await post(runtime, CHAT, {**ASK, "stream": False})
    assert reply.status_code == 500
    assert reply.json()["error"] == {
        "message": "row lost",
        "type": "server_error",
        "param": None,
        "code": "generation_failed",
    }


async def test_keepalives_fill_silence() -> None:
    """Comments come before the first token and in gaps, in blocks of their own."""
    first, second = Wait(), Wait()
    runtime = ScriptedRuntime((first, *said("a")[:1], second, *said("b")))
    app = create_app(runtime, HttpSettings(port=0, keepalive_interval=0.02))
    body = ""
    async with (
        serving(app) as url,
        httpx.AsyncClient(base_url=url) as client,
        client.stream("POST", CHAT, json=ASK) as reply,
    ):
        async for text in reply.aiter_text():
            body += text
            if body.count(": keepalive\n\n") >= 2:
                first.gate.set()
            if '"a"' in body and body.rpartition('"a"')[2].count(": keepalive\n\n") >= 2:
                second.gate.set()
    events = chunks(body)
    assert [e["choices"][0]["delta"].get("content") for e in events] == ["", "a", "b", None]
    assert all(b == ": keepalive" for b in blocks(body) if b.startswith(":"))


async def test_keepalives_can_be_off() -> None:
    """With an interval of 0 there is never a comment."""
    gate = Wait()
    app = create_app(
        ScriptedRuntime((gate, *said("a"))), HttpSettings(port=0, keepalive_interval=0)
    )
    async with (
        serving(app) as url,
        httpx.AsyncClient(base_url=url) as client,
        client.stream("POST", CHAT, json=ASK) as reply,
    ):
        with trio.move_on_after(0.1):
            async for text in reply.aiter_text():
                assert ": " not in text.replace('": ', "").replace("data: ", "")
        gate.gate.set()


async def test_official_sdk_reads_streams() -> None:
    """The openai package parses chat and text streams unchanged, usage and reasoning included."""
    runtime = ScriptedRuntime((thought("hm"), *said("Hel", "lo")))
    async with serving(create_app(runtime, LOOPBACK)) as url:
        text, usage = await trio.to_thread.run_sync(partial(read_with_sdk, f"{url}/v1"))
    assert text == "Hello|hmHello|Hello|Hello"
    assert usage == USAGE.prompt_tokens + USAGE.completion_tokens


def read_with_sdk(url: str) -> tuple[str, int]:
    """Chat streamed, completion streamed, then both plain."""
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        chat = list(
            client.chat.completions.create(
                model="m", messages=messages, stream=True, stream_options={"include_usage": True}
            )
        )
        texts = ["".join(c.choices[0].delta.content or "" for c in chat if c.choices)]
        completion = client.completions.create(model="m", prompt="hi", stream=True)
        texts.append("".join(c.choices[0].text for c in completion))
        plain = client.chat.completions.create(model="m", messages=messages)
        texts.append(plain.choices[0].message.content or "")
        with client.chat.completions.stream(model="m", messages=messages) as stream:
            texts.append(stream.get_final_completion().choices[0].message.content or "")
        assert [m.id for m in client.models.list()] == ["org/tiny-model"]
        assert client.models.retrieve("org/tiny-model").id == "org/tiny-model"
        usage = chat[-1].usage
    assert usage is not None
    return "|".join(texts), usage.total_tokens


async def test_official_sdk_sees_a_failed_stream() -> None:
    """The openai package raises on the error event instead of ending in silence."""

    def read(url: str) -> None:
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            list(
                client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "hi"}], stream=True
                )
            )

    runtime = ScriptedRuntime((*said("Hel")[:1], Failed(GenerationFailed("row lost"))))
    async with serving(create_app(runtime, LOOPBACK)) as url:
        with pytest.raises(openai.APIError, match="row lost"):
            await trio.to_thread.run_sync(read, f"{url}/v1")


async def test_a_stalled_reader_is_cut() -> None:
    """A client that reads nothing while text waits loses its request after read_timeout."""
    runtime = ScriptedRuntime((Flood("x" * 10_000),), read_timeout=0.3)
    async with serving(create_app(runtime, LOOPBACK)) as url:
        host, port = url.removeprefix("http://").split(":")
        stream = await trio.open_tcp_stream(host, int(port))
        body = json.dumps(ASK).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        await stream.send_all(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        with trio.fail_after(30):
            await runtime.wait_left(1)
        await stream.aclose()
    assert runtime.active == 0


async def test_a_slow_reader_is_not_cut() -> None:
    """Reading a little at a time is reading: a long answer arrives whole."""
    piece = TextDelta(Channel.CONTENT, "x" * 100_000)
    runtime = ScriptedRuntime((*[piece] * 60, Finished(FinishReason.STOP, USAGE)), read_timeout=0.5)
    body = ""
    async with (
        serving(create_app(runtime, LOOPBACK)) as url,
        httpx.AsyncClient(base_url=url) as client,
        client.stream("POST", CHAT, json=ASK) as reply,
    ):
        async for text in reply.aiter_text():
            body += text
            await trio.sleep(0.002)
    texts = [e["choices"][0]["delta"].get("content", "") for e in chunks(body)]
    assert "".join(texts) == piece.text * 60
    assert runtime.left == 1
