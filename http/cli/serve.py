"""``mlx-troupe serve``: one model for many clients, until Ctrl-C.

Checks the address, finds the model, opens the runtime and puts the HTTP application in front of
it. The address answers while the model loads (``/health`` says so); the banner comes when it has.
"""

from __future__ import annotations

import errno
import logging
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...runtime.requests import Hlg
from ...runtime.settings import Settings
from .banner import banner, tell_of_flush
from .options import (
    GIB,
    Number,
    adapter_option,
    check_adapters,
    decimal_bytes,
    default_prompt_cache,
    dtype_option,
    hlg_options,
    kv_option,
    kv_scheme,
    model_argument,
    offline_option,
    paged_options,
    sampling_options,
    ssd_options,
    ssd_settings,
)

if TYPE_CHECKING:
    import trio

    from ..server import Stop

EPILOG = """\b
Examples:
  mlx-troupe serve
  mlx-troupe serve mlx-community/Qwen3-4B-4bit --port 9000
  mlx-troupe serve ./model.gguf --batch 8 --prompt-cache 2
  mlx-troupe serve qwen3 --host 0.0.0.0 --allowed-host gpu.lan

Ctrl-C lets running answers end; a second Ctrl-C stops at once.
"""
LOG_LEVELS = ("debug", "info", "warning", "error")
SAVE_SECONDS = 90.0
"""How long a stop may take to write kept prompts: with the 30 s that running answers have it comes
to two minutes."""


