"""The engine and the tokenizer on their way in, and what the device asks of the tokenizer.

Made by the front door. Loaded on a worker thread beside the weights; afterwards any thread may ask.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from mlx_troupe.runtime.budgets import cache_bytes
from mlx_troupe.runtime.defaults import SamplingDefaults
from mlx_troupe.runtime.device import Device
from mlx_troupe.runtime.engine.blas import ensure_fast_blas, set_ptx_cache
from mlx_troupe.runtime.errors import ModelError
from mlx_troupe.runtime.settings import Settings
from mlx_troupe.runtime.store.paths import ptx_dir
from mlx_troupe.runtime.text.prompts import PromptBuilder
from mlx_troupe.runtime.text.provenance import Provenance
from mlx_troupe.runtime.text.scores import newline_ids
from mlx_troupe.runtime.text.tokenizer import Tokenizer

from .grammars import GrammarTools
from .text_tools import TextTools


class TokenizerSource:
    """One tokenizer, given or to be loaded; without a loader it is the one beside the model."""

    def __init__(
        self, settings: Settings, given: Tokenizer | Callable[[], Tokenizer] | None
    ) -> None:
        self._settings = settings
        self._loader: Callable[[], Tokenizer] | None = None
        self.tokenizer: Tokenizer | None = None
        if given is None or callable(given):
            self._loader = given
        else:
            self.tokenizer = given

    def load(self) -> Tokenizer:
        """Load it; takes a while. Raises ModelError."""
        self.tokenizer = self._from_files() if self._loader is None else self._loader()
        return self.tokenizer

    def line_breaks(self) -> frozenset[int]:
        """The ids that a line break is written with; none before the tokenizer is there.

        No request is served before.
        """
        return frozenset() if self.tokenizer is None else newline_ids(self.tokenizer)

    def _from_files(self) -> Tokenizer:
        from mlx_troupe.runtime.engine.tokenizer import load_tokenizer

        return load_tokenizer(self._settings.model)


def load_text(load: Callable[[], Tokenizer]) -> tuple[Tokenizer, GrammarTools]:
    """A tokenizer and what grammars need of it; takes a while."""
    tokenizer = load()
    grammars = GrammarTools(tokenizer)
    grammars.prepare()
    return tokenizer, grammars


def text_tools(settings: Settings, tokenizer: Tokenizer, grammars: GrammarTools) -> TextTools:
    """What every request needs of the text side."""
    provenance = Provenance()
    builder = PromptBuilder(tokenizer, provenance)
    defaults = SamplingDefaults.load(settings)
    return TextTools(tokenizer, builder, provenance, defaults, grammars)


def import_engine() -> None:
    """Import MLX with a fast BLAS in front of it, on a thread that lasts.

    What its CUDA build compiles is kept for the next start.

    Later imports find MLX's own BLAS bound for good; and a thread that imported MLX and then ends
    can abort the process at its exit (``actors/threads.py``).
    """
    ensure_fast_blas()
    # Without a folder of ours MLX has one of its own.
    with suppress(ModelError):
        set_ptx_cache(ptx_dir())
    import mlx_troupe.runtime.engine.executor
    import mlx_troupe.runtime.engine.tokenizer  # noqa: F401


def mlx_device(settings: Settings, source: TokenizerSource) -> Device:
    """The device that the settings describe, not opened yet."""
    import_engine()
    from mlx_troupe.runtime.engine.executor import MLXDevice
    from mlx_troupe.runtime.engine.opening import Options

    options = Options(
        settings.model,
        name=settings.name,
        dtype=settings.dtype,
        batch=settings.batch,
        kv=settings.kv,
        replay=False if settings.exact else None,
        memory_budget=settings.memory_budget_bytes,
        snapshot_limit=cache_bytes(settings),
        # Under a limit every byte is reserved by a row, so nothing is left for such as may come.
        spare_slots=settings.kv_budget_bytes is None and settings.memory_budget_bytes is None,
        xtc_exempt=source.line_breaks,
    )
    return MLXDevice(options)
