"""GGUF files become folders that mlx-lm loads, value for value; anything unreadable is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import (
    GgufSpec,
    RawTensor,
    bf16,
    byte_level_metadata,
    f16,
    f32,
    in_file_order,
    model_metadata,
    model_tensors,
    random_blocks,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_troupe.runtime.engine.blas import ensure_fast_blas
from mlx_troupe.runtime.errors import ModelError
from mlx_troupe.runtime.store import gguf
from mlx_troupe.runtime.store.gguf import convert_gguf
from mlx_troupe.runtime.store.gguf_config import llama3_factors
from mlx_troupe.runtime.store.gguf_reader import GgufFile

ensure_fast_blas()

import mlx.core as mx  # noqa: E402
from mlx_lm.utils import load_model  # noqa: E402

VOCAB = len(byte_level_metadata()["tokenizer.ggml.tokens"])
ATTENTION_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_TROUPE_CACHE", str(tmp_path / "cache"))


def spec_of(arch: str, **changes: Any) -> GgufSpec:
    """A whole float32 model file."""
    tensors = in_file_order(arch, model_tensors(arch, VOCAB))
    metadata = byte_level_metadata() | model_metadata(arch, VOCAB) | changes
    return GgufSpec(metadata, {name: f32(value) for name, value in tensors.items()})


def load(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The converted model and its config."""
    model, config = load_model(folder)
    return model, config


def oracle(folder: Path, arch: str) -> Any:
    """mlx-lm's model of that config with the weights that the file was made from."""
    model, _ = load_model(folder, lazy=True)
    weights = {}
    for name, value in model_tensors(arch, VOCAB).items():
        parts = name.split(".")
        if parts[0] == "blk":
            path = f"model.layers.{parts[1]}.{ATTENTION_NAMES[parts[2]]}.{parts[3]}"
        else:
            path = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[
                parts[0]
            ] + ".weight"
        weights[path] = mx.array(value)
    model.load_weights(list(weights.items()))
    return model


@pytest.mark.mlx
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_a_float_model_computes_the_same_logits_as_its_source(arch: str, tmp_path: Path) -> None:
    """Names, permuted rows, biases, head norms and tied embeddings all land where they belong."""
    key = {f"{arch}.attention.key_length": 32} if arch == "qwen3" else {}
    folder = convert_gguf(spec_of(arch, **key).write(tmp_path / "tiny.gguf"))
    model, config = load(folder)
    ids = mx.array([[5, 80, 200, 7, 7, 130]])
    got = model(ids)
    wanted = oracle(folder, arch)(ids)
    assert config["model_type"] == arch
    assert mx.array_equal(got, wanted)
    assert float(mx.abs(wanted).max()) > 0.1


@pytest.mark.mlx
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_packed_weights_are_those_that_mlx_reads_itself(kind: str, tmp_path: Path) -> None:
    """The same integers, scales and biases as mx.load of the file, and the values they mean."""
    raw, values = random_blocks(kind, 96, 64, seed=3)
    spec = spec_of("qwen2")
    spec.tensors["blk.0.ffn_up.weight"] = raw
    path = spec.write(tmp_path / "tiny.gguf")
    ours = mx.load(str(convert_gguf(path) / "model.safetensors"))
    mlx = mx.load(str(path))
    for part in ("weight", "scales", "biases"):
        got = ours[f"model.layers.0.mlp.up_proj.{part}"]
        assert mx.array_equal(got, mlx[f"blk.0.ffn_up.{part}"]), part
    bits = 8 if kind == "Q8_0" else 4
    words, *affine = (
        ours[f"model.layers.0.mlp.up_proj.{part}"] for part in ("weight", "scales", "biases")
    )
    assert {part.dtype for part in affine} == {mx.float16}
    wide = [part.astype(mx.float32) for part in affine]
    decoded = mx.dequantize(words, *wide, group_size=32, bits=bits)
    assert np.allclose(np.array(decoded), values, atol=1e-5)


