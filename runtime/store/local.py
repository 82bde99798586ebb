"""The models that are on this machine: in the hub's cache and in our own.

Reads folders and one small file of our own (which model was used when); never the network, and
never changes the hub's cache. Any thread may call.
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import paths
from .complete import missing_parts, read_config
from .gguf import is_current, source_name
from .starter import STARTER_NAME, starter_path

_UNFINISHED = "tokenizer_config.json (download unfinished)"
# Types that mlx-lm serves with another type's file.
_ALIASES = {"mistral": "llama", "phi-msft": "phixtral", "falcon_mamba": "mamba"}


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on disk. ``missing`` names what a partial one lacks; ``nbytes`` is what is there."""

    name: str
    path: Path
    nbytes: int
    complete: bool
    missing: tuple[str, ...]


def list_models() -> tuple[LocalModel, ...]:
    """Every model in the hub's cache and ours, by name; a hub repository is listed once."""
    found = [*_hub_models(), *_own_models()]
    return tuple(sorted(found, key=lambda model: model.name.lower()))


def hub_dir() -> Path:
    """The hub cache that Hugging Face's own tools use."""
    if named := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(named).expanduser()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = Path(os.environ.get("HF_HOME") or cache / "huggingface")
    return home.expanduser() / "hub"


def hub_model(repo_id: str) -> LocalModel | None:
    """The best snapshot of a hub repository in the cache, whole or not; None if there is none."""
    return _best_snapshot(_repository(repo_id), repo_id)


def hub_update_pending(repo_id: str) -> bool:
    """Whether the cache holds a newer snapshot of ``refs/main`` that is not whole."""
    folder = _repository(repo_id)
    main = folder / "snapshots" / (_main_revision(folder) or "none")
    return main.is_dir() and not _describe(repo_id, main, folder).complete


def runnable(model: LocalModel) -> bool:
    """Whether the model is whole and of a type that mlx-lm has a file for."""
    config = read_config(model.path) if model.complete else None
    spec = importlib.util.find_spec("mlx_lm")
    if config is None or spec is None or not spec.submodule_search_locations:
        return False
    kind = str(config.get("model_type", ""))
    files = Path(spec.submodule_search_locations[0]) / "models"
    return kind.isidentifier() and (files / f"{_ALIASES.get(kind, kind)}.py").is_file()


def note_use(path: Path) -> None:
    """Remember that a model was used now; a note that cannot be written is no error."""
    kept = {key: used for key, used in _uses().items() if Path(key).exists()}
    uses = kept | {str(path): time.time()}
    try:
        handle, name = tempfile.mkstemp(dir=paths.cache_dir(), prefix=".recent.")
        with os.fdopen(handle, "w") as file:
            json.dump(uses, file)
        Path(name).replace(_uses_file())
    except OSError:
        return


def last_use(model: LocalModel) -> float:
    """When the model was last used, else when it arrived, in seconds since the epoch."""
    return _uses().get(str(model.path)) or model.path.stat().st_mtime


def _uses_file() -> Path:
    return paths.cache_dir() / "recent.json"


def _uses() -> dict[str, float]:
    try:
        value = json.loads(_uses_file().read_text())
        return {str(key): float(used) for key, used in value.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _own_models() -> Iterator[LocalModel]:
    for folder in sorted(paths.models_dir().iterdir()):
        if folder.is_dir() and not folder.name.startswith(".") and is_current(folder):
            yield _describe(_own_name(folder), folder)


def _own_name(folder: Path) -> str:
    return STARTER_NAME if folder == starter_path() else source_name(folder)


def _repository(repo_id: str) -> Path:
    return hub_dir() / f"models--{repo_id.replace('/', '--')}"


def _hub_models() -> Iterator[LocalModel]:
    for folder in sorted(hub_dir().glob("models--*--*")):
        repo_id = folder.name.removeprefix("models--").replace("--", "/", 1)
        model = _best_snapshot(folder, repo_id)
        if model is not None and _is_language_model(model.path):
            yield model


def _is_language_model(snapshot: Path) -> bool:
    """Whether a snapshot is of a kind that is listed at all; links count even when they dangle."""
    names = {path.name for path in snapshot.iterdir()}
    return "config.json" in names or any(name.endswith(".safetensors") for name in names)


def _best_snapshot(folder: Path, repo_id: str) -> LocalModel | None:
    """The snapshot of ``refs/main`` if it is whole, else the newest whole one, else the first."""
    models = [_describe(repo_id, snapshot, folder) for snapshot in _snapshots(folder)]
    return next((model for model in models if model.complete), models[0] if models else None)


def _snapshots(folder: Path) -> list[Path]:
    """All snapshots, that of ``refs/main`` first and the others by age, newest first."""
    try:
        found = [path for path in (folder / "snapshots").iterdir() if path.is_dir()]
    except OSError:
        return []
    main = _main_revision(folder)
    return sorted(found, key=lambda path: (path.name != main, -path.stat().st_mtime))


def _main_revision(folder: Path) -> str:
    try:
        return (folder / "refs" / "main").read_text().strip()
    except OSError:
        return ""


def _describe(name: str, folder: Path, repository: Path | None = None) -> LocalModel:
    missing = missing_parts(folder)
    if not missing and repository is not None and _unfinished(repository, folder):
        missing = (_UNFINISHED,)
    return LocalModel(name, folder, _size(folder), not missing, missing)


def _unfinished(repository: Path, snapshot: Path) -> bool:
    """A download that stopped after weights and tokenizer, but before the chat template."""
    partial = any((repository / "blobs").glob("*.incomplete"))
    return partial and not (snapshot / "tokenizer_config.json").is_file()


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
