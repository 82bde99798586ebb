"""What must be equal for two states to be interchangeable, as one digest.

Pure functions over a model's folder and this build; no weights are read but for samples. Adapters
are not in it: ``prefix.entries.namespace_of`` puts their revisions behind it, in order.

    model files     config and safetensors headers whole; of the weights their names, sizes, times
                    and SAMPLES blocks, so that a file exchanged under the same name is noticed
    tokenizer       its files, whole: the same ids must be the same text
    KV scheme       widths, groups, the threshold, and the lines of a layer file
    runtime         versions of mlx-troupe, MLX and mlx-lm, the device's kind, name and architecture
"""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import mlx.core as mx

from ..kvschemes import KVScheme, PerLayerKV, read_kv_config

SAMPLES = 16
BLOCK = 4096
_TOKENIZER_FILES = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)


def namespace_digest(path: Path, dtype: str, kv: KVScheme) -> str:
    """The namespace of the model in ``path`` with weights as ``dtype`` under a KV scheme."""
    digest = hashlib.sha256()
    layers = read_kv_config(path) if isinstance(kv, PerLayerKV) else ()
    for part in (f"{kv}:{layers}", dtype, *_runtime()):
        digest.update(f"{part}\n".encode())
    digest.update((path / "config.json").read_bytes())
    for name in _TOKENIZER_FILES:
        file = path / name
        if file.is_file():
            digest.update(f"{name}:{_digest_of(file)}\n".encode())
    for file in sorted(path.glob("model*.safetensors")):
        digest.update(f"{file.name}:{_fingerprint(file)}\n".encode())
    return digest.hexdigest()


def _runtime() -> tuple[str, ...]:
    info = mx.device_info()
    try:
        ours = version("mlx-troupe")
    except PackageNotFoundError:
        ours = "unpacked"
    kind = "GPU" if mx.default_device() == mx.gpu else "CPU"
    names = (str(info.get("device_name")), str(info.get("architecture")))
    return (ours, version("mlx"), version("mlx-lm"), kind, *names)


def _digest_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _fingerprint(file: Path) -> str:
    stat = file.stat()
    digest = hashlib.sha256(f"{stat.st_size}:{stat.st_mtime_ns}".encode())
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        digest.update(stream.read(min(size, stat.st_size)))
        for sample in range(SAMPLES):
            stream.seek(stat.st_size * sample // SAMPLES)
            digest.update(stream.read(BLOCK))
    return digest.hexdigest()
