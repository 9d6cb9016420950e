"""Who runs on the next step. No prefill or decode phases: each sequence catches up with its own tokens under one
token budget. When the KV store is full, the youngest sequence gives its rows back and is recomputed later."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from outpace.cache.base import KVStore
from outpace.engine.policy import Policy
from outpace.engine.step import Work
from outpace.types import Sequence


@dataclass
class Plan:
    """The work of one step, and who was preempted to make room for it."""

    work: list[Work] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)


class Scheduler:
    """First come, first served. `max_batched_tokens` bounds the rows of one forward pass, draft rows included."""

    def __init__(self, store: KVStore, policy: Policy, max_num_seqs: int, max_batched_tokens: int) -> None:
        self._store, self._policy = store, policy
        self._max_num_seqs, self._budget = max_num_seqs, max_batched_tokens
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a finished or aborted sequence. The caller releases its rows."""
        if sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    @property
    def waiting(self) -> int:
        """Sequences queued."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Sequences being worked on."""
        return len(self._running)

    def plan(self) -> Plan:
        """Reserve rows and say who does what. Empty only if there is nothing to do."""
        plan = Plan()
        self._admit(plan)
        for work in self._share():
            sequence = work.sequence
            if sequence not in self._running:  # preempted for an older one on this very step
                continue
            while not self._store.reserve(sequence.id, work.feed + work.depth):
                if work.depth:  # a draft is a luxury: drop it before anybody loses rows
                    work = Work(sequence, work.feed, 0, work.reaches_frontier)
                elif not self._preempt_youngest(plan, sequence):
                    break
            else:
                plan.work.append(work)
        # The next step starts with those that got nothing on this one.
        served = {w.sequence.id for w in plan.work}
        self._running.sort(key=lambda sequence: sequence.id in served)
        return plan

    def _admit(self, plan: Plan) -> None:
        while self._waiting and len(self._running) < self._max_num_seqs:
            first = self._waiting[0]
            self._store.adopt(first.id, first.tokens[:-1])
            if self._running and not self._fits(first):
                self._store.release(first.id, first.tokens)
                return
            self._running.append(self._waiting.popleft())

    def _fits(self, sequence: Sequence) -> bool:
        """Room for all its tokens now, tried by a reservation that is given back."""
        fits = self._store.reserve(sequence.id, len(sequence.tokens) - self._store.length(sequence.id))
        if fits:
            self._store.commit(sequence.id, ())
        return fits

    def _share(self) -> list[Work]:
        """The budget: each sequence's own tokens first, in turn, then drafts of what is left."""
        budget, works = self._budget, []
        for sequence in self._running:
            pending = len(sequence.tokens) - self._store.length(sequence.id)
            feed = min(pending, budget)
            if feed:
                works.append(Work(sequence, feed, 0, feed == pending))
            budget -= feed
        ready = [w.sequence for w in works if w.reaches_frontier]
        depths = self._policy.depths(ready, self._budget - budget)
        for i, work in enumerate(works):
            depth = min(depths[work.sequence.id], budget) if work.reaches_frontier else 0
            works[i] = replace(work, depth=depth)
            budget -= depth
        return works

    def _preempt_youngest(self, plan: Plan, keep: Sequence) -> bool:
        """Take the rows of the sequence that came last; False if `keep` itself is the last one left to take from."""
        planned = {w.sequence.id for w in plan.work}
        victims = [s for s in self._running if s.id not in planned and s.id > keep.id]
        victim = max(victims or [keep], key=lambda s: s.id)
        self._store.release(victim.id, victim.tokens)
        self._running.remove(victim)
        self._waiting.appendleft(victim)
        plan.preempted.append(victim)
        return victim is not keep
