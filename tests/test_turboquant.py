"""The TurboQuant codec: its constants, its round trips and what it does with strange input."""

from __future__ import annotations

import random

import mlx.core as mx
import numpy as np
import pytest
from tiny import VOCAB  # noqa: F401  (puts a fast BLAS before MLX)

from mlx_troupe.runtime.engine import turboquant as tq
from mlx_troupe.runtime.engine.turbo_tables import CENTROIDS, SIGN_MASKS
from mlx_troupe.runtime.kvschemes import TURBO_KEY_BITS, TURBO_VALUE_BITS

pytestmark = pytest.mark.mlx


def normal(*shape: int, seed: int = 1) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def mse(got: mx.array, expected: mx.array) -> float:
    return float(mx.mean((got - expected) ** 2).item())


def decoded_keys(x: mx.array, bits: int) -> mx.array:
    return tq.decode_keys(*tq.encode_keys(x, bits), bits)


def decoded_values(x: mx.array, bits: int) -> mx.array:
    return tq.unrotate(tq.decode_rotated_values(*tq.encode_values(x, bits), bits))


@pytest.mark.parametrize("size", [64, 128, 256, 512])
def test_signs_are_those_of_key_42(size: int) -> None:
    """The masks are MLX's own draw, and start with the published digits."""
    drawn = 1 - 2 * mx.random.randint(0, 2, (size,), key=mx.random.key(42))
    assert mx.array_equal(tq.signs(size), drawn.astype(mx.float32)).item()
    first = {64: 0x62DE, 128: 0x1460, 256: 0xFE8B, 512: 0x296B}[size]
    assert SIGN_MASKS[size] >> (size - 16) == first


def test_other_sizes_have_no_signs() -> None:
    """No size is silently given another's signs."""
    with pytest.raises(KeyError):
        tq.signs(96)


@pytest.mark.parametrize("bits", TURBO_VALUE_BITS)
def test_tables_are_ascending_and_complete(bits: int) -> None:
    """2**bits centroids in order."""
    table = CENTROIDS[bits]
    assert len(table) == 2**bits
    assert list(table) == sorted(set(table))


@pytest.mark.parametrize(
    ("bits", "bound"), [(2, 0.118), (3, 0.0346), (4, 0.0095), (5, 0.0025), (8, 0.0001)]
)
def test_centroids_err_as_published_on_unit_normals(bits: int, bound: float) -> None:
    """The mean squared error of the nearest centroid, within 3 %."""
    x = normal(200_000, seed=0)
    table = mx.array(CENTROIDS[bits])
    nearest = table[tq._nearest(x, bits).astype(mx.uint32)]
    assert mse(nearest, x) == pytest.approx(bound, rel=0.03)


@pytest.mark.parametrize("bits", TURBO_VALUE_BITS)
def test_nearest_is_the_nearest(bits: int) -> None:
    """Counting boundaries finds what a search over all centroids finds."""
    x = normal(4096, seed=3) * 2
    wanted = np.abs(np.array(x)[:, None] - np.array(CENTROIDS[bits], np.float32)).argmin(axis=1)
    got = np.array(tq._nearest(x, bits))
    off = np.flatnonzero(got != wanted)
    assert len(off) <= 2, "more than ties of rounding"
    assert np.abs(got[off].astype(int) - wanted[off]).max(initial=0) <= 1


