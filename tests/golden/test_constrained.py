"""A constraint is part of the target's law: no drafter changes the text, and the text has the form asked for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import pytest

from fakes import EOS, VOCAB, ByteCodec, Rig, ScriptedDrafter, TableModel, draft_model, mixed_drafter, tree_drafter
from outpace.drafters.base import Drafter
from outpace.drafters.forced import Forced
from outpace.drafters.lookup import Lookup
from outpace.errors import ConstraintError, ParameterError
from outpace.lab.reference import decode
from outpace.sampling.constrained import GrammarMask
from outpace.sampling.grammar import Cursor, Grammars, Vocabulary
from outpace.sampling.pipeline import LogitsPipeline
from outpace.types import Constraint, FinishReason, SamplingParams

pytest.importorskip("llguidance")
TARGET = TableModel()
CODEC = ByteCodec()
WORDS = Constraint.of({"regex": "b(c|d)*(ef|gh)i?"})
FORMS = {"regex": WORDS, "choice": Constraint.of({"choice": ["bcd", "bce", "ghhg"]})}
PATTERNS = {"regex": "b(c|d)*(ef|gh)i?", "choice": "bcd|bce|ghhg"}


def spelled(token: int) -> bytes:
    return b"" if token == EOS else chr(97 + token).encode()


def mask() -> GrammarMask:
    ends = frozenset({EOS})
    return GrammarMask(Grammars(Vocabulary(VOCAB, spelled, ends, ends, CODEC.encode)))


def constrained_pipeline(grammar: GrammarMask) -> LogitsPipeline:
    return LogitsPipeline(VOCAB, ByteCodec.eos_ids, grammar=grammar)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "mixed": lambda: mixed_drafter(TARGET),
    "draft_model": draft_model,
    "lookup": Lookup,
    "tree": lambda: tree_drafter(TARGET),
    "against the grammar": lambda: ScriptedDrafter(lambda tokens, depth: ([10] * depth, None)),
}
KINDS = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.2, "seed": 5},
    "penalised": {"temperature": 0, "frequency_penalty": 1.5},
}


def rig(drafter: str | None, k: int = 4) -> Rig:
    grammar = mask()
    inner = None if drafter is None else Forced(DRAFTERS[drafter](), grammar)
    return Rig(TARGET, inner, k, pipeline=constrained_pipeline(grammar))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_drafter_gives_the_oracles_text(drafter: str, kind: str, form: str) -> None:
    """Constrained requests beside a free one."""
    params = SamplingParams(max_tokens=24, constraint=FORMS[form], **KINDS[kind])  # type: ignore[arg-type]
    free = SamplingParams(temperature=0, max_tokens=24)
    work = [([1 + i, 2, 3], params) for i in range(4)] + [([7, 7], free)]
    answers = rig(drafter).run(*work)
    for answer, (prompt, asked) in zip(answers, work, strict=True):
        assert answer.tokens == tuple(decode(TARGET, constrained_pipeline(mask()), prompt, asked, {EOS}))
        if asked is params and answer.finish_reason is FinishReason.STOP:
            assert re.fullmatch(PATTERNS[form], answer.text)
    assert any(answer.finish_reason is FinishReason.STOP for answer in answers[:4])


def test_the_law_is_the_targets_on_what_is_allowed() -> None:
    """Unseeded answers of one letter, block rule and plain: shares are those of the masked law."""
    params = SamplingParams(temperature=1.0, max_tokens=2, constraint=Constraint.of({"choice": ["c", "f", "k"]}))
    logits = TARGET.logits([1, 2]).double()
    law = logits[[2, 5, 10]].softmax(0).tolist()
    for drafter in (None, "draft_model"):
        work = [([1, 2], params)] * 300
        found = Counter(answer.text for answer in rig(drafter).run(*work))
        expected = {letter: 300 * share for letter, share in zip("cfk", law, strict=True)}
        assert set(found) <= set(expected)
        chi = sum((found[letter] - expected[letter]) ** 2 / expected[letter] for letter in expected)
        assert chi < 16  # two degrees of freedom: once in 3000


def test_planted_matcher_that_is_not_rolled_back_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rejected token that stays in the matcher ends in another text, or in none."""
    params = SamplingParams(temperature=0, max_tokens=24, constraint=WORDS)
    work = [([1 + i, 2, 3], params) for i in range(4)]
    expected = [tuple(decode(TARGET, constrained_pipeline(mask()), *request, {EOS})) for request in work]
    honest = Cursor._reach

    def forgetful(self: Cursor, text: list[int]) -> bool:
        if len(self._text) > len(text):
            return True
        return honest(self, text)

    monkeypatch.setattr(Cursor, "_reach", forgetful)
    try:
        answers = [answer.tokens for answer in rig("mixed").run(*work)]
    except Exception:
        return
    assert answers != expected


def test_forced_tokens_are_free() -> None:
    """Twelve letters without a choice: three passes of five rows in place of one each, and nobody drafts."""
    params = SamplingParams(temperature=0, max_tokens=24, constraint=Constraint.of({"choice": ["bcdefghijkbc"]}))
    silent = Forced(ScriptedDrafter(lambda tokens, depth: ([], None)), grammar := mask())
    answer = Rig(TARGET, silent, 4, pipeline=constrained_pipeline(grammar)).run(([1, 2], params))[0]
    assert answer.text == "bcdefghijkbc" and answer.finish_reason is FinishReason.STOP
    assert answer.stats.steps <= 4 and answer.stats.accepted >= 9


def test_a_dead_end_names_the_constraint() -> None:
    """No token spells a capital letter behind the first."""
    params = SamplingParams(temperature=0, max_tokens=9, constraint=Constraint.of({"regex": "bcZ"}))
    for drafter in (None, "mixed"):
        with pytest.raises((ConstraintError, ParameterError), match=r"bcZ"):
            rig(drafter).run(([1, 2], params))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"regex": "("}, "cannot be used"),
        ({"json": "{"}, "cannot be"),
        ({"grammar": "start: missing_rule"}, "cannot be used"),
        ({"json": {"type": "string", "pattern": "(?=a)b"}}, "cannot be used"),
    ],
)
def test_what_cannot_be_compiled_is_refused_before_any_token(given: dict[str, object], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        constrained_pipeline(mask()).check(SamplingParams(constraint=Constraint.of(given)))


@pytest.mark.parametrize(
    "given", [{}, {"regex": ""}, {"json": "x", "regex": "y"}, {"choice": []}, {"xml": "a"}, [], {"regex": "a" * 70000}]
)
def test_what_is_no_constraint_is_refused(given: object) -> None:
    with pytest.raises(ParameterError, match="constraint"):
        Constraint.of(given)  # type: ignore[arg-type]


def test_an_engine_without_grammars_takes_no_constraint() -> None:
    with pytest.raises(ParameterError, match="without grammars"):
        LogitsPipeline(VOCAB, ByteCodec.eos_ids).check(SamplingParams(constraint=WORDS))
