"""``mlx-troupe chat``: a conversation in the terminal, or line by line through a pipe.

The model runs in this process; no server is needed or started. The main thread talks to the user,
so that Ctrl-C reaches it: it discards a line that is being typed, or ends an answer.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

import click

from ...runtime.errors import TroupeError
from ...runtime.requests import ChatPrompt, SamplingRequest
from .conversation import Ask, Conversation, Leave, Note
from .local import Wishes, answer, open_ready, settings_for_one
from .options import (
    adapter_option,
    check_adapters,
    dtype_option,
    kv_option,
    model_argument,
    offline_option,
    sampling_options,
)
from .render import Printer

if TYPE_CHECKING:
    from pathlib import Path

    from ...actors.blocking import BlockingRuntime
    from ...runtime.kvschemes import KVScheme
    from ...runtime.settings import Dtype

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
@adapter_option
@kv_option
@dtype_option
@offline_option
def chat(
    model: str | None,
    system: str,
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    adapters: tuple[Path, ...],
    kv: KVScheme,
    dtype: Dtype,
    offline: bool,
) -> None:
    """Talk to MODEL in this terminal: no server is needed.

    Without MODEL: the one that you have, or the starter model.
    """
    from .models import find_model

    check_adapters(adapters)
    found = find_model(model, offline=offline)
    wishes = Wishes(max_tokens, SamplingRequest(temperature=temperature, top_p=top_p, top_k=top_k))
    person = sys.stdin.isatty()
    if person:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives input() line editing and a history)
        click.echo(f"Loading {found.name} ({found.source}) ...", err=True)
    with open_ready(settings_for_one(found, dtype, adapters, kv)) as runtime:
        if person:
            click.echo("Ready. /help lists the commands, Ctrl-D leaves.", err=True)
        Stage(runtime, wishes, Conversation(system), person).talk()


@dataclass(frozen=True, slots=True)
class Stage:
    """What one conversation has at hand. ``person``: someone types, it is not a pipe."""

    runtime: BlockingRuntime
    wishes: Wishes
    conversation: Conversation
    person: bool

    def talk(self) -> None:
        """The whole conversation, up to the end of the input."""
        while (line := self._listen()) is not None:
            match self.conversation.hear(line):
                case Ask(prompt):
                    self.conversation.answered(self._reply(prompt))
                case Note(text):
                    if text:
                        click.echo(text, err=True)
                case Leave():
                    return
                case never:
                    assert_never(never)

    def _listen(self) -> str | None:
        """The next line; None at the end of the input. Ctrl-C discards what was typed."""
        if not self.person:
            line = sys.stdin.readline()
            return line.rstrip("\r\n") if line else None
        while True:
            try:
                return input("> ")
            except EOFError:
                click.echo(err=True)
                return None
            except KeyboardInterrupt:
                click.echo("\n(Ctrl-D leaves)", err=True)

    def _reply(self, prompt: ChatPrompt) -> str:
        """Show one answer; returns what was said of it, "" if nothing came."""
        printer = Printer()
        try:
            answer(self.runtime, self.wishes.request(prompt), printer.show)
        except KeyboardInterrupt:
            click.echo(" [stopped]", nl=False, err=True)
        except TroupeError as error:
            click.echo(f"\nError: {error.message}", err=True)
        printer.end()
        return printer.content
