"""Many requests of random shape, cancelled at random moments: nothing of them is left."""

from __future__ import annotations

from pathlib import Path

import pytest
from soak_rig import rest, soak
from tiny import make_checkpoint

from mlx_troupe.actors.system import open_runtime
from mlx_troupe.runtime.settings import Settings
from mlx_troupe.runtime.text.testing import ByteTokenizer


@pytest.mark.mlx
@pytest.mark.parametrize("family", ["llama", "sliding"])
async def test_nothing_is_left_of_requests_of_random_shape(tmp_path: Path, family: str) -> None:
    """Rows, leases, tasks, MLX's active memory and its live arrays are as they were before."""
    model = make_checkpoint(tmp_path / "model", family)
    settings = Settings(model, "tiny", dtype="keep", batch=8, queue=12, prompt_cache_bytes=1 << 20)
    async with open_runtime(settings, tokenizer=ByteTokenizer()) as runtime:
        await runtime.wait_ready()
        await soak(runtime, 30, seed=1)
        before = await rest(runtime)
        ends = await soak(runtime, 70, seed=2)
        assert min(ends["left"], ends["cancelled"], ends["length"]) > 5, ends
        assert await rest(runtime) == before
        assert (before.rows, before.snapshots, before.leases, before.requests) == (0, 0, 0, 0)
