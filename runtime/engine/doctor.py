"""Looks at this machine and says what mlx-troupe runs on, and what would make it faster.

Asks MLX, the BLAS, the system and our cache folders; changes nothing. Runs on the caller's thread
and takes a fraction of a second (one matrix product is timed on a CPU).
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from ..store import paths
from ..store.local import hub_dir
from .blas import BlasReport, ensure_fast_blas, usable_cores

Build: TypeAlias = Literal["cpu", "cuda", "metal"]

_LOW_DISK = 5 << 30
_LOW_MEMORY = 2 << 30
_CGROUP = Path("/sys/fs/cgroup")
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that holds models or kernels. ``nbytes`` is what it takes, ``free`` the disk's."""

    purpose: str
    path: Path
    nbytes: int
    free: int


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """What ``mlx-troupe doctor`` prints. Sizes are bytes; None is unknown.

    Attributes:
        version, python, system: of mlx-troupe, the interpreter and the operating system.
        device: MLX's default device and its own name for it.
        mlx_version, mlx_build: which MLX is installed, and for what.
        mlx_lm_version: which mlx-lm is installed.
        blas: the CPU's matrix library.
        gemm_gflops: measured speed of a 64-row float32 product on a CPU; None on GPUs.
        processor, cores: the processor's name, and how many cores this process may use.
        memory_total, memory_available: system memory, within this container's limit.
        device_memory: memory of the GPU, or what macOS recommends to use at most.
        folders: caches and the free space on their disks.
        advice: what would make it faster or keep it from failing, most useful first.
    """

    version: str
    python: str
    system: str
    device: str
    mlx_version: str
    mlx_build: Build
    mlx_lm_version: str
    blas: BlasReport
    gemm_gflops: float | None
    processor: str
    cores: int
    memory_total: int | None
    memory_available: int | None
    device_memory: int | None
    folders: tuple[Folder, ...]
    advice: tuple[str, ...]


def inspect() -> DoctorReport:
    """Look at everything. Imports MLX, with a fast BLAS put in front of it first."""
    blas = ensure_fast_blas()
    import mlx.core as mx

    info = mx.device_info()
    build = _build(mx)
    total, available = _memory()
    folders = tuple(_folders())
    size = info.get("memory_size" if build == "cuda" else "max_recommended_working_set_size")
    return DoctorReport(
        version=_version("mlx-troupe"),
        python=platform.python_version(),
        system=platform.platform(terse=True),
        device=f"{mx.default_device()}, {info.get('device_name', 'unknown')}",
        mlx_version=_version("mlx"),
        mlx_build=build,
        mlx_lm_version=_version("mlx-lm"),
        blas=blas,
        gemm_gflops=_gemm_gflops() if build == "cpu" else None,
        processor=_processor(),
        cores=usable_cores(),
        memory_total=total,
        memory_available=available,
        device_memory=size if isinstance(size, int) and build != "cpu" else None,
        folders=folders,
        advice=tuple(advise(build, blas, usable_cores(), available, folders)),
    )


def advise(
    build: Build,
    blas: BlasReport,
    cores: int,
    available: int | None,
    folders: tuple[Folder, ...],
    *,
    nvidia: bool | None = None,
) -> list[str]:
    """What to change, from the figures alone. ``nvidia`` None looks for a driver."""
    found: list[str] = []
    has_driver = nvidia_driver() if nvidia is None else nvidia
    if build == "cpu" and has_driver:
        found.append(
            "An NVIDIA driver is present but MLX's CPU build is installed: "
            "pip uninstall mlx-cpu, then pip install 'mlx-troupe[cuda]'."
        )
    if build == "cpu" and blas.advice:
        found.append(blas.advice)
    if build == "cpu" and blas.kind != "reference" and blas.threads == 1 < cores:
        found.append(
            f"{blas.kind} uses one thread of {cores} cores: unset OPENBLAS_NUM_THREADS and "
            "MKL_THREADING_LAYER, or install libopenblas0-pthread."
        )
    if available is not None and available < _LOW_MEMORY:
        found.append(
            f"Only {available / 2**30:.1f} GiB of memory are free: use --dtype keep (quantized "
            "weights as they are) and a smaller prompt cache."
        )
    found += [
        f"Only {folder.free / 2**30:.1f} GiB of disk are left for {folder.purpose} ({folder.path})."
        for folder in folders
        if folder.free < _LOW_DISK
    ]
    return found


def nvidia_driver() -> bool:
    """Whether an NVIDIA driver is loaded on this Linux machine (or WSL's)."""
    return _NVIDIA_DRIVER.exists() or Path("/usr/lib/wsl/lib/libcuda.so.1").exists()


def _build(mx: object) -> Build:
    for name in ("metal", "cuda"):
        backend = getattr(mx, name, None)
        if backend is not None and backend.is_available():
            return "metal" if name == "metal" else "cuda"
    return "cpu"


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _gemm_gflops() -> float:
    """The best of a few 64 x 1024 x 1024 float32 products, in 10⁹ operations a second."""
    import mlx.core as mx

    left, right = mx.ones((64, 1024)), mx.ones((1024, 1024))
    mx.eval(left, right)
    best = float("inf")
    for _ in range(4):
        started = time.perf_counter()
        mx.eval(left @ right)
        best = min(best, time.perf_counter() - started)
    return 2 * 64 * 1024 * 1024 / best / 1e9


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _memory() -> tuple[int | None, int | None]:
    """Total and available memory; on Linux within the limit of this process's cgroup."""
    if sys.platform != "linux":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), None
    lines = Path("/proc/meminfo").read_text().splitlines()
    values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    total, available = values.get("MemTotal"), values.get("MemAvailable")
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no cgroup of its own, or "max"
        return total, available
    room = max(0, limit - used + _reclaimable())
    return min(total or limit, limit), min(available or room, room)


def _reclaimable() -> int:
    """Bytes of file cache that count as used by the cgroup but are given up when needed."""
    try:
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))


def _folders() -> list[Folder]:
    wanted = (("models and downloads", paths.cache_dir()), ("the hub's models", hub_dir()))
    return [_folder(purpose, path) for purpose, path in wanted]


def _folder(purpose: str, path: Path) -> Folder:
    standing = next(folder for folder in (path, *path.parents) if folder.exists())
    return Folder(purpose, path, _tree_size(path), shutil.disk_usage(standing).free)


def _tree_size(folder: Path) -> int:
    """Bytes of the files below ``folder``, links not counted (a hub cache links to its blobs)."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.lstat(os.path.join(root, name))
            except OSError:
                continue
            total += 0 if os.path.islink(os.path.join(root, name)) else status.st_size
    return total
