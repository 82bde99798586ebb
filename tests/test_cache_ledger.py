"""The ledger of the prompt cache: every byte has one owner, and at rest the books agree."""

from __future__ import annotations

from typing import Any

import trio
import trio.testing
from company import ask, company, run

from mlx_troupe.actors.ledger import ledger
from mlx_troupe.actors.system import Runtime
from mlx_troupe.runtime.device import DeviceStats
from mlx_troupe.runtime.model_info import ModelInfo
from mlx_troupe.runtime.plans import SnapshotId
from mlx_troupe.runtime.prefix.index import PrefixCore


def books(runtime: Runtime) -> dict[str, Any]:
    """The ledger as clients see it."""
    cache: Any = runtime.stats()["prompt_cache"]
    return dict(cache["ledger"])


async def test_the_index_and_the_device_agree_at_rest(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """After a hundred prompts through a small cache both count the same bytes, under the cap."""
    async with company(prompt_cache_bytes=300) as (runtime, device):
        for number in range(100):
            await run(runtime, ask(*range(number, number + 50)))
        await runtime.cast.scheduler.copied()
        await trio.sleep(10)
        told = books(runtime)
        held = sum(map(len, device.snapshots.values()))
        assert told["indexed_bytes"] == told["states_bytes"] == held
        assert 0 < held <= told["most_states_bytes"]
        assert told["lent_only_bytes"] == told["rows_bytes"] == 0
        assert told["states"] == len(device.snapshots)
        await runtime.clear_cache()
        await trio.sleep(10)
        await run(runtime, ask(5, max_tokens=1))
        assert books(runtime)["indexed_bytes"] == 0


def test_a_state_that_is_only_lent_is_told_apart() -> None:
    """Replaced while somebody reads it, a state counts, but not as one that can be found."""
    core = PrefixCore(100)
    core.put((1, 2), "m", SnapshotId(1), 7, kind="final", trim_window=None)
    hit = core.lookup((1, 2, 3), "m", trim_window=None)
    core.put((1, 2, 3), "m", SnapshotId(2), 9, kind="final", trim_window=None)
    model = ModelInfo("m", 10, 10, frozenset(), weights_bytes=1000)
    device = DeviceStats(active_bytes=1500, cache_bytes=40, kv_bytes=30, snapshot_bytes=16)
    told = ledger(device, core.stats(), model)
    assert (told["indexed_bytes"], told["lent_only_bytes"], told["states_bytes"]) == (9, 7, 16)
    assert (told["unaccounted_bytes"], told["free_buffers_bytes"]) == (1500 - 1046, 40)
    assert hit is not None
    core.end_lease(hit.lease)
    assert ledger(device, core.stats(), None)["lent_only_bytes"] == 0
