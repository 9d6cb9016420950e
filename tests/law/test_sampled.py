"""Rules with their randomness: scenarios 4 to 7, the loop over several steps, and temperature 0."""

import itertools
from collections import Counter

import pytest
import torch

from law.chance import ALPHA, emit_once, histogram, p_value, speculate
from law.exact import _likelihood, table
from outpace.sampling.pipeline import LawRow, LogitsPipeline
from outpace.sampling.rng import Stream, uniforms
from outpace.types import Draft, SamplingParams
from outpace.verify import REGISTRY
from outpace.verify.rule import draw
from outpace.verify.tree import chain_parents, pad

EIGHT = torch.tensor([0.02, 0.3, 0.15, 0.2, 0.01, 0.12, 0.05, 0.15], dtype=torch.float64)
CHAIN_RULES = pytest.mark.parametrize("name", ["token", "tree", "block"])
KEYS = range(20_000)


def first_tokens(rule, p, q, drafted) -> torch.Tensor:
    """First emitted token of a one-token draft, for every key."""
    s = len(KEYS)
    both = [None if law is None else law.expand(s, 2, -1) for law in (p, q)]
    draft = Draft(drafted.expand(s).unsqueeze(1), torch.full((s, 1), -1), both[1])
    stop, extra = emit_once(rule, both[0], draft, KEYS)
    return torch.where(stop == 1, draft.tokens[:, 0], extra)


def drawn_from(q: torch.Tensor) -> torch.Tensor:
    return draw(q.expand(len(KEYS), -1), uniforms(KEYS, [0] * len(KEYS), Stream.DRAFT))


def softmax_claim() -> torch.Tensor:
    return torch.softmax(torch.tensor([0.0, 1.0, 0.5, 2.0, 0.0, 0.3, 0.1, 0.2], dtype=torch.float64), -1)


@CHAIN_RULES
def test_scenario_4_one_hot_draft(name: str) -> None:
    tokens = first_tokens(REGISTRY[name], EIGHT, None, torch.tensor(3))
    assert p_value(histogram(tokens, 8), EIGHT.tolist()) > ALPHA


@CHAIN_RULES
def test_scenario_4_has_power(name: str) -> None:
    """The same draft claimed to come from a softmax must fail the same test."""
    tokens = first_tokens(REGISTRY[name], EIGHT, softmax_claim(), torch.tensor(3))
    assert p_value(histogram(tokens, 8), EIGHT.tolist()) < 1e-12


@CHAIN_RULES
def test_scenario_5_sampled_draft(name: str) -> None:
    q = softmax_claim()
    tokens = first_tokens(REGISTRY[name], EIGHT, q, drawn_from(q))
    assert p_value(histogram(tokens, 8), EIGHT.tolist()) > ALPHA


@CHAIN_RULES
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_scenario_5_equal_laws_accept_everything(name: str, dtype: torch.dtype) -> None:
    p = EIGHT.to(dtype).expand(8, 4, -1)
    draft = Draft(torch.arange(8).unsqueeze(1).expand(8, 3), torch.tensor([chain_parents(3)] * 8), p)
    stop_law = REGISTRY[name].stop_law(p, draft)
    assert torch.equal(stop_law[:, 3], torch.ones(8, dtype=torch.float64))
    for row in range(3):  # never used, but it must still be a law: there is nothing left, so it is p
        residual = REGISTRY[name].residual(p, draft, torch.full((8,), row))
        assert torch.allclose(residual, p[:, row].double(), atol=1e-3)


@CHAIN_RULES
def test_scenario_5_disjoint_supports_accept_nothing(name: str) -> None:
    p = torch.tensor([0.25, 0.75, 0.0, 0.0], dtype=torch.float64).expand(1, 3, -1)
    q = torch.tensor([0.0, 0.0, 0.5, 0.5], dtype=torch.float64).expand(1, 3, -1)
    draft = Draft(torch.tensor([[2, 3]]), torch.tensor([[-1, 0]]), q)
    assert REGISTRY[name].stop_law(p, draft).tolist() == [[1.0, 0.0, 0.0]]
    assert torch.equal(REGISTRY[name].residual(p, draft, torch.tensor([0])), p[:, 0])


