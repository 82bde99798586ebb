"""Says which files a model folder lacks, before anything is loaded.

Looks at names, sizes and headers only: a shard that an index names but the disk lacks would
otherwise leave weights as they were initialised, or fail late with the names of tensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

_INDEX = "model.safetensors.index.json"
_TOKENIZERS = (
    ("tokenizer.json",),
    ("tokenizer.model",),
    ("vocab.json", "merges.txt"),
    ("tekken.json",),
)
_NUMBERED = re.compile(r"(model.*-)(\d{5})-of-(\d{5})\.safetensors")
_MOST_HEADER_BYTES = 100 << 20


def missing_parts(folder: Path) -> tuple[str, ...]:
    """Files that ``folder`` lacks or that are not whole, each with a reason where it is there.

    Empty means that config, weights and tokenizer are all present.
    """
    found = (_config(folder), _weights(folder), _tokenizer(folder), _dangling(folder))
    return tuple(dict.fromkeys(part for parts in found for part in parts))


def read_config(folder: Path) -> dict[str, object] | None:
    """config.json as a dict, or None if it is missing or not an object."""
    try:
        value = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _config(folder: Path) -> Iterator[str]:
    if not (folder / "config.json").is_file():
        yield "config.json"
    elif read_config(folder) is None:
        yield "config.json (not a JSON object)"


def _tokenizer(folder: Path) -> Iterator[str]:
    tiktoken = any(folder.glob("*.tiktoken"))
    if not tiktoken and not any(
        all((folder / name).is_file() for name in names) for names in _TOKENIZERS
    ):
        yield "tokenizer.json"


def _dangling(folder: Path) -> Iterator[str]:
    """Links of a hub snapshot whose file is gone, where they are of a kind that is read."""
    for pattern in ("*.json", "*.jinja", "*.safetensors"):
        for path in sorted(folder.glob(pattern)):
            if path.is_symlink() and not path.exists():
                yield path.name


def _weights(folder: Path) -> Iterator[str]:
    if (folder / _INDEX).is_file():
        shards = _indexed_shards(folder / _INDEX)
        if not shards:
            yield f"{_INDEX} (names no weights)"
            return
    else:
        shards = _listed_shards(folder)
    for name in shards:
        problem = _shard_problem(folder / name)
        if problem is not None:
            yield problem


def _indexed_shards(index: Path) -> tuple[str, ...]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return tuple(sorted({str(name) for name in weight_map.values()}))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ()


def _listed_shards(folder: Path) -> tuple[str, ...]:
    """The weight files without an index; numbered ones imply those of the other numbers."""
    names = {path.name for path in folder.glob("model*.safetensors")}
    for match in filter(None, map(_NUMBERED.fullmatch, tuple(names))):
        head, count = match[1], int(match[3])
        names |= {f"{head}{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)}
    return tuple(sorted(names)) or ("model.safetensors",)


def _shard_problem(path: Path) -> str | None:
    if not path.is_file():
        return path.name
    try:
        whole = path.stat().st_size == _expected_size(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{path.name} (not a safetensors file)"
    return None if whole else f"{path.name} (not whole)"


def _expected_size(path: Path) -> int:
    """The size that a safetensors file's own header implies."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MOST_HEADER_BYTES:
            raise ValueError("header too long")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
