"""Adaptive K in a world of known costs and known acceptance: never much slower than plain, near the best fixed K."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from outpace.engine.costs import PassCosts
from outpace.engine.policy import Acceptance, AdaptiveDepth, AdaptiveSettings, FixedDepth, Policy
from outpace.engine.step import StepReport, Work
from outpace.engine.stopping import Emission
from outpace.types import SamplingParams, Sequence, TokenKind

# Measured shapes: five rows cost 1.3 passes, eight 1.9; a draft pass 0.12.
VERIFY = {1: 1.0, 2: 1.0, 3: 1.02, 4: 1.25, 5: 1.29, 6: 1.55, 8: 1.9, 16: 3.6, 32: 6.8}
DRAFT = {1: 0.12, 2: 0.13, 4: 0.17, 8: 0.3, 16: 0.6}
Right = Callable[[random.Random, int, int], bool]  # (chance, tokens generated, position in the draft)


class World:
    """Sequences that a policy decodes; time passes as VERIFY and DRAFT say, `slow` times slower."""

    def __init__(self, policy: Policy, right: list[Right], tokens: int = 256, slow: float = 1.0) -> None:
        self.policy, self.right, self.slow = policy, right, slow
        self.chance, self.verify, self.draft = random.Random(1), PassCosts(VERIFY), PassCosts(DRAFT)
        params = SamplingParams(max_tokens=tokens)
        self.sequences = [Sequence(i, [1] * 9, params, 0) for i in range(len(right))]
        for sequence in self.sequences:
            sequence.tokens.append(1)
        self.time, self.chosen = 0.0, []  # type: ignore[var-annotated]

    def run(self) -> float:
        """Tokens per plain pass of one sequence, until the first of them ends."""
        before = sum(s.generated for s in self.sequences)
        while all(s.room for s in self.sequences):
            self.step(self.sequences)
        return (sum(s.generated for s in self.sequences) - before) / self.time

    def step(self, ready: list[Sequence]) -> None:
        depths = self.policy.depths(ready, len(ready))
        emissions, taken = {}, {}
        for s in ready:
            kept = 0
            while kept < depths[s.id] and self.right[s.id](self.chance, s.generated, kept):
                kept += 1
            emissions[s.id] = Emission(
                (1,) * (kept + 1), (TokenKind.BONUS,) * (kept + 1), (*range(kept),), depths[s.id], _none
            )
            taken[s.id] = min(kept + 1, s.room)
            self.chosen.append(depths[s.id])
        widths = [sum(d > i for d in depths.values()) for i in range(max(depths.values()))]
        drafting = sum(self.draft.at(w) for w in widths) * self.slow
        verifying = self.verify.at(len(ready) + sum(depths.values())) * self.slow
        work = [Work(s, 1, depths[s.id], True) for s in ready]
        self.policy.observe(work, StepReport(emissions, taken, drafting, verifying, 0.0))
        for s in ready:
            s.tokens += [1] * taken[s.id]
            if not s.room:
                self.policy.release(s.id)
        self.time += drafting + verifying


def _none(i: int) -> None:
    raise AssertionError(i)


def adaptive(k_max: int = 8) -> AdaptiveDepth:
    return AdaptiveDepth(PassCosts(VERIFY), PassCosts(DRAFT), AdaptiveSettings(k_max))


def always(p: float) -> Right:
    return lambda chance, _, __: chance.random() < p


@pytest.mark.parametrize("p", [0.0, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.97, 1.0])
def test_it_comes_near_the_best_fixed_draft_and_never_far_below_plain(p: float) -> None:
    fixed = {k: World(FixedDepth(k), [always(p)], 2000).run() for k in range(9)}
    found = World(adaptive(), [always(p)], 2000).run()
    assert fixed[0] == pytest.approx(1.0)
    assert found > 0.9 * max(fixed.values()), (found, fixed)
    assert World(adaptive(), [always(p)], 128).run() >= 0.97 or p > 0.1


@pytest.mark.parametrize("tokens", [64, 128, 512])
def test_a_hostile_text_costs_no_more_than_three_in_a_hundred(tokens: int) -> None:
    """Also if earlier texts were easy, which the policy has learned from."""
    policy = adaptive()
    World(policy, [always(0.98)]).run()
    world = World(policy, [always(0.0)], tokens)
    assert world.run() >= (0.97 if tokens >= 128 else 0.94)
    assert 0 in world.chosen and any(world.chosen)


def test_planted_blind_depth_is_slower_there() -> None:
    """What the test above would say of a policy that learns nothing."""
    assert World(FixedDepth(4), [always(0.0)], 128).run() < 0.6


def test_a_text_that_turns_easy_is_noticed() -> None:
    world = World(adaptive(), [lambda _, generated, __: generated > 200], 600)
    world.run()
    assert max(world.chosen[:60]) < 8 and world.chosen[-10:].count(8) > 5


def test_a_draft_that_promises_nothing_more_is_not_made_longer() -> None:
    """Right at the first position only: the second is never worth its pass."""
    world = World(adaptive(), [lambda _, __, position: position == 0], 400)
    world.run()
    assert max(world.chosen[100:]) <= 2 and world.chosen[100:].count(1) > 0.9 * len(world.chosen[100:])


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_a_batch_is_never_slower_than_plain_and_gains_while_rows_are_cheap(count: int) -> None:
    plain = World(FixedDepth(0), [always(0.8)] * count).run()
    found = World(adaptive(), [always(0.8)] * count).run()
    assert found > (1.2 if count <= 2 else 0.98) * plain


def test_in_a_batch_the_sequence_that_is_right_gets_the_rows() -> None:
    world = World(adaptive(), [always(0.95), always(0.1)], 300)
    world.run()
    good, bad = ([d for i, d in enumerate(world.chosen[:200]) if i % 2 == which] for which in (0, 1))
    assert sum(good) > 4 * sum(bad)


def test_a_machine_twice_as_slow_changes_nothing() -> None:
    """Costs were measured at another speed: ratios are what counts."""
    usual = World(adaptive(), [always(0.8)], 1000).run()
    assert 2.5 * World(adaptive(), [always(0.8)], 1000, slow=2.5).run() > 0.9 * usual


def test_the_first_and_the_last_token_take_no_draft() -> None:
    for policy in (FixedDepth(4), adaptive()):
        fresh, last = (
            Sequence(0, [1], SamplingParams(max_tokens=9), 0),
            Sequence(1, [1], SamplingParams(max_tokens=2), 0),
        )
        last.tokens.append(1)
        assert policy.depths([fresh, last], 2) == {0: 0, 1: 0}


def test_acceptance_counts_what_was_tried() -> None:
    seen = Acceptance(fade=1.0)
    seen.add(drafted=4, accepted=2)
    seen.add(drafted=1, accepted=1)
    assert (seen.right, seen.tried) == ([2.0, 1.0, 0.0], [2.0, 1.0, 1.0])
    assert seen.chance(0, 0.5, 2.0) == 0.75 and seen.chance(3, 0.4, 2.0) == 0.4


def test_costs_between_and_beyond_what_was_measured() -> None:
    costs = PassCosts({1: 1.0, 3: 2.0, 5: 2.5})
    assert [costs.at(rows) for rows in (0, 1, 2, 3, 4, 5, 9)] == [1.0, 1.0, 1.5, 2.0, 2.25, 2.5, 3.5]
    assert PassCosts({2: 3.0}).at(7) == 3.0 and PassCosts({1: 2.0, 2: 1.0}).at(5) == 1.0
    for _ in range(200):
        costs.learn(3, 4.0)
    assert costs.at(3) == pytest.approx(4.0, rel=0.01) and costs.at(1) > 1.4
    once = PassCosts({1: 1.0})
    once.learn(1, 1000.0)  # an interrupted pass
    assert once.at(1) < 1.2
    for wrong in ({}, {1: 0.0}):
        with pytest.raises(ValueError, match="positive seconds"):
            PassCosts(wrong)
