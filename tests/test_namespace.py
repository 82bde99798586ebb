"""The namespace: whatever makes two states differ makes two names, and nothing else does."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import make_checkpoint

from mlx_troupe.runtime.engine import namespace
from mlx_troupe.runtime.engine.namespace import namespace_digest
from mlx_troupe.runtime.kvschemes import PLAIN_KV, AffineKV, TurboKV
from mlx_troupe.runtime.prefix.entries import adapters_of, namespace_of

pytestmark = pytest.mark.mlx


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder with a tokenizer."""
    path = make_checkpoint(tmp_path / "m")
    (path / "tokenizer.json").write_text('{"model": {}}')
    return path


def rewrite(file: Path, change: Callable[[bytearray], None]) -> None:
    """Other bytes under the same name, size and time."""
    stat = file.stat()
    data = bytearray(file.read_bytes())
    change(data)
    file.write_bytes(bytes(data))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def flip(at: int) -> Callable[[bytearray], None]:
    """Change one byte."""

    def change(data: bytearray) -> None:
        data[at] ^= 1

    return change


def test_the_same_folder_has_one_name(folder: Path) -> None:
    """Read twice, and copied with its times, with files beside it that say nothing."""
    first = namespace_digest(folder, "keep", PLAIN_KV)
    (folder / "README.md").write_text("words")
    assert namespace_digest(folder, "keep", PLAIN_KV) == first
    shutil.copytree(folder, folder.parent / "copy")
    assert namespace_digest(folder.parent / "copy", "keep", PLAIN_KV) == first


def test_whatever_makes_states_differ_makes_another_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights' type, scheme, threshold, config, tokenizer, weights, builds."""
    names = [namespace_digest(folder, "keep", PLAIN_KV)]

    def add(dtype: str = "keep", kv: object = PLAIN_KV) -> None:
        names.append(namespace_digest(folder, dtype, kv))  # type: ignore[arg-type]

    add("bfloat16")
    for kv in (AffineKV(4), AffineKV(8), AffineKV(8, start=9), TurboKV(), TurboKV(4, 5)):
        add(kv=kv)
    rewrite(folder / "tokenizer.json", flip(3))
    add()
    (folder / "tokenizer_config.json").write_text("{}")
    add()
    weights = folder / "model.safetensors"
    rewrite(weights, flip(weights.stat().st_size * 5 // namespace.SAMPLES + 7))
    add()
    os.utime(weights, (1, 1))
    add()
    config = folder / "config.json"
    config.write_text(config.read_text().replace("{", '{"x": 1, ', 1))
    add()
    for package in ("mlx", "mlx-lm", "mlx-troupe"):
        with monkeypatch.context() as patch:
            version = namespace.version
            patch.setattr(
                namespace, "version", lambda name, p=package, v=version: v(name) + (name == p) * "x"
            )
            add()
    assert len(set(names)) == len(names)


def test_adapters_stand_behind_the_model_in_order() -> None:
    """Another revision, another order or none are other names, and can be read back."""
    names = [namespace_of("model", a) for a in ((), ("a",), ("b",), ("a", "b"), ("b", "a"))]
    assert len(set(names)) == len(names)
    assert adapters_of(names[3]) == ("a", "b")
    assert adapters_of(names[0]) == ()
