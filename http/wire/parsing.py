"""From request bytes to typed structs, with an error that names the field.

Pure functions; no task, no clock. Bodies are read with the standard library's parser, since it
takes ``NaN`` and so lets the field check name the culprit, and are then fitted to a
``msgspec.Struct``: strictly, so that no string or boolean passes for a number.

Rules: UTF-8 without a byte order mark; of equal keys the last wins; at most ``MAX_DEPTH`` levels;
no lone surrogate in any string or key (no tokenizer takes one); ``null`` is an absent field;
unknown fields are ignored. A number written with a decimal point is never an integer, ``1e9`` is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from mlx_troupe.runtime.errors import InvalidRequest

MAX_DEPTH = 64
"""Deepest nesting that a body may have; real requests stay under 20, schemas included."""

INT64 = 2**63

_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_KEY = re.compile(r"^Object (?P<fault>missing|contains)[a-z ]* field `(?P<key>[^`]{0,64})")
_MAY_HOLD_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

T = TypeVar("T", bound=msgspec.Struct)


def parse_json(body: bytes) -> Mapping[str, object]:
    """The object in a request body. Raises InvalidRequest (``invalid_json``)."""
    if not body.strip():
        raise _invalid("the body is empty")
    try:
        value = json.loads(body.decode("utf-8"), parse_float=_number)
    except UnicodeDecodeError:
        raise _invalid("the body is not UTF-8") from None
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        raise _invalid(f"{error.msg} at character {error.pos}") from None
    except ValueError:
        raise _invalid("a number has too many digits") from None
    if not isinstance(value, dict):
        raise _invalid("the body must be a JSON object")
    check_tree(value, surrogates=_MAY_HOLD_SURROGATE.search(body) is not None)
    return value


def check_tree(root: Mapping[str, object], *, surrogates: bool) -> None:
    """Refuse nesting beyond MAX_DEPTH and, if asked, strings that are not valid Unicode."""
    level: list[tuple[str, object]] = list(root.items())
    for _ in range(MAX_DEPTH):
        if surrogates:
            _check_strings(level)
        level = [child for field, value in level for child in _children(field, value)]
        if not level:
            return
    raise _too_deep()


def fit(value: Mapping[str, object], shape: type[T]) -> T:
    """``value`` as a ``shape``. Raises InvalidRequest naming the field in ``param``."""
    try:
        return msgspec.convert(value, shape, strict=True)
    except msgspec.ValidationError as error:
        text = str(error)
    found = _PATH.search(text)
    param = found["path"] if found else ""
    problem = text[: found.start()] if found else text
    if (object_ := _KEY.match(problem)) is not None:
        param = f"{param}.{object_['key']}".removeprefix(".")
        problem = "required" if object_["fault"] == "missing" else "not a known field"
    problem = problem.replace("`", "").replace(" | null", "")
    raise InvalidRequest(f"{param or 'body'}: {_in_words(problem)}", param=param or None)


def _number(literal: str) -> float | int:
    value = float(literal)
    if "." not in literal and value.is_integer() and abs(value) < INT64:
        return int(value)
    return value


def _children(field: str, value: object) -> list[tuple[str, object]]:
    if isinstance(value, dict):
        return [(field, child) for item in value.items() for child in item]
    if isinstance(value, list):
        return [(field, child) for child in value if isinstance(child, (dict, list, str))]
    return []


def _check_strings(level: list[tuple[str, object]]) -> None:
    for field, value in level:
        if isinstance(value, str) and not _is_unicode(value):
            raise InvalidRequest(f"{field}: lone surrogates are not valid text", param=field)
        if not _is_unicode(field):
            raise _invalid("a key holds a lone surrogate")


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _in_words(problem: str) -> str:
    return problem[:1].lower() + problem[1:]


def _invalid(reason: str) -> InvalidRequest:
    return InvalidRequest(f"invalid JSON body: {reason}", code="invalid_json")


def _too_deep() -> InvalidRequest:
    return _invalid(f"nested deeper than {MAX_DEPTH} levels")
