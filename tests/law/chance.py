"""Tools for tests that draw: one chi-square test, and the whole speculative loop on tables, for many keys at once."""

from collections.abc import Sequence

import numpy as np
import torch
from scipy.stats import chi2
from torch import Tensor

from outpace.sampling.rng import Stream, uniform, uniforms
from outpace.types import Draft
from outpace.verify.rule import draw
from outpace.verify.tree import chain_parents

ALPHA = 0.001


def p_value(observed: Sequence[float], expected: Sequence[float]) -> float:
    """Chi-square of counts against probabilities; one count in a cell of probability 0 fails outright."""
    counts, law = np.asarray(observed, dtype=float), np.asarray(expected, dtype=float)
    if counts[law == 0].sum() > 0:
        return 0.0
    if (law > 0).sum() == 1:
        return 1.0
    mean = counts.sum() * law[law > 0]
    return float(chi2.sf(((counts[law > 0] - mean) ** 2 / mean).sum(), len(mean) - 1))


def histogram(tokens: Tensor, vocabulary: int) -> list[int]:
    return torch.bincount(tokens, minlength=vocabulary).tolist()


def emit_once(rule, p: Tensor, draft: Draft, keys: range, position: int = 0) -> tuple[Tensor, Tensor]:
    """`verify.verify` for a whole batch in one go (test_rules shows that they agree): stop rows and extra tokens."""
    at = [position] * len(keys)
    stop = draw(rule.stop_law(p, draft), uniforms(keys, at, Stream.STOP))
    return stop, draw(rule.residual(p, draft, stop), uniforms(keys, at, Stream.EXTRA))


def speculate(rule, p, q, keys: range, length: int, k: int, by_step: bool = True) -> list[tuple[int, ...]]:
    """Texts of the real loop, one per key: draft k tokens from q, verify, repeat until `length` tokens are there.

    by_step False plants a fault: a draft's number is keyed by the drafted token's own position.
    """
    texts: list[tuple[int, ...]] = [()] * len(keys)
    while min(map(len, texts)) < length:
        contexts, claims, targets = list(texts), [], []
        for i in range(k):
            claims.append([q(context) for context in contexts])
            targets.append([p(context) for context in contexts])
            where = [(len(text), i) if by_step else (len(text) + i, 0) for text in texts]
            u = [uniform(key, at, Stream.DRAFT, index) for key, (at, index) in zip(keys, where, strict=True)]
            drawn = draw(torch.tensor(claims[-1], dtype=torch.float64), torch.tensor(u, dtype=torch.float64)).tolist()
            contexts = [(*context, token) for context, token in zip(contexts, drawn, strict=True)]
        targets.append([p(context) for context in contexts])
        claims.append(targets[-1])
        tokens = torch.tensor([c[len(t) :] for c, t in zip(contexts, texts, strict=True)])
        parents = torch.tensor([chain_parents(k)] * len(keys))
        target, claim = (torch.tensor(x, dtype=torch.float64).transpose(0, 1) for x in (targets, claims))
        draft = Draft(tokens, parents, claim)
        positions = [len(text) for text in texts]
        stop = draw(rule.stop_law(target, draft), uniforms(keys, positions, Stream.STOP))
        extra = draw(rule.residual(target, draft, stop), uniforms(keys, positions, Stream.EXTRA))
        texts = [
            (*context[: len(text) + kept], token)
            for context, text, kept, token in zip(contexts, texts, stop.tolist(), extra.tolist(), strict=True)
        ]
    return [text[:length] for text in texts]
