"""Adapter folders of both formats: what is read, what is refused by name, and what fits a model."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lora_rig import logits_of, make_mlx_adapter, make_peft_adapter, write_folder
from ragged_rig import assert_equal
from tiny import load_oracle, make_checkpoint, prompt

from mlx_troupe.runtime.adapters import MAX_CONFIG_BYTES, inspect_adapter
from mlx_troupe.runtime.engine.adapters import Adapters
from mlx_troupe.runtime.errors import AdapterError

pytestmark = pytest.mark.mlx

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.2.mlp.down_proj"
LINEAR = {Q: (64, 64), DOWN: (96, 64)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def folder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good mlx-lm folder."""
    return make_mlx_adapter(tmp_path_factory.mktemp("good"), checkpoint, rank=3, scale=1.5)


@pytest.fixture(scope="module")
def peft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good PEFT folder."""
    return make_peft_adapter(tmp_path_factory.mktemp("peft"), LINEAR, rank=8)


def test_a_description_says_what_the_folder_holds(folder: Path, peft: Path) -> None:
    """Kind, rank, scale, size and the modules' shapes, from the header alone."""
    ours, theirs = inspect_adapter(folder), inspect_adapter(peft)
    assert (ours.kind, ours.rank, ours.scale) == ("mlx-lm", 3, 1.5)
    assert (theirs.kind, theirs.rank, theirs.scale) == ("peft", 8, 0.5)
    assert ours.size_bytes == sum(file.stat().st_size for file in folder.iterdir())
    shapes = {m.name: (m.inputs, m.outputs) for m in theirs.modules}
    assert shapes == LINEAR
    assert len(ours.modules) == 15


@pytest.mark.parametrize("rslora", [False, True])
def test_peft_pairs_change_what_merged_weights_change(
    checkpoint: Path, tmp_path: Path, rslora: bool
) -> None:
    """W + alpha / r · B A, or alpha / √r, with exceptions for some modules' rank and alpha."""
    path = make_peft_adapter(
        tmp_path, {Q: (64, 64)}, rank=4, use_rslora=rslora, alpha_pattern={"q_proj": 6}
    )
    other = make_peft_adapter(tmp_path / "o", {DOWN: (96, 64)}, rank=2)
    weights: Any = mx.load(str(path / "adapter_model.safetensors"))
    weights |= mx.load(str(other / "adapter_model.safetensors"))
    config = config_of(path) | {"rank_pattern": {"model.layers.2.mlp.down_proj": 2}}
    write_folder(tmp_path, config, weights, "adapter_model.safetensors")
    root = 0.5 if rslora else 1.0
    merged: Any = load_oracle(checkpoint)
    for layer, name, scale in ((0, "self_attn.q_proj", 6 / 4 / root), (2, "mlp.down_proj", None)):
        parent, leaf = name.split(".")
        pair = [
            weights[f"base_model.model.model.layers.{layer}.{name}.lora_{x}.weight"] for x in "AB"
        ]
        scale = scale or 4 / (2**0.5 if rslora else 2)
        module = merged.layers[layer][parent][leaf]
        module.weight = module.weight + scale * pair[1] @ pair[0]
    assert_equal(mounted(checkpoint, tmp_path), logits_of(merged, prompt(30)))


def test_peft_pairs_of_embedding_and_tied_output_layer_are_apart(tmp_path: Path) -> None:
    """PEFT adapts the look-up and the output layer of a tied embedding each for itself."""
    checkpoint = make_checkpoint(tmp_path / "tied", "llama", tie_word_embeddings=True)
    embedding, head = "model.embed_tokens", "lm_head"
    shapes = {embedding: (128, 64), head: (64, 128)}
    path = make_peft_adapter(tmp_path / "both", shapes, rank=2, embeddings=[embedding])
    weights: Any = mx.load(str(path / "adapter_model.safetensors"))
    pairs = {
        "embed_tokens": (
            "model.embed_tokens.lora_embedding_B",
            "model.embed_tokens.lora_embedding_A",
        ),
        "lm_head": ("lm_head.lora_B.weight", "lm_head.lora_A.weight"),
    }
    change = {
        name: 2 * weights[f"base_model.model.{b}"] @ weights[f"base_model.model.{a}"]
        for name, (b, a) in pairs.items()
    }
    untied_config = make_checkpoint(tmp_path / "untied", "llama")
    merged: Any = load_oracle(untied_config)
    tied: Any = load_oracle(checkpoint)
    merged.update(tied.parameters())
    table = tied.model.embed_tokens.weight
    merged.model.embed_tokens.weight = table + change["embed_tokens"].T
    merged.lm_head.weight = table + change["lm_head"]
    assert_equal(mounted(checkpoint, path), logits_of(merged, prompt(30)))


