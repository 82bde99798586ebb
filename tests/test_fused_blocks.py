"""Fused blocks: which parts of which families, and the same logits as the classes' own."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from ragged_rig import Replayed
from tiny import load_oracle, make_checkpoint, prompt

from mlx_troupe.runtime.engine import fused_blocks
from mlx_troupe.runtime.engine.attention import install_attention
from mlx_troupe.runtime.engine.fused_blocks import fuse_blocks, source_digest, unfuse_blocks
from mlx_troupe.runtime.engine.fusing import fuse_projections
from mlx_troupe.runtime.engine.opening import Options, load_parts
from mlx_troupe.runtime.engine.selfcheck import why_not_batchable
from mlx_troupe.runtime.engine.turbo_cache import TurboCache

pytestmark = pytest.mark.mlx

FUSED = {
    "llama": {"block": 3, "attention": 3, "feed-forward": 3},
    "qwen2": {"block": 3, "attention": 3, "feed-forward": 3},
    "qwen3": {"block": 3, "normed-attention": 3, "feed-forward": 3},
    "qwen3_moe": {"block": 3, "normed-attention": 3, "feed-forward": 1},
    "smollm3": {"block": 4, "attention": 4, "feed-forward": 4},
    "sliding": {"block": 3, "attention": 3, "feed-forward": 3},
    "granite": {"attention": 3, "feed-forward": 3},
    "starcoder2": {"attention": 3},
    "gemma": {"attention": 3},
    "glm4": {"attention": 3},
    "olmo2": {"feed-forward": 3},
    "phi3": {"block": 3},
    "gemma2": {},
}
"""What is not said reads otherwise, or has other modules; the models have three layers or four."""

KINDS = {
    fused_blocks._FusedBlock: "block",
    fused_blocks._FusedNormedAttention: "normed-attention",
    fused_blocks._FusedAttention: "attention",
    fused_blocks._FusedFeedForward: "feed-forward",
}


def fused_model(path: Path, family: str = "llama", **config: Any) -> tuple[Any, int]:
    """A model with all that can be fused, and how many parts that were."""
    model = load_oracle(make_checkpoint(path / family, family, **config))
    object.__setattr__(model, "solo_runs", {})
    install_attention()
    fuse_projections(model)
    return model, fuse_blocks(model)


def parts(model: nn.Module) -> Counter[str]:
    """What was fused, by kind."""
    bases = [type(module).__bases__[0] for module in model.modules()]
    return Counter(KINDS[base] for base in bases if base in KINDS)


@pytest.mark.parametrize("family", FUSED)
def test_the_ordinary_parts_are_found(family: str, tmp_path: Path) -> None:
    """With no parameter more or less; taken back, nothing is left of it."""
    model, made = fused_model(tmp_path, family)
    assert parts(model) == FUSED[family]
    assert made == sum(FUSED[family].values())
    assert fuse_blocks(model) == 0
    plain = load_oracle(tmp_path / family)
    names = {name for name, _ in tree_flatten(plain.parameters())}
    assert {name for name, _ in tree_flatten(model.parameters())} == names
    assert unfuse_blocks(model) == made
    fuse_projections(plain)
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]


@pytest.mark.parametrize("family", [name for name, kinds in FUSED.items() if kinds])
def test_logits_are_as_they_were(family: str, tmp_path: Path) -> None:
    """One row, then three of other lengths, one of which leaves; prefill in several columns."""
    model, _ = fused_model(tmp_path, family)
    troupe = Replayed(model)
    troupe.add(0, 9)
    for _ in range(3):
        troupe.step()
    troupe.add(1, 60)
    troupe.add(2, 3)
    for _ in range(6):
        troupe.step()
    troupe.drop(1)
    troupe.step(3)
    for _ in range(3):
        troupe.step()
    assert troupe.replays


def test_other_ropes_are_left_to_their_modules(tmp_path: Path) -> None:
    """Llama 3's frequencies, and a rope that scales: both as mlx-lm computes them."""
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    for number, scaling in enumerate((llama3, yarn)):
        model, _ = fused_model(tmp_path / str(number), rope_scaling=scaling)
        known = fused_blocks.rotation_of(model.layers[0].self_attn.rope)
        assert (known is not None) is (scaling is llama3)
        troupe = Replayed(model)
        troupe.add(0, 70)
        troupe.add(1, 5)
        for _ in range(4):
            troupe.step()


def test_norms_that_differ_stay_apart(tmp_path: Path) -> None:
    """Keys with another epsilon than queries, and a norm of another kind, each in one layer."""

    class OwnNorm(nn.RMSNorm):
        pass

    model: Any = load_oracle(make_checkpoint(tmp_path / "m", "qwen3"))
    model.layers[0].self_attn.k_norm.eps = 1.0
    model.layers[1].post_attention_layernorm.__class__ = OwnNorm
    fuse_projections(model)
    fuse_blocks(model)
    assert parts(model) == {"block": 2, "normed-attention": 2, "feed-forward": 3}


