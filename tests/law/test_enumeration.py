"""Every rule emits the target's law, exactly; rules that are known to be wrong do not."""

from dataclasses import replace

import pytest
import torch

from law.exact import (
    PAIRS,
    Proposal,
    V,
    as_batch,
    best_chain,
    claimed,
    enumerate_rule,
    sampled_chains,
    sampled_trees,
    table,
    top_tree,
)
from outpace.types import Draft
from outpace.verify import REGISTRY
from outpace.verify.block import BlockRule
from outpace.verify.token import WalkRule

TOKEN, TREE, BLOCK = REGISTRY["token"], REGISTRY["tree"], REGISTRY["block"]
CHAIN_RULES = pytest.mark.parametrize("rule", [TOKEN, TREE, BLOCK], ids=lambda rule: rule.name)
EXACT, WRONG = 1e-12, 1e-3


def worst(rule, proposals, depth: int, pairs=PAIRS) -> float:
    """Largest error over random (target, drafter) pairs; `proposals` maps the drafter's table to what it proposes."""
    return max(enumerate_rule(rule, table(s), list(proposals(table(1000 + s))), depth)[0] for s in pairs)


@CHAIN_RULES
def test_sampled_chains_keep_the_law(rule) -> None:
    assert worst(rule, lambda q: sampled_chains(q, 3), 3) < EXACT


@CHAIN_RULES
def test_ragged_batches_keep_the_law(rule) -> None:
    """The length (0 to 3) is drawn before the tokens are, and all lengths share one batch."""
    assert worst(rule, lambda q: [x for n in range(4) for x in sampled_chains(q, n, 0.25)], 3) < EXACT


@CHAIN_RULES
def test_arg_max_chains_without_a_claim_keep_the_law(rule) -> None:
    assert worst(rule, lambda q: [best_chain(q, 3)], 3) < EXACT


@CHAIN_RULES
def test_point_mass_rows_keep_the_law(rule) -> None:
    """What coupled neighbours carry in a batch that has a q."""

    def proposals(q):
        best = best_chain(q, 3)
        rows = [[float(t == token) for t in range(V)] for token in (*best.tokens, 0)]
        return [replace(best, q=tuple(map(tuple, rows)))]

    assert worst(rule, proposals, 3) < EXACT


@CHAIN_RULES
@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_a_claim_that_cannot_produce_its_token_is_a_point_mass(rule, bad: float) -> None:
    """Accepting such a token outright (the limit of min(1, p / q)) would not keep the law; ignoring the claim does."""

    def proposals(q):
        best = claimed(best_chain(q, 3), q)
        rows = [list(row) for row in best.q]
        for row, token in enumerate(best.tokens):
            rows[row][token] = bad
        return [replace(best, q=tuple(map(tuple, rows)))]

    assert worst(rule, proposals, 3) < EXACT


def test_trees_drawn_without_replacement_keep_the_law() -> None:
    assert worst(TREE, sampled_trees, 2) < EXACT


def test_top_k_trees_keep_the_law() -> None:
    assert worst(TREE, lambda q: [top_tree(q)], 2) < EXACT


def test_unclaimed_tree_beside_claimed_ones_keeps_the_law() -> None:
    """A row of zeros in q claims nothing; the point mass of the first of two siblings claims nothing for the second."""

    def nothing(q):
        return [replace(top_tree(q), q=tuple((0.0,) * V for _ in range(7)))]

    def first_only(q):
        tree = top_tree(q)
        of_first = {row: tree.tokens[tree.parents.index(row - 1)] for row in range(3)}
        return [replace(tree, q=tuple(tuple(float(t == of_first.get(row)) for t in range(V)) for row in range(7)))]

    assert worst(TREE, nothing, 2) < EXACT
    assert worst(TREE, first_only, 2) < EXACT


def test_trees_of_mixed_shape_keep_the_law() -> None:
    """Half the time a tree, half the time a chain of two, in one batch."""

    def proposals(q):
        return [replace(x, weight=x.weight / 2) for x in (*sampled_trees(q), *sampled_chains(q, 2))]

    assert worst(TREE, proposals, 2) < EXACT


