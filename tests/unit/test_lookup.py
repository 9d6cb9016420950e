"""Suffix lookup on small texts where the right draft can be read off."""

from __future__ import annotations

import random

import pytest

from outpace.drafters.base import DraftRequest
from outpace.drafters.lookup import Lookup, LookupSettings
from outpace.types import SamplingParams, Sequence


def draft(text: list[int], depth: int, **settings: float) -> list[int]:
    drafter = Lookup(LookupSettings(**settings))  # type: ignore[arg-type]
    return drafter.propose([DraftRequest(Sequence(0, text, SamplingParams(), 0), depth)]).tokens[0].tolist()


def test_it_repeats_what_followed() -> None:
    assert draft([1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3], 4) == [4, 5, 6, 7]


@pytest.mark.parametrize("text", [[1], [1, 2, 3, 4], [7, 7, 7, 7, 1]])
def test_no_match_is_an_empty_draft(text: list[int]) -> None:
    """Scenario 43."""
    assert draft(text, 4) == []


def test_the_longer_match_wins_over_the_more_frequent_short_one() -> None:
    assert draft([1, 2, 3, 8, 3, 9, 3, 9, 3, 9, 1, 2, 3], 1) == [8]


def test_the_most_frequent_child_wins_and_a_tie_goes_to_the_latest() -> None:
    assert draft([3, 8, 3, 9, 3, 9, 3], 1) == [9]
    assert draft([3, 8, 3, 9, 3], 1) == [9]


def test_a_draft_is_no_longer_than_the_match_supports() -> None:
    text = [3, 10, 11, 12, 13, 14, 3]
    assert draft(text, 8) == [10, 11]
    assert draft(text, 8, factor=4.0) == [10, 11, 12, 13]


def test_uncertain_continuations_are_cut_at_the_floor() -> None:
    text = [5, 1, 6, 5, 2, 7, 5, 3, 8, 5, 4, 9, 5]
    assert draft(text, 4, floor=0.3) == []
    assert len(draft(text, 4, floor=0.2)) == 2


def test_a_loop_goes_on_beyond_the_end_of_the_text() -> None:
    assert draft([1, 2, 1, 2, 1, 2], 6) == [1, 2, 1, 2, 1, 2]


def test_the_shortest_match_can_be_raised() -> None:
    assert draft([3, 8, 1, 3], 1) == [8]
    assert draft([3, 8, 1, 3], 1, min_match=2) == []


def test_growing_step_by_step_finds_what_a_fresh_index_finds() -> None:
    chance = random.Random(1)
    sequence = Sequence(0, [chance.randrange(4) for _ in range(20)], SamplingParams(), 0)
    drafter = Lookup()
    for _ in range(60):
        grown = drafter.propose([DraftRequest(sequence, 5)]).tokens.tolist()
        assert grown == Lookup().propose([DraftRequest(sequence, 5)]).tokens.tolist()
        sequence.tokens += [chance.randrange(4) for _ in range(chance.randrange(1, 5))]


def test_a_sequence_that_starts_again_is_read_anew() -> None:
    """After a preemption the engine releases it, and the same id comes back."""
    drafter = Lookup()
    sequence = Sequence(0, [1, 2, 3, 1, 2], SamplingParams(), 0)
    drafter.propose([DraftRequest(sequence, 2)])
    drafter.release(0)
    other = Sequence(0, [4, 5, 6, 4, 5], SamplingParams(), 0)
    assert drafter.propose([DraftRequest(other, 2)]).tokens.tolist() == [[6, 4]]
