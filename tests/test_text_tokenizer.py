"""Tokenizers of both common kinds, trained here, saved, and loaded as models bring them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors, trainers
from tokenizers import pre_tokenizers as pre

from mlx_troupe.runtime.engine.tokenizer import load_tokenizer
from mlx_troupe.runtime.errors import InvalidRequest, ModelError
from mlx_troupe.runtime.requests import (
    Channel,
    ChatPrompt,
    Message,
    Prompt,
    TextDelta,
    TextPrompt,
)
from mlx_troupe.runtime.text.detokenizer import (
    TableDetokenizer,
    WindowDetokenizer,
    open_detokenizer,
)
from mlx_troupe.runtime.text.prompts import PromptBuilder
from mlx_troupe.runtime.text.provenance import Provenance
from mlx_troupe.runtime.text.stream import TextStream
from mlx_troupe.runtime.text.tokenizer import Tokenizer as TextTokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox does not.",
    "def add(a, b):\n    return a + b\n\nprint(add(2, 3))  # 5\n",
    "Hello there, how are you today? I am fine, thank you. What is the weather like?",
    "如何降级 Mac? 你好，世界。 Überraschung: äöü ß, déjà vu.",
] * 4
SPECIALS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRICKY = [
    "Hello world",
    " leading and trailing ",
    "  two  blanks\n\n\ttab",
    "😀 👩‍👩‍👧‍👦 🇯🇵 漢字 é",
    "如何降级Mac?",
    "ภาษาไทย हिन्दी",
    "it 's , . ! fine",
    "",
]


def byte_level() -> Tokenizer:
    """A byte-level BPE, as of GPT-2, Llama 3 or Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIALS,
        initial_alphabet=pre.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("</think>"), AddedToken("ça va")])
    return tokenizer


def sentencepiece(*, bos: bool = True) -> Tokenizer:
    """A BPE with blanks as U+2581 and byte tokens, as of Llama 2, Mistral or Gemma."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    blank = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), blank])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIALS + [f"<0x{value:02X}>" for value in range(256)],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] in SPECIALS]
    return Tokenizer.from_str(json.dumps(content))


def metaspace() -> Tokenizer:
    """A unigram-like vocabulary whose decoder drops the first token's blank (T5, XLM-R)."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIALS, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def wordpiece() -> Tokenizer:
    """A vocabulary whose decoding depends on neighbours: no table of pieces fits it."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=SPECIALS, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "sentencepiece": sentencepiece,
    "metaspace": metaspace,
    "wordpiece": wordpiece,
}


def save(
    folder: Path,
    tokenizer: Tokenizer,
    config: Mapping[str, object] | None = None,
    **files: str,
) -> Path:
    """A model directory with a tokenizer; ``files`` are further files, ``__`` for the dot."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    plain = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "bos_token": "<s>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": True,
        "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(plain | dict(config or {})))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextTokenizer]:
    """One tokenizer of each kind, with a ChatML template."""
    root = tmp_path_factory.mktemp("kinds")
    return {
        kind: load_tokenizer(save(root / kind, make(), chat_template__jinja=CHATML))
        for kind, make in KINDS.items()
    }


def streamed(tokenizer: TextTokenizer, ids: list[int]) -> str:
    """All text of a detokenizer that is fed id by id."""
    detokenizer = open_detokenizer(tokenizer)
    return "".join(map(detokenizer.feed, ids)) + detokenizer.finish()


def visible(tokenizer: TextTokenizer, ids: list[int]) -> list[int]:
    """Ids without those that spell nothing."""
    return [i for i in ids if not tokenizer.is_special(i)]


