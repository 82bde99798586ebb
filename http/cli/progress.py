"""A bar on standard error for downloads and conversions; rich is imported when one begins."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

import click

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class ProgressBar:
    """Called with bytes done, bytes in all (None if unknown) and what is being done.

    Shows one bar for each kind of work; without a terminal, one line for each.
    """

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID | None] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int | None, what: str) -> None:
        """Show that ``done`` of ``total`` bytes of ``what`` are done."""
        if what not in self._tasks:
            self._tasks[what] = self._begin(total, what)
        task = self._tasks[what]
        if self._bar is not None and task is not None:
            self._bar.update(task, completed=done, total=total)

    def _begin(self, total: int | None, what: str) -> TaskID | None:
        if not sys.stderr.isatty():
            size = f" ({total / 1e6:.0f} MB)" if total else ""
            click.echo(f"{what}{size}", err=True)
            return None
        if self._bar is None:
            self._bar = _open_bar()
        return self._bar.add_task(what, total=total)


def _open_bar() -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    bar.start()
    return bar
