"""Token-wise rejection on chains, and the same walk over siblings on trees.

At a row with target law P and claim Q the children are tried in node order (recursive rejection sampling without
replacement, Chen et al. 2024 "Sequoia"; one child is Leviathan et al. 2023, algorithm 1):

    accept x with probability min(1, P(x) / Q(x))
    otherwise P <- norm(max(P - Q, 0)) and Q <- Q with x zeroed, renormalised; try the next child
    none accepted: the extra token has law P

A child that its claim cannot produce (Q(x) = 0 or not a number, or no q at all) is treated as a point mass: accepted
with probability P(x). Accepting it with the limit of min(1, P / Q), which is 1, would let a drafter with a wrong claim
dictate the text; the point mass is exact for any token chosen without looking at the randomness. Where Q is NaN away
from the drafted tokens, the extra token is not drawn there. If P - Q has no positive part, P stays: the rejection had
probability 0 up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.types import Draft


def _clean(law: Tensor) -> Tensor:
    return law.to(torch.float64).nan_to_num(0.0, 0.0, 0.0)


def subtract_claim(mass: Tensor, q: Tensor | None, token: Tensor) -> None:
    """mass [M, V] float64 <- max(mass - claim, 0) in place, where the claim is q [M, V], or the point mass of token [M]
    where q cannot produce it. Rows whose token is -1 keep their mass."""
    index, drafted = token.clamp(min=0).unsqueeze(-1), (token >= 0).unsqueeze(-1)
    possible = torch.zeros_like(drafted)
    if q is not None:
        claimed = q.gather(-1, index)
        possible = drafted & (claimed > 0) & claimed.isfinite()
        mass.sub_(q if bool(possible.all()) else torch.where(possible, q, 0.0)).clamp_(min=0.0)
    kept = torch.where(drafted & ~possible, 0.0, mass.gather(-1, index))
    mass.scatter_(-1, index, kept)


def ratio(p: Tensor, q: Tensor | None) -> Tensor:
    """p(x) / q(x) for gathered probabilities of draft tokens; p(x) where q claims nothing. Any shape, float64."""
    p = _clean(p)
    if q is None:
        return p
    q = _clean(q)
    return torch.where(q > 0, p / torch.where(q > 0, q, 1.0), p)


def gather_tokens(law: Tensor, draft: Draft) -> Tensor:
    """law [S, N+1, V] -> [S, N]: the probability of each node under the row it follows (padding: anything)."""
    rows = torch.arange(law.shape[0], device=law.device).unsqueeze(-1)
    return law[rows, draft.parent + 1, draft.tokens.clamp(min=0)]


def leftover(mass: Tensor, otherwise: Tensor) -> Tensor:
    """mass [M, V] normalised in place; rows without any become `otherwise`. NaN counts as 0."""
    total = mass.sum(-1, keepdim=True)
    if not bool(total.isfinite().all()):
        total = mass.nan_to_num_(0.0, 0.0, 0.0).sum(-1, keepdim=True)
    empty = total <= 0
    mass.div_(torch.where(empty, 1.0, total))
    return torch.where(empty, otherwise, mass) if bool(empty.any()) else mass


@dataclass
class _Walk:
    """M rows whose children are tried together: p [M, V] what the target still owes, q [M, V] the claim or None, token
    [M] the child on trial (-1: this row has none left, and stays as it is)."""

    p: Tensor
    q: Tensor | None
    token: Tensor | None = None

    def try_child(self, token: Tensor) -> None:
        """The next child; it was drawn from q without the one before."""
        if self.q is not None and self.token is not None:
            rest = self.q.scatter(-1, self.token.clamp(min=0).unsqueeze(-1), 0.0)
            self.q = leftover(rest, torch.zeros_like(rest))
        self.token = token

    def acceptance(self, token: Tensor) -> Tensor:
        """[M] probability that the child is accepted."""
        index = token.clamp(min=0).unsqueeze(-1)
        q = None if self.q is None else self.q.gather(-1, index)
        return ratio(self.p.gather(-1, index), q).squeeze(-1).clamp(max=1.0)

    def reject(self, token: Tensor) -> None:
        """The child failed: what is owed is what the claim did not cover."""
        mass = self.p.clone()
        subtract_claim(mass, self.q, token)
        self.p = leftover(mass, self.p)


def _sibling_rounds(draft: Draft, rows: Tensor) -> Iterator[Tensor]:
    """For M (sequence, row) pairs [M, 2]: the nodes [M] of their first children, then the second, ... (-1: none)."""
    seqs, parent = rows[:, 0], rows[:, 1:] - 1
    child = (draft.parent[seqs] == parent) & (draft.tokens[seqs] >= 0)
    rank = child.cumsum(-1) * child
    for k in range(1, int(rank.max()) + 1 if rank.numel() else 1):
        found = rank == k
        yield torch.where(found.any(-1), found.to(torch.uint8).argmax(-1), -1)


def _token_of(draft: Draft, seqs: Tensor, nodes: Tensor) -> Tensor:
    return torch.where(nodes >= 0, draft.tokens[seqs, nodes.clamp(min=0)], -1)


def _start(p: Tensor, draft: Draft, rows: Tensor) -> _Walk:
    seqs, at = rows[:, 0], rows[:, 1]
    return _Walk(p[seqs, at].to(torch.float64), None if draft.q is None else draft.q[seqs, at])


def _later_siblings(p: Tensor, draft: Draft, acceptance: Tensor) -> None:
    """Overwrite the acceptance [S, N] of every child that is not its row's first: only these need whole laws."""
    width = draft.nodes + 1
    fan = torch.zeros(draft.tokens.shape[0], width, dtype=torch.int64, device=p.device)
    fan.scatter_add_(1, draft.parent + 1, (draft.tokens >= 0).to(torch.int64))
    rows = (fan > 1).nonzero()
    if not len(rows):
        return
    walk = _start(p, draft, rows)
    for nodes in _sibling_rounds(draft, rows):
        token = _token_of(draft, rows[:, 0], nodes)
        walk.try_child(token)
        there = nodes >= 0
        acceptance[rows[there, 0], nodes[there]] = walk.acceptance(token)[there]
        walk.reject(token)


