"""``--adapter`` and ``--adapter-dir`` on the command line, on a scripted company."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
import trio
from scripted_adapters import write_adapter
from test_cli import Asked, asked, invoke

from mlx_troupe.http.cli.serve import run_server
from mlx_troupe.http.server import Stop
from mlx_troupe.runtime.settings import Settings

__all__ = ["asked"]


def plans_of(stage: Asked) -> list[tuple[str, ...]]:
    """Adapter revisions of all rows that were started."""
    return [start.adapters for plan in stage.device.plans for start in plan.start]


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_an_answer_is_made_with_the_adapters_named(
    asked: Asked, command: str, tmp_path: Path
) -> None:
    """All of them, in the order given; without the flag there is none."""
    a, b = write_adapter(tmp_path / "a", 1), write_adapter(tmp_path / "b", 2)
    plain = ("--temperature", "0", "--max-tokens", "2")
    invoke(command, *plain, stdin="3\n")
    invoke(command, *plain, "--adapter", str(b), "--adapter-path", str(a), stdin="3\n")
    without, with_both = plans_of(asked)
    assert without == ()
    assert len(with_both) == 2


@pytest.mark.parametrize("command", ["serve", "generate", "chat"])
@pytest.mark.parametrize("fault", ["missing", "empty", "torn", "no id", "twice"])
def test_a_bad_adapter_is_told_before_a_model_is_looked_for(
    asked: Asked, command: str, fault: str, tmp_path: Path
) -> None:
    """In words that name the folder."""
    folders = [tmp_path / "sql"]
    if fault == "empty":
        folders[0].mkdir()
    elif fault == "torn":
        write_adapter(folders[0])
        (folders[0] / "adapters.safetensors").write_bytes(b"\xff" * 20)
    elif fault == "no id":
        folders = [write_adapter(tmp_path / "my sql")]
    elif fault == "twice":
        folders = [write_adapter(tmp_path / "sql"), write_adapter(tmp_path / "x" / "sql")]
    flags = [part for folder in folders for part in ("--adapter", str(folder))]
    port = ("--port", "0") if command == "serve" else ()
    result = invoke(command, *port, *flags, stdin="3\n")
    assert result.exit_code == (2 if fault == "missing" else 1)
    assert "sql" in result.stderr
    assert not asked.queries


def test_flags_of_serve_reach_the_settings(
    asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is mounted at start, and where clients may look for more."""
    seen: list[tuple[object, ...]] = []
    monkeypatch.setattr(trio, "run", lambda function, *rest: seen.append(rest))
    folder = write_adapter(tmp_path / "sql")
    flags = ("--adapter", str(folder), "--adapter-dir", str(tmp_path), "--port", "0")
    assert invoke("serve", *flags).exit_code == 0
    settings, _, _, rest = seen[0]
    assert isinstance(settings, Settings)
    assert settings.adapters == (folder,)
    assert isinstance(rest, dict)
    assert rest["adapter_dirs"] == (tmp_path,)


@pytest.mark.parametrize("named", [False, True])
async def test_what_serve_offers_to_its_clients(
    asked: Asked,
    tmp_path: Path,
    named: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Directories given; else the folders mounted at start and the cache's own, no more."""
    monkeypatch.setenv("MLX_TROUPE_CACHE", str(tmp_path / "cache"))
    write_adapter(tmp_path / "cache" / "adapters" / "cached", 1)
    start = write_adapter(tmp_path / "private" / "start", 2)
    write_adapter(tmp_path / "private" / "beside", 3)
    write_adapter(tmp_path / "given" / "one", 4)
    stops: list[Stop] = []
    real_stop = Stop

    def remembered() -> Stop:
        stops.append(real_stop())
        return stops[-1]

    monkeypatch.setattr("mlx_troupe.http.server.Stop", remembered)
    flags = {
        "allowed_hosts": (),
        "cors_origins": (),
        "keepalive": 15.0,
        "adapter_dirs": (tmp_path / "given",) if named else (),
        "ignore_sessions": False,
    }
    settings = Settings(Path("/nowhere"), "scripted", adapters=(start,))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_server, settings, "127.0.0.1", 0, flags)
        told = ""
        with trio.fail_after(60):
            while "Ctrl-C stops" not in told:
                await trio.sleep(0.01)
                told += capsys.readouterr().out
        lines = dict(line.split(maxsplit=1) for line in told.splitlines() if "  " in line.strip())
        assert lines["adapter"] == "start"
        async with httpx.AsyncClient(base_url=lines["address"]) as client:
            offered = (await client.get("adapters/available")).json()["data"]
            mounted = (await client.get("adapters")).json()["data"]
        assert [card["id"] for card in mounted] == ["start"]
        expected = ["one"] if named else ["cached", "start"]
        assert [card["path"] for card in offered] == expected
        stops[0].drain.set()


def test_the_answer_as_json_is_that_of_the_adapter(asked: Asked, tmp_path: Path) -> None:
    """The flag goes with the others."""
    folder = write_adapter(tmp_path / "sql")
    result = invoke("generate", "--prompt", "3", "--temp", "0", "--adapter", str(folder), "--json")
    assert json.loads(result.stdout)["finish_reason"] == "length"
    assert len(plans_of(asked)[0]) == 1
