"""Stand-ins that make the engine's work visible: a model whose law depends on three tokens, read back from its own KV
store, drafters of known quality, and faults to plant."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import Tensor

import outpace.engine.local as local
from outpace.cache.base import KVStore
from outpace.cache.slots import SlotStore
from outpace.drafters.base import Drafter, DraftRequest, Needs, StepUpdate
from outpace.drafters.draft_model import DraftModel
from outpace.engine.local import Limits, LocalEngine
from outpace.engine.policy import FixedDepth, Policy
from outpace.engine.step import Machine, StepReport, Work, step
from outpace.engine.stopping import Output
from outpace.models.base import ForwardBatch, ForwardOutput, OutputIds
from outpace.sampling.pipeline import LogitsPipeline
from outpace.text.detokenizer import Detokenizer
from outpace.types import Delta, Draft, FinishReason, Request, RequestStats, SamplingParams, TokenKind
from outpace.verify import choose_rule
from outpace.verify.tree import pad

VOCAB = 12
EOS = 0
ORDER = 3  # tokens that decide the next one


class TableModel:
    """LanguageModel whose logits are a fixed function of the last three tokens of a row's path, taken from the KV
    store: a stale, missing or misplaced row changes what it says.

    wrong  share of contexts in which it follows another table: with the same `seed`, a drafter of known agreement
    """

    def __init__(self, seed: int = 0, wrong: float = 0.0, context: int = 4096, scale: float = 2.0) -> None:
        self.seed, self.wrong, self.scale = seed, wrong, scale
        self.spec = SimpleNamespace(vocab_size=VOCAB, max_context=context)
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.forwards = 0
        self._memory: dict[tuple[int, ...], Tensor] = {}

    def new_store(self, max_bytes: int | None = None, kept: int = 0) -> SlotStore:
        return SlotStore(1, 1, 1, torch.float32, "cpu", max_bytes, kept)

    def logits(self, context: Sequence[int]) -> Tensor:
        key = tuple(context[-ORDER:])
        if key not in self._memory:
            chance = random.Random(f"{self.seed} {key}")
            own = [chance.gauss(0, self.scale) for _ in range(VOCAB)]
            if chance.random() < self.wrong:
                own = [chance.gauss(0, self.scale) for _ in range(VOCAB)]
            self._memory[key] = torch.tensor(own)
        return self._memory[key]

    def forward(self, batch: ForwardBatch, kv: KVStore) -> ForwardOutput:
        self.forwards += 1
        found: list[Tensor] = []
        for rows in batch.rows:
            stamps = torch.tensor(rows.tokens, dtype=torch.float32).reshape(-1, 1, 1)
            kv.write(0, rows.seq, rows.kv_first, stamps, stamps)
            held = kv.view(0, rows.seq)[0].reshape(-1).long().tolist()
            parents = rows.parents if rows.parents is not None else range(-1, len(rows.tokens) - 1)
            paths: list[list[int]] = []
            for i, parent in enumerate(parents):
                before = held[: rows.kv_first] if parent < 0 else paths[parent]
                paths.append([*before, held[rows.kv_first + i]])
                found.append(self.logits(paths[-1]))
        picked = [found[r] for r in batch.logit_rows]
        return ForwardOutput.of(torch.stack(picked) if picked else torch.empty(0, VOCAB), batch)


class ByteCodec:
    """Token i is the letter chr(97 + i); EOS is not shown."""

    eos_ids = frozenset({EOS})
    special_ids = frozenset({EOS})
    vocab_size = VOCAB
    has_chat_template = False

    def encode(self, text: str) -> list[int]:
        return [ord(char) - 97 for char in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(97 + i) for i in ids if i != EOS)

    def token_bytes(self, token: int) -> bytes:
        return chr(97 + token).encode()

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(lambda token: b"" if token == EOS else self.token_bytes(token))


@dataclass
class ScriptedDrafter:
    """Proposes `script(tokens, depth)`: (tokens, parents) per sequence; parents None is a chain. Keeps what it saw."""

    script: Callable[[Sequence[int], int], tuple[Sequence[int], Sequence[int] | None]]
    needs: Needs = field(default_factory=Needs)
    name: str = "scripted"
    depths: list[int] = field(default_factory=list)
    updates: list[StepUpdate] = field(default_factory=list)
    released: list[int] = field(default_factory=list)

    def propose(self, requests: Sequence[DraftRequest]) -> Draft:
        rows = []
        for request in requests:
            self.depths.append(request.depth)
            tokens, parents = self.script(request.sequence.tokens, request.depth)
            rows.append((tokens, range(-1, len(tokens) - 1) if parents is None else parents))
        return pad(rows)

    def observe(self, updates: Sequence[StepUpdate]) -> None:
        self.updates += updates

    def release(self, seq: int) -> None:
        self.released.append(seq)


def mixed_drafter(model: TableModel) -> ScriptedDrafter:
    """Right two times in three about the greedy token, whatever the depth."""

    def script(tokens: Sequence[int], depth: int) -> tuple[list[int], None]:
        text = list(tokens)
        while len(text) < len(tokens) + depth:
            best = int(model.logits(text).argmax())
            text.append((best + 1) % VOCAB if hash(tuple(text[-4:])) % 3 == 0 else best)
        return text[len(tokens) :], None

    return ScriptedDrafter(script)


def tree_drafter(model: TableModel) -> ScriptedDrafter:
    """The two likeliest children of the frontier, the second one first, and a child of each."""

    def script(tokens: Sequence[int], depth: int) -> tuple[list[int], list[int]]:
        best, second = model.logits(tokens).topk(2).indices.tolist()
        if depth < 4:
            return [second], [-1]
        below = [int(model.logits([*tokens, first]).argmax()) for first in (second, best)]
        return [second, best, *below], [-1, -1, 0, 1]

    return ScriptedDrafter(script, Needs(tree=True))


def draft_model(wrong: float = 1 / 3, seed: int = 0) -> DraftModel:
    """The real drafter over a table that differs from the target's in a share of its contexts."""
    return DraftModel(TableModel(seed, wrong), pipeline(), VOCAB)


