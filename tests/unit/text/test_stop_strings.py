"""Stop strings are found however the text is cut, and nothing is given out that may still become one."""

from hypothesis import given
from hypothesis import strategies as st

from pagoda_common.text.stop_strings import StopStrings


def run(stop_strings: list[str], pieces: list[str], *, include: bool = False) -> tuple[str, str | None]:
    stops = StopStrings(stop_strings, include_in_output=include)
    given_out = ""
    for piece in pieces:
        result = stops.append(piece)
        given_out += result.text
        if result.stop_string is not None:
            return given_out, result.stop_string
    return given_out + stops.flush(), None


def test_a_stop_string_is_cut_away() -> None:
    assert run(["\n\n"], ["one\n", "\ntwo"]) == ("one", "\n\n")


def test_a_stop_string_may_be_kept() -> None:
    assert run(["END"], ["one E", "N", "D two"], include=True) == ("one END", "END")


def test_a_possible_beginning_is_held_back() -> None:
    stops = StopStrings(["<|end|>"])
    assert stops.append("hello <|en").text == "hello "
    assert stops.append("terprise").text == "<|enterprise"


def test_what_was_held_back_comes_at_the_end() -> None:
    assert run(["stop"], ["do not sto"]) == ("do not sto", None)


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert run(["long stop", "on"], ["a long stop"]) == ("a l", "on")
    assert run(["STOP", "TOP"], ["a STOP"]) == ("a ", "STOP")


def test_a_beginning_within_a_beginning_is_found() -> None:
    assert run(["aab"], ["aa", "ab"]) == ("a", "aab")
    assert run(["ababc"], ["abab", "abc"]) == ("ab", "ababc")


@given(
    text=st.text(alphabet="abc", max_size=30),
    stop_strings=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 4), max_size=30),
    include=st.booleans(),
)
def test_cutting_makes_no_difference(text: str, stop_strings: list[str], cuts: list[int], include: bool) -> None:
    pieces, start = [], 0
    for size in cuts:
        pieces.append(text[start : start + size])
        start += size
    whole = run(stop_strings, list(text), include=include)
    assert run(stop_strings, [*pieces, text[start:]], include=include) == whole
    assert run(stop_strings, [text], include=include) == whole
    ends = [(text.find(s) + len(s), place, s) for place, s in enumerate(stop_strings) if s in text]
    if ends:
        end, _, stop_string = min(ends)
        assert whole == (text[:end] if include else text[: end - len(stop_string)], stop_string)
    else:
        assert whole == (text, None)