def test_block_never_accepts_less_than_token() -> None:
    gains = []
    for s in PAIRS:
        chains = list(sampled_chains(table(1000 + s), 3))
        gains.append(enumerate_rule(BLOCK, table(s), chains, 3)[1] - enumerate_rule(TOKEN, table(s), chains, 3)[1])
    assert min(gains) > -1e-12
    assert max(gains) > 0.01  # and it is not the token rule under another name


def test_the_published_toy() -> None:
    """Sun et al. 2024: p = [1/3, 2/3], q = [2/3, 1/3], K = 2: the token rule accepts 10/9 tokens, block 11/9."""
    chains = [x for x in sampled_chains(lambda _: [2 / 3, 1 / 3, 0.0], 2) if x.weight > 0]
    for rule, expected in ((TOKEN, 10 / 9), (BLOCK, 11 / 9)):
        assert _accepted(rule, lambda _: [1 / 3, 2 / 3, 0.0], chains) == pytest.approx(expected, abs=1e-12)


def _accepted(rule, p, chains: list[Proposal]) -> float:
    law = rule.stop_law(*as_batch(chains, p))
    weights = torch.tensor([x.weight for x in chains], dtype=torch.float64)
    return (weights @ law @ torch.arange(3, dtype=torch.float64)).item()


# ---- wrong rules, each seen in a public engine; the enumeration must catch every one


def test_catches_an_arg_max_draft_scored_with_its_softmax() -> None:
    assert worst(TOKEN, lambda q: [claimed(best_chain(q, 3), q)], 3) > WRONG


class BlockWithTokenResidual(BlockRule):
    def residual(self, p, draft, stop):
        return TOKEN.residual(p, draft, stop)


class BlockUntilFirstFailure(BlockRule):
    def stop_law(self, p, draft):
        law = super().stop_law(p, draft)
        still = 1 - (law.flip(-1).cumsum(-1).flip(-1) - law)  # no later index passed
        passes = torch.where(still > 0, law / still, 1.0).clamp(max=1.0)
        result, reach = torch.zeros_like(law), torch.ones_like(law[:, 0])
        for i in range(draft.nodes):
            result[:, i] = reach * (1 - passes[:, i + 1])
            reach = reach * passes[:, i + 1]
        result[:, -1] = reach
        return result


class OrdinaryResidual(WalkRule):
    def residual(self, p, draft: Draft, stop):
        return p[torch.arange(len(stop)), stop]


@pytest.mark.parametrize(
    "rule",
    [BlockWithTokenResidual(), BlockUntilFirstFailure(), OrdinaryResidual("token", False)],
    ids=lambda r: type(r).__name__,
)
def test_catches_wrong_chain_rules(rule) -> None:
    assert worst(rule, lambda q: sampled_chains(q, 3), 3) > WRONG


@pytest.mark.parametrize("proposals", [sampled_trees, lambda q: [top_tree(q)]], ids=["sampled", "top-k"])
def test_catches_siblings_accepted_independently(proposals) -> None:
    """Every child against the untouched p and q: what a chain rule does if it is given a tree."""
    assert worst(WalkRule("independent", trees=False), proposals, 2, pairs=range(5)) > WRONG


class WithReplacement(WalkRule):
    """Forgets that a sibling was drawn from what the ones before left of q."""

    def stop_law(self, p, draft):
        law = torch.zeros(p.shape[0], draft.nodes + 1, dtype=torch.float64)
        law[:, 0] = 1
        for s in range(len(p)):
            left = p[s].clone()
            for node in range(draft.nodes):
                row, token = int(draft.parent[s, node]) + 1, int(draft.tokens[s, node])
                share = min(1.0, float(left[row, token] / draft.q[s, row, token]))
                law[s, node + 1], law[s, row] = law[s, row] * share, law[s, row] * (1 - share)
                rest = (left[row] - draft.q[s, row]).clamp(min=0)
                left[row] = rest / rest.sum() if rest.sum() > 0 else left[row]
        return law


def test_catches_siblings_judged_as_if_replaced() -> None:
    assert worst(WithReplacement("tree", True), sampled_trees, 2, pairs=range(5)) > WRONG
