"""The faster gate of batched rows."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models import activations as mlx_lm_activations
from mlx_lm.models import llama, switch_layers
from tiny import load_oracle, make_checkpoint

from mlx_troupe.runtime.engine.activations import install_swiglu, swiglu

pytestmark = pytest.mark.mlx


def test_several_rows_agree_with_mlx_lm() -> None:
    """To float32's last digits, at extremes too."""
    gate = mx.random.normal((4, 3, 64), key=mx.random.key(1)) * 10
    gate[0, 0, :4] = mx.array([-300.0, 300.0, 0.0, -88.0])
    x = mx.random.normal((4, 3, 64), key=mx.random.key(2))
    expected = mlx_lm_activations.swiglu(gate, x)
    assert mx.allclose(swiglu(gate, x), expected, rtol=1e-5, atol=1e-6).item()


@pytest.mark.parametrize("shape", [(1, 5, 64), (1, 1, 64), (7, 64)])
def test_a_lone_row_keeps_its_bits(shape: tuple[int, ...]) -> None:
    """One row, or something that is not rows, goes to mlx-lm's own function."""
    gate, x = mx.random.normal(shape), mx.random.normal(shape)
    assert mx.array_equal(swiglu(gate, x), mlx_lm_activations.swiglu(gate, x)).item()


def test_half_precision_is_left_alone() -> None:
    """Powers in half precision would lose digits."""
    gate, x = mx.random.normal((2, 3, 8)).astype(mx.bfloat16), mx.ones((2, 3, 8), mx.bfloat16)
    assert mx.array_equal(swiglu(gate, x), mlx_lm_activations.swiglu(gate, x)).item()


def test_installing_reaches_models_and_spares_experts(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Models get ours; expert layers, whose first axis is tokens, keep mlx-lm's."""
    load_oracle(make_checkpoint(tmp_path_factory.mktemp("m")))
    install_swiglu()
    install_swiglu()
    assert llama.swiglu is swiglu
    assert mlx_lm_activations.swiglu is not swiglu
    assert switch_layers.swiglu is mlx_lm_activations.swiglu
