"""Grammars on the byte tokenizer: what they allow, where they end, what cannot be compiled."""

from __future__ import annotations

import collections
import json
import random
import threading
from contextlib import suppress
from dataclasses import replace
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_troupe.runtime.engine.masks import MaskMaker
from mlx_troupe.runtime.errors import InvalidRequest
from mlx_troupe.runtime.grammars import (
    ANY_OBJECT,
    MAX_WHITESPACE,
    ChoiceGrammar,
    ContextFreeGrammar,
    Grammar,
    JsonGrammar,
    RegexGrammar,
    in_words,
)
from mlx_troupe.runtime.text import matching
from mlx_troupe.runtime.text.formats import PATTERNS
from mlx_troupe.runtime.text.grammar_sources import CannotCompile, Reasoning
from mlx_troupe.runtime.text.matching import (
    GrammarCompiler,
    MatchFailed,
    TokenMatcher,
)
from mlx_troupe.runtime.text.testing import EOS, ByteTokenizer

VOCAB = 300
TOKENIZER = ByteTokenizer(
    ("true", '{"', '":', "</think>\n\n", "</think>.", ">.", "aa"), thinks=True
)
CHOOSES = Reasoning("<think>", "</think>", opened=False)
OPENED = Reasoning("<think>", "</think>", opened=True)


BRANCHES = "|".join(f'"x{n}"' for n in range(2100))
"""More than a grammar may have at one place."""


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    """One for the whole module: making it is most of a test's time."""
    return GrammarCompiler(TOKENIZER, VOCAB)


def schema(**keywords: Any) -> JsonGrammar:
    """A grammar for a schema."""
    return JsonGrammar(json.dumps(keywords), param="schema")


def follow(matcher: TokenMatcher, text: str) -> bool:
    """Take a text byte by byte; whether nothing may come after it."""
    done = False
    for byte in text.encode():
        if done:
            raise MatchFailed("text after the end")
        done = matcher.take(byte)
    return done


def accepts(compiler: GrammarCompiler, grammar: Grammar, text: str, **more: Any) -> bool:
    """Whether the text is a whole answer: it can be written and the end token may follow it."""
    matcher = compiler.compile(grammar, **more)
    try:
        return follow(matcher, text) or EOS in matcher.allowed()
    except MatchFailed:
        return False


def write(matcher: TokenMatcher, seed: int, limit: int = 400) -> str | None:
    """An answer of tokens chosen at random; None if it found no end."""
    chosen = random.Random(seed)
    text = b""
    for _ in range(limit):
        allowed = matcher.allowed()
        # Ends and closing quotes are favoured, or random strings go on for ever.
        ends = [t for t in allowed if t in (EOS, *b'"}]')]
        token = chosen.choice(ends if ends and chosen.random() < 0.6 else allowed)
        text += TOKENIZER.token_bytes(token)
        if matcher.take(token) or token == EOS:
            return text.decode()
    return None


class Repeated(Exception):
    """An object with one name twice, which the engine allows for names that no schema lists."""


