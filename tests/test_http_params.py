"""What a request body may say: ranges, nulls, unsupported features, messages, prompts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_troupe.http.testing import MODEL
from mlx_troupe.http.wire.chat import chat_call
from mlx_troupe.http.wire.completions import completion_call
from mlx_troupe.http.wire.params import Call
from mlx_troupe.http.wire.parsing import parse_json
from mlx_troupe.runtime.errors import InvalidRequest, RequestError, Unsupported
from mlx_troupe.runtime.requests import (
    ChatPrompt,
    SamplingRequest,
)

USER = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> Call:
    """A parsed chat call with these fields."""
    return chat_call({"messages": [USER], **fields}, MODEL)


def completion(**fields: Any) -> Call:
    """A parsed text completion with these fields."""
    return completion_call({"prompt": "hi", **fields}, MODEL)


def raw_chat(fields: str) -> Call:
    """A parsed chat call whose further fields are raw JSON."""
    body = f'{{"messages":[{{"role":"user","content":"hi"}}],{fields}}}'
    return chat_call(parse_json(body.encode()), MODEL)


NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
BAD_NUMBERS = ("NaN", "Infinity", "-Infinity", '"NaN"', '"1"', "true", "[]", "{}", "1e400", "99")


@pytest.mark.parametrize("value", BAD_NUMBERS)
@pytest.mark.parametrize("name", NUMBERS)
def test_bad_numbers_name_their_field(name: str, value: str) -> None:
    """NaN, infinities, text, booleans and far values are refused by name."""
    with pytest.raises(InvalidRequest) as caught:
        raw_chat(f'"{name}":{value}')
    assert caught.value.param == name
    assert name in caught.value.message


@pytest.mark.parametrize(
    "fields",
    [
        '"temperature":-1',
        '"temperature":5.1',
        '"top_p":2.0',
        '"top_p":-0.5',
        '"min_p":1.01',
        '"top_k":-2',
        '"top_k":1.5',
        '"top_k":true',
        '"repetition_penalty":-1',
        '"repetition_penalty":NaN',
        '"repetition_context_size":-1',
        '"presence_penalty":2.1',
        '"frequency_penalty":-2.1',
        '"xtc_threshold":0.6',
        '"max_tokens":0',
        '"max_tokens":-1',
        '"max_tokens":"10"',
        '"max_tokens":10.0',
        '"max_tokens":true',
        '"max_completion_tokens":0',
        '"seed":1.5',
        '"seed":"7"',
        '"seed":18446744073709551616',
        '"n":0',
        '"n":-1',
        '"n":true',
        '"n":"2"',
        '"stop":1',
        '"stop":[1,2]',
        '"stop":{}',
        f'"stop":{json.dumps("x" * 2049)}',
        f'"stop":{json.dumps([str(n) + "x" * 1100 for n in range(2)])}',
        '"stop_token_ids":["a"]',
        '"stop_token_ids":[-1]',
        '"stop_token_ids":[100]',
        '"stream":1',
        '"stream":"true"',
        '"stream_options":[]',
        '"stream_options":true',
        '"model":7',
        f'"model":"{"m" * 513}"',
        '"logit_bias":[]',
        '"logit_bias":"x"',
        '"logit_bias":{"a":1}',
        '"logit_bias":{"-1":1}',
        '"logit_bias":{"1":"x"}',
        '"logit_bias":{"1":null}',
        '"logit_bias":{"1":true}',
        '"logit_bias":{"1":NaN}',
        '"logit_bias":{"1":101}',
        f'"logit_bias":{{"1":1{"0" * 400}}}',
        '"logit_bias":{"100":1}',
        '"logit_bias":{"99999999":5}',
        '"reasoning_effort":"extreme"',
        '"reasoning_effort":3',
        '"chat_template_kwargs":[]',
        '"chat_template_kwargs":"x"',
        '"session_id":5',
        '"prompt_cache_key":{}',
    ],
)
def test_invalid_values_name_their_field(fields: str) -> None:
    """Each invalid value is refused and the error's ``param`` begins with the field."""
    with pytest.raises(InvalidRequest) as caught:
        raw_chat(fields)
    name = fields.split('"')[1]
    assert (caught.value.param or "").split(".")[0].split("[")[0] == name


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].function",
        ),
        ({"response_format": {}}, "response_format.type"),
        ({"hlg": {"missing": 1}}, "hlg.missing"),
        ({"structured_outputs": {"x" * 500: 1}}, f"structured_outputs.{'x' * 64}"),
    ],
)
def test_fields_that_are_missing_or_unknown_are_named(fields: dict[str, Any], param: str) -> None:
    """Not only the object that they are missing from."""
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert caught.value.message.startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"n": 2}, "n"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tools": {}}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"suffix": "x"}, "suffix"),
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"chat_template_kwargs": {"tools": [1]}}, "chat_template_kwargs"),
    ],
)
def test_unsupported_features_are_refused_by_name(fields: dict[str, Any], name: str) -> None:
    """What later versions may do is a 400 now, never dropped."""
    with pytest.raises(Unsupported) as caught:
        chat(**fields)
    assert caught.value.param == name
    assert name in caught.value.message
    assert caught.value.code == "unsupported_parameter"


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tools": None, "tool_choice": None},
        {"tool_choice": "none"},
        {"tool_choice": "auto"},
        {"response_format": {"type": "text"}},
        {"logprobs": False, "top_logprobs": None},
        {"top_logprobs": 0},
        {"logprobs": False, "top_logprobs": -1},
        {"n": 1, "best_of": 1},
        {"echo": False, "suffix": None},
        {"modalities": ["text"]},
        {"user": "u", "store": True, "metadata": {"a": 1}, "parallel_tool_calls": True},
        {"brand_new_field": {"x": 1}},
        {"session_id": "s", "prompt_cache_key": "k"},
        {"stream_options": {}},
        {"stop": []},
    ],
)
def test_neutral_values_and_unknown_fields_are_fine(fields: dict[str, Any]) -> None:
    """Fields that ask for nothing, and fields that nobody knows, change nothing."""
    assert chat(**fields) == chat()


