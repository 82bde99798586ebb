"""Puts a fast BLAS in front of MLX's own on Linux CPUs, and says which one that is.

MLX's Linux CPU wheel brings the reference BLAS, whose GEMM is 20 to 60 times slower than a tuned
one. A library loaded with ``RTLD_GLOBAL`` *before* ``import mlx`` wins the symbol lookup, so this
module imports no MLX and must run first, on the main thread, once per process.

Owns the choice of library and two environment variables read by MKL and OpenBLAS at load. Knows
nothing of models or rows. macOS has Accelerate; on CUDA the call is harmless.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import math
import os
import platform
import sys
from _ctypes import dlclose
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

BlasKind: TypeAlias = Literal["openblas", "mkl", "reference", "accelerate"]

# Fedora's plain libopenblas is single-threaded, its "p" build is the pthread one.
_OPENBLAS_NAMES = ("libopenblasp.so.0", "libopenblas.so.0", "libopenblas.so")
_MODERN_CORES = frozenset(
    {"haswell", "zen", "excavator", "skylakex", "cooperlake", "sapphirerapids"}
)
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
_LAYER_LIBRARIES = {"TBB": "libtbb.so.12", "INTEL": "libiomp5.so", "GNU": "libgomp.so.1"}
_MKL_BRANCHES = {4: "SSE2", 8: "SSE4.2", 9: "AVX", 10: "AVX2", 12: "AVX512", 14: "AVX512_E1"}


@dataclass(frozen=True, slots=True)
class BlasReport:
    """Which BLAS MLX's CPU backend uses.

    Attributes:
        kind: the library; ``"reference"`` is the slow one that MLX brings.
        path: file that was loaded, or "" when nothing was.
        version: the library's own build description.
        core: the processor family that its kernels were chosen for, "" if unknown.
        threads: most threads that one call uses; 0 if unknown.
        advice: what would make it faster, in words for a person; "" when nothing would.
        late: MLX was imported before, so the choice could not take effect.
    """

    kind: BlasKind
    path: str = ""
    version: str = ""
    core: str = ""
    threads: int = 0
    advice: str = ""
    late: bool = False


@functools.cache
def ensure_fast_blas() -> BlasReport:
    """Load the best BLAS there is in front of MLX's; later calls return the first report.

    ``MLX_TROUPE_BLAS`` may name one of ``openblas``, ``mkl`` and ``reference`` instead.
    """
    if sys.platform == "darwin":
        return BlasReport("accelerate")
    preloaded = _preloaded(ctypes.CDLL(None))
    if preloaded is not None:
        return preloaded
    if "mlx.core" in sys.modules:
        advice = "MLX was imported before a fast BLAS could be loaded; import mlx_troupe first."
        return BlasReport("reference", advice=advice, late=True)
    return _choose(os.environ.get("MLX_TROUPE_BLAS", ""))


def set_ptx_cache(folder: Path) -> Path:
    """Let MLX's CUDA build keep compiled kernels in ``folder``; returns the folder in force.

    A ``MLX_PTX_CACHE_DIR`` that is already set wins. Call before ``import mlx``.
    """
    chosen = os.environ.get("MLX_PTX_CACHE_DIR")
    if chosen:
        return Path(chosen)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ["MLX_PTX_CACHE_DIR"] = str(folder)
    return folder


def _choose(wanted: str) -> BlasReport:
    if wanted not in ("", "openblas", "mkl", "reference"):
        known = "openblas, mkl or reference"
        return replace(_choose(""), advice=f"MLX_TROUPE_BLAS={wanted} is unknown; use {known}.")
    found = None
    # MKL first: its products of a few rows, which is what decoding is, take half the time.
    if wanted in ("", "mkl"):
        found = _load_mkl()
    if found is None and wanted in ("", "openblas"):
        found = _load_openblas()
    return found or BlasReport("reference", advice=_install_advice())


def _install_advice() -> str:
    gain = "matrix products would run 20 to 60 times faster"
    if platform.machine() in ("x86_64", "AMD64"):
        return f"Install libopenblas0-pthread (apt) or run 'pip install mkl': {gain}."
    return f"Install OpenBLAS (Debian: apt install libopenblas0-pthread): {gain}."


def _load_openblas() -> BlasReport | None:
    for name in _OPENBLAS_NAMES:
        library = _open(name)
        report = library and _describe_openblas(library)
        if library and report:
            return _within_quota(_with_right_core(name, library, report))
    return None


def _within_quota(report: BlasReport) -> BlasReport:
    """Use no more threads than the container may run at once; more would only wait in turn."""
    cores = usable_cores()
    if report.threads <= cores or "OPENBLAS_NUM_THREADS" in os.environ:
        return report
    ctypes.CDLL(report.path or None).openblas_set_num_threads(cores)
    return replace(report, threads=cores)


def usable_cores() -> int:
    """Cores that this process may keep busy: its affinity, and its cgroup's quota rounded up."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no cgroup, or "max"
        return cores


