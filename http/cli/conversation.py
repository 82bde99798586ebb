"""What the terminal chat remembers, and what each typed line means. Synchronous; no terminal.

``/system`` keeps the conversation's first message, ``/reset`` forgets all but that. A turn counts
once something was answered: a question whose answer failed at once is taken back, so that the
history stays one that a template can render.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from ...runtime.requests import ChatPrompt, Message

HELP = """\
/system TEXT  set the system message (without TEXT: remove it) and start over
/reset        forget the conversation
/help         this list
/exit         leave (so does Ctrl-D); Ctrl-C stops an answer"""


@dataclass(frozen=True, slots=True)
class Ask:
    """The line was a question: generate an answer to ``prompt``."""

    prompt: ChatPrompt


@dataclass(frozen=True, slots=True)
class Note:
    """The line was a command; tell the user this (nothing if empty)."""

    text: str


@dataclass(frozen=True, slots=True)
class Leave:
    """The user wants to leave."""


Meaning: TypeAlias = Ask | Note | Leave


@dataclass(slots=True)
class Conversation:
    """One chat: a system message and the turns so far. ``answered`` follows every :class:`Ask`."""

    system: str = ""
    turns: list[Message] = field(default_factory=list)

    def hear(self, line: str) -> Meaning:
        """Take in one line of input; an empty one means nothing."""
        text = line.strip()
        if not text:
            return Note("")
        if text.startswith("/"):
            return self._obey(*text[1:].split(maxsplit=1))
        self.turns.append(Message("user", text))
        return Ask(self._prompt())

    def answered(self, text: str) -> None:
        """The last question was answered with ``text``; "" takes the question back."""
        if text:
            self.turns.append(Message("assistant", text))
        else:
            self.turns.pop()

    def _obey(self, command: str = "", argument: str = "") -> Meaning:
        match command:
            case "exit" | "quit":
                return Leave()
            case "reset":
                self.turns.clear()
                return Note("The conversation starts over.")
            case "system":
                self.system = argument
                self.turns.clear()
                return Note("System message set." if argument else "System message removed.")
            case "help":
                return Note(HELP)
            case _:
                return Note(f"Unknown command /{command}.\n{HELP}")

    def _prompt(self) -> ChatPrompt:
        head = (Message("system", self.system),) if self.system else ()
        return ChatPrompt((*head, *self.turns))
