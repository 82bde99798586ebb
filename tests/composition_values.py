"""What the names of the composition matrix stand for: models, requests and their parts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_rig import make_mlx_adapter
from matrix import Case
from tiny import make_checkpoint
from tiny_families import FAMILIES as TINY

from mlx_troupe.runtime.grammars import ChoiceGrammar, Grammar, JsonGrammar, RegexGrammar
from mlx_troupe.runtime.kvschemes import (
    PLAIN_KV,
    AffineKV,
    KVScheme,
    PagedKV,
    PerLayerKV,
    TurboKV,
)
from mlx_troupe.runtime.requests import HlgRequest, SamplingRequest

FREE_TOKENS = 12
GRAMMAR_TOKENS = 40
"""Enough for every grammar below to end by itself."""
START = 30
"""Tokens from which a row is encoded, where that is delayed: most cases pass it while they run."""
LONG = 258
"""A prompt of which a state is kept even where states cannot be cut."""
HEAD = 33
"""What prompts have in common that are taken from a row that runs."""

KV: dict[str, KVScheme] = {
    "plain": PLAIN_KV,
    "affine 4": AffineKV(4),
    "affine 8": AffineKV(8),
    "by layer": PerLayerKV(),
    "turbo k8v3": TurboKV(),
    "paged": PagedKV(16),
    "delayed": AffineKV(8, start=START),
}
HEADS: dict[str, Any] = {"head_dim": 64}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", HEADS),
    "sliding": ("sliding", HEADS),
    "softcap": ("gemma2", HEADS),
    "hybrid": ("qwen3_5", {"text_config": {**TINY["qwen3_5"]["text_config"], **HEADS}}),
    "experts": ("qwen3_moe", HEADS),
    "shared KV": ("gemma4_text", {**HEADS, "global_head_dim": 64}),
    "row by row": ("stablelm", {"hidden_size": 256}),
}
KV_CONFIG = '[{"layer_idx": 1, "bits": 4, "group_size": 32}]'

SAMPLING: dict[str, SamplingRequest] = {
    "greedy": SamplingRequest(temperature=0.0),
    "filters": SamplingRequest(
        temperature=0.9, top_p=0.95, top_k=40, min_p=0.01, xtc_probability=0.5, xtc_threshold=0.05
    ),
    "penalties": SamplingRequest(
        temperature=0.7,
        repetition_penalty=1.3,
        repetition_context_size=8,
        presence_penalty=0.6,
        frequency_penalty=0.4,
        frequency_context_size=0,
        logit_bias=((5, 2.0), (70, -3.0), (101, 1.5)),
    ),
    "hlg": SamplingRequest(temperature=0.8, hlg=HlgRequest(enabled=True, toe=3.0)),
    "curve": SamplingRequest(temperature=0.8, curve=((-12.0, -30.0), (-4.0, -3.0), (0.0, 0.0))),
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5, "pattern": "^[a-z]+$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "ok"],
    "additionalProperties": False,
}
PATTERN = "[a-z]{4}-[0-9]{2,6}(\\.[A-F]{3})?"
CHOICES = ("no way at all", "not today", "maybe tomorrow", "mayflower")
GRAMMARS: dict[str, Grammar | None] = {
    "none": None,
    "json_schema": JsonGrammar(json.dumps(SCHEMA), any_whitespace=False),
    "regex": RegexGrammar(PATTERN),
    "choice": ChoiceGrammar(CHOICES),
}
ADAPTERS: dict[str, tuple[str, ...]] = {"none": (), "one": ("b",), "two": ("b", "a")}
LOGPROBS = {"off": None, "chosen": 0, "top 5": 5}


@dataclass(slots=True)
class Model:
    """A checkpoint on disk with adapters for it."""

    family: str
    path: Path
    adapters: dict[str, Path]


def others(case: Case) -> tuple[str, ...]:
    """Adapters that the case's row does not have."""
    return ADAPTERS["two" if case["adapters"] == "one" else "one"]


def make_model(folder: Path, family: str) -> Model:
    """A tiny checkpoint with heads of 64, two adapters and a ``kv_config.json``."""
    name, config = FAMILIES[family]
    path = make_checkpoint(folder / "model", name, **config)
    (path / "kv_config.json").write_text(KV_CONFIG)
    adapters = {
        adapter: make_mlx_adapter(folder / adapter, path, seed=seed, keys=None, layers=99)
        for seed, adapter in enumerate("ab", 1)
    }
    return Model(family, path, adapters)
