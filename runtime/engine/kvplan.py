"""Which layers of a loaded model are encoded, in what, and from when on.

A :class:`KVPlan` is made once at load from the operator's scheme; what the model or its files
cannot do is refused here. Runs on the device thread; it knows caches and codecs, not rows.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

import mlx.core as mx
from mlx.nn import Module
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

from ..errors import ModelError
from ..kvschemes import (
    CONFIG_FILE,
    AffineKV,
    KVScheme,
    LayerBits,
    PagedKV,
    PerLayerKV,
    PlainKV,
    TurboKV,
    check_scheme,
    name_of,
    read_kv_config,
    start_of,
)
from ..model_info import KVLayers
from .codecs import PLAIN, AffineCodec, Codec
from .nesting import flatten, nest
from .rings import QuantizedRing
from .selfcheck import model_family
from .snapshots import CannotCut
from .turbo_cache import TurboCodec
from .turboquant import HEAD_SIZES

_WHOLE_COLUMNS = 64

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KVPlan:
    """A scheme for one model.

    ``codecs`` has one for each cache of a row, lists of caches laid flat; None stays as it is. A
    row is encoded by the step after which it holds ``start`` tokens or more. ``block`` is the size
    of a block in tokens where layers that see everything are paged, which are never encoded.
    """

    codecs: tuple[Codec | None, ...] = ()
    start: int = 0
    block: int | None = None

    @property
    def encodes(self) -> bool:
        """Whether any layer is encoded at all."""
        return any(codec is not None for codec in self.codecs)

    def converted(self, caches: list[Any], tokens: int) -> list[Any]:
        """A lone row's caches once ``tokens`` tokens of it are certain; the same ones, or new."""
        if not self.encodes or tokens < self.start:
            return caches
        pairs = zip(flatten(caches), self.codecs, strict=True)
        return nest([encoded(cache, codec) for cache, codec in pairs], caches)

    def check_cut(self, have: int, length: int) -> None:
        """Raises CannotCut where a cold row of ``length`` tokens would still be plain.

        The bytes of an encoded row are for good: below the threshold nobody may go on from them.
        """
        if self.encodes and length < self.start <= have:
            raise CannotCut(
                f"a state of {have} tokens is encoded, one of {length} would not be yet"
            )

    def applied(self, caches: Sequence[Any]) -> tuple[KVLayers, ...]:
        """What the arrays of a row's caches say of its layers, alike ones counted together."""
        codecs = self.codecs or (None,) * len(flatten(caches))
        pairs = zip(flatten(caches), codecs, strict=True)
        counted = Counter(_described(cache, codec) for cache, codec in pairs)
        paged = f" in blocks of {self.block}" if self.block else ""
        return tuple(
            KVLayers(kind, form + paged if kind == "full" else form, count, size, fixed)
            for (kind, form, size, fixed), count in counted.items()
        )

    def live_layers(self, caches: list[Any], tokens: int) -> tuple[KVLayers, ...]:
        """:meth:`applied` of a live row; of what it will be, while it is below the start."""
        return self.applied(self.converted(caches, max(tokens, self.start)))


PLAIN_PLAN = KVPlan()


def encoded(cache: Any, codec: Codec | None) -> Any:
    """A single-row cache in the form of a codec; what has it already is left alone."""
    return codec.convert(cache) if codec is not None and PLAIN.is_held_by(cache) else cache


def make_plan(model: Module, scheme: KVScheme, folder: Path) -> KVPlan:
    """The plan for a loaded model. Raises ModelError for what it cannot take, naming both."""
    check_scheme(scheme)
    if isinstance(scheme, PagedKV):
        return _paged(model, scheme)
    lines = read_kv_config(folder) if isinstance(scheme, PerLayerKV) else ()
    if isinstance(scheme, PlainKV) or (isinstance(scheme, PerLayerKV) and not lines):
        if isinstance(scheme, PerLayerKV):
            log.warning("%s lists no layers in a %s: the KV cache stays plain", folder, CONFIG_FILE)
        return KVPlan()
    try:
        caches: list[Any] = make_prompt_cache(model)
        # Never evaluated: the shapes alone are wanted.
        model(mx.array([[0]]), cache=caches)
        codecs = _codecs(model, caches, scheme, lines)
    except _Refusal as refusal:
        option = f"--kv-quant {name_of(scheme)}"
        raise ModelError(f"{option} and {model_family(model)}: {refusal}") from refusal
    return KVPlan(codecs, start_of(scheme))


def _paged(model: Module, scheme: PagedKV) -> KVPlan:
    caches = flatten(make_prompt_cache(model))
    if not any(type(cache) is KVCache for cache in caches):
        raise ModelError(
            f"--paged-kv and {model_family(model)}: there is no layer that keeps every token"
        )
    return KVPlan(block=scheme.block_size)


