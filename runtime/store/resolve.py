"""From what a person calls a model to a folder that is known to be whole.

Runs before anything is loaded, never on a request. The rules, first match wins:

1. nothing named: ``$MLX_TROUPE_MODEL``; else the only runnable model that was downloaded or
   converted; else, of several, the one used last; else the starter;
2. ``starter``;
3. a folder that holds config.json, or a ``.gguf`` file;
4. ``org/name``: the hub's cache, else a download;
5. any part of one downloaded model's name.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelError
from .complete import missing_parts
from .gguf import convert_gguf
from .hub import download, offline_by_environment
from .local import (
    LocalModel,
    hub_model,
    hub_update_pending,
    last_use,
    list_models,
    note_use,
    runnable,
)
from .paths import Progress
from .starter import STARTER_NAME, ensure_starter, starter_path

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A whole model: its folder, the name that clients see, and in words where it came from."""

    path: Path
    name: str
    source: str


def resolve(
    query: str | None, *, progress: Progress | None = None, offline: bool = False
) -> ResolvedModel:
    """Find, and where allowed fetch, the model that ``query`` means (see the module's rules).

    Args:
        query: what the person typed; None or "" means that no model was named.
        progress: told how far downloads and conversions are.
        offline: never touch the network (``HF_HUB_OFFLINE`` does the same for the hub).

    Raises:
        ModelError: nothing, or more than one thing, is meant; files are missing; or the network
            is needed and absent. The message names the model, the files or the candidates.
    """
    named = query or os.environ.get("MLX_TROUPE_MODEL") or ""
    found = _named(named, progress, offline) if named else _unnamed(progress, offline)
    note_use(found.path)
    return found


def _unnamed(progress: Progress | None, offline: bool) -> ResolvedModel:
    models = [model for model in list_models() if runnable(model) and not _is_starter(model)]
    if not models:
        return _starter(progress, offline)
    latest = max(models, key=last_use)
    if len(models) == 1:
        return ResolvedModel(latest.path, latest.name, "the only downloaded model")
    others = ", ".join(model.name for model in models if model is not latest)
    source = f"the most recently used of {len(models)} downloaded models (others: {others})"
    return ResolvedModel(latest.path, latest.name, source)


def _is_starter(model: LocalModel) -> bool:
    return model.path == starter_path()


def _starter(progress: Progress | None, offline: bool) -> ResolvedModel:
    path = ensure_starter(progress=progress, offline=offline)
    return ResolvedModel(path, STARTER_NAME, "the starter model")


def _named(query: str, progress: Progress | None, offline: bool) -> ResolvedModel:
    if query.lower() in ("starter", STARTER_NAME.lower()):
        return _starter(progress, offline)
    path = Path(query).expanduser()
    if path.suffix.lower() == ".gguf":
        return ResolvedModel(convert_gguf(path, progress=progress), path.stem, f"converted {path}")
    if path.is_dir():
        return _folder(path)
    if path.exists():
        raise ModelError(f"{path} is neither a model folder nor a .gguf file")
    if _HUB_ID.fullmatch(query):
        return _from_hub(query, progress, offline or offline_by_environment())
    if query.startswith(("/", ".", "~")):
        raise ModelError(f"there is no folder {path}")
    return _matching(query)


def _folder(path: Path) -> ResolvedModel:
    missing = missing_parts(path)
    if missing:
        raise ModelError(f"the model in {path} is not whole; missing: {', '.join(missing)}")
    folder = path.resolve()
    return ResolvedModel(folder, folder.name, f"folder {folder}")


def _from_hub(repo_id: str, progress: Progress | None, offline: bool) -> ResolvedModel:
    cached = hub_model(repo_id)
    whole = cached is not None and cached.complete
    if cached is not None and whole and (offline or not hub_update_pending(repo_id)):
        return ResolvedModel(cached.path, repo_id, "the hub cache")
    if offline:
        lacks = f"; missing: {', '.join(cached.missing)}" if cached else ""
        raise ModelError(
            f"{repo_id} is not whole on this machine{lacks}; without --offline (or "
            "HF_HUB_OFFLINE) it would be downloaded"
        )
    try:
        path = download(repo_id, progress)
    except ModelError as error:
        if cached is None or not whole:
            raise
        return ResolvedModel(cached.path, repo_id, f"an older snapshot ({error})")
    missing = missing_parts(path)
    if missing:
        raise ModelError(f"{repo_id} cannot be run; it lacks: {', '.join(missing)}")
    return ResolvedModel(path, repo_id, "downloaded from the hub")


def _matching(query: str) -> ResolvedModel:
    models = list_models()
    exact = [model for model in models if model.name.lower() == query.lower()]
    matches = exact or [model for model in models if query.lower() in model.name.lower()]
    if not matches:
        known = ", ".join(model.name for model in models) or "none"
        raise ModelError(
            f"no downloaded model matches {query!r} (downloaded: {known}); a hub id reads "
            "org/name, and 'starter' is always there"
        )
    if len(matches) > 1:
        raise ModelError(
            f"{query!r} matches {len(matches)} models: "
            + ", ".join(f"{model.name} ({model.path})" for model in matches)
        )
    [model] = matches
    if not model.complete:
        raise ModelError(f"{model.name} is not whole; missing: {', '.join(model.missing)}")
    return ResolvedModel(model.path, model.name, "downloaded before")
