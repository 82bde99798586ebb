"""``mlx-troupe chat``: a conversation in the terminal, or line by line through a pipe.

The model runs in this process; no server is needed or started. One trio task talks to the user, a
worker thread waits for input, and a signal receiver turns Ctrl-C into the end of one answer.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

import click

from ...runtime.errors import TroupeError
from ...runtime.requests import ChatPrompt, SamplingRequest
from .conversation import Ask, Conversation, Leave, Note
from .errors import plain_error
from .local import Wishes, answer, open_ready, settings_for_one
from .options import dtype_option, model_argument, offline_option, sampling_options
from .render import Printer

if TYPE_CHECKING:
    import trio

    from ...actors.system import Runtime
    from ...runtime.settings import Dtype, Settings

EPILOG = """\b
Examples:
  mlx-troupe chat
  mlx-troupe chat qwen3-4b --system 'Answer in one sentence.'
  printf 'What is 2+2?\\nAnd 3+3?\\n' | mlx-troupe chat

In the chat /help lists the commands. Ctrl-C stops an answer, Ctrl-D leaves.
"""


@click.command(epilog=EPILOG, short_help="Talk to a model in this terminal.")
@model_argument
@click.option("--system", default="", metavar="TEXT", help="System message of the conversation.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Longest answer, in tokens.")
@sampling_options
@dtype_option
@offline_option
def chat(
    model: str | None,
    system: str,
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    dtype: Dtype,
    offline: bool,
) -> None:
    """Talk to MODEL in this terminal: no server is needed.

    Without MODEL: the one that you have, or the starter model.
    """
    import trio

    from .models import find_model

    found = find_model(model, offline=offline)
    wishes = Wishes(max_tokens, SamplingRequest(temperature=temperature, top_p=top_p, top_k=top_k))
    if sys.stdin.isatty():
        click.echo(f"Loading {found.name} ({found.source}) ...", err=True)
    trio.run(converse, settings_for_one(found, dtype), wishes, Conversation(system))


@dataclass(frozen=True, slots=True)
class Stage:
    """What one conversation has at hand."""

    runtime: Runtime
    wishes: Wishes
    conversation: Conversation
    signals: AsyncIterator[int]
    person: bool


async def converse(settings: Settings, wishes: Wishes, conversation: Conversation) -> None:
    """The whole conversation, from loading the model to the end of the input."""
    import trio

    person = sys.stdin.isatty()
    async with open_ready(settings) as runtime:
        if person:
            click.echo("Ready. /help lists the commands, Ctrl-D leaves.", err=True)
        with trio.open_signal_receiver(signal.SIGINT) as signals:
            await _talk(Stage(runtime, wishes, conversation, signals, person))


async def _talk(stage: Stage) -> None:
    while (line := await _listen(stage)) is not None:
        match stage.conversation.hear(line):
            case Ask(prompt):
                stage.conversation.answered(await _reply(stage, prompt))
            case Note(text):
                if text:
                    click.echo(text, err=True)
            case Leave():
                return
            case never:
                assert_never(never)


async def _listen(stage: Stage) -> str | None:
    """The next line; None at the end of the input, and on Ctrl-C where no person types."""
    import trio

    line: str | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_hint, stage, nursery.cancel_scope)
        # Abandoned on cancel: nothing interrupts a thread that waits for a terminal.
        line = await trio.to_thread.run_sync(_read_line, stage.person, abandon_on_cancel=True)
        nursery.cancel_scope.cancel()
    return line


async def _hint(stage: Stage, waiting: trio.CancelScope) -> None:
    async for _ in stage.signals:
        if not stage.person:
            waiting.cancel()
            return
        click.echo("\n(Ctrl-D leaves)\n> ", nl=False, err=True)


async def _reply(stage: Stage, prompt: ChatPrompt) -> str:
    """Show one answer; returns what was said of it, "" if nothing came."""
    import trio

    printer = Printer()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_stop, stage.signals, nursery.cancel_scope)
            await answer(stage.runtime, stage.wishes.request(prompt), printer.show)
            nursery.cancel_scope.cancel()
    except* TroupeError as failed:
        click.echo(f"\nError: {plain_error(failed)}", err=True)
    printer.end()
    return printer.content


async def _stop(signals: AsyncIterator[int], answering: trio.CancelScope) -> None:
    await anext(signals)
    answering.cancel()


def _read_line(person: bool) -> str | None:
    """One line of input, without its end; None at the end of the input."""
    if person:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives input() line editing and a history)
        try:
            return input("> ")
        except EOFError:
            click.echo(err=True)
            return None
    line = sys.stdin.readline()
    return line.rstrip("\r\n") if line else None
