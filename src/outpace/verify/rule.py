"""What an acceptance rule is, and the one place that spends verification randomness.

Symbols: p [S, N+1, V] target laws, row 0 = frontier, row i+1 = draft node i; q [S, N+1, V] or None, q[s, r] = the law
from which the children of row r were drawn. A stop row r means: the path from the frontier to row r is accepted and
the extra token is drawn from the residual at row r.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from outpace.types import Draft


class AcceptanceRule(Protocol):
    """Deterministic and pure: laws in, laws out. That is what makes a rule provable by enumeration."""

    @property
    def name(self) -> str: ...

    @property
    def lossless(self) -> bool: ...

    @property
    def needs_q(self) -> bool: ...

    @property
    def trees(self) -> bool: ...

    def stop_law(self, p: Tensor, draft: Draft) -> Tensor:
        """[S, N+1] float64, rows sum to 1: the probability of stopping at each row. Padding rows have probability 0."""
        ...

    def residual(self, p: Tensor, draft: Draft, stop: Tensor) -> Tensor:
        """[S, V] float64, the law of the extra token given the stop row [S] int64."""
        ...


def draw(law: Tensor, u: Tensor) -> Tensor:
    """Inverse-CDF draw. law [..., V] non-negative (need not sum to 1), u [...] in [0, 1) -> [...] int64.

    Never returns a token of probability 0, whatever u is (0.0 exactly, or rounding at the top).
    """
    mass = law.cumsum(-1, dtype=torch.float64)
    total = mass[..., -1:].contiguous()
    target = u.to(torch.float64).unsqueeze(-1) * total
    index = torch.searchsorted(mass, target, right=True)
    # Rounding can push the target to the total: then the token that reaches the total is the answer.
    return torch.minimum(index, torch.searchsorted(mass, total)).squeeze(-1)
