"""LoRA adapters on the MLX device, against mlx-lm with the adapter loaded."""

from __future__ import annotations

import gc
import os
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from adapter_rig import MODELS, Desk, Folders, desks, json_of, settled_memory, summed
from lora_rig import (
    logits_of,
    make_mlx_adapter,
    with_adapter,
    write_folder,
)
from mlx_lm.generate import generate_step
from tiny import VOCAB, load_oracle, prompt

from mlx_troupe.runtime.engine import adapter_files
from mlx_troupe.runtime.engine.adapter_layers import AdaptedLinear, Blend, Shares
from mlx_troupe.runtime.engine.adapter_pairs import Pair, Part, Stack
from mlx_troupe.runtime.engine.adapters import Adapters
from mlx_troupe.runtime.errors import AdapterError
from mlx_troupe.runtime.plans import (
    FromRow,
    FromSnapshot,
    KeepRow,
    PrefillRow,
    RowId,
    SnapshotId,
    StartRow,
)
from mlx_troupe.runtime.requests import Sampling

pytestmark = pytest.mark.mlx


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("adapters"))


@pytest.fixture
def desk(folders: Folders) -> Iterator[Callable[[str], Desk]]:
    with desks(folders) as start:
        yield start


@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_one_adapter_is_bit_exact_with_mlx_lm(folders: Folders, name: str) -> None:
    """Linear, quantized and expert layers, embeddings and output layers give mlx-lm's own bits."""
    model = load_oracle(folders.checkpoint(name))
    adapters = Adapters(model, together=True)
    folder = folders.adapter(name, "a")
    alone = with_adapter(folders.checkpoint(name), folder)
    chain = adapters.chain([adapters.mount("a", folder).revision])
    for length in (1, 5, 40):
        ids = prompt(length)
        with adapters.shown([chain]):
            shown = logits_of(model, ids)
        assert bool((shown == logits_of(alone, ids)).all().item())
        assert mx.abs(shown - logits_of(model, ids)).max().item() > 0.1


@pytest.mark.parametrize("name", ["llama", "4-bit", "sliding", "experts", "recurrent"])
def test_a_lone_row_decodes_as_mlx_lm_does(
    desk: Callable[[str], Desk], folders: Folders, name: str
) -> None:
    """Prefill and decode of a row with an adapter, alone on the device, to the bit."""
    one = desk(name)
    folder = folders.adapter(name, "a")
    one.start({1: (one.mount(folder),)})
    one.decode(16, 1)
    alone = with_adapter(folders.checkpoint(name), folder)
    steps = list(generate_step(mx.array(one.prompts[1]), alone, max_tokens=16))
    assert one.tokens[1] == [token for token, _ in steps]
    assert len(set(one.tokens[1])) > 5
    for got, (_, wanted) in zip(one.logits[1], steps, strict=True):
        got = got[None]
        assert bool((got - mx.logsumexp(got, keepdims=True) == wanted).all().item())


@pytest.mark.parametrize("name", MODELS)
def test_rows_with_different_adapters_share_a_batch(
    desk: Callable[[str], Desk], folders: Folders, name: str
) -> None:
    """Three adapters of different rank and scale, and rows without: each row is as it is alone."""
    one = desk(name)
    letters = "abc"
    ids = {letter: one.mount(folders.adapter(name, letter)) for letter in letters}
    rows = {1: ids["a"], 2: None, 3: ids["b"], 4: ids["c"], 5: ids["a"], 6: None}
    one.start({row: () if chain is None else (chain,) for row, chain in rows.items()})
    one.decode(8, *rows)
    assert not one.failed
    base = load_oracle(folders.checkpoint(name))
    alone = {
        ids[letter]: with_adapter(folders.checkpoint(name), folders.adapter(name, letter))
        for letter in letters
    }
    for row, chain in rows.items():
        one.compare(row, base if chain is None else alone[chain])


@pytest.mark.parametrize("name", ["llama", "tied", "4-bit"])
def test_base_rows_keep_their_bits(
    desk: Callable[[str], Desk], folders: Folders, name: str
) -> None:
    """The same batch with and without adapters on other rows: base rows' logits are identical."""
    runs: list[dict[int, list[mx.array]]] = []
    for mixed in (False, True):
        one = desk(name)
        letters = {letter: one.mount(folders.adapter(name, letter)) for letter in "ab"}
        a, b = (letters["a"],), (letters["b"],)
        one.start({1: (), 2: a, 3: b, 4: ()} if mixed else dict.fromkeys((1, 2, 3, 4), ()))
        one.decode(8, 1, 2, 3, 4)
        runs.append(one.logits)
    for row in (1, 4):
        for without, with_others in zip(runs[0][row], runs[1][row], strict=True):
            assert bytes(memoryview(without)) == bytes(memoryview(with_others))
    assert mx.abs(mx.stack(runs[0][2]) - mx.stack(runs[1][2])).max().item() > 0.1