class _Refusal(Exception):
    """Why a scheme and a model do not go together."""


def _codecs(
    model: Module, caches: list[Any], scheme: KVScheme, lines: tuple[LayerBits, ...]
) -> tuple[Codec | None, ...]:
    leaves = flatten(caches)
    match scheme:
        case PlainKV() | PagedKV():
            return (None,) * len(leaves)
        case AffineKV(bits, group_size):
            codecs = [_affine(cache, bits, group_size) for cache in leaves]
        case PerLayerKV():
            _check_order(model, caches)
            by_layer = {line.layer: line for line in lines}
            codecs = []
            for layer, cache in enumerate(caches):
                codecs += _listed(layer, flatten([cache]), by_layer.pop(layer, None))
            if by_layer:
                raise _Refusal(f"layer {min(by_layer)} of {CONFIG_FILE} has no KV cache of its own")
        case TurboKV(key_bits, value_bits):
            codecs = [_turbo(cache, key_bits, value_bits) for cache in leaves]
            sliding = [n for n, cache in enumerate(leaves) if type(cache) is RotatingKVCache]
            if sliding and any(codecs):
                log.warning("TurboQuant leaves sliding layers plain: %s", _numbers(sliding))
        case _:
            assert_never(scheme)
    if not any(codecs):
        raise _Refusal("there is no layer that it could encode")
    return tuple(codecs)


def _affine(cache: Any, bits: int, group_size: int) -> Codec | None:
    if type(cache) is ArraysCache:
        return None
    # On GPUs MLX's product with packed values (not transposed) leaves out what is beyond a multiple
    # of 64 columns, in silence (ml-explore/mlx #4250).
    whole = max(group_size, _WHOLE_COLUMNS)
    for size in _head_sizes(cache):
        if size % whole:
            raise _Refusal(f"heads of {size} are not whole groups of {whole}")
    return AffineCodec(bits, group_size)


def _turbo(cache: Any, key_bits: int, value_bits: int) -> Codec | None:
    if type(cache) is ArraysCache:
        return None
    for size in _head_sizes(cache):
        if type(cache) is not RotatingKVCache and size not in HEAD_SIZES:
            sizes = ", ".join(map(str, HEAD_SIZES))
            raise _Refusal(f"TurboQuant takes heads of {sizes}, not of {size}")
    return None if type(cache) is RotatingKVCache else TurboCodec(key_bits, value_bits)


def _listed(layer: int, leaves: list[Any], line: LayerBits | None) -> list[Codec | None]:
    """The codecs of one layer's caches, as its line of the file says."""
    if line is None:
        return [None] * len(leaves)
    codecs = [_affine(cache, line.bits, line.group_size) for cache in leaves]
    if not any(codecs):
        raise _Refusal(f"layer {layer} of {CONFIG_FILE} keeps no keys and values")
    return codecs


def _check_order(model: Any, caches: list[Any]) -> None:
    """Layer numbers mean caches only if each layer has one, or those without are the last."""
    layers = len(model.layers)
    text = getattr(model, "language_model", model)
    shared = int(getattr(getattr(text, "args", None), "num_kv_shared_layers", 0) or 0)
    if len(caches) not in (layers, layers - shared):
        raise _Refusal(f"{len(caches)} caches for {layers} layers: which is whose is not known")


def _head_sizes(cache: Any) -> tuple[int, int]:
    """Widths of keys and values. Raises _Refusal for a cache that no codec knows."""
    known = type(cache) is KVCache or (type(cache) is RotatingKVCache and cache.keep == 0)
    if not known:
        raise _Refusal(f"its {type(cache).__name__} cannot be encoded")
    return cache.keys.shape[-1], cache.values.shape[-1]


def _described(cache: Any, codec: Codec | None) -> tuple[str, str, int, int]:
    """Kind, form, bytes per token of capacity and those beside them, as the cache itself has it."""
    if isinstance(cache, ArraysCache):
        return "recurrent", "state", 0, sum(x.nbytes for x in cache.cache if x is not None)
    kind = "sliding" if isinstance(cache, RotatingKVCache | QuantizedRing) else "full"
    form = codec if codec is not None and codec.is_held_by(cache) else PLAIN
    if not form.is_held_by(cache):
        return kind, type(cache).__name__, 0, 0
    stored = form.stored_in(cache) or ()
    size = sum(x.nbytes // x.shape[2] for x in stored)
    return kind, f"plain {_dtype(stored)}" if form is PLAIN else form.name, size, 0


def _dtype(stored: tuple[mx.array, ...]) -> str:
    return str(stored[0].dtype).removeprefix("mlx.core.") if stored else ""


def _numbers(layers: list[int]) -> str:
    return ", ".join(map(str, layers))
