"""The HTTP edge on the real company (scripted device): poison, departures, a full queue."""

from __future__ import annotations

import json
from typing import Any

import httpx
import trio
from company import company, settle

from mlx_troupe.http.app import create_app
from mlx_troupe.http.seams import HttpSettings, RuntimeLike
from mlx_troupe.http.testing import serving

COMPLETIONS = "/v1/completions"
SETTINGS = HttpSettings(port=0)
GOOD: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 16, "temperature": 0, "stream": True}
POISON: tuple[tuple[str, int], ...] = (
    ('"logit_bias":{"99999999":5}', 400),
    ('"top_k":100000,"temperature":1', 200),
    ('"stop":[1,2]', 400),
    ('"temperature":null', 200),
    ('"stream":true,"stream_options":{}', 200),
    ('"temperature":NaN', 400),
    ('"top_p":Infinity', 400),
    ('"min_p":"NaN"', 400),
    ('"repetition_penalty":1e-40', 400),
    ('"repetition_penalty":0,"stop":["",""]', 200),
    ('"temperature":99', 400),
    ('"max_tokens":0', 400),
    ('"max_tokens":"10"', 400),
    ('"prompt":[99999999]', 400),
    ('"prompt":"1 \\ud800"', 400),
    ('"n":2', 400),
)


async def stream_text(client: httpx.AsyncClient) -> str:
    """The text of one good stream, which must end well."""
    reply = await client.post(COMPLETIONS, json=GOOD)
    *events, done = reply.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    texts = [json.loads(e.removeprefix("data: "))["choices"][0]["text"] for e in events]
    return "".join(texts)


async def test_poison_among_good_streams() -> None:
    """Bodies that killed other servers, sent among eight streams: each its own right answer."""
    async with company(queue=64) as (runtime, _):
        served: RuntimeLike = runtime
        async with (
            serving(create_app(served, SETTINGS)) as url,
            httpx.AsyncClient(base_url=url, timeout=20) as client,
        ):
            expected = await stream_text(client)
            texts: list[str] = []
            statuses: dict[str, int] = {}

            async def good() -> None:
                texts.append(await stream_text(client))

            async def poison(fields: str) -> None:
                body = f'{{"prompt":[1,2],"max_tokens":4,{fields}}}'
                headers = {"Content-Type": "application/json"}
                reply = await client.post(COMPLETIONS, content=body, headers=headers)
                statuses[fields] = reply.status_code
                assert "Traceback" not in reply.text

            async with trio.open_nursery() as nursery:
                for _ in range(8):
                    nursery.start_soon(good)
                for fields, _ in POISON:
                    nursery.start_soon(poison, fields)
            assert statuses == dict(POISON)
            assert texts == [expected] * 8
            assert (await client.get("/health")).status_code == 200
            await settle(runtime)


async def test_departures_free_their_rows() -> None:
    """Clients that leave in mid-stream, or before a plain answer, leave no row behind."""
    async with company(queue=64) as (runtime, _):
        app = create_app(runtime, SETTINGS)
        async with serving(app) as url, httpx.AsyncClient(base_url=url, timeout=20) as client:
            expected = await stream_text(client)
            endless = {**GOOD, "max_tokens": 100_000}

            async def leave(stream: bool) -> None:
                body = json.dumps({**endless, "stream": stream})
                head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\n"
                head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                connection = await trio.open_tcp_stream("127.0.0.1", int(url.rpartition(":")[2]))
                await connection.send_all((head + body).encode())
                with trio.move_on_after(0.3):
                    await connection.receive_some()
                await connection.aclose()

            async with trio.open_nursery() as nursery:
                for number in range(24):
                    nursery.start_soon(leave, number % 3 > 0)
            with trio.fail_after(30):
                await settle(runtime)
            assert (await client.get("/stats")).json()["batch"]["active_rows"] == 0
            assert await stream_text(client) == expected


async def test_a_full_queue_is_a_429() -> None:
    """What does not fit is refused at once, with Retry-After; what fits is answered."""
    async with company(batch=1, queue=2) as (runtime, _):
        app = create_app(runtime, SETTINGS)
        async with serving(app) as url, httpx.AsyncClient(base_url=url, timeout=20) as client:
            replies: list[httpx.Response] = []

            async def ask() -> None:
                body = {**GOOD, "stream": False, "max_tokens": 16}
                replies.append(await client.post(COMPLETIONS, json=body))

            async with trio.open_nursery() as nursery:
                for _ in range(12):
                    nursery.start_soon(ask)
    refused = [r for r in replies if r.status_code == 429]
    assert refused
    assert len(refused) + sum(r.status_code == 200 for r in replies) == 12
    for reply in refused:
        assert int(reply.headers["Retry-After"]) >= 1
        assert reply.json()["error"]["type"] == "resource_admission"
        assert reply.json()["error"]["code"] == "queue_full"
