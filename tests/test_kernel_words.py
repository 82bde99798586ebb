"""Kernels are named after what they do, so that what MLX compiled once is never another body's."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlx_troupe.runtime.engine import allowing, kernel_words, penalty_kernel, sampling_kernel
from mlx_troupe.runtime.engine.attend_kernel import attend_kernel, join_kernel

pytestmark = pytest.mark.mlx


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What MLX is asked to make, without a GPU."""
    asked: list[dict[str, Any]] = []

    def make(**words: Any) -> dict[str, Any]:
        asked.append(words)
        return words

    for maker in ("cuda_kernel", "metal_kernel"):
        monkeypatch.setattr(mx.fast, maker, make)
    return asked


def test_every_word_of_a_kernel_is_in_its_name(made: list[dict[str, Any]]) -> None:
    """Another body, another header, and the same again."""
    for source, header in (("a", ""), ("b", ""), ("a", "c"), ("a", "")):
        kernel_words.make_kernel("troupe_x", ["in"], ["out"], source, header)
    names = [words["name"] for words in made]
    assert len(set(names[:3])) == 3
    assert names[3] == names[0]
    assert all(name.startswith("troupe_x_") for name in names)


def test_every_kernel_of_ours_is_named_so(made: list[dict[str, Any]]) -> None:
    """Names end in a digest, and no two kernels share one."""
    attend_kernel.__wrapped__(0.125, joined=True)
    attend_kernel.__wrapped__(0.25, joined=True)
    join_kernel.__wrapped__()
    allowing._kernel.__wrapped__("troupe_best", ("tokens",), allowing._BEST)
    sampling_kernel._kernel.__wrapped__()
    penalty_kernel._kernel.__wrapped__()
    names = [words["name"] for words in made]
    assert len(set(names)) == 6
    for words in made:
        digest = words["name"].rpartition("_")[2]
        assert len(digest) == 12
        assert set(digest) <= set("0123456789abcdef")
