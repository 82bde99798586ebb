"""The command ``mlx-troupe``: its verbs, what happens without one, and how errors are told.

Runs on the main thread. Knows nothing of models or servers; importing it imports click alone, so
that ``--help`` answers at once and a fast BLAS can still be put in front of MLX.
"""

from __future__ import annotations

from typing import Any

import click

from .chat import chat
from .clear import clear
from .doctor import doctor
from .errors import leaves, plain_error
from .generate import generate
from .get import get
from .serve import serve

EPILOG = """\b
Examples:
  mlx-troupe                            serve the starter model on port 8080
  mlx-troupe serve qwen3-4b             serve a model that you have
  mlx-troupe get mlx-community/Qwen3-4B-4bit
  mlx-troupe chat                       talk to it in this terminal
  mlx-troupe serve --help               all flags of one command

A MODEL is a part of the name of a model that you have, a hub id (owner/name), a directory
that mlx-lm can load, or a .gguf file. Every flag can also be set as a variable:
--port of serve is MLX_TROUPE_SERVE_PORT.
"""

INTERRUPTED = 130
"""The shells' exit status for Ctrl-C."""
GROUP_FLAGS = frozenset({"-h", "--help", "-v", "--version"})


class Troupe(click.Group):
    """A group whose default verb is ``serve`` and whose errors are one plain line."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """No verb, or only options, means ``serve``."""
        if not args or (args[0].startswith("-") and args[0] not in GROUP_FLAGS):
            args = ["serve", *args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb; an error that a person can do something about becomes its message."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except BaseException as error:
            if all(isinstance(leaf, KeyboardInterrupt) for leaf in leaves(error)):
                raise click.exceptions.Exit(INTERRUPTED) from None
            message = plain_error(error)
            if message is None:
                raise
            raise click.ClickException(message) from error


def print_version(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    """``--version``: reads the installed distribution, imports nothing of it."""
    if wanted and not ctx.resilient_parsing:
        from importlib.metadata import version

        click.echo(f"mlx-troupe {version('mlx-troupe')}")
        ctx.exit()


@click.group(
    cls=Troupe,
    epilog=EPILOG,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "auto_envvar_prefix": "MLX_TROUPE",
        "max_content_width": 100,
    },
)
@click.option(
    "-v",
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=print_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """Run language models on this machine: serve many clients at once, or chat right here.

    Speaks the OpenAI API. Without a command it serves; without a model it takes a small starter
    model (SmolLM2 135M, 98 MB).
    """


@cli.command("help", short_help="Show the help of a command.")
@click.argument("command", required=False)
@click.pass_context
def help_command(ctx: click.Context, command: str | None) -> None:
    """Show the help of COMMAND, or of all commands."""
    parent = ctx.find_root()
    if command is None:
        click.echo(cli.get_help(parent))
        return
    found = cli.get_command(parent, command)
    if found is None:
        raise click.UsageError(f"No such command {command!r}.")
    click.echo(found.get_help(click.Context(found, info_name=command, parent=parent)))


for command in (serve, chat, generate, get, doctor, clear):
    cli.add_command(command)


def main() -> None:
    """Entry point of the console script."""
    cli(prog_name="mlx-troupe")