@pytest.mark.parametrize("name", ["token", "block"])
def test_scenario_6_text_of_several_steps_has_the_joint_law(name: str) -> None:
    """Every token given all before it, over more than one step, not marginals."""
    p, q = table(2), table(1002)
    assert joint_p_value(p, speculate(REGISTRY[name], p, q, KEYS, length=4, k=3)) > ALPHA


def test_scenario_6_has_power() -> None:
    """A residual taken from p itself, and draft noise that the next step draws again (rng.Stream.DRAFT)."""
    p, q = table(2), table(1002)

    class OrdinaryResidual(type(REGISTRY["token"])):
        def residual(self, p, draft, stop):
            return p[torch.arange(len(stop)), stop]

    assert joint_p_value(p, speculate(OrdinaryResidual("token", False), p, q, KEYS, length=2, k=2)) < 1e-12
    assert joint_p_value(p, speculate(REGISTRY["block"], p, q, KEYS, length=4, k=3, by_step=False)) < 1e-12


def joint_p_value(p, texts) -> float:
    cells = list(itertools.product(range(3), repeat=len(texts[0])))
    counts = Counter(texts)
    return p_value([counts[x] for x in cells], [_likelihood(p, x) for x in cells])


@CHAIN_RULES
def test_scenario_7_temperature_and_top_k_before_the_ratio(name: str) -> None:
    pipeline = LogitsPipeline(8, frozenset())
    logits = torch.log(torch.stack([EIGHT, softmax_claim()])).float()
    rows = [LawRow(SamplingParams(temperature=0.5, top_k=3), [0], 1)] * 2
    p, q = pipeline.probs(logits, rows)
    tokens = first_tokens(REGISTRY[name], p, q, drawn_from(q))
    squares = torch.where(EIGHT >= 0.15, EIGHT**2, 0.0)
    squares[7] = 0.0  # 0.15 twice: the lower id stays in the top 3
    assert p_value(histogram(tokens, 8), (squares / squares.sum()).tolist()) > ALPHA
    warmed_later = torch.log_softmax(logits[0].double() / 0.5, -1).exp()
    assert p_value(histogram(tokens, 8), warmed_later.tolist()) < 1e-12  # leaving out top-k would be noticed


@CHAIN_RULES
def test_temperature_0_is_exact_matching(name: str) -> None:
    """One-hot target laws: the stop row is the longest agreeing prefix, the extra token the target's own."""
    target = [1, 2, 0, 1]
    p = torch.nn.functional.one_hot(torch.tensor(target), 3).double().expand(27, 4, -1)
    drafts = list(itertools.product(range(3), repeat=3))
    chains = pad([(tokens, chain_parents(3)) for tokens in drafts])
    claims = {"point": torch.nn.functional.one_hot(chains.tokens, 3).double(), "soft": torch.full((27, 3, 3), 1 / 3)}
    for claim in claims.values():
        q = torch.cat([claim, torch.zeros(27, 1, 3)], 1)
        stop, extra = emit_once(REGISTRY[name], p, Draft(chains.tokens, chains.parent, q), range(27))
        agreed = [next((i for i in range(3) if x[i] != target[i]), 3) for x in drafts]
        if claim is claims["point"]:
            assert stop.tolist() == agreed
        assert all(row <= agree for row, agree in zip(stop.tolist(), agreed, strict=True))
        assert extra.tolist() == [target[row] for row in stop.tolist()]


def test_temperature_0_tree_takes_the_matching_branch() -> None:
    draft = pad([((0, 2, 1, 0), (-1, -1, 1, 1))])
    p = torch.zeros(1, 5, 3)
    for row, token in enumerate([2, 0, 0, 1, 1]):
        p[0, row, token] = 1.0
    stop, extra = emit_once(REGISTRY["tree"], p, draft, range(1))
    assert (stop.tolist(), extra.tolist()) == ([4], [1])
