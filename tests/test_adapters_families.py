"""Every family that the project names, with all of its layers adapted, against mlx-lm."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from lora_rig import logits_of, make_mlx_adapter, with_adapter
from ragged_rig import TOLERANCE
from tiny import load_oracle, make_checkpoint, prompt
from tiny_families import FAMILIES

from mlx_troupe.runtime.engine.adapters import Adapters

pytestmark = pytest.mark.mlx


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_of_a_family_can_be_adapted(family: str, tmp_path: Path) -> None:
    """All layers that mlx-lm's tuner adapts: its own bits alone, near them in a batch.

    A row without the adapter keeps the bits that it has in a batch without any.
    """
    checkpoint = make_checkpoint(tmp_path / "model", family)
    folder = make_mlx_adapter(tmp_path / "adapter", checkpoint, keys=None, layers=99)
    model = load_oracle(checkpoint)
    alone = with_adapter(checkpoint, folder)
    adapters = Adapters(model, together=True)
    chain = adapters.chain([adapters.mount("x", folder).revision])
    for length in (1, 40):
        ids = prompt(length)
        wanted, base = logits_of(alone, ids), logits_of(model, ids)
        with adapters.shown([chain]):
            assert bool((logits_of(model, ids) == wanted).all().item())
        assert mx.abs(wanted - base).max().item() > 0.1
        batch = mx.array([ids, ids[::-1], ids])
        plain = model(batch)
        with adapters.shown([chain, (), chain]):
            mixed = model(batch)
        assert bytes(memoryview(mixed[1])) == bytes(memoryview(plain[1]))
        for row in (0, 2):
            assert mx.abs(mixed[row] - wanted).max().item() <= TOLERANCE
