"""The doctor tells what is there, and advises only where something can be gained."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mlx_troupe.runtime.engine import doctor
from mlx_troupe.runtime.engine.blas import BlasReport
from mlx_troupe.runtime.engine.doctor import Folder, advise, inspect

FAST = BlasReport("openblas", threads=8)
SLOW = BlasReport("reference", advice="Install OpenBLAS.")
ROOMY = (Folder("models", Path("/cache"), 1, 100 << 30),)
PLENTY = 64 << 30


@pytest.mark.mlx
def test_this_machine_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every figure that any machine has is there and plausible."""
    monkeypatch.setenv("MLX_TROUPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none" / "hub"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "file").write_bytes(b"x" * 1000)
    (tmp_path / "cache" / "link").symlink_to(tmp_path / "cache" / "file")
    report = inspect()
    assert report.mlx_build in ("cpu", "cuda", "metal")
    assert report.device.startswith("Device(")
    assert report.memory_total is not None
    assert report.memory_total > 1 << 30
    assert report.cores >= 1
    assert (report.gemm_gflops is not None) == (report.mlx_build == "cpu")
    assert [folder.nbytes for folder in report.folders] == [1000, 0]
    assert all(folder.free > 0 for folder in report.folders)
    assert "unknown" not in (report.version, report.mlx_version, report.mlx_lm_version)


def test_a_healthy_machine_gets_no_advice() -> None:
    """Nothing is said for the sake of saying something."""
    assert advise("cpu", FAST, 8, PLENTY, ROOMY, nvidia=False) == []
    assert advise("cuda", SLOW, 8, PLENTY, ROOMY, nvidia=True) == []
    assert advise("metal", BlasReport("accelerate"), 8, None, ROOMY, nvidia=False) == []


def test_an_unused_gpu_comes_first() -> None:
    """The CPU build beside an NVIDIA driver is the largest loss there is."""
    found = advise("cpu", SLOW, 8, PLENTY, ROOMY, nvidia=True)
    assert "cuda" in found[0]
    assert found[1] == "Install OpenBLAS."


def test_idle_cores_little_memory_and_a_full_disk_are_told() -> None:
    """Each with its figure."""
    one_thread = dataclasses.replace(FAST, threads=1)
    tight = (Folder("models", Path("/cache"), 1, 1 << 30),)
    found = advise("cpu", one_thread, 8, 1 << 30, tight, nvidia=False)
    assert len(found) == 3
    assert "one thread of 8 cores" in found[0]
    assert "1.0 GiB of memory" in found[1]
    assert "/cache" in found[2]


def test_a_containers_limit_bounds_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File cache that the kernel would give up counts as available."""
    monkeypatch.setattr(doctor, "_CGROUP", tmp_path)
    monkeypatch.setattr(doctor.sys, "platform", "linux")
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 8388608 kB\nMemAvailable: 6291456 kB\n")
    real = doctor.Path
    monkeypatch.setattr(doctor, "Path", lambda p: meminfo if "meminfo" in str(p) else real(p))
    assert doctor._memory() == (8 << 30, 6 << 30)
    (tmp_path / "memory.max").write_text(str(2 << 30))
    (tmp_path / "memory.current").write_text(str(3 << 29))
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {1 << 29}\n")
    assert doctor._memory() == (2 << 30, 1 << 30)
    (tmp_path / "memory.max").write_text("max\n")
    assert doctor._memory() == (8 << 30, 6 << 30)
