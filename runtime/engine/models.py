"""Loading a model directory with mlx-lm and saying what kind of state its rows have.

Owns nothing after :func:`load_checkpoint` returns. Runs on the device thread, where the weights
must be made. Knows no rows, no tokenizer and no downloads: the path is a local directory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn import Module
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import _get_classes, dequantize_model, get_total_parameters, load_model

from ..errors import ModelError
from ..kvschemes import PLAIN_KV, KVScheme
from ..settings import Dtype
from .namespace import namespace_digest
from .nesting import flatten

EXPANDED_SHARE = 0.6
"""Weights may be expanded to float32 up to this share of the memory that is free."""

_EXPANDING_STREAMS = 4

_WINDOW_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
    "n_ctx",
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded model and what its files say about it. ``dtype`` is the choice as carried out."""

    model: Module
    eos_ids: frozenset[int]
    context_window: int | None
    namespace: str
    dtype: str


@dataclass(frozen=True, slots=True)
class StateKind:
    """How the state of one row may be cut.

    ``trim_window`` is that of :class:`~mlx_troupe.runtime.model_info.ModelInfo`; ``obstacle`` names
    what forbids batches, or is empty.
    """

    trim_window: int | None
    obstacle: str = ""


def load_checkpoint(
    path: Path, dtype: Dtype, kv: KVScheme = PLAIN_KV, *, lazy: bool = False
) -> Checkpoint:
    """Load a directory. Raises ModelError for whatever keeps it from being run.

    ``kv`` changes nothing but the namespace: states of two schemes are not interchangeable.
    ``lazy``: the weights are described by their files' headers and not read.
    """
    config = read_config(path)
    check_family(path, config)
    check_weight_files(path)
    try:
        model, _ = load_model(path, lazy=True, trust_remote_code=False)
        chosen = _expand(model, dtype)
        if not lazy:
            mx.eval(model.parameters())
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{path} cannot be loaded: {error}") from error
    return Checkpoint(
        model=model,
        eos_ids=_eos_ids(path, config),
        context_window=_context_window(config),
        namespace=namespace_digest(path, chosen, kv),
        dtype=chosen,
    )


def read_config(path: Path) -> dict[str, Any]:
    """The directory's config.json. Raises ModelError when it is missing, damaged or not ours."""
    if not path.is_dir():
        raise ModelError(f"{path} is not a directory", code="model_not_found")
    file = path / "config.json"
    if not file.is_file():
        raise ModelError(f"{path} holds no config.json", code="model_not_found")
    config = _read_json(file)
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(f"{file} names no model_type")
    if config.get("model_file") is not None:
        raise ModelError(
            f"{path} asks to run its own code ({config['model_file']!r}), which is never done"
        )
    return config


def check_family(path: Path, config: dict[str, Any]) -> None:
    """Raises ModelError for a model_type that mlx-lm does not have, or cannot import here."""
    family = config["model_type"]
    try:
        _get_classes(config)
    except (Exception, SystemExit) as error:
        # mlx-lm's olmo.py ends the process where a package of its own is not installed.
        why = "needs a package that is not installed" if type(error) is SystemExit else str(error)
        raise ModelError(
            f"{path}: mlx-lm {version('mlx-lm')} cannot run model_type {family!r}: {why}",
            code="model_type_unsupported",
        ) from error


def check_weight_files(path: Path) -> None:
    """Raises ModelError unless every shard that the index names is there."""
    if not any(path.glob("model*.safetensors")):
        raise ModelError(f"{path} holds no model*.safetensors", code="model_not_found")
    file = path / "model.safetensors.index.json"
    if not file.exists():
        return
    index = _read_json(file)
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict) or not shards:
        raise ModelError(f"the weight index {file} names no weights")
    missing = sorted({str(s) for s in shards.values() if not (path / str(s)).is_file()})
    if missing:
        raise ModelError(f"the weight index {file} names missing files: {', '.join(missing)}")


