"""Finds the model that a command was told to use, showing what is downloaded meanwhile.

Runs on the main thread before any event loop: a fast BLAS must be in place before MLX is imported,
and turning a GGUF file into a directory imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .progress import ProgressBar

if TYPE_CHECKING:
    from ...runtime.store.resolve import ResolvedModel


def find_model(query: str | None, *, offline: bool = False) -> ResolvedModel:
    """The model that ``query`` names, downloaded and converted if need be. Raises ModelError."""
    prepare_device()
    from ...runtime.store.resolve import resolve

    with ProgressBar() as bar:
        return resolve(query, progress=bar, offline=offline)


def prepare_device() -> None:
    """Whatever must be in place before anything imports MLX."""
    from ...runtime.engine.blas import ensure_fast_blas

    ensure_fast_blas()
