"""Masks that a device holds already: whatever was asked for before, a row gets its own."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_troupe.runtime.engine import allowing
from mlx_troupe.runtime.engine.allowing import Palette, restricted
from mlx_troupe.runtime.engine.masks import ALL, WORD, Masks

WIDTH = 5

rows = st.integers(0, 40).map(
    lambda seed: np.random.default_rng(seed).integers(0, ALL, WIDTH, dtype=np.uint32)
)
batches = st.lists(st.lists(rows, min_size=1, max_size=6).map(np.stack), max_size=12)


def found(palette: Palette, words: npt.NDArray[np.uint32]) -> None:
    """What the palette gives is what was asked for, in the order of the rows."""
    chosen = palette.find(Masks(words, {}))
    assert chosen.table.shape[0] >= len(words)
    assert np.array_equal(np.array(chosen.table[chosen.places]), words)


@given(batches)
def test_rows_find_their_masks_whatever_came_before(
    asked: list[npt.NDArray[np.uint32]],
) -> None:
    """With room for few, so that it begins anew now and then; the vocabulary may change."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allowing, "MOST", 9)
        palette = Palette()
        for words in asked:
            found(palette, words)
            found(palette, words[:, : WIDTH - len(words) % 2])
            found(palette, words[::-1])


def test_masks_with_the_same_key_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one batch and in one after the other."""
    monkeypatch.setattr(Masks, "__post_init__", lambda self: _set_keys(self, 7))
    palette = Palette()
    first = np.arange(3 * WIDTH, dtype=np.uint32).reshape(3, WIDTH)
    for words in (first, first[1:], first + 1, first):
        found(palette, words)


def _set_keys(masks: Masks, key: int) -> None:
    object.__setattr__(masks, "keys", [key] * len(masks.words))


def test_an_error_on_the_way_leaves_nothing_half_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not sent is not taken to be there."""
    palette = Palette()
    words = np.arange(2 * WIDTH, dtype=np.uint32).reshape(2, WIDTH)
    found(palette, words[:1])
    with monkeypatch.context() as patch:
        patch.setattr(allowing.np, "frombuffer", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            palette.find(Masks(words, {}))
    found(palette, words)


def test_a_mask_that_the_device_holds_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until everything is forgotten."""
    sent: list[int] = []
    take = np.frombuffer

    def note(data: bytes, dtype: type) -> npt.NDArray[np.uint32]:
        sent.append(len(data) // 4 // WIDTH)
        return take(data, dtype=dtype)

    monkeypatch.setattr(allowing.np, "frombuffer", note)
    words = np.arange(4 * WIDTH, dtype=np.uint32).reshape(4, WIDTH)
    palette = Palette()
    for asked in (words[:2], words[[1, 0, 1]], words):
        found(palette, asked)
    assert sent == [2, 2]
    palette.forget()
    found(palette, words)
    assert sent == [2, 2, 4]


def test_forbidden_tokens_become_infinitely_unlikely() -> None:
    """The others keep their logits, in the vocabulary's last word too."""
    size = 2 * WORD + 3
    words = np.array([[ALL, 0, 5], [1 << 31, ALL, ALL]], dtype=np.uint32)
    logits = mx.random.normal((2, size), key=mx.random.key(1))
    got = np.array(restricted(logits, Masks(words, {}), Palette()))
    allowed = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :size] == 1
    assert np.array_equal(got, np.where(allowed, np.array(logits), -np.inf))
