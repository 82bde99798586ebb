"""A process that has served a model ends with status 0, however it used the runtime."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tiny import make_checkpoint

BLOCKING = """
import sys
from pathlib import Path
from mlx_troupe.actors.blocking import open_blocking_runtime
from mlx_troupe.runtime.requests import GenerationRequest, TokenPrompt
from mlx_troupe.runtime.settings import Settings
from mlx_troupe.runtime.text.testing import ByteTokenizer

settings = Settings(Path(sys.argv[1]), "tiny")
with open_blocking_runtime(settings, tokenizer=ByteTokenizer) as runtime:
    events = list(runtime.generate(GenerationRequest(TokenPrompt((1, 2, 3)), max_tokens=4)))
print(type(events[-1]).__name__)
"""

ASYNC = """
import sys, trio
from pathlib import Path
from mlx_troupe.actors.system import open_runtime
from mlx_troupe.runtime.settings import Settings
from mlx_troupe.runtime.text.testing import ByteTokenizer

async def main():
    settings = Settings(Path(sys.argv[1]), "tiny")
    for _ in range(2):
        async with open_runtime(settings, tokenizer=ByteTokenizer) as runtime:
            await runtime.wait_ready()

trio.run(main)
print("Finished")
"""


@pytest.mark.mlx
@pytest.mark.parametrize("script", [BLOCKING, ASYNC], ids=["blocking", "async"])
def test_a_process_that_served_a_model_exits_cleanly(tmp_path: Path, script: str) -> None:
    """No abort in MLX's thread-local state while the interpreter ends; tried twice."""
    make_checkpoint(tmp_path)
    for _ in range(2):
        ended = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (ended.returncode, ended.stdout.strip()) == (0, "Finished"), ended.stderr
