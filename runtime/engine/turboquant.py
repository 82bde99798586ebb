"""TurboQuant: keys in affine groups, values rotated and put to the nearest centroids.

Arrays in, arrays out, on the device thread; all along the last axis, whose size is one of
``HEAD_SIZES``, in groups of ``GROUP``. Scales and zeros are float16, codes are packed as a
little-endian stream of bits. Knows no caches and no attention; constants are in ``turbo_tables``.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .turbo_tables import CENTROIDS, SIGN_MASKS

Constants: TypeAlias = npt.NDArray[np.float32]

GROUP = 32
HEAD_SIZES = tuple(SIGN_MASKS)

_EPSILON = 1e-8
_SIGNED_BITS = 8
_SIGNED_LIMIT = 127
_LARGEST_HALF = 65504.0
_COUNTED_BITS = 5
"""Up to here comparing with every boundary is faster than bisection."""

_AT_ONCE = 1 << 18
"""Comparisons made by one operation: for a few tokens the number of operations is what costs."""

_PACKED = 8
"""Codes are packed by eight: those of b bits fill b bytes."""


def encode_keys(keys: mx.array, bits: int) -> tuple[mx.array, mx.array, mx.array]:
    """Codes, scales and zeros of keys [..., D].

    Codes are int8 [..., D] for 8 bits, else packed uint8. A group whose values lie so close that
    its scale or zero does not fit float16 is stored as its mean.
    """
    x = _grouped(keys.astype(mx.float32))
    low, high = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
    if bits == _SIGNED_BITS:
        scale = (high - low) / (2 * _SIGNED_LIMIT)
        zero = mx.round((high + low) / (2 * (scale + _EPSILON)))
        least, most = -_SIGNED_LIMIT, _SIGNED_LIMIT
    else:
        scale = (high - low) / (2**bits - 1)
        zero = mx.round(low / (scale + _EPSILON))
        least, most = 0, 2**bits - 1
    codes = mx.clip(mx.round(x / (scale + _EPSILON) - zero), least, most)
    mean = x.mean(axis=-1, keepdims=True)
    narrow = (mx.abs(zero) > _LARGEST_HALF) | (scale.astype(mx.float16) == 0)
    scale = mx.where(narrow, mx.abs(mean), scale)
    zero = mx.where(narrow, mx.sign(mean), zero)
    codes = mx.where(narrow, 0, codes).reshape(keys.shape)
    stored = codes.astype(mx.int8) if bits == _SIGNED_BITS else pack(codes.astype(mx.uint8), bits)
    return stored, _as_half(scale), _as_half(zero)


def decode_keys(codes: mx.array, scales: mx.array, zeros: mx.array, bits: int) -> mx.array:
    """Keys [..., D] in float32."""
    plain = codes if bits == _SIGNED_BITS else unpack(codes, bits)
    scale, zero = (x.astype(mx.float32)[..., None] for x in (scales, zeros))
    return ((_grouped(plain).astype(mx.float32) + zero) * scale).reshape(plain.shape)


def encode_values(values: mx.array, bits: int) -> tuple[mx.array, mx.array]:
    """Packed codes uint8 and scales of values [..., D], rotated first."""
    y = _grouped(rotate(values))
    scale = mx.sqrt((y * y).mean(axis=-1, keepdims=True))
    codes = _nearest(y / (scale + _EPSILON), bits).reshape(values.shape)
    return pack(codes, bits), _as_half(scale)


def decode_rotated_values(codes: mx.array, scales: mx.array, bits: int) -> mx.array:
    """Values [..., D] in float32 as :func:`rotate` left them; :func:`unrotate` gives them back."""
    y = _grouped(_looked_up(_centroids(bits), unpack(codes, bits)))
    return (y * scales.astype(mx.float32)[..., None]).reshape(*codes.shape[:-1], -1)


def rotate(x: mx.array) -> mx.array:
    """Signs, then the normalised Hadamard transform, in float32."""
    return mx.hadamard_transform(x.astype(mx.float32) * signs(x.shape[-1]))


def unrotate(y: mx.array) -> mx.array:
    """The inverse of :func:`rotate`. It is linear: attention may come in between."""
    return mx.hadamard_transform(y.astype(mx.float32)) * signs(y.shape[-1])


def signs(size: int) -> mx.array:
    """±1 in float32 [size]. Raises KeyError for a size that is not in ``HEAD_SIZES``."""
    return mx.array(_signs(size))


def pack(codes: mx.array, bits: int) -> mx.array:
    """Codes uint8 [..., D] below 2**bits as bytes [..., D·bits/8], the low bits first."""
    if bits == _PACKED:
        return codes
    words = codes.reshape(*codes.shape[:-1], -1, _PACKED).astype(mx.uint64)
    shifts = mx.arange(0, _PACKED * bits, bits, dtype=mx.uint64)
    stream = mx.left_shift(words, shifts).sum(axis=-1, keepdims=True)
    return stream.view(mx.uint8)[..., :bits].reshape(*codes.shape[:-1], -1)


def unpack(packed: mx.array, bits: int) -> mx.array:
    """The codes uint8 [..., D] of :func:`pack`."""
    if bits == _PACKED:
        return packed
    if _PACKED % bits == 0:
        parts, kind, each = packed, mx.uint8, _PACKED // bits
    else:
        # Eight codes fill whole bytes, and fit one word.
        kind, each = mx.uint32 if bits * _PACKED <= 32 else mx.uint64, _PACKED
        split = packed.reshape(*packed.shape[:-1], -1, bits)
        parts = split[..., 0].astype(kind)
        for byte in range(1, bits):
            parts = parts | (split[..., byte].astype(kind) << (8 * byte))
    shifts = mx.arange(0, each * bits, bits, dtype=kind)
    codes = mx.right_shift(parts[..., None], shifts) & (2**bits - 1)
    return codes.astype(mx.uint8).reshape(*packed.shape[:-1], -1)


def _grouped(x: mx.array) -> mx.array:
    return x.reshape(*x.shape[:-1], -1, GROUP)


def _as_half(x: mx.array) -> mx.array:
    return x.squeeze(-1).astype(mx.float16)


def _nearest(x: mx.array, bits: int) -> mx.array:
    """How many boundaries lie below each value: uint8 of the same shape."""
    bounds = mx.array(_boundaries(bits))
    if x.size << bits <= _AT_ONCE:
        return (x[..., None] > bounds).sum(axis=-1).astype(mx.uint8)
    if bits <= _COUNTED_BITS:
        found = mx.zeros(x.shape, dtype=mx.uint8)
        for boundary in _boundaries(bits).tolist():
            found = found + (x > boundary)
        return found
    found = mx.zeros(x.shape, dtype=mx.uint32)
    for step in (1 << bit for bit in reversed(range(bits))):
        found = found + (x > _looked_up(bounds, found + (step - 1))) * step
    return found.astype(mx.uint8)


def _looked_up(table: mx.array, places: mx.array) -> mx.array:
    # Several times as fast on a CPU as indexing with an array.
    return mx.take_along_axis(table, places.reshape(-1), axis=0).reshape(places.shape)


def _centroids(bits: int) -> mx.array:
    return mx.array(_table(bits))


@cache
def _table(bits: int) -> Constants:
    return np.array(CENTROIDS[bits], np.float32)


@cache
def _boundaries(bits: int) -> Constants:
    return np.array([(low + high) / 2 for low, high in pairwise(CENTROIDS[bits])], np.float32)


@cache
def _signs(size: int) -> Constants:
    bits = [SIGN_MASKS[size] >> place & 1 for place in range(size)]
    return 1 - 2 * np.array(bits, np.float32)
