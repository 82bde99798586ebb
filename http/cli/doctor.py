"""``mlx-troupe doctor``: what this machine offers, and what would make it faster."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ...runtime.budgets import in_gb
from ...runtime.kvschemes import PLAIN_KV, KVScheme
from .options import kv_option

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...runtime.engine.blas import BlasReport
    from ...runtime.engine.doctor import DoctorReport
    from ...runtime.engine.needs import Fit
    from ...runtime.engine.speed import Speed

Line = tuple[str, str]


@click.command(short_help="Tell what this machine offers, and what would make it faster.")
@click.option(
    "--model",
    metavar="MODEL",
    help="Also estimate whether this downloaded model fits, and how fast it decodes; advice only.",
)
@kv_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(model: str | None, kv: KVScheme, as_json: bool) -> None:
    """Tell what this machine offers, and what would make it faster.

    Names the device, the MLX build and the BLAS in use, memory, and the folders that files are
    kept in. --kv-quant is for the estimate of --model.
    """
    if model is None and kv != PLAIN_KV:
        raise click.UsageError("--kv-quant changes the estimate for a model: name it by --model.")
    from ...runtime.engine.doctor import inspect

    report = inspect()
    told, lines = asdict(report), list(describe(report))
    if model is not None:
        fit, speed = estimates_of(model, report, kv)
        told |= {"fit": asdict(fit), "speed": asdict(speed)}
        lines += [*describe_fit(fit), describe_speed(speed)]
    if as_json:
        click.echo(json.dumps(told, default=str, indent=2))
        return
    width = max(len(name) for name, _ in lines) + 2
    for name, text in lines:
        click.echo(f"{name:<{width}}{text}")
    click.echo()
    for advice in report.advice or ("Nothing that would make it faster was found.",):
        click.echo(f"- {advice}" if report.advice else advice)


def describe(report: DoctorReport) -> Iterator[Line]:
    """Name and text of each line; a figure that is not known has none."""
    yield "mlx-troupe", f"{report.version}, Python {report.python}, {report.system}"
    yield "device", report.device
    yield "MLX", f"{report.mlx_version} ({report.mlx_build}), mlx-lm {report.mlx_lm_version}"
    yield "processor", f"{report.processor}, {report.cores} cores"
    if report.mlx_build != "metal":
        yield "BLAS", _blas(report.blas)
    if report.gemm_gflops is not None:
        yield "", f"64-row float32 product: {report.gemm_gflops:.0f} GFLOP/s"
    if report.memory_total is not None:
        free = report.memory_available
        told = "" if free is None else f", {gib(free)} available"
        yield "memory", f"{gib(report.memory_total)}{told}"
    if report.device_memory is not None:
        yield "GPU memory", gib(report.device_memory)
    for folder in report.folders:
        yield folder.purpose, f"{folder.path}: {gib(folder.nbytes)}, {gib(folder.free)} free"


def estimates_of(model: str, report: DoctorReport, kv: KVScheme) -> tuple[Fit, Speed]:
    """What a model that is on this machine would take and give. Raises ModelError."""
    from ...runtime.engine.needs import fit
    from ...runtime.engine.speed import speed_of
    from .models import find_model

    path = find_model(model, offline=True).path
    memory = report.device_memory or report.memory_total or 0
    return fit(path, memory, kv=kv), speed_of(path)


def describe_fit(fit: Fit) -> Iterator[Line]:
    """The estimate in lines; nothing is ever refused for it."""
    yield "weights", f"{in_gb(fit.weights_bytes)} as they would be loaded"
    unpacked = fit.unpacked_bytes_per_token
    beside = f", {unpacked / 1000:,.1f} kB to attend to it" if unpacked else ""
    state = f"{fit.kv_bytes_per_token / 1000:,.1f} kB a token{beside}"
    yield "state", f"{state}; prefill {in_gb(fit.prefill_bytes)}"
    window = "unknown" if fit.context_window is None else f"{fit.context_window:,} tokens"
    if not fit.fits:
        told = f"no: weights and prefill are more than the {in_gb(fit.safe_bytes)} that are safe"
    elif fit.context_tokens is None:
        told = "yes: its state does not grow"
    elif fit.context_window is not None and fit.context_tokens >= fit.context_window:
        told = f"yes, a request that fills its window too, within {in_gb(fit.safe_bytes)}"
    else:
        told = f"one request of {fit.context_tokens:,} tokens within {in_gb(fit.safe_bytes)}"
    yield "fits", f"{told}; context window {window}"
    if fit.expands_weights:
        yield "", "not counted: weights that steps of many rows expand, measured at load"


def describe_speed(speed: Speed) -> Line:
    """The estimate in a line."""
    return "speed", (
        f"about {speed.tokens_per_second:,.0f} tokens a second alone: {in_gb(speed.active_bytes)} "
        f"of weights a token, {speed.bandwidth / 1e9:,.0f} GB/s measured"
    )


def gib(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**30:.1f} GiB"


def _blas(blas: BlasReport) -> str:
    core = f", {blas.core} kernels" if blas.core else ""
    threads = f", {blas.threads} threads" if blas.threads else ""
    version = f" ({blas.version})" if blas.version else ""
    where = f" {blas.path}" if blas.path else ""
    return f"{blas.kind}{core}{threads}{version}{where}"
