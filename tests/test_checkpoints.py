"""States of running rows on their way to the disk: soon, and always the newest."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
import trio.testing
from company import ask, company, nothing_left, settle, until

from mlx_troupe.actors.scripted_disk import ScriptedDisk
from mlx_troupe.actors.system import Runtime
from mlx_troupe.actors.testing import ScriptedDevice
from mlx_troupe.runtime.model_info import ModelInfo
from mlx_troupe.runtime.requests import TextDelta
from mlx_troupe.runtime.spill.candidates import Candidate
from mlx_troupe.runtime.spill.faults import Unfit
from mlx_troupe.runtime.spill.state import HostState, nbytes

EVERY = 8
PROMPT = 30
UNDER_WAY = 4
"""Steps between a token and its state in the disk's hands: two in which its state is copied, and
two that are under way when its bytes are asked for."""
PLAIN = ModelInfo("scripted", 1000, 4096, frozenset({0}), namespace="s")
MODELS = {"plain": PLAIN, "whole": replace(PLAIN, trim_window=0)}


class TimedDisk(ScriptedDisk):
    """Takes ``slow`` seconds for states of no running row, and notes when it is given others."""

    def __init__(self, seconds: float, slow: float) -> None:
        super().__init__(save_seconds=seconds)
        self.slow = slow
        self.is_busy = False
        self.begun: list[tuple[float, Candidate]] = []

    async def save(self, candidate: Candidate, state: HostState) -> int:
        if candidate.is_urgent:
            self.begun.append((trio.current_time(), candidate))
        else:
            self.is_busy = True
            await trio.sleep(self.slow)
        return await super().save(candidate, state)


def figures(runtime: Runtime) -> dict[str, int]:
    """``/stats.ssd_cache``."""
    block = runtime.stats()["ssd_cache"]
    assert isinstance(block, dict)
    return block


class ContinuingDisk(ScriptedDisk):
    """Is given what a running row gained since its last state; at ``unfit`` tokens all of it."""

    def __init__(self, unfit: int = 0) -> None:
        super().__init__(save_seconds=0.1)
        self.unfit = unfit
        self.runtime: Runtime | None = None
        self.given: list[tuple[int, int]] = []
        self.copied: list[tuple[int, int]] = []

    def continued(self, candidate: Candidate) -> int:
        return max((last for _, last in self.given if last < len(candidate.ids)), default=0)

    async def save(self, candidate: Candidate, state: HostState) -> int:
        if candidate.is_urgent:
            assert self.runtime is not None
            self.copied.append((figures(self.runtime)["copied_for_spill_bytes"], nbytes(state)))
            if state.first and state.length == self.unfit:
                raise Unfit("its keys are encoded from here on")
            self.given.append((state.first, state.length))
        return await super().save(candidate, state)


class Reader:
    """A client that notes when each token came."""

    def __init__(self, first: int, tokens: int) -> None:
        self.prompt = tuple(range(first, first + PROMPT))
        self.tokens = tokens
        self.came: list[float] = []

    async def read(self, runtime: Runtime) -> None:
        """One whole answer."""
        async with runtime.generate(ask(*self.prompt, max_tokens=self.tokens)) as generation:
            async for event in generation:
                if isinstance(event, TextDelta):
                    self.came += [trio.current_time()] * event.text.count(" ")

    def lateness(self, at: float, candidate: Candidate) -> float:
        """Seconds between the token that made a state due and the disk's being given it."""
        due = len(candidate.ids) - PROMPT
        return at - self.came[due] if due >= 0 else 0.0


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("seconds", [0.5, 30.0], ids=["quick disk", "slow disk"])
async def test_what_is_written_is_never_old(
    model: str, rows: int, seconds: float, autojump_clock: trio.testing.MockClock
) -> None:
    """Behind no other write, and never more than the interval behind, however slow the disk is."""
    device = ScriptedDevice(MODELS[model], decode_seconds=1.0, prefill_token_seconds=0.0)
    disk = TimedDisk(seconds, slow=1000.0)
    async with company(device, disk=disk, batch=8, generation_checkpoint=EVERY) as (runtime, _):
        runtime.checkpoints.every = EVERY
        # A state of no running row keeps its writer busy all the time.
        await Reader(900, 20).read(runtime)
        await until(lambda: disk.is_busy)
        disk.begun.clear()
        readers = {100 * n: Reader(100 * n, 60) for n in range(1, 1 + rows)}
        async with trio.open_nursery() as nursery:
            for reader in readers.values():
                nursery.start_soon(reader.read, runtime)
        for first, reader in readers.items():
            begun = [(at, c) for at, c in disk.begun if c.ids[0] == first and at <= reader.came[-1]]
            late = [reader.lateness(at, candidate) for at, candidate in begun]
            assert max(late) <= UNDER_WAY + (EVERY if seconds > EVERY or rows > 4 else 1)
            lengths = [len(candidate.ids) for _, candidate in begun]
            assert lengths == sorted(set(lengths))
            if seconds < EVERY:
                assert lengths == [PROMPT - 1 + n * EVERY for n in range(len(lengths))]
                assert len(lengths) >= 60 // EVERY
        await runtime.flush_cache(5000)


