"""The rotary embedding that batched rows share, against MLX's own."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from tiny import load_oracle, make_checkpoint

from mlx_troupe.runtime.engine.positions import RowsRoPE, Tables, install_rope

pytestmark = pytest.mark.mlx


def rows_rope(like: nn.RoPE) -> RowsRoPE:
    return RowsRoPE(like, Tables(like.dims, like.base, like.scale))


@pytest.mark.parametrize("columns", [1, 5])
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("base", [1e4, 1e5, 5e5])
def test_rows_are_turned_as_by_mlx(base: float, scale: float, columns: int) -> None:
    """Every row by its own offset, whatever the base, the scale and the number of columns."""
    plain = nn.RoPE(16, base=base, scale=scale)
    shared = rows_rope(plain)
    for offsets in ([0, 7, 300], [1, 8, 301], [4000, 2, 0]):
        at = mx.array(offsets, dtype=mx.int32)
        for heads in (4, 2):
            x = mx.random.normal((3, columns, heads, 16)).transpose(0, 2, 1, 3)
            assert mx.allclose(shared(x, at), plain(x, at), rtol=1e-6, atol=1e-6).item()


def test_tables_follow_the_step() -> None:
    """New offsets or another number of columns never meet the tables of the step before."""
    plain = nn.RoPE(16)
    shared = rows_rope(plain)
    first, second = mx.array([3, 4]), mx.array([5, 9])
    for at, columns in ((first, 1), (first, 4), (second, 4), (second, 1), (first, 1)):
        x = mx.random.normal((2, 2, columns, 16))
        assert mx.allclose(shared(x, at), plain(x, at), rtol=1e-6, atol=1e-6).item()


def test_a_lone_row_keeps_the_bits_of_mlx() -> None:
    """Integer offsets, half precision and partly turned heads go to mlx's own function."""
    plain = nn.RoPE(16)
    shared = rows_rope(plain)
    x, at = mx.random.normal((2, 2, 3, 16)), mx.array([3, 40])
    assert mx.array_equal(shared(x, 7), plain(x, 7)).item()
    assert mx.array_equal(shared(x), plain(x)).item()
    half = x.astype(mx.float16)
    assert mx.array_equal(shared(half, at), plain(half, at)).item()
    wide = mx.random.normal((2, 2, 3, 24))
    assert mx.array_equal(shared(wide, at), plain(wide, at)).item()


def test_only_plain_modules_are_replaced(tmp_path: object) -> None:
    """Layers of one kind share their tables; other ropes stay as they are."""
    model = load_oracle(make_checkpoint(tmp_path / "plain"))  # type: ignore[operator]
    install_rope(model)
    install_rope(model)
    ropes = [layer.self_attn.rope for layer in model.layers]
    assert all(type(rope) is RowsRoPE for rope in ropes)
    assert len({id(rope.tables) for rope in ropes}) == 1
    path = make_checkpoint(tmp_path / "traditional", rope_traditional=True)  # type: ignore[operator]
    other = load_oracle(path)
    install_rope(other)
    assert all(type(layer.self_attn.rope) is nn.RoPE for layer in other.layers)
