"""The adapter folders that clients may mount, and how a name from the network becomes one of them.

Pure functions over the file system, on any thread that may block. A name counts only if the folder
that it leads to, links followed, lies in a directory that the operator offers. Whatever leads
elsewhere is answered as if it did not exist, so that nobody learns what does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ..adapters import AdapterDescription, inspect_adapter
from ..errors import AdapterError
from .paths import adapters_dir

CONFIG = "adapter_config.json"
MAX_OFFERED = 256
"""Adapters that are listed at most."""
MAX_LOOKED_AT = 10_000
"""Folders that a listing looks into at most, however many the operator's directories hold."""
DEPTH = 2
"""Levels of folders below an offered directory that are listed: ``owner/name`` is found."""


@dataclass(frozen=True, slots=True)
class OfferedAdapter:
    """An adapter folder by the name that mounts it."""

    name: str
    folder: Path


def default_directories(mounted: Sequence[Path]) -> tuple[Path, ...]:
    """What is offered if the operator says nothing: what is mounted, and the cache's own folder."""
    return (*mounted, adapters_dir())


def offered_folder(name: str, directories: Sequence[Path]) -> Path:
    """The folder that a client named, relative to an offered directory or in full.

    An offered directory may be called by its own name. The first directory with such a folder wins.

    Raises:
        AdapterError: there is none, for whatever reason.
    """
    for directory in directories:
        root = _real(directory)
        if root is None:
            continue
        for candidate in _candidates(name, directory, root):
            folder = _real(candidate)
            if folder is not None and folder.is_relative_to(root) and folder.is_dir():
                return folder
    raise AdapterError(
        f"path: this server offers no adapter folder {name[:256]!r}; "
        "GET /v1/adapters/available lists those that it does",
        param="path",
    )


def offered_adapters(directories: Sequence[Path]) -> tuple[OfferedAdapter, ...]:
    """Adapter folders in the offered directories, each once, in the order of their names."""
    found: dict[str, OfferedAdapter] = {}
    folders: set[Path] = set()
    for name, folder in _walk(directories):
        if len(found) == MAX_OFFERED:
            break
        if folder not in folders and (folder / CONFIG).is_file():
            folders.add(folder)
            found.setdefault(name, OfferedAdapter(name, folder))
    return tuple(sorted(found.values(), key=lambda offered: offered.name))


def describe(folder: Path) -> AdapterDescription:
    """What is in an adapter folder, read again only if it changed. Raises AdapterError."""
    try:
        with os.scandir(folder) as entries:
            files = ((entry.name, entry.stat()) for entry in entries)
            stamp = tuple(sorted((name, stat.st_mtime_ns, stat.st_size) for name, stat in files))
    except OSError as error:
        raise AdapterError(f"{folder} cannot be read: {error.strerror}") from error
    return _describe(folder, stamp)


@lru_cache(maxsize=MAX_OFFERED)
def _describe(folder: Path, stamp: tuple[tuple[str, int, int], ...]) -> AdapterDescription:
    # The weights are hashed whole, which takes seconds for large ones.
    return inspect_adapter(folder)


def _candidates(name: str, directory: Path, root: Path) -> Iterator[Path]:
    if name in {directory.name, root.name}:
        yield root
    if name:
        yield root / name


def _real(path: Path) -> Path | None:
    """The path without links; None if there is nothing, or nothing that may be looked at."""
    try:
        return path.expanduser().resolve(strict=True)
    except (OSError, RuntimeError, ValueError):
        return None


def _walk(directories: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """Names and folders: the directories themselves, then what is below, level by level."""
    roots = [(directory, root) for directory in directories if (root := _real(directory))]
    level = [(directory.name or root.name, root, "") for directory, root in roots]
    seen = 0
    for _ in range(DEPTH + 1):
        below: list[tuple[str, Path, str]] = []
        for name, folder, inside in level:
            seen += 1
            if seen > MAX_LOOKED_AT:
                return
            yield name, folder
            below.extend(
                (f"{inside}{child}", folder / child, f"{inside}{child}/")
                for child in _children(folder)
            )
        level = below


def _children(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            # Links are not followed: they lead out, in circles, or to what is listed anyway.
            folders = (entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
            return sorted(name for name in folders if not name.startswith("."))
    except OSError:
        return []
