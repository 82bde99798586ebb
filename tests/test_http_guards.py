"""Who may call and what is found: host names, origins, paths and methods."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_troupe.http.app import create_app
from mlx_troupe.http.guards import allowed_origin, host_name, is_host_allowed
from mlx_troupe.http.seams import HttpSettings
from mlx_troupe.http.testing import ScriptedRuntime

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


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
    reply = await getattr(client, method.lower())(path)
    assert reply.status_code == status
    assert (await reply.get_json())["error"]["code"] == code
    if status == 405:
        assert reply.headers["Allow"]
