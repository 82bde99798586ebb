"""Low-rank pairs loaded from a folder for one model, all or none of them.

Pure functions, on the device thread, where the arrays must be made. What a folder holds is read by
``runtime.adapters``, what belongs where is decided by ``runtime.adapter_fit``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ..adapter_fit import AdapterTarget, Fit, fit
from ..adapters import CONFIG_FILE, WEIGHT_FILES, AdapterDescription, AdapterInfo, inspect_adapter
from ..errors import AdapterError
from .adapter_pairs import Pair

_Tensors = Mapping[str, mx.array]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Adapter:
    """A loaded adapter; rows that use it hold on to it.

    ``pairs`` change what a module computes from its inputs, by the module's name; ``heads`` what
    an embedding computes as the output layer.
    """

    info: AdapterInfo
    pairs: Mapping[str, Pair]
    heads: Mapping[str, Pair]


def targets_of(model: nn.Module) -> dict[str, AdapterTarget]:
    """The modules that can be adapted, by name."""
    found = (_target(name, module) for name, module in model.named_modules())
    return {target.name: target for target in found if target is not None}


def load_adapter(
    model: nn.Module, targets: Mapping[str, AdapterTarget], adapter_id: str, path: Path
) -> Adapter:
    """Read, check and load a folder. Raises AdapterError."""
    before = _stamps(path)
    description = inspect_adapter(path)
    fits = fit(description, targets)
    modules = dict(model.named_modules())
    try:
        tensors: Any = mx.load(description.weights)
        loaded = [(one, _pair(one, tensors, modules[one.target.name])) for one in fits]
        finite = [mx.isfinite(x).all() for _, pair in loaded for x in (pair.a, pair.b)]
        mx.eval(finite, [(pair.a, pair.b) for _, pair in loaded])
    except Exception as error:
        raise AdapterError(f"{path} cannot be loaded: {error}") from error
    if not all(bool(one.item()) for one in finite):
        raise AdapterError(f"{path} holds numbers that are not finite")
    if _stamps(path) != before:
        raise AdapterError(f"{path} changed while it was read")
    return _adapter(adapter_id, description, loaded)


def _adapter(
    adapter_id: str, description: AdapterDescription, loaded: Sequence[tuple[Fit, Pair]]
) -> Adapter:
    pairs = {one.target.name: pair for one, pair in loaded if one.use != "head"}
    heads = {one.target.name: pair for one, pair in loaded if one.use in ("head", "embedding")}
    info = AdapterInfo(
        id=adapter_id,
        path=description.path,
        revision=description.revision,
        rank=description.rank,
        scale=description.scale,
        mounted_layers=len(pairs.keys() | heads.keys()),
        size_bytes=description.size_bytes,
        ram_bytes=sum(pair.a.nbytes + pair.b.nbytes for _, pair in loaded),
    )
    return Adapter(info, pairs, heads)


def _target(name: str, module: object) -> AdapterTarget | None:
    match module:
        case nn.Linear() | nn.QuantizedLinear():
            outputs, inputs = _dense_shape(module)
            return AdapterTarget(name, "linear", inputs, outputs)
        case nn.Embedding() | nn.QuantizedEmbedding():
            return AdapterTarget(name, "embedding", *_dense_shape(module))
        case SwitchLinear() | QuantizedSwitchLinear():
            return AdapterTarget(
                name, "experts", module.input_dims, module.output_dims, module.num_experts
            )
        case _:
            return None


def _dense_shape(module: Any) -> tuple[int, int]:
    rows, width = module.weight.shape
    return rows, width * 32 // module.bits if "scales" in module else width


def _pair(one: Fit, tensors: _Tensors, module: Any) -> Pair:
    parts = [(tensors[part.a], tensors[part.b]) for part in one.parts]
    a, b = parts[0]
    if one.experts:
        a, b = _stacked_experts(one, parts)
    elif one.use == "head":
        a, b = b, a
    elif _is_peft(one):
        a, b = a.T, b.T
    # What a matrix product would widen at every step is widened once.
    like = module.scales if "scales" in module else module.weight
    if mx.issubdtype(like.dtype, mx.floating):
        a, b = (x.astype(mx.result_type(x, like)) for x in (a, b))
    return Pair(mx.contiguous(a), mx.contiguous(b), one.scale)


def _is_peft(one: Fit) -> bool:
    return not one.parts[0].a.endswith(".lora_a")


def _stacked_experts(
    one: Fit, parts: Sequence[tuple[mx.array, mx.array]]
) -> tuple[mx.array, mx.array]:
    """Experts that come one by one, with zeros for those that were not trained."""
    by_expert = dict(zip(one.experts, parts, strict=True))
    a, b = parts[0]
    none = mx.zeros_like(a), mx.zeros_like(b)
    every = [by_expert.get(number, none) for number in range(one.target.experts or 0)]
    return mx.stack([a for a, _ in every]), mx.stack([b for _, b in every])


def _stamps(path: Path) -> list[tuple[int, int, int] | None]:
    """What tells a file that was replaced or written from one that was not."""
    found: list[tuple[int, int, int] | None] = []
    for name in (CONFIG_FILE, *WEIGHT_FILES.values()):
        try:
            stat = (path / name).stat()
        except (OSError, ValueError):
            found.append(None)
        else:
            found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return found
