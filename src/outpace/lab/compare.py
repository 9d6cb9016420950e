"""Plain against speculative decoding on the same prompts: paired, interleaved runs, and what they say.

Each pair runs back to back and the order alternates (plain first, speculative first, ...), so that drift of the machine
falls on both sides alike. Decode speed counts the tokens after the first delta over the time they took, so reading the
prompt is not part of it; the answer time is the whole request.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from outpace.lab.diff import TextDiff, diff_texts
from outpace.types import Delta, Request, RequestStats, SamplingParams

PLAIN, SPECULATIVE = "plain", "speculative"
_RESAMPLES = 2000


class Generates(Protocol):
    """The synchronous edge of an engine."""

    def generate(self, request: Request) -> Iterator[Delta]:
        """Deltas of one request, in order; closing the iterator aborts it."""
        ...


@dataclass(frozen=True)
class Case:
    """One prompt of the comparison. `kind` groups prompts in the report."""

    name: str
    kind: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class Verdict:
    """What a judge says about two answers that part: near_tie means the target itself could not tell the two tokens
    apart within rounding, so both are its text."""

    near_tie: bool
    message: str
    gap: float | None = None


Judge = Callable[[Sequence[int], Sequence[int], Sequence[int]], Verdict]
"""(prompt ids, reference tokens, other tokens) -> Verdict; called only when the tokens differ."""


@dataclass(frozen=True)
class Run:
    """One measured answer. `seconds` is the whole request, `decode_seconds` from the first delta to the last, in which
    `decode_tokens` tokens came."""

    side: str
    tokens: tuple[int, ...]
    text: str
    finish_reason: str
    seconds: float
    decode_seconds: float
    decode_tokens: int
    stats: RequestStats

    @property
    def speed(self) -> float:
        """Decode tokens per second, 0.0 when everything came in one delta."""
        return self.decode_tokens / self.decode_seconds if self.decode_tokens and self.decode_seconds > 0 else 0.0


@dataclass(frozen=True)
class Difference:
    """A run whose tokens are not those of the first plain run. side "plain" means that plain decoding itself does not
    repeat; an equal text with other tokens has an empty diff."""

    case: str
    side: str
    repeat: int
    token: int
    diff: TextDiff
    verdict: Verdict | None

    @property
    def excused(self) -> bool:
        """True when a judge found a near tie."""
        return self.verdict is not None and self.verdict.near_tie

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        plain, other = self.diff.continuations()
        shown = {"case": self.case, "side": self.side, "repeat": self.repeat, "token": self.token}
        place = {"character": self.diff.first, "plain": plain, "other": other}
        return {**shown, **place, "verdict": dataclasses.asdict(self.verdict) if self.verdict else None}


@dataclass(frozen=True)
class CaseResult:
    """All runs of one prompt. plain[i] and speculative[i] are a pair."""

    case: Case
    plain: tuple[Run, ...]
    speculative: tuple[Run, ...]
    differences: tuple[Difference, ...]

    @property
    def speedups(self) -> list[float]:
        """Decode speed of the speculative run over that of the plain one, per pair that can be timed."""
        pairs = zip(self.plain, self.speculative, strict=True)
        return [fast.speed / slow.speed for slow, fast in pairs if slow.speed and fast.speed]

    @property
    def answer_speedups(self) -> list[float]:
        """Ratio of whole request times, per pair."""
        return [slow.seconds / fast.seconds for slow, fast in zip(self.plain, self.speculative, strict=True)]


@dataclass(frozen=True)
class Spread:
    """Median with quartiles and extremes of n values. All 0.0 when n is 0."""

    n: int
    median: float
    q1: float
    q3: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """The result. `interval` is a 95% bootstrap interval of the median speedup over prompts."""

    cases: tuple[CaseResult, ...]
    plain_speed: Spread
    speculative_speed: Spread
    speedup: Spread
    interval: tuple[float, float]
    answer_speedup: Spread
    acceptance_rate: float
    mean_acceptance_length: float

    @property
    def differences(self) -> list[Difference]:
        """Every run whose tokens differ from the first plain run."""
        return [difference for result in self.cases for difference in result.differences]

    @property
    def lossless(self) -> bool:
        """True when every difference, if any, is a near tie."""
        return all(difference.excused for difference in self.differences)

    @property
    def by_kind(self) -> dict[str, Spread]:
        """Speedup per kind of prompt."""
        kinds: dict[str, list[float]] = {}
        for result in self.cases:
            kinds.setdefault(result.case.kind, []).extend(result.speedups)
        return {kind: spread(values) for kind, values in kinds.items()}

    def as_dict(self) -> dict[str, Any]:
        """The JSON form, without the texts of runs that agree."""
        totals = ("plain_speed", "speculative_speed", "speedup", "answer_speedup")
        return {
            "lossless": self.lossless,
            **{name: dataclasses.asdict(getattr(self, name)) for name in totals},
            "speedup_interval_95": list(self.interval),
            "speedup_by_kind": {kind: dataclasses.asdict(value) for kind, value in self.by_kind.items()},
            "acceptance_rate": self.acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
            "cases": [_case_dict(result) for result in self.cases],
            "differences": [difference.as_dict() for difference in self.differences],
        }


@dataclass(frozen=True)
class Setup:
    """How to measure: pairs per prompt, tokens of the warm-up request that each side answers first, and the judge of
    differing answers."""

    repeats: int = 2
    warmup_tokens: int = 16
    judge: Judge | None = None


def compare(
    cases: Sequence[Case],
    plain: Generates,
    speculative: Generates,
    setup: Setup,
    report: Callable[[CaseResult], None],
) -> Comparison:
    """Measure every case and hand each result to `report` as it is done. At least one case is needed."""
    sides = {PLAIN: plain, SPECULATIVE: speculative}
    for side, engine in sides.items():
        short = cases[0].params.replace(max_tokens=setup.warmup_tokens, min_tokens=0)
        measure(side, engine, Request(f"warm-up-{side}", cases[0].prompt_ids, short))
    results = []
    for number, case in enumerate(cases):
        runs: dict[str, list[Run]] = {PLAIN: [], SPECULATIVE: []}
        for repeat in range(setup.repeats):
            for side in order(number + repeat):
                request = Request(f"{number}-{repeat}-{side}", case.prompt_ids, case.params)
                runs[side].append(measure(side, sides[side], request))
        found = tuple(_differences(case, runs, setup.judge))
        results.append(CaseResult(case, tuple(runs[PLAIN]), tuple(runs[SPECULATIVE]), found))
        report(results[-1])
    return summarise(results)


def order(pair: int) -> tuple[str, str]:
    """Which side goes first in a pair: they take turns."""
    return (PLAIN, SPECULATIVE) if pair % 2 == 0 else (SPECULATIVE, PLAIN)


def measure(side: str, engine: Generates, request: Request) -> Run:
    """Run one request to its end and time it from outside, whatever the engine says about itself."""
    tokens: list[int] = []
    text, finish, stats = "", "", RequestStats()
    first, early, start = 0.0, 0, time.perf_counter()
    last = start
    for delta in engine.generate(request):
        if delta.tokens:
            last = time.perf_counter()
            if not tokens:
                first, early = last, len(delta.tokens)
        tokens += delta.tokens
        text += delta.text
        finish = str(delta.finish_reason or finish)
        stats = delta.stats or stats
    seconds = time.perf_counter() - start
    return Run(side, tuple(tokens), text, finish, seconds, last - first, len(tokens) - early, stats)


def summarise(results: Sequence[CaseResult]) -> Comparison:
    """Medians and spreads over all pairs of all cases."""
    plain = [run for result in results for run in result.plain]
    speculative = [run for result in results for run in result.speculative]
    drafted = sum(run.stats.drafted for run in speculative)
    accepted = sum(run.stats.accepted for run in speculative)
    steps = sum(run.stats.steps for run in speculative)
    return Comparison(
        cases=tuple(results),
        plain_speed=spread([run.speed for run in plain if run.speed]),
        speculative_speed=spread([run.speed for run in speculative if run.speed]),
        speedup=spread([value for result in results for value in result.speedups]),
        interval=bootstrap([result.speedups for result in results if result.speedups]),
        answer_speedup=spread([value for result in results for value in result.answer_speedups]),
        acceptance_rate=accepted / drafted if drafted else 0.0,
        mean_acceptance_length=1 + accepted / steps if steps else 1.0,
    )


def spread(values: Sequence[float]) -> Spread:
    """Median, quartiles (inclusive method) and extremes."""
    if not values:
        return Spread(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return Spread(len(values), quartiles[1], quartiles[0], quartiles[2], min(values), max(values))


def bootstrap(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """95% percentile interval of the median of all values, resampling whole groups (repeats of one prompt are not
    independent). Deterministic; (0.0, 0.0) without data."""
    if not groups:
        return 0.0, 0.0
    source = random.Random(0)
    medians = []
    for _ in range(_RESAMPLES):
        drawn = source.choices(groups, k=len(groups))
        medians.append(statistics.median([value for group in drawn for value in group]))
    medians.sort()
    return medians[int(0.025 * _RESAMPLES)], medians[int(0.975 * _RESAMPLES) - 1]


def _differences(case: Case, runs: dict[str, list[Run]], judge: Judge | None) -> Iterator[Difference]:
    reference = runs[PLAIN][0]
    for side in (PLAIN, SPECULATIVE):
        for repeat, run in enumerate(runs[side]):
            if run.tokens == reference.tokens and run.text == reference.text:
                continue
            both = list(zip(reference.tokens, run.tokens, strict=False))
            token = next((i for i, (x, y) in enumerate(both) if x != y), len(both))
            verdict = judge(case.prompt_ids, reference.tokens, run.tokens) if judge else None
            yield Difference(case.name, side, repeat, token, diff_texts(reference.text, run.text), verdict)


def _case_dict(result: CaseResult) -> dict[str, Any]:
    runs = [run for pair in zip(result.plain, result.speculative, strict=True) for run in pair]
    return {
        "name": result.case.name,
        "kind": result.case.kind,
        "prompt_tokens": len(result.case.prompt_ids),
        "text": result.plain[0].text,
        "speedups": result.speedups,
        "runs": [
            {
                "side": run.side,
                "output_tokens": len(run.tokens),
                "finish_reason": run.finish_reason,
                "seconds": run.seconds,
                "tokens_per_second": run.speed,
                "drafted": run.stats.drafted,
                "accepted": run.stats.accepted,
                "steps": run.stats.steps,
            }
            for run in runs
        ],
    }
