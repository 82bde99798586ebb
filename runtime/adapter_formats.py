"""The low-rank pairs of an adapter folder, from its configuration and the names and shapes in it.

Knows the two formats, mlx-lm's and PEFT's, and refuses by name whatever is more than plain LoRA.
Pure functions and frozen values: no files, no weights, no model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from .errors import AdapterError

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
Config: TypeAlias = Mapping[str, object]

_PEFT_PREFIX = "base_model.model."
_PEFT_REFUSED = (
    "modules_to_save",
    "use_dora",
    "use_qalora",
    "lora_bias",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
)
"""Settings of PEFT that change more than the low-rank pairs, or how these are used."""
_BASE_CHANGING = ("pissa", "olora", "corda", "loftq")
"""Ways to initialise that also change the base weights, which the folder does not hold."""


@dataclass(frozen=True, slots=True)
class AdapterModule:
    """The low-rank pair of one module, as the folder names it.

    ``a`` and ``b`` are tensor names. ``inputs`` and ``outputs`` are the module's widths (for an
    embedding the vocabulary and the width); ``experts`` is None but for stacked experts.
    ``embedding`` marks a PEFT pair that changes the look-up of an embedding only.
    """

    name: str
    a: str
    b: str
    inputs: int
    outputs: int
    experts: int | None
    rank: int
    scale: float = 1.0
    embedding: bool = False


@dataclass(frozen=True, slots=True)
class Pairs:
    """All pairs of a folder. ``scale`` is that of a module for which no exception is made."""

    scale: float
    modules: tuple[AdapterModule, ...]


def read_mlx(where: str, config: Config, shapes: Shapes) -> Pairs:
    """The pairs of an mlx-lm folder. Raises AdapterError."""
    kind = config.get("fine_tune_type", "lora")
    if kind != "lora":
        raise AdapterError(f"{where} holds a fine-tune of type {kind!r}; only LoRA can be mounted")
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise AdapterError(f"{where}: the configuration has no lora_parameters")
    scale = _number(where, "lora_parameters.scale", parameters.get("scale"))
    rank = _rank(where, "lora_parameters.rank", parameters.get("rank"))
    names = _pairs(where, shapes, (".lora_a", ".lora_b"))
    modules = (_mlx_module(where, name, *keys, shapes, rank) for name, keys in names.items())
    return Pairs(scale, tuple(replace(module, scale=scale) for module in modules))


def read_peft(where: str, config: Config, shapes: Shapes) -> Pairs:
    """The pairs of a PEFT folder. Raises AdapterError."""
    _refuse_more_than_lora(where, config)
    scale = _scale_of(where, config, "", _rank(where, "r", config.get("r")))
    ends = (".lora_A.weight", ".lora_B.weight"), (".lora_embedding_A", ".lora_embedding_B")
    modules: list[AdapterModule] = []
    for embedding in (False, True):
        part = {k: v for k, v in shapes.items() if (".lora_embedding_" in k) is embedding}
        for name, keys in _pairs(where, part, ends[embedding]).items():
            module = _peft_module(where, name, *keys, shapes, config)
            modules.append(replace(module, embedding=embedding))
    return Pairs(scale, tuple(modules))


def _mlx_module(where: str, name: str, a: str, b: str, shapes: Shapes, rank: int) -> AdapterModule:
    match shapes[a], shapes[b]:
        case (inputs, r), (s, outputs) if r == s == rank:
            return AdapterModule(name, a, b, inputs, outputs, None, rank)
        case (experts, r, inputs), (same, outputs, s) if r == s == rank and same == experts:
            return AdapterModule(name, a, b, inputs, outputs, experts, rank)
        case of_a, of_b:
            raise AdapterError(f"{where}: {name} has shapes {of_a} and {of_b} at rank {rank}")


def _peft_module(
    where: str, full: str, a: str, b: str, shapes: Shapes, config: Config
) -> AdapterModule:
    if not full.startswith(_PEFT_PREFIX):
        raise AdapterError(f"{where}: {full} is not a module of {_PEFT_PREFIX}*")
    name = full.removeprefix(_PEFT_PREFIX)
    rank = _rank(where, "r", _pattern(where, config, "rank_pattern", name, config.get("r")))
    match shapes[a], shapes[b]:
        case (r, inputs), (outputs, s) if r == s == rank:
            scale = _scale_of(where, config, name, rank)
            return AdapterModule(name, a, b, inputs, outputs, None, rank, scale)
        case of_a, of_b:
            raise AdapterError(f"{where}: {name} has shapes {of_a} and {of_b} at rank {rank}")


def _refuse_more_than_lora(where: str, config: Config) -> None:
    if config.get("peft_type") != "LORA":
        kind = config.get("peft_type")
        raise AdapterError(f"{where} is a PEFT adapter of type {kind!r}, not LORA")
    for setting in _PEFT_REFUSED:
        if config.get(setting):
            raise AdapterError(f"{where} uses PEFT's {setting}, which cannot be mounted")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"{where} trained biases too (bias = {config['bias']!r})")
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_BASE_CHANGING):
        raise AdapterError(f"{where} was initialised by {start!r}, which changes the base weights")


def _scale_of(where: str, config: Config, name: str, rank: int) -> float:
    alpha = _pattern(where, config, "alpha_pattern", name, config.get("lora_alpha"))
    divisor = math.sqrt(rank) if config.get("use_rslora") else rank
    return _number(where, "lora_alpha", alpha) / divisor


def _pattern(where: str, config: Config, setting: str, name: str, otherwise: object) -> object:
    """What a pattern of PEFT says of a module. Names and their ends are patterns, no more.

    (Others may run an expression of theirs; here it could come from anybody.)
    """
    patterns = config.get(setting) or {}
    if not isinstance(patterns, dict):
        raise AdapterError(f"{where}: {setting} is not an object")
    for key, value in patterns.items():
        plain = key.replace("\\.", ".").removeprefix("^").removesuffix("$")
        if not plain.replace(".", "").replace("_", "").isalnum():
            raise AdapterError(
                f"{where}: {setting} holds an expression, {key!r}; only names can be"
            )
        if name == plain or (not key.startswith("^") and name.endswith(f".{plain}")):
            return value
    return otherwise


def _pairs(where: str, shapes: Shapes, ends: tuple[str, str]) -> dict[str, tuple[str, str]]:
    """Names of both tensors by module. Raises AdapterError for half a pair or anything else."""
    names: dict[str, None] = {}
    for key in shapes:
        end = next((end for end in ends if key.endswith(end)), None)
        if end is None:
            dora = key.endswith(".m") or "lora_magnitude_vector" in key
            what = "belongs to DoRA" if dora else "is not part of a low-rank pair"
            raise AdapterError(f"{where}: {key} {what}; only LoRA can be mounted")
        names[key.removesuffix(end)] = None
    for name in names:
        for end in ends:
            if name + end not in shapes:
                raise AdapterError(f"{where}: {name} has no {end[1:]}")
    return {name: (name + ends[0], name + ends[1]) for name in names}


def _number(where: str, setting: str, value: object) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, str) or not math.isfinite(number):
        raise AdapterError(f"{where}: {setting} is {value!r}, not a number")
    return number


def _rank(where: str, setting: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise AdapterError(f"{where}: {setting} is {value!r}, not a rank")
    return value