def test_null_is_absent() -> None:
    """Every known field may be null."""
    names = [n for n in chat_fields() if n != "messages"]
    assert chat(**dict.fromkeys(names)) == chat()


def chat_fields() -> tuple[str, ...]:
    """Names of all fields of a chat request."""
    from mlx_troupe.http.wire.chat import ChatRequest

    return ChatRequest.__struct_fields__


def test_limits_and_sampling_are_passed_on() -> None:
    """Every parameter reaches the runtime as sent."""
    call = raw_chat(
        '"temperature":1,"top_p":0.9,"top_k":100000,"min_p":0.1,"seed":-5,"max_tokens":1e9,'
        '"logit_bias":{"7":-100,"3":2.5},"stop":["b","a","b"],"stop_token_ids":[5],'
        '"presence_penalty":-2,"frequency_penalty":2,"repetition_penalty":1.1,'
        '"repetition_context_size":0,"xtc_probability":0.5,"xtc_threshold":0.2,"stream":true,'
        '"stream_options":{"include_usage":true}'
    )
    assert call.stream
    assert call.include_usage
    assert call.request.max_tokens == 10**9
    assert call.request.stop == ("b", "a")
    assert call.request.stop_token_ids == (5,)
    assert call.request.sampling == SamplingRequest(
        temperature=1.0,
        top_p=0.9,
        top_k=100000,
        min_p=0.1,
        seed=-5,
        logit_bias=((3, 2.5), (7, -100.0)),
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        repetition_penalty=1.1,
        repetition_context_size=0,
        xtc_probability=0.5,
        xtc_threshold=0.2,
    )


def test_off_and_winner_rules() -> None:
    """top_k -1 is off, a bare stop string is a list of one, max_completion_tokens wins."""
    assert chat(top_k=-1).request.sampling.top_k == 0
    assert chat(stop="x").request.stop == ("x",)
    assert chat(stop="").request.stop == chat(stop=[""]).request.stop == ()
    assert chat(stop=["", "b", "a", "", "b"]).request.stop == ("b", "a")
    many = [str(n) for n in range(500)]
    assert chat(stop=[*many, *many]).request.stop == tuple(many)
    assert chat(max_tokens=9, max_completion_tokens=5).request.max_tokens == 5
    assert chat(max_completion_tokens=5).request.max_tokens == 5


def test_bias_error_text() -> None:
    """A bias that is no mapping of ids is refused in the words that clients know."""
    with pytest.raises(InvalidRequest, match=r"^logit_bias must be a dict of int to float$"):
        chat(logit_bias={"x": 1})


@pytest.mark.parametrize(
    ("effort", "explicit", "expected"),
    [
        (None, None, {}),
        ("none", None, {"enable_thinking": False}),
        ("low", None, {"enable_thinking": True, "reasoning_effort": "low"}),
        (
            "xhigh",
            {"enable_thinking": False},
            {"enable_thinking": False, "reasoning_effort": "xhigh"},
        ),
        (None, {"a": {"b": 1}}, {"a": {"b": 1}}),
    ],
)
def test_reasoning_effort(effort: Any, explicit: Any, expected: dict[str, Any]) -> None:
    """Effort becomes template arguments; the client's own win."""
    prompt = chat(reasoning_effort=effort, chat_template_kwargs=explicit).request.prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.template_kwargs == expected


def test_bad_effort_lists_the_six() -> None:
    """The error names all six levels."""
    with pytest.raises(InvalidRequest, match="none, minimal, low, medium, high, xhigh"):
        chat(reasoning_effort="max")


TEXT = st.text(st.sampled_from("a1-.\ud800\u00e9"), max_size=3)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
FIELDS = st.dictionaries(st.sampled_from([*chat_fields(), "prompt", "tools", "logprobs"]), JSON)


@given(FIELDS)
def test_any_body_is_parsed_or_refused(body: dict[str, Any]) -> None:
    """Whatever JSON comes, the outcome is a call or a RequestError, never another exception."""
    text = json.dumps(body).encode()
    for parse in (chat_call, completion_call):
        try:
            call = parse(parse_json(text), MODEL)
        except RequestError:
            continue
        assert isinstance(call, Call)
