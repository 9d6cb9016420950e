"""The drafter-invariant rule (Daliri, Musco, Suresh 2024): target and drafter read the same noise.

The target's token at a position is argmax_x p(x) / e(x), with e exponential noise that is a function of (key, position,
x). It has law p whatever was drafted, and the draft is accepted as far as it agrees: so the text is a function of
the key and the target alone. A drafter that takes argmax_x q(x) / e(x) agrees with probability at least
(1 - TV) / (1 + TV). A one-hot law makes it exact matching.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outpace.sampling.rng import exponential
from outpace.types import Draft


def coupled_token(law: Tensor, key: int, position: int) -> int:
    """The token that this noise picks from a law [V]: argmax law(x) / e(x), ties to the lowest id.

    position is the absolute index, in the sequence, of the token being chosen. Only tokens with law > 0 are looked at.
    """
    probabilities = law.detach().cpu().numpy()
    support = (probabilities > 0).nonzero()[0]
    if not len(support):
        raise ValueError("a law without any positive probability has no token")
    if len(support) == 1:
        return int(support[0])
    noise = exponential(key, position, support)
    return int(support[(probabilities[support] / noise).argmax()])


def emit(p: Tensor, draft: Draft, keys: Sequence[int], positions: Sequence[int]) -> tuple[Tensor, Tensor]:
    """p [S, N+1, V], one key and position per sequence -> (stop row [S] int64, extra token [S] int64).

    positions[s] is the index of the token that row 0 decides, that is, the length of the sequence. Only rows on
    the accepted path are evaluated. Emission = tokens on the path to the stop row, then the extra token.
    """
    return follow(draft, lambda s, row, depth: coupled_token(p[s, row], keys[s], positions[s] + depth))


def follow(draft: Draft, choose: Callable[[int, int, int], int]) -> tuple[Tensor, Tensor]:
    """Stop row [S] and extra token [S] where the target's token behind row `row` of sequence s, `depth` rows behind the
    frontier, is choose(s, row, depth), whatever was drafted."""
    nodes = zip(draft.tokens.tolist(), draft.parent.tolist(), strict=True)
    walks = [_walk(s, tokens, parents, choose) for s, (tokens, parents) in enumerate(nodes)]
    both = torch.tensor(walks, dtype=torch.int64).reshape(-1, 2)
    return both[:, 0].clone(), both[:, 1].clone()


def _walk(
    s: int, tokens: Sequence[int], parents: Sequence[int], choose: Callable[[int, int, int], int]
) -> tuple[int, int]:
    row = depth = 0
    while True:
        token = choose(s, row, depth)
        child = _child(tokens, parents, row, token)
        if child is None:
            return row, token
        row, depth = child + 1, depth + 1


def _child(tokens: Sequence[int], parents: Sequence[int], row: int, token: int) -> int | None:
    for node, (drafted, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent == row - 1 and drafted == token:
            return node
    return None
