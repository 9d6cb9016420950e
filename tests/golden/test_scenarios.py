"""Scenarios of other engines' bug reports, on models and drafters that follow a script, under their numbers.

"Plain" is the same engine without a drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from fakes import (
    EOS,
    VOCAB,
    Answer,
    Rig,
    ScriptedDrafter,
    StaleDraft,
    TableModel,
    draft_model,
    gather,
    mixed_drafter,
    pipeline,
)
from outpace.drafters.draft_model import DraftModel
from outpace.drafters.lookup import Lookup
from outpace.engine.local import Limits
from outpace.errors import ContextOverflow
from outpace.models.base import ForwardOutput
from outpace.types import FinishReason, Request, SamplingParams, TokenKind

TARGET = TableModel()
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
A, B, C, D, E = 1, 2, 3, 4, 5


class ScriptedModel(TableModel):
    """A target that says `script` behind a prompt of two tokens, and then its last token for ever."""

    def __init__(self, *script: int) -> None:
        super().__init__()
        self.script = script

    def forward(self, batch, kv):  # type: ignore[no-untyped-def]
        logits = super().forward(replace(batch, best_below=None), kv).logits
        # Index in the script of the token after each row.
        places = [part.kv_first + i - 1 for part in batch.rows for i in range(len(part.tokens))]
        for r, row in enumerate(batch.logit_rows):
            said = self.script[min(max(places[row], 0), len(self.script) - 1)]
            logits[r] = 10.0 * (torch.arange(VOCAB) == said)
        return ForwardOutput.of(logits, batch)


def knowing(*script: int) -> ScriptedDrafter:
    """Proposes the script itself, as much of it as may be."""
    return ScriptedDrafter(lambda tokens, depth: (script[len(tokens) - 2 :][:depth], None))


def say(script: Sequence[int], params: SamplingParams, k: int = 5) -> tuple[Answer, Answer]:
    """(plain, speculative) answers of a scripted target to a prompt of two tokens."""
    plain = Rig(ScriptedModel(*script)).run(([9, 9], params))[0]
    return plain, Rig(ScriptedModel(*script), knowing(*script), k).run(([9, 9], params))[0]


@pytest.mark.parametrize("k", [1, 2, 5, 8])
def test_1_a_draft_that_equals_the_target_is_accepted_whole(k: int) -> None:
    params = GREEDY.replace(max_tokens=1 + 4 * (k + 1))
    plain = Rig(TARGET).run(([1, 2], params))[0]
    answer = Rig(TARGET, draft_model(wrong=0.0), k).run(([1, 2], params))[0]
    assert answer.tokens == plain.tokens
    assert answer.stats.steps == 1 + 4 and answer.stats.accepted == answer.stats.drafted == 4 * k
    assert answer.kinds == (TokenKind.PLAIN, *((TokenKind.ACCEPTED,) * k + (TokenKind.BONUS,)) * 4)


def test_2_a_hostile_drafter_costs_steps_but_no_token() -> None:
    hostile = ScriptedDrafter(lambda tokens, depth: ([int(TARGET.logits(tokens).argmin())] * depth, None))
    answer = Rig(TARGET, hostile, 4).run(([1, 2], GREEDY))[0]
    assert answer.tokens == Rig(TARGET).run(([1, 2], GREEDY))[0].tokens
    assert answer.stats.accepted == 0 and answer.stats.mean_acceptance_length == 1.0
    assert set(answer.kinds[1:-1]) == {TokenKind.CORRECTION}


@pytest.mark.parametrize("end", ["eos", "stop id", "stop string"])
def test_9_an_end_inside_a_draft(end: str) -> None:
    stop = {"eos": EOS, "stop id": 7, "stop string": 7}[end]
    params = SamplingParams(
        temperature=0,
        max_tokens=20,
        stop_token_ids=(7,) if end == "stop id" else (),
        stop=("h",) if end == "stop string" else (),
    )
    plain, answer = say([A, B, C, stop, D, E], params)
    assert answer.tokens == plain.tokens == (A, B, C, stop)
    assert answer.text == plain.text == "bcd"
    assert answer.finish_reason is FinishReason.STOP
    assert answer.stats.output_tokens == 4


def test_10_stop_beats_length() -> None:
    script = [A, B, EOS, C, D, E]
    assert [x.finish_reason for x in say(script, SamplingParams(temperature=0, max_tokens=3))] == [
        FinishReason.STOP
    ] * 2
    late = [A, B, C, D, E, EOS]
    for answer in say(late, SamplingParams(temperature=0, max_tokens=5)):
        assert answer.finish_reason is FinishReason.LENGTH and answer.tokens == (A, B, C, D, E)


def test_11_a_stop_string_at_the_front_of_a_long_block() -> None:
    script = [A, B, C, *([D] * 20)]
    plain, answer = say(script, SamplingParams(temperature=0, max_tokens=23, stop=("cd",)), k=22)
    assert answer.text == plain.text == "b"
    assert answer.tokens == plain.tokens == (A, B, C) and answer.finish_reason is FinishReason.STOP


def test_min_tokens_keeps_stop_strings_waiting() -> None:
    plain, answer = say([A, B, A, B, A, B], SamplingParams(temperature=0, max_tokens=6, min_tokens=3, stop=("bc",)))
    assert answer.text == plain.text == "bc" and answer.tokens == plain.tokens == (A, B, A, B)


@pytest.mark.parametrize("max_tokens", range(1, 8))
def test_13_budgets_are_exact(max_tokens: int) -> None:
    k = 5
    drafter = draft_model(wrong=0.0)
    rig = Rig(TARGET, drafter, k)
    answer = rig.run(([1, 2], GREEDY.replace(max_tokens=max_tokens)))[0]
    assert len(answer.tokens) == answer.stats.output_tokens == max_tokens
    assert answer.finish_reason is FinishReason.LENGTH
    # One token comes before the first draft, one more needs none.
    assert answer.stats.drafted == max(0, min(k, max_tokens - 2))


@pytest.mark.parametrize("left", range(1, 8))
def test_15_the_edge_of_the_context(left: int) -> None:
    context, k = 40, 4
    target, limits = TableModel(context=context), Limits(context)
    prompt = [1 + i % 5 for i in range(context - left)]
    params = GREEDY.replace(max_tokens=left)
    plain = Rig(target, limits=limits).run((prompt, params))[0]
    rig = Rig(target, draft_model(), k, limits)
    assert rig.run((prompt, params))[0].tokens == plain.tokens
    assert len(plain.tokens) == left
    with rig.engine() as engine, pytest.raises(ContextOverflow, match="maximum context length is 40"):
        engine.generate(Request("x", tuple(prompt), params.replace(max_tokens=left + 1)))


def test_18_memory_is_given_back() -> None:
    drafter = draft_model()
    rig = Rig(TARGET, drafter, 4, Limits(4096, max_num_seqs=4))
    for count in (1, 10, 40):
        rig.run(*[([1, 2, 1 + i % 5], GREEDY.replace(max_tokens=1 + i % 9)) for i in range(count)])
        assert rig.store is not None and rig.store.used_bytes() == drafter.store.used_bytes() == 0


@pytest.mark.parametrize("k", [1, 4])
def test_29_penalties_see_the_path_and_nothing_rejected(k: int) -> None:
    params = GREEDY.replace(frequency_penalty=2.0)
    repetitive = ScriptedDrafter(lambda tokens, depth: ([tokens[-1]] * depth, None))
    plain = Rig(TARGET).run(([1] * 8, params))[0]
    assert Rig(TARGET, repetitive, k).run(([1] * 8, params))[0].tokens == plain.tokens


def test_32_log_probabilities_of_every_token() -> None:
    params = GREEDY.replace(logprobs=5, frequency_penalty=0.5)
    plain = Rig(TARGET).run(([1, 2], params))[0]
    answer = Rig(TARGET, mixed_drafter(TARGET), 4).run(([1, 2], params))[0]
    assert answer.stats.accepted > 5
    assert len(answer.logprobs) == len(answer.tokens) == 30
    assert answer.logprobs == plain.logprobs
    text = [1, 2]
    for token, entry in zip(answer.tokens, answer.logprobs, strict=True):
        raw = torch.log_softmax(TARGET.logits(text).double(), -1)
        assert entry.token == token and entry.logprob == pytest.approx(float(raw[token]), abs=1e-6)
        assert [value for _, value in entry.top] == pytest.approx(sorted(raw.tolist(), reverse=True)[:5], abs=1e-6)
        text.append(token)


def test_logits_stay_in_the_model_where_nobody_needs_them() -> None:
    """Greedy requests need the best id of a row; one that edits its logits or asks for log-probabilities needs all."""
    bounds: list[int | None] = []

    class Listening(TableModel):
        def forward(self, batch, kv):  # type: ignore[no-untyped-def]
            bounds.append(batch.best_below)
            return super().forward(batch, kv)

    def needed(*params: SamplingParams) -> set[int | None]:
        bounds.clear()
        drafter = DraftModel(Listening(0, 1 / 3), pipeline(), VOCAB)
        rig = Rig(Listening(), drafter)
        answers = rig.run(*(([1, 2 + i], each) for i, each in enumerate(params)))
        for i, (answer, each) in enumerate(zip(answers, params, strict=True)):
            if each.greedy:
                assert answer.tokens == Rig(TARGET).run(([1, 2 + i], each))[0].tokens
        return set(bounds)

    assert needed(GREEDY) == needed(GREEDY, GREEDY) == {VOCAB}
    for whole in ({"logprobs": 1}, {"repetition_penalty": 1.2}, {"logit_bias": {3: 1.0}}, {"temperature": 1.0}):
        assert needed(GREEDY.replace(**whole)) == {None}
    assert None in needed(GREEDY, GREEDY.replace(temperature=0.5, seed=1))
    assert needed(GREEDY.replace(min_tokens=6)) == {None, VOCAB}  # the end is barred until then, and no longer


def test_38_mixed_acceptance_in_one_batch() -> None:
    def script(tokens: Sequence[int], depth: int) -> tuple[list[int], None]:
        text = list(tokens)
        while len(text) < len(tokens) + depth:
            text.append(int(TARGET.logits(text).argmax()))
        good = {1: 0, 2: 1, 3: depth, 4: len(tokens) % (depth + 1)}[tokens[0]]
        own = text[len(tokens) :]
        return own[:good] + [(t + 1) % VOCAB for t in own[good:]], None

    work = [([first, 5], GREEDY.replace(max_tokens=n)) for first, n in ((1, 30), (2, 7), (3, 28), (4, 30))]
    answers = Rig(TARGET, ScriptedDrafter(script), 4).run(*work)
    for answer, (prompt, params) in zip(answers, work, strict=True):
        assert answer.tokens == Rig(TARGET).run((prompt, params))[0].tokens
    assert answers[0].stats.accepted == 0 and answers[2].stats.acceptance_rate == 1.0


def test_42_statistics_are_the_requests_own() -> None:
    rig = Rig(TARGET, draft_model(), 4)
    with rig.engine() as engine:
        first = gather([engine.generate(Request("a", (1, 2), GREEDY))])[0].stats
        second = gather([engine.generate(Request("b", (1, 2), GREEDY))])[0].stats
        total = engine.stats()
    assert (first.steps, first.drafted, first.accepted) == (second.steps, second.drafted, second.accepted)
    assert total["drafted_tokens"] == first.drafted + second.drafted > 0
    assert total["generation_tokens"] == 60 and total["requests"] == 2


def test_43_lookup_without_a_match_is_a_plain_step() -> None:
    answer = Rig(TARGET, Lookup(), 4).run(([1], GREEDY.replace(max_tokens=3)))[0]
    assert answer.tokens == Rig(TARGET).run(([1], GREEDY.replace(max_tokens=3)))[0].tokens
    assert answer.kinds[0] is TokenKind.PLAIN


def tokens_per_step(drafter: DraftModel) -> float:
    """Over eight texts of 60 tokens, of a draft table that differs from the target's in every fifth context."""
    params = GREEDY.replace(max_tokens=60)
    answers = Rig(TARGET, drafter, 4, check=False).run(*[([i, i + 1, i + 2], params) for i in range(1, 9)])
    for answer in answers:
        stats = answer.stats
        assert stats.drafted == sum(stats.drafted_per_position) and stats.accepted == sum(stats.accepted_per_position)
        assert list(stats.accepted_per_position) == sorted(stats.accepted_per_position, reverse=True)
    return sum(len(answer.tokens) for answer in answers) / sum(answer.stats.steps for answer in answers)


def test_tokens_per_step_may_not_regress() -> None:
    """The tables are fixed, so this is exact."""
    assert tokens_per_step(draft_model(wrong=0.2)) == pytest.approx(3.5556, abs=1e-3)


def test_planted_stale_draft_costs_steps() -> None:
    """It changes no text: only here, and in the rows themselves, can it be seen."""
    assert tokens_per_step(StaleDraft(TableModel(0, 0.2), pipeline(), VOCAB)) < 2
