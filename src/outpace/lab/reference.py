"""The oracle: decoding as the textbook has it, one token at a time, everything recomputed. Never optimised."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from outpace.models.base import ForwardBatch, LanguageModel, SeqRows
from outpace.sampling.pipeline import LawRow, LogitsPipeline
from outpace.types import SamplingParams
from outpace.verify.coupled import coupled_token

PREFIX = 0  # the one sequence id of the throw-away stores


def logits_after(model: LanguageModel, tokens: tuple[int, ...]) -> Tensor:
    """Logits [1, V] of the token after `tokens`, from an empty store."""
    store = model.new_store()
    assert store.reserve(PREFIX, len(tokens))
    batch = ForwardBatch([SeqRows(PREFIX, tokens, 0)], [len(tokens) - 1])
    return model.forward(batch, store).logits


def decode(
    model: LanguageModel,
    pipeline: LogitsPipeline,
    prompt: Iterable[int],
    params: SamplingParams,
    stops: Iterable[int] = (),
) -> Iterator[int]:
    """Yield output tokens of a greedy or seeded request until a stop id (yielded too) or max_tokens."""
    tokens = list(prompt)
    prompt_len, ending = len(tokens), frozenset(stops)
    key = (params.seed or 0) % 2**64
    for _ in range(params.max_tokens):
        logits = logits_after(model, tuple(tokens))
        law = pipeline.probs(logits, [LawRow(params, tokens, prompt_len)])
        token = coupled_token(law[0], key, len(tokens))
        tokens.append(token)
        yield token
        if token in ending:
            return
