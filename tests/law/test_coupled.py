"""The coupled rule: the target's law over keys, and a text that no draft can change."""

import itertools
from collections import Counter

import pytest
import torch

from law.chance import ALPHA, histogram, p_value
from law.exact import V, _likelihood, table
from outpace.types import Draft
from outpace.verify.coupled import coupled_token, emit
from outpace.verify.tree import chain_parents, children, pad, path

KEYS = range(6_000)


def plain(p, key: int, length: int, start: int = 0) -> tuple[int, ...]:
    """Plain decoding: steps with an empty draft."""
    text: tuple[int, ...] = ()
    while len(text) < length:
        law = torch.tensor(p(text)).expand(1, 1, -1)
        stop, token = emit(law, pad([((), ())]), [key], [start + len(text)])
        assert stop.tolist() == [0]
        text += (int(token),)
    return text


def with_drafts(p, key: int, length: int, drafts) -> tuple[int, ...]:
    """The same text in steps that verify whatever `drafts(text)` proposes."""
    text: tuple[int, ...] = ()
    while len(text) < length:
        draft = pad([drafts(text)])
        prefixes = [
            text + tuple(int(draft.tokens[0, n]) for n in path(draft, 0, row)) for row in range(draft.nodes + 1)
        ]
        laws = torch.tensor([[p(prefix) for prefix in prefixes]])
        stop, token = emit(laws, draft, [key], [len(text)])
        text = (*prefixes[int(stop)], int(token))
    return text[:length]


TREE = (-1, -1, 0, 0, 1, 1)
DRAFTS = {
    "none": lambda text: ((), ()),
    "constant chain": lambda text: ((0, 0, 0, 0), chain_parents(4)),
    "changing chain": lambda text: (tuple((len(text) * 7 + i) % V for i in range(3)), chain_parents(3)),
    "tree": lambda text: ((0, 1, 2, 0, 1, 2), TREE),
    "everything": lambda text: ((0, 1, 2, 0, 1, 2, 0, 1, 2), (-1, -1, -1, 0, 0, 0, 1, 1, 1)),
}


def test_the_text_over_keys_has_the_law_of_the_target() -> None:
    p = table(5)
    counts = Counter(plain(p, key, 3) for key in KEYS)
    cells = list(itertools.product(range(V), repeat=3))
    assert p_value([counts[x] for x in cells], [_likelihood(p, x) for x in cells]) > ALPHA
    other = table(6)
    assert p_value([counts[x] for x in cells], [_likelihood(other, x) for x in cells]) < 1e-12  # the test has power


@pytest.mark.parametrize("drafts", DRAFTS.values(), ids=DRAFTS)
def test_no_draft_changes_the_text(drafts) -> None:
    for key in range(40):
        p = table(key % 5)
        assert with_drafts(p, key, 12, drafts) == plain(p, key, 12)


def test_a_draft_of_the_true_text_is_accepted_whole() -> None:
    p = table(3)
    truth = plain(p, 11, 5)
    laws = torch.tensor([[p(truth[:i]) for i in range(5)]])
    stop, token = emit(laws, pad([(truth[:4], chain_parents(4))]), [11], [0])
    assert (stop.tolist(), token.tolist()) == ([4], [truth[4]])


def test_a_batch_is_its_sequences() -> None:
    p = torch.softmax(torch.randn(5, 4, 16, generator=torch.Generator().manual_seed(0)) * 3, -1)
    draft = pad([((1, 2, 3), (-1, 0, 1)), ((), ()), ((4, 5), (-1, -1)), ((6,), (-1,)), ((1, 2, 3), (-1, -1, 0))])
    keys, positions = [3, 3, 2**64 - 1, -5, 3], [0, 9, 2, 1, 0]
    together = emit(p, draft, keys, positions)
    for s in range(5):
        one = slice(s, s + 1)
        alone = emit(p[one], Draft(draft.tokens[one], draft.parent[one]), keys[one], positions[one])
        assert (together[0][s], together[1][s]) == (alone[0][0], alone[1][0])


def test_only_rows_on_the_walked_path_are_read() -> None:
    p = torch.full((1, 4, 3), float("nan"))
    p[0, 0], p[0, 2] = torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0.0, 0.0, 1.0])
    draft = pad([((0, 1, 1), (-1, -1, 1))])
    assert children(draft, 0, 0) == [0, 1]
    assert [x.tolist() for x in emit(p, draft, [1], [0])] == [[2], [2]]


def test_acceptance_reaches_the_bound() -> None:
    """At least (1 - TV) / (1 + TV) with both sides on the same noise; independent draws would agree with sum(p q)."""
    for seed in range(4):
        p, q = (torch.tensor(table(s)(())) for s in (seed, 1000 + seed))
        tv = 0.5 * float((p - q).abs().sum())
        agree = sum(coupled_token(p, key, 0) == coupled_token(q, key, 0) for key in KEYS) / len(KEYS)
        assert (1 - tv) / (1 + tv) - 4 * (0.25 / len(KEYS)) ** 0.5 < agree <= 1 - tv + 4 * (0.25 / len(KEYS)) ** 0.5
        assert agree > float((p * q).sum())


def test_token_is_the_first_arg_max_and_never_impossible() -> None:
    one_hot = torch.zeros(1000)
    one_hot[417] = 1.0
    assert coupled_token(one_hot, 1, 1) == 417
    law = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0])
    picks = histogram(torch.tensor([coupled_token(law, key, 0) for key in range(2000)]), 5)
    assert picks[0] == picks[2] == picks[4] == 0
    assert p_value(picks, law.tolist()) > ALPHA
    with pytest.raises(ValueError, match="without any positive probability"):
        coupled_token(torch.zeros(4), 0, 0)