def test_several_adapters_add_up_in_one_row(
    desk: Callable[[str], Desk], folders: Folders, tmp_path: Path
) -> None:
    """Rows of a, a+b and b+c beside each other equal one adapter that holds the sum."""
    one = desk("llama")
    paths = {letter: folders.adapter("llama", letter) for letter in "abc"}
    ids = {letter: one.mount(path) for letter, path in paths.items()}
    rows = {1: "a", 2: "ab", 3: "bc", 4: "", 5: "ba"}
    one.start({row: tuple(ids[letter] for letter in letters) for row, letters in rows.items()})
    one.decode(8, *rows)
    for row, letters in rows.items():
        oracle = load_oracle(folders.checkpoint("llama"))
        if letters:
            folder = summed(tmp_path / f"{row}", *(paths[letter] for letter in letters))
            oracle = with_adapter(folders.checkpoint("llama"), folder)
        one.compare(row, oracle)


def test_adapters_of_different_layers_share_a_batch(
    desk: Callable[[str], Desk], folders: Folders
) -> None:
    """One changes attention, the other the MLP and one projection that both change."""
    one = desk("llama")
    parts = ("self_attn.q_proj", "self_attn.k_proj"), ("mlp.up_proj", "self_attn.q_proj")
    paths = [
        folders.adapter("llama", letter, keys) for letter, keys in zip("ab", parts, strict=True)
    ]
    paths.append(folders.adapter("llama", "c", ("mlp.down_proj",)))
    chains = {row: (one.mount(path),) for row, path in enumerate(paths, 1)}
    one.start({**chains, 4: ()})
    one.decode(6, 1, 2, 3, 4)
    for row, path in enumerate(paths, 1):
        one.compare(row, with_adapter(folders.checkpoint("llama"), path))
    one.compare(4, load_oracle(folders.checkpoint("llama")))


def test_long_chunks_of_experts_are_sorted_and_rows_still_found(
    desk: Callable[[str], Desk], folders: Folders
) -> None:
    """Enough tokens at once for mlx-lm to sort them by expert, with two adapters and a base row."""
    one = desk("experts")
    paths = {letter: folders.adapter("experts", letter) for letter in "ab"}
    a, b = ((one.mount(path),) for path in paths.values())
    one.start({1: a, 2: (), 3: b}, lengths=(50, 61, 45, 58))
    one.decode(4, 1, 2, 3)
    one.compare(2, load_oracle(folders.checkpoint("experts")))
    for row, letter in ((1, "a"), (3, "b")):
        one.compare(row, with_adapter(folders.checkpoint("experts"), paths[letter]))


def test_adapters_are_swapped_under_load(desk: Callable[[str], Desk], folders: Folders) -> None:
    """Rows under way keep what they started with; rows that start later get the new weights."""
    one = desk("llama")
    old, new = folders.adapter("llama", "a"), folders.adapter("llama", "b")
    first = one.device.mount("poet", old).revision
    one.start({1: (first,), 2: ()})
    one.decode(4, 1, 2)
    second = one.device.mount("poet", new).revision
    assert one.device.unmount(first) == 15
    one.start({3: (second,)})
    one.decode(4, 1, 2, 3)
    one.start({4: (first,)})
    assert {failed.row for failed in one.failed} == {4}
    assert "is not mounted" in one.failed[0].reason
    one.decode(3, 3, 1)
    checkpoint = folders.checkpoint("llama")
    one.compare(1, with_adapter(checkpoint, old))
    one.compare(2, load_oracle(checkpoint))
    one.compare(3, with_adapter(checkpoint, new))


def test_memory_returns_with_the_last_row(desk: Callable[[str], Desk], folders: Folders) -> None:
    """An unmounted adapter lives as long as a row that uses it, its stacks too, and no longer."""
    one = desk("llama")
    one.start({9: ()})
    one.decode(1, 9)
    one.end(9)
    before = settled_memory(one)
    a, b = (one.mount(folders.adapter("llama", letter)) for letter in "ab")
    loaded = {name: weakref.ref(one.adapters.chain([name])[0]) for name in (a, b)}
    one.start({1: (a,), 2: (b,), 3: (), 4: (a,)})
    one.decode(3, 1, 2, 3, 4)
    assert one.device.unmount(a) == one.device.unmount(b) == 15
    assert one.device.unmount(a) == 0
    one.decode(3, 1, 2, 3, 4)
    one.end(1)
    one.decode(1, 2, 3, 4)
    assert loaded[a]() is not None
    one.end(4)
    assert loaded[a]() is None
    one.decode(1, 2, 3)
    assert loaded[b]() is not None
    one.end(2, 3)
    assert loaded[b]() is None
    assert settled_memory(one) <= before


