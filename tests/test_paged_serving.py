"""The paged layout as an operator meets it: flags, refusals, the device, the prompt cache."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from click.testing import CliRunner
from company import SETTINGS, ask, company, counted, run
from mlx_lm.generate import generate_step
from tiny import load_oracle, make_checkpoint, prompt

from mlx_troupe.http.cli import models
from mlx_troupe.http.cli.main import cli
from mlx_troupe.http.cli.options import kv_scheme
from mlx_troupe.runtime.budgets import cache_bytes, why_no_cache
from mlx_troupe.runtime.engine.executor import MLXDevice
from mlx_troupe.runtime.engine.opening import Options
from mlx_troupe.runtime.engine.paged import PagedLayout
from mlx_troupe.runtime.errors import ModelError
from mlx_troupe.runtime.kvschemes import PLAIN_KV, AffineKV, PagedKV, name_of
from mlx_troupe.runtime.plans import Cold, PrefillRow, RowId, StartRow, StepDone, StepId, StepPlan
from mlx_troupe.runtime.requests import Finished, Sampling

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.mlx

ROWS = {RowId(n): prompt(length, n) for n, length in enumerate((5, 40, 2, 17), 1)}
TOKENS = 40


def flags(**changes: Any) -> dict[str, Any]:
    """What click hands over, with some flags given."""
    return {"kv": PLAIN_KV, "paged_kv": False, "paged_kv_block_size": None} | changes


def test_the_flags_make_one_scheme() -> None:
    """Off, 256 tokens a block unless said, and --kv-quant as it was."""
    assert kv_scheme(flags()) == PLAIN_KV
    assert kv_scheme(flags(paged_kv=True)) == PagedKV(256)
    assert kv_scheme(flags(paged_kv=True, paged_kv_block_size=64)) == PagedKV(64)
    assert kv_scheme(flags(kv=AffineKV(8))) == AffineKV(8)
    assert name_of(PagedKV(64)) == "paged:64"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--paged-kv", "--kv-quant", "8"), ("--paged-kv", "--kv-quant 8")),
        (("--paged-kv", "--kv-quant", "turbo"), ("--paged-kv", "--kv-quant turbo:k8v3")),
        (("--paged-kv-block-size", "64"), ("--paged-kv-block-size", "without --paged-kv")),
        (("--paged-kv", "--paged-kv-block-size", "8"), ("8", "16")),
    ],
)
def test_what_excludes_each_other_is_refused_before_anything_is_loaded(
    args: tuple[str, ...], words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With both names; nobody looks for a model first."""
    monkeypatch.setattr(models, "find_model", lambda *_, **__: pytest.fail("looked for a model"))
    result = CliRunner().invoke(cli, ["serve", "some/model", *args])
    assert result.exit_code == 2
    told = " ".join(result.output.split())
    assert all(word in told for word in words), told


def test_a_paged_server_keeps_no_prompts() -> None:
    """And says why; so does one whose cache was turned off by its own flag."""
    paged = replace(SETTINGS, kv=PagedKV())
    assert cache_bytes(SETTINGS) > 0
    assert why_no_cache(SETTINGS) == ""
    assert cache_bytes(paged) == 0
    assert "--paged-kv" in why_no_cache(paged)
    assert "--prompt-cache 0" in why_no_cache(replace(SETTINGS, prompt_cache_bytes=0))


async def test_requests_of_a_paged_server_go_past_the_cache(autojump_clock: object) -> None:
    """The same prompt twice: nothing is looked up or kept, and /stats says why."""
    ids = tuple(range(1, 60))
    async with company(kv=PagedKV()) as (runtime, device):
        for _ in range(2):
            text, end = await run(runtime, ask(*ids))
            assert text == counted(59, 5)
            assert isinstance(end, Finished)
            assert end.usage.cached_tokens == 0
        stats: Any = runtime.stats()
        assert stats["prompt_cache"]["off"].startswith("--paged-kv")
        assert stats["prompt_cache"]["entries"] == 0
        assert not any(plan.keep for plan in device.plans)


@pytest.mark.parametrize("family", ["llama", "sliding", "qwen3_5"])
def test_paged_rows_say_what_mlx_lm_says(family: str, tmp_path: Path) -> None:
    """Rows that come late, past blocks of 16, and leave; each has its solo ids."""
    path = make_checkpoint(tmp_path / "m", family)
    device = MLXDevice(Options(path, name="tiny", dtype="float32", kv=PagedKV(16)))
    info = device.open()
    assert info.batchable
    assert info.kv_scheme == "paged:16"
    assert {alike.form for alike in info.kv_layers if alike.kind == "full"} == {
        "plain float32 in blocks of 16"
    }
    said = together(device, ROWS)
    assert device.stats().batched_rows == len(ROWS)
    assert device._forward is not None
    assert any(type(layer) is PagedLayout for layer in device._forward._batch.layers)
    model = load_oracle(path)
    for row, ids in ROWS.items():
        steps = generate_step(mx.array(ids), model, max_tokens=TOKENS)
        wanted = [token for token, _ in steps]
        # Near-ties may fall otherwise in a batch, but not early.
        assert said[row][: TOKENS // 2] == wanted[: TOKENS // 2], f"row {row}"
    device.close()


def test_paged_and_plain_devices_say_the_same(tmp_path: Path) -> None:
    """Not nearly: the arithmetic is the same to the last bit, so every id is."""
    path = make_checkpoint(tmp_path / "m", "llama")
    said = []
    for kv in (PLAIN_KV, PagedKV(16)):
        device = MLXDevice(Options(path, name="tiny", dtype="float32", kv=kv))
        device.open()
        said.append(together(device, ROWS))
        device.close()
    assert said[0] == said[1]


def test_a_model_without_tokens_to_page_is_refused(tmp_path: Path) -> None:
    """At load, naming both."""
    path = make_checkpoint(tmp_path / "m", "mamba")
    with pytest.raises(ModelError, match=r"--paged-kv and mamba"):
        MLXDevice(Options(path, name="tiny", kv=PagedKV())).open()
    with pytest.raises(ModelError, match="blocks of 3"):
        MLXDevice(Options(path, name="tiny", kv=PagedKV(3))).open()


def test_a_model_whose_rows_share_no_steps_is_refused(tmp_path: Path) -> None:
    """Nothing would be in blocks, and the prompt cache off for nothing."""
    path = make_checkpoint(tmp_path / "m", "stablelm")
    with pytest.raises(ModelError, match=r"--paged-kv and stablelm: its rows share no steps: "):
        MLXDevice(Options(path, name="tiny", kv=PagedKV())).open()


def together(device: MLXDevice, rows: dict[RowId, tuple[int, ...]]) -> dict[RowId, list[int]]:
    """Rows that start two steps apart, all decoding together; their tokens."""
    said: dict[RowId, list[int]] = {row: [] for row in rows}
    waiting, live = dict(rows), []
    for step in range(TOKENS + 2 * len(rows)):
        parts: dict[str, Any] = {}
        if waiting and step % 2 == 0:
            row = next(iter(waiting))
            ids = waiting.pop(row)
            live.append(row)
            parts["start"] = (StartRow(row, ids, Sampling(temperature=0.0), Cold()),)
            parts["prefill"] = (PrefillRow(row, len(ids) - 1),)
        done = run_step(device, StepPlan(StepId(step), decode=tuple(live), **parts))
        assert not done.failed
        for sampled in done.sampled:
            said[sampled.row].append(sampled.token)
    return said


def run_step(device: MLXDevice, plan: StepPlan) -> StepDone:
    """Launch, push and settle one step."""
    device.launch(plan)
    device.push()
    return device.settle()
