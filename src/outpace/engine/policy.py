"""How long a draft each sequence gets on a step.

A policy decides from what earlier steps showed, before anything is drafted, so it changes speed and never the text: the
law of a draft depends on no token of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from outpace.engine.costs import PassCosts
from outpace.engine.step import StepReport, Work
from outpace.types import Sequence


class Policy(Protocol):
    """K for every sequence and step."""

    def depths(self, ready: Seq[Sequence], rows: int) -> Mapping[int, int]:
        """Draft tokens wanted behind the frontier of each of these sequences, by id; 0 is a plain step. `rows` are fed
        on this step anyway."""
        ...

    def observe(self, work: Seq[Work], report: StepReport) -> None:
        """What came of a step."""
        ...

    def release(self, seq: int) -> None:
        """A sequence has ended."""
        ...


def _longest(sequence: Sequence, k: int) -> int:
    """The first token never waits for a draft, and the last one needs none."""
    return max(0, min(k, sequence.room - 1)) if sequence.generated else 0


class FixedDepth:
    """Always K, less where the output ends sooner."""

    def __init__(self, k: int) -> None:
        self.k = k

    def depths(self, ready: Seq[Sequence], rows: int) -> Mapping[int, int]:
        """See Policy."""
        return {sequence.id: _longest(sequence, self.k) for sequence in ready}

    def observe(self, work: Seq[Work], report: StepReport) -> None:
        """Nothing to learn."""

    def release(self, seq: int) -> None:
        """Nothing to forget."""


@dataclass
class Acceptance:
    """How often the draft token at each position was right where those before it were: sums that fade."""

    fade: float
    right: list[float] = field(default_factory=list)
    tried: list[float] = field(default_factory=list)

    def add(self, drafted: int, accepted: int) -> None:
        """A step's draft. What stands behind the first wrong token was never tried."""
        for i in range(min(drafted, accepted + 1)):
            if i == len(self.tried):
                self.right.append(0.0)
                self.tried.append(0.0)
            self.right[i] = self.right[i] * self.fade + (i < accepted)
            self.tried[i] = self.tried[i] * self.fade + 1.0

    def chance(self, i: int, prior: float, weight: float) -> float:
        """Probability that position i is right, `weight` steps' worth of belief in the prior."""
        if i >= len(self.tried):
            return prior
        return (self.right[i] + weight * prior) / (self.tried[i] + weight)


def _widths(depths: Collection[int]) -> list[int]:
    """How many sequences draft a token at each position."""
    return [sum(depth > i for depth in depths) for i in range(max(depths, default=0))]


@dataclass
class _Record:
    """What is known of one sequence. `plain` counts steps since its last draft, `wait` how many come before the next
    try, `trying` is set on that step; `lost` are seconds that drafting cost it beyond plain decoding."""

    seen: Acceptance
    trying: bool = False
    plain: int = 0
    wait: int = 0
    lost: float = 0.0


@dataclass(frozen=True)
class AdaptiveSettings:
    """k_max     longest draft
    first       assumed chance of a draft token before anything was seen
    weight      steps' worth of belief in what other sequences showed
    margin      a draft must promise this much more than plain decoding
    first_wait  plain steps before a sequence without a draft tries again; it doubles with every try
    most_wait   and ends here
    hope        assumed chance of a draft token when a try is considered at all
    allowance   plain passes that drafting may cost a sequence, ...
    share       ... and this share of its tokens' passes on top: beyond, it decodes plainly
    """

    k_max: int
    first: float = 0.7
    weight: float = 1.5
    margin: float = 1.02
    first_wait: int = 4
    most_wait: int = 64
    hope: float = 0.95
    allowance: float = 2.5
    share: float = 0.01


