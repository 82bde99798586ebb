"""The starter under JSON Schemas: real text, a real tokenizer, free rows beside."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest
import trio

from mlx_troupe.actors.system import Runtime, open_runtime
from mlx_troupe.runtime.grammars import ChoiceGrammar, Grammar, JsonGrammar
from mlx_troupe.runtime.requests import (
    ChatPrompt,
    Finished,
    FinishReason,
    GenerationRequest,
    Message,
    SamplingRequest,
    TextDelta,
)
from mlx_troupe.runtime.settings import Settings
from mlx_troupe.runtime.store.starter import ensure_starter

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "inhabitants": {"type": "integer", "minimum": 1, "maximum": 99_999_999},
        "capital": {"type": "boolean"},
    },
    "required": ["city", "inhabitants", "capital"],
    "additionalProperties": False,
}
TITLE = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 40}, "rating": {"type": "number"}},
    "required": ["title", "rating"],
}
PROSE = "Tell me about Paris in one short sentence, without any JSON."


async def answer(runtime: Runtime, grammar: Grammar | None, seed: int | None) -> tuple[str, Any]:
    """Text and end of one chat."""
    sampling = SamplingRequest(temperature=0.0 if seed is None else 0.8, seed=seed)
    request = GenerationRequest(
        ChatPrompt((Message("user", PROSE),)), sampling, max_tokens=90, grammar=grammar
    )
    text, end = "", None
    async with runtime.generate(request) as generation:
        assert generation.warnings == ()
        async for event in generation:
            if isinstance(event, TextDelta):
                text += event.text
            else:
                end = event
    return text, end


@pytest.mark.starter
async def test_answers_parse_and_validate_although_the_prompt_asks_for_prose() -> None:
    """Four schemas, greedy and seeded, a choice, and a free row, all in one batch."""
    asked: dict[str, tuple[Grammar | None, int | None]] = {
        "city": (JsonGrammar(json.dumps(CITY)), None),
        "seeded": (JsonGrammar(json.dumps(CITY)), 3),
        "compact": (JsonGrammar(json.dumps(CITY), any_whitespace=False), 4),
        "title": (JsonGrammar(json.dumps(TITLE), any_whitespace=False), None),
        "choice": (ChoiceGrammar(("a city", "a river")), None),
        "free": (None, None),
    }
    said: dict[str, tuple[str, Any]] = {}
    async with open_runtime(Settings(ensure_starter(), "starter", dtype="float32")) as runtime:
        await runtime.wait_ready()

        async def ask(name: str) -> None:
            said[name] = await answer(runtime, *asked[name])

        async with trio.open_nursery() as nursery:
            for name in asked:
                nursery.start_soon(ask, name)
    ended = {name: text for name, (text, end) in said.items() if _stopped(end)}
    assert {"compact", "title", "choice", "free"} <= set(ended)
    for name, schema in (("city", CITY), ("seeded", CITY), ("compact", CITY), ("title", TITLE)):
        if name in ended:
            jsonschema_rs.validate(schema, json.loads(ended[name]))
    assert " " not in ended["compact"].partition('"inhabitants"')[2]
    assert ended["choice"] in ("a city", "a river")
    assert not ended["free"].startswith("{")


def _stopped(end: object) -> bool:
    assert isinstance(end, Finished)
    return end.reason is FinishReason.STOP
