"""Messages and prompts of a body: what they become, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlx_troupe.http.testing import MODEL
from mlx_troupe.http.wire.chat import chat_call
from mlx_troupe.http.wire.completions import completion_call
from mlx_troupe.http.wire.params import Call
from mlx_troupe.http.wire.parsing import parse_json
from mlx_troupe.runtime.errors import InvalidRequest, Unsupported
from mlx_troupe.runtime.requests import ChatPrompt, Message, TextPrompt, TokenPrompt

USER = {"role": "user", "content": "hi"}


def completion(**fields: Any) -> Call:
    """A parsed text completion with these fields."""
    return completion_call({"prompt": "hi", **fields}, MODEL)


def messages(*wire: Any) -> tuple[Message, ...]:
    """The messages that a body's messages become."""
    prompt = chat_call({"messages": list(wire)}, MODEL).request.prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt.messages


@pytest.mark.parametrize("wire", [[], None, "x", [{}], [{"content": "hi"}], [1], {}, [None]])
def test_no_messages(wire: Any) -> None:
    """Nothing that is a list of messages with roles: refused under the field's name."""
    with pytest.raises(InvalidRequest) as caught:
        chat_call({"messages": wire}, MODEL)
    assert (caught.value.param or "").startswith("messages")


def test_missing_messages() -> None:
    """A body without messages says so."""
    with pytest.raises(InvalidRequest, match="messages required"):
        chat_call({}, MODEL)


def test_parts_are_joined_in_order() -> None:
    """Text parts of every role are joined with nothing between."""
    parts = [{"type": "text", "text": "My name is Ada."}, {"type": "text", "text": " Hi."}]
    for role in ("system", "developer", "user", "assistant", "tool"):
        assert messages({"role": role, "content": parts})[0].content == "My name is Ada. Hi."


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}, {"content": []}])
def test_tool_call_turns(content: dict[str, Any]) -> None:
    """All four forms of an empty assistant turn are one; calls and results ride along."""
    call = {
        "type": "function",
        "id": "c1",
        "function": {"name": "add", "arguments": '{"a":2,"b":3}'},
    }
    turns = messages(
        USER,
        {"role": "assistant", "tool_calls": [call], **content},
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
    )
    assert turns[1] == Message("assistant", "", {"tool_calls": [call]})
    assert turns[2] == Message("tool", "5", {"tool_call_id": "c1"})


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "image_url"),
        ({"role": "user", "content": [{"type": "input_audio", "x": 1}]}, "input_audio"),
        ({"role": "user", "content": [{"type": "bogus"}]}, "bogus"),
        ({"role": "user", "content": [{"text": "x"}]}, "without a type"),
        ({"role": "user", "content": [{"type": "text"}]}, "without text"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "text"),
        ({"role": "user", "content": ["x"]}, "content"),
        ({"role": "user", "content": 5}, "content"),
        ({"role": "user", "content": None}, "content"),
        ({"role": "user"}, "content"),
        ({"role": "tool", "content": None}, "content"),
        ({"role": "wizard", "content": "x"}, "wizard"),
        ({"role": 5, "content": "x"}, "role"),
        ({"role": "assistant", "tool_calls": [{}]}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [{"function": {"arguments": "x"}}]}, "name"),
        ({"role": "assistant", "tool_calls": "x"}, "tool_calls"),
    ],
)
def test_bad_messages_are_named_shortly(message: dict[str, Any], named: str) -> None:
    """The error names the message and the part, and repeats no payload."""
    padded = json.loads(json.dumps(message).replace("{}", json.dumps({"url": "A" * 9000})))
    with pytest.raises(InvalidRequest) as caught:
        messages(USER, padded)
    assert named in caught.value.message
    assert (caught.value.param or "").startswith("messages[1]")
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    "body",
    [
        r'{"messages":[{"role":"user","content":"a\ud800b"}]}',
        r'{"messages":[{"role":"user","content":[{"type":"text","text":"\udc00"}]}]}',
        r'{"messages":[{"role":"user","content":"x","name":"\ud800"}]}',
        r'{"messages":[{"role":"user","content":"x"}],"stop":["\ud83d"]}',
        r'{"messages":[{"role":"user","content":"x"}],"model":"\ud83d x"}',
        r'{"messages":[{"role":"user","content":"x"}],"\ud800":1}',
        r'{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"\ud800":1}}',
    ],
)
def test_lone_surrogates_are_refused(body: str) -> None:
    """Text that no tokenizer can take is a 400, wherever it stands."""
    with pytest.raises(InvalidRequest):
        chat_call(parse_json(body.encode()), MODEL)


def test_surrogate_pairs_and_nul_are_text() -> None:
    """An escaped emoji and an escaped NUL are ordinary characters."""
    body = rb'{"messages":[{"role":"user","content":"\ud83d\ude00\u0000"}]}'
    prompt = chat_call(parse_json(body), MODEL).request.prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[0].content == "\U0001f600\0"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", TextPrompt("hi")),
        ([1, 2, 99], TokenPrompt((1, 2, 99))),
        ([[1, 2]], TokenPrompt((1, 2))),
    ],
)
def test_prompts(prompt: Any, expected: Any) -> None:
    """A string, ids, or one list of ids."""
    assert completion(prompt=prompt).request.prompt == expected


@pytest.mark.parametrize(
    "prompt", [None, 5, {}, [], [[]], ["a"], ["a", "b"], [[1], [2]], [1, "a"], [True], [-1], [100]]
)
def test_bad_prompts(prompt: Any) -> None:
    """Anything else is refused under its name, ids out of the vocabulary included."""
    with pytest.raises(InvalidRequest) as caught:
        completion(prompt=prompt)
    assert caught.value.param == "prompt"


def test_completion_logprobs_are_a_number() -> None:
    """0 asks for the chosen token's figure, more for that many alternatives, none for nothing."""
    for value, wanted in ((None, None), (False, None), (True, 0), (0, 0), (11, 11)):
        assert completion(logprobs=value).request.logprobs == wanted
    for bad in (-1, 12, 2.5, "3", [1]):
        with pytest.raises(InvalidRequest) as caught:
            completion(logprobs=bad)
        assert caught.value.param == "logprobs"
    with pytest.raises(Unsupported) as refused:
        completion(logprobs=1, top_logprobs=2)
    assert refused.value.param == "top_logprobs"
