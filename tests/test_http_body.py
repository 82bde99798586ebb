"""Bodies and headers on the wire: what is not plain JSON, too large, or from the wrong place."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx
import pytest
import trio

from mlx_troupe.http.app import create_app
from mlx_troupe.http.guards import allowed_origin, host_name, is_host_allowed
from mlx_troupe.http.seams import HttpSettings
from mlx_troupe.http.testing import ScriptedHealth, ScriptedRuntime, Wait, said, serving

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
    with trio.fail_after(5):
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
        with trio.fail_after(10):
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
        with trio.fail_after(5):
            if status == b"200":
                while b"100" not in seen:
                    seen += await stream.receive_some()
                await stream.send_all(GOOD)
            while b"HTTP/1.1 " + status not in seen:
                data = await stream.receive_some()
                assert data, seen
                seen += data
        await stream.aclose()


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("localhost", "localhost"),
        ("LocalHost:8080", "localhost"),
        ("localhost.:80", "localhost"),
        ("127.0.0.1:1", "127.0.0.1"),
        ("[::1]:8080", "::1"),
        ("[::1]", "::1"),
        ("", None),
        (":80", None),
        ("a:b", None),
        ("[::1", None),
        ("[::1]x", None),
        ("::1", None),
        ("user@localhost:80:80", None),
    ],
)
def test_host_names(header: str, name: str | None) -> None:
    """The port is cut off; what cannot be a host is none."""
    assert host_name(header) == name


@pytest.mark.parametrize(
    ("header", "bound", "allowed", "expected"),
    [
        ("localhost:8080", "127.0.0.1", (), True),
        ("app.localhost", "127.0.0.1", (), True),
        ("127.0.0.2:8080", "127.0.0.1", (), True),
        ("[::1]:8080", "127.0.0.1", (), True),
        ("evil.example:8080", "127.0.0.1", (), False),
        ("localhost.evil.example", "127.0.0.1", (), False),
        ("192.168.1.5", "127.0.0.1", (), False),
        ("192.168.1.5:8080", "192.168.1.5", (), True),
        ("192.168.1.5", "0.0.0.0", (), True),
        ("[fd00::1]:8080", "::", (), True),
        ("evil.example", "0.0.0.0", (), False),
        ("my.box:80", "0.0.0.0", ("My.Box",), True),
        ("evil.example", "127.0.0.1", ("*",), True),
        ("", "127.0.0.1", (), False),
    ],
)
def test_allowed_hosts(header: str, bound: str, allowed: tuple[str, ...], expected: bool) -> None:
    """Loopback and the bound host pass, names must be listed, addresses only when bound to all."""
    assert is_host_allowed(header, bound, allowed) is expected


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/nowhere", "/"])
async def test_foreign_hosts_get_nothing(path: str) -> None:
    """A page that rebinds its name to this machine is refused on every path."""
    client = create_app(ScriptedRuntime()).test_client()
    reply = await client.get(path, headers={"Host": "evil.example:8080"})
    assert reply.status_code == 403
    assert (await reply.get_json())["error"]["code"] == "host_not_allowed"


PREFLIGHT = {
    "Origin": "https://app.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


async def test_cors_is_off_by_default() -> None:
    """No header, and a preflight is just a wrong method."""
    client = create_app(ScriptedRuntime()).test_client()
    for reply in (
        await client.options(CHAT, headers=PREFLIGHT),
        await client.post(CHAT, json=ASK, headers={"Origin": "https://app.example"}),
    ):
        assert not [h for h, _ in reply.headers if h.lower().startswith("access-control")]
    assert (await client.options(CHAT, headers=PREFLIGHT)).status_code == 405


async def test_cors_for_listed_origins() -> None:
    """A listed origin gets its preflight, and the header on answers, streams and errors."""
    settings = HttpSettings(cors_origins=("https://app.example",))
    client = create_app(ScriptedRuntime(), settings).test_client()
    preflight = await client.options(CHAT, headers=PREFLIGHT)
    assert preflight.status_code == 204
    assert preflight.headers["Access-Control-Allow-Methods"] == "POST"
    assert preflight.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
    origin = {"Origin": "https://app.example"}
    for reply in (
        preflight,
        await client.post(CHAT, json=ASK, headers=origin),
        await client.post(CHAT, json={**ASK, "stream": True}, headers=origin),
        await client.post(CHAT, json={}, headers=origin),
        await client.get("/nowhere", headers=origin),
    ):
        assert reply.headers["Access-Control-Allow-Origin"] == "https://app.example"
        assert "Access-Control-Allow-Credentials" not in reply.headers
    other = {**PREFLIGHT, "Origin": "https://evil.example"}
    refused = await client.options(CHAT, headers=other)
    assert refused.status_code == 405
    assert "Access-Control-Allow-Origin" not in refused.headers


def test_origin_rules() -> None:
    """A star is answered by a star; nothing configured allows nothing."""
    assert allowed_origin("https://a", ("*",)) == "*"
    assert allowed_origin("https://a", ()) is None
    assert allowed_origin(None, ("*",)) is None
    assert allowed_origin("https://a", ("https://b",)) is None


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/none", 404, "model_not_found"),
        ("GET", "/v1/models/org/none", 404, "model_not_found"),
        ("OPTIONS", CHAT, 405, "method_not_allowed"),
    ],
)
async def test_routing_errors_are_json(method: str, path: str, status: int, code: str) -> None:
    """Unknown paths, wrong methods and unknown models are errors in the one shape."""
    client = create_app(ScriptedRuntime()).test_client()
    reply = await client.open(path, method=method)
    assert reply.status_code == status
    assert (await reply.get_json())["error"]["code"] == code
    if status == 405:
        assert reply.headers["Allow"]


async def test_models() -> None:
    """The served model in a list and by its id, slashes and all."""
    client = create_app(ScriptedRuntime()).test_client()
    for path in ("/v1", "/v1/models", "/v1/models/"):
        listed = await (await client.get(path)).get_json()
        assert [m["id"] for m in listed["data"]] == ["org/tiny-model"]
    card = await (await client.get("/v1/models/org/tiny-model")).get_json()
    assert card == listed["data"][0]
    assert card["object"] == "model"
    assert card["context_window"] == 4096


async def test_health_tells_the_truth() -> None:
    """ok is exactly that; anything else is a 503 with its reason."""
    runtime = ScriptedRuntime()
    client = create_app(runtime).test_client()
    reply = await client.get("/health")
    assert (reply.status_code, await reply.get_data()) == (200, b'{"status":"ok"}')
    runtime.reported = ScriptedHealth("loading", "reading weights")
    reply = await client.get("/health")
    assert reply.status_code == 503
    assert await reply.get_json() == {"status": "loading", "reason": "reading weights"}


async def test_while_a_model_loads() -> None:
    """Models, stats, metrics and the root answer before there is a model."""
    client = create_app(ScriptedRuntime(model=None)).test_client()
    models = await (await client.get("/v1/models")).get_json()
    assert models["data"][0]["id"] == "org/tiny-model"
    assert "context_window" not in models["data"][0]
    for path in ("/", "/stats", "/metrics"):
        assert (await client.get(path)).status_code == 200


async def test_stats() -> None:
    """The runtime's figures and a block about the server."""
    stats = await (await create_app(ScriptedRuntime()).test_client().get("/stats")).get_json()
    assert stats["batch"]["active_rows"] == 0
    assert stats["server"]["model"] == "org/tiny-model"
    assert stats["server"]["uptime_seconds"] >= 0


