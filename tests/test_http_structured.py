"""Structured output on the wire: which field counts, what is malformed, what the client is told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from company import company

from mlx_troupe.actors.testing import ScriptedDevice
from mlx_troupe.http.app import create_app
from mlx_troupe.http.testing import MODEL, ScriptedRuntime, said
from mlx_troupe.http.wire.chat import chat_call
from mlx_troupe.http.wire.completions import completion_call
from mlx_troupe.http.wire.structured import MAX_TEXT
from mlx_troupe.runtime.errors import InvalidRequest, Unsupported
from mlx_troupe.runtime.grammars import (
    ANY_OBJECT,
    ChoiceGrammar,
    ContextFreeGrammar,
    Grammar,
    JsonGrammar,
    RegexGrammar,
)
from mlx_troupe.runtime.model_info import ModelInfo
from mlx_troupe.runtime.text.testing import EOS, ByteTokenizer

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}


def grammar_of(**fields: Any) -> Grammar | None:
    """What the fields of a chat add up to; text completions must agree."""
    messages = [{"role": "user", "content": "Hi"}]
    found = chat_call({"messages": messages, **fields}, MODEL).request.grammar
    assert completion_call({"prompt": "Hi", **fields}, MODEL).request.grammar == found
    return found


ORDER: list[tuple[dict[str, Any], str]] = [
    ({"guided_grammar": "start: x"}, "guided_grammar"),
    ({"response_format": FORMAT}, "response_format.json_schema.schema"),
    ({"guided_json": SCHEMA}, "guided_json"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex"),
    ({"guided_regex": "b+"}, "guided_regex"),
    ({"guided_choice": ["a", "b"]}, "guided_choice"),
]


@pytest.mark.parametrize("first", range(len(ORDER)))
def test_the_first_field_in_the_order_counts(first: int) -> None:
    """Whatever else is asked for after it."""
    fields: dict[str, Any] = {}
    for later, _ in reversed(ORDER[first:]):
        fields |= later
    found = grammar_of(**fields)
    assert found is not None
    assert found.param == ORDER[first][1]


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {}}, None),
        ({"structured_outputs": {"json_object": False, "regex": None}}, None),
        ({"response_format": {"type": "json_object"}}, JsonGrammar(ANY_OBJECT)),
        ({"response_format": FORMAT}, JsonGrammar(json.dumps(SCHEMA))),
        ({"response_format": {**FORMAT, "any_whitespace": False}},
         JsonGrammar(json.dumps(SCHEMA), any_whitespace=False)),
        ({"guided_json": json.dumps(SCHEMA)}, JsonGrammar(json.dumps(SCHEMA))),
        ({"guided_json": SCHEMA, "structured_outputs": {"any_whitespace": False}},
         JsonGrammar(json.dumps(SCHEMA), any_whitespace=False)),
        ({"structured_outputs": {"json": SCHEMA}}, JsonGrammar(json.dumps(SCHEMA))),
        ({"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}},
         JsonGrammar(json.dumps(SCHEMA), any_whitespace=False)),
        ({"structured_outputs": {"json_object": True, "whitespace_pattern": " ?"}},
         JsonGrammar(ANY_OBJECT, whitespace_pattern=" ?")),
        ({"structured_outputs": {"choice": ["x", "y", "x"]}}, ChoiceGrammar(("x", "y"))),
        ({"structured_outputs": {"grammar": "root ::= x", "disable_fallback": True}},
         ContextFreeGrammar("root ::= x")),
        ({"guided_regex": "[a-z]"}, RegexGrammar("[a-z]")),
        ({"guided_choice": ["x"]}, ChoiceGrammar(("x",))),
    ],
)  # fmt: skip
def test_every_spelling_becomes_one_grammar(
    fields: dict[str, Any], grammar: Grammar | None
) -> None:
    """Property order of a schema is kept: it is the order of the answer."""
    found = grammar_of(**fields)
    if grammar is None or found is None:
        assert found is grammar
        return
    assert type(found) is type(grammar)
    names = [name for name in type(grammar).__slots__ if name != "param"]
    assert [getattr(found, n) for n in names] == [getattr(grammar, n) for n in names]


DEEP: dict[str, Any] = {}
for _ in range(80):
    DEEP = {"properties": {"a": DEEP}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "bogus"}}, "response_format.type"),
        ({"response_format": {"type": None}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
         "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
         "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": SCHEMA["properties"]}},
         "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object", "any_whitespace": "no"}},
         "response_format.any_whitespace"),
        # Malformed, although another field counts.
        ({"guided_regex": "a", "response_format": {"type": "bogus"}}, "response_format.type"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": {"minimum": float("nan")}}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": ["a"]}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": "yes"}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice[1]"),
        ({"guided_choice": [1, 2]}, "guided_choice[0]"),
        ({"guided_grammar": ""}, "guided_grammar"),
        ({"guided_grammar": "x" * (MAX_TEXT + 1)}, "guided_grammar"),
        ({"guided_grammar": {}}, "guided_grammar"),
        ({"structured_outputs": "x"}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
        ({"structured_outputs": {"json": True}}, "structured_outputs.json"),
    ],
)  # fmt: skip
def test_malformed_fields_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    """With the path to what is wrong."""
    with pytest.raises(InvalidRequest) as caught:
        grammar_of(**fields)
    assert caught.value.param == param


def test_a_schema_in_a_string_is_no_deeper_than_one_in_the_body() -> None:
    """Nested beyond what any reader of it would stand."""
    with pytest.raises(InvalidRequest, match="nested"):
        grammar_of(guided_json=json.dumps(DEEP))


@pytest.mark.parametrize("name", ["structural_tag", "disable_additional_properties"])
def test_what_is_not_offered_is_refused_by_name(name: str) -> None:
    """Never dropped silently."""
    with pytest.raises(Unsupported) as caught:
        grammar_of(structured_outputs={"json": SCHEMA, name: True})
    assert caught.value.param == f"structured_outputs.{name}"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_warnings_come_as_headers(path: str, stream: bool) -> None:
    """One header each, of one printable line, whatever a client's own words put into it."""
    warnings = ('a is not enforced: "é\r\nSet-Cookie: x=1"', "b" * 1000)
    app = create_app(ScriptedRuntime(said("Hi"), warnings=warnings))
    body = {"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi", "stream": stream}
    response = await app.test_client().post(path, json=body)
    await response.get_data()
    assert response.status_code == 200
    first, second = response.headers.getlist("Warning")
    assert first == "199 mlx-troupe \"a is not enforced: ' Set-Cookie: x=1'\""
    assert second == f'199 mlx-troupe "{"b" * 500}"'
    assert "Set-Cookie" not in response.headers


