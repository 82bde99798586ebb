"""Compiling a request's grammar off the event loop.

Runs in the request's own task, which waits for a thread. Owns one compiler for each model that was
loaded (a reload gives an equal one) and the bound on threads that compile.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import trio

from mlx_troupe.runtime.device import ModelInfo
from mlx_troupe.runtime.grammars import Grammar
from mlx_troupe.runtime.text.matching import (
    CannotCompile,
    GrammarCompiler,
    Reasoning,
    TokenMatcher,
)
from mlx_troupe.runtime.text.tokenizer import Tokenizer

COMPILING = 2
"""Grammars compiled at a time; more requests wait, each for its own."""
COMPILE_SECONDS = 20.0
"""An ordinary schema takes milliseconds, one of a megabyte seconds."""


@dataclass(slots=True)
class GrammarTools:
    """What turns grammars into matchers; shared by all requests of a model."""

    tokenizer: Tokenizer
    threads: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(COMPILING))
    _compilers: dict[tuple[int, frozenset[int]], GrammarCompiler] = field(default_factory=dict)

    async def match(
        self, grammar: Grammar, model: ModelInfo, reasoning: Reasoning | None
    ) -> TokenMatcher:
        """A matcher at the beginning of an answer.

        Raises:
            InvalidRequest: the grammar holds a schema that is none.
            CannotCompile: it is beyond the engine, or takes too long.
        """
        key = (model.vocab_size, model.eos_ids)
        compiler = self._compilers.get(key)
        if compiler is None:
            compiler = self._compilers[key] = GrammarCompiler(self.tokenizer, *key)
        with trio.move_on_after(COMPILE_SECONDS):
            # An abandoned thread keeps its place among the limiter's until it is done.
            return await trio.to_thread.run_sync(
                compiler.compile, grammar, reasoning, abandon_on_cancel=True, limiter=self.threads
            )
        raise CannotCompile(f"it takes longer than {COMPILE_SECONDS:.0f} s to prepare")
