"""A model folder is whole or the missing files are named, before a single weight is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_folders import make_model, write_index

from mlx_troupe.runtime.store.complete import missing_parts, read_config

SECOND = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


def delete(name: str) -> Callable[[Path], None]:
    """Remove one file."""
    return lambda folder: (folder / name).unlink()


def overwrite(name: str, text: str) -> Callable[[Path], None]:
    """Replace one file's content."""

    def damage(folder: Path) -> None:
        (folder / name).write_text(text)

    return damage


def cut(name: str) -> Callable[[Path], None]:
    """Take the last bytes of a file away."""

    def damage(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:-4])

    return damage


def rename_shards(folder: Path) -> None:
    """What a repository looks like whose index was not renewed."""
    for path in sorted(folder.glob("model-*.safetensors")):
        path.rename(folder / path.name.replace("model-", "weights-"))


def dangle(folder: Path) -> None:
    """Make the tokenizer's settings a link to nowhere."""
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").symlink_to(folder / "gone")


@pytest.mark.parametrize("shards", [1, 3])
def test_a_whole_model_lacks_nothing(shards: int, tmp_path: Path) -> None:
    """One file, or shards with their index."""
    assert missing_parts(make_model(tmp_path / "model", shards=shards)) == ()


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (delete(SECOND), SECOND),
        (cut(SECOND), f"{SECOND} (not whole)"),
        (overwrite(SECOND, "<html>not found</html>"), f"{SECOND} (not a safetensors file)"),
        (overwrite(SECOND, ""), f"{SECOND} (not a safetensors file)"),
        (delete("config.json"), "config.json"),
        (overwrite("config.json", '{"model_type": '), "config.json (not a JSON object)"),
        (overwrite("config.json", "[]"), "config.json (not a JSON object)"),
        (delete("tokenizer.json"), "tokenizer.json"),
        (overwrite(INDEX, "{"), f"{INDEX} (names no weights)"),
        (lambda folder: write_index(folder, {}), f"{INDEX} (names no weights)"),
        (lambda folder: write_index(folder, []), f"{INDEX} (names no weights)"),
        (lambda folder: write_index(folder, {"w": "extra.safetensors"}), "extra.safetensors"),
        (rename_shards, SECOND),
        (dangle, "tokenizer_config.json"),
    ],
)
def test_what_is_missing_or_damaged_is_named(
    damage: Callable[[Path], None], told: str, tmp_path: Path
) -> None:
    """Each fault on its own, by the file's name."""
    folder = make_model(tmp_path / "model", shards=3)
    damage(folder)
    assert told in missing_parts(folder)


def test_numbered_shards_imply_each_other_without_an_index(tmp_path: Path) -> None:
    """Shard 2 of 3 is missed although no index names it."""
    folder = make_model(tmp_path / "model", shards=3)
    (folder / INDEX).unlink()
    assert missing_parts(folder) == ()
    (folder / SECOND).unlink()
    assert missing_parts(folder) == (SECOND,)


def test_no_weights_at_all(tmp_path: Path) -> None:
    """An empty folder lacks all three kinds."""
    assert missing_parts(tmp_path) == ("config.json", "model.safetensors", "tokenizer.json")


@pytest.mark.parametrize("names", [("tokenizer.model",), ("vocab.json", "merges.txt")])
def test_other_kinds_of_tokenizer_count(names: tuple[str, ...], tmp_path: Path) -> None:
    """SentencePiece and the older byte-pair files are tokenizers too; half a pair is not."""
    folder = make_model(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    for name in names[:-1]:
        (folder / name).touch()
    assert missing_parts(folder) == ("tokenizer.json",)
    (folder / names[-1]).touch()
    assert missing_parts(folder) == ()


@settings(max_examples=40, deadline=None)
@given(content=st.binary(max_size=64))
def test_no_weight_file_makes_the_check_fail(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever stands in the file, the answer is a name and not an exception."""
    folder = make_model(tmp_path_factory.mktemp("any"))
    (folder / "model.safetensors").write_bytes(content)
    missing = missing_parts(folder)
    assert all(part.startswith("model.safetensors") for part in missing)


def test_a_config_is_read_as_an_object_or_not_at_all(tmp_path: Path) -> None:
    """No exception for a missing or odd file."""
    assert read_config(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert read_config(tmp_path) == {"model_type": "llama"}
