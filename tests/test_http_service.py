"""Models, health, stats and metrics."""

from __future__ import annotations

from typing import Any

import httpx
import trio

from mlx_troupe.http.app import create_app
from mlx_troupe.http.seams import HttpSettings
from mlx_troupe.http.testing import ScriptedHealth, ScriptedRuntime, Wait, said, serving

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


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
    text = await (await client.get("/metrics")).get_data(as_text=True)
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
        with trio.fail_after(30):
            for _ in range(5):
                assert (await client.get("/health")).status_code == 200
        gate.gate.set()
