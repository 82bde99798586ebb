"""Rows that share one forward pass, whatever their lengths.

Owns the batch: where rows stand (``groups``) and each layer's buffers (``layouts``). Runs on the
device thread; it knows row ids and lengths, not tokens, sampling or requests.

One step::

    caches = batch.begin(columns)            # room made, rows moved, order settled
    logits = model(tokens, cache=caches)     # tokens [B, columns] in the order of batch.rows
    batch.commit(columns)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from ..plans import RowId
from .codecs import Codec, Image
from .groups import GroupKey, Groups, Segment, capacity_for
from .kvplan import PLAIN_PLAN, KVPlan, encoded
from .layout_protocols import BatchLayout, Piece
from .layouts import KVLayout
from .lazy import start
from .lone import CannotTrim, window_of_cache
from .nesting import flatten, nest
from .paged import PagedLayout
from .pages import Pages
from .recurrent import RecurrentLayout
from .selfcheck import why_not_batchable
from .snapshots import arrays_of
from .steps import Step

__all__ = ["CannotTrim", "RowBatch", "why_not_batchable"]


class RowBatch:
    """Ragged rows in capacity groups. Raises TypeError for a model with other cache kinds.

    ``plan`` says in what its layers are encoded, and from which length of a row on; ``spare``, that
    groups may have more slots than rows.
    """

    def __init__(self, model: nn.Module, plan: KVPlan = PLAIN_PLAN, *, spare: bool = True) -> None:
        self._plan = plan
        self._nesting = make_prompt_cache(model)
        pairs = zip(flatten(self._nesting), plan.codecs or repeat(None), strict=False)
        pages = Pages(plan.block) if plan.block else None
        self._layers: list[BatchLayout] = [_layout_of(c, codec, pages) for c, codec in pairs]
        self._groups = Groups(spare=spare)
        self._joining: dict[RowId, list[Image | None]] = {}
        self._oldest: dict[RowId, list[int]] = {}
        self._written: dict[RowId, int] = {}
        self._columns = 0
        self.written_in_place = False
        """Kernels write into the buffers, unknown to MLX: nothing may read them unfinished."""

    @property
    def rows(self) -> tuple[RowId, ...]:
        """The order of the batch axis; may change with every join, leave and begin."""
        return self._groups.rows

    @property
    def arrays(self) -> list[mx.array]:
        """All buffers that live, to be evaluated with a step's result."""
        return [array for layer in self._layers for array in layer.arrays]

    @property
    def nbytes(self) -> int:
        """Bytes of all group buffers."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def layers(self) -> Sequence[BatchLayout]:
        """The layers' layouts, flat."""
        return self._layers

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The groups along the batch axis, as they stand after :meth:`begin`."""
        return self._groups.segments()

    @property
    def nesting(self) -> Sequence[Any]:
        """mlx-lm's caches of the model, whose lists the layers' caches are nested like."""
        return self._nesting

    def length(self, row: RowId) -> int:
        """Tokens held by a row. Raises KeyError for a stranger."""
        return self._groups.length(row)

    def join(self, row: RowId, caches: Sequence[Any], length: int | None = None) -> None:
        """Take a lone row of ``length`` tokens in with its mlx-lm caches, one per layer.

        Without a length it is what the caches say, which recurrent ones do not. The bytes are
        copied by the next :meth:`begin`; what happens to ``caches`` afterwards does not matter.
        Raises ValueError for a row that is here, TypeError for other cache kinds.
        """
        leaves = flatten(caches)
        pairs = [layer.take(c) for c, layer in zip(leaves, self._layers, strict=True)]
        lengths = {int(cache.offset) for cache in leaves if hasattr(cache, "offset")}
        if length is not None:
            lengths.add(length)
        if len(lengths) != 1:
            raise ValueError(f"a row's layers differ in length: {sorted(lengths)}")
        (length,) = lengths
        encoded = any(image.encoded for image, _ in pairs if image is not None)
        self._groups.join(row, length, encoded=encoded)
        self._joining[row] = [image for image, _ in pairs]
        self._oldest[row] = [oldest for _, oldest in pairs]
        self._written[row] = length

    def adopt(self, row: RowId, source: RowBatch) -> None:
        """Take a row over from another batch of the same model, which it leaves.

        The bytes are copied by the next :meth:`begin`, straight from slot to slot; until then
        ``source`` must not be stepped, or it copies what it writes (where it writes in place, they
        are copied now, once more). Raises ValueError for a row that is here and KeyError for one
        that is not there.
        """
        length = source.length(row)
        self._groups.join(row, length, encoded=source._groups.is_encoded(row))
        capacity = capacity_for(length + 1)
        images, layers = source._images(row), self._layers
        self._joining[row] = [
            image and layer.fitted(image, length, capacity)
            for image, layer in zip(images, layers, strict=True)
        ]
        self._oldest[row] = source._oldest_held(row)
        self._written[row] = source._written[row]
        if source.written_in_place:
            kept = [image and image.detached() for image in self._joining[row]]
            self._joining[row] = kept
            start([x for image in kept if image is not None for x in image.stored])
        # What it leaves behind may be broken without anybody knowing yet.
        source.leave(row, poisoned=True)

    def leave(self, row: RowId, *, poisoned: bool = False) -> None:
        """Drop a row. A ``poisoned`` row's slot is zeroed before anyone reads it again.

        (0 × NaN is NaN in the masked sum.) The last row to leave frees all buffers at once.
        """
        self._groups.leave(row, poisoned=poisoned)
        self._joining.pop(row, None)
        del self._oldest[row], self._written[row]
        if not self._groups:
            self._move(1)

    def export(self, row: RowId, length: int) -> list[Any]:
        """Fresh mlx-lm caches with the first ``length`` tokens of a row: exact-length copies.

        They are not evaluated yet, but begun where steps write in place; else evaluate them before
        the next step is, or its first write to the row's group copies that group. Raises
        CannotTrim, KeyError for a stranger and ValueError for more tokens than the row holds.
        """
        if not 0 <= length <= self._groups.length(row):
            raise ValueError(f"row {row} holds {self._groups.length(row)} tokens, not {length}")
        held = self._groups.length(row)
        triples = zip(self._images(row), self._layers, self._oldest_held(row), strict=True)
        leaves = [layer.give(image, length, oldest, held) for image, layer, oldest in triples]
        if self._groups.is_encoded(row) and length:
            # Its conversion may still be waiting for the next step.
            pairs = zip(leaves, self._plan.codecs, strict=True)
            leaves = [encoded(cache, codec) for cache, codec in pairs]
        if self.written_in_place:
            start(arrays_of(leaves))
        return nest(leaves, self._nesting)

    def convert(self, row: RowId) -> None:
        """Encode a row's state by the next :meth:`begin`, for good. Raises KeyError."""
        self._groups.convert(row)

    def begin(self, columns: int, counts: Mapping[RowId, int] | None = None) -> list[Any]:
        """Make room for ``columns`` tokens in every row; the layers' caches for the forward.

        ``counts`` (at least 1 each) says how many of them each row is going to keep, the leading
        ones; recurrent layers must be told where that is not all of them. Raises ValueError for
        more columns than a sliding layer's ring can take in one step.
        """
        limits = [n for layer in self._layers if (n := layer.most_columns) is not None]
        if columns < 1 or any(columns > limit for limit in limits):
            raise ValueError(f"a step of {columns} columns")
        self._move(columns)
        self._columns = columns
        ordered = counts and tuple(counts[row] for row in self.rows)
        step = Step(self._groups.segments(), columns, ordered or None)
        return nest([layer.cache(step) for layer in self._layers], self._nesting)

    def commit(self, columns: int | Sequence[int]) -> None:
        """The step that began is built: rows are longer by ``columns``, or by a count per row.

        Counts are in batch order and at most what :meth:`begin` was told; the rest is taken back.
        Recurrent layers cannot take back a part of several columns (ValueError): commit none, and
        run the step again with the counts told.
        """
        rows = self.rows
        counts = [columns] * len(rows) if isinstance(columns, int) else columns
        if any(not 0 <= count <= self._columns for count in counts):
            raise ValueError(f"{counts} of {self._columns} columns kept")
        for layer in self._layers:
            layer.commit(counts)
        for row in rows:
            reached = self._groups.length(row) + self._columns
            self._written[row] = max(self._written[row], reached)
        self._groups.commit(counts)
        if self._plan.encodes:
            for row in rows:
                if self._groups.length(row) >= self._plan.start:
                    self._groups.convert(row)

    def _move(self, columns: int) -> None:
        relayout = self._groups.begin(columns)
        if not (relayout.changes or relayout.dropped):
            return
        moved = []
        for index, layer in enumerate(self._layers):
            joining = {row: images[index] for row, images in self._joining.items()}
            moved.append(layer.gather(relayout, joining))
        detached = list(_detached(moved))
        if mx.default_device() == mx.cpu:
            mx.eval(detached)
        elif self.written_in_place:
            start(detached)
        for layer, pieces in zip(self._layers, moved, strict=True):
            layer.apply(relayout, pieces)
        self._joining.clear()

    def _images(self, row: RowId) -> list[Image | None]:
        place = self._groups.place(row)
        if place is None:
            return self._joining[row]
        return [layer.image(place) for layer in self._layers]

    def _oldest_held(self, row: RowId) -> list[int]:
        written = self._written[row]
        pairs = zip(self._layers, self._oldest[row], strict=True)
        return [layer.oldest_held(written, oldest) for layer, oldest in pairs]


def _layout_of(cache: Any, codec: Codec | None, pages: Pages | None) -> BatchLayout:
    if type(cache) is ArraysCache:
        return RecurrentLayout(len(cache.cache))
    window = window_of_cache(cache)
    if window is None and pages is not None:
        return PagedLayout(pages)
    return KVLayout(window, codec)


def _detached(moved: list[dict[GroupKey, list[Piece]]]) -> Iterator[mx.array]:
    """Copies out of groups that live on: made first, so that these are then written in place."""
    for groups in moved:
        for piece in chain.from_iterable(groups.values()):
            if piece.detached:
                yield from piece.stored
