"""Messages, raw text and ids to prompts, with every way in which a client may get them wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers import pre_tokenizers as pre

from mlx_troupe.runtime.engine.tokenizer import load_tokenizer
from mlx_troupe.runtime.errors import ContextLengthExceeded, InvalidRequest
from mlx_troupe.runtime.requests import ChatPrompt, Message, TextPrompt, TokenPrompt
from mlx_troupe.runtime.text.prompts import PromptBuilder
from mlx_troupe.runtime.text.provenance import Provenance
from mlx_troupe.runtime.text.testing import EOS, THINK, ByteTokenizer
from mlx_troupe.runtime.text.tokenizer import Tokenizer as TextTokenizer

TEMPLATES = Path(__file__).resolve().parents[2] / "shared" / "data" / "chat_templates"
COLLECTED = 45
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('No system role') }}"
    "{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
ALTERNATING = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}|{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
FIRST_SYSTEM_ONLY = (
    "{% if messages[0].role == 'system' %}<<{{ messages[0].content }}>>{% endif %}"
    "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
CALLS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}("
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %})"
    "{% endfor %}{% if m.tool_call_id %}[{{ m.tool_call_id }}]{% endif %};{% endfor %}"
)
CALLS_AS_TEXT = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name + c.function.arguments }}{% endfor %};{% endfor %}"
)


def byte_tokenizer(folder: Path, template: str) -> TextTokenizer:
    """A real tokenizer without merges that renders with this template."""
    letters = {letter: i for i, letter in enumerate(sorted(pre.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=letters, merges=[]))
    made.pre_tokenizer = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    made.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return load_tokenizer(folder)


@pytest.fixture
def rendered(tmp_path: Path) -> Callable[..., str]:
    """Render messages with a template and give the prompt's text."""

    def render(template: str, *messages: Message, **kwargs: object) -> str:
        tokenizer = byte_tokenizer(tmp_path, template)
        built = PromptBuilder(tokenizer, Provenance()).build(ChatPrompt(messages, kwargs))
        return tokenizer.decode(built.ids)

    return render


def turns(*pairs: tuple[str, str]) -> tuple[Message, ...]:
    """Messages of (role, content)."""
    return tuple(Message(role, content) for role, content in pairs)


def build(prompt: Any, **options: Any) -> tuple[int, ...]:
    """Ids that the byte tokenizer gives."""
    return PromptBuilder(ByteTokenizer(**options), Provenance()).build(prompt).ids