def test_a_state_is_not_taken_from_a_row_with_other_adapters(
    desk: Callable[[str], Desk], folders: Folders
) -> None:
    """Forks and snapshots across adapters are refused; with the same ones they go on."""
    one = desk("llama")
    a = (one.mount(folders.adapter("llama", "a")),)
    kept = SnapshotId(1)
    one.start({1: a})
    one.step(keep=(KeepRow(RowId(1), 6, kept),))
    ids = one.prompts[1]
    for row, adapters, source in (
        (2, (), FromRow(RowId(1), 6)),
        (3, a * 2, FromSnapshot(kept, 6)),
        (4, a, FromRow(RowId(1), 6)),
        (5, a, FromSnapshot(kept, 6)),
    ):
        one.prompts[row] = ids
        one.step(start=(StartRow(RowId(row), ids, Sampling(), source, adapters),))
    assert [failed.row for failed in one.failed] == [2, 3]
    assert all("other adapters" in failed.reason for failed in one.failed)
    for row in (4, 5):
        one.step(prefill=(PrefillRow(RowId(row), len(ids) - 1 - 6),))
    one.decode(4, 1, 4, 5)
    assert one.tokens[1] == one.tokens[4] == one.tokens[5]


def test_a_step_without_adapters_runs_the_model_as_loaded(folders: Folders) -> None:
    """Nothing stands in for anything outside a step with adapters, even after one that failed."""
    model: Any = load_oracle(folders.checkpoint("llama"))
    kinds = [(name, id(module)) for name, module in model.named_modules()]
    adapters = Adapters(model, together=True)
    chain = adapters.chain([adapters.mount("a", folders.adapter("llama", "a")).revision])
    with adapters.shown([(), ()]):
        assert kinds == [(name, id(module)) for name, module in model.named_modules()]
    with adapters.shown([chain]):
        assert type(model.layers[0].mlp["gate_proj"]) is AdaptedLinear
    with pytest.raises(ValueError, match="broke"), adapters.shown([chain]):
        raise ValueError("the graph broke")
    assert kinds == [(name, id(module)) for name, module in model.named_modules()]


def test_a_refused_adapter_changes_nothing(folders: Folders, tmp_path: Path) -> None:
    """One bad pair among good ones: nothing is mounted, nothing is left in memory."""
    model = load_oracle(folders.checkpoint("llama"))
    adapters = Adapters(model, together=True)
    good = folders.adapter("llama", "a")
    weights: Any = mx.load(str(good / "adapters.safetensors"))
    mx.eval(model.parameters(), weights)
    name = "model.layers.1.mlp.down_proj.lora_b"
    spoilt = {
        "not finite": weights[name].at[0, 3].add(float("nan")),
        "does not fit": mx.zeros((weights[name].shape[0], 65)),
    }
    for reason, tensor in spoilt.items():
        mx.eval(tensor)
        folder = write_folder(tmp_path / reason, json_of(good), weights | {name: tensor})
        before = mx.get_active_memory()
        with pytest.raises(AdapterError, match=reason):
            adapters.mount("bad", folder)
        gc.collect()
        assert mx.get_active_memory() == before
    with pytest.raises(AdapterError, match="not mounted"):
        adapters.chain(["bad"])