def _open(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return None


def _preloaded(process: ctypes.CDLL) -> BlasReport | None:
    """The library that somebody put in front before (``LD_PRELOAD``, or by hand), if any."""
    if hasattr(process, "mkl_get_version_string"):
        return _describe_mkl(process, Path(_mapped_path("libmkl_rt")))
    report = _describe_openblas(process)
    core = better_core(report.core, cpu_flags()) if report else None
    return replace(report, advice=_core_advice(core)) if report and core else report


def _core_advice(core: str) -> str:
    return f"Start with OPENBLAS_CORETYPE={core}: OpenBLAS uses kernels of an old processor."


def _describe_openblas(library: ctypes.CDLL) -> BlasReport | None:
    """The report of a loaded OpenBLAS with standard symbol names, or None if it is not one."""
    if not hasattr(library, "openblas_get_config") or not hasattr(library, "cblas_sgemm"):
        return None
    return BlasReport(
        "openblas",
        path=_mapped_path("libopenblas"),
        version=_text(library, "openblas_get_config"),
        core=_text(library, "openblas_get_corename"),
        threads=int(library.openblas_get_num_threads()),
    )


def _text(library: ctypes.CDLL, function: str) -> str:
    call = getattr(library, function)
    call.restype = ctypes.c_char_p
    value: bytes | None = call()
    return (value or b"").decode().strip()


def _with_right_core(name: str, library: ctypes.CDLL, report: BlasReport) -> BlasReport:
    """Load OpenBLAS again for the right processor where it did not recognise a newer one.

    A build older than the processor falls back to kernels of 2004 ("Prescott"): four times
    slower. It reads ``OPENBLAS_CORETYPE`` only while it is loaded.
    """
    core = better_core(report.core, cpu_flags())
    if core is None or "OPENBLAS_CORETYPE" in os.environ:
        return report
    os.environ["OPENBLAS_CORETYPE"] = core
    dlclose(library._handle)
    again = _open(name)
    fixed = again and _describe_openblas(again)
    if fixed and fixed.core.lower() == core.lower():
        return fixed
    return replace(fixed or report, advice=_core_advice(core))


def better_core(core: str, flags: frozenset[str]) -> str | None:
    """The ``OPENBLAS_CORETYPE`` for a processor with ``flags`` if ``core`` is needlessly old."""
    if core.lower() in _MODERN_CORES or not {"avx2", "fma"} <= flags:
        return None
    return "SkylakeX" if flags >= _AVX512 else "Haswell"


def cpu_flags() -> frozenset[str]:
    """Feature flags of the first x86 processor as Linux names them; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def _load_mkl() -> BlasReport | None:
    path = _find_mkl()
    if path is None:
        return None
    os.environ.setdefault("MKL_INTERFACE_LAYER", "LP64")
    wanted = os.environ.get("MKL_THREADING_LAYER", "TBB").upper()
    os.environ["MKL_THREADING_LAYER"] = _threading_layer(wanted, path.parent)
    library = _open(str(path))
    return _describe_mkl(library, path) if library else None


def _threading_layer(wanted: str, folder: Path) -> str:
    """``wanted`` where its library can be loaded, else one thread.

    MKL ends the process when the library of its threading layer cannot be found, hence it is
    loaded here first. TBB is the default since the OpenMP layers spin at barriers and stall for
    milliseconds when the machine is busy.
    """
    name = _LAYER_LIBRARIES.get(wanted)
    found = name and (_open(str(folder / name)) or _open(name))
    return wanted if found else "SEQUENTIAL"


def _find_mkl() -> Path | None:
    inside = sorted(Path(sys.prefix, "lib").glob("libmkl_rt.so.*"))
    if inside:
        return inside[-1]
    try:
        files = importlib.metadata.files("mkl") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in files if file.name.startswith("libmkl_rt.so")]
    return next((path.resolve() for path in found if path.exists()), None)


def _describe_mkl(library: ctypes.CDLL, path: Path) -> BlasReport:
    buffer = ctypes.create_string_buffer(256)
    library.mkl_get_version_string(buffer, len(buffer))
    branch = int(library.mkl_cbwr_get_auto_branch())
    layer = os.environ.get("MKL_THREADING_LAYER", "default layer")
    return BlasReport(
        "mkl",
        path=str(path),
        version=f"{buffer.value.decode(errors='replace').strip()} [{layer}]",
        core=_MKL_BRANCHES.get(branch, str(branch)),
        threads=int(library.mkl_get_max_threads()),
    )


def _mapped_path(part: str) -> str:
    """The first mapped file of this process whose name contains ``part``; "" if none."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return ""
    paths = (line.split(maxsplit=5)[5] for line in lines if line.count("/"))
    return next((path for path in paths if part in Path(path).name), "")
