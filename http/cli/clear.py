"""``mlx-troupe clear``: remove what ``--ssd-cache`` has put into a folder. Loads no model."""

from __future__ import annotations

from pathlib import Path

import click

EPILOG = """\b
Example:
  mlx-troupe clear ~/prompts
"""


@click.command(epilog=EPILOG, short_help="Remove the prompts and answers kept in a folder.")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def clear(folder: Path) -> None:
    """Remove all prompts and interrupted answers that --ssd-cache FOLDER holds; no other file.

    A server that runs on the folder goes on, with what it has in memory.
    """
    from ...runtime.resume.files import RecordFiles, answers_in
    from ...runtime.spill.store import SpillStore

    before = _sizes(folder)
    SpillStore(folder).clear()
    if answers_in(folder).is_dir():
        try:
            RecordFiles(answers_in(folder)).clear()
        except OSError as error:
            raise click.ClickException(str(error)) from error
    gone = before.keys() - _sizes(folder).keys()
    files = "1 file" if len(gone) == 1 else f"{len(gone)} files"
    size = sum(before[path] for path in gone) / 1e6
    click.echo(f"{files} removed from {folder}, {size:.1f} MB.")


def _sizes(folder: Path) -> dict[Path, int]:
    return {path: path.lstat().st_size for path in folder.rglob("*") if path.is_file()}
