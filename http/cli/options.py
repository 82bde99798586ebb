"""Options that several commands share, and the types of their values."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import click

from ...runtime.kvschemes import (
    MIN_BLOCK,
    PLAIN_KV,
    KVScheme,
    PagedKV,
    PlainKV,
    name_of,
    parse_kv_quant,
)

Command = TypeVar("Command", bound=Callable[..., Any])

GIB = 1 << 30
GB = 10**9
DEMOTE_IDLE = 300.0


class SsdFields(TypedDict):
    """Fields of :class:`~mlx_troupe.runtime.settings.Settings` for the SSD tier."""

    ssd_cache: Path | None
    ssd_cache_max_bytes: int | None
    ssd_cache_verify: bool
    ssd_demote_idle: float
    ssd_write_budget_bytes: int | None
    generation_checkpoint: int


class Number(click.FloatRange):
    """A float in a range. Unlike click's own it refuses ``nan``, which no comparison catches."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The value as a finite float within the range; fails as a usage error."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a number.", param, ctx)
        return number


class Folder(click.Path):
    """A folder to make or to use; a name that is empty, of a variable that is not set, is none."""

    def __init__(self) -> None:
        super().__init__(file_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path; ``~`` is the home folder, which no shell puts behind a ``=``."""
        if value == "":
            self.fail("an empty name is no folder.", param, ctx)
        return super().convert(os.path.expanduser(value), param, ctx)


def model_argument(command: Command) -> Command:
    """``[MODEL]``."""
    return click.argument("model", required=False)(command)


def offline_option(command: Command) -> Command:
    """``--offline``."""
    return click.option("--offline", is_flag=True, help="Never download anything.")(command)


def sampling_options(command: Command) -> Command:
    """``--temperature``, ``--top-p``, ``--top-k``: defaults of a server, values of a command."""
    for option in (
        click.option("--top-k", type=click.IntRange(min=0), help="Sample among the K best tokens."),
        click.option(
            "--top-p", type=Number(0, 1), help="Sample among the best tokens of this joint share."
        ),
        click.option(
            "--temperature",
            "--temp",
            type=Number(0, 5),
            help="0 always takes the best token. Unset: the model's own value, else 0.7.",
        ),
    ):
        command = option(command)
    return command


def adapter_option(command: Command) -> Command:
    """``--adapter``, a tuple of folders."""
    return click.option(
        "--adapter",
        "--adapter-path",
        "adapters",
        metavar="DIR",
        multiple=True,
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="A LoRA folder (mlx-lm's or PEFT's) to use; repeatable, they add up in this order.",
    )(command)


def check_adapters(folders: tuple[Path, ...]) -> None:
    """Look at adapter folders before anything is downloaded or loaded. Raises AdapterError."""
    from ...runtime.adapter_table import mountings
    from ...runtime.adapters import inspect_adapter

    for mounting in mountings(folders):
        inspect_adapter(mounting.path)


def hlg_options(command: Command) -> Command:
    """``--hlg-sampling`` and the figures of its curve."""
    for name, default, text in (
        ("pivot-offset", 6.0, "how far below the best token it is centred"),
        ("toe", 6.0, "how gently it bends below; 0 does not bend"),
        ("shoulder", 4.0, "how gently it bends above; 0 does not bend"),
        ("width", 4.0, "how far from its centre it stays straight"),
    ):
        command = click.option(
            f"--hlg-{name}",
            type=Number(0, 100),
            default=default,
            show_default=True,
            metavar="NATS",
            help=f"Of the HLG curve: {text}.",
        )(command)
    return click.option(
        "--hlg-sampling",
        is_flag=True,
        help="Sample on a curve of log-probabilities in place of top-p and top-k, unless a request "
        "says otherwise.",
    )(command)


def dtype_option(command: Command) -> Command:
    """``--dtype``."""
    return click.option(
        "--dtype",
        type=click.Choice(["auto", "keep", "float32", "bfloat16"]),
        default="auto",
        show_default=True,
        help="What weights are expanded to at load. auto: float32 on a CPU when memory allows, "
        "as they are elsewhere.",
    )(command)


def decimal_bytes(gigabytes: float | None) -> int | None:
    """Bytes of a budget in GB (10⁹ bytes); None stays None."""
    return None if gigabytes is None else int(gigabytes * GB)


def kv_option(command: Command) -> Command:
    """``--kv-quant``: one scheme; a second one is refused, as it would silently win."""

    def scheme_of(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> KVScheme:
        if len(value) > 1:
            raise click.BadParameter("give it once: schemes exclude each other.", ctx, param)
        try:
            return parse_kv_quant(value[0]) if value else PLAIN_KV
        except ValueError as error:
            raise click.BadParameter(f"{error}.", ctx, param) from error

    return click.option(
        "--kv-quant",
        "kv",
        metavar="SCHEME",
        multiple=True,
        callback=scheme_of,
        help="Keep keys and values in fewer bits: 4 or 8 (affine), config (by layer, as the "
        "model's kv_config.json says), turbo or turbo:kXvY (TurboQuant, keys of X and values of "
        "Y bits; k8v3 unless said). Unset or off: as the model makes them.",
    )(command)


def paged_options(command: Command) -> Command:
    """``--paged-kv`` and ``--paged-kv-block-size``; see :func:`kv_scheme`."""
    command = click.option(
        "--paged-kv-block-size",
        metavar="TOKENS",
        type=click.IntRange(min=MIN_BLOCK),
        help=f"Tokens of a block of --paged-kv. Unset: {PagedKV().block_size}.",
    )(command)
    return click.option(
        "--paged-kv",
        is_flag=True,
        help="Keep keys and values of requests that are computed together in blocks of one pool, "
        "so that each takes what it fills. Prompts are not kept then.",
    )(command)


def ssd_options(command: Command) -> Command:
    """The ``--ssd-`` options; see :func:`ssd_settings`."""
    for option in (
        click.option(
            "--generation-checkpoint",
            metavar="TOKENS",
            type=click.IntRange(min=1),
            help="Write answers that are greedy or have a seed down in --ssd-cache every so many "
            "tokens, so that the same request goes on there after a crash.",
        ),
        click.option(
            "--ssd-write-budget",
            metavar="GB",
            type=Number(min=0, min_open=True),
            help="Most that is written to --ssd-cache in any hour, in GB. Once half of it is "
            "spent, only prompts that come a second time are written. Unset: no limit.",
        ),
        click.option(
            "--ssd-demote-idle",
            metavar="SECONDS",
            type=Number(min=0),
            help=f"Time without use after which a prompt that is on disk leaves memory; 0 = "
            f"never. Unset: {DEMOTE_IDLE:g}.",
        ),
        click.option(
            "--ssd-cache-verify/--no-ssd-cache-verify",
            default=None,
            help="Compare all that is read from --ssd-cache with its digest, or only the headers. "
            "On unless said.",
        ),
        click.option(
            "--ssd-cache-max",
            metavar="GB",
            type=Number(min=0, min_open=True),
            help="Most that --ssd-cache may hold, in GB (10⁹ bytes); the oldest goes first. Unset: "
            "no limit.",
        ),
        click.option(
            "--ssd-cache",
            metavar="DIR",
            type=Folder(),
            help="Keep prompts in a folder too, where they outlive the server and memory.",
        ),
    ):
        command = option(command)
    return command


def ssd_settings(flags: Mapping[str, Any]) -> SsdFields:
    """The fields of Settings that the flags of :func:`ssd_options` ask for.

    ``kv``, ``paged_kv`` and ``prompt_cache`` are read too: the disk holds what memory held before.
    """
    folder: Path | None = flags["ssd_cache"]
    demote: float | None = flags["ssd_demote_idle"]
    if folder is None:
        for name in (
            "ssd_cache_max",
            "ssd_cache_verify",
            "ssd_demote_idle",
            "ssd_write_budget",
            "generation_checkpoint",
        ):
            if flags[name] is not None:
                option = ("--no-" if flags[name] is False else "--") + name.replace("_", "-")
                raise click.UsageError(f"{option} says nothing without --ssd-cache.")
    elif flags["paged_kv"]:
        raise click.UsageError(
            "--ssd-cache and --paged-kv exclude each other: no prompts are kept."
        )
    elif not flags["prompt_cache"]:
        raise click.UsageError("--ssd-cache needs a prompt cache: --prompt-cache is 0.")
    return SsdFields(
        ssd_cache=folder,
        ssd_cache_max_bytes=decimal_bytes(flags["ssd_cache_max"]),
        ssd_cache_verify=flags["ssd_cache_verify"] is not False,
        ssd_demote_idle=DEMOTE_IDLE if demote is None else demote,
        ssd_write_budget_bytes=decimal_bytes(flags["ssd_write_budget"]),
        generation_checkpoint=flags["generation_checkpoint"] or 0,
    )


def kv_scheme(flags: Mapping[str, Any]) -> KVScheme:
    """The one scheme that the flags of :func:`kv_option` and :func:`paged_options` ask for."""
    scheme: KVScheme = flags["kv"]
    size: int | None = flags["paged_kv_block_size"]
    if not flags["paged_kv"]:
        if size is not None:
            raise click.UsageError("--paged-kv-block-size says nothing without --paged-kv.")
        return scheme
    if not isinstance(scheme, PlainKV):
        raise click.UsageError(
            f"--paged-kv and --kv-quant {name_of(scheme)} exclude each other: "
            "blocks hold keys and values as the model makes them."
        )
    return PagedKV() if size is None else PagedKV(size)


def default_prompt_cache() -> float:
    """GiB for kept prompts: a quarter of the machine's memory, at most 8."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(8.0, round(memory / 4 / GIB, 1))
