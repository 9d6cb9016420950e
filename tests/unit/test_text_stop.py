"""Streaming text: whole characters only, and stop strings found wherever they lie, never shown in part."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, find, given
from hypothesis import strategies as st

from outpace.text.detokenizer import Detokenizer
from outpace.text.stop import TextStream

PIECES = st.lists(st.binary(min_size=1, max_size=3), max_size=12)


def detokenizer(pieces: Sequence[bytes]) -> Detokenizer:
    """Token i stands for pieces[i]."""
    return Detokenizer(lambda token: pieces[token])


@given(PIECES)
def test_pieces_join_to_the_text_of_all_bytes(pieces: list[bytes]) -> None:
    stream = detokenizer(pieces)
    shown = [stream.push(i) for i in range(len(pieces))] + [stream.finish()]
    assert "".join(shown) == b"".join(pieces).decode("utf-8", "replace")


@given(st.text(max_size=8), st.data())
def test_no_piece_ends_in_half_a_character(text: str, data: st.DataObject) -> None:
    raw = text.encode("utf-8", "replace")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    stream, fed = detokenizer(pieces), b""
    for i, piece in enumerate(pieces):
        before, fed = fed, fed + piece
        assert stream.push(i) == whole(fed).removeprefix(whole(before))
    assert stream.finish() == ""


def whole(raw: bytes) -> str:
    """The finished characters at the start of valid UTF-8."""
    return raw.decode("utf-8", "ignore")


def test_planted_decoding_of_single_tokens_is_caught() -> None:
    def joins(pieces: list[bytes]) -> bool:
        alone = [piece.decode("utf-8", "replace") for piece in pieces]
        return "".join(alone) == b"".join(pieces).decode("utf-8", "replace")

    assert joins([b"a", "é".encode()])
    find(PIECES, lambda pieces: not joins(pieces))  # raises NoSuchExample if the property above could not see it


def test_an_unfinished_character_is_shown_at_the_end_only() -> None:
    stream = detokenizer(["€".encode()[:2], b"!"])
    assert stream.push(0) == ""
    assert stream.finish() == "\ufffd"
    assert stream.push(1) == "!"


def naive(text: str, stops: Sequence[str], active_from: int = 0) -> tuple[str, bool]:
    """Character by character: the text ends before the stop string that is complete first, the longest of those."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending and end > active_from:
            return text[: end - max(map(len, ending))], True
    return text, False


def split(text: str, sizes: Sequence[int]) -> list[bytes]:
    """The text in pieces of these numbers of bytes, then the rest."""
    raw, pieces = text.encode(), []
    for size in sizes:
        pieces.append(raw[:size])
        raw = raw[size:]
    return [*pieces, raw]


def streamed(pieces: list[bytes], stops: Sequence[str], inactive: int = 0) -> tuple[list[str], bool]:
    """What is shown piece by piece, then the rest; the first `inactive` pieces may not stop."""
    stream, shown = TextStream(detokenizer(pieces), stops), []
    for i in range(len(pieces)):
        more, stopped = stream.push(i, i >= inactive)
        shown.append(more)
        if stopped:
            return shown, True
    return [*shown, stream.finish()], False


LETTERS = st.text("abé€", max_size=24)
SIZES = st.lists(st.integers(0, 4), max_size=12)
STOPS = st.lists(st.text("abé€", min_size=1, max_size=4), max_size=3)


@given(LETTERS, SIZES, STOPS, st.integers(0, 6))
@example("xabc", [1, 1, 1], ["abc"], 3)
@example("abab", [1, 1, 1], ["ab", "abab"], 2)
@example("é€é", [1, 1, 2, 2], ["€é"], 0)
def test_streaming_equals_looking_at_every_character(
    text: str, sizes: list[int], stops: list[str], inactive: int
) -> None:
    pieces = split(text, sizes)
    shown, stopped = streamed(pieces, stops, inactive)
    early = len(whole(b"".join(pieces[:inactive])))
    assert ("".join(shown), stopped) == naive(text, stops, early)


@given(LETTERS, SIZES, SIZES, STOPS)
def test_pieces_make_no_difference(text: str, sizes: list[int], others: list[int], stops: list[str]) -> None:
    (a, stopped_a), (b, stopped_b) = (streamed(split(text, cut), stops) for cut in (sizes, others))
    assert ("".join(a), stopped_a) == ("".join(b), stopped_b)


