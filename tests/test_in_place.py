"""Replayed steps that write in place, with the kernel's hidden writes made by hand on a CPU.

The kernel stand-in attends to keys and values as they will be, and the test puts the new ones into
the live buffers' memory once a step is computed, as the GPU does: whatever shares that memory, or
is read too late, then changes.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from ragged_rig import Replayed, Troupe, model_named, solo_logits, solo_prefill
from tiny import prompt

from mlx_troupe.runtime.engine import compiled, layouts, lone
from mlx_troupe.runtime.engine.batch import CannotTrim
from mlx_troupe.runtime.engine.snapshots import arrays_of
from mlx_troupe.runtime.plans import RowId

pytestmark = pytest.mark.mlx

LENGTHS = (0, 1, 3, 17, 60, 62, 63, 64, 126)


class Kernels:
    """In the place of ``kernels``: what the kernel would have written waits to be put there."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Any, Any, Any]] = []
        self.writes = 0

    def fits(self, queries: Any, *_: Any) -> bool:
        """Every step of one column."""
        return bool(queries.shape[2] == 1)

    def ragged_attention(
        self,
        queries: Any,
        keys: Any,
        values: Any,
        offsets: Any,
        scale: float,
        ring: int | None,
        window: int | None,
        own: Any,
    ) -> Any:
        """The same, of buffers that have the new tokens already."""
        assert ring is None
        where = offsets[:, None, None, None]
        held = [mx.put_along_axis(x, where, y, 2) for x, y in zip((keys, values), own, strict=True)]
        places = mx.arange(keys.shape[2])
        mask = places <= offsets[:, None]
        if window is not None:
            mask = mask & (places > offsets[:, None] - window)
        self.waiting += [(keys, own[0], offsets), (values, own[1], offsets)]
        return mx.fast.scaled_dot_product_attention(
            queries, held[0], held[1], scale=scale, mask=mask[:, None, None]
        )

    def write(self) -> None:
        """Put the new tokens into their slots, behind MLX's back."""
        for buffer, new, offsets in self.waiting:
            mx.eval(buffer, new, offsets)
            view: Any = np.array(buffer, copy=False)
            assert view.flags.c_contiguous, "a kernel would write into a copy"
            address = view.__array_interface__["data"][0]
            floats = (ctypes.c_float * view.size).from_address(address)
            memory = np.ctypeslib.as_array(floats).reshape(view.shape)
            for row, place in enumerate(np.array(offsets)):
                memory[row, :, place] = np.array(new)[row, :, 0]
            self.writes += 1
        self.waiting.clear()


class InPlace(Replayed):
    """Replayed steps, each followed by its hidden writes."""

    kernels: Kernels

    def forward(self, columns: int) -> mx.array:
        """See :class:`Troupe`; several columns are no replayed step."""
        if columns > 1:
            return Troupe.forward(self, columns)
        self.batch.begin(1)
        tokens = [self.texts[row][self.batch.length(row)] for row in self.batch.rows]
        logits = self.compiled.logits(mx.array(tokens), [()] * len(tokens))
        if logits is None:
            return Troupe.forward(self, columns)
        mx.eval(logits)
        self.kernels.write()
        return logits


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """The stand-in, and steps that are built anew each time, so that it sees real arrays."""

    class Untraced:
        def __getattr__(self, name: str) -> Any:
            return (lambda step: step) if name == "compile" else getattr(mx, name)

    made = Kernels()
    monkeypatch.setattr(layouts, "kernels", made)
    monkeypatch.setattr(compiled, "mx", Untraced())
    yield made
    made.waiting.clear()


