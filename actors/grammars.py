"""Compiling a request's grammar off the event loop.

Runs in the request's own task, which waits for a thread. Owns the compilers of the loaded model's
tokenizer and the bound on threads that compile.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import trio

from mlx_troupe.runtime.errors import Overloaded
from mlx_troupe.runtime.grammars import Grammar
from mlx_troupe.runtime.model_info import ModelInfo
from mlx_troupe.runtime.text.grammar_sources import CannotCompile, Reasoning
from mlx_troupe.runtime.text.matching import GrammarCompiler, TokenMatcher
from mlx_troupe.runtime.text.tokenizer import Tokenizer

COMPILING = 2
"""Grammars compiled at a time; more requests wait, each for its own."""
COMPILE_SECONDS = 20.0
"""An ordinary schema takes milliseconds, one of a megabyte seconds."""
WAIT_SECONDS = 60.0
"""For a thread: longer than both may be taken by monsters that were given up."""


@dataclass(slots=True)
class GrammarTools:
    """What turns grammars into matchers; shared by all requests of a model.

    The compiler that almost every model needs is made by :meth:`prepare`; a model with fewer logits
    than its tokenizer has ids, or with end tokens that this does not know, has one of its own.
    """

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
            Overloaded: others' grammars have taken all threads for too long.
        """
        size = min(self.tokenizer.vocab_size, model.vocab_size)
        compiler = self._compiler(size, model.eos_ids | self.tokenizer.eos_ids)
        clock, begun = trio.lowlevel.current_trio_token(), False

        def compile_by_the_clock() -> TokenMatcher:
            # It runs from here on: a grammar must not fail for the time that others' took.
            clock.run_sync_soon(begin)
            return compiler.compile(grammar, reasoning)

        def begin() -> None:
            nonlocal begun
            begun, scope.deadline = True, trio.current_time() + COMPILE_SECONDS

        with trio.move_on_after(WAIT_SECONDS) as scope:
            # An abandoned thread keeps its place among the limiter's until it is done.
            return await trio.to_thread.run_sync(
                compile_by_the_clock, abandon_on_cancel=True, limiter=self.threads
            )
        if begun:
            raise CannotCompile(f"it takes longer than {COMPILE_SECONDS:.0f} s to prepare")
        raise Overloaded("other requests' grammars are being prepared", retry_after=COMPILE_SECONDS)

    def prepare(self) -> None:
        """Make the usual compiler while the model loads, on the thread that loads the tokenizer."""
        self._compiler(self.tokenizer.vocab_size, self.tokenizer.eos_ids).prepare()

    def _compiler(self, size: int, eos_ids: frozenset[int]) -> GrammarCompiler:
        compiler = self._compilers.get((size, eos_ids))
        if compiler is None:
            compiler = GrammarCompiler(self.tokenizer, size, eos_ids)
            self._compilers[size, eos_ids] = compiler
        return compiler
