"""Block verification: the whole chain is judged jointly (Sun et al. 2024, arXiv 2403.10444, algorithm 2).

    c_0 = 1,  c_i = min(1, c_{i-1} p_i(x_i) / q_i(x_i))
    Z_i = sum_x max(c_i p_{i+1}(x) - q_{i+1}(x), 0)
    h_i = Z_i / (Z_i + 1 - c_i), 1 if the denominator is 0;  h_K = c_K
    stop = the largest i with u_i <= h_i, 0 if none;  the extra token has law p at stop K, else
    norm(max(c_stop p_{stop+1} - q_{stop+1}, 0))

It accepts at least as many tokens as the token rule, always, because it does not break at the first failure. A row
whose q cannot produce its token is a point mass on it, as in `token`; so is every row of a draft without a q (an empty
draft in a plain step, say): exact, but no better than the token rule, hence `needs_q`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.types import Draft
from outpace.verify.token import gather_tokens, leftover, ratio, subtract_claim
from outpace.verify.tree import lengths


def _excess(p: Tensor, q: Tensor | None, token: Tensor, c: Tensor) -> Tensor:
    """max(c p - q, 0) at one row of every sequence: p, q [S, V], token and c [S] -> [S, V] float64."""
    mass = p * c.unsqueeze(-1)
    subtract_claim(mass, q, token)
    return mass


def _joint(p: Tensor, draft: Draft) -> Tensor:
    """c_0 .. c_N [S, N+1]."""
    q = None if draft.q is None else gather_tokens(draft.q, draft)
    ratios = ratio(gather_tokens(p, draft), q)
    c = torch.ones(p.shape[0], draft.nodes + 1, dtype=torch.float64, device=p.device)
    for i in range(draft.nodes):
        c[:, i + 1] = (c[:, i] * ratios[:, i]).clamp(max=1.0)
    return c


@dataclass(frozen=True)
class BlockRule:
    """The formulas above as an AcceptanceRule, for chains."""

    name: str = "block"
    lossless: bool = True
    needs_q: bool = True
    trees: bool = False

    def stop_law(self, p: Tensor, draft: Draft) -> Tensor:
        """[S, N+1] float64. Ragged batches: padding rows have probability 0."""
        c, length = _joint(p, draft), lengths(draft)
        law = torch.zeros_like(c)
        beyond = torch.ones_like(c[:, 0])  # probability that every later index fails
        for i in range(draft.nodes, 0, -1):
            h = torch.where(length > i, self._threshold(p, draft, c, i), c[:, i])
            h = torch.where(length < i, 0.0, h)
            law[:, i] = beyond * h
            beyond = beyond * (1.0 - h)
        law[:, 0] = beyond
        return law

    def _threshold(self, p: Tensor, draft: Draft, c: Tensor, i: int) -> Tensor:
        """h_i [S] for sequences longer than i; one row of laws at a time, never all N."""
        if i == draft.nodes:
            return c[:, i]
        q = None if draft.q is None else draft.q[:, i]
        excess = _excess(p[:, i], q, draft.tokens[:, i], c[:, i]).sum(-1).nan_to_num_(0.0)
        below = excess + (1.0 - c[:, i])  # in this order h_i never exceeds 1
        return torch.where(below > 0, excess / torch.where(below > 0, below, 1.0), 1.0)

    def residual(self, p: Tensor, draft: Draft, stop: Tensor) -> Tensor:
        """[S, V] float64: p at a fully accepted draft, else the excess at the stop row."""
        seqs = torch.arange(len(stop), device=stop.device)
        at_stop = p[seqs, stop].to(torch.float64)
        if not draft.nodes:
            return at_stop
        c = _joint(p, draft)[seqs, stop]
        token = draft.tokens[seqs, stop.clamp(max=draft.nodes - 1)]
        q = None if draft.q is None else draft.q[seqs, stop]
        mass = leftover(_excess(at_stop, q, token, c), at_stop)
        return torch.where((stop == lengths(draft)).unsqueeze(-1), at_stop, mass)