def test_peft_experts_come_one_by_one(tmp_path: Path) -> None:
    """Pairs named experts.N.* become a stack; an expert without one is left as it is."""
    checkpoint = make_checkpoint(tmp_path / "moe", "qwen3_moe")
    names = {n: f"model.layers.0.mlp.experts.{n}.up_proj" for n in (0, 1, 3)}
    path = make_peft_adapter(tmp_path / "a", dict.fromkeys(names.values(), (64, 32)), rank=2)
    weights: Any = mx.load(str(path / "adapter_model.safetensors"))
    merged: Any = load_oracle(checkpoint)
    stack = merged.layers[0].mlp.switch_mlp.up_proj
    for number, name in names.items():
        a, b = (weights[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
        stack.weight[number] = stack.weight[number] + 2 * b @ a
    assert_equal(mounted(checkpoint, path, 50), logits_of(merged, prompt(50)))


def mounted(checkpoint: Path, path: Path, length: int = 30) -> mx.array:
    """Logits of a model with the adapter mounted."""
    model = load_oracle(checkpoint)
    adapters = Adapters(model, together=True)
    chain = adapters.chain([adapters.mount("x", path).revision])
    with adapters.shown([chain]):
        shown = logits_of(model, prompt(length))
    assert mx.abs(shown - logits_of(model, prompt(length))).max().item() > 0.1
    return shown


def config_of(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((path / "adapter_config.json").read_text())
    return config


def rewrite(**changes: Any) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        (path / "adapter_config.json").write_text(json.dumps(config_of(path) | changes))

    return spoil


def retensor(changes: dict[str, mx.array | None]) -> Callable[[Path], None]:
    """Replace tensors, or leave them out for None."""

    def spoil(path: Path) -> None:
        (file,) = path.glob("*.safetensors")
        weights: Any = mx.load(str(file))
        mx.eval(weights)
        file.unlink()
        weights |= changes
        mx.save_safetensors(str(file), {k: w for k, w in weights.items() if w is not None})

    return spoil


def without_pairs(path: Path) -> None:
    (file,) = path.glob("*.safetensors")
    mx.save_safetensors(str(file), {})


def truncate(path: Path) -> None:
    (file,) = path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])


def lie_about_the_header(path: Path) -> None:
    (file,) = path.glob("*.safetensors")
    file.write_bytes((1 << 40).to_bytes(8, "little") + file.read_bytes()[8:])


def make_it_a_pipe(path: Path) -> None:
    (file,) = path.glob("*.safetensors")
    file.unlink()
    os.mkfifo(file)


def pickle_it(path: Path) -> None:
    (file,) = path.glob("*.safetensors")
    file.rename(path / "adapter_model.bin")


def write_config(content: bytes) -> Callable[[Path], object]:
    return lambda path: (path / "adapter_config.json").write_bytes(content)


LORA = {"rank": 3, "scale": 1.5}
A = "model.layers.0.self_attn.q_proj.lora_a"
BAD_MLX: dict[str, tuple[Callable[[Path], object], str]] = {
    "dora": (rewrite(fine_tune_type="dora"), "type 'dora'; only LoRA"),
    "full": (rewrite(fine_tune_type="full"), "type 'full'"),
    "magnitudes": (retensor({Q + ".m": mx.zeros((64,))}), "belongs to DoRA"),
    "whole weights": (
        retensor({Q + ".weight": mx.zeros((64, 64))}),
        "not part of a low-rank pair",
    ),
    "half a pair": (retensor({A: None}), "has no lora_a"),
    "no pairs": (without_pairs, "no low-rank pair"),
    "another rank": (rewrite(lora_parameters=LORA | {"rank": 5}), "at rank 5"),
    "no rank": (rewrite(lora_parameters={"scale": 1.0}), "not a rank"),
    "no scale": (rewrite(lora_parameters={"rank": 3, "alpha": 16}), "scale is None"),
    "scale a word": (rewrite(lora_parameters=LORA | {"scale": "2"}), "not a number"),
    "scale huge": (rewrite(lora_parameters=LORA | {"scale": 10**400}), "not a number"),
    "scale not finite": (rewrite(lora_parameters=LORA | {"scale": float("nan")}), "not a number"),
    "no parameters": (rewrite(lora_parameters=[1]), "no lora_parameters"),
    "flat": (retensor({A: mx.zeros((64,))}), "has shapes"),
    "integers": (retensor({A: mx.zeros((64, 3), mx.int32)}), "of type I32"),
    "truncated": (truncate, "cannot be read"),
    "header": (lie_about_the_header, "cannot be read"),
    "pipe": (make_it_a_pipe, "holds no adapters.safetensors"),
    "pickle": (pickle_it, "holds no adapters.safetensors"),
    "not json": (write_config(b"{"), "cannot be read"),
    "not text": (write_config(b"\xff\xfe\x00"), "cannot be read"),
    "nested": (write_config(b"[" * 100_000), "cannot be read"),
    "a list": (write_config(b"[]"), "not an object"),
    "large": (write_config(b" " * (MAX_CONFIG_BYTES + 1)), "larger than"),
    "no config": (lambda path: (path / "adapter_config.json").unlink(), "holds no adapter_config"),
    "no folder": (shutil.rmtree, "not a directory"),
}
A_OF_PEFT = f"base_model.model.{Q}.lora_A.weight"
BAD_PEFT: dict[str, tuple[Callable[[Path], None], str]] = {
    "ia3": (rewrite(peft_type="IA3"), "'IA3', not LORA"),
    "dora": (rewrite(use_dora=True), "use_dora"),
    "modules": (rewrite(modules_to_save=["lm_head"]), "modules_to_save"),
    "bias": (rewrite(bias="all"), "biases"),
    "pissa": (rewrite(init_lora_weights="pissa_niter_4"), "changes the base weights"),
    "another rank": (rewrite(r=4), "at rank 4"),
    "no alpha": (rewrite(lora_alpha=None), "not a number"),
    "an expression": (rewrite(alpha_pattern={"(a+)+$": 3}), "holds an expression"),
    "patterns": (rewrite(rank_pattern=[1]), "not an object"),
    "no prefix": (
        retensor(
            {Q + ".lora_A.weight": mx.zeros((8, 64)), Q + ".lora_B.weight": mx.zeros((64, 8))}
        ),
        "not a module of base_model",
    ),
    "half a pair": (retensor({A_OF_PEFT: None}), "has no lora_A"),
    "deep": (retensor({A_OF_PEFT: mx.zeros((8, 64, 1))}), "has shapes"),
    "magnitudes": (
        retensor({Q + ".lora_magnitude_vector": mx.zeros((64,))}),
        "belongs to DoRA",
    ),
}


@pytest.mark.parametrize("fault", BAD_MLX)
def test_faulty_mlx_folders_are_refused_by_name(folder: Path, tmp_path: Path, fault: str) -> None:
    """Everything that is not plain, whole and finite LoRA is an AdapterError that says why."""
    spoil, reason = BAD_MLX[fault]
    path = shutil.copytree(folder, tmp_path / "bad")
    spoil(path)
    with pytest.raises(AdapterError, match=reason):
        inspect_adapter(path)


@pytest.mark.parametrize("fault", BAD_PEFT)
def test_faulty_peft_folders_are_refused_by_name(peft: Path, tmp_path: Path, fault: str) -> None:
    """So is everything of PEFT that is more than LoRA."""
    spoil, reason = BAD_PEFT[fault]
    path = shutil.copytree(peft, tmp_path / "bad")
    spoil(path)
    with pytest.raises(AdapterError, match=reason):
        inspect_adapter(path)


MISFITS: dict[str, tuple[dict[str, tuple[int, int]], str]] = {
    "no such layer": ({"model.layers.7.self_attn.q_proj": (64, 64)}, "no such module"),
    "a norm": ({"model.layers.0.input_layernorm": (64, 64)}, "no such module"),
    "wider": ({Q: (64, 64), DOWN: (64, 96)}, "made for 64 × 96, the model has 96 × 64"),
    "a linear pair for an embedding": ({"model.embed_tokens": (128, 64)}, "another kind"),
    "an expert": ({"model.layers.0.mlp.experts.0.up_proj": (64, 96)}, "no such module"),
    "everything": ({f"model.layers.{n}.x": (1, 1) for n in range(9)}, "and 6 more"),
    "a hostile name": ({"model.__class__.__init__": (64, 64)}, "no such module"),
}


@pytest.mark.parametrize("fault", MISFITS)
def test_adapters_of_other_models_are_refused(checkpoint: Path, tmp_path: Path, fault: str) -> None:
    """A pair without its module in the model, or of another shape, refuses the whole adapter."""
    shapes, reason = MISFITS[fault]
    path = make_peft_adapter(tmp_path / "misfit", shapes)
    with pytest.raises(AdapterError, match=reason):
        Adapters(load_oracle(checkpoint), together=True).mount("x", path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
KEYS = st.sampled_from(
    (
        "peft_type",
        "r",
        "lora_alpha",
        "rank_pattern",
        "alpha_pattern",
        "bias",
        "use_rslora",
        "init_lora_weights",
        "fine_tune_type",
        "lora_parameters",
        "base_model_name_or_path",
    )
)


@given(changes=st.dictionaries(KEYS, JSON, min_size=1), which=st.booleans())
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_no_configuration_does_worse_than_be_refused(
    folder: Path, peft: Path, tmp_path: Path, changes: dict[str, Any], which: bool
) -> None:
    """Whatever stands in the configuration, the answer is a description or an AdapterError."""
    path = tmp_path / "any"
    if not path.exists():
        path.mkdir()
        for source in (folder, peft):
            for file in source.glob("*.safetensors"):
                shutil.copy(file, path)
    config = config_of(folder if which else peft) | changes
    (path / "adapter_config.json").write_text(json.dumps(config))
    with suppress(AdapterError):
        assert inspect_adapter(path).modules