def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object, if its names differ."""
    if len(dict(pairs)) < len(pairs):
        raise Repeated
    return dict(pairs)


KEYWORDS: dict[str, dict[str, Any]] = {
    "type": {"type": "boolean"},
    "types": {"type": ["string", "null"]},
    "enum": {"enum": ["a", 1, None, {"b": [True]}]},
    "const": {"const": {"a": [1, None]}},
    "properties": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "required": {
        "type": "object",
        "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "additionalProperties": {"type": "object", "additionalProperties": {"type": "integer"}},
    "patternProperties": {
        "type": "object",
        "patternProperties": {"^x[a-z]{1,3}$": {"type": "integer"}},
        "additionalProperties": False,
    },
    "minProperties": {"type": "object", "minProperties": 2, "additionalProperties": True},
    "items": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    "prefixItems": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"type": "null"}],
        "items": False,
        "minItems": 2,
    },
    "draft 7 items": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [{"type": "boolean"}, {"type": "null"}],
        "additionalItems": False,
        "minItems": 2,
    },
    "length": {"type": "string", "minLength": 2, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[a-f]+-[0-9]{2}$"},
    "uuid": {"type": "string", "format": "uuid"},
    **{name: {"type": "string", "format": name} for name in PATTERNS},
    "format and pattern": {
        "type": "string",
        "format": "json-pointer",
        "pattern": "^/[^b]*$",
        "maxLength": 6,
        "allOf": [{"pattern": "^.~?1?.?/"}],
    },
    "range": {"type": "integer", "minimum": -3, "exclusiveMaximum": 12},
    "multipleOf": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    "number": {"type": "number", "minimum": 0.5, "maximum": 2.5},
    "anyOf": {"anyOf": [{"type": "null"}, {"type": "integer"}]},
    "oneOf": {"oneOf": [{"type": "boolean"}, {"type": "integer"}]},
    "allOf": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}},
            {"required": ["a"], "properties": {"a": {"maximum": 5}}},
        ]
    },
    "$defs": {"$ref": "#/$defs/n~1m", "$defs": {"n/m": {"type": "integer"}}},
    "definitions": {"$ref": "#/definitions/n", "definitions": {"n": {"type": "null"}}},
    "recursion": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
                "required": ["next"],
                "additionalProperties": False,
            }
        },
    },
    "annotations": {
        "type": "integer",
        "title": "T",
        "description": "D",
        "default": 3,
        "examples": [4],
        "deprecated": True,
        "$comment": "no",
    },
}


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_whatever_is_written_under_a_schema_validates(
    compiler: GrammarCompiler, keyword: str
) -> None:
    """Random answers, each allowed token as likely as another, are instances of the schema."""
    wanted = KEYWORDS[keyword]
    grammar = JsonGrammar(json.dumps(wanted))
    written = [write(compiler.compile(grammar), seed) for seed in range(25)]
    ended = [text for text in written if text is not None]
    assert len(ended) >= 12
    validator = jsonschema_rs.validator_for(wanted, validate_formats=True)
    for text in ended:
        with suppress(Repeated):
            validator.validate(json.loads(text, object_pairs_hook=once))


def texts(size: int) -> st.SearchStrategy[str]:
    """Any characters but controls, which JSON writes as escapes."""
    return st.text(st.characters(exclude_categories=("Cc", "Cs")), max_size=size)


def containers(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    """Lists and objects of what is given."""
    return st.lists(inner, max_size=3) | st.dictionaries(texts(3), inner, max_size=3)


LEAVES = st.none() | st.booleans() | st.integers(-9, 9) | texts(5)


@given(st.recursive(LEAVES, containers, max_leaves=6))
@settings(max_examples=60, deadline=None)
def test_every_object_can_be_written_where_any_is_asked_for(value: object) -> None:
    """Indented as people write it, compact where compact is asked for, and not otherwise."""
    shared = _shared()
    whole = {"v": value}
    tight = json.dumps(whole, ensure_ascii=False, separators=(",", ":"))
    compact = JsonGrammar(ANY_OBJECT, any_whitespace=False)
    assert accepts(shared, JsonGrammar(ANY_OBJECT), json.dumps(whole, indent=2, ensure_ascii=False))
    assert accepts(shared, JsonGrammar(ANY_OBJECT), tight)
    assert accepts(shared, compact, tight)
    assert not accepts(shared, compact, tight.replace(":", ": ", 1))


_made: list[GrammarCompiler] = []


def _shared() -> GrammarCompiler:
    if not _made:
        _made.append(GrammarCompiler(TOKENIZER, VOCAB))
    return _made[0]


def test_white_space_between_parts_is_bounded(compiler: GrammarCompiler) -> None:
    """A model that only ever adds line ends comes to something else."""
    matcher = compiler.compile(JsonGrammar(ANY_OBJECT))
    follow(matcher, "{" + "\n" * MAX_WHITESPACE)
    assert set(matcher.allowed()).isdisjoint(b" \t\r\n")
    spaced = JsonGrammar(ANY_OBJECT, whitespace_pattern=r"[ ]{2}")
    assert accepts(compiler, spaced, '{  "a":  1}')
    assert not accepts(compiler, spaced, '{ "a": 1}')


def test_the_end_token_is_allowed_exactly_where_the_text_may_end(
    compiler: GrammarCompiler,
) -> None:
    """And where nothing else may follow, the matcher says so without it."""
    matcher = compiler.compile(RegexGrammar("[a-z]{2,4}"))
    ends = []
    for byte in b"abcd":
        ends.append(EOS in matcher.allowed())
        done = matcher.take(byte)
    assert ends == [False, False, True, True]
    assert done
    assert matcher.allowed() == (EOS,)
    open_ended = compiler.compile(RegexGrammar("[a-z]+"))
    assert not follow(open_ended, "abc")
    assert open_ended.take(EOS)


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (RegexGrammar(r"\d{2}/\w+"), ["12/ab"], ["1/ab", "12/", "12ab"]),
        (RegexGrammar("^a|bb$"), ["a", "bb"], ["abb", "b"]),
        (RegexGrammar("é+\n"), ["éé\n"], ["é", "e\n"]),
        (ChoiceGrammar(("yes", 'a "b"\\\n', "日本")), ["yes", 'a "b"\\\n', "日本"], ["y", "no"]),
        (ChoiceGrammar(("a", "ab")), ["a", "ab"], ["b", "abb"]),
        (ContextFreeGrammar('root ::= "a" inner\ninner ::= [0-9]+ | "(" inner ")"\n'),
         ["a1", "a((12))"], ["a(1", "1"]),
        (ContextFreeGrammar('start: "a" rest\nrest: /[0-9]+/ | "(" rest ")"\n'),
         ["a1", "a((12))"], ["a(1", "1"]),
        (ContextFreeGrammar('%llguidance {"no_forcing": false}\nstart: "forced text"'),
         ["forced text"], ["forced"]),
    ],
)  # fmt: skip
def test_other_grammars_allow_their_texts_and_no_others(
    compiler: GrammarCompiler, grammar: Grammar, good: list[str], bad: list[str]
) -> None:
    """Regular expressions match as a whole; context-free ones are Lark's or GBNF."""
    assert [text for text in good if not accepts(compiler, grammar, text)] == []
    assert [text for text in bad if accepts(compiler, grammar, text)] == []