@given(LETTERS, SIZES, STOPS)
def test_what_is_shown_is_final_and_nothing_is_held_without_need(text: str, sizes: list[int], stops: list[str]) -> None:
    """After each piece, what is held back is the beginning of some stop string; `finish` gives it back."""
    final, _ = naive(text, stops)
    pieces = split(text, sizes)
    stream = TextStream(detokenizer(pieces), stops)
    shown, fed = "", b""
    for i, piece in enumerate(pieces):
        more, stopped = stream.push(i, True)
        shown, fed = shown + more, fed + piece
        assert final.startswith(shown)
        if stopped:
            assert shown == final
            return
        held = whole(fed).removeprefix(shown)
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
    assert shown + stream.finish() == final == text


def test_finish_gives_back_what_was_held_and_half_a_character() -> None:
    assert streamed([b"xEN", "€".encode()[:2]], ["END"]) == (["x", "", "EN\ufffd"], False)


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        ("xabcd", ["abcd", "bc"], "xa"),  # complete first
        ("xabc", ["bc", "abc"], "x"),  # complete together: the longest
        ("aaab", ["aab"], "a"),  # a false start inside a beginning
        ("ababac", ["abac"], "ab"),
        ("x\n\nUser:", ["\n\n", "\n\nUser:"], "x"),
    ],
)
def test_overlapping_stop_strings(text: str, stops: list[str], shown: str) -> None:
    for sizes in ([1] * len(text), [len(text)], [2] * len(text)):
        pieces, stopped = streamed(split(text, sizes), stops)
        assert ("".join(pieces), stopped) == (shown, True)


def test_a_stop_string_before_it_may_stop_is_text() -> None:
    """min_tokens: what was completed too early never counts, not even together with later characters."""
    assert streamed([b"a", b"b", b"a", b"b"], ["ab"], inactive=2) == (["", "ab", "", ""], True)
    assert streamed([b"a", b"b", b"-"], ["ab"], inactive=2) == (["", "ab", "-", ""], False)
    assert streamed([b"a", b"b", b"-"], ["ab", "longer"], inactive=2) == (["", "ab", "-", ""], False)


def test_a_stop_string_across_the_border_counts() -> None:
    assert streamed([b"x", b"a", b"b", b"c"], ["abc"], inactive=3) == (["x", "", "", ""], True)


LONG = "abEND" + "x" * 400


def test_11_a_stop_string_at_the_front_of_a_long_block() -> None:
    assert streamed([LONG.encode()], ["END"]) == (["ab"], True)


@pytest.mark.parametrize("stops", [(), ("zz",)])
def test_text_without_the_stop_passes_through(stops: tuple[str, ...]) -> None:
    shown, stopped = streamed(split("hello z world", [3, 3, 3]), stops)
    assert "".join(shown) == "hello z world" and not stopped


class TailWindow(TextStream):
    """Looks for stop strings only in the last few characters."""

    def _first_stop(self, text: str) -> int | None:
        at = super()._first_stop(text[-8:])
        return None if at is None else at + max(0, len(text) - 8)


class ListOrder(TextStream):
    """Takes the first stop string of the list, not the one that is complete first."""

    def _first_stop(self, text: str) -> int | None:
        found = [text.find(stop) for stop in self._stops if stop in text]
        return found[0] if found else None


class HoldsNothing(TextStream):
    """Shows every character at once."""

    def _undecided(self, text: str) -> int:
        return 0


class HoldsTooMuch(TextStream):
    """Keeps back as many characters as the longest stop string has, whatever they are."""

    def _undecided(self, text: str) -> int:
        return min(len(text), max(map(len, self._stops)) - 1)


@pytest.mark.parametrize(
    ("wrong", "pieces", "stops"),
    [
        (TailWindow, [LONG.encode()], ["END"]),
        (ListOrder, [b"xabcd"], ["abcd", "bc"]),
        (HoldsNothing, [b"xa", b"b"], ["ab"]),
        (HoldsTooMuch, [b"hello", b"."], ["END"]),
    ],
)
def test_planted_faults_are_seen(wrong: type[TextStream], pieces: list[bytes], stops: list[str]) -> None:
    streams = [kind(detokenizer(pieces), stops) for kind in (wrong, TextStream)]
    shown = [[stream.push(i, True) for i in range(len(pieces))] for stream in streams]
    assert shown[0] != shown[1]
    final, stopped = naive(b"".join(pieces).decode(), stops)
    assert stopped == shown[1][-1][1] and final.startswith("".join(text for text, _ in shown[1]))