class CutTable(TableModel):
    """A table that knows some tokens only (draft_vocab)."""

    def __init__(self, *ids: int, seed: int = 0, wrong: float = 1 / 3) -> None:
        super().__init__(seed, wrong)
        self.outputs = OutputIds(torch.tensor(ids), VOCAB)

    def logits(self, context: Sequence[int]) -> Tensor:
        return self.outputs.spread(super().logits(context)[None, self.outputs.ids])[0]


def pipeline() -> LogitsPipeline:
    return LogitsPipeline(VOCAB, ByteCodec.eos_ids)


class NoRollbackStore(SlotStore):
    """Planted fault: rejected rows stay where accepted ones go, only the length is right."""

    def commit(self, seq: int, keep: Sequence[int]) -> None:
        slot = self._slots[seq]
        dropped = slot.reserved - len(keep)
        rows = slot.length + slot.reserved
        if dropped:  # as if the next write started behind the rejected rows
            slot.buffer[:, :, :, slot.length : rows - dropped] = slot.buffer[
                :, :, :, slot.length + dropped : rows
            ].clone()
        super().commit(seq, range(len(keep)))


class StaleDraft(DraftModel):
    """Planted fault: the row of a rejected token stands where the last accepted one belongs."""

    def observe(self, updates: Sequence[StepUpdate]) -> None:
        for update in updates:
            seq = update.sequence.id
            if seq in self._rows:
                keep = min(self._rows.pop(seq) + len(update.kept), self.store.reserved(seq))
                last = [keep] if keep < self.store.reserved(seq) else [keep - 1]
                self.store.commit(seq, [*range(keep - 1), *last])


class ArgmaxClaimsSoftmax(DraftModel):
    """Planted fault: it proposes the likeliest token and claims to have drawn it."""

    def _choose(self, w, law):  # type: ignore[no-untyped-def]
        w.laws.append(law)
        return int(law.argmax())


