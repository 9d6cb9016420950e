"""The only way logits become a law: draft rows, verified rows and the bonus row alike.

Order of stages: padded vocabulary tail, min_tokens, logit_bias, repetition, presence and frequency penalties, any
further edit, the grammar of a constraint, temperature, top-k, top-p, min-p. Each row is computed by itself, in an order
of summation that depends on nothing but the row: its law has the same bits alone, in a batch, and on any thread count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outpace.errors import ParameterError
from outpace.sampling.constrained import GrammarMask
from outpace.sampling.penalties import (
    Edit,
    Frequency,
    History,
    Ids,
    LogitBias,
    MinTokens,
    Repetition,
    RowContext,
    Scores,
)
from outpace.types import SamplingParams, TokenLogprob

Law = npt.NDArray[np.float64]

# Probabilities above which nucleus candidates are looked for, each with at most 1 / floor of them; 0 takes all.
_FLOORS = (*(2.0**-bits for bits in range(9, 31, 3)), 0.0)


@dataclass(frozen=True)
class LawRow:
    """Whose law a row of logits is.

    tokens      the sequence so far, prompt included (frontier last)
    prompt_len  how many of these are prompt
    path        draft tokens between the frontier and this row: () for row 0. They count as output for penalties,
                and a grammar goes on behind them
    """

    params: SamplingParams
    tokens: Sequence[int]
    prompt_len: int
    path: tuple[int, ...] = ()

    def context(self) -> RowContext:
        """What the stages are given of it."""
        return RowContext(self.params, History(self.tokens, self.prompt_len), self.path)


class LogitsPipeline:
    """Turns logits into laws for one vocabulary.

    vocab_size     width of the model's logits
    eos_ids        ids that end a text
    n_real_tokens  ids from here on are padding of the output layer and get probability 0
    edits          further stages, applied after the penalties and before the temperature
    grammar        the stage of constrained requests; without one, they are refused
    """

    def __init__(
        self,
        vocab_size: int,
        eos_ids: frozenset[int],
        n_real_tokens: int | None = None,
        edits: Iterable[Edit] = (),
        grammar: GrammarMask | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.n_real_tokens = min(vocab_size, n_real_tokens or vocab_size)
        self.grammar = grammar
        last: tuple[Edit, ...] = () if grammar is None else (grammar,)
        self.edits: tuple[Edit, ...] = (MinTokens(eos_ids), LogitBias(), Repetition(), Frequency(), *edits, *last)

    def check(self, params: SamplingParams) -> None:
        """ParameterError if the request names a token id that this vocabulary does not have, or a constraint that
        cannot be used. A constraint is compiled here (see Grammars.compile)."""
        for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            for token in ids:
                if token >= self.n_real_tokens:
                    last = self.n_real_tokens - 1
                    raise ParameterError(name, f"token id {token} does not exist; this model's ids end at {last}")
        if params.constraint is not None and self.grammar is None:
            raise ParameterError("constraint", "this engine was set up without grammars, so it takes no constraints")
        if self.grammar is not None:
            self.grammar.check(params)

    def follow(self, params: SamplingParams, tokens: Sequence[int]) -> None:
        """A sequence begins: keep what its constraint needs until `forget` is called with the same list."""
        if self.grammar is not None:
            self.grammar.follow(params, tokens)

    def forget(self, tokens: Sequence[int]) -> None:
        """A sequence ended."""
        if self.grammar is not None:
            self.grammar.forget(tokens)

    def dead_end(self, row: LawRow) -> str | None:
        """Why the request's constraint allows no token at this row, None if it does. The law there means nothing."""
        return None if self.grammar is None else self.grammar.dead_end(row.context())

    def takes_largest(self, rows: Iterable[LawRow]) -> bool:
        """Whether the law of each row is one-hot on the first largest of its raw logits below `n_real_tokens`, so that
        nobody needs the logits: temperature 0, no edit of them, no log-probabilities asked for."""
        return all(
            row.params.greedy
            and row.params.logprobs is None
            and not any(edit.wants(context) for context in [row.context()] for edit in self.edits)
            for row in rows
        )

    def probs(self, logits: Tensor, rows: Sequence[LawRow]) -> Tensor:
        """logits [R, V] float32 -> laws [R, V] float32, on the device of the logits.

        Each row sums to 1 within 1e-6 and is exactly 0 off its support; temperature 0 is one-hot on the first maximum.
        NaN counts as -inf. A row without any finite logit is uniform over the real tokens, or those that a constraint
        allows; where it allows none (`dead_end`), the law means nothing.
        """
        scores = logits.detach().to("cpu", torch.float32).numpy()
        out = np.zeros(scores.shape, dtype=np.float32)
        histories: dict[int, History] = {}
        for r, row in enumerate(rows):
            history = histories.setdefault(id(row.tokens), History(row.tokens, row.prompt_len))
            ids, law = self._law(scores[r, : self.n_real_tokens], RowContext(row.params, history, row.path))
            out[r, ids] = law
        return torch.from_numpy(out).to(logits.device)

    def logprobs(self, logits: Tensor, token: int, n: int) -> TokenLogprob:
        """Log-probability of `token` under the raw logits [V], before any stage, and the n best (ties: lowest id)."""
        row = logits.detach().to("cpu", torch.float32)[: self.n_real_tokens]
        logs = torch.log_softmax(row, -1, dtype=torch.float64).numpy()
        best = _largest(logs, n) if n else ()
        return TokenLogprob(token, float(logs[token]), tuple((int(i), float(logs[i])) for i in best))

    def _law(self, scores: Scores, row: RowContext) -> tuple[Ids | slice | int, Law | float]:
        """Support and probabilities of one row."""
        wanted = [edit for edit in self.edits if edit.wants(row)]
        if wanted:
            scores = scores.copy()
        for edit in wanted:
            edit.apply(scores, row)
        first = int(scores.argmax())  # the first NaN, if there is one
        if not np.isfinite(scores[first]):
            scores = self._repaired(scores, row)
            first = int(scores.argmax())
        return (first, 1.0) if row.params.greedy else _sampled(scores, row.params)

    def _repaired(self, scores: Scores, row: RowContext) -> Scores:
        scores = _repaired(scores)
        if self.grammar is not None and self.grammar.wants(row):
            self.grammar.apply(scores, row)
            scores = _repaired(scores)
        return scores


