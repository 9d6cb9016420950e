"""LogitsPipeline against a plain Python reading of the parameters, drawn laws, and independence of rows."""

import math

import pytest
import torch

from law.chance import ALPHA, histogram, p_value
from outpace.errors import ParameterError
from outpace.models.base import first_largest
from outpace.sampling import pipeline as module
from outpace.sampling.pipeline import LawRow, LogitsPipeline
from outpace.sampling.rng import Stream, uniforms
from outpace.types import SamplingParams
from outpace.verify.coupled import coupled_token
from outpace.verify.rule import draw

V, REAL, EOS = 12, 11, 10  # id 11 is padding, with the largest logit
LOGITS = [1.5, -0.5, 2.0, 0.25, 2.0, -1.0, 0.0, 0.75, -3.0, 1.0, 0.5, 9.0]
TOKENS, PROMPT, PATH = [2, 2, 5, 4, 4, 7, 0], 3, (4, 9)

SETTINGS = {
    "plain": {},
    "cold": {"temperature": 0.4},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 3},
    "top_k wider than the vocabulary": {"top_k": 10**9},
    "top_p": {"top_p": 0.7},
    "top_p tiny": {"top_p": 1e-9},
    "min_p": {"min_p": 0.2},
    "repetition": {"repetition_penalty": 1.4},
    "repetition below 1": {"repetition_penalty": 0.7},
    "presence": {"presence_penalty": 1.0},
    "frequency": {"frequency_penalty": 0.6},
    "negative penalties": {"frequency_penalty": -0.5, "presence_penalty": -1.0},
    "bias": {"logit_bias": {1: 3.0, 2: -100.0}},
    "min_tokens": {"min_tokens": 7, "stop_token_ids": (4,)},
    "min_tokens reached": {"min_tokens": 6, "stop_token_ids": (4,)},
    "greedy": {"temperature": 0.0, "top_p": 0.9},
    "greedy with penalties": {"temperature": 0.0, "frequency_penalty": 2.0, "repetition_penalty": 1.3},
    "everything": {
        "temperature": 0.8,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {6: 1.5},
        "min_tokens": 50,
        "stop_token_ids": (0,),
    },
}


def expected(settings: dict, logits=LOGITS, tokens=TOKENS, path=PATH) -> list[float]:
    """The documented order of stages, one token at a time."""
    params = SamplingParams(**settings)
    z = [x if i < REAL else -math.inf for i, x in enumerate(logits)]
    output = [*tokens[PROMPT:], *path]
    if len(output) < params.min_tokens:
        for token in (EOS, *params.stop_token_ids):
            z[token] = -math.inf
    for token, bias in params.logit_bias.items():
        z[token] += bias
    for token in {*tokens, *path}:
        z[token] = z[token] / params.repetition_penalty if z[token] > 0 else z[token] * params.repetition_penalty
    for token in set(output):
        z[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    if params.temperature == 0:
        return [float(i == z.index(max(z))) for i in range(V)]
    order = sorted(range(V), key=lambda i: (-z[i], i))
    kept = order[: params.top_k] if params.top_k else order
    law = {i: math.exp((z[i] - max(z)) / params.temperature) for i in kept}
    law = {i: x / sum(law.values()) for i, x in law.items()}
    if params.top_p < 1:
        n = next(n for n in range(1, V + 1) if sum(law[i] for i in kept[:n]) >= params.top_p)
        law = {i: law[i] for i in kept[:n]}
    law = {i: x for i, x in law.items() if x >= params.min_p * max(law.values())}
    return [law.get(i, 0.0) / sum(law.values()) for i in range(V)]


def make() -> LogitsPipeline:
    return LogitsPipeline(V, frozenset({EOS}), REAL)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_every_parameter_gives_its_law(settings: dict) -> None:
    law = make().probs(torch.tensor([LOGITS]), [LawRow(SamplingParams(**settings), TOKENS, PROMPT, PATH)])[0]
    reference = expected(settings)
    assert law.dtype == torch.float32
    assert law.tolist() == pytest.approx(reference, abs=2e-6)
    assert [x == 0 for x in law.tolist()] == [x == 0 for x in reference]
    assert abs(law.double().sum().item() - 1) < 1e-6


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_drawn_and_coupled_tokens_have_the_law(settings: dict) -> None:
    law = make().probs(torch.tensor([LOGITS]), [LawRow(SamplingParams(**settings), TOKENS, PROMPT, PATH)])[0]
    keys = range(4000)
    drawn = draw(law.expand(4000, -1), uniforms(keys, [0] * 4000, Stream.EXTRA))
    coupled = torch.tensor([coupled_token(law, key, 0) for key in keys])
    for tokens in (drawn, coupled):
        assert p_value(histogram(tokens, V), expected(settings)) > ALPHA


def test_leaving_any_parameter_out_would_be_noticed() -> None:
    """The chi-square above has power: the plain law fails it for every setting that changes the law."""
    law = torch.tensor(expected({}))
    plain = histogram(draw(law.expand(4000, -1), uniforms(range(4000), [0] * 4000, Stream.EXTRA)), V)
    unchanged = {name for name, settings in SETTINGS.items() if p_value(plain, expected(settings)) > ALPHA}
    assert unchanged == {"plain", "top_k wider than the vocabulary", "min_tokens reached"}


def row(path=(), tokens=(0,), prompt_len=1, **settings) -> LawRow:
    return LawRow(SamplingParams(**settings), list(tokens), prompt_len, path)


def test_padded_tail_is_impossible_and_not_counted() -> None:
    logits = torch.zeros(2, 8)
    logits[:, 5:] = 50.0
    law = LogitsPipeline(8, frozenset(), 5).probs(logits, [row(), row(temperature=0.0)])
    assert law[0].tolist() == pytest.approx([0.2] * 5 + [0.0] * 3)
    assert law[1].tolist() == [1.0] + [0.0] * 7


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0, 2.0]])
    pipeline = LogitsPipeline(6, frozenset())

    def support(**settings) -> list[int]:
        return pipeline.probs(logits, [row(**settings)])[0].nonzero().flatten().tolist()

    assert support(temperature=0.0) == [1]
    assert support(top_k=2) == [1, 2]
    assert support(top_k=3, top_p=0.5) == [1, 2]
    assert support(top_p=0.3) == [1, 2]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_law_that_needs_no_logits_is_one_hot_on_the_first_largest(settings: dict) -> None:
    rows = [LawRow(SamplingParams(**settings), TOKENS, PROMPT, PATH)] * 2
    logits = torch.tensor([LOGITS, [math.nan, *LOGITS[1:]]])
    if make().takes_largest(rows):
        assert make().probs(logits, rows).argmax(-1).tolist() == first_largest(logits[:, :REAL]).tolist()
    assert make().takes_largest(rows) == (settings == SETTINGS["greedy"])


