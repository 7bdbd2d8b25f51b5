"""Stop strings are found wherever the text is cut, and only final text comes out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.text.stop_strings import StopStrings


def run(stops: list[str], text_pieces: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    """What each piece let out; the last entry is the flush if no stop string came."""
    matcher = StopStrings(stops, include=include)
    out = []
    for piece in text_pieces:
        text, stop = matcher.push(piece)
        out.append(text)
        if stop is not None:
            return out, stop
    return [*out, matcher.flush()], None


def test_a_stop_string_inside_a_piece_ends_the_text_before_it():
    assert run(["."], ["One. Two."]) == (["One"], ".")


def test_a_stop_string_split_over_pieces_is_found():
    assert run(["\n\nUser:"], ["Hi\n", "\nUs", "er", ": x"]) == (["Hi", "", "", ""], "\n\nUser:")


def test_text_that_only_began_a_stop_string_comes_out_when_that_is_clear():
    assert run(["abc"], ["xa", "b", "d"]) == (["x", "", "abd", ""], None)
    assert run(["aab"], ["aaa", "c"]) == (["a", "aac", ""], None)


def test_held_text_comes_out_at_the_end():
    assert run(["###"], ["done ##"]) == (["done ", "##"], None)


def test_the_stop_string_complete_first_wins():
    assert run(["abcd", "b"], ["abcd"]) == (["a"], "b")
    assert run(["ab", "abc"], ["xabc"]) == (["x"], "ab")


def test_of_those_complete_at_the_same_character_the_longest_wins():
    assert run(["bc", "abc", "c"], ["xabc"]) == (["x"], "abc")


def test_the_stop_string_can_be_part_of_the_text():
    assert run(["</answer>"], ["42</ans", "wer>!"], include=True) == (["42", "</answer>"], "</answer>")


def test_no_stop_strings_hold_nothing_back():
    assert run([], ["any ", "text"]) == (["any ", "text", ""], None)


@pytest.mark.parametrize("stops", [[""], ["a", ""]])
def test_an_empty_stop_string_is_refused(stops):
    with pytest.raises(ValueError, match=r"^stops: expected non-empty strings"):
        StopStrings(stops)


def test_a_lone_string_is_no_list_of_stop_strings():
    with pytest.raises(ValueError, match=r"^stops: expected a list of strings, got the string 'END'"):
        StopStrings("END")


def by_definition(stops: list[str], text: str, include: bool) -> tuple[str, str | None]:
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=1000, deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    text_pieces=st.lists(st.text("abc", max_size=4), max_size=8),
    include=st.booleans(),
)
def test_the_result_is_that_of_the_definition_whatever_the_pieces(stops, text_pieces, include):
    out, stop = run(stops, text_pieces, include=include)
    assert ("".join(out), stop) == by_definition(stops, "".join(text_pieces), include)


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    text=st.text("abc", max_size=20),
)
def test_no_more_is_held_back_than_could_become_a_stop_string(stops, text):
    matcher = StopStrings(stops)
    out = ""
    for i, character in enumerate(text):
        piece, stop = matcher.push(character)
        out += piece
        if stop is not None:
            return
        held = text[len(out) : i + 1]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_after_a_stop_nothing_is_left():
    matcher = StopStrings(["##", "#!"])
    assert matcher.push("a#") == ("a", None)
    assert matcher.push("#") == ("", "##")
    assert matcher.flush() == ""