@pytest.mark.parametrize("bits", sorted({*TURBO_KEY_BITS, *TURBO_VALUE_BITS}))
def test_codes_are_a_little_endian_stream_of_bits(bits: int) -> None:
    """Element i is at bits [i·b, (i+1)·b) of the vector's bytes, and comes back."""
    draw = random.Random(bits)
    codes = [draw.randrange(2**bits) for _ in range(64)]
    packed = tq.pack(mx.array([codes], dtype=mx.uint8), bits)
    stream = sum(code << (place * bits) for place, code in enumerate(codes))
    assert bytes(packed[0].tolist()) == stream.to_bytes(64 * bits // 8, "little")  # type: ignore[arg-type]
    assert tq.unpack(packed, bits)[0].tolist() == codes


KEY_ERRORS = {8: 0.00002, 5: 0.00154, 4: 0.00658, 2: 0.166}
VALUE_ERRORS = {2: 0.118, 3: 0.0324, 4: 0.0095, 5: 0.0025, 8: 0.0001}


@pytest.mark.parametrize("size", [64, 128, 256, 512])
@pytest.mark.parametrize("bits", TURBO_KEY_BITS)
def test_keys_come_back(size: int, bits: int) -> None:
    """The published error at every head size, within what the sample and rounding allow."""
    x = normal(2, 3, 200, size)
    assert mse(decoded_keys(x, bits), x) == pytest.approx(KEY_ERRORS[bits], rel=0.2)


@pytest.mark.parametrize("size", [64, 128, 256, 512])
@pytest.mark.parametrize("bits", TURBO_VALUE_BITS)
def test_values_come_back(size: int, bits: int) -> None:
    """The published error at every head size, scaled or not."""
    for scale in (1.0, 37.5):
        x = normal(2, 3, 100, size) * scale
        error = mse(decoded_values(x, bits), x) / scale**2
        assert error == pytest.approx(VALUE_ERRORS[bits], rel=0.12)


def test_sizes_are_those_of_the_format() -> None:
    """k8v3 at 128: 128 + 8 + 8 + 48 + 8 bytes a token and head; scales are 16 bit."""
    x = normal(1, 1, 1, 128)
    stored = (*tq.encode_keys(x, 8), *tq.encode_values(x, 3))
    assert [part.nbytes for part in stored] == [128, 8, 8, 48, 8]
    assert [part.dtype for part in stored] == [
        mx.int8,
        mx.float16,
        mx.float16,
        mx.uint8,
        mx.float16,
    ]


@pytest.mark.parametrize("bits", TURBO_KEY_BITS)
def test_the_key_formula(bits: int) -> None:
    """Codes, scale and zero of one group equal the formula in float32, rounded half to even."""
    x = np.array(normal(32, seed=9), np.float32)
    eps = np.float32(1e-8)
    if bits == 8:
        scale = (x.max() - x.min()) / 254
        zero = np.round((x.max() + x.min()) / (2 * (scale + eps)))
        codes = np.clip(np.round(x / (scale + eps) - zero), -127, 127)
    else:
        scale = (x.max() - x.min()) / (2**bits - 1)
        zero = np.round(x.min() / (scale + eps))
        codes = np.clip(np.round(x / (scale + eps) - zero), 0, 2**bits - 1)
    got, scales, zeros = tq.encode_keys(mx.array(x), bits)
    unpacked = got if bits == 8 else tq.unpack(got, bits)
    assert unpacked.tolist() == codes.astype(int).tolist()
    assert scales.tolist() == [np.float16(scale)]
    assert zeros.tolist() == [np.float16(zero)]


def test_rotation_is_its_own_inverse_and_keeps_lengths() -> None:
    """Signs and a normalised Hadamard transform: orthogonal."""
    x = normal(5, 256)
    y = tq.rotate(x)
    assert mx.allclose(tq.unrotate(y), x, atol=1e-5).item()
    assert mx.allclose((y * y).sum(-1), (x * x).sum(-1), rtol=1e-4).item()


@pytest.mark.parametrize("bits", TURBO_KEY_BITS)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.7, 1e-5, 500.0])
def test_a_constant_group_of_keys_is_its_value(bits: int, value: float) -> None:
    """No range: the zero would overflow float16 and decode to NaN; the mean is stored instead."""
    x = mx.full((1, 64), value)
    x[0, 32:] = normal(32)
    got = decoded_keys(x, bits)
    assert mx.allclose(got[0, :32], x[0, :32], rtol=1e-3, atol=1e-6).item()
    assert mse(got[0, 32:], x[0, 32:]) < 0.4


@pytest.mark.parametrize("bits", TURBO_KEY_BITS)
def test_nearly_constant_groups_stay_near(bits: int) -> None:
    """On either side of where the guard takes over the error is small against the value."""
    for spread in (1e-1, 1e-2, 3e-3, 1e-3, 1e-4, 1e-6):
        x = 5.0 + spread * normal(8, 64)
        got = decoded_keys(x, bits)
        assert bool(mx.isfinite(got).all().item())
        step = 6 * spread / (2**bits - 1)
        assert mx.abs(got - x).max().item() <= 5.0 / 256 + step


def test_zeros_are_zeros() -> None:
    """Empty slots of a buffer and zero vectors decode to zero."""
    x = mx.zeros((2, 128))
    assert not mx.any(decoded_keys(x, 8)).item()
    assert not mx.any(decoded_values(x, 3)).item()
    codes, scales = (mx.zeros(part.shape, part.dtype) for part in tq.encode_values(x, 3))
    assert not mx.any(tq.decode_rotated_values(codes, scales, 3)).item()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e38])
def test_what_cannot_be_stored_is_loud(bad: float) -> None:
    """A vector beyond float16's scales decodes to no number in its group, not to a wrong one."""
    x = normal(1, 64)
    x[0, 3] = bad
    for got in (decoded_keys(x, 8)[0, :32], tq.decode_rotated_values(*tq.encode_values(x, 3), 3)):
        assert not bool(mx.isfinite(got).all().item())
    assert bool(mx.isfinite(decoded_keys(x, 8)[0, 32:]).all().item())


def test_the_codec_does_not_depend_on_the_type_of_its_input() -> None:
    """bfloat16 keys are widened before anything is computed."""
    x = normal(4, 128).astype(mx.bfloat16)
    narrow, wide = tq.encode_keys(x, 8), tq.encode_keys(x.astype(mx.float32), 8)
    assert all(mx.array_equal(a, b).item() for a, b in zip(narrow, wide, strict=True))


def test_tokens_are_encoded_one_by_one() -> None:
    """Cutting before or after encoding gives the same bytes."""
    x = normal(1, 2, 9, 64)
    whole = (*tq.encode_keys(x, 4), *tq.encode_values(x, 3))
    part = (*tq.encode_keys(x[..., 2:5, :], 4), *tq.encode_values(x[..., 2:5, :], 3))
    assert all(mx.array_equal(a[..., 2:5, :], b).item() for a, b in zip(whole, part, strict=True))
