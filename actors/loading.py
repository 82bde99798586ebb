"""The tokenizer on its way in, and what the device asks of it.

Made by the front door. Loaded on a worker thread beside the weights; afterwards any thread may ask.
"""

from __future__ import annotations

from collections.abc import Callable

from mlx_troupe.runtime.settings import Settings
from mlx_troupe.runtime.text.scores import newline_ids
from mlx_troupe.runtime.text.tokenizer import Tokenizer


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
