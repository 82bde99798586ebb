"""The SSD tier on a real folder and a scripted device: what may happen to files while rows run."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import trio
from company import ask, company, counted, nothing_left, run, settle

from mlx_troupe.actors.disk import FolderDisk, folder_disk
from mlx_troupe.actors.system import Runtime
from mlx_troupe.runtime.requests import Finished
from mlx_troupe.runtime.settings import Settings
from mlx_troupe.runtime.spill.files import Files
from mlx_troupe.runtime.spill.store import SpillStore

HEAD = tuple(range(1, 301))
STREAMS = 8
PATIENCE = 60
"""Seconds that a flush may take before a test gives up."""


class Failing(Files):
    """A disk that fails with one error, at what the test names, once ``broken`` is set."""

    def __init__(self, where: str, number: int) -> None:
        self.where = where
        self.number = number
        self.broken = False

    def _check(self, where: str) -> None:
        if self.broken and where == self.where:
            raise OSError(self.number, os.strerror(self.number))

    def open(self, path: Path) -> BinaryIO:
        self._check("read")
        return super().open(path)

    def create(self, path: Path) -> int:
        self._check("create")
        return super().create(path)

    def write(self, fd: int, data: memoryview) -> int:
        self._check("write")
        return super().write(fd, data[:100])

    def sync(self, fd: int) -> None:
        self._check("sync")
        super().sync(fd)


def figures(runtime: Runtime) -> dict[str, Any]:
    """``/stats.ssd_cache``."""
    block = runtime.stats()["ssd_cache"]
    assert isinstance(block, dict)
    return block


async def stream(runtime: Runtime, last: int) -> int:
    """One request whose text must be right; how much of its prompt was cached."""
    text, end = await run(runtime, ask(*HEAD, last, max_tokens=20))
    assert text == counted(last, 20)
    assert isinstance(end, Finished)
    return end.usage.cached_tokens


async def load(runtime: Runtime, first: int) -> list[int]:
    """Eight streams at once."""
    found: list[int] = []

    async def one(last: int) -> None:
        found.append(await stream(runtime, last))

    async with trio.open_nursery() as nursery:
        for last in range(first, first + STREAMS):
            nursery.start_soon(one, last)
    return found


async def written(folder: Path) -> None:
    """A folder with the states of two prompts."""
    async with company(disk=FolderDisk(SpillStore(folder))) as (runtime, _):
        for last in (900, 901):
            await stream(runtime, last)
        assert (await runtime.flush_cache(PATIENCE)).durable
    assert len(files_of(folder)) == 2


def files_of(folder: Path) -> list[Path]:
    """The files of states."""
    return list(folder.glob("*.safetensors"))


def vanish(folder: Path) -> None:
    shutil.rmtree(folder)


def truncate(folder: Path) -> None:
    for file in files_of(folder):
        os.truncate(file, file.stat().st_size // 2)


def flip(folder: Path) -> None:
    for file in files_of(folder):
        data = bytearray(file.read_bytes())
        data[100] ^= 1
        file.write_bytes(data)


def damage(folder: Path) -> None:
    """The last token of both layers, so that they agree: only their digests tell."""
    for file in files_of(folder):
        data = bytearray(file.read_bytes())
        layer = (len(data) - 8 - int.from_bytes(data[:8], "little")) // 2
        for end in (len(data), len(data) - layer):
            data[end - 4] ^= 1
        file.write_bytes(data)


def become_foreign(folder: Path) -> None:
    for file in files_of(folder):
        file.write_bytes(file.read_bytes().replace(b'"version":"1"', b'"version":"9"'))


@pytest.mark.parametrize("harm", [vanish, truncate, flip, damage, become_foreign])
async def test_files_that_are_harmed_under_a_running_server_cost_a_hit_and_nothing_else(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    """Eight streams that would have been served from them: every text is right."""
    folder = tmp_path / "cache"
    await written(folder)
    disk = folder_disk(Settings(tmp_path, "scripted", ssd_cache=folder))
    async with company(disk=disk, batch=STREAMS) as (runtime, device):
        harm(folder)
        await load(runtime, 800)
        await runtime.flush_cache(PATIENCE)
        stats = figures(runtime)
        assert stats["restores"] == 0
        assert stats["faults"] > 0
        assert max(await load(runtime, 800)) > 0, "memory goes on"
        await settle(runtime)
        nothing_left(runtime, device)


@pytest.mark.parametrize("harm", [truncate, flip, become_foreign])
async def test_files_that_were_harmed_before_a_start_are_counted_and_told(
    tmp_path: Path, harm: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """One line for all of a kind, naming a file; then they are computed and written anew."""
    folder = tmp_path / "cache"
    await written(folder)
    harm(folder)
    async with company(disk=FolderDisk(SpillStore(folder))) as (runtime, _):
        assert await stream(runtime, 900) == 0
        assert (await runtime.flush_cache(PATIENCE)).durable
        assert figures(runtime)["faults"] == 2
    (told,) = [text for r in caplog.records if "SSD cache" in (text := r.getMessage())]
    assert ".safetensors is of no use: " in told
    async with company(disk=FolderDisk(SpillStore(folder))) as (runtime, _):
        assert await stream(runtime, 900) == len(HEAD)


@pytest.mark.parametrize(
    ("where", "number"),
    [
        ("create", errno.EROFS),
        ("write", errno.ENOSPC),
        ("sync", errno.EIO),
        ("read", errno.EIO),
    ],
)
async def test_a_disk_that_fails_under_load_fails_no_request(
    tmp_path: Path, where: str, number: int
) -> None:
    """And once it works again, so does the tier."""
    folder = tmp_path / "cache"
    await written(folder)
    files = Failing(where, number)
    disk = FolderDisk(SpillStore(folder, files=files))
    async with company(disk=disk, batch=STREAMS) as (runtime, device):
        files.broken = True
        await load(runtime, 800)
        report = await runtime.flush_cache(PATIENCE)
        assert figures(runtime)["faults"] > 0
        assert report.durable == (where == "read")
        files.broken = False
        assert (await runtime.flush_cache(PATIENCE)).durable
        await settle(runtime)
        nothing_left(runtime, device)
    async with company(disk=FolderDisk(SpillStore(folder))) as (runtime, _):
        assert await stream(runtime, 800) == len(HEAD)


async def test_two_servers_on_one_folder_do_each_other_no_harm(tmp_path: Path) -> None:
    """Both answer rightly, and a third one finds what both have written."""
    folder = tmp_path / "cache"
    async with (
        company(disk=FolderDisk(SpillStore(folder)), batch=STREAMS) as (one, _),
        company(disk=FolderDisk(SpillStore(folder)), batch=STREAMS) as (other, _),
    ):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load, one, 800)
            nursery.start_soon(load, other, 804)
        for runtime in (one, other):
            assert (await runtime.flush_cache(PATIENCE)).durable
    async with company(disk=FolderDisk(SpillStore(folder))) as (runtime, _):
        for last in (800, 811):
            assert await stream(runtime, last) == len(HEAD)


async def test_the_folder_stays_under_its_cap(tmp_path: Path) -> None:
    """Whatever comes, and at a restart with a smaller one."""
    folder = tmp_path / "cache"
    for cap in (40_000, 20_000):
        disk = FolderDisk(SpillStore(folder, max_bytes=cap))
        async with company(disk=disk, batch=STREAMS) as (runtime, _):
            for start in range(0, 40, 4):
                prompt = tuple((start * 7 + i) % 900 + 1 for i in range(300))
                await run(runtime, ask(*prompt))
            await runtime.flush_cache(PATIENCE)
            held = sum(file.stat().st_size for file in folder.iterdir())
            assert 0 < held <= cap
            assert figures(runtime)["bytes"] == held


async def test_a_flush_writes_in_no_circle_where_the_disk_is_smaller_than_memory(
    tmp_path: Path,
) -> None:
    """What has no room is told each time and written once; what is used again takes its place."""
    disk = FolderDisk(SpillStore(tmp_path, max_bytes=20_000))
    prompts = [tuple((start * 7 + i) % 900 + 1 for i in range(300)) for start in range(0, 40, 4)]
    async with company(disk=disk, batch=STREAMS) as (runtime, _):
        for prompt in prompts:
            await run(runtime, ask(*prompt))
        first = await runtime.flush_cache(PATIENCE)
        assert not first.durable
        assert first.missing == first.crowded > 0
        assert first.flushed > 0
        written, there = figures(runtime)["bytes_written"], set(files_of(tmp_path))
        for _ in range(3):
            again = await runtime.flush_cache(PATIENCE)
            assert (again.durable, again.missing, again.crowded) == (False,) + (first.missing,) * 2
            assert (again.dropped, again.failed, again.pending) == (0, 0, 0)
        assert figures(runtime)["bytes_written"] == written
        assert set(files_of(tmp_path)) == there
        # The one that went first is asked for again: it is worth a place.
        await run(runtime, ask(*prompts[0], max_tokens=1))
        await settle(runtime)
        after = await runtime.flush_cache(PATIENCE)
        assert (after.missing, after.crowded) == (first.missing, first.crowded)
        assert figures(runtime)["bytes_written"] > written
        assert len(set(files_of(tmp_path)) - there) == 1


async def test_a_state_larger_than_the_cap_is_judged_once(tmp_path: Path) -> None:
    """It counts as dropped, and every flush says that there is no room for it, and only that."""
    disk = FolderDisk(SpillStore(tmp_path, max_bytes=1_000))
    async with company(disk=disk) as (runtime, _):
        await stream(runtime, 900)
        first = await runtime.flush_cache(PATIENCE)
        assert (first.missing, first.crowded, first.dropped, first.failed) == (1, 1, 0, 0)
        assert figures(runtime)["dropped_spills"] == 1
        for _ in range(2):
            await stream(runtime, 900)
            again = await runtime.flush_cache(PATIENCE)
            assert (again.missing, again.crowded, again.dropped) == (1, 1, 0)
        assert figures(runtime)["faults"] == 1


async def test_the_hour_of_a_write_budget_outlives_a_restart(tmp_path: Path) -> None:
    """What an earlier server wrote within the hour is spent; what is older is not."""

    async def written(first: int, now: float, budget: int) -> int:
        disk = FolderDisk(SpillStore(tmp_path, clock=lambda: now))
        async with company(disk=disk, ssd_write_budget_bytes=budget) as (runtime, _):
            await run(runtime, ask(*range(first, first + 300)))
            await runtime.flush_cache(PATIENCE)
            return int(figures(runtime)["bytes_written"])

    size = await written(1, 1e9, 1 << 30)
    assert size
    assert not await written(2, 1e9 + 1000, 2 * size - 1)
    assert await written(3, 1e9 + 3700, 2 * size - 1)


async def test_what_memory_uses_goes_last_on_disk(tmp_path: Path) -> None:
    """A prompt that memory serves is never read from the disk, and is in use all the same."""
    disk = FolderDisk(SpillStore(tmp_path, max_bytes=20_000))
    prompts = [tuple((start * 7 + i) % 900 + 1 for i in range(300)) for start in range(0, 40, 4)]
    async with company(disk=disk) as (runtime, _):
        for prompt in prompts:
            await run(runtime, ask(*prompt, max_tokens=1))
            await run(runtime, ask(*prompts[0], max_tokens=1))
            await settle(runtime)
            await runtime.flush_cache(PATIENCE)
        assert figures(runtime)["evictions"] > 0
        assert figures(runtime)["spills"] == len(prompts)
    async with company(disk=FolderDisk(SpillStore(tmp_path))) as (runtime, _):
        _, end = await run(runtime, ask(*prompts[0]))
        assert isinstance(end, Finished)
        assert end.usage.cached_tokens == len(prompts[0]) - 1


async def test_no_file_is_for_others_to_read(tmp_path: Path) -> None:
    """0600 in 0700, whatever the umask; without a flag nothing is written at all."""
    folder = tmp_path / "cache"
    old = os.umask(0)
    try:
        await written(folder)
    finally:
        os.umask(old)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}
