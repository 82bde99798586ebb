"""Formats of JSON Schema that the grammar engine does not know, or not well, as expressions.

Pure data, made once from the rules of RFC 3339 (dates and times), 3986 and 3987 (URIs and IRIs),
6570 (URI templates) and 6901 (JSON pointers). An expression matches exactly the texts of its
format, but for leap seconds, which it takes in UTC only. The engine knows dates and times, too, but
not which years have a 29th of February and which minutes a 60th second.
"""

from __future__ import annotations

from collections.abc import Mapping

_HEX = "[0-9A-Fa-f]"
_ENCODED = f"%{_HEX}{{2}}"
_PLAIN = r"A-Za-z0-9\-._~"
_MARKS = "!$&'()*+,;="
_BEYOND_ASCII = "".join(
    f"{chr(first)}-{chr(last)}"
    for first, last in (
        (0xA0, 0xD7FF),
        (0xF900, 0xFDCF),
        (0xFDF0, 0xFFEF),
        *((plane << 16, plane << 16 | 0xFFFD) for plane in range(1, 14)),
        (0xE1000, 0xEFFFD),
    )
)
_PRIVATE = "".join(
    f"{chr(first)}-{chr(last)}"
    for first, last in ((0xE000, 0xF8FF), (0xF0000, 0xFFFFD), (0x100000, 0x10FFFD))
)


def _one_of(characters: str) -> str:
    return f"(?:[{characters}]|{_ENCODED})"


def _ipv6() -> str:
    group = f"{_HEX}{{1,4}}"
    byte = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
    end = rf"(?:{group}:{group}|(?:{byte}\.){{3}}{byte})"
    forms = [f"(?:{group}:){{6}}{end}"]
    for before in range(8):
        # "::" stands for one group of zeros at least, so seven are left for both sides of it.
        begin = f"(?:(?:{group}:){{0,{before - 1}}}{group})?" if before else ""
        after = {6: group, 7: ""}.get(before, f"(?:{group}:){{{5 - before}}}{end}")
        forms.append(f"{begin}::{after}")
    return "|".join(forms)


def _reference(more: str = "", private: str = "", *, absolute: bool = False) -> str:
    """A URI or a reference to one; ``more`` characters may stand wherever letters may."""
    letters = _PLAIN + _MARKS + more
    address = rf"\[(?:{_ipv6()}|[vV]{_HEX}+\.[{_PLAIN}{_MARKS}:]+)\]"
    host = f"(?:{address}|{_one_of(letters)}*)"
    authority = f"//(?:{_one_of(letters + ':')}*@)?{host}(?::[0-9]*)?"
    part = _one_of(letters + ":@")
    parts = f"(?:/{part}*)*"
    after = letters + ":@/?"
    tail = rf"(?:\?{_one_of(after + private)}*)?(?:#{_one_of(after)}*)?"
    path = f"{authority}{parts}|/(?:{part}+{parts})?|"
    with_scheme = rf"[A-Za-z][A-Za-z0-9+\-.]*:(?:{path}{part}+{parts})?"
    without = f"(?:{path}{_one_of(letters + '@')}+{parts})?"
    return f"{with_scheme}{tail}" if absolute else f"(?:{with_scheme}|{without}){tail}"


def _template() -> str:
    literal = _one_of("!#$&-;=?-\\[\\]_a-z~" + _BEYOND_ASCII + _PRIVATE)
    letter = _one_of("A-Za-z0-9_")
    name = rf"{letter}(?:\.?{letter})*"
    variable = rf"{name}(?::[1-9][0-9]{{0,3}}|\*)?"
    return rf"(?:{literal}|\{{[+#./;?&=,!@|]?{variable}(?:,{variable})*\}})*"


_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAY = (
    "(?:[0-9]{4}-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])"
    "|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
    f"|{_LEAP_YEAR}-02-29)"
)
_HOUR = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_FRACTION = r"(?:\.[0-9]+)?"
_TIME = f"(?:{_HOUR}:[0-5][0-9]{_FRACTION}(?:[zZ]|[+\\-]{_HOUR})|23:59:60{_FRACTION}[zZ])"
_POINTER = "(?:/(?:[^/~]|~[01])*)*"

PATTERNS: Mapping[str, str] = {
    name: f"^{pattern}$"
    for name, pattern in {
        "date": _DAY,
        "date-time": f"{_DAY}[tT]{_TIME}",
        "iri": _reference(_BEYOND_ASCII, _PRIVATE, absolute=True),
        "iri-reference": _reference(_BEYOND_ASCII, _PRIVATE),
        "json-pointer": _POINTER,
        "relative-json-pointer": f"(?:(?:0|[1-9][0-9]*)(?:#|{_POINTER}))",
        "time": _TIME,
        "uri-reference": _reference(),
        "uri-template": _template(),
    }.items()
}
"""Whole texts, by format."""