class Meter(ByteTokenizer):
    """Counts what it has been given to read."""

    read = 0

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.read += len(text)
        return super().encode(text, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize("chat", [True, False])
def test_a_text_that_is_much_too_long_is_not_read_to_its_end(chat: bool) -> None:
    """Others wait for the tokenizer meanwhile."""
    tokenizer, room = Meter(), 1000
    text = "x" * 1_000_000
    prompt = ChatPrompt((Message("user", text),)) if chat else TextPrompt(text)
    with pytest.raises(ContextLengthExceeded) as caught:
        PromptBuilder(tokenizer, Provenance()).build(prompt, room)
    assert caught.value.param == ("messages" if chat else "prompt")
    assert "more than 8000 tokens" in caught.value.message
    assert str(room) in caught.value.message
    assert tokenizer.read == 8 * room


class LongWords(ByteTokenizer):
    """Has a token for every hundred characters."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return super().encode(text[::100], add_special_tokens=add_special_tokens)


@pytest.mark.parametrize(
    ("tokenizer", "text"), [(ByteTokenizer(), "x" * 8000), (LongWords(), "x" * 100_000)]
)
def test_a_text_near_the_limit_is_counted(tokenizer: ByteTokenizer, text: str) -> None:
    """Its exact length is for whoever asked to compare, and long tokens may yet fit."""
    builder = PromptBuilder(tokenizer, Provenance())
    plain = builder.build(TextPrompt(text))
    assert builder.build(TextPrompt(text), 1000) == plain


def test_more_messages_than_tokens_are_not_rendered() -> None:
    """Each takes one at least."""
    builder = PromptBuilder(ByteTokenizer(), Provenance())
    messages = (Message("user", "x"),) * 11
    assert builder.build(ChatPrompt(messages), 11)
    with pytest.raises(ContextLengthExceeded) as caught:
        builder.build(ChatPrompt(messages), 10)
    assert caught.value.param == "messages"


def test_a_template_without_a_system_role_gets_it_in_the_first_user_turn(
    rendered: Callable[..., str],
) -> None:
    """Several of them in their order, developer messages among them."""
    messages = turns(("system", "A"), ("developer", "B"), ("user", "hi"))
    assert rendered(NO_SYSTEM, *messages) == "user: A\n\nB\n\nhi\n"


def test_scattered_system_messages_are_merged_to_the_front(rendered: Callable[..., str]) -> None:
    """Also where the template would lose the later ones without a word."""
    late = turns(("user", "x"), ("assistant", "y"), ("system", "S"), ("user", "z"))
    several = turns(("system", "S"), ("developer", "T"), ("user", "x"))
    assert rendered(FIRST_SYSTEM_ONLY, *late) == "<<S>>user: x\nassistant: y\nuser: z\n"
    assert rendered(FIRST_SYSTEM_ONLY, *several) == "<<S\n\nT>>user: x\n"
    assert rendered(ALTERNATING, *late) == "S|user: x\nassistant: y\nuser: z\n"


def test_consecutive_turns_are_joined_for_templates_that_want_alternation(
    rendered: Callable[..., str],
) -> None:
    """And only for those: the rule changes nothing that the template takes as it is."""
    messages = turns(("user", "x"), ("user", "y"))
    assert rendered(ALTERNATING, *messages) == "user: x\n\ny\n"
    assert rendered(FIRST_SYSTEM_ONLY, *messages) == "user: x\nuser: y\n"


def test_what_no_rule_mends_is_refused_in_the_templates_words(
    rendered: Callable[..., str],
) -> None:
    """The client reads what the model's makers say, and no name of an exception."""
    messages = turns(("assistant", "y"), ("user", "x"))
    with pytest.raises(InvalidRequest, match=r"^roles must alternate$") as refused:
        rendered(ALTERNATING, *messages)
    assert refused.value.param == "messages"
    with pytest.raises(InvalidRequest, match="cannot render these messages") as refused:
        rendered("{{ messages[0].content + 1 }}", *messages)
    assert "Error" not in refused.value.message


@pytest.mark.parametrize("arguments", ['{"a": 2}', {"a": 2}])
def test_calls_reach_the_template_with_arguments_as_it_needs_them(
    rendered: Callable[..., str], arguments: object
) -> None:
    """Objects first; JSON text for templates that append it to a string."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    messages = (
        Message("user", "2?"),
        Message("assistant", "", {"tool_calls": [call]}),
        Message("tool", "5", {"tool_call_id": "c1", "name": None}),
    )
    assert rendered(CALLS, *messages) == "user:2?;assistant:add(a=2);tool:5[c1];"
    assert rendered(CALLS_AS_TEXT, *messages) == 'user:2?;assistant:add{"a": 2};tool:5;'


@pytest.mark.parametrize("arguments", ["{", "[1]", "[" * 100_000, None, 3])
def test_odd_arguments_of_a_call_are_refused_and_crash_nothing(
    rendered: Callable[..., str], arguments: object
) -> None:
    """A template that needs an object says so; the server lives on."""
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    with pytest.raises(InvalidRequest):
        rendered(CALLS, Message("assistant", "", {"tool_calls": [call]}))


def test_settings_of_a_template_are_passed_on_and_unknown_ones_ignored(
    rendered: Callable[..., str],
) -> None:
    """``enable_thinking`` and whatever else a template may know."""
    template = "{{ messages[0].content }}{% if enable_thinking is false %}!{% endif %}{{ tone }}"
    hello = Message("user", "hi")
    assert rendered(template, hello, enable_thinking=False, tone="?", x_unknown=1) == "hi!?"


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "messages", "add_generation_prompt"])
def test_names_that_are_no_settings_are_refused(name: str) -> None:
    """They would change what rendering itself does."""
    with pytest.raises(InvalidRequest, match=name):
        build(ChatPrompt(turns(("user", "hi")), {name: True}))


def test_a_last_assistant_turn_is_continued(rendered: Callable[..., str]) -> None:
    """No end of turn, no new turn; blank space at its end stays."""
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    messages = turns(("user", "count"), ("assistant", "1, 2, "))
    assert rendered(template, *messages) == "<user>count</s><assistant>1, 2, "
    assert rendered(template, *messages[:1]) == "<user>count</s><assistant>"
    with pytest.raises(InvalidRequest, match="continue"):
        rendered("{{ messages[0].content }}", *messages)


@pytest.mark.parametrize(
    "prompt",
    [
        TextPrompt("a\ud800b"),
        ChatPrompt(turns(("user", "a\ud800b"))),
        ChatPrompt(turns(("user\udfff", "a"))),
        ChatPrompt(()),
        TextPrompt(""),
        TokenPrompt(()),
        TokenPrompt((1, -1)),
        TokenPrompt((259,)),
    ],
)
def test_what_cannot_be_a_prompt_is_refused(prompt: Any) -> None:
    """Half characters, empty prompts and ids outside the vocabulary."""
    with pytest.raises(InvalidRequest):
        build(prompt)


def test_whole_characters_of_any_plane_and_nul_are_fine() -> None:
    """Only half of a pair is no character."""
    assert build(TextPrompt("\U0001f600\x00")) == tuple("\U0001f600\x00".encode())
    assert build(TokenPrompt((5, EOS))) == (5, EOS)


def test_a_model_without_a_template_still_takes_text() -> None:
    """Chat is refused by a code of its own."""
    with pytest.raises(InvalidRequest) as refused:
        build(ChatPrompt(turns(("user", "hi"))), chats=False)
    assert refused.value.code == "no_chat_template"
    assert build(TextPrompt("hi"), chats=False) == tuple(b"hi")


def test_a_template_that_opens_the_block_says_so() -> None:
    """Only for a model that has markers, and only when the prompt ends with the opening one."""
    hello, tokenizer = turns(("user", "hi")), ByteTokenizer(thinks=True)
    builder = PromptBuilder(tokenizer, Provenance())
    opened = builder.build(ChatPrompt(hello, {"think": True}))
    assert (opened.opens_reasoning, THINK in opened.ids) == (True, True)
    assert opened.count == len(opened.ids)
    assert not builder.build(ChatPrompt(hello)).opens_reasoning
    assert not builder.build(TextPrompt("<think>")).opens_reasoning
    other = PromptBuilder(ByteTokenizer(), Provenance())
    assert not other.build(ChatPrompt(hello, {"think": True})).opens_reasoning


WORD = 259


def spliced(*messages: Message, words: tuple[str, ...] = ("Four.",), **kwargs: object) -> list[int]:
    """Ids of a chat whose answer ``Four.`` was generated as one id."""
    provenance = Provenance()
    provenance.remember("Four.", (WORD,))
    builder = PromptBuilder(ByteTokenizer(words), provenance)
    return list(builder.build(ChatPrompt(messages, kwargs)).ids)


def test_remembered_answers_keep_their_ids_wherever_they_stand() -> None:
    """Twice in the history, and as the turn to be continued; other turns are encoded."""
    question, answer = Message("user", "2+2? Four."), Message("assistant", "Four.")
    other = Message("assistant", "Four!")
    ids = spliced(question, answer, question, other, question, answer)
    asked = b"user: 2+2? Four."
    assert ids == [
        *(*asked, EOS, *b"\nassistant: ", WORD, EOS, *b"\n"),
        *(*asked, EOS, *b"\nassistant: Four!", EOS, *b"\n"),
        *(*asked, EOS, *b"\nassistant: ", WORD),
    ]


def test_ids_that_spell_something_else_are_not_used() -> None:
    """A memory that is wrong costs the reuse and nothing more."""
    history = turns(("user", "a"), ("assistant", "Four."), ("user", "b"))
    assert WORD not in spliced(*history, words=("Five.",))


def test_a_template_that_changes_answers_gets_plain_ids(tmp_path: Path) -> None:
    """Cut, shouted or repeated answers are not what was generated; dropped ones do no harm."""
    history = turns(("user", "a"), ("assistant", "Four."), ("user", "b"))
    body = "{{ 'Thought' if m.content == 'Four.' else m.content }}"
    bodies = [
        body,
        "{{ m.content|upper }}",
        "{{ m.content[:3] }}",
        "{{ m.content }}{{ m.content }}",
    ]
    for number, text in enumerate([*bodies, "{% if m.role == 'user' %}{{ m.content }}{% endif %}"]):
        template = "{% for m in messages %}" + text + ";{% endfor %}"
        tokenizer = byte_tokenizer(tmp_path / str(number), template)
        provenance = Provenance()
        provenance.remember("Four.", tuple(tokenizer.encode("Four.", add_special_tokens=False)))
        prompt = ChatPrompt(history)
        plain = PromptBuilder(tokenizer, Provenance()).build(prompt)
        assert PromptBuilder(tokenizer, provenance).build(prompt) == plain


CHATS = {
    "user": turns(("user", "userone")),
    "system+user": turns(("system", "sysone"), ("user", "userone")),
    "user+assistant+user": turns(
        ("user", "userone"), ("assistant", "assistone"), ("user", "usertwo")
    ),
    "system+system+user": turns(("system", "sysone"), ("system", "systwo"), ("user", "userone")),
    "developer+user": turns(("developer", "sysone"), ("user", "userone")),
    "system late": turns(
        ("user", "userone"), ("assistant", "assistone"), ("system", "sysone"), ("user", "usertwo")
    ),
    "user+user": turns(("user", "userone"), ("user", "usertwo")),
    "assistant last": turns(("user", "userone"), ("assistant", "assistone")),
}


OWN = {
    "roles": "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    "one system message": "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system message comes first') }}{% endif %}"
    "[{{ m.role }}]{{ m.content|trim }};{% endfor %}{% if add_generation_prompt %}[assistant]"
    "{% endif %}",
    "a beginning token": "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}",
}


def collected() -> dict[str, str]:
    """Templates of real models: other people's files, which are not in the repository."""
    return {path.stem: path.read_text(encoding="utf-8") for path in TEMPLATES.glob("*.jinja")}


@pytest.mark.parametrize("name", [*OWN, *sorted(collected())])
def test_a_template_renders_every_plain_chat_whole(name: str, tmp_path: Path) -> None:
    """Nothing is refused, lost or sent with two beginning tokens."""
    assert_whole(name, (OWN | collected())[name], tmp_path)


def test_the_collection_of_templates_is_there_whole_or_not_at_all(
    record_property: Callable[[str, object], None],
) -> None:
    """A run says of how many real models the templates were among its cases."""
    found = len(collected())
    assert found in (0, COLLECTED)
    record_property(
        "note", f"chat templates: {found} of {COLLECTED} collected ones, {len(OWN)} own"
    )


def assert_whole(name: str, template: str, folder: Path) -> None:
    """Every chat's every text is in its prompt, behind one beginning token at most."""
    tokenizer = byte_tokenizer(folder, template)
    provenance = Provenance()
    provenance.remember("assistone", tuple(b"x"))
    builder = PromptBuilder(tokenizer, provenance)
    for chat, messages in CHATS.items():
        built = builder.build(ChatPrompt(messages))
        text = tokenizer.decode(built.ids)
        lost = [m.content for m in messages if m.content not in text]
        assert not lost, f"{name}, {chat}: lost {lost}"
        assert text.count("<s>") <= 1, f"{name}, {chat}"
        assert chat != "assistant last" or text.endswith("assistone"), name
