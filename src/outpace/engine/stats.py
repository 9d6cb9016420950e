"""Counting what steps do, per request and for the engine."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from outpace.engine.step import StepReport
from outpace.engine.stopping import Emission
from outpace.types import RequestStats, TokenKind


@dataclass
class RequestMeter:
    """Accumulates one request's RequestStats. Times are time.perf_counter() seconds."""

    prompt_tokens: int
    submitted: float = field(default_factory=time.perf_counter)
    started: float | None = None
    first_token: float | None = None
    last_token: float = 0.0
    cached: int = 0
    output_tokens: int = 0
    steps: int = 0
    draft_steps: int = 0
    accepted: int = 0
    drafted_at: Counter[int] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    other_seconds: float = 0.0

    def begin(self, cached: int) -> None:
        """The request leaves the queue with so many rows known already (again, after a preemption: only the first time
        counts)."""
        if self.started is None:
            self.started, self.cached = time.perf_counter(), cached

    def share(self, report: StepReport, parts: int) -> None:
        """This request's equal share of a step's time."""
        self.draft_seconds += report.draft_seconds / parts
        self.verify_seconds += report.verify_seconds / parts
        self.other_seconds += report.other_seconds / parts

    def emitted(self, emission: Emission, taken: int) -> None:
        """A step that brought `taken` tokens."""
        self.last_token = time.perf_counter()
        if self.first_token is None:
            self.first_token = self.last_token
        self.output_tokens += taken
        self.steps += 1
        self.draft_steps += emission.drafted > 0
        self.accepted += len(emission.kept)
        self.drafted_at.update(range(emission.drafted))
        self.accepted_at.update(range(len(emission.kept)))

    def snapshot(self) -> RequestStats:
        """The figures so far."""
        now = time.perf_counter()
        first = self.first_token if self.first_token is not None else now
        positions = range(max(self.drafted_at, default=-1) + 1)
        return RequestStats(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached,
            output_tokens=self.output_tokens,
            steps=self.steps,
            draft_steps=self.draft_steps,
            drafted=self.drafted_at.total(),
            accepted=self.accepted,
            drafted_per_position=tuple(self.drafted_at[i] for i in positions),
            accepted_per_position=tuple(self.accepted_at[i] for i in positions),
            queue_seconds=(self.started if self.started is not None else now) - self.submitted,
            first_token_seconds=first - self.submitted,
            decode_seconds=max(0.0, self.last_token - first),
            draft_seconds=self.draft_seconds,
            verify_seconds=self.verify_seconds,
            other_seconds=self.other_seconds,
        )


class EngineMeter:
    """Totals since start. Names end in their unit; `snapshot` is what EngineClient.stats() returns."""

    def __init__(self) -> None:
        self._totals: Counter[str] = Counter()
        self._seconds = {"draft_seconds": 0.0, "verify_seconds": 0.0, "other_seconds": 0.0}

    def count(self, name: str, n: int = 1) -> None:
        """Add to a counter."""
        self._totals[name] += n

    def add(self, report: StepReport) -> None:
        """Add one step."""
        self.count("steps")
        for sequence, emission in report.emissions.items():
            self.count("generation_tokens", report.taken[sequence])
            self.count("drafted_tokens", emission.drafted)
            self.count("accepted_tokens", len(emission.kept))
            self.count("drafts", int(emission.drafted > 0))
            self.count("plain_steps", int(emission.kinds[-1] is TokenKind.PLAIN))
        self._seconds["draft_seconds"] += report.draft_seconds
        self._seconds["verify_seconds"] += report.verify_seconds
        self._seconds["other_seconds"] += report.other_seconds

    def snapshot(self) -> dict[str, float]:
        """Every counter by name."""
        return {**{name: float(n) for name, n in self._totals.items()}, **self._seconds}
