"""Builds tokenizer.json and tokenizer_config.json from a GGUF file's metadata.

Two kinds of tokenizer are known: byte-level BPE (``gpt2``) with the pre-tokenizers of the readable
architectures, and SentencePiece's scored pieces (``llama``), rebuilt as BPE with byte fallback.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from ..errors import ModelError
from .gguf_reader import GgufFile

_SPACE = "▁"
_DIGITS = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
)
_LLAMA3 = frozenset({"llama-bpe", "llama3", "llama-v3", "smaug-bpe", "falcon3"})
_QWEN2 = frozenset({"qwen2", "deepseek-r1-qwen", "megrez"})
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Kind(IntEnum):
    """GGUF's token types that need care."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokenizer's part of the metadata. Ids are positions in ``tokens``."""

    tokens: tuple[str, ...]
    types: tuple[int, ...]
    bos: int | None
    eos: int | None
    pad: int | None
    unknown: int | None
    add_bos: bool
    add_eos: bool

    def text(self, index: int | None) -> str | None:
        """The token with that id, or None."""
        return self.tokens[index] if index is not None and index < len(self.tokens) else None


def build_tokenizer(file: GgufFile) -> tuple[Tokenizer, dict[str, object]]:
    """A ready tokenizer and its tokenizer_config.json. Raises ModelError if it is of another kind.

    Missing metadata (no tokenizer at all) is a ModelError too.
    """
    kind = file.metadata.get("tokenizer.ggml.model", "(none)")
    vocabulary = _read_vocabulary(file, default_bos=kind == "llama")
    match kind:
        case "gpt2":
            tokenizer = _byte_level(file, vocabulary)
        case "llama":
            tokenizer = _scored_pieces(file, vocabulary)
        case _:
            raise ModelError(f"tokenizer model {kind} cannot be read (readable: gpt2, llama)")
    _add_special(tokenizer, vocabulary)
    tokenizer.post_processor = _post_processor(vocabulary, byte_level=kind == "gpt2")
    return tokenizer, _tokenizer_config(file, vocabulary)


def end_ids(file: GgufFile) -> tuple[int, ...]:
    """Ids that end a generation: the end of text and, where it is told, the end of a turn."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = (_token_id(file, key) for key in keys)
    return tuple(dict.fromkeys(index for index in found if index is not None))


def _token_id(file: GgufFile, key: str) -> int | None:
    value = file.metadata.get(f"tokenizer.ggml.{key}")
    return value if isinstance(value, int) and 0 <= value < 2**31 else None


def _flag(file: GgufFile, key: str, default: bool) -> bool:
    return bool(file.metadata.get(f"tokenizer.ggml.{key}", default))


def _read_vocabulary(file: GgufFile, *, default_bos: bool) -> Vocabulary:
    tokens = _strings(file, "tokens")
    types = file.metadata.get("tokenizer.ggml.token_type")
    listed = tuple(types.tolist()) if isinstance(types, np.ndarray) else ()
    if listed and len(listed) != len(tokens):
        raise ModelError(f"{file.path.name}: {len(tokens)} tokens but {len(listed)} token types")
    return Vocabulary(
        tokens=tokens,
        types=listed or (int(_Kind.NORMAL),) * len(tokens),
        bos=_token_id(file, "bos_token_id"),
        eos=_token_id(file, "eos_token_id"),
        pad=_token_id(file, "padding_token_id"),
        unknown=_token_id(file, "unknown_token_id"),
        add_bos=_flag(file, "add_bos_token", default_bos),
        add_eos=_flag(file, "add_eos_token", False),
    )


def _strings(file: GgufFile, key: str) -> tuple[str, ...]:
    value = file.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, tuple) or not value:
        raise ModelError(f"{file.path.name} has no tokenizer (tokenizer.ggml.{key} is missing)")
    return value


def _byte_level(file: GgufFile, vocabulary: Vocabulary) -> Tokenizer:
    merges = [_pair(merge) for merge in _strings(file, "merges")]
    pre = str(file.metadata.get("tokenizer.ggml.pre", "gpt-2"))
    # Llama 3 takes a word that is a token as it is, even where the merges would not reach it.
    model = models.BPE(_ids(vocabulary), merges, ignore_merges=pre in _LLAMA3)
    tokenizer = Tokenizer(model)
    if pre in _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _ids(vocabulary: Vocabulary) -> dict[str, int]:
    return {token: index for index, token in enumerate(vocabulary.tokens)}


