import pytest
import torch

from outpace.types import Draft
from outpace.verify.tree import ancestors, chain_parents, children, depths, is_chain, lengths, pad, path

PARENTS = (-1, -1, 0, 0, 2, 1)


def test_chain_parents() -> None:
    assert [chain_parents(n) for n in range(4)] == [(), (-1,), (-1, 0), (-1, 0, 1)]


def test_pad_puts_minus_one_behind_the_shorter_drafts() -> None:
    draft = pad([((5, 6), (-1, 0)), ((), ()), ((7, 8, 9), (-1, -1, 0))])
    assert draft.tokens.tolist() == [[5, 6, -1], [-1, -1, -1], [7, 8, 9]]
    assert draft.parent.tolist() == [[-1, 0, -1], [-1, -1, -1], [-1, -1, 0]]
    assert lengths(draft).tolist() == [draft.length(s) for s in range(3)] == [2, 0, 3]


def test_pad_of_nothing_has_no_nodes() -> None:
    assert pad([((), ()), ((), ())]).tokens.shape == (2, 0)
    assert pad([]).tokens.shape == (0, 0)


@pytest.mark.parametrize("pair", [((1,), ()), ((1,), (0,)), ((1, 2), (-1, -2)), ((-1,), (-1,)), ((1, 2), (1, -1))])
def test_pad_refuses_what_is_no_draft(pair) -> None:
    with pytest.raises(ValueError, match="not a draft"):
        pad([pair])


def test_paths_children_and_depths_of_a_tree() -> None:
    draft = pad([((10, 11, 12, 13, 14, 15), PARENTS), ((1, 2), (-1, 0))])
    assert [path(draft, 0, row) for row in range(7)] == [[], [0], [1], [0, 2], [0, 3], [0, 2, 4], [1, 5]]
    assert ancestors(PARENTS) == [path(draft, 0, row) for row in range(1, 7)]
    assert depths(PARENTS) == [len(nodes) for nodes in ancestors(PARENTS)]
    assert [children(draft, 0, row) for row in range(7)] == [[0, 1], [2, 3], [5], [4], [], [], []]
    assert [children(draft, 1, row) for row in range(3)] == [[0], [1], []]  # padding is nobody's child


def test_is_chain_looks_past_padding() -> None:
    assert is_chain(pad([((1, 2, 3), (-1, 0, 1)), ((4,), (-1,)), ((), ())]))
    assert not is_chain(pad([((1, 2, 3), (-1, 0, 1)), ((4, 5), (-1, -1))]))
    assert is_chain(Draft(torch.empty(2, 0, dtype=torch.int64), torch.empty(2, 0, dtype=torch.int64)))
