"""The text of a greedy or seeded request is a function of prompt, seed and target: whatever drafts, however long, in
whatever company. The oracle is lab.reference, which decodes one token at a time and keeps nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from fakes import (
    EOS,
    VOCAB,
    Answer,
    ByteCodec,
    CutTable,
    NoRollbackStore,
    PathBlindPipeline,
    Rig,
    ScriptedDrafter,
    StaleDraft,
    TableModel,
    draft_model,
    mixed_drafter,
    pipeline,
    tree_drafter,
)
from outpace.drafters.base import Drafter
from outpace.drafters.draft_model import DraftModel
from outpace.drafters.lookup import Lookup
from outpace.engine.costs import PassCosts
from outpace.engine.local import Limits
from outpace.engine.policy import AdaptiveDepth, AdaptiveSettings
from outpace.errors import EngineDead
from outpace.lab.reference import decode
from outpace.types import FinishReason, SamplingParams

TARGET = TableModel()


def hostile(tokens, depth):  # type: ignore[no-untyped-def]
    """What the target wants least."""
    return [int(TARGET.logits(tokens).argmin())] * depth, None


DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "mixed": lambda: mixed_drafter(TARGET),
    "draft_model": draft_model,
    "draft_model of some tokens": lambda: DraftModel(CutTable(0, 2, 3, 5, 7, 8), pipeline(), VOCAB),
    "the target itself": lambda: draft_model(wrong=0.0),
    "lookup": Lookup,
    "tree": lambda: tree_drafter(TARGET),
    "hostile": lambda: ScriptedDrafter(hostile),
    "silent": lambda: ScriptedDrafter(lambda tokens, depth: ([], None)),
}


def requests(count: int, seed: int = 0) -> list[tuple[list[int], SamplingParams]]:
    """Greedy and seeded requests of many kinds: ragged prompts, early ends, penalties, filters."""
    chance = random.Random(seed)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "frequency_penalty": 2.0, "presence_penalty": 0.5, "repetition_penalty": 1.3},
        {"temperature": 0.8, "top_p": 0.9, "seed": 7},
        {"temperature": 1.3, "top_k": 4, "min_p": 0.05, "seed": -1, "min_tokens": 1},
        {"temperature": 1.0, "seed": 3, "logit_bias": {5: 3.0, 6: -100.0}, "ignore_eos": True},
        {"temperature": 0, "min_tokens": 40},
    ]
    work = []
    for i in range(count):
        prompt = [chance.randrange(1, VOCAB) for _ in range(chance.choice([1, 2, 5, 17]))]
        kind = kinds[i % len(kinds)]
        longest = chance.choice([n for n in (1, 2, 5, 6, 40) if n >= kind.get("min_tokens", 0)])
        work.append((prompt, SamplingParams(max_tokens=longest, **kind)))
    return work


def expected(prompt: list[int], params: SamplingParams) -> tuple[int, ...]:
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    return tuple(decode(TARGET, pipeline(), prompt, params, stops))


def agrees(answer: Answer, prompt: list[int], params: SamplingParams) -> None:
    tokens = expected(prompt, params)
    assert answer.tokens == tokens
    assert answer.text == ByteCodec().decode(tokens)
    ended = FinishReason.STOP if tokens[-1] == EOS and not params.ignore_eos else FinishReason.LENGTH
    assert answer.finish_reason == ended
    assert answer.stats.output_tokens == len(answer.kinds) == len(tokens)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("k", [1, 2, 5, 8])
@pytest.mark.parametrize("batch", [1, 4])
def test_every_drafter_gives_the_oracles_text(drafter: str, k: int, batch: int) -> None:
    work = requests(10, seed=k)
    for start in range(0, len(work), batch):
        part = work[start : start + batch]
        for answer, (prompt, params) in zip(Rig(TARGET, DRAFTERS[drafter](), k).run(*part), part, strict=True):
            agrees(answer, prompt, params)


@pytest.mark.parametrize("drafter", [name for name in DRAFTERS if name != "none"])
@pytest.mark.parametrize("dear", [0.0, 0.3, 3.0])
def test_a_policy_that_chooses_k_changes_no_text(drafter: str, dear: float) -> None:
    """Rows that cost nothing more, something, and so much that nothing is drafted but tries."""
    verify, draft = (PassCosts({1: 1.0, 30: 1.0 + 29 * cost}) for cost in (dear, dear / 2))
    for seed in range(3):
        policy = AdaptiveDepth(verify, draft, AdaptiveSettings(k_max=6, first_wait=seed))
        work = requests(6, seed)
        answers = Rig(TARGET, DRAFTERS[drafter](), policy=policy, limits=Limits(4096, 4, 24)).run(*work)
        for answer, (prompt, params) in zip(answers, work, strict=True):
            agrees(answer, prompt, params)


@pytest.mark.parametrize("rows", [1, 3, 7])
@pytest.mark.parametrize("drafter", ["none", "mixed", "draft_model", "lookup"])
def test_chunks_of_any_size_do_not_matter(rows: int, drafter: str) -> None:
    work = requests(10, seed=5)
    limits = Limits(4096, max_num_seqs=3, max_batched_tokens=rows)
    for answer, (prompt, params) in zip(Rig(TARGET, DRAFTERS[drafter](), 4, limits).run(*work), work, strict=True):
        agrees(answer, prompt, params)


@pytest.mark.parametrize("drafter", ["none", "mixed", "draft_model"])
def test_preempted_requests_are_recomputed(drafter: str) -> None:
    """A store for about one and a half of four long answers."""
    work = [([i + 1] * 30, SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)) for i in range(4)]
    rig = Rig(TARGET, DRAFTERS[drafter](), 4, store=TARGET.new_store(max_bytes=180 * 8))
    answers = rig.run(*work)
    for answer, (prompt, params) in zip(answers, work, strict=True):
        agrees(answer, prompt, params)
    assert rig.store is not None and rig.store.used_bytes() == 0


@pytest.mark.parametrize("drafter", ["none", "mixed", "draft_model"])
@pytest.mark.parametrize("room", [None, 150])
def test_texts_that_begin_alike_are_read_once_and_come_out_the_same(drafter: str, room: int | None) -> None:
    """Chats that go on and questions behind one system prompt, alone and together, with and without room for all."""
    system = [1 + i % 7 for i in range(40)]
    kept = DraftModel(TableModel(0, 1 / 3), pipeline(), VOCAB, None if room is None else room * 8, kept=4)
    rig = Rig(TARGET, kept if drafter == "draft_model" else DRAFTERS[drafter](), 4)
    rig.store = TARGET.new_store(None if room is None else room * 8, kept=4)
    greedy, seeded = (SamplingParams(temperature=t, seed=5, max_tokens=30, ignore_eos=True) for t in (0, 1))
    turns = [[([*system, i], params)] for i, params in enumerate((greedy, seeded, greedy))]
    chat = [*system, 0, *expected([*system, 0], greedy)]
    turns += [[([*chat, 3, 4], greedy)], [([*system, 8], greedy), ([*chat, 3], seeded), ([*system, 8], seeded)]]
    cached = []
    for work in turns:
        for answer, (prompt, params) in zip(rig.run(*work), work, strict=True):
            agrees(answer, prompt, params)
            cached.append(answer.stats.cached_tokens)
    assert cached[0] == 0 and cached[1:3] == [40, 40]
    assert cached[3] == (len(chat) - 1 if room is None else cached[3]) and all(n >= 40 for n in cached[3:5])


def test_a_neighbour_without_a_seed_changes_nothing() -> None:
    """Scenario 31."""
    prompt, params = [3, 1, 4], SamplingParams(temperature=0.9, seed=11, max_tokens=30)
    strangers = [([5, 6], SamplingParams(temperature=1.5, max_tokens=25)) for _ in range(3)]
    alone = Rig(TARGET, draft_model(), 4).run((prompt, params))[0]
    among = Rig(TARGET, draft_model(), 4).run(*strangers[:1], (prompt, params), *strangers[1:])[1]
    assert alone.tokens == among.tokens == expected(prompt, params)


def test_the_first_token_of_two_seeds_differs_somewhere() -> None:
    """Otherwise the tests above could pass on a build that ignores seeds."""
    texts = {expected([1, 2, 3], SamplingParams(temperature=1.0, seed=seed, max_tokens=8)) for seed in range(6)}
    assert len(texts) > 3


def faulty(rig: Rig) -> int:
    """Answers that are wrong, out of those that came."""
    rig.check = False
    work = requests(10, seed=2)
    answers = rig.run(*work)
    return sum(answer.tokens != expected(*request) for answer, request in zip(answers, work, strict=True))


def test_planted_no_rollback_is_caught() -> None:
    assert faulty(Rig(TARGET, mixed_drafter(TARGET), 4, store=NoRollbackStore(1, 1, 1))) > 0
    with pytest.raises(EngineDead, match="rows"):
        Rig(TARGET, mixed_drafter(TARGET), 4, store=NoRollbackStore(1, 1, 1)).run(*requests(10, seed=2))


def test_planted_blind_penalties_are_caught() -> None:
    """Scenario 29: penalties must see the draft tokens before a row."""
    params = SamplingParams(temperature=0, frequency_penalty=2.0, max_tokens=60, ignore_eos=True)
    work = [([i, i + 1, i + 2], params) for i in range(1, 8)]
    for pipes, wrong in ((pipeline(), False), (PathBlindPipeline(VOCAB, frozenset({EOS})), True)):
        answers = Rig(TARGET, mixed_drafter(TARGET), 4, pipeline=pipes).run(*work)
        assert any(answer.tokens != expected(*request) for answer, request in zip(answers, work, strict=True)) == wrong


def test_planted_stale_draft_changes_no_text_but_its_rows() -> None:
    """It is only slower, so only the KV content check can see it."""
    stale = StaleDraft(TableModel(0, 1 / 3), pipeline(), VOCAB)
    assert faulty(Rig(TARGET, stale, 4)) == 0
    stale = StaleDraft(TableModel(0, 1 / 3), pipeline(), VOCAB)
    with pytest.raises(EngineDead, match="rows"):
        Rig(TARGET, stale, 4).run(*requests(10, seed=2))