async def test_metrics() -> None:
    """Requests by route and status, tokens, latencies, outcomes and the runtime's figures."""
    client = create_app(ScriptedRuntime()).test_client()
    await client.post(CHAT, json=ASK)
    await client.post(CHAT, json={**ASK, "stream": True})
    await client.post(CHAT, json={})
    await client.get("/nowhere/at/all")
    text = (await (await client.get("/metrics")).get_data()).decode()
    for line in (
        'mlx_troupe_http_requests_total{route="/v1/chat/completions",status="200"} 2.0',
        'mlx_troupe_http_requests_total{route="/v1/chat/completions",status="400"} 1.0',
        'mlx_troupe_http_requests_total{route="unmatched",status="404"} 1.0',
        'mlx_troupe_prompt_tokens_total{route="chat"} 14.0',
        'mlx_troupe_completion_tokens_total{route="chat"} 6.0',
        'mlx_troupe_cached_tokens_total{route="chat"} 4.0',
        'mlx_troupe_time_to_first_token_seconds_count{route="chat"} 2.0',
        'mlx_troupe_generation_seconds_count{route="chat"} 2.0',
        'mlx_troupe_generations_total{outcome="stop",route="chat"} 2.0',
        "mlx_troupe_active_rows 0.0",
        "mlx_troupe_waiting_requests 0.0",
        "mlx_troupe_prompt_cache_bytes 4096.0",
        "mlx_troupe_prompt_cache_hits_total 3.0",
    ):
        assert line in text.splitlines()


async def test_apps_count_apart() -> None:
    """Two apps in one process share no figure."""
    one, two = create_app(ScriptedRuntime()), create_app(ScriptedRuntime())
    await one.test_client().post(CHAT, json=ASK)
    assert b"mlx_troupe_generations_total{" not in two.edge.metrics.render()


async def test_health_answers_beside_a_silent_generation() -> None:
    """A long prefill holds nobody's probe."""
    gate = Wait()
    async with (
        serving(create_app(ScriptedRuntime((gate, *said("a"))), HttpSettings(port=0))) as url,
        httpx.AsyncClient(base_url=url) as client,
        trio.open_nursery() as nursery,
    ):

        async def ask() -> None:
            assert (await client.post(CHAT, json=ASK)).status_code == 200

        nursery.start_soon(ask)
        with trio.fail_after(5):
            for _ in range(5):
                assert (await client.get("/health")).status_code == 200
        gate.gate.set()