def test_each_kind_gets_the_fast_way_where_there_is_one(loaded: dict[str, Any]) -> None:
    """Tables for the kinds that decode token by token, a window for the rest."""
    kinds = {kind: type(open_detokenizer(tokenizer)) for kind, tokenizer in loaded.items()}
    assert kinds == {
        "byte_level": TableDetokenizer,
        "sentencepiece": TableDetokenizer,
        "metaspace": TableDetokenizer,
        "wordpiece": WindowDetokenizer,
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TRICKY)
def test_streaming_real_text_equals_decoding_it(
    loaded: dict[str, Any], kind: str, text: str
) -> None:
    """Scripts, blanks and emoji come out as the tokenizer decodes them all at once."""
    tokenizer = loaded[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert streamed(tokenizer, ids) == tokenizer.decode(visible(tokenizer, ids))
    if kind in ("byte_level", "sentencepiece"):
        assert streamed(tokenizer, ids) == text


def check_byte_level(tokenizer: TextTokenizer, ids: list[int]) -> None:
    """The text is what the tokenizer decodes, whatever the bytes."""
    assert streamed(tokenizer, ids) == tokenizer.decode(visible(tokenizer, ids))


def check_sentencepiece(tokenizer: TextTokenizer, ids: list[int]) -> None:
    """As the tokenizer decodes; where byte tokens are not valid UTF-8, as Python decodes bytes."""
    raw = b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")
    text = streamed(tokenizer, ids)
    assert text == raw.removeprefix(" ")
    if "\ufffd" not in raw:
        assert text == tokenizer.decode(visible(tokenizer, ids))


CHECKS = {"byte_level": check_byte_level, "sentencepiece": check_sentencepiece}


@pytest.mark.parametrize("kind", CHECKS)
def test_two_thousand_random_sequences_never_raise_and_equal_the_decoding(
    loaded: dict[str, Any], kind: str
) -> None:
    """Lone bytes, special ids and ids that do not exist, in any order."""
    tokenizer, random = loaded[kind], Random(15)
    some_bytes = tokenizer.encode("😀\x00\xff\u3042", add_special_tokens=False)
    for _ in range(2000):
        anything = [random.randrange(-2, tokenizer.vocab_size + 2) for _ in range(20)]
        count = random.randrange(24)
        CHECKS[kind](tokenizer, [random.choice(anything + some_bytes) for _ in range(count)])


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_random_ids_never_raise_and_equal_the_decoding(
    loaded: dict[str, Any], data: st.DataObject
) -> None:
    """Every kind, also those that look at neighbours or treat the first token apart."""
    kind = data.draw(st.sampled_from(sorted(loaded)))
    tokenizer = loaded[kind]
    ids = data.draw(st.lists(st.integers(-2, tokenizer.vocab_size + 2), max_size=16))
    CHECKS.get(kind, check_byte_level)(tokenizer, ids)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_text_is_sent_at_once_and_characters_whole(loaded: dict[str, Any], kind: str) -> None:
    """``hi`` comes out with its token, the emoji with its last byte and not before."""
    tokenizer = loaded[kind]
    detokenizer = open_detokenizer(tokenizer)
    ids = tokenizer.encode("hi😀", add_special_tokens=False)
    texts = [detokenizer.feed(i) for i in ids]
    assert "".join(texts[:-4]) == "hi"
    assert texts[-4:] == ["", "", "", "😀"]
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("kept", range(1, 12))
def test_a_character_cut_by_the_limit_gives_one_replacement_mark(
    loaded: dict[str, Any], kind: str, kept: int
) -> None:
    """For every limit: text that begins the whole text, then at most one U+FFFD."""
    tokenizer = loaded[kind]
    ids = tokenizer.encode("é 漢字 😀", add_special_tokens=False)[:kept]
    text = streamed(tokenizer, ids)
    assert text.count("\ufffd") <= 1
    assert "é 漢字 😀".startswith(text.removesuffix("\ufffd"))


def test_only_special_tokens_spell_nothing(loaded: dict[str, Any]) -> None:
    """Added tokens that are not special are text, thinking markers among them."""
    tokenizer = loaded["byte_level"]
    ids = tokenizer.encode("<s>a<think>b</think>ça va<|im_end|>", add_special_tokens=False)
    assert streamed(tokenizer, ids) == "a<think>b</think>ça va"
    assert tokenizer.think_markers == ("<think>", "</think>")
    assert tokenizer.decode(ids) == "<s>a<think>b</think>ça va<|im_end|>"
    assert tokenizer.token_bytes(ids[0]) == b""
    assert b"".join(map(tokenizer.token_bytes, ids)) == "a<think>b</think>ça va".encode()


def test_a_special_thinking_marker_is_still_text(tmp_path: Path) -> None:
    """Some models mark the tags as special; the splitter must see them all the same."""
    content = json.loads(byte_level().to_str())
    for token in content["added_tokens"]:
        token["special"] |= "think" in token["content"]
    tokenizer = load_tokenizer(save(tmp_path, Tokenizer.from_str(json.dumps(content))))
    ids = tokenizer.encode("<think>a</think>b", add_special_tokens=False)
    stream = TextStream(tokenizer, markers=tokenizer.think_markers)
    deltas = [*(d for i in ids for d in stream.feed(i)), *stream.finish()]
    assert deltas == [TextDelta(Channel.REASONING, "a"), TextDelta(Channel.CONTENT, "b")]


def test_markers_that_only_the_template_spells_are_found(tmp_path: Path) -> None:
    """A model whose tags are ordinary text of its template thinks all the same."""
    template = CHATML + "{% if x %}<think></think>{% endif %}"
    folder = save(tmp_path, sentencepiece(), chat_template__jinja=template)
    assert load_tokenizer(folder).think_markers == ("<think>", "</think>")


def test_all_end_tokens_of_the_generation_config_count(tmp_path: Path) -> None:
    """A list there, and the tokenizer's own; a config without one changes nothing."""
    made = byte_level()
    both = {made.token_to_id("</s>"), made.token_to_id("<s>")}
    own = made.token_to_id("<|im_end|>")
    listed = save(
        tmp_path / "a", made, generation_config__json=json.dumps({"eos_token_id": sorted(both)})
    )
    single = save(tmp_path / "b", made, config__json=json.dumps({"eos_token_id": own}))
    assert load_tokenizer(listed).eos_ids == both | {own}
    assert load_tokenizer(single).eos_ids == {own}


def test_an_end_token_has_no_text_even_where_it_is_an_ordinary_token(
    loaded: dict[str, Any],
) -> None:
    """The stream leaves out whatever ends a generation."""
    tokenizer = loaded["byte_level"]
    a, b = (tokenizer.encode(text, add_special_tokens=False)[0] for text in "ab")
    stream = TextStream(tokenizer, eos_ids=frozenset({b}))
    assert [d.text for i in (a, b) for d in stream.feed(i)] == ["a"]
    assert stream.content_ids == (a,)


def test_templates_are_found_wherever_models_keep_them(tmp_path: Path) -> None:
    """In a file of its own, in the settings, as a set of named ones, or not at all."""
    made, named = byte_level(), {"default": "plain", "tool_use": "with {{ tools|length }}"}
    in_config = {"chat_template": [{"name": n, "template": t} for n, t in named.items()]}
    file = load_tokenizer(save(tmp_path / "file", made, chat_template__jinja=CHATML))
    many = load_tokenizer(save(tmp_path / "many", made, in_config))
    none = load_tokenizer(save(tmp_path / "none", made))
    hello: list[dict[str, object]] = [{"role": "user", "content": "hi"}]
    assert file.render(hello).endswith("<|im_start|>assistant\n")
    assert many.render(hello) == "plain"
    assert many.render(hello, tools=[{"type": "function"}]) == "with 1"
    assert not none.has_chat_template
    builder = PromptBuilder(none, Provenance())
    with pytest.raises(InvalidRequest) as refused:
        builder.build(ChatPrompt((Message("user", "hi"),)))
    assert refused.value.code == "no_chat_template"
    assert builder.build(TextPrompt("hi")).count > 0


def test_unreadable_tokenizers_are_model_errors(tmp_path: Path) -> None:
    """No directory, no files, broken files: always the same error."""
    with pytest.raises(ModelError):
        load_tokenizer(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    broken = save(tmp_path / "broken", byte_level())
    (broken / "tokenizer.json").write_text("{")
    listed = save(tmp_path / "list", byte_level(), generation_config__json="[]")
    for folder in (tmp_path / "empty", broken, listed):
        with pytest.raises(ModelError):
            load_tokenizer(folder)
    shutil.rmtree(broken)


def test_a_prompt_has_one_beginning_token_and_never_two(tmp_path: Path) -> None:
    """From the tokenizer's rule for raw text, from the template for chats, from the text itself."""
    template = "{{ bos_token }}" + CHATML
    folder = save(tmp_path / "bos", sentencepiece(), chat_template__jinja=template)
    tokenizer = load_tokenizer(folder)
    builder = PromptBuilder(tokenizer, Provenance())
    (bos,) = tokenizer.encode("<s>", add_special_tokens=False)
    chat = ChatPrompt((Message("user", "hi"),))
    prompts: list[Prompt] = [TextPrompt("hi"), TextPrompt("<s>hi"), chat]
    for prompt in prompts:
        ids = builder.build(prompt).ids
        assert ids[0] == bos
        assert ids.count(bos) == 1
    assert builder.build(TextPrompt("")).ids == (bos,)
    without = load_tokenizer(save(tmp_path / "without", byte_level()))
    with pytest.raises(InvalidRequest):
        PromptBuilder(without, Provenance()).build(TextPrompt(""))


def unusual(tokenizer: TextTokenizer, text: str) -> list[int]:
    """Ids that spell a text a piece at a time, as a sampled answer may."""
    return [i for c in text for i in tokenizer.encode(c, add_special_tokens=False)]


def next_turn(
    tokenizer: TextTokenizer, answer_ids: list[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Prompt ids of a first turn, and those of the turn after it was answered with these ids."""
    provenance = Provenance()
    builder = PromptBuilder(tokenizer, provenance)
    first = (Message("system", "Be brief."), Message("user", "How are you today?"))
    stream = TextStream(tokenizer, eos_ids=tokenizer.eos_ids)
    for token_id in [*answer_ids, *tokenizer.eos_ids]:
        stream.feed(token_id)
    stream.finish()
    provenance.remember(stream.content_text, stream.content_ids)
    more = (Message("assistant", stream.content_text), Message("user", "And the fox?"))
    return builder.build(ChatPrompt(first)).ids, builder.build(ChatPrompt(first + more)).ids


@pytest.mark.parametrize(
    "answer", ["The lazy dog.", "如何降级 😀", " two  blanks\n", "a<|im_end|>b"]
)
def test_the_next_turn_begins_with_prompt_and_generated_ids(
    loaded: dict[str, Any], answer: str
) -> None:
    """Ids that encoding would not give are kept exactly, so a kept state is found by them."""
    tokenizer = loaded["byte_level"]
    answer_ids = unusual(tokenizer, answer)
    assert answer_ids != tokenizer.encode(answer, add_special_tokens=False)
    before, after = next_turn(tokenizer, answer_ids)
    expected = (*before, *answer_ids)
    assert after[: len(expected)] == expected
    assert tokenizer.decode(after[len(expected) :]).startswith("<|im_end|>\n<|im_start|>user\n")


def test_the_next_turn_of_a_sentencepiece_model_keeps_its_ids_too(tmp_path: Path) -> None:
    """There the blank before an answer belongs to its first id and not to the template's text."""
    template = (
        "<s>{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.content }}<|im_end|>"
        "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% endif %}{% endfor %}"
    )
    made = sentencepiece(bos=False)
    tokenizer = load_tokenizer(
        save(tmp_path, made, {"eos_token": "</s>"}, chat_template__jinja=template)
    )
    start, *rest = tokenizer.encode("The lazy dog.", add_special_tokens=False)
    answer_ids = [start, *unusual_pieces(made, tokenizer.decode(rest))]
    before, after = next_turn(tokenizer, answer_ids)
    expected = (*before, *answer_ids)
    assert after[: len(expected)] == expected


def test_template_text_that_cannot_be_encoded_apart_costs_only_the_reuse(tmp_path: Path) -> None:
    """Plain text after an answer would get a second blank from a SentencePiece tokenizer."""
    template = "<s>{% for m in messages %}<|im_start|>{{ m.content }} END{% endfor %}"
    made = sentencepiece(bos=False)
    tokenizer = load_tokenizer(save(tmp_path, made, chat_template__jinja=template))
    answer, provenance = "fox", Provenance()
    provenance.remember(answer, tuple(unusual_pieces(made, answer)))
    history = (Message("user", "a"), Message("assistant", answer), Message("user", "b"))
    prompt = ChatPrompt(history)
    plain = PromptBuilder(tokenizer, Provenance()).build(prompt)
    assert PromptBuilder(tokenizer, provenance).build(prompt) == plain


def unusual_pieces(made: Tokenizer, text: str) -> list[int]:
    """Single-character tokens of a SentencePiece-like vocabulary."""
    return [made.token_to_id(c.replace(" ", "▁")) for c in text]


def test_many_threads_may_build_prompts_at_once(loaded: dict[str, Any]) -> None:
    """Long prompts are built on worker threads while other requests use the same tokenizer."""
    builder = PromptBuilder(loaded["byte_level"], Provenance())
    prompts = [ChatPrompt((Message("user", f"{n} {CORPUS[n % 4]}" * 20),)) for n in range(32)]
    alone = [builder.build(prompt) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(builder.build, prompts)) == alone


def test_edited_history_is_encoded_plainly(loaded: dict[str, Any]) -> None:
    """One changed character, and the ids are those of the text."""
    tokenizer, provenance = loaded["byte_level"], Provenance()
    builder = PromptBuilder(tokenizer, provenance)
    provenance.remember("The lazy dog.", tuple(unusual(tokenizer, "The lazy dog.")))
    history = (Message("user", "a"), Message("assistant", "The lazy dog!"), Message("user", "b"))
    rendered = tokenizer.render([{"role": m.role, "content": m.content} for m in history])
    plain = tokenizer.encode(rendered, add_special_tokens=False)
    assert list(builder.build(ChatPrompt(history)).ids) == plain
