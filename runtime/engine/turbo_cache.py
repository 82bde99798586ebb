"""TurboQuant as a KV scheme: the codec of batches, and the cache of a lone row.

Attention runs on rotated values and its result is rotated back once, which is the same as
decoding them first, up to rounding. Runs on the device thread; the arithmetic of the codec is in
``turboquant``.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import _BaseCache

from .attention import AttentionView
from .codecs import PLAIN, Stored
from .groups import GroupKey, Segment
from .steps import Reach, Step
from .turboquant import (
    decode_keys,
    decode_rotated_values,
    encode_keys,
    encode_values,
    unrotate,
)

_Base: Any = _BaseCache


class TurboCodec:
    """Key codes, key scales, key zeros, packed values, value scales; see ``codecs.Codec``."""

    unpacks = True

    def __init__(self, key_bits: int, value_bits: int) -> None:
        self.key_bits = key_bits
        self.value_bits = value_bits

    @property
    def name(self) -> str:
        """See :class:`~.codecs.Codec`."""
        return f"turbo k{self.key_bits}v{self.value_bits}"

    def encode(self, keys: mx.array, values: mx.array) -> Stored:
        """See :class:`~.codecs.Codec`."""
        return (*encode_keys(keys, self.key_bits), *encode_values(values, self.value_bits))

    def attend(
        self,
        queries: mx.array,
        stored: Stored,
        scale: float,
        reach: Reach,
        sinks: mx.array | None,
    ) -> mx.array:
        """See :class:`~.codecs.Codec`."""
        codes, key_scales, zeros, packed, scales = stored
        keys = decode_keys(codes, key_scales, zeros, self.key_bits).astype(queries.dtype)
        values = decode_rotated_values(packed, scales, self.value_bits).astype(queries.dtype)
        rotated = PLAIN.attend(queries, (keys, values), scale, reach, sinks)
        return unrotate(rotated).astype(queries.dtype)

    def is_held_by(self, cache: Any) -> bool:
        """See :class:`~.codecs.Codec`."""
        return type(cache) is TurboCache and cache.has_bits(self.key_bits, self.value_bits)

    def stored_in(self, cache: Any) -> Stored | None:
        """See :class:`~.codecs.Codec`."""
        stored: Stored | None = cache.stored
        return stored

    def make_cache(self, window: int | None) -> Any:
        """See :class:`~.codecs.Codec`. Raises TypeError for a sliding layer, which stays plain."""
        if window is not None:
            raise TypeError("a sliding layer with TurboQuant")
        return TurboCache(self.key_bits, self.value_bits)

    def fill(self, cache: Any, stored: Stored, length: int) -> None:
        """See :class:`~.codecs.Codec`."""
        cache.stored, cache.offset = stored, length

    def convert(self, cache: Any) -> Any:
        """See :class:`~.codecs.Codec`."""
        turbo = self.make_cache(None)
        if not cache.empty():
            self.fill(turbo, self.encode(*cache.keys_and_values()), cache.offset)
        return turbo


class TurboCache(_Base, AttentionView):
    """One row's keys and values, as mlx-lm's models use a cache: grown by 256 tokens at a time.

    It is also the view that it returns for keys and values.
    """

    step = 256

    def __init__(self, key_bits: int, value_bits: int) -> None:
        self._codec = TurboCodec(key_bits, value_bits)
        self.stored: Stored | None = None
        self.offset = 0
        self._columns = 0

    def has_bits(self, key_bits: int, value_bits: int) -> bool:
        """Whether it was made for these widths."""
        return (self._codec.key_bits, self._codec.value_bits) == (key_bits, value_bits)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[TurboCache, TurboCache]:
        """Take new keys and values [1, heads, tokens, width]."""
        new = self._codec.encode(keys, values)
        start, self._columns = self.offset, keys.shape[2]
        self.offset = start + self._columns
        buffers = self._roomy(new, start)
        for buffer, part in zip(buffers, new, strict=True):
            buffer[..., start : self.offset, :] = part
        self.stored = buffers
        return self, self

    def attend(
        self,
        queries: mx.array,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
        softcap: float | None = None,
    ) -> mx.array:
        """See ``attention.AttentionView``. Raises TypeError for a softcap."""
        if softcap is not None:
            raise TypeError("a softcap on encoded keys and values")
        assert self.stored is not None
        held = tuple(x[..., : self.offset, :] for x in self.stored)
        before = self.offset - self._columns
        segment = Segment(GroupKey(self.offset), 1, 0, (before,))
        reach = Reach(Step((segment,), self._columns), segment, self.offset, None, window)
        return self._codec.attend(queries, held, scale, reach, sinks)

    @property
    def state(self) -> tuple[Any, ...]:
        """Everything that the cache is made of, for :meth:`from_state`."""
        return self.stored, self.offset, self._codec.key_bits, self._codec.value_bits

    @state.setter
    def state(self, value: tuple[Any, ...]) -> None:
        self.stored, self.offset, key_bits, value_bits = value
        self._codec = TurboCodec(key_bits, value_bits)
        self._columns = 0

    def size(self) -> int:
        """Tokens held."""
        return self.offset

    def is_trimmable(self) -> bool:
        """Always: tokens are encoded one by one."""
        return True

    def trim(self, n: int) -> int:
        """Take ``n`` tokens back; how many it were."""
        taken = min(self.offset, n)
        self.offset -= taken
        return taken

    def empty(self) -> bool:
        """Whether nothing was ever written."""
        return self.stored is None

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(x.nbytes for x in self.stored or ())

    def _roomy(self, new: Stored, start: int) -> Stored:
        if self.stored is not None and self.offset <= self.stored[0].shape[2]:
            return self.stored
        tokens = -(-self._columns // self.step) * self.step
        fresh = tuple(mx.zeros((*x.shape[:2], tokens, x.shape[3]), x.dtype) for x in new)
        if self.stored is None:
            return fresh
        pairs = zip(self.stored, fresh, strict=True)
        return tuple(mx.concatenate([old[..., :start, :], x], axis=2) for old, x in pairs)
