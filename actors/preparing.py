"""A client's prompt and grammar made ready for a row: token ids, and what says which may follow.

Part of the Request actor, in its task; rendering, encoding and compiling may wait for threads
(``text_tools.py``, ``grammars.py``). Holds no state, and knows no row and no scheduler.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from mlx_troupe.runtime.defaults import UNKNOWN_WINDOW
from mlx_troupe.runtime.errors import ContextLengthExceeded
from mlx_troupe.runtime.grammars import Grammar, in_words
from mlx_troupe.runtime.model_info import ModelInfo
from mlx_troupe.runtime.requests import ChatPrompt, Prompt
from mlx_troupe.runtime.text.grammar_sources import CannotCompile, Reasoning
from mlx_troupe.runtime.text.matching import TokenMatcher
from mlx_troupe.runtime.text.messages import with_instruction
from mlx_troupe.runtime.text.prompts import BuiltPrompt

from .text_tools import TextTools


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a row is made of, as far as text goes.

    ``shown`` is the prompt that ``built`` was built of: with an instruction, where a grammar is
    asked for in words. ``warnings``: what is not enforced, in words.
    """

    built: BuiltPrompt
    shown: Prompt
    matcher: TokenMatcher | None = None
    warnings: tuple[str, ...] = ()


def markers_of(prompt: Prompt, tools: TextTools) -> tuple[str, str] | None:
    """What an answer's reasoning stands between; None where it is not told apart."""
    # A raw completion is one text: what it says about thinking is part of it.
    return tools.tokenizer.think_markers if isinstance(prompt, ChatPrompt) else None


async def build(prompt: Prompt, tools: TextTools, model: ModelInfo) -> BuiltPrompt:
    """Token ids of a prompt. Raises RequestError."""
    return await tools.build(prompt, _window(model))


async def prepare(
    prompt: Prompt, grammar: Grammar | None, tools: TextTools, model: ModelInfo
) -> Prepared:
    """The prompt's ids, and what follows the answer through the request's grammar.

    A grammar that cannot be compiled is asked for in words, where there is somebody to ask. Raises
    RequestError.
    """
    built = await build(prompt, tools, model)
    if grammar is None:
        return Prepared(built, prompt)
    markers = markers_of(prompt, tools)
    reasoning = None if markers is None else Reasoning(*markers, built.opens_reasoning)
    try:
        matcher = await tools.grammars.match(grammar, model, reasoning)
    except CannotCompile as error:
        plain = Prepared(built, prompt, warnings=(f"{grammar.param} is not enforced: {error}",))
        return await _asked_in_words(plain, grammar, tools, model)
    left_out = ", ".join(matcher.unenforced)
    warnings = (f"{grammar.param}: not enforced as format: {left_out}",) if left_out else ()
    return Prepared(built, prompt, matcher, warnings)


async def _asked_in_words(
    plain: Prepared, grammar: Grammar, tools: TextTools, model: ModelInfo
) -> Prepared:
    """The same with an instruction, unless that takes more than half of the room left."""
    if not isinstance(plain.shown, ChatPrompt):
        return plain
    asked = replace(plain.shown, messages=with_instruction(plain.shown.messages, in_words(grammar)))
    room = _window(model) - len(plain.built.ids)
    with suppress(ContextLengthExceeded):
        told = await build(asked, tools, model)
        if len(told.ids) - len(plain.built.ids) <= room // 2:
            return replace(plain, built=told, shown=asked)
    return plain


def _window(model: ModelInfo) -> int:
    return model.context_window or UNKNOWN_WINDOW
