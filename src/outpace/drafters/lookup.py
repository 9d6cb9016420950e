"""Suffix lookup: what followed the last time the text ended like this? No model, no training.

Prompt lookup with the statistics of SuffixDecoding (Oliaro et al. 2024, section 3): for every length m of a suffix that
occurred before, follow the most frequent continuation while the product of count ratios stays above a floor, and
propose the continuation whose products sum to most, which is its expected number of accepted tokens.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from outpace.drafters.base import DraftRequest, Needs, StepUpdate
from outpace.types import Draft
from outpace.verify.tree import chain_parents, pad

# Places are found by their last n tokens. Long keys find the best matches even where the short ones are all over.
_KEYS = (4, 2, 1)


@dataclass(frozen=True)
class LookupSettings:
    """floor       least product of count ratios of the last token of a draft
    factor      most draft tokens per token of matching suffix
    min_match   shortest suffix that may propose
    max_match   suffix tokens compared at most
    places      most recent places remembered per key
    """

    floor: float = 0.1
    factor: float = 2.0
    min_match: int = 1
    max_match: int = 32
    places: int = 32


@dataclass
class _Index:
    """Places of one text: place p stands for the tokens before p, and p is where they continue."""

    places: dict[tuple[int, ...], deque[int]] = field(default_factory=dict)
    known: int = 0  # places below this are indexed


class Lookup:
    """Drafter over the request's own prompt and output. Its proposals carry no q: a point mass on what is proposed."""

    name = "lookup"
    needs = Needs()

    def __init__(self, settings: LookupSettings | None = None) -> None:
        self._settings = settings or LookupSettings()
        self._indexes: dict[int, _Index] = {}

    def propose(self, requests: Seq[DraftRequest]) -> Draft:
        """An empty row where nothing matches."""
        rows = []
        for request in requests:
            index = self._indexes.setdefault(request.sequence.id, _Index())
            tokens = request.sequence.tokens
            self._catch_up(index, tokens)
            found = self._continue(tokens, self._candidates(index, tokens), request.depth)
            rows.append((found, chain_parents(len(found))))
        return pad(rows)

    def observe(self, updates: Seq[StepUpdate]) -> None:
        """Nothing to do: `propose` reads what is new."""

    def release(self, seq: int) -> None:
        """Forget a text."""
        self._indexes.pop(seq, None)

    def _catch_up(self, index: _Index, tokens: Seq[int]) -> None:
        """Index every place that has a continuation, that is, all but the end of the text."""
        for place in range(max(1, index.known), len(tokens)):
            for n in _KEYS:
                if n <= place:
                    key = tuple(tokens[place - n : place])
                    index.places.setdefault(key, deque(maxlen=self._settings.places)).append(place)
        index.known = len(tokens)

    def _candidates(self, index: _Index, tokens: Seq[int]) -> dict[int, int]:
        """Place -> length of its common suffix with the text, for places worth looking at."""
        places: set[int] = set()
        for n in _KEYS:
            places.update(index.places.get(tuple(tokens[-n:]), ()))
        return {place: self._match(tokens, place) for place in places}

    def _match(self, tokens: Seq[int], place: int) -> int:
        longest, end, m = min(place, self._settings.max_match), len(tokens), 0
        while m < longest and tokens[place - 1 - m] == tokens[end - 1 - m]:
            m += 1
        return m

    def _continue(self, tokens: Seq[int], matches: dict[int, int], depth: int) -> list[int]:
        """The best continuation over all match lengths; a tie goes to the longer match."""
        best: list[int] = []
        best_score = 0.0
        for m in sorted(set(matches.values()), reverse=True):
            if m < self._settings.min_match:
                break
            places = [place for place, match in matches.items() if match >= m]
            found, score = self._follow(tokens, places, min(depth, int(self._settings.factor * m)))
            if score > best_score:
                best, best_score = found, score
        return best

    def _follow(self, tokens: Seq[int], places: list[int], depth: int) -> tuple[list[int], float]:
        """Most frequent children (ties: the most recent place) from these places, and the sum of their products."""
        end, product, score = len(tokens), 1.0, 0.0
        found: list[int] = []
        places.sort(reverse=True)
        while len(found) < depth:
            # Behind the end of the text comes what was proposed so far: a loop goes on as it went.
            at = len(found)
            children = [tokens[p + at] if p + at < end else found[p + at - end] for p in places]
            token, count = Counter(children).most_common(1)[0]
            product *= count / len(places)
            if product < self._settings.floor:
                break
            found.append(token)
            score += product
            places = [p for p, child in zip(places, children, strict=True) if child == token]
        return found, score