def test_a_folder_that_changes_while_it_is_read_is_refused(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights replaced between the hash and the load would be another revision's."""
    path = shutil.copytree(folders.adapter("llama", "a"), tmp_path / "live")
    inspect = adapter_files.inspect_adapter

    def slow(folder: Path) -> Any:
        description = inspect(folder)
        other = folders.adapter("llama", "d") / "adapters.safetensors"
        os.replace(shutil.copy(other, tmp_path), folder / "adapters.safetensors")
        return description

    monkeypatch.setattr(adapter_files, "inspect_adapter", slow)
    adapters = Adapters(load_oracle(folders.checkpoint("llama")), together=True)
    with pytest.raises(AdapterError, match="changed while"):
        adapters.mount("live", path)


def test_stacks_are_kept_from_step_to_step(desk: Callable[[str], Desk], folders: Folders) -> None:
    """Prefill of some adapters between decodes of others copies no weights again."""
    one = desk("llama")
    a, b, c = ((one.mount(folders.adapter("llama", letter)),) for letter in "abc")
    one.start({1: a, 2: b})
    one.decode(2, 1, 2)
    one.start({3: c, 4: a})
    one.decode(1, 1, 2, 3, 4)
    stacks: Any = one.adapters._stacks
    one.start({5: a, 6: c})
    one.end(3)
    one.decode(2, 1, 2, 4)
    assert one.adapters._stacks is stacks
    assert not one.failed


def test_adapters_that_go_unused_are_not_stacked_for_long(folders: Folders) -> None:
    """Batches of two of four adapters, time and again: the others' columns are left out."""
    model = load_oracle(folders.checkpoint("llama"))
    adapters = Adapters(model, together=True)
    revisions = [adapters.mount(x, folders.adapter("llama", x)).revision for x in "abcd"]
    a, b, c, d = (adapters.chain([revision]) for revision in revisions)
    adapters.shown([a, b, c, d])
    assert len(adapters._stacks.alive) == 4
    stacks: Any = adapters._stacks
    for rows in range(1, 8):
        adapters.shown([a, b] * rows)
        adapters.shown([b, a] * rows)
    assert adapters._stacks is stacks
    for rows in range(8, 12):
        adapters.shown([a, b] * rows)
    assert [x.info.id for x in adapters._stacks.alive] == ["a", "b"]
    adapters.shown([c, d, a])
    assert {x.info.id for x in adapters._stacks.alive} == {"a", "b", "c", "d"}


@pytest.mark.parametrize("wide", [mx.float32, mx.float16])
def test_residuals_take_the_type_of_their_layer(wide: mx.Dtype) -> None:
    """Adapters of another precision change no type, and what overflows in one row's is no other's.

    The base row's own result comes out to the bit, though another's columns are infinite for it.
    """
    base = nn.Linear(32, 48, bias=False)
    base.set_dtype(mx.float16)
    x = mx.random.normal((3, 1, 32), key=mx.random.key(1)).astype(mx.float16)
    a, b = mx.full((32, 4), 1e4, wide), mx.full((4, 48), 0.5, wide)
    x[1] = 100.0
    stack = Stack([Part(0, Pair(a, b, 2.0)), Part(1, Pair(a * 1e-5, b, 1.0))], of_experts=False)
    y = AdaptedLinear(base, Blend(Shares([[0, 1], [0, 0], [0, 0]]), stack))(x)
    assert y.dtype == mx.float16
    assert bool(mx.isfinite(y).all().item())
    assert bool((y[1:] == base(x)[1:]).all().item())
    wanted = base(x)[0] + ((x[0] @ (a * 1e-5)) @ b).astype(mx.float16)
    assert mx.abs(y[0] - wanted).max().item() < 0.02


def test_half_precision_adapters_on_a_float32_model(folders: Folders, tmp_path: Path) -> None:
    """Weights are widened once, at the mount, which changes no bit of the result."""
    checkpoint = folders.checkpoint("llama")
    folder = make_mlx_adapter(tmp_path / "half", checkpoint, dtype=mx.bfloat16)
    model = load_oracle(checkpoint)
    adapters = Adapters(model, together=True)
    info = adapters.mount("half", folder)
    assert info.ram_bytes > 1.5 * info.size_bytes
    with adapters.shown([adapters.chain([info.revision])]):
        shown = logits_of(model, prompt(20))
    wanted = logits_of(with_adapter(checkpoint, folder), prompt(20))
    assert bool((shown == wanted).all().item())


def test_the_same_content_is_the_same_revision(folders: Folders, tmp_path: Path) -> None:
    """A copy under another id shares its revision; another scale makes another one."""
    adapters = Adapters(load_oracle(folders.checkpoint("llama")), together=True)
    folder = folders.adapter("llama", "a")
    weights: Any = mx.load(str(folder / "adapters.safetensors"))
    config = json_of(folder)
    first = adapters.mount("one", folder)
    copy = adapters.mount("two", shutil.copytree(folder, tmp_path / "copy"))
    assert (copy.id, copy.revision, copy.ram_bytes) == ("two", first.revision, first.ram_bytes)
    config["lora_parameters"]["scale"] += 1
    other = adapters.mount("one", write_folder(tmp_path / "other", config, weights))
    assert other.revision != first.revision
    assert other.scale == first.scale + 1


def test_targets_name_every_layer_that_can_be_adapted(desk: Callable[[str], Desk]) -> None:
    """Quantized layers are listed with their real widths, experts with their number."""
    one = desk("4-bit experts")
    targets = {target.name: target for target in one.device.adapter_targets()}
    assert (targets["lm_head"].inputs, targets["lm_head"].outputs) == (64, VOCAB)
    assert targets["model.embed_tokens"].kind == "embedding"
    gate = targets["model.layers.0.mlp.switch_mlp.gate_proj"]
    assert (gate.kind, gate.experts, gate.inputs, gate.outputs) == ("experts", 4, 64, 32)