@pytest.mark.mlx
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_llama_rows_are_put_back_in_packed_form_too(kind: str, tmp_path: Path) -> None:
    """A quantized q projection is un-permuted row by row, scales and biases with it."""
    raw, values = random_blocks(kind, 64, 64, seed=4)
    spec = spec_of("llama")
    spec.tensors["blk.1.attn_q.weight"] = raw
    folder = convert_gguf(spec.write(tmp_path / "tiny.gguf"))
    q_proj = load(folder)[0].layers[1].self_attn.q_proj
    wide = [part.astype(mx.float32) for part in (q_proj.scales, q_proj.biases)]
    decoded = mx.dequantize(q_proj.weight, *wide, group_size=32, bits=q_proj.bits)
    halves = values.reshape(2, 16, 2, 64).swapaxes(1, 2).reshape(64, 64)
    assert np.allclose(np.array(decoded), halves, atol=1e-5)
    assert not np.allclose(np.array(decoded), values, atol=1e-2)


@pytest.mark.mlx
def test_mixed_widths_get_entries_of_their_own(tmp_path: Path) -> None:
    """The commonest width is the default; other modules are named; float ones stay float."""
    spec = spec_of("qwen2")
    for name in ("ffn_gate", "ffn_up"):
        spec.tensors[f"blk.0.{name}.weight"], _ = random_blocks("Q4_0", 96, 64, seed=5)
    spec.tensors["token_embd.weight"], _ = random_blocks("Q8_0", VOCAB, 64, seed=6)
    model, config = load(convert_gguf(spec.write(tmp_path / "tiny.gguf")))
    assert config["quantization"] == {
        "group_size": 32,
        "bits": 4,
        "model.embed_tokens": {"group_size": 32, "bits": 8},
    }
    assert model.model.embed_tokens.bits == 8
    assert model.layers[0].mlp.up_proj.bits == 4
    assert model.layers[1].mlp.up_proj.weight.dtype == mx.float32
    assert mx.all(mx.isfinite(model(mx.array([[1, 2, 3]]))))


@pytest.mark.mlx
@pytest.mark.parametrize(("make", "dtype"), [(f16, mx.float16), (bf16, mx.bfloat16)])
def test_norms_follow_the_dtype_of_the_matrices(make: Any, dtype: Any, tmp_path: Path) -> None:
    """One float32 norm would make every activation float32; norms that fit are narrowed."""
    tensors = in_file_order("llama", model_tensors("llama", VOCAB))
    as_bf16 = {name: value.view("<u4") & 0xFFFF0000 for name, value in tensors.items()}
    spec = spec_of("llama")
    for name, value in as_bf16.items():
        exact = value.view(np.float32)
        spec.tensors[name] = f32(exact) if exact.ndim == 1 else make(exact)
    model, _ = load(convert_gguf(spec.write(tmp_path / "tiny.gguf")))
    assert model.model.norm.weight.dtype == dtype
    assert model(mx.array([[1, 2]])).dtype == dtype


@pytest.mark.mlx
def test_norms_that_do_not_fit_stay_float32(tmp_path: Path) -> None:
    """A norm beyond float16's range must not become infinite."""
    spec = spec_of("llama")
    for name, tensor in spec.tensors.items():
        if len(tensor.shape) == 2:
            spec.tensors[name] = f16(np.frombuffer(tensor.data, "<f4").reshape(tensor.shape))
    spec.tensors["output_norm.weight"] = f32(np.full(64, 1e6))
    model, _ = load(convert_gguf(spec.write(tmp_path / "tiny.gguf")))
    assert model.model.norm.weight.dtype == mx.float32
    assert float(model.model.norm.weight[0]) == 1e6


