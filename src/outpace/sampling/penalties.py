"""Edits to the logits of one row that come from tokens, not from the shape of the law.

Each edit touches only the few ids it concerns; none builds a vocabulary-sized count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from outpace.types import SamplingParams

Scores = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Counts = tuple[Ids, npt.NDArray[np.int64]]


class History:
    """Token counts of one sequence, shared by all its rows of a step. The list must not change meanwhile."""

    def __init__(self, tokens: Sequence[int], prompt_len: int) -> None:
        self.tokens, self.prompt_len = tokens, prompt_len

    @cached_property
    def everything(self) -> Counts:
        """Ids of prompt and output, ascending, with their counts."""
        return np.unique(np.array(self.tokens, dtype=np.int64), return_counts=True)

    @cached_property
    def output(self) -> Counts:
        """Ids of the output, ascending, with their counts."""
        return np.unique(np.array(self.tokens[self.prompt_len :], dtype=np.int64), return_counts=True)


def _with_path(counts: Counts, path: tuple[int, ...], width: int) -> Counts:
    """Counts after the path, ids below width only (a drafter's vocabulary may be the smaller one).

    The same numbers as if the path had been in the history, without sorting that again.
    """
    ids, times = counts
    if path:
        more, extra = np.unique(np.array(path, dtype=np.int64), return_counts=True)
        at = np.searchsorted(ids, more)
        old = np.isin(more, ids[at[at < len(ids)]])
        times = times.copy()
        times[at[old]] += extra[old]
        ids, times = np.insert(ids, at[~old], more[~old]), np.insert(times, at[~old], extra[~old])
    inside = int(np.searchsorted(ids, width))
    return ids[:inside], times[:inside]


@dataclass(frozen=True)
class RowContext:
    """What an edit may look at: the request's parameters, its tokens so far, and the draft path to this row."""

    params: SamplingParams
    history: History
    path: tuple[int, ...]

    @property
    def generated(self) -> int:
        """Output tokens before the one this row decides."""
        return len(self.history.tokens) - self.history.prompt_len + len(self.path)


class Edit(Protocol):
    """One stage of the pipeline before the temperature."""

    def wants(self, row: RowContext) -> bool:
        """False leaves the row alone, and saves the copy that an edit needs."""
        ...

    def apply(self, scores: Scores, row: RowContext) -> None:
        """Change scores [V] in place; -inf forbids a token. It must depend on this row alone."""
        ...


def _known(ids: Sequence[int] | frozenset[int], width: int) -> npt.NDArray[np.int64]:
    return np.array(sorted(i for i in ids if 0 <= i < width), dtype=np.int64)


@dataclass(frozen=True)
class MinTokens:
    """Forbids every end (eos and stop_token_ids) until min_tokens were generated."""

    eos_ids: frozenset[int]

    def wants(self, row: RowContext) -> bool:
        return row.generated < row.params.min_tokens

    def apply(self, scores: Scores, row: RowContext) -> None:
        scores[_known(self.eos_ids | set(row.params.stop_token_ids), len(scores))] = -np.inf


@dataclass(frozen=True)
class LogitBias:
    """Adds the request's bias to the logits of the named ids."""

    def wants(self, row: RowContext) -> bool:
        return bool(row.params.logit_bias)

    def apply(self, scores: Scores, row: RowContext) -> None:
        bias = row.params.logit_bias
        ids = _known(tuple(bias), len(scores))
        scores[ids] += np.array([bias[i] for i in ids.tolist()], dtype=np.float32)


@dataclass(frozen=True)
class Repetition:
    """Divides positive and multiplies negative logits of every id in prompt, output or path (Keskar et al. 2019)."""

    def wants(self, row: RowContext) -> bool:
        return row.params.repetition_penalty != 1.0

    def apply(self, scores: Scores, row: RowContext) -> None:
        ids, _ = _with_path(row.history.everything, row.path, len(scores))
        penalty = np.float32(row.params.repetition_penalty)
        values = scores[ids]
        scores[ids] = np.where(values > 0, values / penalty, values * penalty)


@dataclass(frozen=True)
class Frequency:
    """Subtracts frequency_penalty per occurrence and presence_penalty once, for ids in output or path (OpenAI API)."""

    def wants(self, row: RowContext) -> bool:
        return row.params.presence_penalty != 0.0 or row.params.frequency_penalty != 0.0

    def apply(self, scores: Scores, row: RowContext) -> None:
        ids, times = _with_path(row.history.output, row.path, len(scores))
        weight, once = np.float32(row.params.frequency_penalty), np.float32(row.params.presence_penalty)
        scores[ids] -= weight * times.astype(np.float32) + once
