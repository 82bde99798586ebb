"""Formats as regular expressions: the same texts as a validator takes, and no others."""

from __future__ import annotations

import random
import re

import jsonschema_rs
import pytest

from mlx_troupe.runtime.text.formats import PATTERNS

SAMPLES = {
    "date": ("2024-02-29", "2023-02-28", "1900-02-29", "2000-02-29", "2023-04-31", "2023-02-29"),
    "date-time": ("2024-02-29T23:59:59Z", "0001-01-01t00:00:00.5+23:59", "2023-02-29T00:00:00z"),
    "time": ("23:59:60Z", "23:59:60.25z", "12:34:56.789-08:00", "11:37:60Z", "24:00:00Z", "1:2:3Z"),
    "json-pointer": ("", "/", "/a/~0~1", '/é\n"', "a", "/~2", "/~", "#/a"),
    "relative-json-pointer": ("0", "1#", "12/a/~1", "0/", "", "01", "-1", "0##", "1a", "/a"),
    "uri-template": ("", "{a}", "a{+b,c.d:30}{?e*}%20é", "{", "{}", "{a:0}", "{a b}", "<", "%2"),
}
LINKS = (
    "http://a:b@h.example:8/p//q;x?y/z?#f/?",
    "//h",
    "/a/b",
    "a/b:c",
    "a:b",
    "a:",
    "",
    "?q",
    "#f",
    "urn:x:y%20é",
    "mailto:a@\ue000",
    "x:?\ue000#\ue000",
    "//[::]/",
    "//[::1:2.3.4.255]:",
    "//[1:2:3:4:5:6:7:8]",
    "//[1:2:3:4:5:6::8]",
    "//[1:2:3:4:5:6:7::]",
    "//[1::3:4:5:6:7:8]",
    "//[v1.a:b]",
    "1a:b",
    "a b",
    "//[1:2]",
    "//a@b@c",
    "//h:x",
    "%",
    "\\",
)
CHARACTERS = "aF09:/?#[]@!$&'()*+,;=%.-_~{}|^`\"<> é\u00a0\ue000\U0001f600\n"


def variants(samples: tuple[str, ...], chosen: random.Random) -> list[str]:
    """The samples, and what becomes of them by some edits at random."""
    made = list(samples)
    for _ in range(3000):
        text = chosen.choice(samples)
        for _ in range(chosen.randrange(1, 4)):
            place = chosen.randrange(len(text) + 1)
            more = chosen.choice((chosen.choice(CHARACTERS), chosen.choice(samples), ""))
            text = text[:place] + more + text[place + chosen.randrange(2) :]
        made.append(text)
    return made


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_takes_what_the_validator_takes_and_nothing_else(name: str) -> None:
    """Of thousands of texts that are nearly of the format, many are and many are not."""
    validator = jsonschema_rs.validator_for(
        {"type": "string", "format": name}, validate_formats=True
    )
    pattern = re.compile(PATTERNS[name].removeprefix("^").removesuffix("$"))
    verdicts = []
    for text in variants(SAMPLES.get(name, LINKS), random.Random(name)):
        verdicts.append(validator.is_valid(text))
        assert (pattern.fullmatch(text) is not None) is verdicts[-1], text
    assert 100 < sum(verdicts) < 2900
