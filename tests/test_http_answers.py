"""Whole answers, and bad requests among good ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlx_troupe.http.app import create_app
from mlx_troupe.http.testing import ScriptedRuntime, said, thought

USER = {"role": "user", "content": "hi"}


async def test_poison_leaves_good_requests_alone() -> None:
    """The bodies that killed other servers, one after the other: each its own answer."""
    runtime = ScriptedRuntime(said("fine"))
    client = create_app(runtime).test_client()
    base = {"messages": [USER]}
    poison: list[tuple[dict[str, Any], int]] = [
        ({"logit_bias": {"99999999": 5}}, 400),
        ({"top_k": 100000, "temperature": 1}, 200),
        ({"stop": [1, 2]}, 400),
        ({"temperature": None}, 200),
        ({"stream_options": {}}, 200),
        ({"stream_options": {}, "stream": True}, 200),
        ({"temperature": float("nan")}, 400),
        ({"n": 3}, 400),
        ({"response_format": {"type": "json_schema"}}, 400),
    ]
    for fields, status in poison:
        reply = await client.post(
            "/v1/chat/completions",
            data=json.dumps({**base, **fields}),
            headers={"Content-Type": "application/json", "Host": "localhost"},
        )
        assert reply.status_code == status, fields
        good = await client.post("/v1/chat/completions", json=base)
        assert (await good.get_json())["choices"][0]["message"]["content"] == "fine"
    assert runtime.active == 0


async def test_chat_answer() -> None:
    """A whole answer: message, reasoning by both names, reason, usage, the true id."""
    runtime = ScriptedRuntime((thought("h"), thought("m"), *said("Hel", "lo")))
    client = create_app(runtime).test_client()
    reply = await client.post(
        "/v1/chat/completions", json={"messages": [USER], "model": "no-such-model"}
    )
    answer = await reply.get_json()
    assert reply.status_code == 200
    assert answer.pop("id").startswith("chatcmpl-")
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "object": "chat.completion",
        "model": "org/tiny-model",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Hello",
                    "reasoning": "hm",
                    "reasoning_content": "hm",
                },
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 3,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 2},
            "lane": "batched",
        },
    }


async def test_completion_answer() -> None:
    """A whole text completion."""
    client = create_app(ScriptedRuntime(said("Hel", "lo"))).test_client()
    answer = await (await client.post("/v1/completions", json={"prompt": "x"})).get_json()
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": "Hello", "finish_reason": "stop", "logprobs": None}
    ]
    assert answer["usage"]["lane"] == "batched"
    assert "reasoning" not in answer["choices"][0]


@pytest.mark.parametrize(
    "model", ["test", "../../etc", "/abs/path", "a/b/c", "", None, "org/tiny-model"]
)
async def test_model_names_are_aliases(model: str | None) -> None:
    """Any short name is answered by the loaded model, under its true id."""
    client = create_app(ScriptedRuntime()).test_client()
    reply = await client.post("/v1/completions", json={"prompt": "x", "model": model})
    assert (await reply.get_json())["model"] == "org/tiny-model"