@pytest.mark.parametrize("model", MODELS)
async def test_one_state_of_a_running_row_is_kept(
    model: str, autojump_clock: trio.testing.MockClock
) -> None:
    """In memory the newer one takes the older one's place, whether it covers it or not."""
    device = ScriptedDevice(MODELS[model], decode_seconds=1.0, prefill_token_seconds=0.0)
    disk = ScriptedDisk()
    entries: set[object] = set()
    async with company(device, disk=disk, generation_checkpoint=EVERY) as (runtime, _):
        runtime.checkpoints.every = EVERY
        reader = Reader(100, 60)
        async with runtime.generate(ask(*reader.prompt, max_tokens=60)) as generation:
            async for _ in generation:
                entries.add(runtime.cast.cache.core.stats().entries)
        await settle(runtime)
        assert 1 in entries
        assert entries <= {0, 1}
        assert runtime.cast.cache.core.stats().entries == 1
        await runtime.flush_cache(100)
        assert len(disk.states) > 60 // EVERY
        nothing_left(runtime, device)


async def continue_row(unfit: int = 0) -> tuple[ContinuingDisk, dict[str, int]]:
    """A row of sixty tokens, written as it goes on; the disk, and the figures of the tier."""
    device = ScriptedDevice(PLAIN, decode_seconds=1.0, prefill_token_seconds=0.0)
    disk = ContinuingDisk(unfit)
    async with company(device, disk=disk, generation_checkpoint=EVERY) as (runtime, _):
        runtime.checkpoints.every = EVERY
        disk.runtime = runtime
        await Reader(100, 60).read(runtime)
        await runtime.flush_cache(100)
        return disk, figures(runtime)


async def test_a_copy_of_a_running_rows_state_counts_as_what_was_exported(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Not as all of the state, most of which the disk has."""
    disk, _ = await continue_row()
    assert len(disk.copied) > 60 // EVERY - 1
    assert all(counted == copied for counted, copied in disk.copied)
    assert disk.copied[-1][1] == disk.copied[1][1] < disk.copied[0][1]


async def test_a_state_that_cannot_continue_its_rows_last_one_is_written_whole(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """At the checkpoint at which the row's form has changed; nothing is lost or complained of."""
    unfit = PROMPT - 1 + 3 * EVERY
    disk, told = await continue_row(unfit)
    assert (0, unfit) in disk.given
    assert (unfit, unfit + EVERY) in disk.given
    assert (told["faults"], told["pending_spills"]) == (0, 0)
    assert [last for _, last in disk.given] == [
        PROMPT - 1 + n * EVERY for n in range(len(disk.given))
    ]