@pytest.mark.mlx
def test_large_models_are_written_in_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several shards and an index load to the same weights as one file."""
    path = spec_of("llama").write(tmp_path / "tiny.gguf")
    one = load(convert_gguf(path, into=tmp_path / "one"))[0]
    monkeypatch.setattr(gguf, "_SHARD_BYTES", 50_000)
    folder = convert_gguf(path, into=tmp_path / "many")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    ids = mx.array([[9, 8, 7]])
    assert mx.array_equal(load(folder)[0](ids), one(ids))


@pytest.mark.parametrize(
    ("changes", "scaling"),
    [
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "type": "linear", "factor": 4.0},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 2.0,
                "llama.rope.scaling.original_context_length": 256,
            },
            {
                "rope_type": "yarn",
                "type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 256,
            },
        ),
    ],
)
def test_rope_scaling_is_carried_over(
    changes: dict[str, Any], scaling: dict[str, Any], tmp_path: Path
) -> None:
    """Linear and YaRN scalings reach config.json."""
    folder = convert_gguf(spec_of("llama", **changes).write(tmp_path / "tiny.gguf"))
    assert json.loads((folder / "config.json").read_text())["rope_scaling"] == scaling


@pytest.mark.mlx
def test_llama3_frequencies_give_back_their_factor(tmp_path: Path) -> None:
    """The tensor of divisors becomes mlx-lm's llama3 scaling, which computes the same ones."""
    spec = spec_of("llama", **{"llama.rope.freq_base": 500000.0})
    factors = llama3_factors(32.0, 500000.0, 32)
    spec.tensors["rope_freqs.weight"] = f32(factors)
    model, config = load(convert_gguf(spec.write(tmp_path / "tiny.gguf")))
    assert config["rope_scaling"]["factor"] == 32.0
    plain = 500000.0 ** (np.arange(0, 32, 2) / 32)
    freqs = np.array(model.layers[0].self_attn.rope._freqs)
    assert np.allclose(freqs, plain * factors, rtol=1e-4)
    assert not np.allclose(freqs, plain, rtol=1e-2)


def test_an_unknown_rope_table_is_refused(tmp_path: Path) -> None:
    """Divisors that follow no known rule must not be guessed at."""
    spec = spec_of("llama")
    spec.tensors["rope_freqs.weight"] = f32(np.linspace(1, 3, 16))
    with pytest.raises(ModelError, match="rope_freqs"):
        convert_gguf(spec.write(tmp_path / "tiny.gguf"))


def test_an_unreadable_tensor_type_is_named(tmp_path: Path) -> None:
    """The error names the tensor and its type, and nothing is left in the cache."""
    spec = spec_of("llama")
    spec.tensors["blk.0.ffn_down.weight"] = RawTensor("Q6_K", (64, 256), bytes(64 * 210))
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_down\.weight is of type Q6_K"):
        convert_gguf(spec.write(tmp_path / "tiny.gguf"))
    assert not list((tmp_path / "cache" / "models").iterdir())


