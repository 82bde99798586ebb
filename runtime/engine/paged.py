"""Keys and values in fixed blocks of a pool, so that a row takes what it fills and no more.

The tokens of a row lie in whichever blocks its table (``pages``) names; attention gathers them and
is then that of a plain layer, bit for bit. Runs on the device thread; knows slots, not requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from ..plans import RowId
from .attention import attend_group_capped
from .codecs import PLAIN, Image, Stored
from .groups import GroupKey, Place, Relayout
from .layout_protocols import Piece
from .layouts import RowsCache
from .lone import give_cache, take_image
from .pages import Chain, Pages, Resize
from .steps import Reach, Step


class PagedLayout:
    """One layer's keys and values of all rows: [blocks · block, heads, width] each.

    ``pages`` is the batch's, the same for all of its layers. The pools come into being with the
    first bytes, as only these tell their shape and type.
    """

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._pools: Stored = ()
        self._joined: dict[Chain, Stored] = {}

    @property
    def arrays(self) -> list[mx.array]:
        """The pools of keys and of values."""
        return list(self._pools)

    @property
    def most_columns(self) -> int | None:
        """Any number."""
        return None

    def take(self, cache: Any) -> tuple[Image | None, int]:
        """See :class:`~.layouts.BatchLayout`; shares bytes with the cache."""
        return take_image(cache, None, None, None)

    def give(self, image: Image | None, length: int, oldest: int, held: int) -> Any:
        """See :class:`~.layouts.BatchLayout`; copies, not evaluated."""
        return give_cache(image, PLAIN, None, None, length, oldest)

    def oldest_held(self, written: int, oldest: int) -> int:
        """Nothing is forgotten with time."""
        return oldest

    def image(self, place: Place) -> Image | None:
        """See :class:`~.layouts.BatchLayout`; gathered, as its blocks lie anywhere."""
        chain = self._pages.chain(place)
        if chain in self._joined:
            return Image(self._joined[chain])
        if not self._pools or not chain.blocks:
            return None
        return Image(self._gathered(mx.array([chain.blocks])))

    def fitted(self, image: Image, length: int, capacity: int) -> Image:
        """See :class:`~.layouts.BatchLayout`."""
        return image.first(length)

    def gather(
        self, relayout: Relayout, joining: Mapping[RowId, Image | None]
    ) -> dict[GroupKey, list[Piece]]:
        """See :class:`~.layouts.BatchLayout`; only what joins, as nothing else moves."""
        moved: dict[GroupKey, list[Piece]] = {}
        for change in relayout.changes:
            newcomers = [copy for copy in change.copies if copy.source is None]
            images = [(copy, joining[copy.row]) for copy in newcomers]
            moved[change.group] = [
                Piece(copy.slot, image.first(copy.tokens).stored, False)
                for copy, image in images
                if image is not None and copy.tokens
            ]
        return moved

    def apply(self, relayout: Relayout, moved: Mapping[GroupKey, list[Piece]]) -> None:
        """See :class:`~.layouts.BatchLayout`; bytes are written in the :meth:`cache` after it."""
        self._pages.move(relayout)
        if not self._pages:
            self._pools = ()
            self._joined.clear()
        for group, pieces in moved.items():
            for piece in pieces:
                self._joined[self._pages.chain(Place(group, piece.slot))] = piece.stored

    def cache(self, step: Step) -> Any:
        """See :class:`~.layouts.BatchLayout`."""
        resize = self._pages.settle(step)
        self._pools = tuple(self._resized(pool, resize) for pool in self._pools)
        joined, self._joined = self._joined, {}
        for chain, stored in joined.items():
            self._put(self._slots(chain.blocks, stored[0].shape[2]), stored)
        return RowsCache(self, step)

    def commit(self, counts: Sequence[int]) -> None:
        """Nothing to do: what lies behind a row's length is overwritten."""

    def write(self, step: Step, keys: mx.array, values: mx.array) -> None:
        """Put a step's new tokens ([B, heads, columns, width]) behind each row's last."""
        self._put(self._pages.where, (keys, values))

    def attend(
        self,
        step: Step,
        queries: mx.array,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
        softcap: float | None = None,
    ) -> mx.array:
        """Attention of all rows, once per group; shapes as in ``attention.AttentionView``."""
        outputs: list[mx.array] = []
        for segment in step.segments:
            reach = Reach(step, segment, step.used(segment, segment.capacity), None, window)
            table = self._pages.table(segment, reach.used)
            keys, values = (x[:, :, : reach.used] for x in self._gathered(table))
            share = queries[segment.start : segment.stop]
            if softcap is None:
                outputs.append(PLAIN.attend(share, (keys, values), scale, reach, sinks))
                continue
            mask = reach.mask(share.shape[1] // keys.shape[1])
            outputs.append(attend_group_capped(share, keys, values, scale, softcap, mask))
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def _gathered(self, table: mx.array) -> Stored:
        """[n, heads, tokens, width] of the blocks in a table [n, blocks]."""
        rows, count = table.shape
        tokens = count * self._pages.block
        blocks = (x.reshape(-1, self._pages.block, *x.shape[1:])[table] for x in self._pools)
        by_row = (x.reshape(rows, tokens, *x.shape[3:]) for x in blocks)
        # As a plain layer's arrays lie in memory: products of others may round differently.
        return tuple(mx.contiguous(x.transpose(0, 2, 1, 3)) for x in by_row)

    def _put(self, where: mx.array, new: Stored) -> None:
        """Write tokens [n, heads, columns, width] to places [n · columns], row by row."""
        if not self._pools:
            size = self._pages.size * self._pages.block
            self._pools = tuple(mx.zeros((size, x.shape[1], x.shape[3]), x.dtype) for x in new)
        pairs = zip(self._pools, new, strict=True)
        self._pools = tuple(_written(pool, where, _by_token(x)) for pool, x in pairs)

    def _slots(self, blocks: list[int] | tuple[int, ...], tokens: int) -> mx.array:
        """The places of the first tokens of a chain of blocks."""
        first = mx.array(blocks, dtype=mx.int32)[:, None] * self._pages.block
        return (first + mx.arange(self._pages.block, dtype=mx.int32)).reshape(-1)[:tokens]

    def _resized(self, pool: mx.array, resize: Resize) -> mx.array:
        block = self._pages.block
        if resize.kept is not None:
            pool = pool.reshape(-1, block, *pool.shape[1:])[mx.array(resize.kept)].flatten(0, 1)
        missing = resize.size * block - pool.shape[0]
        if missing > 0:
            pool = mx.concatenate([pool, mx.zeros((missing, *pool.shape[1:]), pool.dtype)])
        if resize.wiped:
            zero = mx.zeros((len(resize.wiped) * block, *pool.shape[1:]), pool.dtype)
            pool = _written(pool, self._slots(resize.wiped, zero.shape[0]), zero)
        return pool


def _by_token(x: mx.array) -> mx.array:
    return x.transpose(0, 2, 1, 3).reshape(-1, x.shape[1], x.shape[3])


def _written(pool: mx.array, where: mx.array, tokens: mx.array) -> mx.array:
    return mx.put_along_axis(pool, where[:, None, None], tokens, axis=0)
