"""The BLAS in front of MLX's is a fast one, is chosen for the right processor, and is told truly.

Each case runs in a process of its own: which library wins is settled once, when MLX is loaded.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlx_troupe.runtime.engine import blas
from mlx_troupe.runtime.engine.blas import BlasReport, better_core, set_ptx_cache, usable_cores
from mlx_troupe.runtime.store.paths import ptx_dir

REPORT = """
import dataclasses, json, sys
from mlx_troupe.runtime.engine.blas import ensure_fast_blas
report = ensure_fast_blas()
same = ensure_fast_blas() is report
clean = "mlx" not in sys.modules
"""
TIME = """
import time
import mlx.core as mx
mx.set_default_device(mx.cpu)
left, right = mx.ones((96, 1024)), mx.ones((1024, 1024))
mx.eval(left, right)
best = 1e9
for _ in range(4):
    started = time.perf_counter()
    product = left @ right
    mx.eval(product)
    best = min(best, time.perf_counter() - started)
right_answer = bool((product == 1024).all())
"""
PRINT = "print(json.dumps({k: v for k, v in globals().items() if type(v) in (bool, float)}"
PRINT += " | dataclasses.asdict(report)))"


def child(*parts: str, **environment: str) -> dict[str, Any]:
    """What a fresh interpreter reports after running the parts."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OPENBLAS", "MKL_"))}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([*parts, PRINT])],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


if sys.platform != "darwin":  # macOS has Accelerate, and nothing is put in front of it

    def test_products_are_many_times_faster_than_with_mlx_own_blas() -> None:
        """The library found here really computes MLX's products, and computes them right."""
        slow = child(REPORT, TIME, MLX_TROUPE_BLAS="reference")
        fast = child(REPORT, TIME)
        assert slow["kind"] == "reference"
        assert "libopenblas0-pthread" in slow["advice"]
        assert fast["kind"] in ("openblas", "mkl"), fast["advice"]
        assert Path(fast["path"]).is_file()
        assert fast["threads"] >= 1
        assert fast["right_answer"]
        assert fast["same"]
        assert fast["clean"]
        assert slow["best"] > 3 * fast["best"]

    def test_a_call_after_mlx_was_imported_says_so() -> None:
        """Too late is reported as too late, not as success."""
        report = child("import mlx.core", REPORT)
        assert report["late"]
        assert report["kind"] == "reference"
        assert "before" in report["advice"]

    def test_a_library_loaded_by_someone_else_before_is_recognised() -> None:
        """One put in front by hand or by LD_PRELOAD counts, MLX imported since or not."""
        found = child(REPORT)
        by_hand = f"import ctypes; ctypes.CDLL({found['path']!r}, mode=ctypes.RTLD_GLOBAL)"
        one_thread = {"MKL_INTERFACE_LAYER": "LP64", "MKL_THREADING_LAYER": "SEQUENTIAL"}
        report = child(by_hand, "import mlx.core", REPORT, **one_thread)
        assert report["kind"] == found["kind"]
        assert report["path"] == found["path"]
        assert not report["late"]

    def test_an_unknown_choice_is_told_and_not_obeyed() -> None:
        """A typing error in MLX_TROUPE_BLAS must not silently cost a factor of twenty."""
        report = child(REPORT, MLX_TROUPE_BLAS="openblass")
        assert "openblass" in report["advice"]
        assert report["kind"] == child(REPORT)["kind"]


def test_a_core_type_that_the_user_set_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """OPENBLAS_CORETYPE from outside is obeyed: nothing is loaded again."""
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Prescott")
    monkeypatch.setattr(blas, "cpu_flags", lambda: AVX512)
    report = BlasReport("openblas", core="Prescott")
    assert blas._with_right_core("libopenblas.so.0", ctypes.CDLL(None), report) is report


AVX2 = frozenset({"avx2", "fma"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@pytest.mark.parametrize(
    ("core", "flags", "wanted"),
    [
        ("Prescott", AVX512, "SkylakeX"),
        ("Prescott", AVX2, "Haswell"),
        ("Nehalem", AVX2, "Haswell"),
        ("Prescott", frozenset({"sse3"}), None),
        ("Haswell", AVX512, None),
        ("Zen", AVX512, None),
        ("SkylakeX", AVX512, None),
        ("Cooperlake", AVX512, None),
        ("neoversen1", frozenset[str](), None),
    ],
)
def test_only_needlessly_old_kernels_are_replaced(
    core: str, flags: frozenset[str], wanted: str | None
) -> None:
    """A newer processor taken for a Prescott gets its kernels; a right choice is left alone."""
    assert better_core(core, flags) == wanted


def test_the_cgroup_quota_bounds_the_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container of one and a half cores on a large host gets at most two threads."""
    real = blas.Path
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(blas, "Path", lambda p: quota if "cpu.max" in str(p) else real(p))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    quota.write_text("150000 100000\n")
    assert usable_cores() == 2
    quota.write_text("max 100000\n")
    assert usable_cores() == 64


def test_mkl_is_found_beside_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``pip install mkl`` puts its library under sys.prefix; the newest one is taken."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    (tmp_path / "lib").mkdir()
    for version in (2, 3):
        (tmp_path / "lib" / f"libmkl_rt.so.{version}").touch()
    assert blas._find_mkl() == tmp_path / "lib" / "libmkl_rt.so.3"


def test_a_threading_layer_that_cannot_be_loaded_is_not_chosen(tmp_path: Path) -> None:
    """MKL would end the process; one thread is chosen instead."""
    assert blas._threading_layer("INTEL", tmp_path) == "SEQUENTIAL"
    assert blas._threading_layer("NONSENSE", tmp_path) == "SEQUENTIAL"


def test_macos_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate is there already."""
    monkeypatch.setattr(sys, "platform", "darwin")
    assert blas.ensure_fast_blas.__wrapped__() == BlasReport("accelerate")


def test_the_kernel_cache_folder_is_set_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours is used where nobody set one; the user's own stays."""
    monkeypatch.delenv("MLX_PTX_CACHE_DIR", raising=False)
    assert set_ptx_cache(tmp_path / "ptx") == tmp_path / "ptx"
    assert os.environ["MLX_PTX_CACHE_DIR"] == str(tmp_path / "ptx")
    assert (tmp_path / "ptx").is_dir()
    assert set_ptx_cache(tmp_path / "other") == tmp_path / "ptx"


@pytest.mark.mlx
def test_the_engine_keeps_kernels_beside_the_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing the engine names our folder; else MLX compiles them anew after each reboot."""
    from mlx_troupe.actors.loading import import_engine

    monkeypatch.setenv("MLX_PTX_CACHE_DIR", "")
    monkeypatch.setenv("MLX_TROUPE_CACHE", str(tmp_path))
    import_engine()
    assert os.environ["MLX_PTX_CACHE_DIR"] == str(ptx_dir())


@pytest.mark.mlx
def test_a_cache_folder_that_cannot_be_made_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of the user's own needs none; MLX then keeps its kernels where it likes."""
    from mlx_troupe.actors.loading import import_engine

    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", "")
    monkeypatch.setenv("MLX_TROUPE_CACHE", str(tmp_path / "file"))
    import_engine()
    assert not os.environ["MLX_PTX_CACHE_DIR"]
