"""What holds for all tests: a fast BLAS in front of MLX's before any of them imports it.

Where several processes share the tests, each has a folder for temporary files of its own: MLX keeps
the kernels there that it compiles on a CPU, and two that wrote the same one would read half of it.
"""

import os
import tempfile
from pathlib import Path

import pytest

from mlx_troupe.runtime.engine.blas import ensure_fast_blas

if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    own = Path(tempfile.gettempdir()) / f"mlx-troupe-tests-{os.getuid()}-{worker}"
    own.mkdir(mode=0o700, exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(own)

ensure_fast_blas()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Shows what passed tests have to say, in whichever process they ran."""
    for report in terminalreporter.stats.get("passed", ()):
        for name, text in report.user_properties:
            if name == "note":
                terminalreporter.write_line(text)