@pytest.mark.parametrize("grammar", [schema(const={"a": 1}), RegexGrammar("[a-z<>]{2,9}")])
def test_reasoning_is_free_and_the_grammar_begins_behind_it(
    compiler: GrammarCompiler, grammar: Grammar
) -> None:
    """Whether the prompt opened the block, the model does, or there is none."""
    answer = '{"a": 1}' if isinstance(grammar, JsonGrammar) else "ab"
    thought = 'Hm, {"x", </th ünd </ think>'
    assert accepts(compiler, grammar, answer, reasoning=CHOOSES)
    assert accepts(compiler, grammar, f"\n<think>{thought}</think>\n\n{answer}", reasoning=CHOOSES)
    assert accepts(compiler, grammar, f"{thought}</think>{answer}", reasoning=OPENED)
    assert not accepts(compiler, grammar, f"<think>{thought}</think>.{answer}", reasoning=CHOOSES)
    assert not accepts(compiler, grammar, f"\n{answer}", reasoning=CHOOSES)
    assert not accepts(compiler, grammar, f"<think>{thought}", reasoning=CHOOSES)
    assert not accepts(compiler, grammar, thought, reasoning=OPENED)


def test_no_token_leaks_over_the_end_of_the_reasoning(compiler: GrammarCompiler) -> None:
    """A token that closes the block may bring blank space along, and nothing else."""
    matcher = compiler.compile(schema(const=1), OPENED)
    follow(matcher, "so </think")
    allowed = {TOKENIZER.token_bytes(token) for token in matcher.allowed()}
    assert b">" in allowed
    assert b">." not in allowed
    assert b"</think>\n\n" in allowed
    assert b"</think>." not in allowed


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "nope"},
        {"type": 5},
        {"properties": 5},
        {"type": "object", "properties": {"a": {"type": "text"}}},
        {"required": "a"},
        {"items": {"minLength": -1}},
        {"$schema": "http://example.com/my-dialect"},
        {"$ref": "#/$defs/missing"},
        {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"a": {}}},
        {"type": "string", "x-guidance": {"lenient": True}, "contains": 3},
    ],
)
def test_what_is_no_schema_is_refused_by_name(
    compiler: GrammarCompiler, wanted: dict[str, Any]
) -> None:
    """The field that the client sent, and where in it."""
    with pytest.raises(InvalidRequest) as caught:
        compiler.compile(JsonGrammar(json.dumps(wanted), param="guided_json"))
    assert caught.value.param == "guided_json"
    assert caught.value.message.startswith("guided_json")


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (schema(type="array", uniqueItems=True), "uniqueItems"),
        (schema(**{"not": {"type": "string"}}), "not"),
        (schema(type="string", pattern="(?=a)b"), "look-around"),
        (schema(type="string", pattern="("), "unclosed"),
        (schema(enum=[]), "nsatisfiable"),
        (schema(type="integer", minimum=5, maximum=3), "nsatisfiable"),
        (schema(**{"$ref": "#"}), "no text"),
        (schema(**{"$ref": "http://example.com/x.json"}), "example.com"),
        (schema(type="string", contains={}, **{"x-guidance": {"lenient": True}}), "contains"),
        (JsonGrammar(ANY_OBJECT, whitespace_pattern="("), "unclosed"),
        (RegexGrammar("("), "unclosed"),
        (RegexGrammar("a\\"), "backslash"),
        (RegexGrammar(r"(a)\1"), "backreferences"),
        (ContextFreeGrammar("start: missing"), "missing"),
        (ContextFreeGrammar(f"start: {BRANCHES}"), "max is 2000"),
        (ContextFreeGrammar("!"), ""),
        (ContextFreeGrammar('start: <no_such_token> "a"'), ""),
    ],
)
def test_what_cannot_be_compiled_says_why_in_one_line(
    compiler: GrammarCompiler, grammar: Grammar, said: str
) -> None:
    """Nothing is loosened silently, whatever options a schema brings along."""
    with pytest.raises(CannotCompile) as caught:
        compiler.compile(grammar)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert 0 < len(str(caught.value)) <= 200


