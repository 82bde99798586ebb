"""``mlx-troupe doctor``: what this machine offers, and what would make it faster."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...runtime.engine.blas import BlasReport
    from ...runtime.engine.doctor import DoctorReport

Line = tuple[str, str]


@click.command(short_help="Tell what this machine offers, and what would make it faster.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(as_json: bool) -> None:
    """Tell what this machine offers, and what would make it faster.

    Names the device, the MLX build and the BLAS in use, memory, and the folders that files are
    kept in.
    """
    from ...runtime.engine.doctor import inspect

    report = inspect()
    if as_json:
        click.echo(json.dumps(asdict(report), default=str, indent=2))
        return
    lines = list(describe(report))
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


def gib(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**30:.1f} GiB"


def _blas(blas: BlasReport) -> str:
    core = f", {blas.core} kernels" if blas.core else ""
    threads = f", {blas.threads} threads" if blas.threads else ""
    version = f" ({blas.version})" if blas.version else ""
    where = f" {blas.path}" if blas.path else ""
    return f"{blas.kind}{core}{threads}{version}{where}"
