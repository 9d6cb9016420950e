"""Forced tokens as free drafts: where a grammar leaves no choice, what it forces is proposed without asking a drafter.

Everybody's drafter is wrapped in this one. Requests without a constraint pass through untouched.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outpace.drafters.base import Drafter, DraftRequest, Needs, StepUpdate
from outpace.sampling.constrained import GrammarMask
from outpace.sampling.penalties import RowContext
from outpace.sampling.pipeline import LawRow
from outpace.types import Draft, Sequence
from outpace.verify.tree import chain_parents, pad


@dataclass
class _Row:
    """One request's draft. `own` counts the leading nodes that are the inner drafter's own."""

    tokens: list[int]
    parents: list[int]
    own: int


class Forced:
    """Drafter around another one, for the constraints of `grammar`.

    A drafter that claims a law is asked unless forced tokens fill at least half of the draft: that is decided before
    it draws, because dropping a drawn token for its value would bias the text, and its own pipeline knows the grammar.
    The proposals of one that claims none are cut where the grammar forbids them, and give way to forced tokens that
    they contradict.
    """

    def __init__(self, inner: Drafter, grammar: GrammarMask) -> None:
        self.inner, self._grammar = inner, grammar
        self._own: dict[int, int] = {}  # sequences whose draft is not the inner drafter's: leading nodes that are

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def needs(self) -> Needs:
        return self.inner.needs

    def propose(self, requests: Seq[DraftRequest]) -> Draft:
        """The inner drafter's rows, forced tokens in place of some. They claim nothing: point masses."""
        if all(request.sequence.params.constraint is None for request in requests):
            return self.inner.propose(requests)
        forced = [self._grammar.forced(_frontier(r.sequence), r.depth) for r in requests]
        asked = [s for s, r in enumerate(requests) if not self._suffices(forced[s], r.depth)]
        part = self.inner.propose([requests[s] for s in asked]) if asked else None
        rows = [_Row(tokens, list(chain_parents(len(tokens))), 0) for tokens in forced]
        for i, s in enumerate(asked):
            assert part is not None
            rows[s] = self._merged(requests[s].sequence, _row(part, i), forced[s])
        for request, row in zip(requests, rows, strict=True):
            if row.own < len(row.tokens):
                self._own[request.sequence.id] = row.own
        q = None if part is None or part.q is None else _claims(part.q, asked, rows)
        return pad([(row.tokens, row.parents) for row in rows], q)

    def observe(self, updates: Seq[StepUpdate]) -> None:
        """The inner drafter hears of its own nodes only."""
        self.inner.observe([replace(u, kept=self._theirs(u)) for u in updates])

    def release(self, seq: int) -> None:
        """Forget a sequence."""
        self._own.pop(seq, None)
        self.inner.release(seq)

    def _theirs(self, update: StepUpdate) -> tuple[int, ...]:
        own = self._own.pop(update.sequence.id, None)
        return update.kept if own is None else tuple(node for node in update.kept if node < own)

    def _suffices(self, forced: list[int], depth: int) -> bool:
        return 2 * len(forced) >= depth if self.needs.proposes_law else len(forced) >= depth

    def _merged(self, sequence: Sequence, row: _Row, forced: list[int]) -> _Row:
        chain = row.parents == list(chain_parents(len(row.tokens)))
        if sequence.params.constraint is None or self.needs.proposes_law or not chain:
            return row
        legal = row.tokens[: self._grammar.legal(_frontier(sequence), row.tokens)]
        if legal[: len(forced)] == forced:
            return _Row(legal, row.parents[: len(legal)], len(legal))
        own = next((i for i, (a, b) in enumerate(zip(legal, forced, strict=False)) if a != b), len(legal))
        return _Row(forced, list(chain_parents(len(forced))), own)


def _frontier(sequence: Sequence) -> RowContext:
    return LawRow(sequence.params, sequence.tokens, sequence.prompt_len).context()


def _row(draft: Draft, s: int) -> _Row:
    n = draft.length(s)
    return _Row(draft.tokens[s, :n].tolist(), draft.parent[s, :n].tolist(), n)


def _claims(q: Tensor, asked: Seq[int], rows: Seq[_Row]) -> Tensor:
    """[S, N+1, V]: the inner claims of the requests that were asked, point masses for forced tokens."""
    width = max(len(row.tokens) for row in rows) + 1
    whole = q.new_zeros(len(rows), width, q.shape[-1])
    for i, s in enumerate(asked):
        n = min(width, q.shape[1])
        whole[s, :n] = q[i, :n]
    for s in set(range(len(rows))) - set(asked):
        tokens = torch.tensor(rows[s].tokens, dtype=torch.int64)
        whole[s, torch.arange(len(tokens)), tokens] = 1.0
    return whole
