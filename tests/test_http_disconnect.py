"""Clients that leave: every generation is left too, whatever the transport and the moment."""

from __future__ import annotations

import gc
import json
import socket
import struct

import h2.config
import h2.connection
import h2.events
import pytest
import trio
import trio.testing
from quart import Response

from mlx_troupe.http.app import create_app
from mlx_troupe.http.seams import HttpSettings
from mlx_troupe.http.testing import Flood, ScriptedRuntime, Wait, said, serving

SETTINGS = HttpSettings(port=0)
CHAT = "/v1/chat/completions"
PATIENCE = 30.0
"""Seconds before a test gives up; the thing itself takes milliseconds."""


def raw_request(*, stream: bool, extra: str = "") -> bytes:
    """One chat request as bytes."""
    body = json.dumps({"stream": stream, "messages": [{"role": "user", "content": "hi"}]})
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{extra}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


async def connect(url: str) -> trio.SocketStream:
    """A bare connection to a test server."""
    host, port = url.removeprefix("http://").split(":")
    return await trio.open_tcp_stream(host, int(port))


async def read_until(stream: trio.SocketStream, mark: bytes) -> bytes:
    """Everything up to and with the first read that shows ``mark``."""
    seen = b""
    while mark not in seen:
        data = await stream.receive_some()
        assert data, seen
        seen += data
    return seen


def reset(stream: trio.SocketStream) -> None:
    """Close with a TCP reset instead of an orderly end."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.socket.close()


@pytest.mark.parametrize("how", ["end", "reset"])
@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_a_silent_generation(stream: bool, how: str) -> None:
    """A client that leaves while the engine is silent frees its row, streamed or not."""
    runtime = ScriptedRuntime((Wait(),))
    async with serving(create_app(runtime, SETTINGS)) as url:
        client = await connect(url)
        await client.send_all(raw_request(stream=stream))
        with trio.fail_after(PATIENCE):
            while runtime.entered == 0:
                await trio.testing.wait_all_tasks_blocked(0.01)
            if stream:
                await read_until(client, b"assistant")
            if how == "reset":
                reset(client)
            else:
                await client.aclose()
            await runtime.wait_left(1)
        assert runtime.active == 0


@pytest.mark.parametrize("how", ["end", "reset"])
async def test_leaving_a_flowing_stream(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """A client that leaves in mid-flow frees its row, logs nothing bad, harms nobody."""
    runtime = ScriptedRuntime((Flood("text " * 100),))
    async with serving(create_app(runtime, SETTINGS)) as url:
        client = await connect(url)
        await client.send_all(raw_request(stream=True))
        with trio.fail_after(PATIENCE):
            await read_until(client, b"text")
            if how == "reset":
                reset(client)
            else:
                await client.aclose()
            await runtime.wait_left(1)
        runtime._script = said("fine")
        again = await connect(url)
        with trio.fail_after(PATIENCE):
            await again.send_all(raw_request(stream=False))
            assert b'"fine"' in await read_until(again, b"finish_reason")
        await again.aclose()
    assert not [r for r in caplog.records if r.levelname in ("ERROR", "CRITICAL")]


async def test_leaving_before_the_reply_begins() -> None:
    """A client that is gone before its request was even admitted is not served."""
    runtime = ScriptedRuntime((Wait(),))
    async with serving(create_app(runtime, SETTINGS)) as url:
        for _ in range(20):
            client = await connect(url)
            await client.send_all(raw_request(stream=True))
            reset(client)
        with trio.fail_after(PATIENCE):
            await trio.testing.wait_all_tasks_blocked(0.05)
            while runtime.active:
                await trio.testing.wait_all_tasks_blocked(0.05)
    assert runtime.entered == runtime.left


async def test_leaving_between_the_handler_and_its_body() -> None:
    """A generation that was admitted is left even if its stream never came to begin."""
    runtime = ScriptedRuntime()
    app = create_app(runtime, SETTINGS)
    admitted = trio.Event()

    async def hold(response: Response) -> Response:
        admitted.set()
        await trio.sleep_forever()
        return response

    app.after_request(hold)
    async with serving(app) as url:
        client = await connect(url)
        await client.send_all(raw_request(stream=True))
        with trio.fail_after(PATIENCE):
            await admitted.wait()
            assert runtime.active == 1
            await client.aclose()
            await runtime.wait_left(1)


@pytest.mark.parametrize("kind", ["reset stream", "close connection"])
async def test_leaving_over_http2(kind: str) -> None:
    """A reset HTTP/2 stream frees its own row only; a closed connection frees all."""
    runtime = ScriptedRuntime((Wait(),))
    async with serving(create_app(runtime, SETTINGS)) as url:
        client = await connect(url)
        http2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        http2.initiate_connection()
        for stream_id in (1, 3):
            send_http2_chat(http2, stream_id)
        await client.send_all(http2.data_to_send())
        with trio.fail_after(PATIENCE):
            while runtime.entered < 2:
                await trio.testing.wait_all_tasks_blocked(0.01)
            if kind == "reset stream":
                http2.reset_stream(1)
                await client.send_all(http2.data_to_send())
                await runtime.wait_left(1)
                assert runtime.active == 1
            await client.aclose()
            await runtime.wait_left(2)


def send_http2_chat(http2: h2.connection.H2Connection, stream_id: int) -> None:
    """Queue one streaming chat request on an HTTP/2 connection."""
    headers = [
        (":method", "POST"),
        (":path", CHAT),
        (":scheme", "http"),
        (":authority", "localhost"),
        ("content-type", "application/json"),
    ]
    body = json.dumps({"stream": True, "messages": [{"role": "user", "content": "hi"}]})
    http2.send_headers(stream_id, headers)
    http2.send_data(stream_id, body.encode(), end_stream=True)


async def test_an_http2_reader_that_stalls_is_cut() -> None:
    """A client that never opens its flow-control window loses its stream at the answer's end."""
    runtime = ScriptedRuntime(said(*["x" * 10_000] * 10), read_timeout=0.3)
    app = create_app(runtime, SETTINGS)
    async with serving(app) as url:
        client = await connect(url)
        http2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        http2.initiate_connection()
        send_http2_chat(http2, 1)
        await client.send_all(http2.data_to_send())
        with trio.fail_after(PATIENCE):
            await runtime.wait_left(1)
            while b'status="200"' not in app.edge.metrics.render():
                await trio.testing.wait_all_tasks_blocked(0.05)
        await client.aclose()