def _pair(merge: str) -> tuple[str, str]:
    left, separator, right = merge.partition(" ")
    if not separator or not right:
        raise ModelError(f"tokenizer merge {merge!r} is not a pair")
    return left, right


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre in ("gpt-2", "gpt2", "default"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre in _DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        words = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return pre_tokenizers.Sequence([digits, words])
    if pre in _LLAMA3 or pre in _QWEN2:
        digits_rule = r"\p{N}{1,3}" if pre in _LLAMA3 else r"\p{N}"
        split = pre_tokenizers.Split(Regex(_WORDS.format(digits=digits_rule)), "isolated")
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([split, as_bytes])
    raise ModelError(f"pre-tokenizer {pre} cannot be read")


def _scored_pieces(file: GgufFile, vocabulary: Vocabulary) -> Tokenizer:
    scores = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(vocabulary.tokens):
        raise ModelError(f"{file.path.name}: tokenizer.ggml.scores is missing or too short")
    merges = list(_merges_of_scores(vocabulary, scores.tolist()))
    model = models.BPE(
        _ids(vocabulary),
        merges,
        unk_token=vocabulary.text(vocabulary.unknown),
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefixed = _flag(file, "add_space_prefix", True)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    if prefixed:
        steps.insert(0, normalizers.Prepend(_SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    undo: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback()]
    undo.append(decoders.Fuse())
    if prefixed:
        undo.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(undo)
    return tokenizer


def _merges_of_scores(vocabulary: Vocabulary, scores: Sequence[float]) -> Iterator[tuple[str, str]]:
    """Every way to join two pieces into a third, the best-scored result first."""
    normal = {
        token: index
        for index, token in enumerate(vocabulary.tokens)
        if vocabulary.types[index] in (_Kind.NORMAL, _Kind.USER_DEFINED)
    }
    for token in sorted(normal, key=lambda piece: (-scores[normal[piece]], normal[piece])):
        splits = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        known = [pair for pair in splits if pair[0] in normal and pair[1] in normal]
        yield from sorted(known, key=lambda pair: (normal[pair[0]], normal[pair[1]]))


def _add_special(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """Control tokens are matched in text before anything else and hidden by decoding."""
    typed = tuple(zip(vocabulary.tokens, vocabulary.types, strict=True))
    hidden = [token for token, kind in typed if kind in (_Kind.CONTROL, _Kind.UNKNOWN)]
    shown = [token for token, kind in typed if kind == _Kind.USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in hidden])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in shown])


def _post_processor(vocabulary: Vocabulary, *, byte_level: bool) -> processors.PostProcessor:
    bos = vocabulary.text(vocabulary.bos) if vocabulary.add_bos else None
    eos = vocabulary.text(vocabulary.eos) if vocabulary.add_eos else None
    steps: list[processors.PostProcessor] = []
    if byte_level:
        steps.append(processors.ByteLevel(trim_offsets=False))
    if bos or eos:
        single = [bos, "$A", eos]
        pair = [bos, "$A", eos, bos and f"{bos}:1", "$B:1", eos and f"{eos}:1"]
        special = [(t, i) for t, i in ((bos, vocabulary.bos), (eos, vocabulary.eos)) if t]
        steps.append(
            processors.TemplateProcessing(
                single=[part for part in single if part],
                pair=[part for part in pair if part],
                special_tokens=list(dict(special).items()),
            )
        )
    return processors.Sequence(steps)


def _tokenizer_config(file: GgufFile, vocabulary: Vocabulary) -> dict[str, object]:
    named = {
        "bos_token": vocabulary.text(vocabulary.bos),
        "eos_token": vocabulary.text(vocabulary.eos),
        "pad_token": vocabulary.text(vocabulary.pad) or vocabulary.text(vocabulary.eos),
        "unk_token": vocabulary.text(vocabulary.unknown),
        "chat_template": file.metadata.get("tokenizer.chat_template"),
    }
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": vocabulary.add_bos,
        "add_eos_token": vocabulary.add_eos,
        "clean_up_tokenization_spaces": False,
    }
    return config | {key: value for key, value in named.items() if value is not None}
