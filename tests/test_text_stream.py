"""From ids to deltas: characters, reasoning and stop strings together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlx_troupe.runtime.requests import Channel, TextDelta
from mlx_troupe.runtime.text.provenance import Provenance
from mlx_troupe.runtime.text.stream import TextStream
from mlx_troupe.runtime.text.testing import END_THINK, EOS, THINK, ByteTokenizer

WORDS = (" beta", "ta ga", "mma", "5", "</thi", "nk>")
TOKENIZER = ByteTokenizer(WORDS, thinks=True)
BETA = 259


def run(
    ids: list[int], *, stop: tuple[str, ...] = (), opened: bool = False, thinks: bool = True
) -> tuple[TextStream, str, str]:
    """The stream after all ids, its reasoning and its content."""
    stream = TextStream(
        TOKENIZER,
        stop=stop,
        markers=TOKENIZER.think_markers if thinks else None,
        opens_reasoning=opened,
        eos_ids=TOKENIZER.eos_ids,
    )
    deltas: list[TextDelta] = []
    for token_id in ids:
        new = stream.feed(token_id)
        assert len({delta.channel for delta in new}) == len(new)
        deltas += new
    deltas += stream.finish()
    assert all(delta.text for delta in deltas)
    parts = dict.fromkeys(Channel, "")
    for delta in deltas:
        parts[delta.channel] += delta.text
    assert parts[Channel.CONTENT] == stream.content_text
    return stream, parts[Channel.REASONING], parts[Channel.CONTENT]


def test_a_stop_string_in_the_reasoning_does_not_end_the_answer() -> None:
    """Stop strings are about what the reader sees."""
    ids = [THINK, *b"1 2 5", END_THINK, *b"\n\n3 4 5 6"]
    stream, reasoning, content = run(ids, stop=("5",))
    assert (reasoning, content, stream.stopped) == ("1 2 5", "3 4 ", True)
    assert stream.stop_found == "5"


def test_nothing_comes_out_after_a_stop_string() -> None:
    """Later ids are silent, and are not part of the answer's ids."""
    stream, _, content = run([*b"ab.cd", EOS], stop=(".",))
    assert content == "ab"
    assert stream.feed(ord("x")) == ()
    assert stream.content_ids == (*b"ab",)


def test_an_answer_stopped_between_two_ids_keeps_the_ids_of_its_text() -> None:
    """The stop string's own ids are left out, if the cut does not go through an id."""
    stream, _, content = run([*b"alpha", BETA, *b" gamma"], stop=(" gamma",))
    assert (content, stream.stopped) == ("alpha beta", True)
    cut, _, content = run([*b"alpha", BETA], stop=("eta",))
    assert (content, cut.content_ids) == ("alpha b", ())


def test_held_text_comes_out_at_the_end_of_the_answer() -> None:
    """What might have begun a stop string or a marker is shown when it did not."""
    assert run([*b"alpha be"], stop=("beta",))[2] == "alpha be"
    assert run([*b"<thi"])[2] == "<thi"
    assert run([THINK, *b"a</th"])[1:] == ("a</th", "")


def test_the_answers_ids_leave_out_reasoning_and_end_tokens() -> None:
    """Only ids that spell exactly the content are handed on."""
    stream, reasoning, content = run([THINK, *b"\nhm\n", END_THINK, *b"\n\nFour", BETA, EOS])
    assert (reasoning, content) == ("hm", "Four beta")
    assert stream.content_ids == (*b"Four", BETA)


def test_a_first_id_may_bring_the_blank_space_that_the_splitter_drops() -> None:
    """As tokens that begin with a blank do after the end of the reasoning."""
    stream, _, content = run([THINK, *b"hm", END_THINK, *b"\n", BETA, EOS])
    assert (content, stream.content_ids) == ("beta", (BETA,))


def test_a_block_that_the_prompt_opened_and_the_limit_cut_is_reasoning() -> None:
    """Nothing of it is content, and it has no ids to reuse."""
    stream, reasoning, content = run([*b"First I count"], opened=True)
    assert (reasoning, content, stream.content_ids) == ("First I count", "", ())


def test_a_cut_character_is_one_replacement_mark_and_keeps_its_ids() -> None:
    """The client sends the mark back; the ids behind it are those that the model knows."""
    ids = [*"é😀".encode()[:4]]
    stream, _, content = run(ids)
    assert content == "é\ufffd"
    assert stream.content_ids == tuple(ids)


@given(
    st.lists(st.sampled_from([*b"abt \n", THINK, END_THINK, EOS, *range(259, 265), 0xF0, 0x9F])),
    st.sampled_from([(), ("ta",), ("b", "tab"), ("\n",)]),
    st.booleans(),
)
def test_content_ids_always_spell_the_content(
    ids: list[int], stop: tuple[str, ...], opened: bool
) -> None:
    """Whatever is generated: the ids are a run of the generated ones with exactly that text."""
    stream, _, content = run(ids, stop=stop, opened=opened)
    found = list(stream.content_ids)
    if found:
        assert TOKENIZER.decode(found).endswith(content)
        assert not TOKENIZER.decode(found).removesuffix(content).strip()
        kept = [i for i in ids if i != EOS]
        assert any(kept[i : i + len(found)] == found for i in range(len(kept)))
    if content and not stop and not content.isspace() and thinks_nothing(ids, opened):
        assert found


def thinks_nothing(ids: list[int], opened: bool) -> bool:
    """Whether all of the output is content."""
    return not opened and not {THINK, END_THINK} & set(ids)


def test_provenance_forgets_what_was_used_longest_ago() -> None:
    """Bounded by entries and by characters; recalling counts as use."""
    memory = Provenance(max_entries=2, max_chars=6)
    memory.remember("aa", (1,))
    memory.remember("bb", (2,))
    assert memory.recall("aa") == (1,)
    memory.remember("cc", (3,))
    assert (memory.recall("bb"), len(memory)) == (None, 2)
    memory.remember("ddddd", (4,))
    assert (memory.recall("aa"), memory.recall("cc"), memory.recall("ddddd")) == (None, None, (4,))
    memory.remember("more than six", (5,))
    memory.remember("", (6,))
    memory.remember("no ids", ())
    assert len(memory) == 1


def test_provenance_keeps_the_latest_ids_of_a_text() -> None:
    """The same words generated again are known by their new ids, and counted once."""
    memory = Provenance(max_chars=4)
    memory.remember("aa", (1,))
    memory.remember("aa", (2, 3))
    memory.remember("bb", (4,))
    assert (memory.recall("aa"), memory.recall("bb")) == ((2, 3), (4,))
