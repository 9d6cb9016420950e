"""Character-exact comparison of two texts. Nothing is normalised: a different space or line end is a difference."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher, unified_diff
from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

# Above this many words between the first and the last difference, one hunk says it all (matching is quadratic).
_MOST_WORDS = 4000
_WORD = re.compile(r"\w+|\s|[^\w\s]")


@dataclass(frozen=True)
class Hunk:
    """a[a_start:a_end] was replaced by b[b_start:b_end]; offsets in characters. The two first characters differ, or
    one side is empty."""

    a_start: int
    a_end: int
    b_start: int
    b_end: int
    a_text: str
    b_text: str


@dataclass(frozen=True)
class TextDiff:
    """Two texts and where they differ. No hunks: they are equal to the character."""

    a: str
    b: str
    hunks: tuple[Hunk, ...]

    @property
    def equal(self) -> bool:
        """True when the texts are the same string."""
        return not self.hunks

    @property
    def first(self) -> int | None:
        """0-based position of the first differing character (the length of the shorter text if it is a prefix of the
        other), or None."""
        return self.hunks[0].a_start if self.hunks else None

    @property
    def line_and_column(self) -> tuple[int, int] | None:
        """The first difference as a line and a column, both from 1, or None."""
        if self.first is None:
            return None
        before = self.a[: self.first]
        return before.count("\n") + 1, self.first - (before.rfind("\n") + 1) + 1

    def continuations(self, length: int = 60) -> tuple[str, str]:
        """What follows the first difference on both sides, control characters visible."""
        start = len(self.a) if self.first is None else self.first
        return visible(self.a[start : start + length]), visible(self.b[start : start + length])


def diff_texts(a: str, b: str) -> TextDiff:
    """Compare to the character. Hunks are ordered, do not touch, and replaying them on `a` gives `b`."""
    if a == b:
        return TextDiff(a, b, ())
    start = _common_prefix(a, b)
    tail = _common_prefix(a[start:][::-1], b[start:][::-1])
    hunks = (_trimmed(a, b, span) for span in _word_spans(a[start : len(a) - tail], b[start : len(b) - tail], start))
    return TextDiff(a, b, tuple(hunks))


def visible(text: str, keep: str = "") -> str:
    """Show what the eye would miss: control characters as their symbols, other invisible ones as <U+...>."""
    return "".join(char if char in keep else _shown(char) for char in text)


def unified(diff: TextDiff, label_a: str = "plain", label_b: str = "speculative") -> str:
    """The difference as a unified diff under a line with its exact position; empty when equal."""
    place = diff.line_and_column
    if place is None:
        return ""
    lines = unified_diff(_lines(diff.a), _lines(diff.b), label_a, label_b, lineterm="")
    head = f"first difference at character {diff.first} (line {place[0]}, column {place[1]})"
    return "\n".join([head, *lines])


def side_by_side(diff: TextDiff, label_a: str = "plain", label_b: str = "speculative") -> Table:
    """Both texts in two columns for a rich console. Differing characters are reversed and underlined, so that the
    difference does not hang on colour."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, expand=True, padding=(0, 1))
    for label in (label_a, label_b):
        table.add_column(Text(label), ratio=1, overflow="fold")
    marks_a = [(hunk.a_start, hunk.a_end) for hunk in diff.hunks]
    marks_b = [(hunk.b_start, hunk.b_end) for hunk in diff.hunks]
    rows_a, rows_b = _marked(diff.a, marks_a), _marked(diff.b, marks_b)
    for left, right in _aligned(diff, rows_a, rows_b):
        table.add_row(left, right)
    return table


def _shown(char: str) -> str:
    code = ord(char)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    if char != " " and unicodedata.category(char) in ("Cc", "Cf", "Co", "Cs", "Cn", "Zl", "Zp", "Zs"):
        return f"<U+{code:04X}>"
    return char


def _common_prefix(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _word_spans(a: str, b: str, offset: int) -> Iterator[tuple[int, int, int, int]]:
    """Differing spans of two texts, at word borders, shifted by `offset`."""
    words_a, words_b = _WORD.findall(a), _WORD.findall(b)
    if max(len(words_a), len(words_b)) > _MOST_WORDS:
        yield offset, offset + len(a), offset, offset + len(b)
        return
    at_a, at_b = _borders(words_a, offset), _borders(words_b, offset)
    for tag, i, j, k, m in SequenceMatcher(None, words_a, words_b, autojunk=False).get_opcodes():
        if tag != "equal":
            yield at_a[i], at_a[j], at_b[k], at_b[m]


def _borders(words: list[str], offset: int) -> list[int]:
    borders = [offset]
    for word in words:
        borders.append(borders[-1] + len(word))
    return borders


def _trimmed(a: str, b: str, span: tuple[int, int, int, int]) -> Hunk:
    """A span cut down to the characters that differ."""
    i, j, k, m = span
    head = _common_prefix(a[i:j], b[k:m])
    i, k = i + head, k + head
    tail = _common_prefix(a[i:j][::-1], b[k:m][::-1])
    return Hunk(i, j - tail, k, m - tail, a[i : j - tail], b[k : m - tail])


def _lines(text: str) -> list[str]:
    return [visible(line) for line in text.split("\n")]


def _marked(text: str, marks: list[tuple[int, int]]) -> list[Text]:
    """One rich Text per line, the marked characters emphasised."""
    from rich.text import Text

    shown = Text()
    position = 0
    for start, end in [*marks, (len(text), len(text))]:
        shown.append(visible(text[position:start], keep="\n"))
        shown.append(visible(text[start:end], keep="\n"), style="reverse underline")
        position = end
    return list(shown.split("\n", allow_blank=True))


def _aligned(diff: TextDiff, rows_a: list[Text], rows_b: list[Text]) -> Iterator[tuple[Text | str, Text | str]]:
    """Rows of both sides, equal lines beside each other."""
    matcher = SequenceMatcher(None, diff.a.split("\n"), diff.b.split("\n"), autojunk=False)
    for _, i, j, k, m in matcher.get_opcodes():
        yield from zip_longest(rows_a[i:j], rows_b[k:m], fillvalue="")