async def test_two_hundred_departures_leave_nothing_behind() -> None:
    """Waves of clients leaving at different points of a stream: rows, tasks and sockets go."""
    runtime = ScriptedRuntime((*said("a")[:1], Flood("b ")))
    async with serving(create_app(runtime, SETTINGS)) as url:
        await depart(url, after=b"assistant")
        with trio.fail_after(PATIENCE):
            await runtime.wait_left(1)
            await trio.testing.wait_all_tasks_blocked(0.05)
        tasks = trio.lowlevel.current_statistics().tasks_living
        marks = [b"HTTP/1.1", b"assistant", b'"a"', b'"b "']
        for wave in range(10):
            async with trio.open_nursery() as nursery:
                for client in range(20):
                    nursery.start_soon(depart, url, marks[(wave + client) % len(marks)])
        with trio.fail_after(PATIENCE):
            await runtime.wait_left(201)
            while trio.lowlevel.current_statistics().tasks_living > tasks:
                await trio.testing.wait_all_tasks_blocked(0.05)
        gc.collect()
    assert runtime.active == 0


async def test_a_client_that_leaves_between_requests_leaves_nothing() -> None:
    """A kept-alive connection goes with its client, not with the idle timeout a minute later."""
    runtime = ScriptedRuntime(said("yes"))
    async with serving(create_app(runtime, SETTINGS)) as url:
        await trio.testing.wait_all_tasks_blocked(0.05)
        tasks = trio.lowlevel.current_statistics().tasks_living
        for _ in range(3):
            client = await connect(url)
            await client.send_all(raw_request(stream=False))
            with trio.fail_after(PATIENCE):
                await read_until(client, b"}}")
            await client.aclose()
        with trio.fail_after(PATIENCE):
            while trio.lowlevel.current_statistics().tasks_living > tasks:
                await trio.testing.wait_all_tasks_blocked(0.05)


async def depart(url: str, after: bytes) -> None:
    """Read a stream up to a mark and leave."""
    client = await connect(url)
    await client.send_all(raw_request(stream=True))
    with trio.fail_after(PATIENCE):
        await read_until(client, after)
    await client.aclose()


async def test_pipelined_and_kept_alive_requests() -> None:
    """One connection serves request after request, streamed and not, in order."""
    runtime = ScriptedRuntime(said("yes"))
    async with serving(create_app(runtime, SETTINGS)) as url:
        client = await connect(url)
        with trio.fail_after(PATIENCE):
            for stream, end in ((True, b"0\r\n\r\n"), (False, b"}}"), (True, b"0\r\n\r\n")):
                await client.send_all(raw_request(stream=stream))
                assert b"yes" in await read_until(client, end)
        await client.aclose()
    assert runtime.left == 3


async def test_http_1_0_closes_after_the_reply() -> None:
    """An HTTP/1.0 client without a Host header gets a full reply and then the end."""
    runtime = ScriptedRuntime(said("yes"))
    async with serving(create_app(runtime, SETTINGS)) as url:
        for stream in (True, False):
            request = raw_request(stream=stream, extra="Connection: close\r\n")
            request = request.replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"Host: localhost\r\n", b"")
            client = await connect(url)
            await client.send_all(request)
            reply = b""
            with trio.fail_after(PATIENCE):
                while data := await client.receive_some():
                    reply += data
            await client.aclose()
            assert reply.startswith(b"HTTP/1.1 200")
            assert b"yes" in reply
            assert b"transfer-encoding" not in reply.lower()
            assert reply.endswith(b"data: [DONE]\n\n") is stream
