"""Teacher forcing: was a token that differs between two runs a near tie, or a fault?

Where kernels round differently for one row and for several (algorithms.md section 6: stock matmuls), two correct runs
may part at a token whose two best logits are equal within rounding. The judge computes the logits at that place anew,
from an empty store, once with one row in the last pass and once with several, takes the difference between the two as
the tolerance, and asks whether both tokens are best within it. A stale or missing KV row cannot hide here: nothing is
shared with the runs under judgement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from outpace.lab.compare import Verdict
from outpace.models.base import ForwardBatch, LanguageModel, SeqRows
from outpace.types import SamplingParams

CHUNK = 512
WIDE_ROWS = 8
# Rounding of one pass is a sample of what rounding can do; a wider run may see a few times as much.
SAFETY = 4.0


def teacher_logits(model: LanguageModel, tokens: Sequence[int], last_rows: int) -> Tensor:
    """Logits [V] after `tokens`, from an empty store, with `last_rows` rows in the last pass."""
    store = model.new_store()
    head = max(0, len(tokens) - last_rows)
    cuts = [*range(0, head, CHUNK), head, len(tokens)]
    logits = None
    for start, stop in pairwise(cuts):
        if start == stop:
            continue
        assert store.reserve(0, stop - start), "an unbounded store has room"
        rows = SeqRows(0, tuple(tokens[start:stop]), start)
        logits = model.forward(ForwardBatch([rows], [stop - start - 1]), store).logits[0]
        store.commit(0, range(stop - start))
    assert logits is not None, "teacher forcing needs at least one token"
    return logits


@dataclass(frozen=True)
class TeacherJudge:
    """Judge for `lab.compare`, for greedy requests on this target. `bits_equal` says that the kernels promise the
    same bits for any number of rows: then no difference is ever excused."""

    model: LanguageModel
    params: SamplingParams
    bits_equal: bool = False

    def __call__(self, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]) -> Verdict:
        """Look at the first differing token."""
        both = list(zip(plain, other, strict=False))
        at = next((i for i, (a, b) in enumerate(both) if a != b), len(both))
        if at == len(both):
            return Verdict(False, f"one answer ends after token {at}, the other goes on")
        a, b = both[at]
        if not self.params.greedy or self.params.logit_bias or _penalised(self.params):
            return Verdict(False, f"token {at}: {a} and {b}; only plain greedy answers can be judged by their logits")
        prefix = [*prompt, *plain[:at]]
        narrow, wide = (teacher_logits(self.model, prefix, rows) for rows in (1, WIDE_ROWS))
        gaps = [float(logits[a] - logits[b]) for logits in (narrow, wide)]
        losses = [float(logits.max() - logits[[a, b]].min()) for logits in (narrow, wide)]
        tolerance = SAFETY * float((narrow - wide).abs().max())
        near = not self.bits_equal and min(losses) <= tolerance
        message = (
            f"token {at}: {a} against {b}, logit gap {gaps[0]:+.4g} with one row and {gaps[1]:+.4g} with {WIDE_ROWS};"
            f" rounding here moves logits by up to {tolerance:.3g}: {'a near tie' if near else 'not a tie'}"
        )
        return Verdict(near, message, gaps[0])


def _penalised(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
