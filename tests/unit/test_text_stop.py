"""Streaming text: whole characters only, and stop strings found wherever they lie, never shown in part."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
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
    stream = detokenizer(pieces)
    shown = [stream.push(i) for i in range(len(pieces))]
    assert "\ufffd" not in "".join(shown) or "\ufffd" in raw.decode()
    assert "".join(shown) == raw.decode() and stream.finish() == ""


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


def streamed(text: str, sizes: Sequence[int], stops: Sequence[str], inactive: int = 0) -> tuple[list[str], bool]:
    """Feed `text` in pieces; the first `inactive` pieces may not stop."""
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at : at + size].encode())
        at += size
    pieces.append(text[at:].encode())
    stream = TextStream(detokenizer(pieces), stops)
    shown = []
    for i in range(len(pieces)):
        more, stopped = stream.push(i, i >= inactive)
        shown.append(more)
        if stopped:
            return shown, True
    return [*shown, stream.finish()], False


LETTERS = st.text("abé", max_size=24)
STOPS = st.lists(st.text("abé", min_size=1, max_size=4), max_size=3)


@given(LETTERS, st.lists(st.integers(0, 4), max_size=12), STOPS)
def test_streaming_equals_looking_at_every_character(text: str, sizes: list[int], stops: list[str]) -> None:
    shown, stopped = streamed(text, sizes, stops)
    assert ("".join(shown), stopped) == naive(text, stops)


@given(LETTERS, st.lists(st.integers(0, 4), max_size=12), STOPS)
def test_what_is_shown_is_final_and_nothing_is_held_without_need(text: str, sizes: list[int], stops: list[str]) -> None:
    """After each piece, what is held back is the beginning of some stop string."""
    final, _ = naive(text, stops)
    pieces, at = [], 0
    for size in [*sizes, len(text)]:
        pieces.append(text[at : at + size])
        at += size
    stream = TextStream(detokenizer([piece.encode() for piece in pieces]), stops)
    shown, fed = "", ""
    for i, piece in enumerate(pieces):
        more, stopped = stream.push(i, True)
        shown, fed = shown + more, fed + piece
        assert final.startswith(shown)
        if stopped:
            assert shown == final
            return
        held = fed[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_a_stop_string_before_it_may_stop_is_text() -> None:
    """min_tokens: what was completed too early never counts, not even together with later characters."""
    assert streamed("abab", [1, 1, 1, 1], ["ab"], inactive=2) == (["", "ab", "", ""], True)
    assert streamed("ab-", [1, 1, 1], ["ab"], inactive=2) == (["", "ab", "-", "", ""], False)


def test_a_stop_string_across_the_border_counts() -> None:
    assert streamed("xabc", [1, 1, 1, 1], ["abc"], inactive=3) == (["x", "", "", ""], True)


def test_11_a_stop_string_at_the_front_of_a_long_block() -> None:
    text = "abEND" + "x" * 400
    assert streamed(text, [len(text)], ["END"]) == (["ab"], True)


@pytest.mark.parametrize("stops", [(), ("zz",)])
def test_text_without_the_stop_passes_through(stops: tuple[str, ...]) -> None:
    shown, stopped = streamed("hello z world", [3, 3, 3], stops)
    assert "".join(shown) == "hello z world" and not stopped


def test_planted_tail_window_is_caught() -> None:
    """An engine that looks for stop strings only in the last few characters misses one in a long piece."""

    class Window(TextStream):
        def _first_stop(self, text: str) -> int | None:
            at = super()._first_stop(text[-8:])
            return None if at is None else at + max(0, len(text) - 8)

    text = "abEND" + "x" * 400
    stream = Window(detokenizer([text.encode()]), ["END"])
    assert stream.push(0, True) != ("ab", True)
