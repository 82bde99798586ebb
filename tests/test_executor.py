"""The MLX device on tiny checkpoints, against mlx-lm's own generation loop."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from device_rig import GREEDY, Driver
from mlx_lm.generate import generate_step
from tiny import FAMILIES, VOCAB, load_oracle, make_checkpoint, prompt

from mlx_troupe.runtime.engine import drawing
from mlx_troupe.runtime.engine.executor import MLXDevice
from mlx_troupe.runtime.engine.opening import Options
from mlx_troupe.runtime.engine.row_sampler import RowSampler
from mlx_troupe.runtime.engine.sampling import Sampler
from mlx_troupe.runtime.engine.snapshots import arrays_of
from mlx_troupe.runtime.plans import (
    Cold,
    FromRow,
    FromSnapshot,
    KeepRow,
    PrefillRow,
    RowId,
    SnapshotId,
    SnapshotMade,
    SnapshotSkipped,
    Source,
    StartRow,
    StepId,
    StepPlan,
)
from mlx_troupe.runtime.requests import Sampling

pytestmark = pytest.mark.mlx

TOKENS = 24
A, B, C, D = (RowId(i) for i in range(1, 5))
KEPT = SnapshotId(1)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Checkpoints by family, each written once."""
    made: dict[str, Path] = {}

    def checkpoint(family: str, **options: Any) -> Path:
        key = f"{family}{options}"
        if key not in made:
            made[key] = make_checkpoint(tmp_path_factory.mktemp(family), family, **options)
        return made[key]

    return checkpoint


@pytest.fixture
def drive(checkpoints: Callable[..., Path]) -> Iterator[Callable[..., Driver]]:
    """Opens drivers and closes their devices."""
    opened: list[Driver] = []

    def start(family: str, dtype: str = "float32", **options: Any) -> Driver:
        opened.append(Driver(checkpoints(family, **options), dtype=dtype, ahead=True))
        return opened[-1]

    yield start
    for driver in opened:
        driver.device.close()


def oracle(path: Path, ids: Sequence[int], count: int = TOKENS) -> tuple[list[int], np.ndarray]:
    """Greedy ids and log-probabilities [count, V] as mlx-lm alone makes them."""
    steps = generate_step(mx.array(ids), load_oracle(path), max_tokens=count)
    pairs = [(token, np.array(logprobs)) for token, logprobs in steps]
    return [token for token, _ in pairs], np.stack([logprobs for _, logprobs in pairs])


def sure(ids: list[int], logprobs: np.ndarray, gap: float = 1e-4) -> list[int]:
    """The ids up to the first position whose two best candidates are too close to call."""
    best = np.sort(logprobs, axis=-1)[:, -2:]
    close = np.flatnonzero(best[:, 1] - best[:, 0] < gap)
    return ids[: close[0]] if close.size else ids


def solo(driver_path: Path, ids: Sequence[int], count: int = TOKENS) -> list[int]:
    """What a row must produce in any company; long enough to mean something."""
    wanted = sure(*oracle(driver_path, ids, count))
    assert len(wanted) >= count // 2
    return wanted


