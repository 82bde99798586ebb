"""Grammars made ready for one tokenizer, and a row's place in one.

Owns the grammar engine (llguidance) and the grammars compiled last. Compiling takes milliseconds
for an ordinary schema and a second for a monstrous one, without the interpreter's lock: it runs on
a worker thread, several at a time. A :class:`TokenMatcher` belongs to one row and moves with it to
the device's thread. Knows no request and no MLX.

The engine is shown the bytes that the detokenizer will spell, token by token, so what it allows is
what the client reads. It never asks the tokenizer anything afterwards: masks are made while the
device waits, and a prompt being encoded may hold the tokenizer for longer than a step takes.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING, Any

from ..grammars import ContextFreeGrammar, Grammar
from .grammar_sources import CannotCompile, Reasoning, first_line, source_of
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KEPT = 64
"""Compiled grammars that are remembered: programs send the same schema again and again."""
MAX_ITEMS = 10_000
"""Of a place in a schema: an object's optional properties make four each. The engine's own 2,000
stop at 500 of them; ten times as many make masks that take longer than a step."""
MAX_GRAMMAR_ITEMS = 2_000
"""Of a place in a grammar of the client's own. An ambiguous one has more with every token, and its
masks, for which the whole batch waits, take their square: a sixth of a second at this limit."""
_LIMITS = re.compile("items; max is|[Tt]oo many|fuel exhausted|TooComplex")


class MatchFailed(Exception):
    """A row's matcher gave up: a limit of the engine, or a token that it had not allowed.

    ``param`` names the request's field whose grammar goes beyond the limit; else None.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(eq=False, slots=True)
class TokenMatcher:
    """Follows one row's tokens through its grammar. One owner, one thread at a time.

    ``words`` is the length of its masks, in words of 32 tokens. ``param`` is the request's field
    that the grammar came in, ``unenforced`` the formats of a schema that it takes no notice of.
    """

    engine: LLMatcher
    words: int
    param: str
    unenforced: tuple[str, ...] = ()

    def take(self, token: int) -> bool:
        """Follow a token; True when the text is complete and nothing may come after it.

        Raises MatchFailed.
        """
        if not self.engine.consume_token(token):
            raise self.fault or MatchFailed("the token does not continue the text")
        return self.engine.is_stopped()

    def allowed(self) -> tuple[int, ...]:
        """All tokens that may come next, in ascending order. Raises MatchFailed."""
        if (fault := self.fault) is not None:
            raise fault
        mask = int.from_bytes(self.engine.compute_bitmask(), "little")
        return tuple(token for token in range(mask.bit_length()) if mask >> token & 1)

    def copy(self, param: str = "") -> TokenMatcher:
        """Another one at the same place, of the same field unless another is named."""
        return replace(self, engine=self.engine.deep_copy(), param=param or self.param)

    @property
    def fault(self) -> MatchFailed | None:
        """Why no more masks can be made."""
        if not self.engine.is_error():
            return None
        message = first_line(self.engine.get_error())
        return MatchFailed(message, self.param if _LIMITS.search(message) else None)


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Any thread may call it.

    Only ids below ``vocab_size`` may be drawn. End tokens are the tokenizer's and ``eos_ids``, and
    are allowed exactly where the text may end.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_ids: AbstractSet[int] = frozenset()
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(i for i in eos_ids | tokenizer.eos_ids if i < vocab_size)
        self._lock = Lock()
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[tuple[Grammar, Reasoning | None], TokenMatcher] = OrderedDict()

    def compile(self, grammar: Grammar, reasoning: Reasoning | None = None) -> TokenMatcher:
        """A matcher at the beginning of an answer.

        Raises InvalidRequest: the grammar holds a schema that is none; CannotCompile: it is beyond
        the engine, or no text can satisfy it.
        """
        key = (replace(grammar, param=""), reasoning)
        with self._lock:
            if (known := self._compiled.get(key)) is not None:
                self._compiled.move_to_end(key)
                return known.copy(grammar.param)
        made = self._compile(grammar, reasoning)
        with self._lock:
            self._compiled[key] = made
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
            return made.copy(grammar.param)

    def prepare(self) -> None:
        """Read the tokenizer's tokens, which the first grammar would do otherwise.

        Holds the interpreter's lock for a quarter of a second with 50,000 tokens.
        """
        with suppress(CannotCompile):
            self._known_vocabulary()

    def _compile(self, grammar: Grammar, reasoning: Reasoning | None) -> TokenMatcher:
        # Imported when the first grammar comes: a server that never sees one starts sooner.
        from llguidance import LLMatcher, LLParserLimits

        source, unenforced = source_of(grammar, reasoning)
        items = MAX_GRAMMAR_ITEMS if isinstance(grammar, ContextFreeGrammar) else MAX_ITEMS
        limits = LLParserLimits(
            verbose_errors=False, max_items_in_row=items, step_max_items=10 * MAX_ITEMS
        )
        engine = LLMatcher(self._known_vocabulary(), source, log_level=0, limits=limits)
        matcher = TokenMatcher(engine, -(-self._vocab_size // 32), grammar.param, unenforced)
        if (fault := matcher.fault) is not None:
            raise CannotCompile(str(fault))
        _try_to_begin(matcher)
        return matcher

    def _known_vocabulary(self) -> LLTokenizer:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            return self._vocabulary

    def _make_vocabulary(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        table = self._tokenizer.table
        if table is None:
            raise CannotCompile("this model's tokenizer does not spell its tokens one by one")
        if not self._eos_ids:
            raise CannotCompile("this model has no end token")
        spelled: list[bytes] = [b""] * self._vocab_size
        for token, piece in enumerate(table.pieces[: self._vocab_size]):
            if token not in self._eos_ids and not self._tokenizer.is_special(token):
                spelled[token] = piece
        wrapper: Any = _Vocabulary(spelled, self._eos_ids[0])
        return LLTokenizer(wrapper, n_vocab=self._vocab_size, eos_token=self._eos_ids)


class _Vocabulary:
    """What the engine reads of a tokenizer, once."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: tuple[int, ...] = ()

    def __init__(self, tokens: list[bytes], eos: int) -> None:
        self.tokens = tokens
        self.eos_token_id = eos

    def __call__(self, text: str | bytes) -> list[int]:
        """Encode forced text; the engine then goes on without, and here it forces none."""
        return []


def _try_to_begin(matcher: TokenMatcher) -> None:
    """Raise CannotCompile where no text can begin, or where its first token is too much already."""
    mask = int.from_bytes(matcher.engine.compute_bitmask(), "little")
    if (fault := matcher.fault) is not None:
        raise CannotCompile(str(fault) if fault.param else "no text satisfies it")
    try:
        matcher.copy().take((mask & -mask).bit_length() - 1)
    except MatchFailed as error:
        raise CannotCompile(str(error)) from error
