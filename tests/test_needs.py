"""What a model needs of memory, before and after it is loaded, and the limits set on MLX."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from tiny import make_checkpoint

from mlx_troupe.runtime.engine.executor import MLXDevice
from mlx_troupe.runtime.engine.memory import MemoryLimits
from mlx_troupe.runtime.engine.needs import fit
from mlx_troupe.runtime.engine.opening import Options

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