async def test_without_warnings_there_is_no_header() -> None:
    """As for every ordinary answer."""
    app = create_app(ScriptedRuntime())
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    response = await app.test_client().post("/v1/chat/completions", json=body)
    assert "Warning" not in response.headers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_grammar_that_grows_too_large_in_mid_answer_is_a_400_by_name(
    path: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The error of a stream comes behind what was said; the next request is served.

    It is no fault of the server's, whose log says nothing of it.
    """
    branches = "|".join(f'"x{n}"' for n in range(2100))
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "prompt": "Hi",
        "stream": stream,
        "guided_grammar": f'start: "well, " list\nlist: {branches}',
    }
    model = ModelInfo("scripted", 300, 4096, frozenset({EOS}), namespace="s")
    scripted = ScriptedDevice(model, len, decode_seconds=0.0, prefill_token_seconds=0.0)
    async with company(scripted, tokenizer=ByteTokenizer()) as (runtime, _):
        client = create_app(runtime).test_client()
        response = await client.post(path, json=body)
        text = await response.get_data(as_text=True)
        assert response.status_code == (200 if stream else 400)
        *said_before, last = text.removesuffix("\n\n").split("\n\n")
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["type"] == "invalid_request_error"
        assert error["param"] == "guided_grammar"
        assert "items; max is 2000" in error["message"]
        assert bool(said_before) is stream
        assert "[DONE]" not in text
        assert not caplog.records
        good = {**body, "guided_grammar": 'start: "well"', "stream": False}
        assert (await client.post(path, json=good)).status_code == 200