def test_a_path_counts_like_output() -> None:
    """Bit for bit: otherwise a verified row would differ from the same row in plain decoding."""
    pipeline = LogitsPipeline(40, frozenset({1}))
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(3)) * 2
    tokens = [3, 9, 9, 30, 3, 7, 7, 7, 12]
    settings = {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.37,
        "presence_penalty": 0.21,
        "min_tokens": 4,
        "temperature": 0.7,
    }
    for cut in range(2, len(tokens) + 1):
        split = pipeline.probs(logits, [row(tuple(tokens[cut:]), tokens[:cut], 2, **settings)])
        whole = pipeline.probs(logits, [row((), tokens, 2, **settings)])
        assert torch.equal(split, whole)
    no_path = pipeline.probs(logits, [row((), tokens[:4], 2, **settings)])
    assert not torch.equal(no_path, whole)


def test_min_tokens_counts_the_path() -> None:
    pipeline = LogitsPipeline(4, frozenset({2}))
    logits = torch.tensor([[0.0, 0.0, 9.0, 1.0]] * 4)
    rows = [row((3,) * n, (0, 1), 1, min_tokens=3, stop_token_ids=(3,), temperature=0.0) for n in range(4)]
    assert pipeline.probs(logits, rows).argmax(-1).tolist() == [0, 0, 2, 2]  # one output token before the path


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_row_has_the_same_bits_in_any_company(settings: dict) -> None:
    """Alone, among strangers, as a slice of something larger, and on any number of threads."""
    wide = 3_001
    pipeline = LogitsPipeline(wide + 7, frozenset({EOS}), wide)
    logits = torch.randn(9, wide + 7, generator=torch.Generator().manual_seed(1)) * 4
    strangers = [row((i,), (i, 3), 1, **list(SETTINGS.values())[i * 2]) for i in range(9)]
    mine = LawRow(SamplingParams(**settings), TOKENS, PROMPT, PATH)
    threads = torch.get_num_threads()
    try:
        for at in range(9):
            torch.set_num_threads(1 + at % 3)
            alone = pipeline.probs(logits[at : at + 1].clone(), [mine])[0]
            for n in (at + 1, 9):
                rows = [*strangers[:at], mine, *strangers[at + 1 : n]]
                assert torch.equal(pipeline.probs(logits[:n], rows)[at], alone)
            doubled = torch.stack([logits, logits], -1)[..., 0]  # strided rows
            assert torch.equal(pipeline.probs(doubled, [*strangers[:at], mine, *strangers[at + 1 :]])[at], alone)
    finally:
        torch.set_num_threads(threads)