class PathBlindPipeline(LogitsPipeline):
    """Planted fault: penalties do not see the draft tokens before a row."""

    def probs(self, logits, rows):  # type: ignore[no-untyped-def]
        blind = [type(row)(row.params, row.tokens, row.prompt_len) for row in rows]
        return super().probs(logits, blind)


def contents(store: KVStore, seq: int) -> list[int]:
    """Tokens whose rows are committed, of a store written by a TableModel."""
    held = store.view(0, seq)[0].reshape(-1).long().tolist() if store.length(seq) else []
    return held[: store.length(seq)]


def checked_step(machine: Machine, work: Sequence[Work], outputs: dict[int, Output]) -> StepReport:
    """`step`, and after it the invariants of design.md section 8.3 on target and drafter stores."""
    report = step(machine, work, outputs)
    stores = [machine.store] + ([machine.drafter.store] if hasattr(machine.drafter, "store") else [])
    for w in work:
        sequence = w.sequence
        if w.reaches_frontier:
            length = machine.store.length(sequence.id)
            assert length == len(sequence.tokens) - 1, f"{length} rows for {len(sequence.tokens)} tokens"
        for store in stores:
            assert store.reserved(sequence.id) == 0, "a reservation outlived its step"
            held = contents(store, sequence.id)
            assert held == sequence.tokens[: len(held)], f"rows {held} for tokens {sequence.tokens}"
    for store in stores:
        store.check_integrity()
    return report


@dataclass
class Answer:
    """A finished request."""

    tokens: tuple[int, ...] = ()
    text: str = ""
    kinds: tuple[TokenKind, ...] = ()
    logprobs: tuple = ()
    finish_reason: FinishReason | None = None
    stats: RequestStats = field(default_factory=RequestStats)
    deltas: list[Delta] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        self.tokens += delta.tokens
        self.text += delta.text
        self.kinds += delta.kinds
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason
        self.stats = delta.stats or self.stats
        self.deltas.append(delta)


@dataclass
class Rig:
    """An engine over a TableModel. `check` runs `checked_step` in place of `step`."""

    model: TableModel = field(default_factory=TableModel)
    drafter: Drafter | None = None
    k: int = 4
    limits: Limits = field(default_factory=lambda: Limits(4096))
    store: KVStore | None = None
    pipeline: LogitsPipeline = field(default_factory=pipeline)
    rule: str = "auto"
    check: bool = True
    policy: Policy | None = None  # FixedDepth(k) if none is given

    @contextmanager
    def engine(self) -> Iterator[LocalEngine]:
        needs = self.drafter.needs if self.drafter else Needs()
        rule = choose_rule(self.rule, needs.proposes_law, needs.tree)
        self.store = self.store or self.model.new_store()
        machine = Machine(self.model, self.store, self.pipeline, self.drafter, rule)
        original, local.step = local.step, checked_step if self.check else step
        policy = self.policy or FixedDepth(self.k if self.drafter else 0)
        engine = LocalEngine(machine, ByteCodec(), self.limits, policy)
        try:
            yield engine
        finally:
            engine.shutdown()
            local.step = original

    def run(self, *requests: tuple[Sequence[int], SamplingParams]) -> list[Answer]:
        """Answers of requests that are all open at once."""
        gate = threading.Event()
        with self.engine() as engine:
            engine._inbox.put(lambda: gate.wait() and None)  # so that all of them meet in the first step
            try:
                streams = [
                    engine.generate(Request(str(i), tuple(prompt), params))
                    for i, (prompt, params) in enumerate(requests)
                ]
            finally:  # a request that is refused must not leave the engine waiting
                gate.set()
            return gather(streams)


def gather(streams: Sequence[Iterator[Delta]]) -> list[Answer]:
    """Read several streams in turn, as far as each has come."""
    answers = [Answer() for _ in streams]
    open_streams = list(range(len(streams)))
    while open_streams:
        for i in list(open_streams):
            delta = next(streams[i], None)
            if delta is None:
                open_streams.remove(i)
            else:
                answers[i].add(delta)
    return answers
