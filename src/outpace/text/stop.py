"""Stop strings on a stream of tokens: found wherever they lie, and never shown in part."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.text.detokenizer import Detokenizer


class TextStream:
    """Text of one answer. Characters that may be the start of a stop string are held back until that is decided.

    A stop string counts when its last character arrives on a token for which stops are active; the text ends before
    its first character. Of several, the one that is complete first counts (then the longest).
    """

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._stops = tuple(stops)
        self._held = ""

    def push(self, token: int, active: bool) -> tuple[str, bool]:
        """Text that is now certain, and whether a stop string was completed (the text then ends here)."""
        new = self._detokenizer.push(token)
        if not self._stops:
            return new, False
        text = self._held + new
        start = self._first_stop(text) if active else None
        if start is not None:
            self._held = ""
            return text[:start], True
        certain = len(text) - self._undecided(text)
        self._held = text[certain:]
        return text[:certain], False

    def finish(self) -> str:
        """Everything held back: no stop string can be completed any more."""
        rest, self._held = self._held + self._detokenizer.finish(), ""
        return rest

    def _first_stop(self, text: str) -> int | None:
        """Start of the stop string that is complete first and ends behind what was looked at before."""
        found = []
        for stop in self._stops:
            at = text.find(stop, max(0, len(self._held) - len(stop) + 1))
            if at >= 0:
                found.append((at + len(stop), at))
        return min(found)[1] if found else None

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` that is a proper beginning of a stop string."""
        longest = max(map(len, self._stops)) - 1
        for n in range(min(longest, len(text)), 0, -1):
            end = text[-n:]
            if any(len(stop) > n and stop.startswith(end) for stop in self._stops):
                return n
        return 0