def test_large_rows_have_the_same_bits_on_any_number_of_threads() -> None:
    pipeline = LogitsPipeline(151_936, frozenset())
    logits = torch.randn(2, 151_936, generator=torch.Generator().manual_seed(1)) * 4
    threads, seen = torch.get_num_threads(), []
    try:
        for n in (1, 2, 4):
            torch.set_num_threads(n)
            seen.append(pipeline.probs(logits, [row(temperature=0.9), row(top_p=0.95, min_p=0.001)]))
            assert (seen[-1].double().sum(-1) - 1).abs().max() < 1e-6
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0, 30.0])
@pytest.mark.parametrize("top_p", [0.1, 0.9, 0.999999, 1 - 2**-40])
def test_nucleus_equals_that_of_a_full_sort(spread: float, top_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(1, 5_000, generator=torch.Generator().manual_seed(2)) * spread
    logits[0, 100:200] = logits[0, 7]  # ties
    pipeline = LogitsPipeline(5_000, frozenset())
    quick = pipeline.probs(logits, [row(top_p=top_p)])
    monkeypatch.setattr(module, "_FLOORS", (0.0,))
    assert torch.equal(quick, pipeline.probs(logits, [row(top_p=top_p)]))


def test_rows_without_a_finite_logit() -> None:
    inf, nan = math.inf, math.nan
    logits = torch.tensor([[-inf] * 4, [nan] * 4, [nan, 1.0, -inf, 1.0], [inf, 0.0, inf, 0.0]])
    pipeline = LogitsPipeline(4, frozenset(), 3)
    for settings in ({}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 0.0}):
        law = pipeline.probs(logits, [row(**settings)] * 4)
        assert law.isfinite().all() and torch.allclose(law.sum(-1), torch.ones(4))
    law = pipeline.probs(logits, [row()] * 4)
    assert law[:2].tolist() == [pytest.approx([1 / 3, 1 / 3, 1 / 3, 0.0])] * 2
    assert law[2].tolist() == [0.0, 1.0, 0.0, 0.0]
    assert law[3].tolist() == [0.5, 0.0, 0.5, 0.0]


def test_tiny_temperature_does_not_overflow() -> None:
    law = LogitsPipeline(3, frozenset()).probs(torch.tensor([[88.0, -90.0, 87.0]]), [row(temperature=1e-310)])
    assert law.tolist() == [[1.0, 0.0, 0.0]]


def test_a_further_edit_sees_the_path() -> None:
    """How a grammar would join: after the penalties, before the temperature."""

    class OnlyAfter:
        def wants(self, row):
            return row.path[-1:] == (2,)

        def apply(self, scores, row):
            scores[:-1] = -math.inf

    rows = [row(path) for path in ((), (2,), (2, 1), (1, 2))]
    law = LogitsPipeline(3, frozenset(), edits=[OnlyAfter()]).probs(torch.zeros(4, 3), rows)
    assert [x == [0.0, 0.0, 1.0] for x in law.tolist()] == [False, True, False, True]


def test_logits_are_left_alone() -> None:
    logits = torch.tensor([LOGITS])
    make().probs(logits, [LawRow(SamplingParams(**SETTINGS["everything"]), TOKENS, PROMPT, PATH)])
    assert logits.tolist() == [pytest.approx(LOGITS)]


def test_ids_beyond_a_smaller_vocabulary_are_ignored() -> None:
    """A drafter with fewer tokens sees the target's history."""
    pipeline, logits = LogitsPipeline(4, frozenset({9})), torch.zeros(1, 4)
    settings = {"frequency_penalty": 1.0, "repetition_penalty": 1.5, "min_tokens": 9, "logit_bias": {7: 1.0}}
    assert torch.equal(pipeline.probs(logits, [row((6, 7), (5, 9), 1, **settings)]), torch.full((1, 4), 0.25))


@pytest.mark.parametrize("settings", [{"logit_bias": {5: 1.0}}, {"stop_token_ids": (1, 5)}])
def test_check_names_the_parameter(settings: dict) -> None:
    pipeline = LogitsPipeline(8, frozenset(), 5)
    with pytest.raises(ParameterError, match=r"token id 5 does not exist; this model's ids end at 4") as error:
        pipeline.check(SamplingParams(**settings))
    assert error.value.parameter == next(iter(settings))
    LogitsPipeline(8, frozenset(), 6).check(SamplingParams(**settings))


def test_logprobs_are_raw_and_ties_go_to_the_lowest_id() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, 2.0, 99.0])
    pipeline = LogitsPipeline(5, frozenset(), 4)
    answer = pipeline.logprobs(logits, 2, 3)
    reference = torch.log_softmax(logits[:4], -1).tolist()
    assert answer.token == 2 and answer.logprob == pytest.approx(reference[2])
    assert [token for token, _ in answer.top] == [1, 3, 2]
    assert [value for _, value in answer.top] == pytest.approx([reference[1], reference[3], reference[2]])
    assert pipeline.logprobs(logits, 0, 0).top == ()
    assert len(pipeline.logprobs(logits, 0, 20).top) == 4
