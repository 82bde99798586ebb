"""What a LoRA adapter folder holds, without loading its weights: kind, ranks, shapes, revision.

Pure functions and frozen values, on any thread that may read files. Two kinds of folder are known:
mlx-lm's (``adapters.safetensors``) and PEFT's (``adapter_model.safetensors``), both with an
``adapter_config.json``. Only the header of the weights is parsed; all bytes are hashed. Knows no
model: whether the shapes fit one is asked of :mod:`~mlx_troupe.runtime.adapter_fit`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from safetensors import SafetensorError, safe_open

from .adapter_formats import AdapterModule, Config, Shapes, read_mlx, read_peft
from .errors import AdapterError

AdapterKind: TypeAlias = Literal["mlx-lm", "peft"]

__all__ = ["AdapterDescription", "AdapterInfo", "AdapterModule", "inspect_adapter"]

CONFIG_FILE = "adapter_config.json"
WEIGHT_FILES: dict[AdapterKind, str] = {
    "mlx-lm": "adapters.safetensors",
    "peft": "adapter_model.safetensors",
}
MAX_CONFIG_BYTES = 1 << 20
_FLOATS = frozenset({"F16", "BF16", "F32"})


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """An adapter that is mounted.

    ``rank`` is the largest of its modules, ``scale`` the one its configuration names,
    ``mounted_layers`` counts the modules it changes. ``size_bytes`` lie on disk, ``ram_bytes`` in
    memory.
    """

    id: str
    path: str
    revision: str
    rank: int
    scale: float
    mounted_layers: int
    size_bytes: int
    ram_bytes: int


@dataclass(frozen=True, slots=True)
class AdapterDescription:
    """A readable adapter folder.

    ``revision`` is the sha256 over the configuration and the weights; ``weights`` the file that
    holds these; ``base_model`` what the folder says it was trained on, if it does.
    """

    path: str
    weights: str
    kind: AdapterKind
    revision: str
    rank: int
    scale: float
    size_bytes: int
    modules: tuple[AdapterModule, ...]
    base_model: str | None = None


def inspect_adapter(path: Path) -> AdapterDescription:
    """Read an adapter folder. Raises AdapterError with the reason; loads no weights."""
    file = path / CONFIG_FILE
    try:
        content = _read_config(path, file)
        config = _parse(file, content)
        kind: AdapterKind = "peft" if "peft_type" in config else "mlx-lm"
        weights = path / WEIGHT_FILES[kind]
        if not weights.is_file():
            raise AdapterError(f"{path} holds no {weights.name}, which a {kind} adapter needs")
        shapes = _read_shapes(weights)
        pairs = (read_peft if kind == "peft" else read_mlx)(str(path), config, shapes)
        if not pairs.modules:
            raise AdapterError(f"{weights} holds no low-rank pair")
        revision = _revision(content, weights)
        size = len(content) + weights.stat().st_size
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{path} cannot be read: {error}") from error
    base = config.get("base_model_name_or_path", config.get("model"))
    rank = max(module.rank for module in pairs.modules)
    return AdapterDescription(
        path=str(path),
        weights=str(weights),
        kind=kind,
        revision=revision,
        rank=rank,
        scale=pairs.scale,
        size_bytes=size,
        modules=pairs.modules,
        base_model=base if isinstance(base, str) else None,
    )


def _read_config(path: Path, file: Path) -> bytes:
    if not path.is_dir():
        raise AdapterError(f"{path} is not a directory")
    if not file.is_file():
        raise AdapterError(f"{path} holds no {file.name}")
    with file.open("rb") as stream:
        content = stream.read(MAX_CONFIG_BYTES + 1)
    if len(content) > MAX_CONFIG_BYTES:
        raise AdapterError(f"{file} is larger than {MAX_CONFIG_BYTES} bytes")
    return content


def _parse(file: Path, content: bytes) -> Config:
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{file} is not an object")
    return config


def _read_shapes(file: Path) -> Shapes:
    """Shapes of all tensors by name, from the header alone."""
    shapes: dict[str, tuple[int, ...]] = {}
    with safe_open(file, framework="numpy") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - it is no mapping
            part = tensors.get_slice(name)
            if part.get_dtype() not in _FLOATS:
                raise AdapterError(f"{file}: {name} is of type {part.get_dtype()}")
            shapes[name] = tuple(part.get_shape())
    return shapes


def _revision(config: bytes, weights: Path) -> str:
    digest = hashlib.sha256(len(config).to_bytes(8, "little") + config)
    with weights.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
