"""One step of the engine: propose, forward, law, accept, take, commit, observe. The same for every drafter, rule and
batch. With an empty draft it is plain decoding; with a chunk that does not reach the frontier it is prefill."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from outpace.cache.base import KVStore
from outpace.drafters.base import Drafter, DraftRequest, StepUpdate
from outpace.engine.stopping import Emission, Output
from outpace.models.base import ForwardBatch, ForwardOutput, LanguageModel, SeqRows
from outpace.sampling.pipeline import LawRow, LogitsPipeline
from outpace.types import Draft, Sequence, TokenKind, TokenLogprob
from outpace.verify import coupled, verify
from outpace.verify.rule import AcceptanceRule
from outpace.verify.tree import chain_parents, children, pad, path


@dataclass(frozen=True)
class Machine:
    """What a step works with. `rule` serves unseeded sampling; coupled sequences always use the coupled rule."""

    model: LanguageModel
    store: KVStore
    pipeline: LogitsPipeline
    drafter: Drafter | None
    rule: AcceptanceRule


@dataclass(frozen=True)
class Work:
    """One sequence's part of a step: feed this many of tokens[kv.length:]; if that reaches the frontier, tokens come
    out, behind a draft of at most `depth` tokens. The scheduler has reserved feed + depth rows."""

    sequence: Sequence
    feed: int
    depth: int
    reaches_frontier: bool


@dataclass(frozen=True)
class StepReport:
    """What happened, for the meters: emissions by sequence id, how many tokens each took, and seconds."""

    emissions: Mapping[int, Emission]
    taken: Mapping[int, int]
    draft_seconds: float
    verify_seconds: float
    other_seconds: float


def step(machine: Machine, work: Seq[Work], outputs: Mapping[int, Output]) -> StepReport:
    """Run one step for all sequences in `work`; `outputs` (by sequence id) receive what comes out.

    Afterwards kv.length == len(tokens) - 1 for every sequence that reached its frontier.
    """
    start = time.perf_counter()
    ready = [w for w in work if w.reaches_frontier]
    draft = _propose(machine, ready)
    drafted = time.perf_counter()

    rows, logit_rows = _pack(machine.store, work, ready, draft)
    law_rows = _law_rows(ready, draft)
    best_below = machine.pipeline.n_real_tokens if machine.pipeline.takes_largest(law_rows) else None
    out = machine.model.forward(ForwardBatch(rows, logit_rows, best_below=best_below), machine.store)
    verified = time.perf_counter()

    emissions = _decide(machine, ready, draft, law_rows, out) if ready else {}
    taken: dict[int, int] = {}
    updates: list[StepUpdate] = []
    for w in work:
        keep = list(range(w.feed))
        if w.reaches_frontier:
            emission = emissions[w.sequence.id]
            n = taken[w.sequence.id] = outputs[w.sequence.id].take(emission)
            kept = emission.kept[: n - 1]  # the last token taken is the new frontier: its KV is not written yet
            keep += [w.feed + node for node in kept]
            updates.append(StepUpdate(w.sequence, kept, emission.tokens[:n]))
        machine.store.commit(w.sequence.id, keep)
    if machine.drafter is not None and updates:
        machine.drafter.observe(updates)
    end = time.perf_counter()
    return StepReport(emissions, taken, drafted - start, verified - drafted, end - verified)


def _propose(machine: Machine, ready: Seq[Work]) -> Draft:
    """One draft row per ready sequence; empty for those that want none."""
    asking = [s for s, w in enumerate(ready) if w.depth > 0]
    if machine.drafter is None or not asking:
        return pad([((), ()) for _ in ready])
    part = machine.drafter.propose([DraftRequest(ready[s].sequence, ready[s].depth) for s in asking])
    if len(asking) == len(ready):
        return part
    whole = pad([((), ()) for _ in ready])
    index = torch.tensor(asking)
    tokens = whole.tokens.new_full((len(ready), part.nodes), -1).index_copy_(0, index, part.tokens)
    parent = whole.parent.new_full((len(ready), part.nodes), -1).index_copy_(0, index, part.parent)
    q = None
    if part.q is not None:  # a sequence without a draft uses no row of q: zeros claim nothing
        q = part.q.new_zeros((len(ready), *part.q.shape[1:])).index_copy_(0, index, part.q)
    return Draft(tokens, parent, q)


def _pack(store: KVStore, work: Seq[Work], ready: Seq[Work], draft: Draft) -> tuple[list[SeqRows], list[int]]:
    """Pending tokens, then draft nodes, per sequence; logits are wanted from the frontier on."""
    nodes = {w.sequence.id: s for s, w in enumerate(ready)}
    rows: list[SeqRows] = []
    logit_rows: list[int] = []
    total = 0
    for w in work:
        first = store.length(w.sequence.id)
        tokens = tuple(w.sequence.tokens[first : first + w.feed])
        parents: tuple[int, ...] | None = None
        if w.reaches_frontier:
            s = nodes[w.sequence.id]
            n = draft.length(s)
            own = tuple(draft.parent[s, :n].tolist())
            tokens += tuple(draft.tokens[s, :n].tolist())
            if own != chain_parents(n):
                parents = (*chain_parents(w.feed), *(w.feed + p for p in own))
            logit_rows += range(total + w.feed - 1, total + w.feed + n)
        rows.append(SeqRows(w.sequence.id, tokens, first, parents))
        total += len(tokens)
    return rows, logit_rows


def _law_rows(ready: Seq[Work], draft: Draft) -> list[LawRow]:
    """Whose law each logit row is."""
    return [
        LawRow(
            w.sequence.params,
            w.sequence.tokens,
            w.sequence.prompt_len,
            tuple(int(draft.tokens[s, node]) for node in path(draft, s, row)),
        )
        for s, w in enumerate(ready)
        for row in range(draft.length(s) + 1)
    ]


def _decide(
    machine: Machine, ready: Seq[Work], draft: Draft, law_rows: Seq[LawRow], out: ForwardOutput
) -> dict[int, Emission]:
    """Laws for all rows at once, then the acceptance rule of each sequence. Where the model gave the best token of each
    row, that is the law."""
    counts = [draft.length(s) + 1 for s in range(len(ready))]
    firsts = [0, *accumulate(counts)]
    if out.best is None:
        logits = out.logits.cpu()  # laws are CPU work
        laws = machine.pipeline.probs(logits, law_rows)
        # One sequence needs no padding: at a vocabulary of 150k the copy would cost as much as the laws.
        parts = list(torch.split(laws, counts))
        p = laws.unsqueeze(0) if len(parts) == 1 else torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
        stops, extras = _accept(machine.rule, p, draft, [w.sequence for w in ready])
    else:
        logits, best = out.logits, out.best.tolist()
        found = coupled.follow(draft, lambda s, row, _: best[firsts[s] + row])
        stops, extras = found[0].tolist(), found[1].tolist()
    emissions: dict[int, Emission] = {}
    for s, w in enumerate(ready):
        stop = stops[s]
        emission = _emission(machine.pipeline, w, draft, s, (stop, extras[s], logits[firsts[s] :]))
        dead_end = machine.pipeline.dead_end(law_rows[firsts[s] + stop])
        emissions[w.sequence.id] = emission if dead_end is None else replace(emission, dead_end=dead_end)
    return emissions


def _accept(rule: AcceptanceRule, p: Tensor, draft: Draft, sequences: Seq[Sequence]) -> tuple[list[int], list[int]]:
    """Stop row and extra token per sequence. Seeded and greedy sequences use the coupled rule, the others `rule`."""
    stops, extras = [0] * len(sequences), [0] * len(sequences)
    for is_coupled in (True, False):
        members = [s for s, sequence in enumerate(sequences) if sequence.coupled == is_coupled]
        if not members:
            continue
        index = torch.tensor(members)
        q = None if draft.q is None or is_coupled else draft.q[index]
        part = Draft(draft.tokens[index], draft.parent[index], q)
        keys = [sequences[s].key for s in members]
        positions = [len(sequences[s].tokens) for s in members]
        laws = p if len(members) == len(sequences) else p[index]
        found = coupled.emit(laws, part, keys, positions) if is_coupled else verify(rule, laws, part, keys, positions)
        for s, stop, extra in zip(members, found[0].tolist(), found[1].tolist(), strict=True):
            stops[s], extras[s] = stop, extra
    return stops, extras


def _emission(pipeline: LogitsPipeline, work: Work, draft: Draft, s: int, decided: tuple[int, int, Tensor]) -> Emission:
    stop, extra, logits = decided
    kept = tuple(path(draft, s, stop))
    tokens = (*(int(draft.tokens[s, node]) for node in kept), extra)
    own = TokenKind.CORRECTION if children(draft, s, stop) else TokenKind.BONUS
    if draft.length(s) == 0:
        own = TokenKind.PLAIN
    rows = (0, *(node + 1 for node in kept))  # the row that decided each token

    def logprob(i: int) -> TokenLogprob:
        return pipeline.logprobs(logits[rows[i]], tokens[i], work.sequence.params.logprobs or 0)

    return Emission(tokens, (*[TokenKind.ACCEPTED] * len(kept), own), kept, draft.length(s), logprob)
