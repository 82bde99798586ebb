"""Quantized modules that expand their weights for many rows, without a GPU to be faster on."""

from __future__ import annotations

import math

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_troupe.runtime.engine import expanding
from mlx_troupe.runtime.engine.expanding import (
    Expanding,
    ExpandingEmbedding,
    ExpandingLinear,
    expand_for_many,
    faster_from,
)

pytestmark = pytest.mark.mlx


def quantized(*, bias: bool = True) -> list[nn.Module]:
    """A linear layer and an embedding, 4 bit."""
    mx.random.seed(3)
    linear = nn.QuantizedLinear.from_linear(nn.Linear(128, 96, bias=bias), 64, 4)
    return [linear, nn.QuantizedEmbedding.from_embedding(nn.Embedding(96, 128), 64, 4)]


@pytest.mark.parametrize("bias", [True, False])
def test_many_rows_get_what_few_rows_get(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of expanded weights are those of quantized ones; below the figure MLX's own run."""
    linear, embedding = quantized(bias=bias)
    x = mx.random.normal((6, 1, 128))
    expected = linear(x), embedding.as_linear(x)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(expanding, "faster_from", lambda _: 4)
    made = expand_for_many([linear, embedding, nn.Linear(4, 4)])
    assert made.many == 4
    # One weight at least, while it is multiplied with; MLX may copy both for its product.
    assert 96 * 128 * 4 <= made.nbytes <= 5 * 96 * 128 * 4
    assert isinstance(linear, ExpandingLinear)
    assert isinstance(embedding, ExpandingEmbedding)
    expansions: list[nn.Module] = []
    expand = expanding.expanded

    def note(module: nn.Module) -> mx.array:
        expansions.append(module)
        return expand(module)

    monkeypatch.setattr(expanding, "expanded", note)
    got = linear(x), embedding.as_linear(x)
    assert expansions == [linear, embedding]
    for ours, theirs in zip(got, expected, strict=True):
        assert mx.abs(ours - theirs).max().item() < 1e-5
    few = linear(x[:3]), embedding.as_linear(x[:3])
    assert len(expansions) == 2
    assert all(mx.array_equal(a, b[:3]) for a, b in zip(few, expected, strict=True))


def test_without_cuda_nothing_is_changed() -> None:
    """A CPU multiplies quantized weights as they are."""
    modules = quantized()
    assert expand_for_many(modules) == Expanding(math.inf, 0)
    assert [type(module) for module in modules] == [nn.QuantizedLinear, nn.QuantizedEmbedding]


def test_the_figure_is_the_least_from_which_expanding_always_wins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A win at few rows counts for nothing where more rows lose."""
    slow_at = {4: False, 8: True, 16: False, 32: False, 64: False}
    rows = iter(sorted(slow_at, reverse=True))
    seconds: list[float] = []

    def told(_: object) -> float:
        if not seconds:
            # The expanded product is timed first, then MLX's own.
            seconds.extend([2.0, 1.0] if slow_at[next(rows)] else [1.0, 2.0])
        return seconds.pop(0)

    monkeypatch.setattr(expanding, "_seconds", told)
    assert faster_from(quantized()[0]) == 16
