"""KV schemes through the MLX device: against mlx-lm, in company, kept, forked, refused."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from device_rig import Driver, start_row
from kv_rig import CONFIG, SCHEMES, checkpoint
from mlx_lm.generate import generate_step
from tiny import load_oracle, make_checkpoint, prompt

from mlx_troupe.runtime.engine import kvplan
from mlx_troupe.runtime.engine.executor import MLXDevice
from mlx_troupe.runtime.engine.kvplan import KVPlan
from mlx_troupe.runtime.engine.opening import Options
from mlx_troupe.runtime.engine.sampling import Sampler
from mlx_troupe.runtime.errors import ModelError
from mlx_troupe.runtime.kvschemes import AffineKV, KVScheme, PerLayerKV, PlainKV, TurboKV
from mlx_troupe.runtime.model_info import KVLayers
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

pytestmark = pytest.mark.mlx

A, B, C, D = (RowId(n) for n in range(1, 5))
KEPT, SHORT = SnapshotId(1), SnapshotId(2)
TOKENS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Checkpoints with heads of 64, by family and config, each written once."""
    made: dict[str, Path] = {}

    def path(family: str = "plain", **config: Any) -> Path:
        key = f"{family}{config}"
        if key not in made:
            made[key] = checkpoint(tmp_path_factory.mktemp("kv") / "m", family, **config)
        return made[key]

    return path


@pytest.fixture
def drive(folder: Callable[..., Path]) -> Iterator[Callable[..., Driver]]:
    """Opens drivers and closes their devices."""
    opened: list[Driver] = []

    def open_(kv: KVScheme, family: str = "plain", dtype: str = "float32", **config: Any) -> Driver:
        opened.append(Driver(folder(family, **config), kv=kv, dtype=dtype))
        return opened[-1]

    yield open_
    for driver in opened:
        driver.device.close()


def record_logits(monkeypatch: pytest.MonkeyPatch) -> list[mx.array]:
    """Collect the logits of every draw."""
    seen: list[mx.array] = []
    draw = Sampler.draw

    def recording(self: Sampler, logits: mx.array, *rest: Any, **more: Any) -> Any:
        seen.append(logits)
        return draw(self, logits, *rest, **more)

    monkeypatch.setattr(Sampler, "draw", recording)
    return seen


