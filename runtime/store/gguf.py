"""Turns a ``.gguf`` file once into a folder that mlx-lm loads.

Owns the conversion from end to end: config, weights in shards, tokenizer, and the note of what it
was made from. Runs on the caller's thread, without MLX; memory is bounded by one shard.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import ModelError
from . import paths
from .gguf_config import Metadata, build_config, head_counts
from .gguf_reader import GgufFile
from .gguf_weights import Array, convert_tensor, module_path, weight_names

_FORMAT = 2
"""Part of the cache key: raised whenever the conversion's output changes."""
_SHARD_BYTES = 2 << 30
_HASH_CHUNK = 1 << 22
_NOTE = "mlx_troupe_source.json"


@dataclass(frozen=True, slots=True)
class _Stamp:
    """What tells a file apart without reading it."""

    path: str
    size: int
    mtime_ns: int


def convert_gguf(
    path: Path,
    *,
    into: Path | None = None,
    progress: paths.Progress | None = None,
    generation: Mapping[str, object] | None = None,
) -> Path:
    """The MLX folder of a GGUF file, converted unless the cache has it already.

    Args:
        path: the file.
        into: folder to make instead of one in the cache; an existing one is replaced.
        progress: told of the bytes hashed and converted.
        generation: defaults that generation_config.json is to hold.

    Raises:
        ModelError: the file is not a whole GGUF file, or of an architecture, tensor type or
            tokenizer that cannot be read; or the folder cannot be written.
    """
    stamp = _stamp(path)
    known = _find(stamp) if into is None else None
    if known is not None:
        return known
    digest = sha256_of(path, progress)
    target = into or converted_path(path.stem, digest)
    with paths.exclusive(f"convert-{target.name}"):
        if into is None and (target / _NOTE).is_file():
            return target
        return paths.build_folder(
            target, lambda folder: _write(path, folder, stamp, digest, generation or {}, progress)
        )


def converted_path(stem: str, digest: str) -> Path:
    """Where the cache keeps the conversion of a file with this name and SHA-256."""
    slug = re.sub(r"[^a-z0-9._]+", "-", stem.lower().replace(".q", "-q")).strip("-.") or "model"
    key = hashlib.sha256(f"{digest}:{_FORMAT}".encode()).hexdigest()[:8]
    return paths.models_dir() / f"{slug[:80]}-{key}"


