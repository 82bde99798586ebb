"""``mlx-troupe doctor``: what this machine offers, and what would make it faster."""

from __future__ import annotations

import click


@click.command(short_help="Tell what this machine offers, and what would make it faster.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(as_json: bool) -> None:
    """Tell which device, MLX build and BLAS are used, how much memory there is
    and where files are kept."""
