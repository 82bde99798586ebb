"""Downloads a model from the Hugging Face hub into the hub's own cache.

A thin layer over huggingface_hub, which owns resuming, hashes and locks. Small files come first,
so that a download stopped midway lacks weights and is seen to be partial. No Python is fetched.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from ..errors import ModelError
from .local import hub_dir
from .paths import Progress

_SMALL = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_WEIGHTS = ("model*.safetensors",)
_BYTES_BAR = "huggingface_hub.snapshot_download"


def offline_by_environment() -> bool:
    """Whether the user switched the hub off (``HF_HUB_OFFLINE``)."""
    return os.environ.get("HF_HUB_OFFLINE", "").strip().lower() in ("1", "true", "yes", "on")


def download(repo_id: str, progress: Progress | None) -> Path:
    """Fetch a model's files; returns the snapshot folder.

    Raises ModelError: no such model, no access, no network, or no room. What was fetched stays
    for the next try.
    """
    from huggingface_hub import snapshot_download

    options: dict[str, Any] = {"cache_dir": hub_dir(), "endpoint": os.environ.get("HF_ENDPOINT")}
    if progress is not None:
        options["tqdm_class"] = _bar_class(progress, f"downloading {repo_id}")
    try:
        snapshot_download(repo_id, allow_patterns=list(_SMALL), **options)
        return Path(snapshot_download(repo_id, allow_patterns=[*_SMALL, *_WEIGHTS], **options))
    except Exception as error:  # the hub's client raises its HTTP library's own errors too
        raise ModelError(_explain(repo_id, error)) from error


def _explain(repo_id: str, error: Exception) -> str:
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    match error:
        case GatedRepoError():
            return f"{repo_id} needs its licence accepted on the hub, and 'hf auth login'"
        case RepositoryNotFoundError():
            return f"{repo_id} is not on the hub (or is private: 'hf auth login')"
        case LocalEntryNotFoundError():
            return (
                f"{repo_id} is not on this machine and the hub cannot be reached; name a folder "
                "or a .gguf file instead, or use 'starter' (--offline skips the attempt)"
            )
        case _:
            return f"cannot download {repo_id}: {str(error) or type(error).__name__}"


def _bar_class(progress: Progress, what: str) -> type[Any]:
    """A silent progress bar that passes the bytes of the whole download on."""
    from huggingface_hub import utils

    base: Any = getattr(utils, "tqdm")  # noqa: B009  (the hub exports it, its stubs do not)

    class Bar(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts = options.get("name") == _BYTES_BAR
            # A bar that is disabled (as it is without a terminal) would not count either.
            super().__init__(*args, **{**options, "file": _Sink(), "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            if self._counts:
                progress(int(self.n), int(self.total) if self.total else None, what)
            return shown

    return Bar


class _Sink(io.TextIOBase):
    """Where bars that nobody sees are drawn."""

    def write(self, text: str) -> int:
        return len(text)
