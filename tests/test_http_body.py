"""Bodies on the wire: what is not plain JSON, compressed, or too large."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx
import pytest
import trio

from mlx_troupe.http.app import create_app
from mlx_troupe.http.seams import HttpSettings
from mlx_troupe.http.testing import ScriptedRuntime, serving

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
GOOD = json.dumps(ASK).encode()
JSON_TYPE = {"Content-Type": "application/json"}


async def send(
    body: bytes, headers: dict[str, str] | None = None, settings: HttpSettings | None = None
) -> tuple[int, dict[str, Any], Any]:
    """Status, body and headers of one chat request; every error must have the one shape."""
    client = create_app(ScriptedRuntime(), settings).test_client()
    reply = await client.post(CHAT, data=body, headers=headers or JSON_TYPE)
    assert reply.content_type == "application/json"
    answer = json.loads(await reply.get_data())
    if reply.status_code != 200:
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert answer["error"]["type"] == "invalid_request_error"
    return reply.status_code, answer, reply.headers


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"  \n",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"7",
        b"NaN",
        GOOD.decode().encode("utf-16"),
        GOOD.decode().encode("utf-16-le"),
        b"\xef\xbb\xbf" + GOOD,
        b"\xff\xfe\x00",
        GOOD[:-1] + b",}",
        GOOD + b"x",
        GOOD + GOOD,
        b'{"messages": ' + b"9" * 5000 + b"}",
        b"[" * 20_000 + b"]" * 20_000,
        b'{"a":' * 1000 + b"1" + b"}" * 1000,
        b'{"a":' * 100_000,
        GOOD[:-1] + b',"tools":[{"parameters":' + b'{"a":' * 1000 + b"1" + b"}" * 1001 + b"]}",
        b'{"messages": [' + b"[" * 70 + b"]" * 70 + b"]}",
    ],
    ids=range(21),
)
async def test_bodies_that_are_no_request(body: bytes) -> None:
    """Each is a 400 in the one error shape, at once."""
    with trio.fail_after(30):
        status, answer, _ = await send(body)
    assert status == 400
    assert answer["error"]["code"] == "invalid_json"
    assert answer["error"]["message"].startswith("invalid JSON body: ")


async def test_the_last_of_equal_keys_wins() -> None:
    """Equal keys are legal JSON; the last one counts."""
    status, _, _ = await send(b'{"messages":5,' + GOOD[1:])
    assert status == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "application/json"}, 200),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
        ({"Content-Type": "Application/JSON"}, 200),
        ({"Accept": "*/*"}, 200),
        ({"Content-Type": "application/json", "Content-Encoding": "identity"}, 200),
        ({"Origin": "https://evil.example"}, 415),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "text/plain;application/json"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "multipart/form-data; boundary=x"}, 415),
        ({"Content-Type": "application/json", "Content-Encoding": "gzip"}, 415),
        ({"Content-Type": "application/json", "Content-Encoding": "br"}, 415),
    ],
)
async def test_content_types(headers: dict[str, str], status: int) -> None:
    """Only JSON is read; a missing type passes only where no browser can have sent it."""
    body = gzip.compress(GOOD) if headers.get("Content-Encoding") == "gzip" else GOOD
    seen, answer, _ = await send(body, headers)
    assert seen == status
    if status == 415:
        assert answer["error"]["code"] == "unsupported_media_type"


@pytest.mark.parametrize("chunked", [False, True])
async def test_oversize_bodies(chunked: bool) -> None:
    """Over the limit is a JSON 413 that arrives, with or without a length; the next is served."""
    settings = HttpSettings(port=0, max_body_bytes=100_000)

    async def pieces() -> Any:
        for _ in range(200):
            yield b" " * 16_384

    content = pieces() if chunked else b" " * 3_000_000
    async with (
        serving(create_app(ScriptedRuntime(), settings)) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        with trio.fail_after(30):
            reply = await client.post(CHAT, content=content, headers=JSON_TYPE)
            assert reply.status_code == 413
            assert reply.json()["error"]["code"] == "request_too_large"
            assert (await client.post(CHAT, json=ASK)).status_code == 200


async def test_large_bodies_within_the_limit() -> None:
    """Seventeen megabytes in one message are read and passed on."""
    runtime = ScriptedRuntime()
    text = "x" * (17 << 20)
    async with (
        serving(create_app(runtime, HttpSettings(port=0))) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as client,
    ):
        body = {"messages": [{"role": "user", "content": text}]}
        assert (await client.post(CHAT, json=body)).status_code == 200
    assert runtime.requests[0].prompt.messages[0].content == text  # type: ignore[union-attr]


@pytest.mark.parametrize(("size", "status"), [(len(GOOD), b"200"), (3_000_000, b"413")])
async def test_expect_continue(size: int, status: bytes) -> None:
    """A client that asks before it sends gets its answer; a body too large is never waited for."""
    settings = HttpSettings(port=0, max_body_bytes=100_000)
    async with serving(create_app(ScriptedRuntime(), settings)) as url:
        host, port = url.removeprefix("http://").split(":")
        stream = await trio.open_tcp_stream(host, int(port))
        head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {size}\r\nExpect: 100-continue\r\n\r\n"
        await stream.send_all(head.encode())
        seen = b""
        with trio.fail_after(30):
            if status == b"200":
                while b"100" not in seen:
                    seen += await stream.receive_some()
                await stream.send_all(GOOD)
            while b"HTTP/1.1 " + status not in seen:
                data = await stream.receive_some()
                assert data, seen
                seen += data
        await stream.aclose()
