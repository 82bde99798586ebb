"""Hybrid and recurrent models through the MLX device: rows that share steps, kept and resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import trio
from company import WordTokenizer, ask, run
from device_rig import Driver, start_row
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import ArraysCache
from tiny import load_oracle, make_checkpoint, prompt

from mlx_troupe.actors.system import Runtime, open_runtime
from mlx_troupe.runtime.engine import drawing
from mlx_troupe.runtime.plans import (
    FromRow,
    FromSnapshot,
    KeepRow,
    PrefillRow,
    RowId,
    SnapshotId,
    SnapshotMade,
    SnapshotSkipped,
)
from mlx_troupe.runtime.requests import Finished
from mlx_troupe.runtime.settings import Settings

pytestmark = pytest.mark.mlx

A, B, C, D = (RowId(n) for n in range(1, 5))
KEPT = SnapshotId(1)
FAMILIES = ("qwen3_5", "mamba2", "lfm2", "mamba")
SURE = 16
"""Ids compared with mlx-lm's; a near-tie of a batch may fall otherwise further on."""


class HybridDriver(Driver):
    """With mlx-lm's model beside the device."""

    def __init__(self, path: Path, **options: Any) -> None:
        super().__init__(path, **options)
        self._oracle = load_oracle(path)

    def solo(self, ids: Sequence[int], count: int = SURE) -> list[int]:
        """What mlx-lm alone goes on with."""
        steps = generate_step(mx.array(list(ids)), self._oracle, max_tokens=count)
        return [token for token, _ in steps]

    def assert_solo(self, row: RowId, ids: Sequence[int]) -> None:
        """The row said what it would alone."""
        said = self.tokens[row][:SURE]
        assert said
        assert said == self.solo(ids, len(said)), f"row {row}"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoints by family, each written once."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = make_checkpoint(tmp_path_factory.mktemp(family) / "m", family)
        return made[family]

    return folder


@pytest.fixture
def drive(folders: Callable[[str], Path]) -> Iterator[Callable[..., HybridDriver]]:
    """Opens drivers and closes their devices."""
    opened: list[HybridDriver] = []

    def open_(family: str, **options: Any) -> HybridDriver:
        opened.append(HybridDriver(folders(family), **options))
        return opened[-1]

    yield open_
    for driver in opened:
        driver.device.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_lengths_chunked_prefill_and_a_cancel(
    family: str, drive: Callable[..., HybridDriver]
) -> None:
    """Rows come while others run, in chunks; one is dropped in its prefill; nobody notices."""
    driver = drive(family)
    assert driver.info.batchable
    assert driver.info.lone_reason == ""
    prompts = {A: prompt(9, 1), B: prompt(70, 2), C: prompt(33, 3), D: prompt(1, 4)}
    driver.step(
        start=tuple(start_row(row, ids) for row, ids in prompts.items()),
        prefill=(PrefillRow(A, 8), PrefillRow(B, 20), PrefillRow(C, 11)),
        decode=(D,),
    )
    driver.step(prefill=(PrefillRow(B, 30), PrefillRow(C, 5)), decode=(A, D))
    driver.step(end=(C,), prefill=(PrefillRow(B, 19),), decode=(D, A))
    driver.decode(SURE, A, B, D)
    assert driver.device.stats().batched_rows == 3
    for row in (A, B, D):
        driver.assert_solo(row, prompts[row])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_that_ended_a_token_ago_is_kept_without_it(
    family: str, drive: Callable[..., HybridDriver]
) -> None:
    """Out of a batch with two steps under way; the next turn goes on from there, in company."""
    driver = drive(family, ahead=True)
    ids, other = prompt(12, 5), prompt(40, 6)
    driver.step(
        start=(start_row(A, ids), start_row(B, other)),
        prefill=(PrefillRow(A, 11), PrefillRow(B, 39)),
    )
    driver.decode(5, A, B)
    driver.step(decode=(A, B))
    ended = [*ids, *driver.tokens[A]]
    have = len(ids) - 1 + 6
    assert have - 1 == len(ended) - 1
    driver.step(keep=(KeepRow(A, have - 1, KEPT),), end=(A,), decode=(B,))
    (made,) = driver.settle().kept
    assert isinstance(made, SnapshotMade)
    turn = [*ended[: have - 1], *prompt(7, 8)]
    driver.step(
        start=(start_row(C, turn, FromSnapshot(KEPT, have - 1)),),
        prefill=(PrefillRow(C, len(turn) - have),),
        decode=(B,),
    )
    driver.decode(SURE, B, C)
    driver.assert_solo(C, turn)
    driver.assert_solo(B, other)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_fork_from_batched_ones_at_their_length(
    family: str, drive: Callable[..., HybridDriver]
) -> None:
    """A fork of a running row at exactly its length; one that would need a cut fails alone."""
    driver = drive(family)
    ids, other = prompt(14, 2), prompt(30, 3)
    driver.step(
        start=(start_row(A, ids), start_row(B, other)),
        prefill=(PrefillRow(A, 13), PrefillRow(B, 29)),
    )
    driver.decode(4, A, B)
    have = [*ids, *driver.tokens[A]][: 13 + 4]
    fork = [*have, *prompt(3, 9)]
    done = driver.step(
        start=(start_row(C, fork, FromRow(A, 17)), start_row(D, fork, FromRow(A, 12))),
        prefill=(PrefillRow(C, 2),),
        decode=(A, B),
    )
    assert [failed.row for failed in done.failed] == [D]
    assert "12" in done.failed[0].reason
    driver.decode(SURE, C, A, B)
    for row, text in ((A, ids), (B, other), (C, fork)):
        driver.assert_solo(row, text)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_whose_state_is_broken_fails_alone(
    family: str, drive: Callable[..., HybridDriver]
) -> None:
    """NaN in a recurrent state ends its row; neighbours and the slot's next user go on."""
    driver = drive(family)
    prompts = {A: prompt(12, 1), B: prompt(12, 2), C: prompt(12, 3), D: prompt(12, 4)}
    driver.step(start=tuple(start_row(r, prompts[r]) for r in (A, B, C)))
    for row in (A, B, C):
        driver.step(prefill=(PrefillRow(row, 11),))
    caches = driver.device._rows[B].caches
    assert caches is not None
    for cache in caches:
        if isinstance(cache, ArraysCache):
            cache.cache = [x * float("nan") for x in cache.cache]
    done = driver.step(decode=(A, B, C), keep=(KeepRow(B, 11, KEPT),))
    assert [(f.row, f.reason) for f in done.failed] == [(B, drawing.NOT_FINITE)]
    assert isinstance(done.kept[0], SnapshotSkipped)
    driver.step(start=(start_row(D, prompts[D]),), prefill=(PrefillRow(D, 11),), decode=(A, C))
    driver.decode(SURE, A, C, D)
    for row in (A, C, D):
        driver.assert_solo(row, prompts[row])