class AdaptiveDepth:
    """The K that promises most tokens per second, from measured acceptance by position and measured costs.

    Draft tokens of all sequences of a step are ranked by the chance that they count; the best number of them is the one
    with the most expected tokens over the expected time of the step (algorithms.md: tau(K) / (v(K+1) + c K), with
    the batch's own rows). On a tie the smaller draft wins.
    """

    def __init__(self, verify: PassCosts, draft: PassCosts | None, settings: AdaptiveSettings) -> None:
        """draft: costs of the draft model's passes by sequences in them; None where drafting is nearly free."""
        self._verify, self._draft, self._settings = verify, draft, settings
        self._all = Acceptance(fade=0.98)
        self._records: dict[int, _Record] = {}

    def depths(self, ready: Seq[Sequence], rows: int) -> Mapping[int, int]:
        """See Policy."""
        longest = {s.id: _longest(s, self._settings.k_max) for s in ready}
        open_ = [s for s in ready if longest[s.id] and not self._exhausted(s)]
        chosen = dict.fromkeys(longest, 0)
        chosen.update(self._best({s.id: self._products(s.id, longest[s.id]) for s in open_}, len(ready), rows))
        for sequence in open_:
            record = self._record(sequence.id)
            record.trying = not chosen[sequence.id] and record.plain >= record.wait
            if record.trying and self._could_pay(longest[sequence.id], len(ready), rows):
                chosen[sequence.id] = min(2, longest[sequence.id])
        return chosen

    def _could_pay(self, longest: int, sequences: int, rows: int) -> bool:
        """Whether the draft of a sequence that is nearly always right would be worth its rows on this step."""
        return bool(self._best({0: [self._settings.hope ** (i + 1) for i in range(longest)]}, sequences, rows))

    def observe(self, work: Seq[Work], report: StepReport) -> None:
        """See Policy. Steps that also read a prompt say nothing of costs."""
        ready = [w for w in work if w.reaches_frontier]
        drafted = {w.sequence.id: report.emissions[w.sequence.id].drafted for w in ready}
        rows = sum(w.feed for w in work) + sum(drafted.values())
        usual = len(ready) == len(work) and all(w.feed == 1 for w in ready)
        drafting = sum(self._pass(n) for n in _widths(drafted.values()))
        if usual:
            self._verify.learn(rows, report.verify_seconds)
            caught_up = all(not self._record(w.sequence.id).plain for w in ready if w.depth)
            if self._draft is not None and drafting and caught_up:
                self._draft.drift(report.draft_seconds / drafting)
        step = self._verify.at(rows) + drafting
        for w in ready:
            emission, record = report.emissions[w.sequence.id], self._record(w.sequence.id)
            self._note(record, w.depth, emission.drafted, len(emission.kept))
            if usual and w.depth:
                tokens = report.taken[w.sequence.id]
                record.lost += step / len(ready) - tokens * self._verify.at(len(ready)) / len(ready)
                record.lost = max(record.lost, -10 * self._verify.at(1))

    def release(self, seq: int) -> None:
        """See Policy."""
        self._records.pop(seq, None)

    def _record(self, seq: int) -> _Record:
        return self._records.setdefault(seq, _Record(Acceptance(fade=0.9)))

    def _note(self, record: _Record, wanted: int, drafted: int, accepted: int) -> None:
        if not wanted:
            record.plain += 1
            return
        if drafted:
            record.seen.add(drafted, accepted)
            self._all.add(drafted, accepted)
        if record.trying:  # success shows in `seen`, and then in what is chosen
            record.wait = min(max(self._settings.first_wait, 2 * record.wait), self._settings.most_wait)
        else:
            record.wait = 0
        record.plain = 0

    def _exhausted(self, sequence: Sequence) -> bool:
        record = self._records.get(sequence.id)
        if record is None:
            return False
        passes = self._settings.allowance + self._settings.share * sequence.generated
        return record.lost > passes * self._verify.at(1)

    def _products(self, seq: int, longest: int) -> list[float]:
        """Chance that the first i + 1 draft tokens are all right, for each i."""
        settings, seen = self._settings, self._record(seq).seen
        common = own = settings.first
        product, products = 1.0, []
        for i in range(longest):
            common = self._all.chance(i, common, settings.weight)
            own = seen.chance(i, common if i == 0 else (common + own) / 2, settings.weight)
            product *= own
            products.append(product)
        return products

    def _pass(self, sequences: int) -> float:
        """Seconds of a pass of the draft model."""
        return self._draft.at(sequences) if self._draft is not None and sequences else 0.0

    def _best(self, products: Mapping[int, Seq[float]], sequences: int, rows: int) -> dict[int, int]:
        """Depth by sequence id: the most promising tokens first, as many as give most tokens per second."""
        ranked = sorted(((-p, i, seq) for seq, row in products.items() for i, p in enumerate(row)))
        tokens, time = float(sequences), self._verify.at(rows)
        best_rate, best, drafting = tokens / time * self._settings.margin, 0, 0.0
        width: dict[int, int] = {}  # sequences in the draft model's pass for each position
        for count, (chance, i, _) in enumerate(ranked, 1):
            tokens -= chance
            width[i] = width.get(i, 0) + 1
            drafting += self._pass(width[i]) - self._pass(width[i] - 1)
            rate = tokens / (self._verify.at(rows + count) + drafting)
            if rate > best_rate:
                best_rate, best = rate, count
        depths: dict[int, int] = {}
        for _, _, seq in ranked[:best]:
            depths[seq] = depths.get(seq, 0) + 1
        return depths