@dataclass(frozen=True)
class WalkRule:
    """The walk above as an AcceptanceRule."""

    name: str
    trees: bool
    lossless: bool = True
    needs_q: bool = False

    def stop_law(self, p: Tensor, draft: Draft) -> Tensor:
        """[S, N+1] float64. On chains it reads p and q at the draft tokens only."""
        q = None if draft.q is None else gather_tokens(draft.q, draft)
        acceptance = ratio(gather_tokens(p, draft), q).clamp(max=1.0)
        acceptance = torch.where(draft.tokens >= 0, acceptance, 0.0)
        if self.trees:
            _later_siblings(p, draft, acceptance)
        law = torch.zeros(p.shape[0], draft.nodes + 1, dtype=torch.float64, device=p.device)
        law[:, 0] = 1.0
        for node in range(draft.nodes):
            # Each node takes its share of what its earlier siblings left at the parent row.
            parent = draft.parent[:, node : node + 1] + 1
            here, share = law.gather(1, parent), acceptance[:, node : node + 1]
            law[:, node + 1 : node + 2] = here * share
            law.scatter_(1, parent, here * (1.0 - share))
        return law

    def residual(self, p: Tensor, draft: Draft, stop: Tensor) -> Tensor:
        """[S, V] float64: what the target still owes at the stop row after all its children were rejected."""
        rows = torch.stack([torch.arange(len(stop), device=stop.device), stop], -1)
        walk = _start(p, draft, rows)
        for nodes in _sibling_rounds(draft, rows):
            token = _token_of(draft, rows[:, 0], nodes)
            walk.try_child(token)
            walk.reject(token)
        return walk.p