def test_a_limit_of_the_engine_names_the_field_and_a_wrong_token_does_not(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a token or a mask goes beyond it, and for each request its own field's name."""
    wide = ContextFreeGrammar(f'start: "ab" list\nlist: {BRANCHES}\n', "a")
    for grammar in (wide, replace(wide, param="b")):
        matcher = compiler.compile(grammar)
        matcher.take(ord("a"))
        with pytest.raises(MatchFailed, match="items; max is 2000") as caught:
            matcher.take(ord("b"))
        assert caught.value.param == grammar.param
        with pytest.raises(MatchFailed) as caught:
            matcher.allowed()
        assert caught.value.param == grammar.param
    with pytest.raises(MatchFailed) as caught:
        compiler.compile(wide).take(ord("y"))
    assert caught.value.param is None
    monkeypatch.setattr(matching, "MAX_ITEMS", 10)
    ambiguous = ContextFreeGrammar('start: a\na: a a | "x"\n', "c")
    matcher = GrammarCompiler(TOKENIZER, VOCAB).compile(ambiguous)
    with pytest.raises(MatchFailed, match="Too many items") as caught:
        collections.deque((matcher.allowed() and matcher.take(ord("x")) for _ in range(100)), 0)
    assert caught.value.param == "c"


@pytest.mark.parametrize("reasoning", [None, CHOOSES, OPENED])
def test_as_many_choices_as_may_be_sent_can_be_followed(
    compiler: GrammarCompiler, reasoning: Reasoning | None
) -> None:
    """Each to its end and no further; one that begins another one may go on."""
    many = ChoiceGrammar(("1", *(f"{n} é" for n in range(9_999))))
    thought = "" if reasoning is None else "<think>Hm</think>"
    thought = thought.removeprefix("<think>") if reasoning is OPENED else thought
    for text, fits in (("9998 é", True), ("1", True), ("1 é", True), ("9999 é", False)):
        assert accepts(compiler, many, thought + text, reasoning=reasoning) is fits


def test_large_schemas_compile_or_are_refused(compiler: GrammarCompiler) -> None:
    """Ten thousand values, five hundred properties, and a tree too wide to unfold."""
    compiler.compile(schema(enum=[f"v{i}" for i in range(10_000)]))
    compiler.compile(
        schema(type="object", properties={f"p{i}": {"type": "string"} for i in range(500)})
    )
    compiler.compile(schema(type="array", minItems=10**9))
    tree: dict[str, Any] = {"type": "string"}
    for level in range(30):
        wide = {"a": tree, "b": tree} if level < 14 else {"a": tree}
        tree = {"type": "object", "properties": wide}
    with pytest.raises(CannotCompile):
        compiler.compile(JsonGrammar(json.dumps(tree)))


@pytest.mark.parametrize(
    "keywords",
    [
        {"type": "string", "format": "password"},
        {"type": "array", "items": {"anyOf": [{"type": "string", "format": "file-path"}]}},
        {"type": "object", "properties": {"enum": {"type": "string", "format": "uuid4"}}},
    ],
)
def test_formats_that_the_standard_does_not_know_say_nothing(
    compiler: GrammarCompiler, keywords: dict[str, Any]
) -> None:
    """Libraries write them into every second schema, whose rest is to be enforced."""
    assert compiler.compile(schema(**keywords)).unenforced == ()


MIXED = schema(
    type="object",
    properties={
        "pattern": {"type": "string", "format": "regex", "maxLength": 2},
        "mail": {"anyOf": [{"type": "null"}, {"$ref": "#/x-parts/mail"}]},
        "paths": {"type": "array", "items": {"$ref": "#/$defs/path"}},
    },
    required=["pattern", "mail", "paths"],
    additionalProperties=False,
    **{
        "$defs": {"path": {"type": "string", "format": "relative-json-pointer"}},
        "x-parts": {"mail": {"type": "string", "format": "idn-email"}},
    },
)


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"pattern":"(","mail":"@","paths":["0","1/a#"]}', True),
        ('{"pattern":"(","mail":null,"paths":[]}', True),
        ('{"pattern":"(((","mail":null,"paths":[]}', False),
        ('{"pattern":"(","mail":5,"paths":[]}', False),
        ('{"pattern":"(","mail":null,"paths":["a"]}', False),
        ('{"pattern":"(","mail":null}', False),
    ],
)
def test_a_format_that_is_not_enforced_is_told_and_all_else_is_enforced(
    compiler: GrammarCompiler, text: str, fits: bool
) -> None:
    """Also of one where only a reference leads, and when the grammar was compiled before."""
    for _ in range(2):
        assert compiler.compile(MIXED).unenforced == ("idn-email", "regex")
    assert compiler.compile(MIXED).copy().unenforced == ("idn-email", "regex")
    assert accepts(compiler, MIXED, text) is fits


