"""Shows an answer while it is made: text to standard output, thoughts only to a person.

Owns the text seen so far. Runs in the task that reads the generation; knows no runtime.
"""

from __future__ import annotations

import sys
import unicodedata
from dataclasses import dataclass, field

import click

from ...runtime.requests import Channel, TextDelta


def printable(text: str) -> str:
    """Text without control characters, which could drive the terminal it is printed on."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


@dataclass(slots=True)
class Printer:
    """Prints the deltas of one answer. ``quiet`` only collects them."""

    quiet: bool = False
    person: bool = field(default_factory=lambda: sys.stdout.isatty())
    content: str = ""
    reasoning: str = ""

    def show(self, delta: TextDelta) -> None:
        """Take in one delta. In a pipe, thoughts are collected but not printed."""
        match delta.channel:
            case Channel.CONTENT:
                if self.reasoning and not self.content and self.person and not self.quiet:
                    click.echo("\n")
                self.content += delta.text
                self._print(delta.text)
            case Channel.REASONING:
                self.reasoning += delta.text
                if self.person:
                    self._print(click.style(printable(delta.text), dim=True), safe=True)

    def end(self) -> None:
        """Close the line."""
        if not self.quiet and not self.content.endswith("\n"):
            click.echo()

    def _print(self, text: str, *, safe: bool = False) -> None:
        if not self.quiet:
            click.echo(printable(text) if self.person and not safe else text, nl=False)