def test_another_architecture_is_named(tmp_path: Path) -> None:
    """Gemma is not read as if it were llama."""
    path = spec_of("llama", **{"general.architecture": "gemma3"}).write(tmp_path / "tiny.gguf")
    with pytest.raises(ModelError, match="architecture gemma3"):
        convert_gguf(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"llama.expert_count": 8}, "experts"),
        ({"llama.rope.dimension_count": 16}, "16 of 32"),
        ({"llama.block_count": 0}, "block_count"),
        ({"llama.block_count": "two"}, "block_count"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer model bert"),
        ({"tokenizer.ggml.pre": "gpt-4o"}, "pre-tokenizer gpt-4o"),
        ({"tokenizer.ggml.merges": ["nospace"]}, "nospace"),
        ({"general.alignment": 0}, "alignment"),
    ],
)
def test_what_cannot_be_expressed_is_refused(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """Each unreadable feature has an error of its own."""
    with pytest.raises(ModelError, match=words):
        convert_gguf(spec_of("llama", **change).write(tmp_path / "tiny.gguf"))


def test_an_unknown_tensor_is_refused(tmp_path: Path) -> None:
    """A weight that would be dropped silently is an error."""
    spec = spec_of("llama")
    spec.tensors["blk.0.ffn_gate_inp.weight"] = f32(np.zeros((4, 64)))
    with pytest.raises(ModelError, match="ffn_gate_inp"):
        convert_gguf(spec.write(tmp_path / "tiny.gguf"))


@pytest.mark.parametrize("case", ["magic", "version", "twice", "empty", "absent"])
def test_what_is_not_a_gguf_file_is_refused(case: str, tmp_path: Path) -> None:
    """Wrong magic, an old version, a doubled tensor, an empty and a missing file."""
    spec, path = spec_of("llama"), tmp_path / "tiny.gguf"
    if case == "magic":
        spec.magic = b"GGML"
    if case == "version":
        spec.version = 1
    if case == "twice":
        spec.extra_names = ["output_norm.weight"]
    spec.write(path)
    if case == "empty":
        path.write_bytes(b"")
    if case == "absent":
        path.unlink()
    with pytest.raises(ModelError):
        convert_gguf(path)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_cut_or_damaged_file_never_gets_past_the_reader(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Cut anywhere, it is a ModelError; with header bytes changed, that or a readable file."""
    folder = tmp_path_factory.mktemp("damage")
    whole = spec_of("llama").write(folder / "whole.gguf").read_bytes()
    cut = folder / "cut.gguf"
    cut.write_bytes(whole[: data.draw(st.integers(1, len(whole) - 64))])
    with pytest.raises(ModelError), GgufFile(cut) as file:
        file.check()
    changed = bytearray(whole)
    for _ in range(4):
        changed[data.draw(st.integers(4, 12_000))] = data.draw(st.integers(0, 255))
    cut.write_bytes(bytes(changed))
    try:
        with GgufFile(cut) as file:
            file.check()
    except ModelError:
        return


def test_a_file_is_converted_once(tmp_path: Path) -> None:
    """The second call neither hashes nor converts; a copy is hashed; a changed file is new."""
    path = spec_of("llama").write(tmp_path / "Tiny.F32.gguf")
    told: list[str] = []
    note = lambda done, total, what: told.append(what)  # noqa: E731
    first = convert_gguf(path, progress=note)
    assert first.name.startswith("tiny.f32-")
    assert any("converting" in what for what in told)
    told.clear()
    assert convert_gguf(path, progress=note) == first
    assert told == []
    copy = tmp_path / "again" / "Tiny.F32.gguf"
    copy.parent.mkdir()
    copy.write_bytes(path.read_bytes())
    assert convert_gguf(copy, progress=note) == first
    assert not any("converting" in what for what in told)
    spec_of("llama", **{"llama.context_length": 256}).write(path)
    assert convert_gguf(path) != first


def test_a_dangling_link_is_replaced_and_a_file_is_not(tmp_path: Path) -> None:
    """A broken link at the target is no obstacle; a file there is a clear error and is kept."""
    path = spec_of("llama").write(tmp_path / "tiny.gguf")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    assert (convert_gguf(path, into=link) / "config.json").is_file()
    blocker = tmp_path / "file"
    blocker.write_text("mine")
    with pytest.raises(ModelError, match="is a file"):
        convert_gguf(path, into=blocker)
    assert blocker.read_text() == "mine"


def test_nothing_is_left_when_a_conversion_fails_midway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk leaves no half folder that a later start could take for a model."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf, "_save", full)
    with pytest.raises(ModelError, match="No space left"):
        convert_gguf(spec_of("llama").write(tmp_path / "tiny.gguf"))
    assert not list((tmp_path / "cache" / "models").iterdir())


@pytest.mark.mlx
def test_norms_beside_quantized_matrices_stay_float32(tmp_path: Path) -> None:
    """With halves every activation would be a half, which a CPU computes very slowly."""
    spec = spec_of("qwen2")
    spec.tensors["blk.0.ffn_up.weight"] = random_blocks("Q8_0", 96, 64, seed=3)[0]
    weights = mx.load(str(convert_gguf(spec.write(tmp_path / "tiny.gguf")) / "model.safetensors"))
    assert weights["model.norm.weight"].dtype == mx.float32
    assert weights["model.layers.0.mlp.up_proj.scales"].dtype == mx.float16