def test_a_lone_row_s_own_caches_are_left_to_the_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also such as attend by themselves: they count tokens with an int, where kernels want arrays.

    A prompt's last token may come to them alone.
    """
    model, _ = fused_model(tmp_path, head_dim=64)
    split = []
    monkeypatch.setattr(fused_blocks, "_split_heads", lambda *inputs: split.append(inputs))
    for caches in ([TurboCache(8, 3) for _ in model.layers], make_prompt_cache(model)):
        model(mx.array([prompt(5)]), cache=caches)
        logits = model(mx.array([prompt(1, seed=1)]), cache=caches)
        assert bool(mx.isfinite(logits).all().item())
    assert not split


def test_layers_that_are_no_modules_are_passed_by(tmp_path: Path) -> None:
    """A list of layers may hold functions."""
    model, made = fused_model(tmp_path)
    model.head = nn.Sequential(nn.Linear(4, 4), nn.gelu)
    assert unfuse_blocks(model) == made
    assert fuse_blocks(model) == made


def test_a_step_takes_fewer_operations(tmp_path: Path) -> None:
    """Even without kernels: a layer's views go."""
    ids = mx.array([prompt(1)])
    model, _ = fused_model(tmp_path)
    counts = []
    for _ in range(2):
        troupe = Replayed(model)
        troupe.add(0, 9)
        caches = troupe.batch.begin(1)
        file = tmp_path / "graph.dot"
        mx.export_to_dot(str(file), model(ids, cache=caches))
        counts.append(file.read_text().count("shape=rectangle"))
        unfuse_blocks(model)
    assert counts[0] < counts[1]


def _block_that_subtracts(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
    r = self.self_attn(self.input_layernorm(x), mask, cache)
    h = x + r
    r = self.mlp(self.post_attention_layernorm(h))
    out = h - r
    return out


def _doubled(call: Any) -> Any:
    @functools.wraps(call)
    def doubled(self: Any, *inputs: Any) -> Any:
        return call(self, *inputs) * 2

    return doubled


# fmt: off
def _block_in_another_hand(
        self, x: object,
        mask: Any = None, cache: Any = None,
) -> Any:
    r = self.self_attn(
        self.input_layernorm(x), mask, cache,
    )
    h = x + r  # the first residual
    r = self.mlp(self.post_attention_layernorm(h))
    out = h + r
    return out
# fmt: on


def test_what_a_class_does_is_told_by_its_words() -> None:
    """Formatting, comments and annotations do not count; a sign does, and so does no source."""
    known = source_digest(llama.TransformerBlock)
    for call, same in ((_block_that_subtracts, False), (_block_in_another_hand, True)):
        kind = type("Block", (nn.Module,), {"__call__": call})
        assert (source_digest(kind) == known) is same
    wrapped = type("Block", (nn.Module,), {"__call__": _doubled(llama.TransformerBlock.__call__)})
    assert source_digest(wrapped) == ""
    namespace: dict[str, Any] = {}
    exec("def call(self, x): return x", namespace)
    assert source_digest(type("Block", (nn.Module,), {"__call__": namespace["call"]})) == ""


def test_fused_blocks_that_are_wrong_here_are_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At load, where rows together are compared with rows alone; the model runs without them."""
    path = make_checkpoint(tmp_path / "m", "llama")
    honest = load_parts(Options(path, name="honest", replay=True))
    assert parts(honest.model)
    monkeypatch.setattr(
        fused_blocks, "_add_norm", lambda x, residual, norm: (x - residual, norm(x - residual))
    )
    model = fused_model(tmp_path)[0]
    assert why_not_batchable(model) is not None
    wary = load_parts(Options(path, name="wary", replay=True))
    assert not parts(wary.model)
    assert wary.info.batchable


def test_a_norm_is_used_for_its_own_input_only(tmp_path: Path) -> None:
    """What a block left ahead and nobody took is not taken for another array's."""
    model, _ = fused_model(tmp_path)
    norm = model.model.norm
    x, other = mx.ones((1, 1, 64)), mx.full((1, 1, 64), 2.0)
    norm.ahead.put(x, mx.zeros_like(x))
    assert mx.array_equal(norm(other), mx.fast.rms_norm(other, norm.weight, norm.eps))
    assert mx.array_equal(norm(x), mx.fast.rms_norm(x, norm.weight, norm.eps))
    norm.ahead.put(x, mx.zeros_like(x))
    assert mx.array_equal(norm(x), mx.zeros_like(x))