def is_current(folder: Path) -> bool:
    """Whether a folder is no conversion, or one that this version would make just so."""
    try:
        note = json.loads((folder / _NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True
    return not isinstance(note, dict) or note.get("format") == _FORMAT


def source_name(folder: Path) -> str:
    """The name of the file that a converted folder was made from, without its suffix."""
    try:
        return Path(json.loads((folder / _NOTE).read_text())["path"]).stem
    except (OSError, ValueError, KeyError, TypeError):
        return folder.name


def sha256_of(path: Path, progress: paths.Progress | None = None) -> str:
    """SHA-256 of a file, in hex. Raises ModelError if it cannot be read."""
    digest, done = hashlib.sha256(), 0
    try:
        total = path.stat().st_size
        with path.open("rb") as file:
            while chunk := file.read(_HASH_CHUNK):
                digest.update(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(done, total, f"checking {path.name}")
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    return digest.hexdigest()


def _stamp(path: Path) -> _Stamp:
    try:
        status = path.stat()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    return _Stamp(str(path.resolve()), status.st_size, status.st_mtime_ns)


def _find(stamp: _Stamp) -> Path | None:
    """An earlier conversion of the very same file, which is then not hashed again."""
    for note in paths.models_dir().glob(f"*/{_NOTE}"):
        try:
            entry = json.loads(note.read_text())
            found = _Stamp(entry["path"], entry["size"], entry["mtime_ns"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if found == stamp and entry.get("format") == _FORMAT:
            return note.parent
    return None


def _write(
    path: Path,
    folder: Path,
    stamp: _Stamp,
    digest: str,
    generation: Mapping[str, object],
    progress: paths.Progress | None,
) -> None:
    # Imported here, since a server whose model is already converted never needs it.
    from .gguf_tokenizer import build_tokenizer, end_ids

    with GgufFile(path) as file:
        Metadata(file)
        file.check()
        eos = end_ids(file)
        config = build_config(file, eos)
        tokenizer, tokenizer_config = build_tokenizer(file)
        _write_weights(file, folder, progress)
    _dump(folder / "config.json", config)
    _dump(folder / "generation_config.json", {"eos_token_id": list(eos), **generation})
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    _dump(folder / "tokenizer_config.json", tokenizer_config)
    note = {"path": stamp.path, "size": stamp.size, "mtime_ns": stamp.mtime_ns}
    _dump(folder / _NOTE, {**note, "sha256": digest, "format": _FORMAT})


def _dump(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_weights(file: GgufFile, folder: Path, progress: paths.Progress | None) -> None:
    shards = tuple(_shards(file))
    vectors = vector_dtype(file)
    total = sum(file.tensors[name].nbytes for names in shards for name in names)
    index: dict[str, str] = {}
    done = 0
    for number, names in enumerate(shards, start=1):
        shard: dict[str, Array] = {}
        for name in names:
            shard |= _convert(file, name, vectors)
            done += file.tensors[name].nbytes
            if progress is not None:
                progress(done, total, f"converting {file.path.name}")
        shard_name = _shard_name(number, len(shards))
        _save(folder / shard_name, shard)
        index |= dict.fromkeys(shard, shard_name)
    if len(shards) > 1:
        size = {"total_size": total}
        _dump(folder / "model.safetensors.index.json", {"metadata": size, "weight_map": index})


def _shard_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"


def _shards(file: GgufFile) -> Iterator[list[str]]:
    """Tensor names in groups of at most _SHARD_BYTES (or one tensor)."""
    names: list[str] = []
    size = 0
    for name in weight_names(file):
        nbytes = file.tensors[name].nbytes
        if names and size + nbytes > _SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += nbytes
    yield names


def _convert(file: GgufFile, name: str, vectors: str) -> dict[str, Array]:
    arrays = convert_tensor(file, name, permuted_heads=_permuted_heads(file, name))
    if len(file.tensors[name].shape) > 1:
        return arrays
    return {key: _cast(array, vectors) for key, array in arrays.items()}


def _permuted_heads(file: GgufFile, name: str) -> int | None:
    metadata = Metadata(file)
    if metadata.arch != "llama":
        return None
    heads, kv_heads = head_counts(metadata)
    projection = module_path(name)[0].rpartition(".")[2]
    return {"q_proj": heads, "k_proj": kv_heads}.get(projection)


def vector_dtype(file: GgufFile) -> str:
    """The dtype of norms and biases, which GGUF keeps in float32.

    They follow matrices of 16-bit floats, since one float32 norm makes every activation after it
    float32, unless the narrower type would lose more than its own rounding. Beside quantized
    matrices they stay as they are: with halves every activation would be a half, which a CPU
    computes twenty times slower (on a GPU they are narrowed at load).
    """
    infos = [file.tensors[name] for name in weight_names(file)]
    matrices = {info.type for info in infos if len(info.shape) > 1}
    vectors = [
        file.blocks(info.name).view("<f4")
        for info in infos
        if len(info.shape) == 1 and info.type == "F32"
    ]
    if matrices <= {"BF16"}:
        exact = all(not (values.view("<u4") & 0xFFFF).any() for values in vectors)
        return "BF16" if exact else "F32"
    if matrices <= {"F16"} and all(_fits_half(values) for values in vectors):
        return "F16"
    return "F32"


def _fits_half(values: npt.NDArray[np.float32]) -> bool:
    with np.errstate(over="ignore"):
        half = values.astype(np.float16).astype(np.float32)
    return bool(np.all(np.abs(half - values) <= np.abs(values) * 2.0**-11))


def _cast(array: Array, dtype: str) -> Array:
    if array.dtype != "F32" or dtype == "F32":
        return array
    if dtype == "F16":
        return Array(array.data.astype("<f2"), dtype)
    return Array((array.data.view("<u4") >> 16).astype("<u2"), dtype)


def _save(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write a safetensors file.

    By hand, since the library's numpy front knows no bfloat16 and the entry below it takes another
    type in each release that pyproject.toml allows.
    """
    header: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for key, array in arrays.items():
        start, end = end, end + array.data.nbytes
        header[key] = {
            "dtype": array.dtype,
            "shape": array.data.shape,
            "data_offsets": (start, end),
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            file.write(np.ascontiguousarray(array.data).data)