def record_logits(monkeypatch: pytest.MonkeyPatch) -> list[mx.array]:
    """Collect the logits of every draw."""
    seen: list[mx.array] = []
    draw = Sampler.draw

    def recording(self: Sampler, logits: mx.array, *rest: Any) -> Any:
        seen.append(logits)
        return draw(self, logits, *rest)

    monkeypatch.setattr(Sampler, "draw", recording)
    return seen


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bits", [None, 4])
def test_a_lone_row_is_bit_exact_with_mlx_lm(
    family: str,
    bits: int | None,
    checkpoints: Callable[..., Path],
    drive: Callable[..., Driver],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ids and every log-probability equal those of generate_step, bit for bit."""
    path = checkpoints(family, bits=bits)
    ids, logprobs = oracle(path, prompt(21))
    assert len(set(ids)) >= 8
    driver = drive(family, "keep", bits=bits)
    seen = record_logits(monkeypatch)
    driver.start(A, prompt(21))
    driver.decode(TOKENS, A)
    assert driver.tokens[A] == ids
    ours = [logits[0] - mx.logsumexp(logits, keepdims=True)[0] for logits in seen]
    assert np.array_equal(np.stack([np.array(row) for row in ours]), logprobs)


def test_prefill_in_chunks_matches_mlx_lm_in_the_same_chunks(
    checkpoints: Callable[..., Path], drive: Callable[..., Driver]
) -> None:
    """A long prompt cut into chunks is what generate_step does with that step size."""
    path, ids = checkpoints("sliding"), prompt(90)
    steps = generate_step(mx.array(ids), load_oracle(path), max_tokens=8, prefill_step_size=32)
    driver = drive("sliding")
    driver.step(start=(StartRow(A, ids, GREEDY, Cold()),), prefill=(PrefillRow(A, 32),))
    driver.step(prefill=(PrefillRow(A, 32),))
    driver.step(prefill=(PrefillRow(A, 25),), decode=(A,))
    driver.decode(7, A)
    assert driver.tokens[A] == [token for token, _ in steps]


@pytest.mark.parametrize("family", ["llama", "sliding", "qwen3", "lfm2"])
def test_rows_join_and_leave_without_touching_each_other(
    family: str, checkpoints: Callable[..., Path], drive: Callable[..., Driver]
) -> None:
    """Rows of mixed lengths come, pause, are left alone and go; each gets its solo ids."""
    path, driver = checkpoints(family), drive(family)
    prompts = {A: prompt(5, 1), B: prompt(33, 2), C: prompt(18, 3), D: prompt(2, 4)}
    driver.start(A, prompts[A])
    driver.decode(4, A)
    driver.start(B, prompts[B], decode=(A,))
    for _ in range(5):
        driver.step(decode=(A, B))
    starts = tuple(StartRow(r, prompts[r], GREEDY, Cold()) for r in (C, D))
    chunks = (PrefillRow(C, 17), PrefillRow(D, 1))
    driver.step(start=starts, prefill=chunks, decode=(B, A, D))
    for _ in range(4):
        driver.step(decode=(D, C, B))
    driver.step(decode=(C, A), end=(B,))
    driver.decode(3, C)
    driver.decode(6, A, C, D)
    assert not driver.failed
    for row, ids in prompts.items():
        count = len(driver.tokens[row])
        wanted = solo(path, ids, count)
        assert driver.tokens[row][: len(wanted)] == wanted, f"row {row}"
    assert driver.device.stats().batched_rows == (3 if driver.info.batchable else 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_kept_state_continues_where_it_was_cut(
    family: str, checkpoints: Callable[..., Path], drive: Callable[..., Driver]
) -> None:
    """A row that ended one token ago is kept without its wasted token, and goes on from there."""
    path, ids = checkpoints(family), prompt(9)
    driver = drive(family)
    driver.start(A, ids)
    for _ in range(6):
        driver.step(decode=(A,))
    assert driver.device._rows[A].processed == 14
    known = [*ids, *solo(path, ids, 6)][:13]
    driver.step(keep=(KeepRow(A, 13, KEPT),), end=(A,))
    driver.drain()
    assert driver.device.stats().rows == 0
    made = driver.kept[KEPT]
    assert isinstance(made, SnapshotMade)
    assert (made.length, made.nbytes) == (13, driver.device.stats().snapshot_bytes)
    question = [*known, *prompt(6, 9)]
    driver.start(B, question, FromSnapshot(KEPT, 13))
    driver.decode(8, B)
    wanted = solo(path, question, 8)
    assert driver.tokens[B][: len(wanted)] == wanted
    driver.device.release((KEPT, SnapshotId(77)))
    assert driver.device.stats().snapshot_bytes == 0


@pytest.mark.parametrize("decoded", [0, 3])
@pytest.mark.parametrize("family", ["llama", "sliding", "mamba", "lfm2"])
def test_a_snapshot_outlives_its_continuations_unchanged(
    family: str, decoded: int, drive: Callable[..., Driver]
) -> None:
    """Two rows grow from one state by prefill and by decode; its bytes stay as they were."""
    driver, ids = drive(family), list(prompt(25))
    driver.start(A, ids)
    driver.decode(decoded, A)
    length = 24 + decoded
    driver.step(keep=(KeepRow(A, length, KEPT),), decode=(A,))
    driver.drain()
    ids += driver.tokens[A][:decoded]

    def image() -> list[np.ndarray]:
        assert driver.device._parts is not None
        states = driver.device._parts.states
        return [np.array(x) for x in arrays_of(states._snapshots.take(KEPT, length))]

    before = image()
    driver.start(B, ids, FromSnapshot(KEPT, length))
    driver.start(C, [*ids[:length], *prompt(9, 5)], FromSnapshot(KEPT, length))
    driver.decode(5, B)
    driver.decode(5, C)
    driver.decode(5, A, B, C)
    assert not driver.failed
    after = image()
    assert all(np.array_equal(x, y) for x, y in zip(before, after, strict=True))
    assert driver.tokens[B][:6] == driver.tokens[A][decoded : decoded + 6]


@pytest.mark.parametrize("family", FAMILIES)
def test_forks_of_a_live_row_equal_rows_of_their_own(
    family: str, checkpoints: Callable[..., Path], drive: Callable[..., Driver]
) -> None:
    """Rows fork from a lone row, from a batched one, and from one that ends in the same step."""
    path, driver, ids = checkpoints(family), drive(family), prompt(13)
    driver.start(A, ids)
    tails = {B: [*ids[:12], *prompt(4, 6)], C: [*ids[:12], *prompt(7, 7)]}
    for row, whole in tails.items():
        driver.start(row, whole, FromRow(A, 12))
    driver.decode(3, A, B, C)
    length = len(ids) + 2
    known = [*ids, *driver.tokens[A]][:length]
    tails[D] = [*known, *prompt(3, 8)]
    driver.start(D, tails[D], FromRow(A, length), end=(A,))
    driver.decode(6, B, C, D)
    assert not driver.failed
    for row, whole in tails.items():
        count = len(driver.tokens[row])
        wanted = solo(path, whole, count)
        assert driver.tokens[row][: len(wanted)] == wanted, f"row {row}"


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_rows_in_a_shared_prefill_are_kept_forked_ended_and_left_alone(
    family: str, checkpoints: Callable[..., Path], drive: Callable[..., Driver]
) -> None:
    """Between two shared chunks a row is kept, forked and ended, and one goes on alone."""
    path, driver = checkpoints(family), drive(family)
    forward = driver.device._forward
    assert forward is not None
    prompts = {A: prompt(9, 1), B: prompt(40, 2), C: prompt(31, 3)}
    starts = tuple(StartRow(row, ids, GREEDY, Cold()) for row, ids in prompts.items())
    driver.step(start=starts, prefill=tuple(PrefillRow(row, 8) for row in prompts))
    driver.drain()
    one_row = 8 * driver.info.kv_bytes_per_token
    assert set(forward._homes) == {A, B, C}
    assert 3 * one_row <= driver.device.stats().kv_bytes <= 3 * 64 * one_row // 8
    whole = {D: (*prompts[B][:8], *prompt(6, 4))}
    driver.step(
        keep=(KeepRow(C, 7, KEPT),),
        start=(StartRow(D, whole[D], GREEDY, FromRow(B, 8)),),
        end=(B,),
        prefill=(PrefillRow(C, 9), PrefillRow(D, 5)),
        decode=(A,),
    )
    driver.step(prefill=(PrefillRow(C, 13),), decode=(D, A))
    driver.decode(10, C, A, D)
    assert set(forward._homes) == {A, C, D}
    E = RowId(5)
    whole |= {A: prompts[A], C: prompts[C], E: (*prompts[C][:7], *prompt(3, 5))}
    driver.start(E, whole[E], FromSnapshot(KEPT, 7))
    driver.decode(8, E)
    assert not driver.failed
    for row, ids in whole.items():
        count = len(driver.tokens[row])
        assert count >= 8
        wanted = solo(path, ids, count)
        assert driver.tokens[row][: len(wanted)] == wanted, f"row {row}"
    driver.step(end=(A, C, D, E))
    driver.drain()
    assert driver.device.stats().kv_bytes == 0
    assert not forward._homes


@pytest.mark.parametrize(("family", "seed"), [("llama", 0), ("llama", 1), ("qwen3", 2)])
def test_any_schedule_gives_every_row_its_solo_ids(
    family: str, seed: int, checkpoints: Callable[..., Path], drive: Callable[..., Driver]
) -> None:
    """Random starts, forks, keeps, pauses and ends: what a row makes never depends on them."""
    path, driver, dice = checkpoints(family), drive(family), random.Random(seed)
    whole: dict[RowId, tuple[int, ...]] = {}
    saved: dict[SnapshotId, tuple[int, ...]] = {}
    live: list[RowId] = []
    for turn in range(14):
        driver.drain()
        known = {row: (*whole[row], *driver.tokens[row])[:-1] for row in live}
        leaving = [row for row in live if len(live) > 3 and dice.random() < 0.4]
        keeps = tuple(
            KeepRow(row, dice.randint(1, len(known[row])), SnapshotId(100 * turn + row))
            for row in live
            if dice.random() < 0.3
        )
        row = RowId(turn + 1)
        ids, source = prompt(dice.randint(2, 30), turn), Cold()
        donor: tuple[Source, tuple[int, ...]] | None = None
        if live and dice.random() < 0.5:
            chosen = dice.choice(live)
            length = dice.randint(1, len(known[chosen]))
            donor = FromRow(chosen, length), known[chosen][:length]
        elif saved and dice.random() < 0.7:
            snapshot = dice.choice(list(saved))
            length = dice.randint(1, len(saved[snapshot]))
            donor = FromSnapshot(snapshot, length), saved[snapshot][:length]
        if donor is not None:
            ids = (*donor[1], *ids)
        whole[row] = ids
        driver.start(row, ids, donor[0] if donor else source, keep=keeps, end=tuple(leaving))
        saved |= {keep.snapshot: known[keep.row][: keep.length] for keep in keeps}
        live = [r for r in live if r not in leaving] + [row]
        for _ in range(dice.randint(1, 5)):
            driver.step(decode=tuple(dice.sample(live, dice.randint(1, len(live)))))
    driver.drain()
    assert not driver.failed
    assert all(isinstance(kept, SnapshotMade) for kept in driver.kept.values())
    tried = [row for row in whole if len(driver.tokens[row]) > 1]
    assert len(tried) > 8
    for row in tried:
        wanted = sure(*oracle(path, whole[row], len(driver.tokens[row])))
        assert driver.tokens[row][: len(wanted)] == wanted, f"row {row}"


def test_what_cannot_be_kept_is_skipped_with_the_reason(drive: Callable[..., Driver]) -> None:
    """Too long, turned rings, recurrent states two tokens back, strangers: skipped, not failed."""
    driver = drive("mamba")
    driver.start(A, prompt(9))
    driver.decode(4, A)
    asked = {KEPT: 10, SnapshotId(2): 13, SnapshotId(3): 0}
    keeps = tuple(KeepRow(A, length, snapshot) for snapshot, length in asked.items())
    driver.decode(1, A, keep=(*keeps, KeepRow(B, 3, SnapshotId(4))))
    assert all(isinstance(kept, SnapshotSkipped) and kept.reason for kept in driver.kept.values())
    assert len(driver.kept) == 4
    assert not driver.failed
    ring = drive("sliding")
    assert ring.info.trim_window == 15
    ring.start(A, prompt(20))
    ring.decode(1, A, keep=(KeepRow(A, 17, KEPT), KeepRow(A, 19, SnapshotId(2))))
    assert isinstance(ring.kept[KEPT], SnapshotSkipped)
    assert isinstance(ring.kept[SnapshotId(2)], SnapshotMade)


@pytest.mark.parametrize("family", ["llama", "sliding", "lfm2"])
def test_a_row_of_nans_fails_alone(
    family: str, checkpoints: Callable[..., Path], drive: Callable[..., Driver]
) -> None:
    """One row's state is poisoned: it fails, its neighbours and the next tenant do not notice."""
    path, driver = checkpoints(family), drive(family)
    prompts = {A: prompt(12, 1), B: prompt(12, 2), C: prompt(12, 3), D: prompt(12, 4)}
    for row in (A, B, C):
        driver.start(row, prompts[row])
    driver.drain()
    caches = driver.device._rows[B].caches
    assert caches is not None
    poisoned = next(c for c in caches if hasattr(c, "keys"))
    poisoned.values = poisoned.values * mx.nan
    for _ in range(3):
        driver.step(decode=(A, B, C), keep=(KeepRow(B, 11, KEPT),) if not driver.tokens else ())
    driver.drain()
    assert {(f.row, f.reason) for f in driver.failed if "finite" in f.reason} == {
        (B, drawing.NOT_FINITE)
    }
    assert B not in driver.tokens
    assert isinstance(driver.kept[KEPT], SnapshotSkipped)
    assert driver.device.stats().snapshots == 0
    driver.start(D, prompts[D])
    driver.decode(10, A, C, D)
    for row in (A, C, D):
        wanted = solo(path, prompts[row], len(driver.tokens[row]))
        assert driver.tokens[row][: len(wanted)] == wanted, f"row {row}"


def test_a_row_that_cannot_go_on_fails_alone(
    checkpoints: Callable[..., Path], drive: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad ids, bad parameters, missing sources, wrong counts, a raising processor, strangers."""
    driver, good = drive("llama"), prompt(10)
    driver.start(A, good)
    bad = {
        RowId(10): StartRow(RowId(10), (5, VOCAB), GREEDY, Cold()),
        RowId(11): StartRow(RowId(11), (5, -1), GREEDY, Cold()),
        RowId(12): StartRow(RowId(12), (), GREEDY, Cold()),
        RowId(13): StartRow(RowId(13), (5, 6), Sampling(logit_bias=((VOCAB, 1.0),)), Cold()),
        RowId(14): StartRow(RowId(14), (5, 6), GREEDY, FromSnapshot(SnapshotId(99), 1)),
        RowId(15): StartRow(RowId(15), (5, 6), GREEDY, FromRow(RowId(99), 1)),
        RowId(16): StartRow(RowId(16), good, GREEDY, FromRow(A, 10)),
    }
    late = (
        StartRow(RowId(17), good, GREEDY, Cold()),
        StartRow(RowId(18), good, GREEDY, Cold()),
        StartRow(RowId(19), good, Sampling(presence_penalty=1.0), Cold()),
    )
    driver.step(start=(*bad.values(), *late), decode=(A,))

    def explode(self: RowSampler, *_: Any) -> mx.array:
        raise ValueError("boom")

    monkeypatch.setattr(RowSampler, "recent", explode)
    chunks = tuple(PrefillRow(RowId(r), n) for r, n in ((17, 10), (19, 9), (98, 4)))
    driver.step(prefill=chunks, decode=(A, RowId(18), RowId(19), RowId(97)))
    driver.decode(TOKENS - 2, A)
    reasons = {f.row: f.reason for f in driver.failed}
    assert set(reasons) == {*bad, *(RowId(i) for i in (17, 18, 19, 97, 98))}
    assert "boom" in reasons[RowId(19)]
    assert "vocabulary" in reasons[RowId(10)]
    assert driver.device.stats().rows == 1
    wanted = solo(checkpoints("llama"), good)
    assert driver.tokens[A][: len(wanted)] == wanted


def test_a_row_that_could_not_start_starts_again_under_its_id(
    checkpoints: Callable[..., Path], drive: Callable[..., Driver]
) -> None:
    """Its source is gone; a step with it is under way still when it starts from nothing."""
    driver = drive("llama")
    texts = {A: prompt(12, 1), B: prompt(30, 2)}
    driver.start(A, texts[A])
    driver.step(
        start=(StartRow(B, texts[B], GREEDY, FromRow(C, 20)),),
        prefill=(PrefillRow(B, 9),),
        decode=(A,),
    )
    driver.step(decode=(A, B))
    driver.start(B, texts[B], decode=(A,))
    assert {failed.row for failed in driver.failed} == {B}
    assert "gone" in driver.failed[0].reason
    driver.decode(8, A, B)
    for row in (A, B):
        said = driver.tokens[row]
        wanted = sure(*oracle(checkpoints("llama"), texts[row], len(said)))
        assert said[: len(wanted)] == wanted
        assert len(wanted) > 5


def test_a_row_ended_before_its_last_step_settles_still_reports_its_token(
    drive: Callable[..., Driver],
) -> None:
    """The last token of a row that ends by count comes after the row is gone."""
    driver = drive("llama")
    driver.start(A, prompt(4))
    driver.step(decode=(A,))
    driver.step(end=(A,))
    driver.drain()
    assert len(driver.tokens[A]) == 1
    assert not driver.failed


def test_seeded_rows_draw_the_same_in_any_company(drive: Callable[..., Driver]) -> None:
    """Sampled ids of a row are equal alone, among others, and after a restart in the middle."""
    driver, ids = drive("llama"), prompt(8)
    warm = Sampling(temperature=0.9, top_p=0.95, top_k=40, seed=7)
    driver.start(A, ids, sampling=warm)
    driver.decode(12, A)
    alone = driver.tokens[A]
    assert len(set(alone)) >= 6
    driver.start(B, prompt(20, 3), sampling=Sampling(temperature=1.0, seed=1))
    driver.start(C, ids, sampling=warm)
    driver.start(D, prompt(3, 4))
    driver.decode(12, B, C, D)
    assert driver.tokens[C] == alone
    again = RowId(20)
    driver.start(again, [*ids, *alone[:5]], sampling=warm)
    driver.decode(7, again)
    assert driver.tokens[again] == alone[5:]
    other = RowId(21)
    driver.start(other, ids, sampling=dataclasses.replace(warm, seed=8))
    driver.decode(12, other)
    assert driver.tokens[other] != alone


def test_a_penalty_sees_what_mlx_lm_would_show_it(
    checkpoints: Callable[..., Path], drive: Callable[..., Driver]
) -> None:
    """Greedy ids under all processors equal mlx-lm's, in one batch with rows that have none."""
    from mlx_lm.sample_utils import make_logits_processors

    path, ids = checkpoints("llama"), prompt(15)
    sampling = Sampling(
        logit_bias=((5, 1.5), (9, -3.0)),
        repetition_penalty=1.3,
        repetition_context_size=6,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        frequency_context_size=0,
    )
    processors = make_logits_processors({5: 1.5, 9: -3.0}, 1.3, 6, 0.4, 20, 0.2, 0)
    steps = generate_step(
        mx.array(ids), load_oracle(path), max_tokens=TOKENS, logits_processors=processors
    )
    pairs = [(token, np.array(logprobs)) for token, logprobs in steps]
    wanted = sure([t for t, _ in pairs], np.stack([x for _, x in pairs]))
    assert wanted != solo(path, ids)[: len(wanted)]
    driver = drive("llama")
    driver.start(A, prompt(6, 2))
    driver.start(B, ids, sampling=sampling)
    driver.decode(TOKENS, A, B)
    assert driver.tokens[B][: len(wanted)] == wanted


@pytest.mark.parametrize("family", ["llama", "sliding", "mamba"])
def test_memory_comes_back_when_rows_are_gone(family: str, drive: Callable[..., Driver]) -> None:
    """Rows, forks and snapshots leave nothing behind, whether ended one by one or dropped."""
    driver = drive(family)
    mx.clear_cache()
    before = mx.get_active_memory()
    for end in (True, False):
        for row in (A, B, C):
            driver.start(row, prompt(300, int(row)))
        driver.decode(1, A, B, C, keep=(KeepRow(A, 299, KEPT),))
        busy = driver.device.stats()
        assert busy.kv_bytes > 0
        assert busy.snapshot_bytes > 0
        if end:
            driver.step(end=(A, B, C))
            driver.drain()
        else:
            driver.device.release((KEPT,))
            driver.step(decode=(A, B, C), keep=(KeepRow(B, 299, SnapshotId(9)),))
            driver.device.drop_rows()
            driver.under_way = 0
        driver.device.release((KEPT,))
        mx.synchronize()
        driver.device.idle()
        after = driver.device.stats()
        assert (after.rows, after.kv_bytes, after.snapshot_bytes) == (0, 0, 0)
        assert mx.get_active_memory() <= before + 4096


def test_the_pipeline_holds_two_steps(drive: Callable[..., Driver]) -> None:
    """A third launch and a settle of nothing are refused."""
    device = drive("llama").device
    device.launch(StepPlan(StepId(1)))
    device.launch(StepPlan(StepId(2)))
    with pytest.raises(RuntimeError, match="under way"):
        device.launch(StepPlan(StepId(3)))
    assert [device.settle().step, device.settle().step] == [1, 2]
    with pytest.raises(RuntimeError, match="under way"):
        device.settle()


def test_the_device_works_on_a_thread_of_its_own(checkpoints: Callable[..., Path]) -> None:
    """Made on one thread, then opened, run and closed on another, as the GPU actor does."""
    path = checkpoints("llama", bits=4)
    device = MLXDevice(Options(path, name="tiny", dtype="auto"))

    def run() -> list[int]:
        device.open()
        start = StartRow(A, (5, 6), GREEDY, Cold())
        chunk = PrefillRow(A, 1)
        device.launch(StepPlan(StepId(1), start=(start,), prefill=(chunk,), decode=(A,)))
        device.launch(StepPlan(StepId(2), decode=(A,)))
        done = (device.settle(), device.settle())
        device.close()
        return [sampled.token for step in done for sampled in step.sampled]

    with ThreadPoolExecutor(1) as pool:
        assert len(pool.submit(run).result()) == 2
