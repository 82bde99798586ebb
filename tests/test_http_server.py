"""The life of a server: binding, draining, stopping, and faults that stay where they are."""

from __future__ import annotations

import json
import signal
from typing import Any

import httpx
import pytest
import trio
import trio.testing

from mlx_troupe.http.app import EdgeApp, create_app
from mlx_troupe.http.seams import HttpSettings
from mlx_troupe.http.server import AddressUnavailable, Stop, open_listeners, serve
from mlx_troupe.http.testing import Flood, ScriptedRuntime, Wait, said, serving

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
SETTINGS = HttpSettings(port=0)
PATIENCE = 30.0


async def test_a_taken_port_is_named() -> None:
    """A second server on the same port is refused with the port in the message."""
    async with serving(create_app(ScriptedRuntime(), SETTINGS)) as url:
        port = int(url.rpartition(":")[2])
        with pytest.raises(AddressUnavailable, match=str(port)):
            await serve(
                create_app(ScriptedRuntime(), HttpSettings(port=port)), handle_signals=False
            )
        with pytest.raises(AddressUnavailable, match="already serving"):
            await open_listeners("0.0.0.0", port)


async def test_a_foreign_address_is_refused_in_words() -> None:
    """An address of another machine cannot be bound, and that is said."""
    with pytest.raises(AddressUnavailable, match="cannot listen on"):
        await open_listeners("203.0.113.7", 0)


async def run_until_stopped(
    app: EdgeApp, stop: Stop, *, task_status: trio.TaskStatus[list[str]]
) -> None:
    """``serve`` in a shape that a nursery can start."""
    await serve(app, stop=stop, handle_signals=False, task_status=task_status)


async def test_draining_finishes_what_runs() -> None:
    """After the first stop running streams end well, new requests are refused, health says so."""
    gate = Wait()
    runtime = ScriptedRuntime((*said("a")[:1], gate, *said("b")))
    app, stop = create_app(runtime, SETTINGS), Stop()
    async with trio.open_nursery() as nursery:

        async def start(*, task_status: trio.TaskStatus[list[str]]) -> None:
            await run_until_stopped(app, stop, task_status=task_status)

        url = (await nursery.start(start))[0]
        async with httpx.AsyncClient(base_url=url) as client:
            with trio.fail_after(PATIENCE):
                async with client.stream("POST", CHAT, json={**ASK, "stream": True}) as reply:
                    texts = reply.aiter_text()
                    seen = await anext(texts)
                    stop.request()
                    while not app.edge.draining:
                        await trio.testing.wait_all_tasks_blocked(0.01)
                    with pytest.raises(httpx.ConnectError):
                        await client.get("/health")
                    inside = app.test_client()
                    refused = await inside.post(CHAT, json=ASK)
                    assert refused.status_code == 503
                    assert refused.headers["Retry-After"]
                    health = await inside.get("/health")
                    assert (await health.get_json())["status"] == "stopping"
                    gate.gate.set()
                    async for text in texts:
                        seen += text
    assert seen.endswith("data: [DONE]\n\n")
    assert runtime.active == 0


@pytest.mark.parametrize("how", ["second request", "deadline"])
async def test_stopping_at_once(how: str) -> None:
    """A second stop, or the end of the drain time, cuts what still runs, stalled clients too."""
    settings = HttpSettings(port=0, drain_timeout=0.2 if how == "deadline" else 1000)
    runtime = ScriptedRuntime((Flood("x" * 10_000),))
    app, stop = create_app(runtime, settings), Stop()
    async with trio.open_nursery() as nursery:

        async def start(*, task_status: trio.TaskStatus[list[str]]) -> None:
            await run_until_stopped(app, stop, task_status=task_status)

        url = (await nursery.start(start))[0]
        client = await trio.open_tcp_stream("127.0.0.1", int(url.rpartition(":")[2]))
        body = json.dumps({**ASK, "stream": True})
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        await client.send_all(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        with trio.fail_after(PATIENCE):
            await client.receive_some()
            await trio.testing.wait_all_tasks_blocked(0.05)
            stop.request()
            if how == "second request":
                stop.request()
            await runtime.wait_left(1)
    await client.aclose()


async def test_an_idle_connection_does_not_hold_the_server() -> None:
    """Kept-alive connections without a request close as soon as the server drains."""
    app, stop = create_app(ScriptedRuntime(), SETTINGS), Stop()
    async with httpx.AsyncClient() as client:
        with trio.fail_after(PATIENCE):
            async with serving(app, stop) as url:
                assert (await client.get(f"{url}/health")).status_code == 200
                stop.request()
                while not app.edge.draining:
                    await trio.testing.wait_all_tasks_blocked(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_signals_stop_the_server(number: signal.Signals) -> None:
    """Ctrl-C and a polite kill end serve() without an exception."""
    app = create_app(ScriptedRuntime(), SETTINGS)
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:

            async def start(*, task_status: trio.TaskStatus[list[str]]) -> None:
                await serve(app, task_status=task_status)

            await nursery.start(start)
            signal.raise_signal(number)
    assert app.edge.draining


@pytest.mark.parametrize(
    "junk",
    [
        b"\x16\x03\x01\x02\x00\x01",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"GET /%ff%fe HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET /ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\njunk junk junk junk junk",
    ],
    ids=range(10),
)
async def test_junk_harms_only_its_connection(junk: bytes) -> None:
    """Whatever arrives on one connection, the next one is served."""
    async with serving(create_app(ScriptedRuntime(), SETTINGS)) as url:
        stream = await trio.open_tcp_stream("127.0.0.1", int(url.rpartition(":")[2]))
        with trio.fail_after(PATIENCE):
            await stream.send_all(junk)
            with trio.move_on_after(0.2):
                await stream.receive_some()
            await stream.aclose()
            async with httpx.AsyncClient(base_url=url) as client:
                assert (await client.get("/health")).status_code == 200
