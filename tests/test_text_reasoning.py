"""Reasoning is split from the answer by the same rule for every cut of the text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_troupe.runtime.requests import Channel
from mlx_troupe.runtime.text.reasoning import ReasoningSplitter

MARKERS = ("<think>", "</think>")
BLANK = " \t\r\n"
# Of a larger collection of outputs: those of models that mark reasoning by these two tags and that
# were offered no tools. (text, opened by the prompt, reasoning, content), blank space stripped.
TRANSCRIPTS = [
    ("<think>\n\n</think>\n\nFour.", False, "", "Four."),
    ("Two and two.\n</think>\n\nFour.", True, "Two and two.", "Four."),
    ("<think>\nTwo and two.\n</think>\n\nFour.", True, "Two and two.", "Four."),
    ("<think>   \n </think>Four.", False, "", "Four."),
    ("BEGIN `<think>` AFTER END", False, "", "BEGIN `<think>` AFTER END"),
    ("<think>\nThe tag <think> opens.\n</think>\nYes.", False, "The tag <think> opens.", "Yes."),
    ("<think>\nFirst I count the", False, "First I count the", ""),
    ("First I count the", True, "First I count the", ""),
    ("<think>\nFour.", False, "Four.", ""),
    ("Two.\n</think>\n\nFour.", False, "", "Two.\n</think>\n\nFour."),
    ("Two and two.</think>Four.", True, "Two and two.", "Four."),
    ("\n<think></think>\nFour.", False, "", "Four."),
    ("<think>\na < b\n</think>\n1 < 2 </ 3 <", False, "a < b", "1 < 2 </ 3 <"),
    ("<think>\nfirst\n</think>\nA\n<think>\nB", False, "first", "A\n<think>\nB"),
    ("<think>\na\n</think>\n</think>\nB", False, "a", "</think>\nB"),
    ("Two and", True, "Two and", ""),
    ("<thi", False, "", "<thi"),
    ("<think>a</thi", False, "a</thi", ""),
]


def split(pieces: list[str], *, opened: bool) -> tuple[str, str]:
    """(reasoning, content) of text that arrives in pieces."""
    splitter = ReasoningSplitter(MARKERS, opens_reasoning=opened)
    deltas = [delta for piece in pieces for delta in splitter.feed(piece)]
    deltas += splitter.finish()
    assert all(delta.text for delta in deltas)
    channels = [delta.channel for delta in deltas]
    assert channels == sorted(channels, key=lambda channel: channel is Channel.CONTENT)
    reasoning = "".join(d.text for d in deltas if d.channel is Channel.REASONING)
    content = "".join(d.text for d in deltas if d.channel is Channel.CONTENT)
    if content:
        assert splitter.content_start == len("".join(pieces)) - len(content)
    return reasoning, content


def cuts(text: str) -> list[list[str]]:
    """Whole, character by character, and cut in two at every place."""
    return [[text], list(text), *([text[:i], text[i:]] for i in range(len(text)))]


@pytest.mark.parametrize(("text", "opened", "reasoning", "content"), TRANSCRIPTS)
def test_every_cut_of_a_transcript_gives_the_expected_split(
    text: str, opened: bool, reasoning: str, content: str
) -> None:
    """Outputs as thinking models write them, broken ones among them."""
    for pieces in cuts(text):
        found = split(pieces, opened=opened)
        assert (found[0].strip(), found[1].strip()) == (reasoning, content)


@given(
    st.lists(st.sampled_from([*MARKERS, "<", "</", "think>", "a", " ", "\n"]), max_size=12),
    st.booleans(),
    st.data(),
)
def test_the_split_does_not_depend_on_the_cut(
    parts: list[str], opened: bool, data: st.DataObject
) -> None:
    """Any text cut anywhere gives what the whole text gives, and loses only markers and blanks."""
    text = "".join(parts)
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=5).map(sorted))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    assert split(pieces, opened=opened) == oracle(text, opened=opened)


def oracle(text: str, *, opened: bool) -> tuple[str, str]:
    """The rule, read off the whole text at once."""
    body = text.lstrip(BLANK)
    if body.startswith("<think>"):
        body = body.removeprefix("<think>")
    elif not opened:
        return "", text
    reasoning, closed, content = body.partition("</think>")
    return reasoning.strip(BLANK), content.lstrip(BLANK) if closed else ""


def test_plain_text_is_passed_on_at_once() -> None:
    """Nothing is held back in content or in reasoning that cannot be a marker."""
    splitter = ReasoningSplitter(MARKERS)
    assert [d.text for d in splitter.feed("Hi")] == ["Hi"]
    assert [d.text for d in splitter.feed(" <think>")] == [" <think>"]
    splitter = ReasoningSplitter(MARKERS, opens_reasoning=True)
    assert [d.text for d in splitter.feed("a <b")] == ["a <b"]
    assert [d.text for d in splitter.feed(" </th")] == []
    assert [d.text for d in splitter.feed("x")] == [" </thx"]


def test_a_model_without_markers_gives_content_only() -> None:
    """The tags of other models mean nothing to it."""
    splitter = ReasoningSplitter(None, opens_reasoning=True)
    deltas = splitter.feed("<think>a</think>b")
    assert [(d.channel, d.text) for d in deltas] == [(Channel.CONTENT, "<think>a</think>b")]
    assert splitter.finish() == ()