@pytest.mark.parametrize(
    ("name", "text", "fits"),
    [
        ("date", "2024-02-29", True),
        ("date", "2023-02-29", False),
        ("date-time", "2023-02-28T23:59:60Z", True),
        ("date-time", "2023-02-28T11:59:60Z", False),
        ("time", "11:59:59+01:00", True),
        ("time", "11:59:60+01:00", False),
    ],
)
def test_days_and_seconds_exist(
    compiler: GrammarCompiler, name: str, text: str, fits: bool
) -> None:
    """Who reads them refuses others, although the engine would write them."""
    assert accepts(compiler, schema(type="string", format=name), json.dumps(text)) is fits


@pytest.mark.parametrize("name", ["iri", "regex", "password"])
def test_what_is_called_format_and_is_none_stays(compiler: GrammarCompiler, name: str) -> None:
    """A property of this name, values that hold such a key, and what is an annotation."""
    value = {"format": name}
    named = schema(
        type="object",
        properties={
            "format": {"enum": [value], "default": value, "examples": [value]},
            "const": {"const": value},
            "default": {"type": "integer"},
        },
        required=["format", "const", "default"],
        **{"x-form": value},
    )
    written = json.dumps({"format": value, "const": value, "default": 1}, separators=(",", ":"))
    assert compiler.compile(named).unenforced == ()
    assert accepts(compiler, named, written)
    assert not accepts(compiler, named, written.replace(name, "x"))
    assert not accepts(compiler, named, written.replace("1", '"x"'))
    assert not accepts(compiler, schema(type="string", format="date"), '"x"')


NESTED = {"$id": "http://x/a", "$defs": {"b": {"type": "integer"}}, "$ref": "#/$defs/b"}


@pytest.mark.parametrize(
    ("wanted", "integers"),
    [
        ({"$defs": {"a": NESTED}, "$ref": "#/$defs/a"}, True),
        ({"$defs": {"a": NESTED}, "$ref": "http://x/a"}, True),
        ({"components": {"a": {"type": "integer"}}, "$ref": "#/components/a"}, True),
        ({"x-note": {"$ref": "#/nowhere"}, "type": "string"}, False),
        ({"const": {"$ref": "#/nowhere"}}, False),
    ],
)
def test_references_are_followed_from_where_they_stand(
    compiler: GrammarCompiler, wanted: dict[str, Any], integers: bool
) -> None:
    """From the nearest schema with an ``$id``; those in annotations and data are none."""
    assert accepts(compiler, schema(**wanted), "1") is integers


