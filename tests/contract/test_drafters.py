"""What every drafter promises: shapes, the claim it makes with q, catching up, and that nothing is left behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from fakes import (
    EOS,
    VOCAB,
    ArgmaxClaimsSoftmax,
    ByteCodec,
    CutTable,
    TableModel,
    contents,
    draft_model,
    mixed_drafter,
    pipeline,
    tree_drafter,
)
from law.chance import ALPHA, p_value
from outpace.drafters.base import Drafter, DraftRequest, StepUpdate
from outpace.drafters.draft_model import CHUNK, DraftModel
from outpace.drafters.lookup import Lookup
from outpace.sampling.pipeline import LawRow, LogitsPipeline
from outpace.types import Draft, SamplingParams, Sequence
from outpace.verify.coupled import coupled_token
from outpace.verify.tree import is_chain

TARGET = TableModel()
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "lookup": Lookup,
    "draft_model": draft_model,
    "draft_model of some tokens": lambda: DraftModel(CutTable(0, 2, 3, 5, 7, 8), pipeline(), VOCAB),
    "fake: mixed": lambda: mixed_drafter(TARGET),
    "fake: tree": lambda: tree_drafter(TARGET),
}
EACH = pytest.mark.parametrize("name", DRAFTERS)
UNSEEDED = SamplingParams(temperature=1.0)
KINDS = [UNSEEDED, SamplingParams(temperature=0), SamplingParams(temperature=0.7, seed=5), UNSEEDED.replace(top_k=2)]


def sequence(id: int, tokens: list[int], params: SamplingParams = UNSEEDED, key: int = 9) -> Sequence:
    return Sequence(id, tokens, params, params.seed if params.seed is not None else key)


def ragged() -> list[DraftRequest]:
    texts = [[1, 2, 3, 1, 2, 3, 1], [4], [5, 6, 5, 6, 5], [7, 8, 7, 8, 7, 8]]
    pairs = zip(texts, KINDS, strict=True)
    return [DraftRequest(sequence(i, text, params), i + 1) for i, (text, params) in enumerate(pairs)]


@EACH
def test_a_draft_is_well_formed(name: str) -> None:
    drafter = DRAFTERS[name]()
    requests = ragged()
    draft = drafter.propose(requests)
    assert draft.tokens.shape == draft.parent.shape == (len(requests), draft.nodes)
    assert drafter.needs.tree or is_chain(draft)
    for s, request in enumerate(requests):
        n = draft.length(s)
        assert drafter.needs.tree or n <= request.depth
        assert ((draft.tokens[s, :n] >= 0) & (draft.tokens[s, :n] < VOCAB)).all()
        assert (draft.tokens[s, n:] == -1).all()
    if draft.q is not None:
        assert drafter.needs.proposes_law
        assert draft.q.shape == (len(requests), draft.nodes + 1, VOCAB) and draft.q.dtype == torch.float32


@EACH
def test_a_sequence_alone_and_in_company_gets_the_same_draft(name: str) -> None:
    together = DRAFTERS[name]().propose(ragged())
    for s, request in enumerate(ragged()):
        alone = DRAFTERS[name]().propose([request])
        assert alone.tokens[0, : alone.length(0)].tolist() == together.tokens[s, : together.length(s)].tolist()


@EACH
def test_release_forgets_and_ignores_the_unknown(name: str) -> None:
    drafter = DRAFTERS[name]()
    first = drafter.propose(ragged()).tokens.tolist()
    for i in range(6):
        drafter.release(i)
    assert drafter.propose(ragged()).tokens.tolist() == first


def claim_fits(drafter: Drafter, params: SamplingParams) -> float:
    """Smallest p-value over the draft positions of "the proposed token follows the claimed q, given those before"."""
    drawn: dict[tuple[int, ...], Counter[int]] = {}
    claimed: dict[tuple[int, ...], list[float]] = {}
    requests = [DraftRequest(sequence(i, [1, 2, 3, 1, 2, 3], params, key=i), 2) for i in range(3000)]
    draft = drafter.propose(requests)
    for s in range(len(requests)):
        tokens = draft.tokens[s].tolist()
        for i, token in enumerate(tokens):
            context = tuple(tokens[:i])
            q = draft.q[s, i] if draft.q is not None else torch.eye(VOCAB)[token]
            claimed.setdefault(context, q.tolist())
            drawn.setdefault(context, Counter())[token] += 1
    return min(
        p_value([count[t] for t in range(VOCAB)], claimed[context])
        for context, count in drawn.items()
        if count.total() > 200
    )


@pytest.mark.parametrize("name", ["draft_model", "lookup"])
@pytest.mark.parametrize("params", [UNSEEDED, SamplingParams(temperature=0.5, top_k=4), SamplingParams(seed=1)])
def test_the_claimed_law_is_the_law_of_the_proposal(name: str, params: SamplingParams) -> None:
    assert claim_fits(DRAFTERS[name](), params) > ALPHA / 10


def test_planted_argmax_under_a_softmax_is_caught() -> None:
    assert claim_fits(ArgmaxClaimsSoftmax(TableModel(), pipeline(), VOCAB), UNSEEDED) < 1e-12


def test_coupled_drafts_read_the_targets_noise() -> None:
    """With the target as drafter every proposal is what the target will say, and no q is claimed."""
    params = SamplingParams(temperature=0.9, seed=21)
    drafter, text = draft_model(wrong=0.0), [3, 4, 5]
    draft = drafter.propose([DraftRequest(sequence(0, text, params), 5)])
    assert draft.q is None
    for token in draft.tokens[0].tolist():
        law = pipeline().probs(TARGET.logits(text).unsqueeze(0), [LawRow(params, text, 3)])[0]
        assert token == coupled_token(law, 21, len(text))
        text = [*text, token]


def step(drafter: DraftModel, seq: Sequence, depth: int, kept: int, own: int) -> Draft:
    """Propose, accept `kept`, add the token `own`."""
    draft = drafter.propose([DraftRequest(seq, depth)])
    new = [*draft.tokens[0, :kept].tolist(), own]
    seq.tokens += new
    drafter.observe([StepUpdate(seq, tuple(range(kept)), tuple(new))])
    return draft


def test_rows_follow_the_text_whatever_is_accepted() -> None:
    """All accepted, none, some, with plain steps in between: the rows are always a prefix of the text."""
    drafter, seq = draft_model(), sequence(0, [1, 2, 3], SamplingParams(temperature=0))
    for depth, kept in ((4, 4), (4, 0), (1, 1), (1, 0), (3, 2)):
        step(drafter, seq, depth, kept, own=7)
        assert contents(drafter.store, 0) == seq.tokens[: drafter.store.length(0)]
        assert drafter.store.length(0) >= len(seq.tokens) - 2
        seq.tokens += [5, 6]  # plain steps in between: the drafter hears nothing of them
    assert drafter.store.reserved(0) == 0


def test_the_catch_up_of_a_long_prompt_comes_in_chunks() -> None:
    drafter = draft_model(wrong=0.0)
    text = [1 + i % 7 for i in range(2 * CHUNK + 30)]
    draft = step(drafter, sequence(0, list(text), SamplingParams(temperature=0)), 2, 0, own=1)
    assert drafter._model.forwards == 2 + 2
    assert contents(drafter.store, 0) == text
    assert draft.tokens[0, 0] == TARGET.logits(text).argmax()


@pytest.mark.parametrize(("length", "expected"), [(30, 3), (37, 3), (38, 3), (39, 2), (40, 1), (41, 0), (60, 0)])
def test_its_own_context_ends_the_drafting(length: int, expected: int) -> None:
    """The last drafted token needs no row, so a text as long as the context still gets one."""
    drafter = DraftModel(TableModel(context=40), pipeline(), VOCAB)
    draft = drafter.propose([DraftRequest(sequence(0, [1] * length), 3)])
    assert draft.length(0) == expected


def test_a_full_store_ends_the_drafting_of_the_others_only() -> None:
    drafter = DraftModel(TableModel(), pipeline(), VOCAB, max_bytes=100 * 8)
    requests = [DraftRequest(sequence(i, [1] * 60), 3) for i in range(2)]
    draft = drafter.propose(requests)
    assert [draft.length(0), draft.length(1)] == [3, 0]
    drafter.observe([StepUpdate(r.sequence, (), (1,)) for r in requests])
    drafter.release(0)
    assert drafter.propose(requests[1:]).length(0) == 3


def test_a_token_beyond_its_vocabulary_ends_the_drafting() -> None:
    """A target may know special tokens that the draft model has no embedding for."""
    draft = draft_model().propose([DraftRequest(sequence(0, [1, VOCAB, 2]), 3)])
    assert draft.nodes == 0


@pytest.mark.parametrize("width", [VOCAB - 2, VOCAB + 5])
def test_q_has_the_width_of_the_target(width: int) -> None:
    """Scenario 25: sizes that differ by padding. Ids that the target lacks are never proposed."""
    known = min(width, VOCAB)
    drafter = DraftModel(TableModel(), LogitsPipeline(VOCAB, ByteCodec.eos_ids, known), width)
    draft = drafter.propose([DraftRequest(sequence(i, [1, 2, 3], key=i), 4) for i in range(50)])
    assert draft.q is not None and draft.q.shape[-1] == width
    assert (draft.tokens < known).all()
    assert torch.allclose(draft.q[:, :4].sum(-1), torch.ones(50, 4))
    assert (draft.q[:, :4, known:] == 0).all()


def test_the_draft_obeys_min_tokens_of_the_target() -> None:
    params = SamplingParams(temperature=0, min_tokens=50, max_tokens=50, logit_bias={EOS: 100.0})
    assert EOS not in draft_model().propose([DraftRequest(sequence(0, [1, 2], params), 6)]).tokens
