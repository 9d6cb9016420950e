"""What every registered acceptance rule promises, whatever the laws and drafts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.errors import ConfigError, Unsupported
from outpace.sampling.rng import Stream, uniforms
from outpace.types import Draft
from outpace.verify import REGISTRY, choose_rule, verify
from outpace.verify.rule import draw
from outpace.verify.tree import chain_parents, pad

RULES = pytest.mark.parametrize("rule", REGISTRY.values(), ids=REGISTRY)
V = 7


def laws(s: int, rows: int, seed: int, sparse: bool = False) -> torch.Tensor:
    raw = torch.rand(s, rows, V, generator=torch.Generator().manual_seed(seed)) ** 3
    raw[..., 3] = 0.2
    if sparse:
        raw = torch.where(raw < 0.1, 0.0, raw)
    return raw / raw.sum(-1, keepdim=True)


def batch(rule, seed: int = 0) -> tuple[torch.Tensor, Draft]:
    """Ragged: 3, 0, 1 and 4 nodes; the last branches where the rule allows it."""
    last = (-1, -1, 0, 0) if rule.trees else chain_parents(4)
    pairs = [((1, 2, 3), chain_parents(3)), ((), ()), ((4,), (-1,)), ((3, 1, 5, 3), last)]
    draft = pad(pairs)
    return laws(4, 5, seed), Draft(draft.tokens, draft.parent, laws(4, 5, seed + 1))


def without_q(draft: Draft) -> Draft:
    return Draft(draft.tokens, draft.parent)


@RULES
def test_laws_are_laws(rule) -> None:
    p, draft = batch(rule)
    for one in (draft, without_q(draft)):
        law = rule.stop_law(p, one)
        assert law.dtype == torch.float64 and law.shape == (4, 5) and (law >= 0).all()
        assert torch.allclose(law.sum(-1), torch.ones(4, dtype=torch.float64), atol=1e-12, rtol=0)
        for row in range(5):
            residual = rule.residual(p, one, torch.full((4,), row))
            assert residual.dtype == torch.float64 and residual.shape == (4, V) and (residual >= 0).all()
            assert torch.allclose(residual.sum(-1), torch.ones(4, dtype=torch.float64), atol=1e-6, rtol=0)


@RULES
def test_padding_rows_are_never_a_stop(rule) -> None:
    p, draft = batch(rule)
    law = rule.stop_law(p, draft)
    padding = torch.cat([torch.zeros(4, 1, dtype=torch.bool), draft.tokens < 0], 1)
    assert padding.sum() == 8 and (law[padding] == 0).all() and law[1, 0] == 1


@RULES
def test_inputs_are_left_alone_and_answers_repeat(rule) -> None:
    p, draft = batch(rule)
    before = p.clone(), draft.tokens.clone(), draft.q.clone()
    stop = torch.tensor([1, 0, 1, 2])
    for wide in (torch.float32, torch.float64):
        given_p, given_draft = p.to(wide), Draft(draft.tokens, draft.parent, draft.q.to(wide))
        first = rule.stop_law(given_p, given_draft), rule.residual(given_p, given_draft, stop)
        again = rule.stop_law(given_p, given_draft), rule.residual(given_p, given_draft, stop)
        assert all(map(torch.equal, first, again))
        assert torch.equal(given_p, before[0].to(wide)) and torch.equal(given_draft.q, before[2].to(wide))
    assert torch.equal(draft.tokens, before[1])


@RULES
def test_a_sequence_does_not_depend_on_its_batch(rule) -> None:
    p, draft = batch(rule)
    p, q = (x.double() / x.double().sum(-1, keepdim=True) for x in (p, draft.q))
    draft = Draft(draft.tokens, draft.parent, q)
    together = rule.stop_law(p, draft)
    for s in range(4):
        n = draft.length(s)
        alone = Draft(draft.tokens[s : s + 1, :n], draft.parent[s : s + 1, :n], draft.q[s : s + 1, : n + 1])
        own = p[s : s + 1, : n + 1]
        assert torch.equal(together[s, : n + 1], rule.stop_law(own, alone)[0])
        for row in range(n + 1):
            wide = rule.residual(p, draft, torch.full((4,), row))[s]
            assert torch.allclose(wide, rule.residual(own, alone, torch.tensor([row]))[0], atol=1e-15, rtol=0)


@RULES
def test_an_empty_draft_is_plain_decoding(rule) -> None:
    p, empty = laws(3, 1, 5), pad([((), ())] * 3)
    for draft in (empty, Draft(empty.tokens, empty.parent, laws(3, 1, 6))):
        assert rule.stop_law(p, draft).tolist() == [[1.0]] * 3
        assert torch.allclose(rule.residual(p, draft, torch.zeros(3, dtype=torch.int64)), p[:, 0].double())


@RULES
@pytest.mark.parametrize("bad", [0.0, float("nan")])
def test_broken_claims_give_laws_without_nan(rule, bad: float) -> None:
    """At the drafted token, and as whole rows."""
    p, draft = batch(rule)
    at_token, rows = draft.q.clone(), draft.q.clone()
    for s in range(4):
        for node in range(draft.length(s)):
            at_token[s, draft.parent[s, node] + 1, draft.tokens[s, node]] = bad
    rows[:] = bad
    for q in (at_token, rows):
        one = Draft(draft.tokens, draft.parent, q)
        law = rule.stop_law(p, one)
        assert torch.allclose(law.sum(-1), torch.ones(4, dtype=torch.float64))
        assert torch.allclose(law, rule.stop_law(p, without_q(draft)))  # a claim that is wrong everywhere is none
        for row in range(5):
            residual = rule.residual(p, one, torch.full((4,), row))
            assert residual.isfinite().all() and torch.allclose(residual.sum(-1), torch.ones(4, dtype=torch.float64))


@RULES
def test_verify_is_stop_law_residual_and_draw(rule) -> None:
    p, draft = batch(rule)
    p, q = p.repeat(50, 1, 1), draft.q.repeat(50, 1, 1)
    draft = Draft(draft.tokens.repeat(50, 1), draft.parent.repeat(50, 1), q)
    keys, positions = list(range(200)), [k % 9 for k in range(200)]
    stop = draw(rule.stop_law(p, draft), uniforms(keys, positions, Stream.STOP))
    token = draw(rule.residual(p, draft, stop), uniforms(keys, positions, Stream.EXTRA))
    got_stop, got_token = verify(rule, p, draft, keys, positions)
    assert torch.equal(got_stop, stop) and torch.equal(got_token, token)
    assert len(set(stop.tolist())) > 2  # the comparison saw more than one outcome


@given(seed=st.integers(0, 10_000), name=st.sampled_from(sorted(REGISTRY)))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_an_emitted_token_is_always_possible(seed: int, name: str) -> None:
    """Sparse laws: neither an accepted nor an extra token may have probability 0 under the target."""
    p, q = laws(1, 4, seed, sparse=True), laws(1, 4, seed + 1, sparse=True)
    tokens = draw(q[0, :3], uniforms([seed] * 3, [0, 1, 2], Stream.DRAFT))
    draft = Draft(tokens.unsqueeze(0), torch.tensor([chain_parents(3)]), q)
    stop, extra = verify(REGISTRY[name], p, draft, [seed], [0])
    assert all(p[0, i, tokens[i]] > 0 for i in range(int(stop)))
    assert p[0, int(stop), int(extra)] > 0


@pytest.mark.parametrize("u", [0.0, 0.25, 1 - 2**-53])
def test_draw_never_returns_an_impossible_token(u: float) -> None:
    law = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0], [0.0, 0.0, 1e-30, 0.0, 0.0], [0.1, 0.1, 0.1, 0.1, 0.0]])
    picks = draw(law, torch.full((3,), u, dtype=torch.float64))
    assert (law.gather(1, picks.unsqueeze(1)) > 0).all()
    assert picks[1] == 2


def test_draw_is_the_inverse_of_the_cumulative_law() -> None:
    law = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    u = torch.tensor([0.0, 0.19, 0.2, 0.49, 0.5, 0.99], dtype=torch.float64)
    assert draw(law.expand(6, 3), u).tolist() == [0, 0, 1, 1, 2, 2]
    assert draw(2 * law.expand(6, 3), u).tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("proposes_law", "tree", "expected"),
    [(True, False, "block"), (False, False, "token"), (True, True, "tree"), (False, True, "tree")],
)
def test_auto_takes_the_best_rule(proposes_law: bool, tree: bool, expected: str) -> None:
    assert choose_rule("auto", proposes_law, tree).name == expected


@RULES
def test_rules_are_chosen_by_name(rule) -> None:
    assert choose_rule(rule.name, True, False) is rule
    assert rule.lossless


def test_impossible_choices_are_refused_by_name() -> None:
    with pytest.raises(Unsupported, match=r"block rule .* drafter .* Use rule"):
        choose_rule("block", False, False)
    for name in ("token", "block"):
        with pytest.raises(Unsupported, match=rf"{name} rule verifies chains.* Use rule"):
            choose_rule(name, True, True)
    with pytest.raises(ConfigError, match="Known rules: auto, token, tree, block"):
        choose_rule("typical", True, False)
