"""What ``mlx-troupe serve`` tells whoever started it: what is served, and what a stop has lost."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from ...runtime.adapter_table import mountings
from ...runtime.budgets import in_words, why_no_cache

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...actors.spill_messages import FlushReport
    from ...runtime.model_info import ModelInfo
    from ...runtime.settings import Settings
    from ..seams import HttpSettings

LOOPBACK = ("127.", "localhost", "::1")


def banner(
    settings: Settings, model: ModelInfo, http: HttpSettings, url: str, ssd: Any = None
) -> str:
    """What is served, where, and a line to try it with. ``ssd``: ``/stats.ssd_cache``."""
    window = f"{model.context_window:,} tokens" if model.context_window else "unknown"
    rows = f"up to {settings.batch} together" if model.batchable else f"one ({model.lone_reason})"
    hello = [{"role": "user", "content": "Hello!"}]
    # A small model may go on to the end of its window, with nothing to be seen until then.
    body = json.dumps({"messages": hello, "max_tokens": 200})
    lines = [
        f"model    {model.name}",
        f"device   {model.device}",
        f"context  {window}; requests: {rows}",
        *(f"kv       {line}" for line in _kept(model)),
        *([f"cache    off: {why}"] if (why := why_no_cache(settings)) else []),
        *([f"ssd      {_on_disk(ssd)}"] if ssd else []),
        *([f"limits   {limits}"] if (limits := in_words(settings, model)) else []),
    ]
    if settings.adapters:
        lines.append(f"adapter  {' + '.join(start.id for start in mountings(settings.adapters))}")
    lines.append(f"address  {url}/v1")
    if not http.host.startswith(LOOPBACK):
        lines.append("         Anyone who can reach this address can use it: there is no password.")
    lines += [
        "",
        "Try it:",
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\",
        f"    -d '{body}'",
        "",
        "Ctrl-C stops.",
    ]
    return "\n".join(lines)


def _on_disk(ssd: dict[str, Any]) -> str:
    """The folder, and what earlier servers left in it: for this one, or of no use to it."""
    foreign = ssd["entries"] - ssd["usable_entries"]
    of = f"; {foreign:,} of another model, setting or version" if foreign else ""
    return f"{ssd['dir']} (prompts: {ssd['entries']:,}, {ssd['bytes'] / 1e6:,.1f} MB{of})"


def tell_of_flush(report: FlushReport | None) -> None:
    """Say, at a stop, which prompts are lost; nothing when none are. None: nobody knows."""
    if report is None:
        click.echo("SSD cache: it is not known whether all kept prompts were written.", err=True)
        return
    lost = max(report.missing - report.crowded, report.pending)
    # Those that failed and are still in memory are missing.
    gone = report.dropped + max(report.failed - lost, 0)
    told = (
        (lost, "not written"),
        (gone, "given up before"),
        (report.crowded, "left out for want of room"),
    )
    for count, what in told:
        if count:
            prompts = "1 kept prompt was" if count == 1 else f"{count} kept prompts were"
            click.echo(f"SSD cache: {prompts} {what}.", err=True)


def _kept(model: ModelInfo) -> Iterator[str]:
    """How keys and values are kept, if not as the model makes them, as the arrays say."""
    if model.kv_scheme == "off":
        return
    for alike in model.kv_layers:
        size = f", {alike.bytes_per_token} bytes a token" if alike.bytes_per_token else ""
        yield f"{alike.layers} {alike.kind} layers: {alike.form}{size} each"