@click.command(epilog=EPILOG, short_help="Serve a model to many clients (OpenAI API).")
@model_argument
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    help="Port to listen on; 0 takes a free one.",
)
@click.option(
    "--batch",
    "--decode-concurrency",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    help="Most requests that are computed together.",
)
@click.option(
    "--queue",
    type=click.IntRange(min=0),
    default=64,
    show_default=True,
    help="Most requests that wait; further ones are refused with 429.",
)
@adapter_option
@click.option(
    "--adapter-dir",
    "adapter_dirs",
    metavar="DIR",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A directory whose adapter folders clients may mount; repeatable. Unset: the folders of "
    "--adapter, and adapters/ in the cache.",
)
@kv_option
@paged_options
@dtype_option
@click.option(
    "--exact",
    is_flag=True,
    help="On a GPU: a request that runs alone computes what mlx-lm computes, bit for bit. Slower; "
    "on a CPU it is always so.",
)
@offline_option
@click.option(
    "--prompt-cache",
    metavar="GB",
    type=Number(min=0),
    default=default_prompt_cache,
    show_default="8, at most a quarter of memory",
    help="Memory for kept prompts, in GiB; 0 turns the prompt cache off.",
)
@ssd_options
@click.option(
    "--kv-budget",
    metavar="GB",
    type=Number(min=0, min_open=True),
    help="Most memory for the state of all running requests, in GB (10⁹ bytes). Requests that do "
    "not fit beside the others wait; one that could never fit is refused. Unset: no limit.",
)
@click.option(
    "--memory-budget",
    metavar="GB",
    type=Number(min=0, min_open=True),
    help="The same for all that the model takes: weights, prompts and state, by estimate. Unset: "
    "no limit, and nothing is refused for its size.",
)
@click.option(
    "--stream-grace",
    metavar="SECONDS",
    type=Number(min=0),
    default=30.0,
    show_default=True,
    help="How long an answer that is streamed under a request_id goes on after its client was "
    "cut, waiting for it to come back; 0 ends it at once, to be gone on with from there.",
)
@click.option(
    "--ignore-sessions",
    is_flag=True,
    help="Take no notice of session_id, prompt_cache_key and the headers that say which chat a "
    "request belongs to.",
)
@click.option("--max-tokens", type=click.IntRange(min=1), help="Cap on every answer, in tokens.")
@sampling_options
@hlg_options
@click.option(
    "--thinking",
    type=click.BOOL,
    metavar="TRUE|FALSE",
    help="Whether a model that thinks does so in chats that do not say. Unset: as its template has "
    "it.",
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    metavar="NAME",
    multiple=True,
    help="A further name that clients may call this server by; repeatable. * allows any.",
)
@click.option(
    "--cors-origin",
    "cors_origins",
    metavar="ORIGIN",
    multiple=True,
    help="A web origin whose pages may call this server; repeatable. * allows any.",
)
@click.option(
    "--keepalive",
    metavar="SECONDS",
    type=Number(min=0),
    default=15.0,
    show_default=True,
    help="Silence in a stream after which a comment is sent; 0 never sends one.",
)
@click.option(
    "--log-level",
    type=click.Choice(LOG_LEVELS),
    default="warning",
    show_default=True,
    help="What is told on standard error.",
)
def serve(model: str | None, host: str, port: int, log_level: str, **flags: Any) -> None:
    """Serve MODEL over the OpenAI API to many clients at once.

    --temperature, --top-p, --top-k and --adapter are defaults for requests that leave them out.
    Without MODEL: the one that you have, or the starter model.
    """
    import trio

    from .models import find_model

    logging.basicConfig(level=log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    # It warns of each model type that it does not know, while mlx-lm decides what can be run.
    logging.getLogger("transformers.configuration_utils").setLevel(logging.ERROR)
    kv = kv_scheme(flags)
    ssd = ssd_settings(flags)
    check_address(host, port)
    check_adapters(flags["adapters"])
    found = find_model(model, offline=flags["offline"])
    click.echo(f"Loading {found.name} ({found.source}) ...", err=True)
    settings = Settings(
        model=found.path,
        name=found.name,
        batch=flags["batch"],
        queue=flags["queue"],
        dtype=flags["dtype"],
        kv=kv,
        exact=flags["exact"],
        prompt_cache_bytes=int(flags["prompt_cache"] * GIB),
        kv_budget_bytes=decimal_bytes(flags["kv_budget"]),
        memory_budget_bytes=decimal_bytes(flags["memory_budget"]),
        stream_grace=flags["stream_grace"],
        max_tokens=flags["max_tokens"],
        temperature=flags["temperature"],
        top_p=flags["top_p"],
        top_k=flags["top_k"],
        thinking=flags["thinking"],
        hlg=Hlg(
            flags["hlg_width"], flags["hlg_shoulder"], flags["hlg_toe"], flags["hlg_pivot_offset"]
        ),
        hlg_sampling=flags["hlg_sampling"],
        adapters=flags["adapters"],
        **ssd,
    )
    trio.run(run_server, settings, host, port, flags)


def check_address(host: str, port: int) -> None:
    """Refuse a port that is taken before anything is downloaded; the server tells the rest."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise click.ClickException(
                f"Port {port} on {host} is taken; stop its owner or choose another with --port."
            ) from None


async def run_server(settings: Settings, host: str, port: int, flags: dict[str, Any]) -> None:
    """Open the runtime and serve it until stopped. Raises TroupeErrors, in groups."""
    import trio

    from ...actors.system import open_runtime

    async with open_runtime(settings) as runtime:
        # Imported only now: the weights are being read meanwhile.
        from ...runtime.store.adapters import default_directories
        from ..app import create_app
        from ..seams import HttpSettings
        from ..server import Stop, serve

        http = HttpSettings(
            host=host,
            port=port,
            allowed_hosts=flags["allowed_hosts"],
            cors_origins=flags["cors_origins"],
            keepalive_interval=flags["keepalive"],
            adapter_dirs=flags["adapter_dirs"] or default_directories(settings.adapters),
            sessions=not flags["ignore_sessions"],
        )
        stop = Stop()
        async with trio.open_nursery() as nursery:

            async def serve_to_the_end(task_status: trio.TaskStatus[list[str]]) -> None:
                await serve(create_app(runtime, http), stop=stop, task_status=task_status)
                if not stop.now.is_set():
                    report = await runtime.drain_to_disk(SAVE_SECONDS)
                    if runtime.stats().get("ssd_cache"):
                        tell_of_flush(report)
                nursery.cancel_scope.cancel()

            urls = await nursery.start(serve_to_the_end)
            nursery.start_soon(_tell_of_stop, stop)
            model = await runtime.wait_ready()
            click.echo(banner(settings, model, http, urls[0], runtime.stats().get("ssd_cache")))


async def _tell_of_stop(stop: Stop) -> None:
    await stop.drain.wait()
    click.echo("Stopping once running answers have ended; Ctrl-C again stops at once.", err=True)