class Story:
    """Rows come, leave, move, are exported and come back; all arrays that are out are watched."""

    def __init__(self, model: Any, kernels: Kernels, seed: int) -> None:
        self.model = model
        self.troupe = InPlace(model)
        self.troupe.kernels = kernels
        self.draw = random.Random(seed)
        self.watched: list[tuple[Any, Any]] = []
        self.rows = 0

    def go_on(self) -> None:
        """One event and one step; every row's logits are compared."""
        troupe, batch = self.troupe, self.troupe.batch
        for row in [r for r in batch.rows if batch.length(r) > len(troupe.texts[r]) - 5]:
            troupe.drop(int(row))
        rows = list(batch.rows)
        event = self.draw.random()
        if not rows or (event < 0.3 and len(rows) < 7):
            self.join()
        elif event < 0.4:
            troupe.drop(int(self.draw.choice(rows)), poisoned=self.draw.random() < 0.5)
        elif event < 0.65:
            self.export(self.draw.choice(rows))
        elif event < 0.7:
            nursery = Troupe(self.model)
            nursery.add(self.rows, self.draw.choice((0, 5, 63)), steps=40)
            nursery.step(self.draw.choice((1, 2)))
            troupe.adopt(nursery, self.rows)
            self.rows += 1
        if batch.rows:
            troupe.step(1 if self.draw.random() < 0.85 else 3)

    def join(self) -> None:
        """A new row, whose caches stay what they are."""
        row, length = RowId(self.rows), self.draw.choice(LENGTHS)
        self.rows += 1
        text = prompt(length + 40, seed=int(row))
        self.troupe.texts[row], self.troupe.starts[row] = text, length
        self.troupe.expected[row] = solo_logits(self.model, text, length)
        caches = solo_prefill(self.model, text[:length])
        if length:
            self.watch(caches)
        self.troupe.batch.join(row, caches, length)

    def export(self, row: RowId) -> None:
        """All of a row or a little less; it may leave and come back with that."""
        batch = self.troupe.batch
        length = batch.length(row)
        count = max(1, length - self.draw.choice((0, 0, 1, 3)))
        if not length:
            return
        with suppress(CannotTrim):
            caches = batch.export(row, count)
            if count == length and self.draw.random() < 0.6:
                batch.leave(row)
                batch.join(row, caches, length)
            self.watch(caches)

    def watch(self, caches: list[Any]) -> None:
        """Remember what these arrays hold."""
        arrays = arrays_of(caches)
        mx.eval(arrays)
        self.watched.append((arrays, [np.array(array).copy() for array in arrays]))

    def changed(self) -> int:
        """How many of all watched arrays are no more what they were."""
        pairs = [pair for arrays, was in self.watched for pair in zip(arrays, was, strict=True)]
        return sum(not np.array_equal(np.array(array), known) for array, known in pairs)


@pytest.mark.parametrize(("name", "seed"), [("llama", 1), ("qwen3", 2), ("short-window", 1)])
def test_nothing_else_sees_what_is_written_in_place(name: str, seed: int, kernels: Kernels) -> None:
    """Logits as alone, and no array that is out changes."""
    story = Story(model_named(name), kernels, seed)
    for _ in range(40):
        story.go_on()
    assert kernels.writes > 20
    assert story.watched
    assert story.changed() == 0


@pytest.mark.parametrize("honest", [True, False])
def test_exports_of_rows_that_left_stay_as_they_were(
    honest: bool, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps write into the slots left behind; exports that were views instead would show it."""
    if not honest:
        monkeypatch.setattr(lone, "copied", lambda array: array)
    changed = 0
    for length in (20, 62, 65):
        story = Story(model_named("llama"), kernels, 0)
        troupe, batch = story.troupe, story.troupe.batch
        for row in range(5):
            troupe.add(row, length - row % 2)
        for _ in range(4):
            troupe.step()
        for row in (4, 3, 0):
            held = batch.length(RowId(row))
            for count in (held, held - 1, 1):
                story.watch(batch.export(RowId(row), count))
            troupe.drop(row)
            for _ in range(2):
                troupe.step()
        changed += story.changed()
    assert (changed == 0) is honest


def test_layers_that_attend_twice_take_the_new_tokens_from_beside(kernels: Kernels) -> None:
    """A second attention of the same step gets them as well; then nothing is left to write."""
    troupe = InPlace(model_named("llama"))
    troupe.kernels = kernels
    troupe.add(0, 5)
    for _ in range(3):
        troupe.step()
    layout = troupe.batch.layers[0]
    assert isinstance(layout, layouts.KVLayout)
    troupe.batch.begin(1)
    segments = troupe.batch.segments
    offsets = mx.array([troupe.batch.length(RowId(0))], dtype=mx.int32)
    step = compiled.TracedStep(segments, offsets, in_place=True)
    heads, width = layout.arrays[0].shape[1], layout.arrays[0].shape[3]
    new = mx.random.normal((1, heads, 1, width)), mx.random.normal((1, heads, 1, width))
    queries = mx.random.normal((1, heads, 1, width))
    layout.write(step, *new)
    held = layout.arrays
    first = layout.attend(step, queries, 1.0, None, None)
    second = layout.attend(step, queries, 1.0, None, None)
    assert mx.array_equal(first, second)
    layout.finish(step)
    assert all(one is other for one, other in zip(layout.arrays, held, strict=True))
