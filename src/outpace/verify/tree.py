"""Topology of drafts: who follows whom, and how deep.

Rows as everywhere: row 0 is the frontier, row i + 1 is draft node i, so the parent row of node i is parent[i] + 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.types import Draft


def chain_parents(n: int) -> tuple[int, ...]:
    """Parents of a chain of n nodes: (-1, 0, 1, ...)."""
    return tuple(range(-1, n - 1))


def pad(drafts: Sequence[tuple[Sequence[int], Sequence[int]]], q: Tensor | None = None) -> Draft:
    """One (tokens, parents) pair per sequence -> Draft, -1 behind the shorter ones.

    ValueError if a pair is not a draft: lengths differ, a negative token, or a parent not before its node.
    """
    width = max((len(tokens) for tokens, _ in drafts), default=0)
    for tokens, parents in drafts:
        ordered = all(-1 <= parent < node for node, parent in enumerate(parents))
        if len(tokens) != len(parents) or not ordered or any(token < 0 for token in tokens):
            raise ValueError(f"not a draft: tokens {list(tokens)}, parents {list(parents)}")
    padded = [[[*row, *[-1] * (width - len(row))] for row in pair] for pair in drafts]
    both = torch.tensor(padded, dtype=torch.int64).reshape(len(drafts), 2, width)
    return Draft(tokens=both[:, 0].contiguous(), parent=both[:, 1].contiguous(), q=q)


def is_chain(draft: Draft) -> bool:
    """True if no sequence of the draft branches."""
    steps = torch.arange(-1, draft.nodes - 1, device=draft.parent.device)
    return bool(((draft.parent == steps) | (draft.tokens < 0)).all())


def lengths(draft: Draft) -> Tensor:
    """Draft nodes of every sequence, padding excluded: [S] int64."""
    return (draft.tokens >= 0).sum(-1)


def ancestors(parents: Sequence[int]) -> list[list[int]]:
    """For each node, the nodes on the way from the frontier to it, itself last."""
    lists: list[list[int]] = []
    for node, parent in enumerate(parents):
        lists.append([node] if parent < 0 else [*lists[parent], node])
    return lists


def depths(parents: Sequence[int]) -> list[int]:
    """Depth of each node: 1 for a child of the frontier. The frontier itself has depth 0."""
    result: list[int] = []
    for parent in parents:
        result.append(1 if parent < 0 else result[parent] + 1)
    return result


def path(draft: Draft, s: int, row: int) -> list[int]:
    """Nodes from the frontier to `row` in order; [] for row 0, and the last one is node row - 1."""
    parents = draft.parent[s].tolist()
    nodes: list[int] = []
    node = row - 1
    while node >= 0:
        nodes.append(node)
        node = parents[node]
    return nodes[::-1]


def children(draft: Draft, s: int, row: int) -> list[int]:
    """Nodes that follow `row`, in node order."""
    tokens, parents = draft.tokens[s].tolist(), draft.parent[s].tolist()
    return [node for node, parent in enumerate(parents) if parent == row - 1 and tokens[node] >= 0]
