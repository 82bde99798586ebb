"""Whether a client's JSON Schema is one: checked against the standard's own meta-schemas.

Pure functions, run on the thread that compiles grammars. What a valid schema asks for and the
grammar engine cannot do is not found here but by ``matching``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from ..errors import InvalidRequest
from .formats import PATTERNS

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

SCHEMA_KEYWORDS = frozenset(
    {
        "additionalItems",
        "additionalProperties",
        "allOf",
        "anyOf",
        "contains",
        "contentSchema",
        "else",
        "if",
        "items",
        "not",
        "oneOf",
        "prefixItems",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    }
)
"""Keywords whose value is a schema, or a list of them. Those of all others are data."""

MAP_KEYWORDS = frozenset(
    {
        "$defs",
        "definitions",
        "dependencies",
        "dependentSchemas",
        "patternProperties",
        "properties",
    }
)
"""Keywords whose values hold schemas by names of the client's own."""

KNOWN_FORMATS = frozenset(
    {
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "uri",
        "uuid",
    }
)
"""Those that are left to the engine."""

OTHER_FORMATS = frozenset({"idn-email", "idn-hostname", "regex"})
"""Those of the standard that nobody here enforces: each would take a parser of its own."""


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
    for part, document in _schemas(schema):
        reference = _pointer_in(part)
        if reference is not None and _place(document, reference) is None:
            raise InvalidRequest(
                f"{param}: the reference {_short(reference)!r} leads nowhere", param=param
            )


def fit_formats(schema: dict[str, Any]) -> tuple[str, ...]:
    """Change every ``format``, in place, that is not left to the engine, which may refuse it.

    What a regular expression says as well becomes a ``pattern``. Others are left out; those of the
    standard are returned. Names of the client's own, such as ``password`` or ``path``, say nothing
    about a text.
    """
    left_out = set[str]()
    for part, _ in _schemas(schema):
        name = part.get("format")
        if not isinstance(name, str) or name in KNOWN_FORMATS:
            continue
        del part["format"]
        if name in PATTERNS:
            _add_pattern(part, PATTERNS[name])
        elif name in OTHER_FORMATS:
            left_out.add(name)
    return tuple(sorted(left_out))


def _add_pattern(schema: dict[str, Any], pattern: str) -> None:
    if "pattern" not in schema:
        schema["pattern"] = pattern
    elif isinstance(others := schema.setdefault("allOf", []), list):
        others.append({"pattern": pattern})


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


def _schemas(schema: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The schema and all that belong to it, each with what its references begin at.

    Those come last that stand where no schema is expected and that a reference leads to.
    """
    pending: list[tuple[Any, dict[str, Any]]] = [(schema, schema)]
    referred: list[tuple[Any, dict[str, Any]]] = []
    seen = set[int]()
    while pending or referred:
        part, document = pending.pop() if pending else referred.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part.get("$id"), str) and not part["$id"].startswith("#"):
            document = part
        yield part, document
        pending += [(each, document) for each in _parts(part)]
        if (reference := _pointer_in(part)) is not None:
            referred.append((_place(document, reference), document))


def _parts(schema: dict[str, Any]) -> Iterator[Any]:
    """What stands where schemas are expected, right below a schema."""
    for key, value in schema.items():
        if key in MAP_KEYWORDS and isinstance(value, dict):
            yield from value.values()
        elif key in SCHEMA_KEYWORDS:
            yield from value if isinstance(value, list) else (value,)


def _pointer_in(schema: Mapping[str, Any]) -> str | None:
    """Its ``$ref``, if that is a JSON pointer; anchors and other documents are the engine's."""
    reference = schema.get("$ref")
    return reference if isinstance(reference, str) and reference.startswith("#/") else None


def _place(document: Mapping[str, Any], reference: str) -> Any:
    """What a reference by JSON pointer leads to, or None."""
    place: Any = document
    for part in unquote(reference[2:]).split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(place, Mapping) and key in place:
            place = place[key]
        elif isinstance(place, list) and key.isdecimal() and int(key) < len(place):
            place = place[int(key)]
        else:
            return None
    return place


def _short(text: str) -> str:
    return text if len(text) <= 160 else text[:160] + "…"
