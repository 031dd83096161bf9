"""The text a client sees does not depend on how the engine cut it."""

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.upstream.triton.text import CumulativeText, StopTrimmer, TextChangedError


@st.composite
def cut_text(draw: st.DrawFn, text: st.SearchStrategy[str]) -> tuple[str, list[str]]:
    whole = draw(text)
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    return whole, [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


def first_match(text: str, stops: tuple[str, ...]) -> int:
    """Where the stop string that is complete first begins, found the slow way; the text's length if there is none."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts)
    return len(text)


few_letters = st.text("ab<", max_size=30)
stop_strings = st.lists(st.text("ab<", min_size=1, max_size=5), max_size=4).map(tuple)


@given(cut_text(few_letters), stop_strings)
def test_the_text_ends_at_the_first_stop_string_however_it_is_cut(
    cut: tuple[str, list[str]], stops: tuple[str, ...]
) -> None:
    text, pieces = cut
    trimmer = StopTrimmer(stops)
    seen = "".join(trimmer.feed(piece) for piece in pieces) + trimmer.end()
    at = first_match(text, stops)
    assert seen == text[:at]
    assert trimmer.stopped == (at < len(text))


@given(cut_text(few_letters), stop_strings)
def test_only_what_may_begin_a_stop_string_is_held_back(cut: tuple[str, list[str]], stops: tuple[str, ...]) -> None:
    _, pieces = cut
    trimmer = StopTrimmer(stops)
    fed = seen = ""
    for piece in pieces:
        fed += piece
        seen += trimmer.feed(piece)
        held = fed[len(seen) :]
        assert trimmer.stopped or not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_a_long_text_full_of_beginnings_is_trimmed_in_linear_time() -> None:
    trimmer = StopTrimmer(("<|im_end|>",))
    text = "<|im_" * 400_000
    assert trimmer.feed(text) + trimmer.end() == text


@given(st.text(max_size=40), st.data())
def test_cumulative_text_yields_every_byte_once(text: str, data: st.DataObject) -> None:
    encoded = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(encoded)), max_size=8)))
    cumulative = CumulativeText()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    seen = "".join(decoder.decode(cumulative.feed(encoded[:cut])) for cut in [*cuts, len(encoded)])
    assert seen + decoder.decode(cumulative.end(), final=True) == text


@given(st.text(max_size=40), st.data())
def test_cumulative_text_with_replaced_halves_of_characters_yields_the_text(text: str, data: st.DataObject) -> None:
    encoded = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(encoded)), max_size=8)))
    cumulative = CumulativeText()
    shown = [encoded[:cut].decode("utf-8", "replace").encode() for cut in [*cuts, len(encoded)]]
    assert b"".join(cumulative.feed(each) for each in shown) + cumulative.end() == encoded


def test_text_that_was_taken_back_is_noticed() -> None:
    cumulative = CumulativeText()
    assert cumulative.feed(b"one two") == b"one two"
    assert cumulative.feed(b"") == b""
    with pytest.raises(TextChangedError):
        cumulative.feed(b"one too many")
