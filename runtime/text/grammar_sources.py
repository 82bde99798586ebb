"""Grammars in the words of the grammar engine (llguidance): one source text for each.

Pure functions, run on the thread that compiles. Says for each kind of grammar what the engine reads
as it stands, what has to be written otherwise, and what has to be left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, assert_never

from ..grammars import (
    MAX_WHITESPACE,
    ChoiceGrammar,
    ContextFreeGrammar,
    Grammar,
    JsonGrammar,
    RegexGrammar,
)
from .schemas import check_schema, fit_formats

_OPTIONS = '%llguidance {"no_forcing": true}\n'


class CannotCompile(Exception):
    """A grammar that the engine cannot turn into masks; the text is fit for a client."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How an answer may begin with a reasoning block, to which the grammar does not apply.

    ``opened``: the prompt opened the block already, so the answer begins inside it.
    """

    start: str
    end: str
    opened: bool


def source_of(grammar: Grammar, reasoning: Reasoning | None) -> tuple[str, tuple[str, ...]]:
    """The engine's own description of an answer, and the formats that it leaves out.

    Raises InvalidRequest: the grammar holds a schema that is none; CannotCompile.
    """
    head = [_OPTIONS, "start: @body"]
    if reasoning is not None:
        head = [_OPTIONS, _start_with(reasoning)]
    body, unenforced = _body(grammar, reasoning)
    grammars = [{"lark_grammar": "".join(head)}, {"name": "body", **body}]
    return json.dumps({"grammars": grammars}), unenforced


def _start_with(reasoning: Reasoning) -> str:
    start, end = json.dumps(reasoning.start), json.dumps(reasoning.end)
    opening = "start: block @body\nblock: thought blanks\n"
    if not reasoning.opened:
        opening = f"start: @body | block @body\nblock: blanks {start} thought blanks\n"
    return f"{opening}thought[suffix={end}]: /(?s:.*)/\nblanks: /[ \\t\\r\\n]*/\n"


def _body(
    grammar: Grammar, reasoning: Reasoning | None
) -> tuple[Mapping[str, object], tuple[str, ...]]:
    """A grammar in the engine's words, and the formats that these leave out."""
    match grammar:
        case JsonGrammar():
            schema, unenforced = _schema(grammar)
            return {"json_schema": schema}, unenforced
        case RegexGrammar(pattern=pattern):
            text = _regex(pattern, reasoning)
        case ChoiceGrammar(choices=choices):
            listed = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
            # One terminal: as many alternatives of a rule would go beyond the engine's limits.
            text = f"start: CHOICE\nCHOICE: {listed}\n"
        case ContextFreeGrammar(text=given):
            text = _lark(given)
        case _:
            assert_never(grammar)
    return {"lark_grammar": _OPTIONS + text}, ()


def _schema(grammar: JsonGrammar) -> tuple[Mapping[str, object], tuple[str, ...]]:
    schema: dict[str, Any] = json.loads(grammar.schema)
    check_schema(schema, grammar.param)
    unenforced = fit_formats(schema)
    # Set here in any case: among the engine's own options is one to ignore what it cannot do.
    options: dict[str, object] = {"whitespace_flexible": False}
    if grammar.whitespace_pattern is not None:
        options = {"whitespace_pattern": grammar.whitespace_pattern}
    elif grammar.any_whitespace:
        options = {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MAX_WHITESPACE}}}"}
    return {**schema, "x-guidance": options}, unenforced


def _regex(pattern: str, reasoning: Reasoning | None) -> str:
    from llguidance import regex_to_lark

    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        # The converter would leave it out.
        raise CannotCompile("it ends in a backslash that escapes nothing")
    text = f"/{regex_to_lark(pattern, '')}/"
    if reasoning is None or reasoning.opened:
        return f"start: {text}\n"
    # An answer that begins like a reasoning block is one, whatever the pattern would allow.
    marker = regex_to_lark("".join(f"\\x{{{ord(c):x}}}" for c in reasoning.start), "")
    return f"start: TEXT\nTEXT: {text} & ~/[ \\t\\r\\n]*{marker}(?s:.*)/ & /(?s:.*)/\n"


def _lark(text: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text)
    except Exception as error:  # a converter of free text, without an error class of its own
        raise CannotCompile(first_line(str(error))) from error


def first_line(message: str) -> str:
    """What an error of the engine comes to, fit for a client."""
    lines = [line.strip() for line in message.strip().splitlines() if line.strip(" ^")]
    # Errors in regular expressions say what is wrong at the end, below a picture of it.
    told = [line for line in lines if line.startswith("error:")] or lines
    return told[0].removeprefix("error: ")[:200] if told else "unknown reason"
