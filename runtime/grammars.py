"""What an answer's text may be restricted to, as plain values.

Made at the edge or by a caller of the library, frozen, and compiled for each request by
``runtime.text.matching``. ``param`` is the name under which the client sent it, for messages.
Knows neither a tokenizer nor a wire format.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TypeAlias, assert_never

MAX_WHITESPACE = 24
"""Longest run of white space between two parts of a JSON text. JSON itself has no bound, and small
models that may always add one more line end never come to the closing brace."""


@dataclass(frozen=True, slots=True)
class JsonGrammar:
    """JSON text that a schema allows.

    Properties come in the order in which the schema lists them.

    Attributes:
        schema: a JSON Schema object, as JSON text.
        any_whitespace: blanks and line ends may stand between parts; else JSON is compact.
        whitespace_pattern: a regular expression for what may stand there instead.
    """

    schema: str
    any_whitespace: bool = True
    whitespace_pattern: str | None = None
    param: str = "grammar"


@dataclass(frozen=True, slots=True)
class RegexGrammar:
    """Text that a regular expression matches as a whole. No look-around, no back-references."""

    pattern: str
    param: str = "grammar"


@dataclass(frozen=True, slots=True)
class ChoiceGrammar:
    """One of these texts, none of them empty."""

    choices: tuple[str, ...]
    param: str = "grammar"


@dataclass(frozen=True, slots=True)
class ContextFreeGrammar:
    """Text that a grammar produces, written in Lark's notation or in GBNF."""

    text: str
    param: str = "grammar"


Grammar: TypeAlias = JsonGrammar | RegexGrammar | ChoiceGrammar | ContextFreeGrammar

ANY_OBJECT = '{"type": "object"}'
"""The schema of any JSON object."""


def in_words(grammar: Grammar) -> str:
    """An instruction to a model that asks for what the grammar would have enforced."""
    match grammar:
        case JsonGrammar(schema=schema):
            if schema == ANY_OBJECT:
                return "Answer with one JSON object and nothing else."
            return f"Answer with JSON and nothing else. It must match this JSON Schema:\n{schema}"
        case RegexGrammar(pattern=pattern):
            return (
                "Answer with nothing but a text that this regular expression matches as a whole:\n"
                f"{pattern}"
            )
        case ChoiceGrammar(choices=choices):
            listed = "\n".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
            return f"Answer with exactly one of these texts, without the quotes:\n{listed}"
        case ContextFreeGrammar(text=text):
            return f"Answer with nothing but a text that this grammar produces:\n{text}"
        case _:
            assert_never(grammar)
