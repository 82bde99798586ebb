"""Whether a client's JSON Schema is one: checked against the standard's own meta-schemas.

Pure functions, run on the thread that compiles grammars. What a valid schema asks for and the
grammar engine cannot do is not found here but by ``matching``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from ..errors import InvalidRequest

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
DIALECTS = frozenset(
    {
        "http://json-schema.org/draft-04/schema",
        "http://json-schema.org/draft-06/schema",
        "http://json-schema.org/draft-07/schema",
        "https://json-schema.org/draft/2019-09/schema",
        "https://json-schema.org/draft/2020-12/schema",
    }
)
"""Values of ``$schema`` whose meta-schemas are at hand: none is ever fetched."""

DATA_KEYWORDS = frozenset({"const", "default", "enum", "example", "examples"})
"""Keywords whose values are data, in which nothing is a reference."""

MAP_KEYWORDS = frozenset(
    {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
)
"""Keywords whose values hold schemas by names of the client's own."""

FORMATS = frozenset(
    {
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "idn-email",
        "idn-hostname",
        "ipv4",
        "ipv6",
        "iri",
        "iri-reference",
        "json-pointer",
        "regex",
        "relative-json-pointer",
        "time",
        "uri",
        "uri-reference",
        "uri-template",
        "uuid",
    }
)
"""All that the standard defines; the engine knows most of them."""


def check_schema(schema: dict[str, Any], param: str) -> None:
    """Raise InvalidRequest, naming ``param``, for what is no JSON Schema.

    The dialect is the one that ``$schema`` names, else 2020-12 or, for older schemas that do not
    say so, draft 7. References within the schema must lead somewhere.
    """
    named = schema.get("$schema")
    if named is None:
        refusal = _refusal(schema)
        if refusal and not _refusal({**schema, "$schema": DRAFT_7}):
            refusal = None
    elif isinstance(named, str) and named.removesuffix("#") in DIALECTS:
        refusal = _refusal(schema)
    else:
        refusal = (".$schema", "this dialect is not known")
    if refusal is not None:
        where, why = refusal
        raise InvalidRequest(f"{param}{where} is not valid in a JSON Schema: {why}", param=param)
    for reference in _references(schema):
        if not _leads_somewhere(schema, reference):
            raise InvalidRequest(
                f"{param}: the reference {_short(reference)!r} leads nowhere", param=param
            )


def drop_other_formats(schema: dict[str, Any]) -> None:
    """Take every ``format`` out, in place, that the standard does not define.

    Libraries write ``password``, ``path`` or ``binary`` there. By the standard these say nothing
    about a text, and the engine would refuse the whole schema for one of them.
    """
    for part in _parts(schema):
        if isinstance(name := part.get("format"), str) and name not in FORMATS:
            del part["format"]


def _refusal(schema: dict[str, Any]) -> tuple[str, str] | None:
    """Where a schema breaks its dialect's rules and how, or None."""
    # Imported when the first schema comes, as the grammar engine is.
    from jsonschema_rs import ValidationError, meta

    try:
        meta.validate(schema)
    except ValidationError as error:
        where = "".join(f".{part}" for part in error.instance_path)
        return where, _short(error.message)
    return None


def _references(schema: dict[str, Any]) -> Iterator[str]:
    """All ``$ref`` by JSON pointer; others (anchors, other documents) are left to the engine."""
    for part in _parts(schema):
        reference = part.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/"):
            yield reference


def _parts(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schema and all objects in it that may be schemas, but for data."""
    pending: list[Any] = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        elif isinstance(value, dict):
            yield value
            for key, item in value.items():
                if key in MAP_KEYWORDS and isinstance(item, dict):
                    pending += item.values()
                elif key not in DATA_KEYWORDS:
                    pending.append(item)


def _leads_somewhere(schema: Mapping[str, Any], reference: str) -> bool:
    place: Any = schema
    for part in unquote(reference[2:]).split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(place, Mapping) and key in place:
            place = place[key]
        elif isinstance(place, list) and key.isdecimal() and int(key) < len(place):
            place = place[int(key)]
        else:
            return False
    return True


def _short(text: str) -> str:
    return text if len(text) <= 160 else text[:160] + "…"
