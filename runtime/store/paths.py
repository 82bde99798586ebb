"""Where mlx-troupe keeps files on this machine, and how a folder appears there whole or not at all.

Owns the cache folder's layout: ``models/`` (MLX directories), ``adapters/`` (LoRA folders),
``downloads/`` (partial files), ``locks/`` and ``ptx/`` (compiled CUDA kernels). Any thread may
call; processes exclude each other by file locks, which the system releases when their owner dies.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from filelock import FileLock

from ..errors import ModelError


class Progress(Protocol):
    """Told how far a long job is: ``done`` of ``total`` bytes (None if unknown) of ``what``."""

    def __call__(self, done: int, total: int | None, what: str) -> None:
        """May be called often, from the thread that does the job."""
        ...


def cache_dir() -> Path:
    """The cache folder: ``$MLX_TROUPE_CACHE`` or ``~/.cache/mlx-troupe``, made if missing."""
    named = os.environ.get("MLX_TROUPE_CACHE")
    return _private(Path(named).expanduser() if named else Path.home() / ".cache" / "mlx-troupe")


def models_dir() -> Path:
    """Folder of converted models."""
    return _private(cache_dir() / "models")


def adapters_dir() -> Path:
    """Folder of adapters that clients of a server may mount."""
    return _private(cache_dir() / "adapters")


def downloads_dir() -> Path:
    """Folder of files on their way in; what lies there is partial and may be deleted."""
    return _private(cache_dir() / "downloads")


def ptx_dir() -> Path:
    """Folder of kernels that MLX compiled for CUDA."""
    return _private(cache_dir() / "ptx")


def _private(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"cannot make the cache folder {folder}: {error}") from error
    return folder


@contextmanager
def exclusive(name: str) -> Iterator[None]:
    """Hold the lock ``name`` against all other processes and threads that use this cache.

    Waits without a limit: whoever holds it is alive, since the system frees a dead one's lock.
    """
    with FileLock(_private(cache_dir() / "locks") / f"{name}.lock"):
        yield


def build_folder(target: Path, fill: Callable[[Path], None]) -> Path:
    """Fill a temporary folder beside ``target`` and rename it to ``target``; returns ``target``.

    Nothing is left behind when ``fill`` raises. A dangling link at ``target`` is replaced; a file
    there is a ModelError. The caller holds the lock of ``target``.
    """
    if target.is_symlink() and not target.exists():
        target.unlink()
    if target.exists() and not target.is_dir():
        raise ModelError(f"{target} is a file where a model folder is to be made")
    _private(target.parent)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        fill(temporary)
        if target.is_dir():
            shutil.rmtree(target)
        temporary.rename(target)
    except OSError as error:
        raise ModelError(f"cannot write {target}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target
