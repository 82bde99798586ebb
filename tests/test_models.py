"""Loading checkpoints: what is read off the files, and what is refused in which words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ChunkedKVCache, KVCache
from tiny import EOS, FAMILIES, load_oracle, make_checkpoint

from mlx_troupe.runtime.engine import models
from mlx_troupe.runtime.engine.executor import MLXDevice
from mlx_troupe.runtime.engine.opening import Options, has_kernels
from mlx_troupe.runtime.errors import ModelError

pytestmark = pytest.mark.mlx


def edit(path: Path, **changes: Any) -> None:
    """Change config.json; None removes a key."""
    file = path / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def no_config(path: Path) -> None:
    """Delete config.json."""
    (path / "config.json").unlink()


def broken_config(path: Path) -> None:
    """Cut config.json short."""
    (path / "config.json").write_text('{"model_type": ')


def no_weights(path: Path) -> None:
    """Delete the weights."""
    (path / "model.safetensors").unlink()


def index(text: str) -> Callable[[Path], object]:
    """Write a weight index."""
    return lambda path: (path / "model.safetensors.index.json").write_text(text)


def missing_shards(path: Path) -> None:
    """An index of three shards of which one is there."""
    names = {f"w{i}": f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)}
    (path / "model.safetensors").rename(path / names["w1"])
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def truncated(path: Path) -> None:
    """Cut the weight file in half."""
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (no_config, "no config.json"),
        (broken_config, "cannot be read"),
        (lambda p: edit(p, model_type=None), "names no model_type"),
        (lambda p: edit(p, model_type="warp_drive"), "warp_drive"),
        (lambda p: edit(p, model_file="evil.py"), "evil.py"),
        (lambda p: edit(p, num_hidden_layers=5), "layers.3"),
        (no_weights, "no model"),
        (missing_shards, "model-00002-of-00003.safetensors, model-00003-of-00003.safetensors"),
        (index("{}"), "index"),
        (index('{"weight_map": {}}'), "index"),
        (index("[1"), "index"),
        (truncated, "cannot be loaded"),
    ],
)
def test_a_damaged_model_is_refused_by_name(
    damage: Callable[[Path], None], words: str, tmp_path: Path
) -> None:
    """The error says what is wrong with which file, before anything is served."""
    path = make_checkpoint(tmp_path / "model")
    damage(path)
    device = MLXDevice(Options(path, name="x"))
    with pytest.raises(ModelError) as caught:
        device.open()
    assert words in caught.value.message
    device.close()


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    """A path that is not there, or not a directory."""
    with pytest.raises(ModelError, match="not a directory"):
        models.load_checkpoint(tmp_path / "nowhere", "keep")


def test_end_tokens_come_from_both_files(tmp_path: Path) -> None:
    """config.json and generation_config.json, an int or a list."""
    path = make_checkpoint(tmp_path / "model")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    device = MLXDevice(Options(path, name="x"))
    assert device.open().eos_ids == {EOS, 5, 6}
    device.close()
    edit(path, eos_token_id=None, text_config={"eos_token_id": 77})
    (path / "generation_config.json").unlink()
    assert models.load_checkpoint(path, "keep").eos_ids == {77}


def test_the_context_window_is_read_where_families_keep_it(tmp_path: Path) -> None:
    """At the top, in the text part, or unknown."""
    path = make_checkpoint(tmp_path / "model")
    assert models.load_checkpoint(path, "keep").context_window == 4096
    edit(path, max_position_embeddings=None, text_config={"max_position_embeddings": 64})
    assert models.load_checkpoint(path, "keep").context_window == 64
    edit(path, text_config=None)
    assert models.load_checkpoint(path, "keep").context_window is None


def dtypes(model: nn.Module) -> set[mx.Dtype]:
    """Types of all weights."""
    return {weight.dtype for _, weight in tree_flatten(model.parameters())}


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_weights_are_expanded_as_asked(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """keep keeps, a name expands, auto expands on a CPU with room and keeps without."""
    path = make_checkpoint(tmp_path / "model", family, bits=4)
    assert mx.uint32 in dtypes(models.load_checkpoint(path, "keep").model)
    for dtype in ("float32", "bfloat16"):
        checkpoint = models.load_checkpoint(path, dtype)
        assert dtypes(checkpoint.model) == {getattr(mx, dtype)}
        assert checkpoint.dtype == dtype
    auto = models.load_checkpoint(path, "auto")
    on_cpu = mx.default_device() != mx.gpu
    assert (dtypes(auto.model) == {mx.float32}) == on_cpu
    ids = mx.array([[4, 5, 6]])
    wide, stored = auto.model(ids), load_oracle(path)(ids)
    assert mx.allclose(wide, stored.astype(mx.float32), atol=1e-3)
    monkeypatch.setattr(models, "available_memory", lambda: 1000)
    assert models.load_checkpoint(path, "auto").dtype == "as stored"


def test_free_memory_is_what_the_system_says() -> None:
    """Between 64 MiB and all there is."""
    assert 64 << 20 < models.available_memory() <= 1 << 46


def test_the_namespace_changes_with_whatever_makes_states_differ(tmp_path: Path) -> None:
    """Same files, same name; other weights, config or type of weights, another."""
    path = make_checkpoint(tmp_path / "model")
    first = models.load_checkpoint(path, "keep").namespace
    assert models.load_checkpoint(path, "keep").namespace == first
    names = {first, models.load_checkpoint(path, "bfloat16").namespace}
    edit(path, rope_theta=5000.0)
    names.add(models.load_checkpoint(path, "keep").namespace)
    make_checkpoint(path, seed=1, rope_theta=5000.0)
    names.add(models.load_checkpoint(path, "keep").namespace)
    assert len(names) == 4


@pytest.mark.parametrize(
    ("family", "window", "ragged"),
    [("llama", None, True), ("sliding", 15, False), ("mamba", 0, False), ("lfm2", 0, True)],
)
def test_the_kind_of_state_is_read_off_the_caches(
    family: str, window: int | None, ragged: bool, tmp_path: Path
) -> None:
    """Plain, sliding and recurrent families are told apart, and the device says so."""
    path = make_checkpoint(tmp_path / "model", family)
    device = MLXDevice(Options(path, name="tiny"))
    info = device.open()
    device.close()
    assert (info.trim_window, info.ragged_prefill, info.batchable) == (window, ragged, True)
    assert info.lone_reason == ""
    assert info.vocab_size == FAMILIES[family]["vocab_size"]
    layers = {"llama": 3, "sliding": 3, "mamba": 0, "lfm2": 1}[family]
    assert info.kv_bytes_per_token == layers * 2 * 2 * 16 * 4


def test_a_state_without_a_layout_is_named() -> None:
    """Caches that no layout knows forbid batches, by their names."""

    class Chunked(nn.Module):
        def make_cache(self) -> list[Any]:
            return [KVCache(), ChunkedKVCache(8)]  # type: ignore[no-untyped-call]

    kind = models.state_kind(Chunked())
    assert kind.trim_window == 0
    assert "ChunkedKVCache" in kind.obstacle
    assert "KVCache," not in kind.obstacle


def test_kernels_of_an_earlier_start_are_found(tmp_path: Path) -> None:
    """Only a folder that holds compiled kernels saves a GPU's first start from compiling."""
    assert not has_kernels(None)
    assert not has_kernels(str(tmp_path / "nowhere"))
    assert not has_kernels(str(tmp_path))
    (tmp_path / "gather.ptx").touch()
    assert has_kernels(str(tmp_path))
