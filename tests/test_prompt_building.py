"""Where prompts are built: on the event loop while that is quick, else on a thread."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import trio
import trio.testing

from mlx_troupe.actors.grammars import GrammarTools
from mlx_troupe.actors.text_tools import LONG_PROMPT, TextTools
from mlx_troupe.runtime.defaults import SamplingDefaults
from mlx_troupe.runtime.requests import ChatPrompt, Message, Prompt, TextPrompt, TokenPrompt
from mlx_troupe.runtime.settings import Settings
from mlx_troupe.runtime.text.prompts import BuiltPrompt, PromptBuilder
from mlx_troupe.runtime.text.provenance import Provenance
from mlx_troupe.runtime.text.testing import ByteTokenizer

LONG = TextPrompt("x" * LONG_PROMPT)
PATIENCE = 30.0
ROOM = 100_000


class WatchedTokenizer(ByteTokenizer):
    """Serves one caller at a time, notes who calls, and stays in a long text until let go."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.let_go = threading.Event()
        self.callers: list[threading.Thread] = []
        self._lock = threading.Lock()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.callers.append(threading.current_thread())
        with self._lock:
            if text == LONG.text:
                self.entered.set()
                assert self.let_go.wait(PATIENCE)
            return super().encode(text, add_special_tokens=add_special_tokens)


def tools(tokenizer: WatchedTokenizer) -> TextTools:
    """The tools of a runtime around one tokenizer."""
    provenance = Provenance()
    defaults = SamplingDefaults.load(Settings(Path("/nowhere"), "none"))
    grammars = GrammarTools(tokenizer)
    return TextTools(
        tokenizer, PromptBuilder(tokenizer, provenance), provenance, defaults, grammars
    )


async def test_the_loop_never_waits_for_a_tokenizer_that_is_taken() -> None:
    """A short prompt behind a long one waits on a thread, also when the long one was given up."""
    tokenizer = WatchedTokenizer()
    made = tools(tokenizer)
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            given_up = trio.CancelScope()

            async def build_long() -> None:
                with given_up:
                    await made.build(LONG, ROOM)

            nursery.start_soon(build_long)
            await trio.to_thread.run_sync(tokenizer.entered.wait, PATIENCE)
            given_up.cancel()
            nursery.start_soon(made.build, TextPrompt("short"), ROOM)
            await trio.testing.wait_all_tasks_blocked()
            tokenizer.let_go.set()
    assert threading.current_thread() not in tokenizer.callers
    assert len(tokenizer.callers) == 2


async def test_a_short_prompt_is_built_where_it_is_asked_for() -> None:
    """With nobody at the tokenizer a thread would only cost time."""
    tokenizer = WatchedTokenizer()
    built = await tools(tokenizer).build(TextPrompt("short"), ROOM)
    assert built.ids == tuple(b"short")
    assert tokenizer.callers == [threading.current_thread()]


CALL = {"id": "1", "function": {"name": "f", "arguments": "y" * LONG_PROMPT}}


@pytest.mark.parametrize(
    "prompt",
    [
        ChatPrompt((Message("user", "y" * LONG_PROMPT),)),
        ChatPrompt((Message("user", "a"),) * 200),
        ChatPrompt((Message("assistant", "", {"tool_calls": [CALL]}), Message("user", "a"))),
        ChatPrompt((Message("user", "a"),), {"setting": ["y"] * LONG_PROMPT}),
    ],
    ids=["text", "messages", "calls", "settings"],
)
async def test_all_that_is_rendered_counts_as_long(prompt: Prompt) -> None:
    """Many messages, calls and template settings take time too, not only the text."""
    tokenizer = WatchedTokenizer()
    await tools(tokenizer).build(prompt, ROOM)
    assert tokenizer.callers
    assert threading.current_thread() not in tokenizer.callers


class WatchedBuilder(PromptBuilder):
    """Notes who builds."""

    def __init__(self, tokenizer: WatchedTokenizer) -> None:
        super().__init__(tokenizer, Provenance())
        self.callers: list[threading.Thread] = []

    def build(self, prompt: Prompt, room: int = ROOM) -> BuiltPrompt:
        self.callers.append(threading.current_thread())
        return super().build(prompt, room)


@pytest.mark.parametrize(("count", "on_loop"), [(10 * LONG_PROMPT, False), (10, True)])
async def test_many_ids_are_checked_off_the_loop(count: int, on_loop: bool) -> None:
    """Ids need no tokenizer, but enough of them are checked on a thread like a long text."""
    tokenizer = WatchedTokenizer()
    builder = WatchedBuilder(tokenizer)
    await replace(tools(tokenizer), builder=builder).build(TokenPrompt((1,) * count), ROOM)
    assert [caller is threading.current_thread() for caller in builder.callers] == [on_loop]
