"""How keys and values are kept: the schemes that an operator may choose, as plain values.

Parses ``--kv-quant`` and reads a model's ``kv_config.json``; runs before anything is loaded. Knows
no arrays: ``engine.kvplan`` turns a scheme into codecs for the layers of a loaded model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, assert_never

from .errors import ModelError

CONFIG_FILE = "kv_config.json"
AFFINE_BITS = (4, 8)
TURBO_KEY_BITS = (2, 4, 5, 8)
TURBO_VALUE_BITS = (2, 3, 4, 5, 8)
MIN_BLOCK = 16

_TURBO = re.compile(r"turbo(?::k(\d+)v(\d+))?")
_CONFIG_BITS = (2, 4, 8)
_CONFIG_GROUPS = (32, 64, 128)
_CONFIG_PLAIN = (0, 16)
_CONFIG_KEYS = {"layer_idx", "bits", "group_size"}


@dataclass(frozen=True, slots=True)
class PlainKV:
    """Keys and values as the model makes them."""


@dataclass(frozen=True, slots=True)
class AffineKV:
    """Every layer in MLX's affine form; ``bits`` is 4 or 8.

    ``start``, here and in the other schemes: a row is encoded once it holds that many tokens.
    """

    bits: int
    group_size: int = 64
    start: int = 0


@dataclass(frozen=True, slots=True)
class PerLayerKV:
    """Affine form for the layers that the model's ``kv_config.json`` lists; no file, no layer."""

    start: int = 0


@dataclass(frozen=True, slots=True)
class TurboKV:
    """TurboQuant on the layers that see everything; sliding layers stay plain."""

    key_bits: int = 8
    value_bits: int = 3
    start: int = 0


@dataclass(frozen=True, slots=True)
class PagedKV:
    """Plain, but of rows that share steps in blocks of a pool, ``block_size`` tokens each.

    Kept prefixes are not used with it.
    """

    block_size: int = 256


KVScheme: TypeAlias = PlainKV | AffineKV | PerLayerKV | TurboKV | PagedKV

PLAIN_KV = PlainKV()


@dataclass(frozen=True, slots=True)
class LayerBits:
    """One line of a ``kv_config.json``: ``layer`` counts the model's layers from 0."""

    layer: int
    bits: int
    group_size: int = 64


def parse_kv_quant(text: str) -> KVScheme:
    """``off``, ``config``, ``4``, ``8``, ``turbo`` or ``turbo:kXvY``. Raises ValueError."""
    match text:
        case "off":
            return PLAIN_KV
        case "config":
            return PerLayerKV()
        case "4" | "8":
            return AffineKV(int(text))
        case _:
            return _parse_turbo(text)


def name_of(scheme: KVScheme) -> str:
    """The scheme in the words of ``--kv-quant``; ``paged:N`` for ``--paged-kv``."""
    match scheme:
        case PlainKV():
            return "off"
        case AffineKV(bits):
            return str(bits)
        case PerLayerKV():
            return "config"
        case TurboKV(key_bits, value_bits):
            return f"turbo:k{key_bits}v{value_bits}"
        case PagedKV(block_size):
            return f"paged:{block_size}"
        case _:
            assert_never(scheme)


def start_of(scheme: KVScheme) -> int:
    """Tokens that a row holds before it is encoded."""
    return 0 if isinstance(scheme, PlainKV | PagedKV) else scheme.start


def check_scheme(scheme: KVScheme) -> None:
    """Raises ModelError for a scheme that was put together wrongly in code."""
    match scheme:
        case AffineKV(bits, group_size) if bits not in AFFINE_BITS or group_size != 64:
            raise ModelError(f"an affine KV cache of {bits} bits in groups of {group_size}")
        case TurboKV(k, v) if k not in TURBO_KEY_BITS or v not in TURBO_VALUE_BITS:
            raise ModelError(f"a TurboQuant KV cache of k{k}v{v}")
        case PagedKV(block_size) if block_size < MIN_BLOCK:
            raise ModelError(f"a paged KV cache in blocks of {block_size}, fewer than {MIN_BLOCK}")
    if start_of(scheme) < 0:
        raise ModelError(f"KV quantisation from {start_of(scheme)} tokens on")


def read_kv_config(folder: Path) -> tuple[LayerBits, ...]:
    """The layers that ``kv_config.json`` wants encoded; none without the file.

    Raises ModelError for a file that is not a list of such layers: a typing error must not leave
    a cache unquantised in silence.
    """
    file = folder / CONFIG_FILE
    if not file.exists():
        return ()
    try:
        entries = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    if not isinstance(entries, list):
        raise ModelError(f"{file} must hold a list of layers")
    lines = [_layer_bits(file, entry) for entry in entries]
    layers = [line.layer for line in lines]
    if twice := sorted({layer for layer in layers if layers.count(layer) > 1}):
        raise ModelError(f"{file} names layer {twice[0]} twice")
    return tuple(line for line in lines if line.bits not in _CONFIG_PLAIN)


def _layer_bits(file: Path, entry: object) -> LayerBits:
    if not isinstance(entry, dict):
        raise ModelError(f"{file}: {entry!r} is not an object with layer_idx and bits")
    if strange := sorted(set(entry) - _CONFIG_KEYS):
        raise ModelError(f"{file} says {strange[0]!r}, which is not known")
    layer, bits = (_whole(file, entry, key) for key in ("layer_idx", "bits"))
    group = _whole(file, entry | {"group_size": entry.get("group_size", 64)}, "group_size")
    if layer < 0:
        raise ModelError(f"{file}: there is no layer {layer}")
    if bits not in (*_CONFIG_BITS, *_CONFIG_PLAIN):
        raise ModelError(f"{file}: layer {layer} wants {bits} bits; {_listed(_CONFIG_BITS)} exist")
    if group not in _CONFIG_GROUPS:
        raise ModelError(
            f"{file}: layer {layer} wants groups of {group}; {_listed(_CONFIG_GROUPS)} exist"
        )
    return LayerBits(layer, bits, group)


def _whole(file: Path, entry: dict[str, object], key: str) -> int:
    value = entry.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelError(f"{file}: {key} must be a whole number, got {value!r}")
    return value


def _parse_turbo(text: str) -> TurboKV:
    if (found := _TURBO.fullmatch(text)) is None:
        raise ValueError(f"{text!r} is none of off, config, 4, 8, turbo and turbo:kXvY")
    if found[1] is None:
        return TurboKV()
    scheme = TurboKV(int(found[1]), int(found[2]))
    if problems := list(_turbo_problems(scheme)):
        raise ValueError("; ".join(problems))
    return scheme


def _turbo_problems(scheme: TurboKV) -> Iterator[str]:
    if scheme.key_bits not in TURBO_KEY_BITS:
        yield f"keys of {scheme.key_bits} bits do not exist, only {_listed(TURBO_KEY_BITS)}"
    if scheme.value_bits not in TURBO_VALUE_BITS:
        yield f"values of {scheme.value_bits} bits do not exist, only {_listed(TURBO_VALUE_BITS)}"


def _listed(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
