"""Unseeded sampling through the whole engine follows the target's law: three tokens jointly, so that a wrong residual
or a wrong cache after a rejection shows in the second one given the first (scenarios 4, 6 and 7)."""

from __future__ import annotations

import random
from collections import Counter

import pytest

import outpace.engine.local as local
from fakes import VOCAB, ArgmaxClaimsSoftmax, Rig, TableModel, draft_model, mixed_drafter, pipeline, tree_drafter
from law.chance import ALPHA, p_value
from outpace.drafters.lookup import Lookup
from outpace.engine.local import Limits
from outpace.sampling.pipeline import LawRow
from outpace.types import SamplingParams

TARGET = TableModel(seed=3, scale=1.0)
PROMPT = [1, 2, 3, 1, 2]
PARAMS = SamplingParams(temperature=0.8, top_k=3, presence_penalty=0.3, max_tokens=4, ignore_eos=True)
REQUESTS = 1500


def law(params: SamplingParams, length: int) -> dict[tuple[int, ...], float]:
    """Probability of every continuation, by enumeration."""
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, mass in texts.items():
            tokens = [*PROMPT, *text]
            row = LawRow(params, tokens, len(PROMPT))
            following = pipeline().probs(TARGET.logits(tokens).unsqueeze(0), [row])[0].tolist()
            longer |= {(*text, token): mass * p for token, p in enumerate(following) if p > 0}
        texts = longer
    return texts


@pytest.fixture(autouse=True)
def fixed_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unseeded requests draw their keys from the system: here from a fixed list."""
    monkeypatch.setattr(local.secrets, "randbits", random.Random(0).getrandbits)


def fits(rig: Rig, params: SamplingParams = PARAMS) -> float:
    """p-value of the texts of many requests, cells of small expectation together."""
    rig.check, rig.limits = False, Limits(4096, max_num_seqs=64, max_batched_tokens=4096)
    counts = Counter(answer.tokens[:3] for answer in rig.run(*[(PROMPT, params)] * REQUESTS))
    expected = law(params, 3)
    assert set(counts) <= set(expected), "a text the target never writes"
    large = [text for text, p in expected.items() if p * REQUESTS >= 8]
    rest = 1 - sum(expected[text] for text in large)
    observed = [counts[text] for text in large]
    assert len(large) > 8
    if rest * REQUESTS < 8:
        return p_value(observed, [expected[text] / (1 - rest) for text in large])
    return p_value([*observed, REQUESTS - sum(observed)], [*(expected[text] for text in large), rest])


@pytest.mark.parametrize(
    ("drafter", "rule"),
    [
        (lambda: None, "auto"),
        (lambda: draft_model(0.7, seed=3), "block"),
        (lambda: draft_model(0.7, seed=3), "token"),
        (lambda: mixed_drafter(TARGET), "auto"),
        (lambda: tree_drafter(TARGET), "auto"),
        (Lookup, "auto"),
    ],
    ids=["plain", "draft model, block", "draft model, token", "point mass", "tree", "lookup"],
)
def test_the_engine_keeps_the_law(drafter, rule: str) -> None:
    rig = Rig(TARGET, drafter(), 4, rule=rule)
    assert fits(rig) > ALPHA


@pytest.mark.parametrize("rule", ["block", "token"])
def test_planted_claim_is_caught(rule: str) -> None:
    liar = ArgmaxClaimsSoftmax(TableModel(3, 0.7, scale=1.0), pipeline(), VOCAB)
    assert fits(Rig(TARGET, liar, 4, rule=rule)) < 1e-6
