"""How fast a model is likely to decode: the weights that a token reads, and how fast they come."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from click.testing import CliRunner
from tiny import load_oracle, make_checkpoint

from mlx_troupe.http.cli import models
from mlx_troupe.http.cli.doctor import doctor
from mlx_troupe.runtime.engine import speed
from mlx_troupe.runtime.engine.models import read_config
from mlx_troupe.runtime.engine.needs import weights_bytes
from mlx_troupe.runtime.errors import ModelError

pytestmark = pytest.mark.mlx


def unread(folder: Path, family: str, bits: int | None = None, **changes: Any) -> int:
    """Bytes of a tiny model's weights that a token does not read."""
    path = make_checkpoint(folder / "model", family, bits=bits, **changes)
    model = load_oracle(path)
    return weights_bytes(model) - speed.active_bytes(model, read_config(path))


@pytest.mark.parametrize("bits", [None, 4])
def test_of_a_table_one_row_is_read_unless_it_is_the_output_too(
    tmp_path: Path, bits: int | None
) -> None:
    """Quantized tables as well."""
    apart = unread(tmp_path / "apart", "llama", bits)
    table = load_oracle(tmp_path / "apart" / "model")["model"]["embed_tokens"]
    assert apart == sum(x.nbytes for x in table.parameters().values())
    assert unread(tmp_path / "tied", "llama", bits, tie_word_embeddings=True) == 0


def test_of_experts_those_are_read_that_are_picked(tmp_path: Path) -> None:
    """Two of four, in the layers that have any."""
    left = unread(tmp_path, "qwen3_moe", tie_word_embeddings=True)
    model = load_oracle(tmp_path / "model")
    experts = [
        module["weight"].nbytes
        for _, module in model.named_modules()
        if isinstance(module, speed._EXPERTS)
    ]
    assert experts
    assert left == sum(experts) // 2


def test_other_tables_are_looked_up_only(tmp_path: Path) -> None:
    """A model with inputs for each layer reads one row of them too."""
    assert unread(tmp_path, "gemma4_text") > 0


def test_an_estimate_is_what_the_machine_gives_for_those_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less where experts are picked."""
    monkeypatch.setattr(speed, "bandwidth", lambda: 1e9)
    for family, share in (("llama", 0.82), ("qwen3_moe", 0.76)):
        found = speed.speed_of(make_checkpoint(tmp_path / family, family), dtype="keep")
        assert found.tokens_per_second == pytest.approx(share * 1e9 / found.active_bytes)
    with pytest.raises(ModelError):
        speed.speed_of(tmp_path / "nowhere")


def test_a_machine_s_memory_is_read_at_some_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured, and given back."""
    monkeypatch.setattr(speed, "MATRIX_BYTES", 8 << 20)
    before = mx.get_active_memory()
    assert 1e7 < speed.bandwidth() < 1e14
    assert mx.get_active_memory() <= before + 4096


def test_the_doctor_tells_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In words and as JSON, beside whether the model fits."""
    monkeypatch.setattr(speed, "MATRIX_BYTES", 8 << 20)
    path = make_checkpoint(tmp_path / "model")
    found = SimpleNamespace(path=path)
    monkeypatch.setattr(models, "find_model", lambda name, *, offline: found)
    told = CliRunner().invoke(doctor, ["--model", str(path)])
    assert told.exit_code == 0, told.output
    assert "tokens a second alone" in told.output
    report = json.loads(CliRunner().invoke(doctor, ["--model", str(path), "--json"]).output)
    assert report["fit"]["weights_bytes"] >= report["speed"]["active_bytes"] > 0
