"""Rows of texts that have ended, kept for the next text that begins alike: a chat goes on, a system prompt comes again.

Only committed rows are kept, and kept rows are the first to go when room is wanted, so they cost no request anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Rows = TypeVar("Rows")
SHORTEST = 16  # tokens that are worth keeping and finding


@dataclass(frozen=True)
class Kept(Generic[Rows]):
    """The rows of `tokens`, in order."""

    tokens: Ids
    rows: Rows


class Prefixes(Generic[Rows]):
    """At most `most` texts, the one not used for longest goes first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: list[Kept[Rows]] = []  # the latest used last

    @property
    def kept(self) -> Sequence[Kept[Rows]]:
        """Everything, oldest first."""
        return self._kept

    def put(self, tokens: Sequence[int], rows: Rows) -> list[Rows]:
        """Keep the rows of a text. Returns what is dropped for it: texts that it begins with, the oldest one where
        there are too many, or itself, if it is short or the beginning of another one."""
        ids = np.asarray(tokens, np.int64)
        lengths = [common(old.tokens, ids) for old in self._kept]
        covered = any(n == len(ids) < len(old.tokens) for old, n in zip(self._kept, lengths, strict=True))
        if self._most < 1 or len(ids) < SHORTEST or covered:
            return [rows]
        begun = [n == len(old.tokens) for old, n in zip(self._kept, lengths, strict=True)]
        dropped = [old for old, over in zip(self._kept, begun, strict=True) if over]
        self._kept = [old for old, over in zip(self._kept, begun, strict=True) if not over]
        self._kept.append(Kept(ids, rows))
        if len(self._kept) > self._most:
            dropped.append(self._kept.pop(0))
        return [old.rows for old in dropped]

    def find(self, tokens: Sequence[int]) -> tuple[Kept[Rows], int] | None:
        """The text with the longest common beginning, and its length; None below SHORTEST. It counts as used."""
        ids = np.asarray(tokens, np.int64)
        lengths = [common(kept.tokens, ids) for kept in self._kept]
        longest = max(lengths, default=0)
        if longest < SHORTEST:
            return None
        best = self._kept.pop(lengths.index(longest))
        self._kept.append(best)
        return best, longest

    def take(self, kept: Kept[Rows]) -> None:
        """Keep it no longer: its rows have a new owner."""
        self._kept = [other for other in self._kept if other is not kept]

    def evict(self) -> Rows | None:
        """Drop the oldest; None if nothing is kept."""
        return self._kept.pop(0).rows if self._kept else None


def common(a: Ids, b: Ids) -> int:
    """Length of the common beginning."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
