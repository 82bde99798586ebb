"""Decode steps of a batch as compiled graphs, for GPUs that outrun Python.

Building the graph of a step takes Python longer than a large GPU takes to run it. Here the step is
traced once for each shape of the batch (its groups and their slots) and then only replayed: tokens,
offsets and all buffers go in, logits and the buffers come out. Spare slots take part as rows of
their own, so that rows come and go without a new shape. Adapters go in as arrays too, their weights
and each row's share of them, so that a trace serves whatever is mounted and whoever takes it; steps
without any have traces of their own, in which nothing of adapters is computed. Owns the traces;
runs on the device thread; knows no rows and no requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx

from .adapters import Adapters, Chain, Mixture
from .batch import RowBatch
from .groups import GroupKey, Segment
from .layouts import KVLayout
from .nesting import nest
from .steps import TracedStep

MOST_TRACES = 64
"""Traces kept; beyond it the one not used for longest goes, and is made again when needed."""

SEEN_BEFORE_TRACING = 2
"""Steps of a shape before it is traced: shapes that pass by are not worth it."""

Trace: TypeAlias = Callable[[mx.array, mx.array, list[list[mx.array]], list[mx.array]], Any]


class Shape(NamedTuple):
    """What a step must have in common with others to share their trace.

    Its groups and their slots, and the pattern of its adapters; that is empty without any.
    """

    groups: tuple[tuple[GroupKey, int], ...]
    pattern: str


def can_replay(batch: RowBatch) -> bool:
    """Whether a batch's steps can be replayed at all: not with recurrent or paged layers."""
    return all(isinstance(layer, KVLayout) for layer in batch.layers)


class CompiledDecode:
    """Replays the decode steps of one batch."""

    def __init__(self, model: Any, batch: RowBatch, adapters: Adapters) -> None:
        self._model = model
        self._batch = batch
        self._adapters = adapters
        # On Metal one stream is no order: a copy waits only for outputs that MLX knows of.
        batch.written_in_place = not mx.metal.is_available()
        self._mixture: Mixture | None = None
        self._seen: dict[Shape, int] = {}
        self._traces: OrderedDict[Shape, Trace] = OrderedDict()

    def logits(self, tokens: mx.array, chains: Sequence[Chain]) -> mx.array | None:
        """Logits [B, 1, V] for one token [B] in each row of a step that began with one column.

        ``chains`` are the rows' adapters. None if this step cannot be replayed (yet): run the
        model as usual.
        """
        segments = self._batch.segments
        layers = _kv_layers(self._batch, segments)
        mixture = self._adapters.mixture(_by_slot(segments, chains))
        groups = tuple((segment.group, segment.slots) for segment in segments)
        shape = Shape(groups, "" if mixture is None else mixture.pattern)
        if layers is None or (trace := self._trace_of(shape, layers)) is None:
            return None
        offsets, places = _spread(segments)
        full = tokens if places is None else tokens[places[0]]
        state = [layer.arrays for layer in layers]
        self._mixture = mixture
        try:
            logits, state = trace(full, offsets, state, mixture.arrays if mixture else [])
        finally:
            self._mixture = None
        _put(layers, state)
        made: mx.array = logits if places is None else logits[places[1]]
        return made

    def forget_adapters(self) -> None:
        """No adapter is left: neither are the traces that were made for some."""
        for shape in [shape for shape in self._traces if shape.pattern]:
            del self._traces[shape]
        self._seen = {shape: times for shape, times in self._seen.items() if not shape.pattern}

    def _trace_of(self, shape: Shape, layers: list[KVLayout]) -> Trace | None:
        if (known := self._traces.get(shape)) is not None:
            self._traces.move_to_end(shape)
            return known
        self._seen[shape] = self._seen.get(shape, 0) + 1
        if self._seen[shape] < SEEN_BEFORE_TRACING:
            return None
        del self._seen[shape]
        if len(self._traces) == MOST_TRACES:
            self._traces.popitem(last=False)
        self._traces[shape] = made = self._make_trace(shape, layers)
        return made

    def _make_trace(self, shape: Shape, layers: list[KVLayout]) -> Trace:
        segments: list[Segment] = []
        start = 0
        for group, slots in shape.groups:
            segments.append(Segment(group, slots, start, (0,) * slots))
            start += slots

        def step(
            tokens: mx.array,
            offsets: mx.array,
            state: list[list[mx.array]],
            adapters: list[mx.array],
        ) -> tuple[mx.array, list[list[mx.array]]]:
            held = [layer.arrays for layer in layers]
            _put(layers, state)
            in_place = self._batch.written_in_place
            shared = TracedStep(tuple(segments), offsets, in_place=in_place)
            caches = nest([layer.cache(shared) for layer in layers], self._batch.nesting)
            mixture = self._mixture
            try:
                with nullcontext() if mixture is None else mixture.shown(adapters):
                    logits = self._model(tokens[:, None], cache=caches)
                for layer in layers:
                    layer.finish(shared)
                return logits, [layer.arrays for layer in layers]
            finally:
                _put(layers, held)

        compiled: Any = mx.compile(step)
        return compiled


def _kv_layers(batch: RowBatch, segments: tuple[Segment, ...]) -> list[KVLayout] | None:
    """The batch's layers, if all keep keys and values and have the buffers of every group."""
    groups = {segment.group for segment in segments}
    layers: list[KVLayout] = []
    for layer in batch.layers:
        if not isinstance(layer, KVLayout) or layer.buffers.keys() != groups:
            return None
        layers.append(layer)
    return layers


def _by_slot(segments: tuple[Segment, ...], chains: Sequence[Chain]) -> list[Chain]:
    """The adapters of each slot; spare ones have none."""
    made: list[Chain] = []
    for segment in segments:
        made += chains[segment.start : segment.stop]
        made += [()] * (segment.slots - len(segment.lengths))
    return made


def _put(layers: list[KVLayout], state: list[list[mx.array]]) -> None:
    for layer, arrays in zip(layers, state, strict=True):
        layer.put_arrays(arrays)


def _spread(segments: tuple[Segment, ...]) -> tuple[mx.array, tuple[mx.array, mx.array] | None]:
    """Offsets int32 [slots], and where rows stand among the slots: rows of slots, slots of rows."""
    offsets: list[int] = []
    rows: list[int] = []
    places: list[int] = []
    for segment in segments:
        spare = segment.slots - len(segment.lengths)
        places += range(len(offsets), len(offsets) + len(segment.lengths))
        rows += [*range(segment.start, segment.stop), *([0] * spare)]
        offsets += [*segment.lengths, *([0] * spare)]
    made = mx.array(offsets, dtype=mx.int32)
    if len(places) == len(offsets):
        return made, None
    return made, (mx.array(rows, dtype=mx.uint32), mx.array(places, dtype=mx.uint32))
