"""Stop strings against a brute-force reading of the rule."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlx_troupe.runtime.text.stops import StopMatcher

STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4).map(tuple)


def run(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, bool]:
    """All text that comes out, and whether it was stopped."""
    matcher = StopMatcher(stops)
    out = "".join(matcher.feed(piece)[0] for piece in pieces)
    return out + matcher.flush(), matcher.stopped


def oracle(stops: tuple[str, ...], text: str) -> tuple[str, bool]:
    """Grow the text by a character at a time and search all of it."""
    for end in range(len(text) + 1):
        places = [place for stop in stops if (place := text.find(stop, 0, end)) >= 0]
        if places:
            return text[: min(places)], True
    return text, False


@given(STOPS, st.lists(st.text("abc", max_size=6), max_size=12))
def test_the_cut_is_where_a_search_of_the_whole_text_finds_it(
    stops: tuple[str, ...], pieces: list[str]
) -> None:
    """Any stops, any text, any pieces: as the brute-force search says."""
    assert run(stops, pieces) == oracle(stops, "".join(pieces))


@given(STOPS, st.lists(st.text("ab", max_size=4), max_size=8))
def test_exactly_what_may_become_a_stop_string_is_held_back(
    stops: tuple[str, ...], pieces: list[str]
) -> None:
    """What is withheld is the longest end of the text that begins a stop string."""
    matcher, shown, fed = StopMatcher(stops), "", ""
    for piece in pieces:
        fed += piece
        safe, stopped = matcher.feed(piece)
        shown += safe
        if stopped:
            return
        held = (len(fed) - i for i in range(len(fed)) if any(s.startswith(fed[i:]) for s in stops))
        assert len(fed) - len(shown) == next(held, 0)


def test_the_earliest_match_wins_and_not_the_first_in_the_list() -> None:
    """Three stops in the wrong order: the text ends before the one that comes first."""
    assert run(("delta", "gamma", "beta"), ["alpha beta gamma delta"]) == ("alpha ", True)


def test_a_stop_string_over_several_pieces_never_shows() -> None:
    """Its beginning is withheld until it is complete."""
    matcher = StopMatcher(("beta gamma",))
    assert [matcher.feed(piece) for piece in ("alpha be", "ta ga", "mma delta")] == [
        ("alpha ", False),
        ("", False),
        ("", True),
    ]
    assert matcher.found == "beta gamma"
    assert matcher.feed("more") == ("", True)
    assert matcher.flush() == ""


def test_held_text_comes_out_when_the_match_fails_or_the_answer_ends() -> None:
    """Nothing is lost: at once after a mismatch, else by the flush."""
    matcher = StopMatcher(("DEFGHIJ",))
    assert matcher.feed("ABCDEF") == ("ABC", False)
    assert matcher.feed("x DE") == ("DEFx ", False)
    assert matcher.flush() == "DE"


def test_an_empty_stop_string_stops_nothing() -> None:
    """It would match everywhere; the edge refuses it, the matcher ignores it."""
    assert run(("",), ["abc"]) == ("abc", False)


def test_the_work_is_linear_in_the_text() -> None:
    """A stop string that nearly matches everywhere costs at most two steps a character."""
    matcher = StopMatcher(("a" * 2000 + "b",))
    steps = 0
    walk = matcher._next

    class Counting(dict[str, int]):
        def get(self, key: str, default: int | None = None) -> int | None:  # type: ignore[override]
            nonlocal steps
            steps += 1
            return super().get(key, default)

    matcher._next = [Counting(state) for state in walk]
    text = ("a" * 1999 + "c") * 20
    out = "".join(matcher.feed(character)[0] for character in text)
    assert out + matcher.flush() == text
    assert steps <= 2 * len(text) + 1
