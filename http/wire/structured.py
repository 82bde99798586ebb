"""Fields that restrict what an answer may be, and the one grammar that they add up to.

Pure functions. All of these fields are checked, and the first of them counts: ``guided_grammar``,
``response_format`` with a schema, ``guided_json``, ``response_format`` with any JSON object,
``structured_outputs``, ``guided_regex``, ``guided_choice``. White space is left to the model unless
``response_format`` or ``structured_outputs`` says otherwise. What a schema says is checked where it
is compiled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from mlx_troupe.runtime.errors import InvalidRequest, Unsupported
from mlx_troupe.runtime.grammars import (
    ANY_OBJECT,
    ChoiceGrammar,
    ContextFreeGrammar,
    Grammar,
    JsonGrammar,
    RegexGrammar,
)

from .parsing import check_tree

FORMATS = ("text", "json_object", "json_schema")
MAX_CHOICES = 10_000
MAX_TEXT = 1 << 18
"""Most characters of a grammar or an expression: converting one from GBNF takes a second for every
50,000 of them. Schemas have no limit but the body's."""

Schema = dict[str, object]
SchemaText = Annotated[str, Meta(min_length=1)]
Text = Annotated[str, Meta(min_length=1, max_length=MAX_TEXT)]
Choices = Annotated[list[Text], Meta(min_length=1, max_length=MAX_CHOICES)]


class NamedSchema(Struct):
    """``response_format.json_schema``; its name and strictness change nothing here."""

    schema: Schema | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct):
    """``response_format``; ``any_whitespace: false`` asks for compact JSON."""

    type: str
    json_schema: NamedSchema | None = None
    any_whitespace: bool | None = None


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """``structured_outputs``: one constraint, and how JSON is written."""

    json: Schema | SchemaText | None = None
    json_object: bool | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    structural_tag: object = None
    any_whitespace: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: Text | None = None
    disable_fallback: bool | None = None
    disable_additional_properties: bool | None = None


class StructuredParams(Struct, kw_only=True):
    """All fields of this kind as they come over the wire."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | SchemaText | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None


def to_grammar(params: StructuredParams) -> Grammar | None:
    """What the answer must be; None = anything. Raises InvalidRequest or Unsupported."""
    wanted = params.structured_outputs or StructuredOutputs()
    answer = params.response_format or ResponseFormat("text")
    _check(wanted)
    found: tuple[Grammar | None, ...] = (
        _context_free(params.guided_grammar, "guided_grammar"),
        _named_schema(answer, wanted),
        _json(params.guided_json, "guided_json", wanted),
        _json_object(answer, wanted),
        _structured(wanted),
        _regex(params.guided_regex, "guided_regex"),
        _choice(params.guided_choice, "guided_choice"),
    )
    return next((grammar for grammar in found if grammar is not None), None)


def _check(wanted: StructuredOutputs) -> None:
    if wanted.structural_tag is not None:
        raise Unsupported(
            "structured_outputs.structural_tag is not supported by this server",
            param="structured_outputs.structural_tag",
        )
    if wanted.disable_additional_properties:
        raise Unsupported(
            "structured_outputs.disable_additional_properties is not supported by this server; say "
            "additionalProperties: false in the schema",
            param="structured_outputs.disable_additional_properties",
        )


def _named_schema(answer: ResponseFormat, wanted: StructuredOutputs) -> Grammar | None:
    if answer.type not in FORMATS:
        raise InvalidRequest(
            f"response_format.type: must be one of {', '.join(FORMATS)}",
            param="response_format.type",
        )
    if answer.type != "json_schema":
        return None
    if answer.json_schema is None or answer.json_schema.schema is None:
        param = "response_format.json_schema"
        param = param if answer.json_schema is None else f"{param}.schema"
        raise InvalidRequest(f"{param} required", param=param)
    schema, param = answer.json_schema.schema, "response_format.json_schema.schema"
    return _as_json(_written(schema, param), param, wanted, answer.any_whitespace)


def _json_object(answer: ResponseFormat, wanted: StructuredOutputs) -> Grammar | None:
    if answer.type != "json_object":
        return None
    return _as_json(ANY_OBJECT, "response_format", wanted, answer.any_whitespace)


def _structured(wanted: StructuredOutputs) -> Grammar | None:
    name = "structured_outputs"
    any_object = ANY_OBJECT if wanted.json_object else None
    found = [
        grammar
        for grammar in (
            _json(wanted.json, f"{name}.json", wanted),
            _json(any_object, f"{name}.json_object", wanted),
            _regex(wanted.regex, f"{name}.regex"),
            _choice(wanted.choice, f"{name}.choice"),
            _context_free(wanted.grammar, f"{name}.grammar"),
        )
        if grammar is not None
    ]
    if len(found) > 1:
        names = " and ".join(grammar.param for grammar in found)
        raise InvalidRequest(f"{name}: {names} exclude each other", param=name)
    return found[0] if found else None


def _json(value: Schema | str | None, param: str, wanted: StructuredOutputs) -> Grammar | None:
    """A schema, written as an object or as its JSON text."""
    if value is None:
        return None
    if isinstance(value, dict):
        return _as_json(_written(value, param), param, wanted, None)
    try:
        schema = json.loads(value)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{param}: the text is not JSON", param=param) from None
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{param}: must be a JSON Schema object", param=param)
    check_tree(schema, surrogates=True)
    return _as_json(_written(schema, param), param, wanted, None)


def _written(schema: Schema, param: str) -> str:
    try:
        return json.dumps(schema, allow_nan=False)
    except ValueError:
        raise InvalidRequest(f"{param}: NaN and infinity are not JSON", param=param) from None


def _as_json(
    schema: str, param: str, wanted: StructuredOutputs, any_whitespace: bool | None
) -> JsonGrammar:
    compact = (
        any_whitespace is False
        or wanted.any_whitespace is False
        or bool(wanted.disable_any_whitespace)
    )
    return JsonGrammar(schema, not compact, wanted.whitespace_pattern, param)


def _regex(value: str | None, param: str) -> Grammar | None:
    return None if value is None else RegexGrammar(value, param)


def _choice(value: Sequence[str] | None, param: str) -> Grammar | None:
    return None if value is None else ChoiceGrammar(tuple(dict.fromkeys(value)), param)


def _context_free(value: str | None, param: str) -> Grammar | None:
    return None if value is None else ContextFreeGrammar(value, param)
