"""Exact enumeration of what a rule emits: vocabulary 3, every proposal, every stop row, every extra token, float64.

A `Proposal` is one thing the drafter may propose, with its probability. All proposals of a drafter form one batch, so
enumeration also exercises padding. The emission is completed by the target alone, and compared with the target's law.
"""

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.types import Draft
from outpace.verify.tree import chain_parents, pad

V = 3
PAIRS = range(40)
Prefix = tuple[int, ...]
Table = Callable[[Prefix], list[float]]


def table(seed: int, vocabulary: int = V) -> Table:
    """A fixed random law for every prefix."""
    source, memo = random.Random(seed), {}

    def law(prefix: Prefix) -> list[float]:
        if prefix not in memo:
            raw = [source.random() ** 3 + 1e-3 for _ in range(vocabulary)]
            memo[prefix] = [x / sum(raw) for x in raw]
        return memo[prefix]

    return law


@dataclass(frozen=True)
class Proposal:
    weight: float
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    q: tuple[tuple[float, ...], ...] | None = None  # one law per row; None: no claim


def prefix_of(proposal: Proposal, row: int) -> Prefix:
    nodes, node = [], row - 1
    while node >= 0:
        nodes.append(proposal.tokens[node])
        node = proposal.parents[node]
    return tuple(reversed(nodes))


def claimed(proposal: Proposal, q: Table) -> Proposal:
    rows = tuple(tuple(q(prefix_of(proposal, row))) for row in range(len(proposal.tokens) + 1))
    return Proposal(proposal.weight, proposal.tokens, proposal.parents, rows)


def sampled_chains(q: Table, n: int, weight: float = 1.0) -> Iterator[Proposal]:
    """Every chain of n tokens drawn from q."""
    for tokens in itertools.product(range(V), repeat=n):
        likelihood = math.prod(q(tokens[:i])[tokens[i]] for i in range(n))
        yield claimed(Proposal(weight * likelihood, tokens, chain_parents(n)), q)


def best_chain(q: Table, n: int) -> Proposal:
    """The arg max chain of q, claiming nothing."""
    tokens: Prefix = ()
    for _ in range(n):
        tokens += (max(range(V), key=lambda t: q(tokens)[t]),)
    return Proposal(1.0, tokens, chain_parents(n))


def _siblings(law: Sequence[float]) -> Iterator[tuple[tuple[int, int], float]]:
    for first, second in itertools.permutations(range(V), 2):
        yield (first, second), law[first] * law[second] / (1 - law[first])


def sampled_trees(q: Table) -> Iterator[Proposal]:
    """Depth 2, two children per node, drawn without replacement from q."""
    for (a, b), w in _siblings(q(())):
        for (c, d), wa in _siblings(q((a,))):
            for (e, f), wb in _siblings(q((b,))):
                yield claimed(Proposal(w * wa * wb, (a, b, c, d, e, f), (-1, -1, 0, 0, 1, 1)), q)


def top_tree(q: Table) -> Proposal:
    """Depth 2, the two most likely children of every node, claiming nothing."""

    def top(prefix: Prefix) -> list[int]:
        return sorted(range(V), key=lambda t: -q(prefix)[t])[:2]

    a, b = top(())
    return Proposal(1.0, (a, b, *top((a,)), *top((b,))), (-1, -1, 0, 0, 1, 1))


def as_batch(proposals: Sequence[Proposal], p: Table) -> tuple[Tensor, Draft]:
    draft = pad([(x.tokens, x.parents) for x in proposals])
    shape = (len(proposals), draft.nodes + 1, V)
    target, q = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    for s, proposal in enumerate(proposals):
        for row in range(len(proposal.tokens) + 1):
            target[s, row] = torch.tensor(p(prefix_of(proposal, row)), dtype=torch.float64)
            if proposal.q is not None:
                q[s, row] = torch.tensor(proposal.q[row], dtype=torch.float64)
    carries = any(x.q is not None for x in proposals)
    return target, Draft(draft.tokens, draft.parent, q if carries else None)


def enumerate_rule(rule, p: Table, proposals: Sequence[Proposal], depth: int) -> tuple[float, float]:
    """(largest error of the law of depth + 1 tokens, mean accepted draft tokens)."""
    target, draft = as_batch(proposals, p)
    law = rule.stop_law(target, draft)
    assert (law.sum(-1) - 1).abs().max() < 1e-12 and (law >= 0).all()
    begun: dict[Prefix, float] = defaultdict(float)
    accepted = 0.0
    for row in range(draft.nodes + 1):
        residual = rule.residual(target, draft, torch.full((len(proposals),), row)).tolist()
        for proposal, stop, extra in zip(proposals, law[:, row].tolist(), residual, strict=True):
            if row > len(proposal.tokens):
                assert stop == 0.0
                continue
            prefix = prefix_of(proposal, row)
            accepted += proposal.weight * stop * len(prefix)
            for token in range(V):
                begun[(*prefix, token)] += proposal.weight * stop * extra[token]
    emitted: dict[Prefix, float] = defaultdict(float)
    for prefix, mass in begun.items():
        _complete(emitted, p, prefix, mass, depth)
    return max(abs(_likelihood(p, x) - emitted[x]) for x in itertools.product(range(V), repeat=depth + 1)), accepted


def _complete(emitted: dict[Prefix, float], p: Table, prefix: Prefix, mass: float, depth: int) -> None:
    if mass <= 0:
        return
    for tail in itertools.product(range(V), repeat=depth + 1 - len(prefix)):
        emitted[prefix + tail] += mass * _likelihood(p, prefix + tail) / _likelihood(p, prefix)


def _likelihood(p: Table, tokens: Prefix) -> float:
    return math.prod(p(tokens[:i])[tokens[i]] for i in range(len(tokens)))
