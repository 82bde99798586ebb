"""Cold, from memory and from the disk after a restart: the same numbers, for every kind of state.

Logits of the next eight tokens, teacher-forced, at lengths around the edges at which anything about
a state changes. ``bench/tiers.py`` goes on to longer ones.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tier_rig import NEXT, THRESHOLD, WINDOW, Tiers, differences, recorded, same, tampered

from mlx_troupe.runtime.plans import FromSnapshot

pytestmark = pytest.mark.mlx

CHUNK = 256
EDGES = {
    "plain": (),
    "affine 4": (),
    "affine 8": (),
    "by layer": (),
    "turbo": (),
    "delayed": (THRESHOLD,),
    "paged": (16,),
    "rotating": (WINDOW,),
    "rotating affine 8": (WINDOW,),
    "mamba": (),
    "hybrid": (),
    "hybrid of lists": (),
}
"""Where layouts change beside capacities of 64 and of 256, which is also the length of a chunk and
of what mlx-lm's caches grow by: a window turns, a block is full, rows are encoded from then on."""


@pytest.mark.parametrize("layout", EDGES)
def test_all_tiers_give_the_same_logits(tmp_path: Path, layout: str) -> None:
    """Memory against disk to the last bit, and so against cold where the passes are alike.

    Behind a state that was cut the pass is another than the cold run's: there it is 1e-3.
    """
    lengths = [edge + by for edge in (*EDGES[layout], 64, CHUNK) for by in (-1, 0, 1)]
    with recorded() as logits:
        results = Tiers(tmp_path, layout, logits, CHUNK).compare(lengths)
    assert list(results.disk) == lengths
    assert not differences(layout, results)


def test_a_single_bit_of_a_state_would_be_noticed(tmp_path: Path) -> None:
    """What is compared depends on the state: one digit of one key is enough."""
    with recorded() as logits:
        tiers = Tiers(tmp_path, "plain", logits, CHUNK)
        device, _ = tiers.open()
        text = tuple(range(2, 41 + NEXT))
        row, _ = device.begin(text[:40])
        cold, kept = device.read(row, text[39:], keep=39)
        state = device.export(kept)
        for changed, alike in ((state, True), (tampered(state), False)):
            row, _ = device.begin(text[:40], FromSnapshot(device.restore(changed), 39))
            found, _ = device.read(row, text[39:])
            assert same(cold, found) == alike
        device.device.close()
