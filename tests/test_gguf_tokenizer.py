"""Tokenizers rebuilt from GGUF metadata cut text where the originals would, and lose none of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf_files import BYTE, CONTROL, USER, GgufSpec, byte_level_metadata, f32
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mlx_troupe.runtime.errors import ModelError
from mlx_troupe.runtime.store.gguf_reader import GgufFile
from mlx_troupe.runtime.store.gguf_tokenizer import build_tokenizer, end_ids

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def built(folder: Path, metadata: dict[str, Any]) -> tuple[Tokenizer, dict[str, object]]:
    """The tokenizer and its config that come of that metadata."""
    path = GgufSpec(metadata, {"x.weight": f32([1.0])}).write(folder / "vocabulary.gguf")
    with GgufFile(path) as file:
        return build_tokenizer(file)


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    """The text as tokens."""
    return list(tokenizer.encode(text, add_special_tokens=False).tokens)


def scored_metadata(**changes: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary in which the score, not the position, decides what joins first."""
    words = {"▁": -9.0, "a": -10.0, "b": -11.0, "c": -12.0, "bc": -1.0, "ab": -2.0, "▁a": -3.0}
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *words]
    found = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + list(words.values()),
        "tokenizer.ggml.token_type": [2, CONTROL, CONTROL, *[BYTE] * 256, *[1] * len(words)],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return found | changes


@pytest.mark.parametrize(
    ("pre", "text", "cut"),
    [
        ("smollm", " 123", ["Ġ", "1", "2", "3"]),
        ("llama-bpe", " 123", ["Ġ", "123"]),
        ("qwen2", " 123", ["Ġ", "1", "2", "3"]),
        ("gpt-2", " 1", ["Ġ1"]),
        ("smollm", " 1", ["Ġ", "1"]),
    ],
)
def test_digits_are_split_as_the_pre_tokenizer_says(
    pre: str, text: str, cut: list[str], tmp_path: Path
) -> None:
    """One by one, three at a time, or with their space: merges never cross the cut."""
    tokenizer, _ = built(tmp_path, byte_level_metadata(pre))
    assert pieces(tokenizer, text) == cut


def test_merges_run_in_their_order(tmp_path: Path) -> None:
    """Words are put together by the listed merges."""
    tokenizer, _ = built(tmp_path, byte_level_metadata())
    assert pieces(tokenizer, "hello world") == ["hello", "Ġw", "o", "r", "l", "d"]


def test_control_tokens_are_found_in_text_and_hidden_by_decoding(tmp_path: Path) -> None:
    """A rendered template's markers become single ids; decoding leaves them out."""
    tokenizer, config = built(tmp_path, byte_level_metadata())
    ids = tokenizer.encode("<|start|>hello<|end|>", add_special_tokens=False).ids
    assert ids[0] == 1
    assert ids[-1] == 0
    assert len(ids) == 3
    assert tokenizer.decode(ids) == "hello"
    assert config["eos_token"] == "<|end|>"
    assert config["bos_token"] == "<|start|>"
    assert "messages" in str(config["chat_template"])


def test_user_defined_tokens_are_single_and_visible(tmp_path: Path) -> None:
    """They are matched like control tokens but belong to the text."""
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"].append("<think>")
    metadata["tokenizer.ggml.token_type"].append(USER)
    tokenizer, _ = built(tmp_path, metadata)
    ids = tokenizer.encode("<think>hello", add_special_tokens=False).ids
    assert len(ids) == 2
    assert tokenizer.decode(ids) == "<think>hello"


@pytest.mark.parametrize("add_bos", [True, False])
def test_a_beginning_token_is_added_only_where_the_file_says_so(
    add_bos: bool, tmp_path: Path
) -> None:
    """``add_bos_token`` decides."""
    metadata = byte_level_metadata(**{"tokenizer.ggml.add_bos_token": add_bos})
    tokenizer, config = built(tmp_path, metadata)
    assert (tokenizer.encode("hello").ids[0] == 1) is add_bos
    assert config["add_bos_token"] is add_bos


@settings(max_examples=60, deadline=None)
@given(text=TEXTS, pre=st.sampled_from(["smollm", "llama-bpe", "gpt-2"]))
def test_byte_level_text_comes_back_unchanged(
    text: str, pre: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever is encoded decodes to itself, byte for byte."""
    tokenizer, _ = built(tmp_path_factory.mktemp("roundtrip"), byte_level_metadata(pre))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_scored_pieces_join_best_score_first(tmp_path: Path) -> None:
    """``bc`` outscores ``ab``, which comes later and would win by position."""
    tokenizer, _ = built(tmp_path, scored_metadata())
    assert pieces(tokenizer, "abc") == ["▁a", "bc"]
    assert tokenizer.encode("abc").ids[0] == 1


def test_unknown_characters_fall_back_to_bytes(tmp_path: Path) -> None:
    """A character outside of the vocabulary is spelled in bytes and comes back."""
    tokenizer, _ = built(tmp_path, scored_metadata())
    assert pieces(tokenizer, "é") == ["▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("ab é").ids) == "ab é"


def test_a_space_prefix_can_be_off(tmp_path: Path) -> None:
    """``add_space_prefix`` false leaves the text's beginning alone."""
    metadata = scored_metadata(**{"tokenizer.ggml.add_space_prefix": False})
    tokenizer, _ = built(tmp_path, metadata)
    assert pieces(tokenizer, "abc") == ["a", "bc"]


def test_ends_of_text_and_of_turn_both_end_a_generation(tmp_path: Path) -> None:
    """Files that tell a separate end of turn get both ids, once each."""
    metadata = byte_level_metadata(
        **{"tokenizer.ggml.eot_token_id": 1, "tokenizer.ggml.eom_token_id": 0}
    )
    path = GgufSpec(metadata, {"x.weight": f32([1.0])}).write(tmp_path / "ends.gguf")
    with GgufFile(path) as file:
        assert end_ids(file) == (0, 1)


@pytest.mark.parametrize("key", ["tokens", "merges"])
def test_a_file_without_a_tokenizer_is_refused(key: str, tmp_path: Path) -> None:
    """Weights alone are not a model that can chat."""
    metadata = byte_level_metadata()
    del metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(ModelError, match=key):
        built(tmp_path, metadata)


def test_scores_must_match_the_tokens(tmp_path: Path) -> None:
    """A vocabulary with too few scores is corrupt."""
    with pytest.raises(ModelError, match="scores"):
        built(tmp_path, scored_metadata(**{"tokenizer.ggml.scores": [1.0, 2.0]}))