def _repaired(scores: Scores) -> Scores:
    """NaN becomes -inf; +inf shares all the mass; nothing finite left becomes uniform."""
    scores = np.where(np.isnan(scores), np.float32(-np.inf), scores)
    top = scores.max()
    if top == np.inf:
        return np.where(scores == np.inf, np.float32(0), np.float32(-np.inf))
    return np.zeros_like(scores) if top == -np.inf else scores


def _sampled(scores: Scores, params: SamplingParams) -> tuple[Ids | slice, Law]:
    """Temperature, then the filters. `ids` is None while every token is still in."""
    ids: Ids | None = None
    if 0 < params.top_k < len(scores):
        ids = np.sort(_largest(scores, params.top_k))
        scores = scores[ids]
    law = _softmax(scores, params.temperature)
    kept = _nucleus(law, params.top_p) if params.top_p < 1 else None
    if params.min_p > 0:
        likely = np.flatnonzero(law >= params.min_p * law.max())
        kept = likely if kept is None else np.intersect1d(kept, likely, assume_unique=True)
    if kept is None:
        return (slice(0, len(law)) if ids is None else ids), law
    law = law[kept]
    # numpy sums in an order fixed by the length, so the same support gives the same bits.
    return (kept if ids is None else ids[kept]), law / law.sum()


def _softmax(scores: Scores, temperature: float) -> Law:
    """float64: a float32 sum over 150k tokens is off by up to 5e-6. The maximum is taken off before dividing, so a tiny
    temperature cannot overflow."""
    shifted = scores.astype(np.float64)
    shifted -= shifted.max()
    with np.errstate(over="ignore"):  # a minuscule temperature may push losers to -inf, which is what they should be
        shifted /= temperature
    law: Law = torch.softmax(torch.from_numpy(shifted), -1).numpy()
    return law


def _nucleus(law: Law, top_p: float) -> Ids:
    """The smallest set of most likely tokens (ties: lowest id first) whose mass reaches top_p, in that order.

    Tokens above a floor are a prefix of the full descending order, so sorting only them gives the same set as sorting
    everything whenever their mass suffices.
    """
    candidates = np.empty(0, dtype=np.int64)
    for floor in _FLOORS:
        candidates = np.flatnonzero(law > floor)
        if law[candidates].sum() >= top_p + 1e-9:  # a margin for the order of summation, so that the cut is inside
            break
    order = candidates[np.argsort(-law[candidates], kind="stable")]
    return order[: int(np.searchsorted(np.cumsum(law[order]), top_p)) + 1]


def _largest(values: npt.NDArray[np.floating], k: int) -> Ids:
    """Ids of the k largest values, descending, ties lowest id first; -inf never counts."""
    if k < len(values):
        threshold = torch.from_numpy(values).topk(k).values[-1].item()
        candidates = np.flatnonzero((values >= threshold) & (values > -np.inf))
    else:
        candidates = np.flatnonzero(values > -np.inf)
    return candidates[np.argsort(-values[candidates], kind="stable")][:k]