@pytest.mark.parametrize("family", ["qwen3_5", "mamba2"])
def test_states_leave_nothing_behind(family: str, drive: Callable[..., HybridDriver]) -> None:
    """When all rows are gone, so is their state, in bytes."""
    driver = drive(family)
    before = None
    for turn in range(3):
        rows = [RowId(10 * turn + n) for n in range(1, 5)]
        driver.step(start=tuple(start_row(row, prompt(20 + row, row)) for row in rows))
        for row in rows:
            driver.step(prefill=(PrefillRow(row, 19 + row),))
        driver.decode(4, *rows, keep=(KeepRow(rows[0], 19 + rows[0], SnapshotId(turn)),))
        assert driver.device.stats().kv_bytes > 0
        driver.step(end=tuple(rows))
        driver.device.release((SnapshotId(turn),))
        driver.device.idle()
        stats = driver.device.stats()
        assert (stats.rows, stats.kv_bytes, stats.snapshot_bytes) == (0, 0, 0)
        before = before or mx.get_active_memory()
        assert mx.get_active_memory() <= before + 4096


async def test_chats_that_grow_find_their_last_turn(folders: Callable[[str], Path]) -> None:
    """Two chats at once on a hybrid: each turn starts from the one before, with the cold text."""
    path = folders("qwen3_5")
    settings = Settings(path, "tiny", batch=4, queue=4, dtype="float32")
    chats = {seed: list(prompt(30, seed)) for seed in (1, 2)}
    said: dict[int, list[list[int]]] = {seed: [] for seed in chats}
    cached: dict[int, list[int]] = {seed: [] for seed in chats}

    async def talk(seed: int, runtime: Runtime) -> None:
        for turn in range(4):
            request = ask(*chats[seed], max_tokens=12)
            text, end = await run(runtime, request)
            assert isinstance(end, Finished)
            answer = [int(word) for word in text.split()]
            said[seed].append([*chats[seed]])
            cached[seed].append(end.usage.cached_tokens)
            chats[seed] += [*answer, *prompt(20, 10 * seed + turn)]
            said[seed].append(answer)

    async with open_runtime(settings, tokenizer=WordTokenizer()) as runtime:
        await runtime.wait_ready()
        async with trio.open_nursery() as nursery:
            for seed in chats:
                nursery.start_soon(talk, seed, runtime)
        stats: Any = runtime.stats()
    assert stats["batch"]["lone_reason"] == ""
    oracle = load_oracle(path)
    for seed in chats:
        assert cached[seed] == sorted(set(cached[seed])), "each turn has more to start from"
        assert cached[seed][0] == 0
        assert cached[seed][-1] > 60
        for ids, answer in zip(said[seed][::2], said[seed][1::2], strict=True):
            steps = generate_step(mx.array(ids), oracle, max_tokens=12)
            assert answer == [token for token, _ in steps][: len(answer)]
