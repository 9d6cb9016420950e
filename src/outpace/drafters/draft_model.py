"""A smaller model as drafter: it writes ahead with keys and values of its own, and the target checks."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outpace.drafters.base import DraftRequest, Needs, StepUpdate
from outpace.models.base import ForwardBatch, LanguageModel, SeqRows
from outpace.sampling.pipeline import LawRow, LogitsPipeline
from outpace.sampling.rng import Stream, uniform
from outpace.types import Draft, Sequence
from outpace.verify.coupled import coupled_token
from outpace.verify.rule import draw
from outpace.verify.tree import chain_parents, pad

CHUNK = 512  # rows of one catch-up pass: as many as the engine gives the target by default


@dataclass
class _Writing:
    """One sequence during a propose: tokens drafted so far, and the laws they were drawn from."""

    sequence: Sequence
    depth: int
    pending: int
    drafted: list[int] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)

    def law_row(self) -> LawRow:
        """Whose law the row behind the last token is."""
        return LawRow(self.sequence.params, self.sequence.tokens, self.sequence.prompt_len, tuple(self.drafted))


class DraftModel:
    """Drafter over a LanguageModel whose token ids are the target's.

    pipeline       turns the draft model's logits into laws; it must mask ids that the target does not have
    target_width   width of the target's laws, and so of q
    max_bytes      bound of the draft model's own KV store, None without one
    kept           ended texts whose rows this store keeps

    A sequence whose text the draft model cannot hold (its context, its store, an id beyond its vocabulary) gets an
    empty draft: it is decoded plainly.
    """

    name = "draft_model"
    needs = Needs(proposes_law=True)

    def __init__(
        self,
        model: LanguageModel,
        pipeline: LogitsPipeline,
        target_width: int,
        max_bytes: int | None = None,
        kept: int = 0,
    ) -> None:
        self._model, self._pipeline, self._width = model, pipeline, target_width
        self.store = model.new_store(max_bytes, kept)
        self._sequences: dict[int, Sequence] = {}  # those with rows
        self._rows: dict[int, int] = {}  # rows of each sequence's own tokens in its open reservation

    def propose(self, requests: Seq[DraftRequest]) -> Draft:
        """Catch up, then one token per pass for all sequences together."""
        writing = [self._open(request) for request in requests]
        active = [w for w in writing if w.depth > 0]
        self._catch_up(active)
        while active:
            law_rows = [w.law_row() for w in active]
            out = self._model.forward(self._batch(active, law_rows), self.store)
            if out.best is None:
                laws = self._pipeline.probs(out.logits.cpu(), law_rows)
                tokens = [self._choose(w, law) for w, law in zip(active, laws, strict=True)]
            else:
                tokens = out.best.tolist()
            for w, token in zip(active, tokens, strict=True):
                w.drafted.append(token)
            active = [w for w in active if len(w.drafted) < w.depth]
        return pad([(w.drafted, chain_parents(len(w.drafted))) for w in writing], self._claims(writing))

    def observe(self, updates: Seq[StepUpdate]) -> None:
        """Keep the rows of what was accepted. The last drafted token has no row: the next catch-up feeds it."""
        for update in updates:
            seq = update.sequence.id
            if seq in self._rows:
                own = self._rows.pop(seq)
                self.store.commit(seq, range(min(own + len(update.kept), self.store.reserved(seq))))

    def release(self, seq: int) -> None:
        """Forget a sequence and its rows."""
        self._rows.pop(seq, None)
        known = self._sequences.pop(seq, None)
        self.store.release(seq, known.tokens if known else ())

    def _open(self, request: DraftRequest) -> _Writing:
        """Reserve rows for the sequence's own new tokens and all drafted ones but the last."""
        sequence = request.sequence
        if sequence.id not in self._sequences:
            self._sequences[sequence.id] = sequence
            self.store.adopt(sequence.id, sequence.tokens[:-1])
        length = self.store.length(sequence.id)
        pending = len(sequence.tokens) - length
        depth = min(request.depth, self._model.spec.max_context - len(sequence.tokens) + 1)
        if any(token >= self._model.spec.vocab_size for token in sequence.tokens[length:]):
            depth = 0
        if depth < 1 or not self.store.reserve(sequence.id, pending + depth - 1):
            return _Writing(sequence, 0, pending)
        self._rows[sequence.id] = pending
        return _Writing(sequence, depth, pending)

    def _catch_up(self, active: Seq[_Writing]) -> None:
        """Feed long texts in chunks, until what is left fits one pass."""
        for w in active:
            first = self.store.length(w.sequence.id)
            while w.pending > CHUNK:
                tokens = tuple(w.sequence.tokens[first : first + CHUNK])
                self._model.forward(ForwardBatch([SeqRows(w.sequence.id, tokens, first)], []), self.store)
                first, w.pending = first + CHUNK, w.pending - CHUNK

    def _batch(self, active: Seq[_Writing], law_rows: Seq[LawRow]) -> ForwardBatch:
        """Own tokens not fed yet on the first pass, then the token drafted last."""
        rows: list[SeqRows] = []
        ends: list[int] = []
        for w in active:
            text = w.sequence.tokens
            tokens = (w.drafted[-1],) if w.drafted else tuple(text[len(text) - w.pending :])
            first = len(text) + len(w.drafted) - len(tokens)
            rows.append(SeqRows(w.sequence.id, tokens, first))
            ends.append((ends[-1] if ends else -1) + len(tokens))
        best_below = self._pipeline.n_real_tokens if self._pipeline.takes_largest(law_rows) else None
        return ForwardBatch(rows, ends, best_below=best_below)

    def _choose(self, w: _Writing, law: Tensor) -> int:
        """Coupled sequences read the noise that the target will read. The others draw, and claim the law as q; their
        noise is keyed by the step, not by the drafted token's position (see sampling.rng.Stream)."""
        sequence, i = w.sequence, len(w.drafted)
        position = len(sequence.tokens)
        if sequence.coupled:
            return coupled_token(law, sequence.key, position + i)
        w.laws.append(law)
        u = torch.tensor(uniform(sequence.key, position, Stream.DRAFT, i), dtype=torch.float64)
        return int(draw(law, u))

    def _claims(self, writing: Seq[_Writing]) -> Tensor | None:
        """q [S, N+1, width]: the laws that were drawn from, point masses where nothing is claimed. None if nobody
        draws: a whole q would be zeros."""
        if not any(w.laws for w in writing):
            return None
        nodes = max(len(w.drafted) for w in writing)
        q = torch.zeros(len(writing), nodes + 1, self._width)
        for s, w in enumerate(writing):
            for i, token in enumerate(w.drafted):
                if w.laws:
                    width = min(self._width, len(w.laws[i]))
                    q[s, i, :width] = w.laws[i][:width]
                else:
                    q[s, i, token] = 1.0
        return q
