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

import json
import re
from collections import OrderedDict
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING, Any, assert_never

from ..grammars import (
    MAX_WHITESPACE,
    ChoiceGrammar,
    ContextFreeGrammar,
    Grammar,
    JsonGrammar,
    RegexGrammar,
)
from .schemas import check_schema, fit_formats
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
_OPTIONS = '%llguidance {"no_forcing": true}\n'


class CannotCompile(Exception):
    """A grammar that the engine cannot turn into masks; the text is fit for a client."""


class MatchFailed(Exception):
    """A row's matcher gave up: a limit of the engine, or a token that it had not allowed.

    ``param`` names the request's field whose grammar goes beyond the limit; else None.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How an answer may begin with a reasoning block, to which the grammar does not apply.

    ``opened``: the prompt opened the block already, so the answer begins inside it.
    """

    start: str
    end: str
    opened: bool


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
        message = _first_line(self.engine.get_error())
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

        body, unenforced = _body(grammar, reasoning)
        items = MAX_GRAMMAR_ITEMS if isinstance(grammar, ContextFreeGrammar) else MAX_ITEMS
        limits = LLParserLimits(
            verbose_errors=False, max_items_in_row=items, step_max_items=10 * MAX_ITEMS
        )
        engine = LLMatcher(
            self._known_vocabulary(), _source(body, reasoning), log_level=0, limits=limits
        )
        matcher = TokenMatcher(engine, -(-self._vocab_size // 32), grammar.param, unenforced)
        if (fault := matcher.fault) is not None:
            raise CannotCompile(str(fault))
        # The first mask shows whether any text can begin at all.
        engine.compute_bitmask()
        if (fault := matcher.fault) is not None:
            raise CannotCompile(str(fault) if fault.param else "no text satisfies it")
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


def _source(body: Mapping[str, object], reasoning: Reasoning | None) -> str:
    """The engine's own description: the text's beginning, and the grammar as its body."""
    head = [_OPTIONS, "start: @body"]
    if reasoning is not None:
        head = [_OPTIONS, _start_with(reasoning)]
    grammars = [{"lark_grammar": "".join(head)}, {"name": "body", **body}]
    return json.dumps({"grammars": grammars})


def _start_with(reasoning: Reasoning) -> str:
    start, end = json.dumps(reasoning.start), json.dumps(reasoning.end)
    opening = "start: block @body\nblock: thought blanks\n"
    if not reasoning.opened:
        opening = f"start: @body | block @body\nblock: blanks {start} thought blanks\n"
    return f"{opening}thought[suffix={end}]: /(?s:.*)/\nblanks: /[ \\t\\r\\n]*/\n"


def _body(
    grammar: Grammar, reasoning: Reasoning | None
) -> tuple[Mapping[str, object], tuple[str, ...]]:
    """A grammar in the engine's words, and the formats that these leave out."""
    match grammar:
        case JsonGrammar():
            schema, unenforced = _schema(grammar)
            return {"json_schema": schema}, unenforced
        case RegexGrammar(pattern=pattern):
            text = _regex(pattern, reasoning)
        case ChoiceGrammar(choices=choices):
            listed = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
            # One terminal: as many alternatives of a rule would go beyond the engine's limits.
            text = f"start: CHOICE\nCHOICE: {listed}\n"
        case ContextFreeGrammar(text=given):
            text = _lark(given)
        case _:
            assert_never(grammar)
    return {"lark_grammar": _OPTIONS + text}, ()


def _schema(grammar: JsonGrammar) -> tuple[Mapping[str, object], tuple[str, ...]]:
    schema: dict[str, Any] = json.loads(grammar.schema)
    check_schema(schema, grammar.param)
    unenforced = fit_formats(schema)
    # Set here in any case: among the engine's own options is one to ignore what it cannot do.
    options: dict[str, object] = {"whitespace_flexible": False}
    if grammar.whitespace_pattern is not None:
        options = {"whitespace_pattern": grammar.whitespace_pattern}
    elif grammar.any_whitespace:
        options = {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MAX_WHITESPACE}}}"}
    return {**schema, "x-guidance": options}, unenforced


def _regex(pattern: str, reasoning: Reasoning | None) -> str:
    from llguidance import regex_to_lark

    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        # The converter would leave it out.
        raise CannotCompile("it ends in a backslash that escapes nothing")
    text = f"/{regex_to_lark(pattern, '')}/"
    if reasoning is None or reasoning.opened:
        return f"start: {text}\n"
    # An answer that begins like a reasoning block is one, whatever the pattern would allow.
    marker = regex_to_lark("".join(f"\\x{{{ord(c):x}}}" for c in reasoning.start), "")
    return f"start: TEXT\nTEXT: {text} & ~/[ \\t\\r\\n]*{marker}(?s:.*)/ & /(?s:.*)/\n"


def _lark(text: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text)
    except Exception as error:  # a converter of free text, without an error class of its own
        raise CannotCompile(_first_line(str(error))) from error


def _first_line(message: str) -> str:
    lines = [line.strip() for line in message.strip().splitlines() if line.strip(" ^")]
    # Errors in regular expressions say what is wrong at the end, below a picture of it.
    told = [line for line in lines if line.startswith("error:")] or lines
    return told[0].removeprefix("error: ")[:200] if told else "unknown reason"
