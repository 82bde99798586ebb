"""Finds the model that a command was told to use, showing what is downloaded meanwhile.

Runs on the main thread before any event loop. So does the first import of MLX: a fast BLAS must
stand in front of it, and MLX keeps Python objects for the thread that imports it, which ends the
process with an abort if that thread ends while the interpreter shuts down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .progress import ProgressBar

if TYPE_CHECKING:
    from ...runtime.store.resolve import ResolvedModel


def fetch_model(query: str | None, *, offline: bool = False) -> ResolvedModel:
    """The model that ``query`` names, downloaded and converted if need be. Raises ModelError."""
    from ...runtime.store.resolve import resolve

    with ProgressBar() as bar:
        return resolve(query, progress=bar, offline=offline)


def find_model(query: str | None, *, offline: bool = False) -> ResolvedModel:
    """As :func:`fetch_model`, with the engine imported too. Raises ModelError, ImportError."""
    from ...runtime.engine.blas import ensure_fast_blas

    ensure_fast_blas()
    found = fetch_model(query, offline=offline)
    import mlx_troupe.runtime.engine.executor  # noqa: F401  (on this thread, see above)

    return found
