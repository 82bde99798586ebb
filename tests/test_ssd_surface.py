"""The SSD tier as an operator meets it: flags, the flush route, figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from click.testing import CliRunner
from company import ask, company, run
from spill_rig import entry, entry_files, opened, state

from mlx_troupe.actors.checkpoints import Checkpoints
from mlx_troupe.actors.scripted_disk import ScriptedDisk
from mlx_troupe.actors.spill_messages import FlushReport
from mlx_troupe.actors.testing import ScriptedDevice
from mlx_troupe.http.app import create_app
from mlx_troupe.http.cli.banner import banner, tell_of_flush
from mlx_troupe.http.cli.main import cli
from mlx_troupe.http.cli.options import Folder, ssd_settings
from mlx_troupe.http.metrics import COUNTERS, GAUGES
from mlx_troupe.http.seams import HttpSettings
from mlx_troupe.http.testing import ScriptedRuntime
from mlx_troupe.runtime.resume.files import RecordFiles
from mlx_troupe.runtime.resume.records import Record
from mlx_troupe.runtime.spill.faults import DiskFull

FLUSH = "/admin/cache/flush"


def flags(**changes: Any) -> dict[str, Any]:
    """What click hands over, with some flags given."""
    return {
        "ssd_cache": None,
        "ssd_cache_max": None,
        "ssd_cache_verify": None,
        "ssd_demote_idle": None,
        "ssd_write_budget": None,
        "generation_checkpoint": None,
        "paged_kv": False,
        "prompt_cache": 8.0,
    } | changes


def test_the_flags_make_settings() -> None:
    """Sizes are in 10⁹ bytes; idle prompts leave memory after five minutes unless said."""
    folder = Path("/somewhere")
    assert ssd_settings(flags())["ssd_cache"] is None
    given = ssd_settings(flags(ssd_cache=folder, ssd_cache_max=1.5, ssd_write_budget=2.0))
    expected = {
        "ssd_cache": folder,
        "ssd_cache_max_bytes": 1_500_000_000,
        "ssd_cache_verify": True,
        "ssd_demote_idle": 300.0,
        "ssd_write_budget_bytes": 2_000_000_000,
    }
    assert {name: value for name, value in given.items() if name in expected} == expected
    assert ssd_settings(flags(ssd_cache=folder, ssd_demote_idle=0.0))["ssd_demote_idle"] == 0
    trusting = ssd_settings(flags(ssd_cache=folder, ssd_cache_verify=False))
    assert not trusting["ssd_cache_verify"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--ssd-cache-max", "5"), "--ssd-cache-max says nothing without --ssd-cache"),
        (("--ssd-cache-verify",), "--ssd-cache-verify says nothing without --ssd-cache"),
        (("--no-ssd-cache-verify",), "--no-ssd-cache-verify says nothing without --ssd-cache"),
        (("--ssd-demote-idle", "0"), "--ssd-demote-idle says nothing without --ssd-cache"),
        (("--ssd-write-budget", "1"), "--ssd-write-budget says nothing without --ssd-cache"),
        (("--ssd-cache", "x", "--paged-kv"), "--ssd-cache and --paged-kv exclude each other"),
        (("--ssd-cache", "x", "--prompt-cache", "0"), "--ssd-cache needs a prompt cache"),
        (("--ssd-cache", "x", "--ssd-cache-max", "0"), "--ssd-cache-max"),
        (("--ssd-cache", __file__), "is a file"),
        (("--ssd-cache=",), "an empty name is no folder"),
        (("--generation-checkpoint", "8"), "--generation-checkpoint says nothing without --ssd"),
        (("--ssd-cache", "x", "--generation-checkpoint", "0"), "--generation-checkpoint"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_loaded(
    args: tuple[str, ...], words: str
) -> None:
    """In words that name the flags."""
    result = CliRunner().invoke(cli, ["serve", *args])
    assert result.exit_code == 2
    assert words in result.output.replace("\n", " ")


REPORT = FlushReport(True, 3, 0, 0, 0, 0, 0, 0, 0.25, 7, 4096)


async def test_a_flush_is_200_only_when_all_is_durable() -> None:
    """The figures are the same either way."""
    runtime = ScriptedRuntime()
    client = create_app(runtime).test_client()
    runtime.flushed = REPORT
    reply = await client.post(FLUSH)
    assert reply.status_code == 200
    assert await reply.get_json() == {
        "durable": True,
        "flushedSnapshots": 3,
        "missingSnapshots": 0,
        "pendingSnapshots": 0,
        "pendingSpills": 0,
        "pendingSpillBytes": 0,
        "droppedSpills": 0,
        "failedSpills": 0,
        "crowdedOutSnapshots": 0,
        "elapsedMs": 250.0,
        "entries": 7,
        "longest_durable_prefix_tokens": 4096,
    }
    runtime.flushed = FlushReport(False, 2, 1, 1, 512, 1, 0, 1, 120.0, 7, 4096)
    reply = await client.post(FLUSH)
    assert reply.status_code == 503
    body = await reply.get_json()
    assert (body["durable"], body["missingSnapshots"], body["failedSpills"]) == (False, 1, 1)


async def test_a_flush_without_a_disk_or_from_a_foreign_page_is_refused() -> None:
    """503 in words; and no page of another site can keep the disk busy."""
    client = create_app(ScriptedRuntime()).test_client()
    reply = await client.post(FLUSH)
    assert reply.status_code == 503
    assert "no SSD cache" in (await reply.get_json())["error"]["message"]
    reply = await client.post(FLUSH, headers={"Origin": "https://elsewhere.example"})
    assert reply.status_code == 415
    assert (await client.get(FLUSH)).status_code == 405


async def test_the_route_and_the_figures_of_a_whole_runtime(autojump_clock: object) -> None:
    """A full disk makes the flush a 503 and moves a counter; room again makes it a 200."""
    disk = ScriptedDisk(save_seconds=0.1)
    async with company(disk=disk) as (runtime, _):
        client = create_app(runtime).test_client()
        disk.fault = DiskFull("no space left")
        await run(runtime, ask(*range(1, 100)))
        reply = await client.post(FLUSH)
        assert reply.status_code == 503
        assert (await reply.get_json())["missingSnapshots"] == 1
        disk.fault = None
        reply = await client.post(FLUSH)
        assert reply.status_code == 200
        text = await (await client.get("/metrics")).get_data(as_text=True)
        stats = (await (await client.get("/stats")).get_json())["ssd_cache"]
    assert stats["entries"] == stats["spills"] == 1
    assert stats["longest_durable_prefix_tokens"] == 103
    assert stats["failed_spills"] == stats["faults"] > 0
    assert stats["pending_spills"] == stats["pending_spill_bytes"] == 0
    for line in (
        "mlx_troupe_ssd_cache_entries 1.0",
        "mlx_troupe_ssd_cache_spills_total 1.0",
        f"mlx_troupe_ssd_cache_faults_total {float(stats['faults'])}",
        "mlx_troupe_ssd_cache_pending_bytes 0.0",
    ):
        assert line in text


async def test_every_series_of_the_runtime_has_a_figure(autojump_clock: object) -> None:
    """One that is left out for a figure that has another name now would not be missed by anyone."""
    async with company(disk=ScriptedDisk()) as (runtime, _):
        reply = await create_app(runtime).test_client().get("/metrics")
        text = await reply.get_data(as_text=True)
    told = {line.split()[0] for line in text.splitlines() if not line.startswith("#")}
    assert {name for name, _, _ in GAUGES} <= told
    assert {f"{name}_total" for name, _, _ in COUNTERS} <= told


INF_05 = (
    "dir entries bytes max_bytes restores spills restore_ms_last demotions pending_snapshots "
    "pending_spills pending_spill_bytes dropped_spills failed_spills longest_durable_prefix_tokens"
)


async def test_the_disk_block_counts_what_waits_of_answers_too(tmp_path: Path) -> None:
    """All of the documented fields are there; an answer that cannot be written is a failed one."""
    (tmp_path / "file").write_text("in the way")
    async with company(disk=ScriptedDisk()) as (runtime, _):
        runtime.checkpoints = Checkpoints(4, RecordFiles(tmp_path / "file"))
        runtime.checkpoints.keep(Record("ab", 1, (1, 2, 3)))
        stats = runtime.stats()["ssd_cache"]
        assert isinstance(stats, dict)
        assert set(INF_05.split()) <= set(stats)
        assert (stats["pending_spills"], stats["failed_spills"]) == (1, 0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(runtime.checkpoints.run)
            await runtime.checkpoints.flush()
            nursery.cancel_scope.cancel()
        stats = runtime.stats()["ssd_cache"]
        assert isinstance(stats, dict)
        assert (stats["pending_spills"], stats["failed_spills"] > 0) == (0, True)


def test_the_home_folder_is_meant_behind_an_equals_sign_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No shell replaces the sign there."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Folder().convert("~/cache", None, None) == tmp_path / "cache"


async def test_the_first_lines_say_what_is_in_the_folder(autojump_clock: object) -> None:
    """Whoever named the wrong one sees it."""
    disk = ScriptedDisk()
    async with company(disk=disk) as (runtime, _):
        await run(runtime, ask(*range(1, 100)))
        assert (await runtime.flush_cache(60)).durable
    async with company(disk=disk) as (runtime, _):
        model = await runtime.wait_ready()
        ssd = runtime.stats()["ssd_cache"]
        told = banner(runtime.settings, model, HttpSettings(), "http://x", ssd)
        assert "\nssd      scripted (prompts: 1, 0.0 MB)\n" in told
        assert "ssd " not in banner(runtime.settings, model, HttpSettings(), "http://x")
    other = ScriptedDevice(replace(model, namespace="in 8 bits"))
    async with company(other, disk=disk) as (runtime, _):
        ssd = runtime.stats()["ssd_cache"]
        told = banner(runtime.settings, model, HttpSettings(), "http://x", ssd)
        assert "(prompts: 1, 0.0 MB; 1 of another model, setting or version)\n" in told


def test_a_folder_is_cleared_by_a_command(tmp_path: Path) -> None:
    """Of prompts, damaged ones too, and of answers; what is not ours stays."""
    store = opened(tmp_path)
    for ids in ((1, 2), (3, 4)):
        store.save(entry(*ids), state(entry(*ids)))
    entry_files(tmp_path)[0].rename(tmp_path / f"{'0' * 40}.bad")
    records = RecordFiles(tmp_path / "answers")
    records.open()
    records.write(Record("ab", 1, (1, 2, 3)))
    for name in ("notes.txt", "answers/notes.txt", "model.safetensors"):
        (tmp_path / name).write_text("theirs")
    result = CliRunner().invoke(cli, ["clear", str(tmp_path)])
    assert (result.exit_code, result.output.split(",")[0]) == (
        0,
        f"3 files removed from {tmp_path}",
    )
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    assert left == {"answers", "notes.txt", "answers/notes.txt", "model.safetensors"}
    assert "0 files" in CliRunner().invoke(cli, ["clear", str(tmp_path)]).output
    nowhere = CliRunner().invoke(cli, ["clear", str(tmp_path / "nowhere")])
    assert (nowhere.exit_code, "does not exist" in nowhere.output) == (2, True)


def test_a_stop_tells_what_was_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    """And says nothing when all is well."""
    tell_of_flush(REPORT)
    tell_of_flush(replace(REPORT, durable=False))
    assert capsys.readouterr().err == ""
    tell_of_flush(FlushReport(False, 2, 1, 3, 512, 1, 0, 1, 120.0, 7, 4096))
    assert "3 kept prompts were not written" in capsys.readouterr().err
    tell_of_flush(FlushReport(False, 2, 1, 0, 0, 0, 0, 0, 120.0, 7, 4096))
    assert "1 kept prompt was not written" in capsys.readouterr().err
    tell_of_flush(FlushReport(False, 2, 0, 0, 0, 0, 2, 0, 120.0, 7, 4096))
    assert capsys.readouterr().err == "SSD cache: 2 kept prompts were given up before.\n"
    tell_of_flush(replace(REPORT, durable=False, missing=3, crowded=2))
    assert capsys.readouterr().err == (
        "SSD cache: 1 kept prompt was not written.\n"
        "SSD cache: 2 kept prompts were left out for want of room.\n"
    )
    tell_of_flush(None)
    assert "not known" in capsys.readouterr().err


async def test_figures_cost_no_disk(autojump_clock: object) -> None:
    """They are there while the disk is busy."""
    disk = ScriptedDisk(save_seconds=1000)
    async with company(disk=disk) as (runtime, _):
        await run(runtime, ask(*range(1, 100)))
        await trio.sleep(1)
        stats = runtime.stats()["ssd_cache"]
        assert isinstance(stats, dict)
        assert (stats["pending_spills"], stats["pending_snapshots"]) == (1, 0)
