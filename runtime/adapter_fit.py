"""Whether an adapter fits a model, and which of its pairs belongs to which module.

Pure functions and frozen values: the model is a table of :class:`AdapterTarget`, the adapter a
description. Knows how names of other formats are spelt in mlx-lm's models; reads no files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from .adapters import AdapterDescription, AdapterModule
from .errors import AdapterError

TargetKind: TypeAlias = Literal["linear", "experts", "embedding"]
Use: TypeAlias = Literal["linear", "experts", "embedding", "lookup", "head"]
"""What a pair changes: a linear layer, stacked experts, an embedding in both of its roles (as
mlx-lm does), its look-up only, or a tied embedding as the output layer only (as PEFT does)."""

_EXPERT = re.compile(r"(.+)\.experts\.(\d{1,5})\.(\w+)")
_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_HEAD = "lm_head"
_EMBEDDINGS = "embed_tokens"
_MAX_PROBLEMS = 3


@dataclass(frozen=True, slots=True)
class AdapterTarget:
    """A module that can be adapted; an embedding's ``inputs`` are its vocabulary."""

    name: str
    kind: TargetKind
    inputs: int
    outputs: int
    experts: int | None = None


@dataclass(frozen=True, slots=True)
class Fit:
    """The pair for one module: one part, or one for each of the ``experts`` numbered."""

    target: AdapterTarget
    use: Use
    parts: tuple[AdapterModule, ...]
    experts: tuple[int, ...] = ()

    @property
    def rank(self) -> int:
        """The pair's rank; all parts have the same."""
        return self.parts[0].rank

    @property
    def scale(self) -> float:
        """The pair's scale; all parts have the same."""
        return self.parts[0].scale


def fit(description: AdapterDescription, targets: Mapping[str, AdapterTarget]) -> tuple[Fit, ...]:
    """Find every pair's module. Raises AdapterError unless all of them have one of their shape."""
    problems: list[str] = []
    found: dict[tuple[str, Use], Fit] = {}
    for module in description.modules:
        one = _fit_one(description, module, targets)
        if isinstance(one, str):
            problems.append(f"{module.name}: {one}")
            continue
        key = one.target.name, one.use
        joined = _join(found[key], one) if key in found else one
        if isinstance(joined, str):
            problems.append(f"{module.name}: {joined}")
        else:
            found[key] = joined
    if problems:
        more = f" and {len(problems) - _MAX_PROBLEMS} more" * (len(problems) > _MAX_PROBLEMS)
        reasons = "; ".join(problems[:_MAX_PROBLEMS]) + more
        raise AdapterError(f"{description.path} does not fit the model: {reasons}")
    return tuple(found.values())


def _fit_one(
    description: AdapterDescription, module: AdapterModule, targets: Mapping[str, AdapterTarget]
) -> Fit | str:
    names = tuple(_spellings(module.name))
    for name in names:
        if (target := targets.get(name)) is not None:
            use = _use(description, module, target)
            return _checked(Fit(target, use, (module,)), module) if use else _wrong_kind(target)
        if (expert := _EXPERT.fullmatch(name)) is not None:
            parent, number, projection = expert.groups()
            projection = _PROJECTIONS.get(projection, projection)
            target = targets.get(f"{parent}.switch_mlp.{projection}")
            if target is not None and target.kind == "experts":
                return _checked(Fit(target, "experts", (module,), (int(number),)), module)
    if module.name.rpartition(".")[2] == _HEAD and (tied := _embeddings(targets)) is not None:
        return _checked(Fit(tied, "head", (module,)), module)
    return "the model has no such module, or none that can be adapted"


def _spellings(name: str) -> Iterator[str]:
    yield name
    yield f"language_model.{name}"
    if name.startswith("model.language_model."):
        yield f"language_model.model.{name.removeprefix('model.language_model.')}"
        yield f"model.{name.removeprefix('model.language_model.')}"


def _use(
    description: AdapterDescription, module: AdapterModule, target: AdapterTarget
) -> Use | None:
    if target.kind == "embedding" and description.kind == "peft":
        return "lookup" if module.embedding else None
    return None if module.embedding else target.kind


def _wrong_kind(target: AdapterTarget) -> str:
    return f"a pair of another kind than {target.kind} layers take"


def _embeddings(targets: Mapping[str, AdapterTarget]) -> AdapterTarget | None:
    """The only embedding that may be the output layer too."""
    found = [t for t in targets.values() if t.name.rpartition(".")[2] == _EMBEDDINGS]
    return found[0] if len(found) == 1 and found[0].kind == "embedding" else None


def _checked(one: Fit, module: AdapterModule) -> Fit | str:
    target = one.target
    wanted = (target.inputs, target.outputs)
    if one.use == "head":
        wanted = wanted[::-1]
    if (module.inputs, module.outputs) != wanted:
        return (
            f"made for {module.inputs} × {module.outputs}, the model has {wanted[0]} × {wanted[1]}"
        )
    if one.experts:
        fits = target.experts is not None and one.experts[0] < target.experts
    else:
        fits = module.experts == target.experts
    return one if fits else f"made for other experts than the model's {target.experts}"


def _join(known: Fit, one: Fit) -> Fit | str:
    """Two pairs of one module: experts that come one by one, or a mistake."""
    if not known.experts or not one.experts or one.experts[0] in known.experts:
        return f"a second pair for {one.target.name}"
    if (known.rank, known.scale) != (one.rank, one.scale):
        return "experts of one layer differ in rank or scale"
    return Fit(known.target, known.use, known.parts + one.parts, known.experts + one.experts)
