"""Answers that are written down: files that are whole or nothing; answers that outlive a run."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import trio
import trio.testing
from company import WordTokenizer, company, settle
from resume_rig import interrupted, whole
from spill_rig import Broken
from tiny import EOS, make_checkpoint, prompt

from mlx_troupe.actors.checkpoints import Checkpoints
from mlx_troupe.actors.progress import Progress
from mlx_troupe.actors.spill_messages import FlushReport
from mlx_troupe.actors.system import open_runtime
from mlx_troupe.actors.testing import ScriptedDevice
from mlx_troupe.runtime.grammars import Grammar, RegexGrammar
from mlx_troupe.runtime.kvschemes import PLAIN_KV, AffineKV, KVScheme
from mlx_troupe.runtime.model_info import ModelInfo
from mlx_troupe.runtime.plans import FromSnapshot, TokenLogprobs
from mlx_troupe.runtime.requests import (
    GenerationRequest,
    Sampling,
    SamplingRequest,
    StreamTicket,
    TokenPrompt,
)
from mlx_troupe.runtime.resume import files as resume_files
from mlx_troupe.runtime.resume.files import MAX_FILES, RecordFiles
from mlx_troupe.runtime.resume.identity import Asked, identity_of
from mlx_troupe.runtime.resume.records import Record
from mlx_troupe.runtime.settings import Settings
from mlx_troupe.runtime.text.testing import ByteTokenizer

FIGURES = tuple(TokenLogprobs(-0.5, ((n, -0.5), (n + 1, float("-inf")))) for n in range(3))
RECORD = Record("ab12", 2**64 - 1, (70_000, 5, 6), FIGURES)


class TinyTokenizer(WordTokenizer):
    """Words for ids, with the tiny models' own end token."""

    eos_ids = frozenset({EOS})

    def is_special(self, token_id: int) -> bool:
        return token_id == EOS


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    """To the last figure; a newer one takes its place, and files are their owner's alone."""
    files = RecordFiles(tmp_path / "answers")
    files.open()
    for record in (RECORD, replace(RECORD, ids=(1, 2), figures=(), seed=-(2**63))):
        files.write(record)
        assert RecordFiles(tmp_path / "answers").read("ab12") == record
    (path,) = (tmp_path / "answers").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    RecordFiles(tmp_path / "cache" / "answers").open()
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    assert files.read("other") is None
    files.remove("ab12")
    files.remove("ab12")
    assert files.read("ab12") is None


def test_anything_but_what_was_written_is_no_record(tmp_path: Path) -> None:
    """Cut after any byte, or with any byte changed, or under another name."""
    files = RecordFiles(tmp_path)
    files.open()
    files.write(RECORD)
    path = tmp_path / "ab12.answer"
    data = path.read_bytes()
    for end in range(len(data)):
        path.write_bytes(data[:end])
        assert files.read("ab12") is None
        path.write_bytes(data[:end] + bytes([data[end] ^ 1]) + data[end + 1 :])
        assert files.read("ab12") is None
    (tmp_path / "cd34.answer").write_bytes(data)
    assert files.read("cd34") is None


def test_opening_clears_what_is_left_over(tmp_path: Path) -> None:
    """Half-written files go, and the oldest records beyond the bound."""
    files = RecordFiles(tmp_path)
    for n in range(MAX_FILES + 3):
        (tmp_path / f"{n}.answer").write_bytes(b"")
    (tmp_path / "x.0.part").write_bytes(b"half")
    (tmp_path / "other.txt").write_text("not ours")
    files.open()
    names = {path.name for path in tmp_path.iterdir()}
    assert "other.txt" in names
    assert "x.0.part" not in names
    assert len(names) == MAX_FILES + 1


