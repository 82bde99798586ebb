"""HLG sampling from the wire and the command line to a resolved row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from mlx_troupe.http.cli.options import hlg_options
from mlx_troupe.http.testing import MODEL
from mlx_troupe.http.wire.chat import chat_call
from mlx_troupe.http.wire.parsing import parse_json
from mlx_troupe.runtime.defaults import SamplingDefaults, resolve_sampling
from mlx_troupe.runtime.errors import InvalidRequest
from mlx_troupe.runtime.requests import Hlg, HlgRequest, Sampling, SamplingRequest
from mlx_troupe.runtime.settings import Settings

USUAL = Hlg(4.0, 4.0, 6.0, 6.0)
SERVERS = Hlg(3.0, 2.0, 0.0, 5.0)


def asked(hlg: Any) -> HlgRequest | None:
    """What a chat with this ``hlg`` asks for."""
    body = {"messages": [{"role": "user", "content": "hi"}], "hlg": hlg}
    return chat_call(parse_json(json.dumps(body).encode()), MODEL).request.sampling.hlg


def resolved(hlg: Any, *, on: bool = False, curve: Hlg = USUAL, **more: Any) -> Sampling:
    """The row of a chat with this ``hlg`` on a server with these defaults."""
    settings = Settings(Path("/nowhere"), "m", hlg=curve, hlg_sampling=on, top_p=0.9, top_k=40)
    wanted = SamplingRequest(hlg=asked(hlg), **more)
    return resolve_sampling(wanted, SamplingDefaults.load(settings), MODEL)


@pytest.mark.parametrize(
    ("hlg", "on", "curve"),
    [
        (None, False, None),
        (None, True, SERVERS),
        ({}, False, None),
        ({}, True, SERVERS),
        ({"enabled": True}, False, SERVERS),
        ({"enabled": False}, True, None),
        ({"enabled": False, "width": 2}, True, None),
        ({"width": 2}, False, Hlg(2.0, 2.0, 0.0, 5.0)),
        ({"shoulder": 0, "toe": 1.5, "pivot_offset": 7}, True, Hlg(3.0, 0.0, 1.5, 7.0)),
    ],
)
def test_a_request_wins_over_the_server(hlg: Any, on: bool, curve: Hlg | None) -> None:
    """What a request leaves out is the server's; any figure of its own turns the curve on."""
    row = resolved(hlg, on=on, curve=SERVERS)
    assert row.hlg == curve
    assert (row.top_p, row.top_k) == ((0.9, 40) if curve is None else (0.0, 0))


def test_a_curve_replaces_what_the_request_says_itself() -> None:
    """top_p and top_k of the same request are off; the temperature and min_p are not."""
    row = resolved({"enabled": True}, top_p=0.5, top_k=3, min_p=0.1, temperature=0.3)
    assert row == Sampling(0.3, min_p=0.1, seed=row.seed, hlg=USUAL)


@pytest.mark.parametrize(
    ("hlg", "param"),
    [
        (True, "hlg"),
        ([], "hlg"),
        ("on", "hlg"),
        ({"enabled": "yes"}, "hlg.enabled"),
        ({"width": -1}, "hlg.width"),
        ({"shoulder": 101}, "hlg.shoulder"),
        ({"toe": "6"}, "hlg.toe"),
        ({"pivot_offset": float("nan")}, "hlg.pivot_offset"),
        ({"pivot_offset": float("inf")}, "hlg.pivot_offset"),
        ({"widht": 3}, "hlg.widht"),
    ],
)
def test_bad_curves_are_refused_by_name(hlg: Any, param: str) -> None:
    """Types, ranges and unknown names, which would otherwise be silently dropped."""
    with pytest.raises(InvalidRequest) as caught:
        asked(hlg)
    assert caught.value.param == param


def test_a_library_caller_is_checked_too() -> None:
    """Values that never passed the wire are refused by name as well."""
    wanted = SamplingRequest(hlg=HlgRequest(width=-2.0))
    with pytest.raises(InvalidRequest) as caught:
        resolve_sampling(wanted, SamplingDefaults(), MODEL)
    assert caught.value.param == "hlg.width"


def test_flags_of_the_command_line() -> None:
    """Off unless asked for; the four figures have the usual values."""
    seen: list[dict[str, Any]] = []

    @click.command
    @hlg_options
    def command(**flags: Any) -> None:
        seen.append(flags)

    for arguments in ([], ["--hlg-sampling", "--hlg-width", "2", "--hlg-pivot-offset", "0"]):
        assert CliRunner().invoke(command, arguments).exit_code == 0
    usual = {"hlg_width": 4.0, "hlg_shoulder": 4.0, "hlg_toe": 6.0, "hlg_pivot_offset": 6.0}
    assert seen == [
        {"hlg_sampling": False, **usual},
        {**usual, "hlg_sampling": True, "hlg_width": 2.0, "hlg_pivot_offset": 0.0},
    ]
    for bad in (["--hlg-toe", "-1"], ["--hlg-toe", "nan"], ["--hlg-shoulder", "101"]):
        assert CliRunner().invoke(command, bad).exit_code == 2
