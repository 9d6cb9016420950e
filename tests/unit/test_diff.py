"""The text diff is exact to the character: replaying its hunks must give the other text."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from outpace.lab.diff import TextDiff, diff_texts, side_by_side, unified, visible

TEXT = st.text(alphabet="ab \n\té.", max_size=30)
PAIRS = st.one_of(st.tuples(TEXT, TEXT), TEXT.map(lambda t: (t, t)), TEXT.map(lambda t: (t + " ", t)))


def check(diff: TextDiff, a: str, b: str) -> None:
    """All that a diff of a and b promises."""
    rebuilt, position = "", 0
    for hunk in diff.hunks:
        assert hunk.a_text == a[hunk.a_start : hunk.a_end] and hunk.b_text == b[hunk.b_start : hunk.b_end]
        assert hunk.a_text[:1] != hunk.b_text[:1]
        rebuilt += a[position : hunk.a_start] + hunk.b_text
        position = hunk.a_end
    assert rebuilt + a[position:] == b
    assert diff.equal == (a == b)
    both = [i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y]
    assert diff.first == (None if a == b else both[0] if both else min(len(a), len(b)))


@settings(max_examples=300)
@given(PAIRS)
def test_hunks_replay(pair: tuple[str, str]) -> None:
    check(diff_texts(*pair), *pair)


FAULTY: list[Callable[[str, str], TextDiff]] = [
    lambda a, b: diff_texts(a.strip(), b.strip()),
    lambda a, b: diff_texts(" ".join(a.split()), " ".join(b.split())),
    lambda a, b: TextDiff(a, b, diff_texts(a, b).hunks[:-1]),
]


@pytest.mark.parametrize("faulty", FAULTY)
def test_the_check_catches_a_diff_that_is_not_exact(faulty: Callable[[str, str], TextDiff]) -> None:
    with pytest.raises(AssertionError):
        check(faulty("one  two\n", "one two"), "one  two\n", "one two")


def test_place_and_continuations() -> None:
    diff = diff_texts("first\nsecond line\n", "first\nsecond\u00a0line\n")
    assert (diff.first, diff.line_and_column) == (12, (2, 7))
    assert diff.continuations(6) == (" line␊", "<U+00A0>line␊")
    assert diff_texts("same", "same").continuations() == ("", "")


def test_visible() -> None:
    assert visible("a\x00\x1b\x7f\u200b\u202eé\t") == "a␀␛␡<U+200B><U+202E>é␉"
    assert visible("a\nb", keep="\n") == "a\nb"


def test_unified() -> None:
    assert unified(diff_texts("same", "same")) == ""
    shown = unified(diff_texts("a\nb\nc", "a\nx\r\nc"), "left", "right").splitlines()
    assert shown[0] == "first difference at character 2 (line 2, column 1)"
    assert shown[1:3] == ["--- left", "+++ right"] and {"-b", "+x␍", " a"} <= set(shown)


def render(diff: TextDiff, color: bool = False) -> str:
    out = StringIO()
    Console(file=out, width=60, force_terminal=color, color_system="standard" if color else None).print(
        side_by_side(diff)
    )
    return out.getvalue()


def test_side_by_side_aligns_equal_lines() -> None:
    lines = render(diff_texts("one\ntwo\nthree", "one\nthree")).splitlines()
    assert any("plain" in line and "speculative" in line for line in lines)
    rows = [line.split() for line in lines]
    assert ["one", "one"] in rows and ["two"] in rows and ["three", "three"] in rows


def test_side_by_side_marks_without_colour_alone() -> None:
    marked = render(diff_texts("a word here", "a ward here"), color=True)
    assert "\x1b[4;7mo\x1b[0m" in marked and "\x1b[4;7ma\x1b[0m" in marked
    assert "\x1b[4;7m" not in render(diff_texts("a word", "a word"), color=True)


def test_a_very_long_text_is_one_hunk() -> None:
    a, b = "x y " * 5000, "y x " * 5000
    diff = diff_texts(a, b)
    check(diff, a, b)
    assert len(diff.hunks) == 1