def state_kind(model: Module) -> StateKind:
    """Read the layout of a row's state off the caches that mlx-lm makes for the model."""
    caches = flatten(make_prompt_cache(model))
    strange = sorted({type(c).__name__ for c in caches if not _has_layout(c)})
    if strange:
        obstacle = f"no batch layout for {', '.join(strange)}"
        return StateKind(0, obstacle)
    if any(type(c) is ArraysCache for c in caches):
        return StateKind(0)
    windows = [c.max_size for c in caches if type(c) is RotatingKVCache]
    if windows:
        return StateKind(min(windows) - 1)
    return StateKind(None)


def device_label(dtype: str) -> str:
    """Device, MLX build and weights in one line, for people."""
    info = mx.device_info()
    kind = "GPU" if mx.default_device() == mx.gpu else "CPU"
    return f"{kind} {info.get('device_name', '?')}, MLX {version('mlx')}, weights {dtype}"


def available_memory() -> int:
    """Bytes of memory that new arrays may take without swapping, as the system tells."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _has_layout(cache: Any) -> bool:
    if type(cache) is RotatingKVCache:
        return bool(cache.keep == 0)
    return type(cache) in (KVCache, ArraysCache)


def _expand(model: Module, dtype: Dtype) -> str:
    match dtype:
        case "keep":
            return "as stored"
        case "float32" | "bfloat16":
            _expand_layers(model, getattr(mx, dtype))
            _cast(dequantize_model(model), getattr(mx, dtype))
            return dtype
        case "auto":
            roomy = _num_parameters(model) * 4 < EXPANDED_SHARE * available_memory()
            on_cpu = mx.default_device() != mx.gpu
            if not on_cpu:
                _narrow_vectors(model)
            return _expand(model, "float32" if on_cpu and roomy else "keep")


def _narrow_vectors(model: Module) -> None:
    """On a GPU: float32 norms beside 16-bit scales would make activations and KV float32."""
    weights = dict(tree_flatten(model.parameters()))
    scales = {w.dtype for name, w in weights.items() if name.endswith(".scales")}
    if scales <= {mx.float16, mx.bfloat16} and len(scales) == 1:
        _cast(model, scales.pop())


def _expand_layers(model: Any, dtype: mx.Dtype) -> None:
    """On a CPU: expand the layers on a stream a core, since one stream uses one core."""
    if mx.default_device() == mx.gpu or dtype != mx.float32:
        return
    streams = [mx.new_stream(mx.cpu) for _ in range(min(_EXPANDING_STREAMS, os.cpu_count() or 1))]
    layers = [x for x in getattr(model, "layers", ()) if isinstance(x, Module)]
    for number, layer in enumerate(layers):
        with mx.stream(streams[number % len(streams)]):
            _cast(dequantize_model(layer), dtype)


def _num_parameters(model: Any) -> int:
    count: Any = get_total_parameters
    return int(count(model))


def _cast(model: Module, dtype: mx.Dtype) -> None:
    # Some families keep a few weights in float32 whatever the rest is; widening all is harmless.
    narrow = dtype != mx.float32
    may_cast = getattr(model, "cast_predicate", None) if narrow else None

    def cast(name: str, weight: mx.array) -> mx.array:
        if not mx.issubdtype(weight.dtype, mx.floating):
            return weight
        return weight if may_cast is not None and not may_cast(name) else weight.astype(dtype)

    model.update(tree_map_with_path(cast, model.parameters()))


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


def _ids(value: object) -> set[int]:
    items = value if isinstance(value, list) else [value]
    return {i for i in items if isinstance(i, int) and not isinstance(i, bool)}


def _eos_ids(path: Path, config: Mapping[str, Any]) -> frozenset[int]:
    found = _ids(config.get("eos_token_id"))
    text = config.get("text_config")
    if not found and isinstance(text, dict):
        found = _ids(text.get("eos_token_id"))
    file = path / "generation_config.json"
    if file.is_file():
        generation = _read_json(file)
        if isinstance(generation, dict):
            found |= _ids(generation.get("eos_token_id"))
    return frozenset(found)


def _context_window(config: Mapping[str, Any]) -> int | None:
    text = config.get("text_config")
    for source in (config, text if isinstance(text, dict) else {}):
        for key in _WINDOW_KEYS:
            value = source.get(key)
            if isinstance(value, int) and value > 0:
                return value
    return None