@pytest.mark.parametrize(
    ("bits", "start", "chunk"),
    [
        *((4, start, chunk) for start in (0, 1, 20, 25, 500) for chunk in (7, 2048)),
        *((8, start, chunk) for start in (0, 25) for chunk in (7, 2048)),
    ],
)
def test_a_lone_affine_row_is_bit_exact_with_mlx_lm(
    bits: int,
    start: int,
    chunk: int,
    folder: Callable[..., Path],
    drive: Callable[..., Driver],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ids and every log-probability are those of generate_step with the same kv_bits and start."""
    oracle = generate_step(
        mx.array(prompt(21)),
        load_oracle(folder()),
        max_tokens=TOKENS,
        kv_bits=bits,
        kv_group_size=64,
        quantized_kv_start=start,
        prefill_step_size=chunk,
    )
    expected = [(token, np.array(logprobs)) for token, logprobs in oracle]
    driver = drive(AffineKV(bits, start=start), dtype="keep")
    seen = record_logits(monkeypatch)
    driver.start(A, prompt(21), chunk=chunk)
    driver.decode(TOKENS, A)
    assert driver.tokens[A] == [token for token, _ in expected]
    for logits, (_, logprobs) in zip(seen, expected, strict=True):
        ours = logits[0] - mx.logsumexp(logits, keepdims=True)[0]
        assert np.array_equal(np.array(ours), logprobs)


def test_encoding_does_change_the_logits(
    drive: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the exactness above is not that of a scheme which was never applied."""
    seen = record_logits(monkeypatch)
    plain: mx.array | None = None
    for kv in (PlainKV(), AffineKV(8), AffineKV(4), TurboKV()):
        driver = drive(kv, dtype="keep")
        seen.clear()
        driver.start(A, prompt(21))
        driver.decode(1, A)
        plain = seen[0] if plain is None else plain
        assert (mx.abs(seen[0] - plain).max().item() > 1e-4) is not isinstance(kv, PlainKV)


@pytest.mark.parametrize("family", ["plain", "sliding"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_in_company_say_what_they_say_alone(
    family: str, scheme: str, drive: Callable[..., Driver]
) -> None:
    """Four rows, prefilled in a chunk each and decoded together, against each alone."""
    prompts = {
        row: prompt(length, seed=row) for row, length in zip((A, B, C), (5, 40, 21), strict=True)
    }
    alone = drive(SCHEMES[scheme], family)
    for row, ids in prompts.items():
        alone.start(row, ids)
        alone.decode(8, row)
        alone.step(end=(row,))
    together = drive(SCHEMES[scheme], family)
    assert together.info.batchable
    for row, ids in prompts.items():
        together.start(row, ids)
    together.decode(8, *prompts)
    same = sum(
        x == y
        for row in prompts
        for x, y in zip(together.tokens[row], alone.tokens[row], strict=True)
    )
    # A code that flips may turn an id, and then that row goes its own way.
    assert same >= 20


def test_rows_prefilled_together_are_encoded_too(drive: Callable[..., Driver]) -> None:
    """A padded prefill runs on plain keys, as a lone one does, and is encoded behind it."""
    prompts = {
        row: prompt(length, seed=row) for row, length in zip((A, B, C), (9, 12, 17), strict=True)
    }
    alone, together = drive(AffineKV(8)), drive(AffineKV(8))
    for row, ids in prompts.items():
        alone.start(row, ids)
        alone.decode(8, row)
    starts = tuple(start_row(row, ids) for row, ids in prompts.items())
    chunks = tuple(PrefillRow(row, len(ids) - 1) for row, ids in prompts.items())
    together.step(start=starts, prefill=chunks)
    plain = 2 * 3 * 2 * 64 * 4
    assert together.device.stats().kv_bytes > 64 * plain
    together.decode(8, *prompts)
    assert together.tokens == alone.tokens
    held = together.device.stats().kv_bytes
    assert held == 3 * 64 * together.info.kv_bytes_per_token


@pytest.mark.parametrize("family", ["plain", "sliding"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("batched", [False, True])
def test_kept_states_go_on_byte_for_byte(
    family: str, scheme: str, batched: bool, drive: Callable[..., Driver]
) -> None:
    """A snapshot and a fork of an encoded row continue as the row itself does."""
    driver = drive(SCHEMES[scheme], family)
    ids = prompt(14)
    driver.start(A, ids)
    rows: tuple[RowId, ...] = (A,)
    if batched:
        driver.start(B, prompt(30, seed=2))
        rows = (A, B)
    driver.decode(4, *rows)
    text = (*ids, *driver.tokens[A])
    done = driver.step(keep=(KeepRow(A, 17, KEPT),))
    (kept,) = done.kept
    assert isinstance(kept, SnapshotMade)
    assert kept.length == 17
    if family == "plain":
        assert kept.nbytes == 17 * driver.info.kv_bytes_per_token
    before = list(driver.tokens[A])
    driver.decode(6, *rows)
    driver.start(C, text, FromSnapshot(KEPT, 17))
    driver.decode(6, C)
    assert driver.tokens[C] == driver.tokens[A][len(before) : len(before) + 6]
    if family == "plain":
        driver.start(D, text, FromRow(A, 17))
        driver.decode(6, D)
        assert driver.tokens[D] == driver.tokens[C]
        assert not driver.start(RowId(9), ids, FromSnapshot(KEPT, 9)).failed


def test_below_its_threshold_nothing_goes_on_from_an_encoded_row(
    drive: Callable[..., Driver],
) -> None:
    """A cold row of 15 tokens would be plain: the encoded one of 24 does not stand in for it."""
    driver = drive(AffineKV(4, start=20))
    assert driver.info.trim_floor == 20
    ids = prompt(24)
    driver.start(A, ids)
    driver.decode(1, A)
    done = driver.step(keep=(KeepRow(A, 22, KEPT), KeepRow(A, 15, SHORT)))
    assert [type(kept) for kept in done.kept] == [SnapshotMade, SnapshotSkipped]
    assert "encoded" in done.kept[1].reason  # type: ignore[union-attr]
    for source in (FromSnapshot(KEPT, 15), FromRow(A, 15)):
        (failed,) = driver.step(start=(start_row(B, ids[:17], source),)).failed
        assert "encoded" in failed.reason
    for row, source in ((B, FromSnapshot(KEPT, 20)), (C, FromRow(A, 20))):
        assert not driver.start(row, ids, source).failed
    driver.start(D, ids[:16])
    assert [type(k) for k in driver.step(keep=(KeepRow(D, 9, SHORT),)).kept] == [SnapshotMade]


@pytest.mark.parametrize("scheme", [AffineKV(8, start=12), TurboKV(start=12)])
def test_rows_convert_on_their_own_in_the_device(
    scheme: KVScheme, drive: Callable[..., Driver]
) -> None:
    """Bytes held fall when a row passes its threshold, whoever else is in the batch."""
    driver = drive(scheme)
    plain = 3 * 2 * 2 * 64 * 4
    driver.start(A, prompt(9))
    driver.start(B, prompt(6, seed=4))
    driver.decode(1, A, B)
    assert driver.device.stats().kv_bytes == 2 * 64 * plain
    driver.decode(5, A, B)
    both = driver.device.stats().kv_bytes
    # A group keeps the slot of a row that left for another.
    assert both == 2 * 64 * plain + 64 * driver.info.kv_bytes_per_token
    driver.decode(5, A, B)
    assert driver.device.stats().kv_bytes == 2 * 64 * driver.info.kv_bytes_per_token


def test_what_was_applied_is_read_off_the_arrays(
    drive: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversion that does nothing is not reported as done."""
    full = drive(AffineKV(8)).info
    assert full.kv_scheme == "8"
    assert full.kv_layers == (KVLayers("full", "affine 8-bit, groups of 64", 3, 288),)
    assert full.kv_bytes_per_token == 3 * 288
    mixed = drive(TurboKV(), "sliding").info
    assert mixed.kv_layers == (
        KVLayers("sliding", "plain float32", 2, 1024),
        KVLayers("full", "turbo k8v3", 1, 200),
    )
    monkeypatch.setattr(KVPlan, "converted", lambda self, caches, tokens: caches)
    with pytest.raises(ModelError, match="does not hold"):
        drive(AffineKV(8))


SIXTEEN_BIT = 2 * 2 * 64 * 2


@pytest.mark.parametrize(
    ("scheme", "bar"), [(AffineKV(4), 0.29), (AffineKV(8), 0.54), (TurboKV(), 0.40)]
)
def test_bytes_per_token_of_a_bfloat16_model(
    scheme: KVScheme, bar: float, drive: Callable[..., Driver]
) -> None:
    """Live arrays of lone and batched rows, against 16 bits for every number."""
    driver = drive(scheme, dtype="bfloat16")
    for alike in driver.info.kv_layers:
        assert alike.bytes_per_token <= bar * SIXTEEN_BIT
    driver.start(A, prompt(9))
    driver.start(B, prompt(12, seed=2))
    driver.decode(2, A, B)
    capacity = 2 * 64
    assert driver.device.stats().kv_bytes <= bar * SIXTEEN_BIT * 3 * capacity


def test_states_of_two_schemes_are_never_exchanged(folder: Callable[..., Path]) -> None:
    """Width, group, threshold and the file's layers are all in the namespace."""
    path = folder()
    schemes: list[KVScheme] = [
        PlainKV(),
        AffineKV(4),
        AffineKV(8),
        AffineKV(8, start=1),
        TurboKV(),
        TurboKV(8, 4),
        PerLayerKV(),
    ]
    names = [Driver(path, kv=scheme).info.namespace for scheme in schemes]
    (path / "kv_config.json").write_text('[{"layer_idx": 1, "bits": 8}]')
    names.append(Driver(path, kv=PerLayerKV()).info.namespace)
    (path / "kv_config.json").write_text(CONFIG)
    assert len(set(names)) == len(names)


# What it caches is a latent vector and one rotated key, not keys and values.
LATENT = {"kv_lora_rank": 64, "qk_rope_head_dim": 64}


@pytest.mark.parametrize(
    ("scheme", "family", "config", "told"),
    [
        (AffineKV(8), "llama", {"head_dim": 48}, r"--kv-quant 8 and llama.*heads of 48.*64"),
        (TurboKV(), "llama", {"head_dim": 32}, r"--kv-quant turbo:k8v3 and llama.*not of 32"),
        (TurboKV(), "llama", {"head_dim": 80}, r"64, 128, 256, 512, not of 80"),
        (AffineKV(4), "mamba", {}, r"--kv-quant 4 and mamba.*no layer"),
        (AffineKV(8), "gemma2", {"head_dim": 64}, r"--kv-quant 8 and gemma2.*attention"),
        (TurboKV(), "gemma2", {"head_dim": 64}, r"--kv-quant turbo:k8v3 and gemma2.*attention"),
        (AffineKV(8), "gpt_oss", {"head_dim": 64}, r"--kv-quant 8 and gpt_oss.*attention sinks"),
        (AffineKV(8), "deepseek_v3", LATENT, r"--kv-quant 8 and deepseek_v3.*attention"),
        (TurboKV(), "deepseek_v3", LATENT, r"--kv-quant turbo:k8v3 and deepseek_v3.*attention"),
    ],
)
def test_what_a_model_cannot_take_is_refused_at_start(
    scheme: KVScheme, family: str, config: dict[str, Any], told: str, tmp_path: Path
) -> None:
    """The refusal names the option and the family."""
    path = make_checkpoint(tmp_path / "m", family, **config)
    with pytest.raises(ModelError, match=told):
        MLXDevice(Options(path, name="tiny", dtype="float32", kv=scheme)).open()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('[{"layer_idx": 3, "bits": 8}]', "layer 3 of kv_config.json has no KV cache"),
        ('[{"layer_idx": 0, "bits": 9}]', "wants 9 bits"),
        (
            '[{"layer_idx": 0, "bits": 8, "group_size": 128}]',
            "heads of 64 are not whole groups of 128",
        ),
        ('{"layer_idx": 0}', "list of layers"),
    ],
)
def test_a_wrong_file_is_refused_at_start(content: str, told: str, tmp_path: Path) -> None:
    """Not one layer is left plain because of a mistake."""
    path = checkpoint(tmp_path / "m", "plain")
    (path / "kv_config.json").write_text(content)
    with pytest.raises(ModelError, match=told):
        MLXDevice(Options(path, name="tiny", dtype="float32", kv=PerLayerKV())).open()


def test_no_file_is_plain_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """KV-03: the model runs as it is, and the log says why."""
    path = make_checkpoint(tmp_path / "m", "llama")
    with caplog.at_level(logging.WARNING):
        info = Driver(path, kv=PerLayerKV()).info
    assert [alike.form for alike in info.kv_layers] == ["plain float32"]
    assert "stays plain" in caplog.text


def test_turbo_on_a_sliding_model_warns_once(
    drive: Callable[..., Driver], caplog: pytest.LogCaptureFixture
) -> None:
    """One line that lists the layers that stay plain."""
    with caplog.at_level(logging.WARNING):
        drive(TurboKV(), "sliding")
    warnings = [r for r in caplog.records if r.name == kvplan.__name__]
    assert [w.getMessage() for w in warnings] == ["TurboQuant leaves sliding layers plain: 0, 2"]


def test_small_groups_do_not_let_odd_heads_in(tmp_path: Path) -> None:
    """Heads of 96 are whole groups of 32, but MLX's GPU product would leave columns out."""
    path = make_checkpoint(tmp_path / "m", "llama", head_dim=96)
    (path / "kv_config.json").write_text('[{"layer_idx": 0, "bits": 8, "group_size": 32}]')
    with pytest.raises(ModelError, match="heads of 96 are not whole groups of 64"):
        Driver(path, kv=PerLayerKV())


def test_sinks_go_with_turboquant(tmp_path: Path) -> None:
    """They take weight from the values and leave the rotation linear: batch and lone row agree."""
    path = make_checkpoint(tmp_path / "m", "gpt_oss", head_dim=64)
    info = Driver(path, kv=TurboKV()).info
    assert info.batchable
    assert KVLayers("full", "turbo k8v3", 2, 200) in info.kv_layers


def test_layers_of_a_model_that_shares_keys_and_values(tmp_path: Path) -> None:
    """Gemma 4's last layers have no cache: the file's numbers mean layers, theirs are refused."""
    heads = {"head_dim": 64, "global_head_dim": 64}
    path = make_checkpoint(tmp_path / "m", "gemma4_text", **heads)
    file = path / "kv_config.json"
    file.write_text('[{"layer_idx": 2, "bits": 8}, {"layer_idx": 0, "bits": 4}]')
    info = Driver(path, kv=PerLayerKV()).info
    assert {(alike.kind, alike.form, alike.layers) for alike in info.kv_layers} == {
        ("sliding", "affine 4-bit, groups of 64", 1),
        ("sliding", "plain float32", 1),
        ("full", "affine 8-bit, groups of 64", 1),
    }
    file.write_text('[{"layer_idx": 4, "bits": 8}]')
    with pytest.raises(ModelError, match="layer 4"):
        Driver(path, kv=PerLayerKV())


def test_the_recurrent_layers_of_a_hybrid_stay_as_they_are(tmp_path: Path) -> None:
    """Attention layers are encoded, the others named in the report, and rows still share steps."""
    path = make_checkpoint(tmp_path / "m", "lfm2", hidden_size=256, block_dim=256)
    driver = Driver(path, kv=AffineKV(8))
    assert dataclasses.astuple(driver.info)  # plain values
    kinds = {(alike.kind, alike.form) for alike in driver.info.kv_layers}
    assert kinds == {("recurrent", "state"), ("full", "affine 8-bit, groups of 64")}
    driver.start(A, prompt(9))
    driver.start(B, prompt(12, seed=2))
    driver.decode(4, A, B)
    assert len(driver.tokens[A]) == 4
    driver.device.close()