def test_an_object_of_two_thousand_properties_can_be_written(compiler: GrammarCompiler) -> None:
    """Any of them may come next, which the engine counts each time."""
    names = {f"k{number}": {"type": "integer"} for number in range(2000)}
    grammar = schema(type="object", properties=names, additionalProperties=False)
    assert accepts(compiler, grammar, '{"k3":1,"k1999":2}')
    assert not accepts(compiler, grammar, '{"k2000":1}')


def test_tokenizers_without_a_table_have_no_grammars() -> None:
    """Such a tokenizer says only what whole sequences spell."""
    tokenizer = ByteTokenizer()
    tokenizer.table = None
    with pytest.raises(CannotCompile, match="tokenizer"):
        GrammarCompiler(tokenizer, VOCAB).compile(schema(const=1))


def test_matchers_of_one_grammar_do_not_know_of_each_other(compiler: GrammarCompiler) -> None:
    """The second request with a schema gets a copy of what the first one had compiled."""
    first, second = compiler.compile(schema(const=12)), compiler.compile(schema(const=12))
    first.take(ord("1"))
    assert first.allowed() == (ord("2"),)
    assert second.allowed() == (ord("1"),)


def test_one_compiler_serves_several_threads() -> None:
    """Even the first grammars, which all need the tokenizer's tokens."""
    shared = GrammarCompiler(TOKENIZER, VOCAB)
    done: list[bool] = []
    threads = [
        threading.Thread(
            target=lambda n=n: done.append(accepts(shared, schema(const=n % 3), str(n % 3)))
        )
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [True] * 8


def test_an_end_token_counts_wherever_the_model_or_the_tokenizer_names_it() -> None:
    """And its own spelling, if it has one, is no text."""
    word = 259
    compiler = GrammarCompiler(ByteTokenizer(("end",)), VOCAB, frozenset({word, 5_000}))
    matcher = compiler.compile(RegexGrammar("(end)*"))
    assert [t for t in matcher.allowed() if t >= 256] == [EOS, word]
    assert matcher.take(word)


def test_masks_hold_what_each_matcher_allows_and_all_for_rows_without() -> None:
    """Several matchers are asked at once; logits that stand for no token are never drawn."""
    shared = _shared()
    logits = VOCAB + 100
    maker = MaskMaker(logits)
    rows = [None, shared.compile(schema(const=True)), None, shared.compile(RegexGrammar("[ab]"))]
    masks = maker.begin(lambda: rows).result()
    maker.close()
    bits = np.unpackbits(masks.words.view(np.uint8), axis=1, bitorder="little")[:, :logits]
    allowed = [set(np.flatnonzero(row).tolist()) for row in bits]
    assert masks.faults == {}
    assert allowed[0] == allowed[2] == set(range(logits))
    assert allowed[1] == {ord("t"), 259}
    assert allowed[3] == set(b"ab")


def test_a_matcher_that_gave_up_is_reported_and_masks_nothing() -> None:
    """The others' masks are what they are without it."""
    shared = _shared()
    broken, whole = shared.compile(schema(const=1)), shared.compile(schema(const=1))
    with pytest.raises(MatchFailed):
        broken.take(ord("x"))
    maker = MaskMaker(VOCAB)
    masks = maker.begin(lambda: [broken, whole]).result()
    maker.close()
    assert list(masks.faults) == [0]
    assert masks.faults[0]
    assert (masks.words[0] == 0xFFFFFFFF).all()
    assert masks.words[1].sum() == 1 << (ord("1") % 32)


@pytest.mark.parametrize(
    ("grammar", "holds"),
    [
        (JsonGrammar(ANY_OBJECT), "JSON object"),
        (schema(const=1), '{"const": 1}'),
        (RegexGrammar("a+"), "a+"),
        (ChoiceGrammar(("é", "b")), '"é"\n"b"'),
        (ContextFreeGrammar("start: x"), "start: x"),
    ],
)
def test_a_grammar_can_be_asked_for_in_words(grammar: Grammar, holds: str) -> None:
    """For models whose answer cannot be restricted to it."""
    assert holds in in_words(grammar)
