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

from outpace.lab.compare import Verdict
from outpace.lab.reference import logits_after
from outpace.models.base import LanguageModel
from outpace.types import SamplingParams

WIDE_ROWS = 8
# Rounding of one pass is a sample of what rounding can do; a wider run may see a few times as much.
SAFETY = 4.0


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
        narrow, wide = (logits_after(self.model, prefix, rows) for rows in (1, WIDE_ROWS))
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
