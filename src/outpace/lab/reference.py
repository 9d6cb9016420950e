"""The oracle: decoding as the textbook has it, one token at a time, everything recomputed. Never optimised."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from torch import Tensor

from outpace.models.base import ForwardBatch, LanguageModel, SeqRows
from outpace.sampling.pipeline import LawRow, LogitsPipeline
from outpace.types import SamplingParams
from outpace.verify.coupled import coupled_token

PREFIX = 0  # the one sequence id of the throw-away stores
CHUNK = 512


def logits_after(model: LanguageModel, tokens: Sequence[int], last_rows: int) -> Tensor:
    """Logits [V] of the token after `tokens`, from an empty store, with `last_rows` rows in the last pass."""
    store = model.new_store()
    head = max(0, len(tokens) - last_rows)
    logits = None
    for start, stop in pairwise([*range(0, head, CHUNK), head, len(tokens)]):
        if start == stop:
            continue
        assert store.reserve(PREFIX, stop - start), "an unbounded store has room"
        rows = SeqRows(PREFIX, tuple(tokens[start:stop]), start)
        logits = model.forward(ForwardBatch([rows], [stop - start - 1]), store).logits[0]
        store.commit(PREFIX, range(stop - start))
    assert logits is not None, "there is nothing after no tokens"
    return logits


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
        logits = logits_after(model, tokens, len(tokens))
        law = pipeline.probs(logits.unsqueeze(0), [LawRow(params, tokens, prompt_len)])
        token = coupled_token(law[0], key, len(tokens))
        tokens.append(token)
        yield token
        if token in ending:
            return
