"""What a person types becomes exactly one whole model, or an error that says what was meant."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from gguf_files import (
    GgufSpec,
    byte_level_metadata,
    f32,
    in_file_order,
    model_metadata,
    model_tensors,
)
from model_folders import drop_blob, make_hub_model, make_model

from mlx_troupe.runtime.errors import ModelError
from mlx_troupe.runtime.store import gguf, local
from mlx_troupe.runtime.store import resolve as resolver
from mlx_troupe.runtime.store.local import list_models, note_use
from mlx_troupe.runtime.store.resolve import ResolvedModel, resolve
from mlx_troupe.runtime.store.starter import starter_path

OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of ours, an empty hub cache, and no way out to the network."""
    monkeypatch.setenv("MLX_TROUPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("MLX_TROUPE_MODEL", "MLX_TROUPE_STARTER_WHEEL", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)

    def refuse(*_: object) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(resolver, "download", refuse)
    return tmp_path / "hub"


def place_starter() -> Path:
    """A folder where the starter would be."""
    return make_model(starter_path())


def test_nothing_named_and_nothing_there_is_the_starter() -> None:
    """With no model of any kind on the machine."""
    place_starter()
    found = resolve(None)
    assert found == ResolvedModel(starter_path(), "SmolLM2-135M-Instruct", "the starter model")


def test_nothing_named_takes_the_only_downloaded_model(hub: Path) -> None:
    """The starter stands back; so do partial models and kinds that cannot be run."""
    place_starter()
    snapshot = make_hub_model(hub, "org/one")
    drop_blob(make_hub_model(hub, "org/partial"), "model.safetensors")
    bert = make_hub_model(hub, "org/bert")
    (bert / "config.json").resolve().write_text(json.dumps({"model_type": "bert"}))
    found = resolve(None)
    assert (found.path, found.name) == (snapshot, "org/one")
    assert "only" in found.source


def test_nothing_named_and_several_there_takes_the_one_used_last(hub: Path) -> None:
    """Recorded use decides, and the message lists the others."""
    one, two = make_hub_model(hub, "org/one"), make_hub_model(hub, "org/two")
    note_use(one)
    note_use(two)
    assert resolve(None).name == "org/two"
    assert resolve("org/one").name == "org/one"
    found = resolve(None)
    assert found.name == "org/one"
    assert "org/two" in found.source


def test_the_environment_can_name_the_model(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX_TROUPE_MODEL stands in for a missing argument and yields to a given one."""
    make_hub_model(hub, "org/one")
    make_hub_model(hub, "org/two")
    monkeypatch.setenv("MLX_TROUPE_MODEL", "two")
    assert resolve(None).name == "org/two"
    assert resolve("one").name == "org/one"


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    """A path wins over every other reading."""
    folder = make_model(tmp_path / "some" / "mine")
    assert resolve(str(folder)) == ResolvedModel(folder, "mine", f"folder {folder}")


def test_a_folder_that_is_not_whole_is_refused_by_file(tmp_path: Path) -> None:
    """The index names three shards and one is gone: its name is in the message."""
    folder = make_model(tmp_path / "mine", shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00003\.safetensors"):
        resolve(str(folder))


def test_paths_that_do_not_exist_are_not_taken_for_names(tmp_path: Path) -> None:
    """A missing folder, a missing GGUF file and a file of another kind."""
    with pytest.raises(ModelError, match="no folder"):
        resolve(str(tmp_path / "none"))
    with pytest.raises(ModelError, match="cannot read"):
        resolve(str(tmp_path / "none.gguf"))
    other = tmp_path / "weights.bin"
    other.touch()
    with pytest.raises(ModelError, match="neither"):
        resolve(str(other))


def tiny_gguf(folder: Path) -> Path:
    """A whole float32 model file."""
    vocab = len(byte_level_metadata()["tokenizer.ggml.tokens"])
    metadata = byte_level_metadata() | model_metadata("llama", vocab)
    tensors = in_file_order("llama", model_tensors("llama", vocab))
    spec = GgufSpec(metadata, {name: f32(value) for name, value in tensors.items()})
    return spec.write(folder / "My-Tiny.gguf")


def test_a_gguf_file_is_converted_and_found_again_by_name(tmp_path: Path) -> None:
    """Its name without the suffix is what clients see, and what a query matches later."""
    path = tiny_gguf(tmp_path)
    found = resolve(str(path))
    assert found.name == "My-Tiny"
    path.unlink()
    assert resolve("my-tiny").path == found.path


def test_a_conversion_of_an_earlier_version_is_no_downloaded_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an upgrade the file is converted anew when it is asked for, not served as it was."""
    folder = resolve(str(tiny_gguf(tmp_path))).path
    assert [model.path for model in list_models()] == [folder]
    monkeypatch.setattr(gguf, "_FORMAT", gguf._FORMAT + 1)
    assert list_models() == ()


def test_a_hub_id_in_the_cache_needs_no_network(hub: Path) -> None:
    """Two revisions: refs/main says which, through links into blobs."""
    make_hub_model(hub, "org/model", OLD)
    newer = make_hub_model(hub, "org/model", NEW, shards=3)
    assert resolve("org/model").path == newer
    (hub / "models--org--model" / "refs" / "main").write_text(OLD)
    assert resolve("org/model").path.name == OLD
    assert [model.name for model in list_models()] == ["org/model"]


@pytest.mark.parametrize("ref", ["c" * 40, ""])
def test_a_ref_to_nowhere_falls_back_to_a_whole_snapshot(ref: str, hub: Path) -> None:
    """refs/main names a commit that was never fetched, or nothing; it is not changed."""
    snapshot = make_hub_model(hub, "org/model", OLD)
    file = hub / "models--org--model" / "refs" / "main"
    file.write_text(ref)
    assert resolve("org/model").path == snapshot
    assert file.read_text() == ref
    file.unlink()
    assert resolve("org/model").path == snapshot
    assert not file.exists()


def test_a_partial_download_is_listed_with_what_it_lacks(hub: Path) -> None:
    """One missing blob does not hide the repository, and the rest is still counted."""
    snapshot = make_hub_model(hub, "org/model", shards=3)
    drop_blob(snapshot, "model-00003-of-00003.safetensors")
    [model] = list_models()
    assert not model.complete
    assert model.missing == ("model-00003-of-00003.safetensors",)
    sizes = [path.stat().st_size for path in snapshot.iterdir() if path.exists()]
    assert model.nbytes == sum(sizes)
    with pytest.raises(ModelError, match="model-00003"):
        resolve("model")


def test_a_download_stopped_before_the_template_is_partial(hub: Path) -> None:
    """Weights and tokenizer are there, the rest was on its way."""
    snapshot = make_hub_model(hub, "org/model")
    drop_blob(snapshot, "tokenizer_config.json")
    (snapshot / "tokenizer_config.json").unlink()
    assert list_models()[0].complete
    (hub / "models--org--model" / "blobs" / "123.incomplete").touch()
    assert not list_models()[0].complete


def test_offline_names_the_flag_and_the_missing_files(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the flag or by the hub's own variable; nothing is retried."""
    with pytest.raises(ModelError, match="--offline"):
        resolve("org/absent", offline=True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    drop_blob(make_hub_model(hub, "org/model"), "model.safetensors")
    with pytest.raises(ModelError, match=r"missing: model\.safetensors.*HF_HUB_OFFLINE"):
        resolve("org/model")


def test_an_update_that_cannot_be_finished_leaves_the_older_one_in_use(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer partial snapshot is completed when the hub answers, and passed over when not."""
    older = make_hub_model(hub, "org/model", OLD)
    newer = make_hub_model(hub, "org/model", NEW)
    drop_blob(newer, "model.safetensors")
    assert resolve("org/model", offline=True).path == older

    def fail(*_: object) -> Path:
        raise ModelError("no network")

    monkeypatch.setattr(resolver, "download", fail)
    found = resolve("org/model")
    assert found.path == older
    assert "no network" in found.source


def test_a_part_of_a_name_must_mean_one_model(hub: Path) -> None:
    """One match is taken, none and several list what there is."""
    make_hub_model(hub, "org/Alpha-1B")
    make_hub_model(hub, "org/Alpha-1B-long")
    make_hub_model(hub, "other/Beta")
    assert resolve("beta").name == "other/Beta"
    with pytest.raises(ModelError, match=r"2 models.*Alpha-1B .*Alpha-1B-long"):
        resolve("alpha")
    with pytest.raises(ModelError, match=r"no downloaded model.*other/Beta"):
        resolve("gamma")


def test_the_starter_is_found_by_name_and_part(hub: Path) -> None:
    """``starter``, its full name, or a part that nothing else matches."""
    place_starter()
    make_hub_model(hub, "org/one")
    for query in ("starter", "STARTER", "SmolLM2-135M-Instruct", "smollm2"):
        assert resolve(query).path == starter_path()


def test_a_read_only_cache_does_not_stop_a_start(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note of what was used is a convenience."""
    make_hub_model(hub, "org/one")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(local.tempfile, "mkstemp", refuse)
    assert resolve("org/one").name == "org/one"


@pytest.mark.parametrize("text", ["{", "[]", '{"a": "b"}', "null"])
def test_a_damaged_note_of_uses_is_ignored(text: str, hub: Path, tmp_path: Path) -> None:
    """Then the newest arrival is taken."""
    make_hub_model(hub, "org/one")
    two = make_hub_model(hub, "org/two")
    os.utime(two, (2e9, 2e9))
    (tmp_path / "cache").mkdir(exist_ok=True)
    (tmp_path / "cache" / "recent.json").write_text(text)
    assert resolve(None).name == "org/two"


def test_our_folders_are_private(tmp_path: Path) -> None:
    """Models may be licensed to one person, and prompts will lie in the cache."""
    list_models()
    for folder in (tmp_path / "cache", tmp_path / "cache" / "models"):
        assert folder.stat().st_mode & 0o777 == 0o700