def test_no_server_fills_its_folder_with_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more than so many the one that was written first goes, but not if it was since."""
    monkeypatch.setattr(resume_files, "MAX_FILES", 3)
    files = RecordFiles(tmp_path)
    files.open()
    for identity in ("a", "b", "c", "a", "d"):
        files.write(replace(RECORD, identity=identity))
    assert {path.stem for path in tmp_path.iterdir()} == {"a", "c", "d"}
    files.remove("d")
    files.write(replace(RECORD, identity="e"))
    assert {path.stem for path in tmp_path.iterdir()} == {"a", "c", "e"}
    for second, identity in enumerate("cae"):
        os.utime(tmp_path / f"{identity}.answer", (second, second))
    size = (tmp_path / "a.answer").stat().st_size
    monkeypatch.setattr(resume_files, "MAX_BYTES", 2 * size + size // 2)
    again = RecordFiles(tmp_path)
    again.open()
    assert {path.stem for path in tmp_path.iterdir()} == {"a", "e"}
    again.write(replace(RECORD, identity="large", ids=tuple(range(9000)), figures=()))
    assert {path.stem for path in tmp_path.iterdir()} == {"large"}


def test_records_are_kept_once_there_is_a_folder_for_them(tmp_path: Path) -> None:
    """A disk that is mounted late is written to; its mount point before that is not."""
    disk = tmp_path / "disk"
    files = RecordFiles(disk / "answers")
    with pytest.raises(FileNotFoundError):
        files.write(RECORD)
    assert not disk.exists()
    disk.mkdir()
    files.write(RECORD)
    assert files.read("ab12") == RECORD


async def test_a_folder_that_fails_is_counted_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning; records in memory serve as before."""
    (tmp_path / "file").write_text("in the way")
    checkpoints = Checkpoints(4, RecordFiles(tmp_path / "file"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(checkpoints.run)
        checkpoints.keep(RECORD)
        checkpoints.keep(replace(RECORD, identity="cd34"))
        with trio.fail_after(10):
            await checkpoints.flush()
        nursery.cancel_scope.cancel()
    assert checkpoints.stats()["failed"] >= 2
    assert len([r for r in caplog.records if "written down" in r.message]) == 1
    assert await checkpoints.find("ab12") == RECORD


async def test_a_name_is_on_record_from_its_first_token_on(tmp_path: Path) -> None:
    """With the seed that nobody else knows; other answers every so many tokens."""
    ask = GenerationRequest(TokenPrompt((1, 2)), SamplingRequest(temperature=0.0))
    asked = Asked((1, 2), Sampling(seed=77), 20, None, "model", ())
    streamed = replace(ask, ticket=StreamTicket("s"), sampling=SamplingRequest(temperature=1.0))
    drawn = replace(asked, sampling=Sampling(temperature=1.0, seed=78))
    for request, resolved, lengths in (
        (ask, asked, [0, 0, 0, 4, 4, 4, 4, 8]),
        (replace(ask, resume_key="k"), asked, [1, 1, 1, 4, 4, 4, 4, 8]),
        (streamed, drawn, [1, 1, 1, 4, 4, 4, 4, 8]),
    ):
        checkpoints = Checkpoints(4)
        progress = Progress(checkpoints, request, resolved)
        identity = identity_of(request, resolved)
        assert identity is not None
        found = []
        for token in range(8):
            progress.took(token, None)
            record = await checkpoints.find(identity)
            found.append(0 if record is None else len(record.ids))
            assert record is None or record.seed == resolved.sampling.seed
        assert found == lengths


SAFE = FlushReport(True, 0, 0, 0, 0, 0, 0, 0, 0.0, 0, 0)


async def test_a_flush_is_not_durable_while_an_answer_is_not_written(tmp_path: Path) -> None:
    """It tries again what failed; what was given to its end need not be written."""
    disk = Broken(errno.ENOSPC, "write")
    checkpoints = Checkpoints(4, RecordFiles(tmp_path / "answers", disk))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(checkpoints.run)
        checkpoints.keep(RECORD)
        checkpoints.keep(replace(RECORD, identity="cd34"))
        with trio.fail_after(10):
            for _ in range(2):
                report = await checkpoints.flushed(trio.current_time() + 10, SAFE)
                assert (report.durable, report.missing, report.pending) == (False, 2, 0)
            checkpoints.remove("ab12")
            report = await checkpoints.flushed(trio.current_time() + 10, SAFE)
            assert (report.durable, report.missing) == (False, 1)
            disk.names.clear()
            report = await checkpoints.flushed(trio.current_time() + 10, SAFE)
            assert (report.durable, report.missing) == (True, 0)
        nursery.cancel_scope.cancel()
    assert [path.name for path in (tmp_path / "answers").iterdir()] == ["cd34.answer"]


@pytest.mark.parametrize("window", [None, 0], ids=["plain", "whole"])
async def test_states_are_kept_on_the_way(
    window: int | None, autojump_clock: trio.testing.MockClock
) -> None:
    """Every so many tokens, of rows that may be gone on with, whatever their states are like."""
    model = ModelInfo("scripted", 1000, 4096, frozenset({0}), trim_window=window, namespace="s")
    device = ScriptedDevice(model)
    ask = GenerationRequest(
        TokenPrompt(tuple(range(1, 31))), SamplingRequest(temperature=0.0), max_tokens=40
    )
    async with company(device, generation_checkpoint=8) as (runtime, _):
        runtime.checkpoints.every = 8
        expected = await whole(runtime, ask)
        lengths = [keep.length for plan in device.plans for keep in plan.keep]
        assert [n for n in lengths if n < 69] == [29, 37, 45, 53, 61]
        device.plans.clear()
        unseeded = replace(ask, sampling=SamplingRequest(temperature=1.0))
        assert (await whole(runtime, unseeded)).texts == expected.texts
        lengths = [keep.length for plan in device.plans for keep in plan.keep]
        assert not [n for n in lengths if n in (37, 45, 53, 61)]


async def test_tokens_that_nobody_heard_cost_no_more_than_they_took(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Where states cannot be cut, the last one of an interrupted row may be beyond its record."""
    model = ModelInfo("scripted", 1000, 4096, frozenset({0}), trim_window=0, namespace="s")
    ask = GenerationRequest(
        TokenPrompt(tuple(range(1, 31))), SamplingRequest(temperature=0.0), max_tokens=40
    )
    device = ScriptedDevice(model)
    async with company(device, generation_checkpoint=8) as (runtime, _):
        runtime.checkpoints.every = 8
        assert await interrupted(runtime, ask, 20)
        await settle(runtime)
        assert (await whole(runtime, ask)).usage.cached_tokens == 30
        starts = [start.source for plan in device.plans for start in plan.start]
        assert [one.length for one in starts if isinstance(one, FromSnapshot)] == [45]


@pytest.mark.mlx
@pytest.mark.parametrize("family", ["llama", "mamba"])
async def test_an_answer_outlives_its_runtime(family: str, tmp_path: Path) -> None:
    """Another runtime on the same folder goes on, and says what one run would."""
    settings = Settings(
        make_checkpoint(tmp_path / "model", family),
        "tiny",
        batch=2,
        ssd_cache=tmp_path / "cache",
        generation_checkpoint=4,
    )
    for sampling in (
        SamplingRequest(temperature=0.0),
        SamplingRequest(temperature=1.0, seed=11, repetition_penalty=1.2),
    ):
        ask = GenerationRequest(
            TokenPrompt(tuple(prompt(40, 3))), sampling, max_tokens=30, logprobs=1
        )
        async with open_runtime(replace(settings, ssd_cache=None), tokenizer=TinyTokenizer()) as r:
            expected = await whole(r, ask)
        assert expected.usage.completion_tokens > 20
        async with open_runtime(settings, tokenizer=TinyTokenizer()) as runtime:
            assert await interrupted(runtime, ask, 15)
            await runtime.flush_cache(10)
        async with open_runtime(settings, tokenizer=TinyTokenizer()) as runtime:
            again = await whole(runtime, ask)
            assert again.texts == expected.texts
            assert again.usage.completion_tokens == expected.usage.completion_tokens
            assert again.usage.cached_tokens == 40
            stats = runtime.cast.scheduler.core.stats()
            assert stats.generated_tokens <= expected.usage.completion_tokens - 12
        assert not list((tmp_path / "cache" / "answers").iterdir())


PROMPT, SAID = 40, 12


def _tokens_in(path: Path) -> int:
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return int(header["__metadata__"]["length"])


@pytest.mark.mlx
@pytest.mark.parametrize(
    ("kv", "grammar"),
    [(PLAIN_KV, RegexGrammar("[ -~]{300}")), (AffineKV(8), None)],
    ids=["grammar", "encoded"],
)
async def test_what_the_newest_state_lacks_is_computed_again(
    kv: KVScheme, grammar: Grammar | None, tmp_path: Path
) -> None:
    """As after a crash while a state was written: the answer is that of one run."""
    settings = Settings(
        make_checkpoint(tmp_path / "model", vocab_size=300, hidden_size=256, head_dim=64),
        "tiny",
        batch=2,
        kv=kv,
        ssd_cache=tmp_path / "cache",
        generation_checkpoint=4,
    )
    sampling = SamplingRequest(temperature=1.0, seed=11, logit_bias=((EOS, -100.0),))
    ask = GenerationRequest(
        TokenPrompt(prompt(PROMPT, 3)), sampling, max_tokens=40, logprobs=1, grammar=grammar
    )
    without = replace(settings, ssd_cache=None)
    async with open_runtime(without, tokenizer=ByteTokenizer()) as runtime:
        expected = await whole(runtime, ask)
    async with open_runtime(settings, tokenizer=ByteTokenizer()) as runtime:
        assert await interrupted(runtime, ask, SAID)
        await runtime.flush_cache(10)
    for path in (tmp_path / "cache").glob("*.safetensors"):
        if _tokens_in(path) > PROMPT + SAID // 2:
            path.unlink()
    async with open_runtime(settings, tokenizer=ByteTokenizer()) as runtime:
        again = await whole(runtime, ask)
        stats = runtime.cast.scheduler.core.stats()
    # Of encoded keys a prefill sees more than single steps did: what was said stands all the same.
    same = slice(SAID if grammar is None else None)
    ids, others = ([s.chosen.id for s in answer.scores] for answer in (again, expected))
    assert ids[same] == others[same]
    assert again.usage.completion_tokens == len(ids)
    assert again.reason == expected.reason
    assert stats.generated_tokens <= len(ids) - SAID
    assert stats.prefilled_tokens >= SAID // 2 - 1
