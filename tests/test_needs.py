"""What a model needs of memory, before and after it is loaded, and the limits set on MLX."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from tiny import make_checkpoint

from mlx_troupe.http.cli.doctor import describe_fit
from mlx_troupe.runtime.engine import codecs
from mlx_troupe.runtime.engine.executor import MLXDevice
from mlx_troupe.runtime.engine.memory import MemoryLimits
from mlx_troupe.runtime.engine.needs import fit
from mlx_troupe.runtime.engine.opening import Options
from mlx_troupe.runtime.kvschemes import PLAIN_KV, AffineKV, KVScheme, PagedKV, TurboKV

pytestmark = pytest.mark.mlx
GB = 10**9


@pytest.mark.parametrize("family", ["llama", "sliding", "mamba"])
@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
def test_the_estimate_is_what_the_loaded_model_says(
    tmp_path: Path, family: str, dtype: str
) -> None:
    """Weights and state by the files' headers are those of the arrays in memory."""
    path = make_checkpoint(tmp_path / "model", family)
    estimate = fit(path, 8 * GB, dtype=dtype)  # type: ignore[arg-type]
    device = MLXDevice(Options(path, name="m", dtype=dtype))  # type: ignore[arg-type]
    info = device.open()
    device.close()
    assert estimate.weights_bytes == info.weights_bytes > 0
    assert estimate.kv_bytes_per_token == info.kv_bytes_per_token
    assert estimate.context_window == info.context_window
    assert estimate.safe_bytes == 6 * GB
    assert estimate.fits


@pytest.mark.parametrize(
    ("kv", "on_cuda", "unpacks"),
    [
        (TurboKV(), False, True),
        (AffineKV(8, 64), False, False),
        (AffineKV(8, 64), True, True),
        (PLAIN_KV, True, False),
        (PagedKV(), False, True),
    ],
)
def test_what_attention_unpacks_is_estimated(
    kv: KVScheme, on_cuda: bool, unpacks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain keys and values of two layers, where those that are kept cannot be used as they are."""
    path = make_checkpoint(tmp_path / "model", "llama", head_dim=64, num_hidden_layers=3)
    plain = fit(path, 8 * GB, dtype="keep")
    monkeypatch.setattr(codecs, "packed_products", lambda: not on_cuda)
    estimate = fit(path, 8 * GB, dtype="keep", kv=kv)
    device = MLXDevice(Options(path, name="m", dtype="keep", kv=kv))
    info = device.open()
    device.close()
    assert estimate.unpacked_bytes_per_token == info.unpacked_bytes_per_token
    assert 3 * info.unpacked_bytes_per_token == unpacks * 2 * plain.kv_bytes_per_token
    told = dict(describe_fit(estimate))["state"]
    assert ("to attend to it" in told) is unpacks


def test_weights_that_a_gpu_expands_are_said_not_to_be_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quantized ones, on CUDA; how much that takes is measured only when they are loaded."""
    paths = [make_checkpoint(tmp_path / f"{bits}", bits=bits) for bits in (None, 4)]
    for on_cuda in (False, True):
        if on_cuda:
            monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
            monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
        estimates = [fit(path, 8 * GB, dtype="keep") for path in paths]
        assert [estimate.expands_weights for estimate in estimates] == [False, on_cuda]
        told = [text for _, text in describe_fit(estimates[1]) if "expand" in text]
        assert len(told) == on_cuda


def test_an_estimate_reads_no_weights(tmp_path: Path) -> None:
    """Their arrays are described, not made."""
    path = make_checkpoint(tmp_path / "model", hidden_size=256, intermediate_size=2048)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    estimate = fit(path, 8 * GB, dtype="keep")
    assert mx.get_peak_memory() - before < estimate.weights_bytes / 10


def test_a_machine_that_is_too_small_is_told_and_nothing_is_refused(tmp_path: Path) -> None:
    """Advice only: the same model is loaded all the same."""
    path = make_checkpoint(tmp_path / "model")
    estimate = fit(path, 100_000, dtype="keep")
    assert (estimate.fits, estimate.context_tokens) == (False, 0)
    device = MLXDevice(Options(path, name="m", dtype="keep"))
    assert device.open().weights_bytes > 100_000
    device.close()


def test_a_memory_budget_is_mlx_s_limit_while_the_device_is_open(tmp_path: Path) -> None:
    """It is set at open and put back at close."""
    path = make_checkpoint(tmp_path / "model")
    before = mx.get_memory_limit()
    device = MLXDevice(Options(path, name="m", dtype="keep", memory_budget=GB))
    device.open()
    assert mx.get_memory_limit() == GB
    device.close()
    assert mx.get_memory_limit() == before


def test_limits_are_set_once(tmp_path: Path) -> None:
    """A second call changes nothing, and there is something to restore only once."""
    before = mx.get_memory_limit()
    limits = MemoryLimits()
    limits.set(GB)
    limits.set(2 * GB)
    assert mx.get_memory_limit() == GB
    limits.restore()
    limits.restore()
    assert mx.get_memory_limit() == before
