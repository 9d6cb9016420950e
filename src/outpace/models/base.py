"""One signature for target and drafter, prompt chunk and verification. No phase flag, no global context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outpace.cache.base import KVStore
from outpace.models.spec import DecoderSpec


@dataclass(frozen=True)
class SeqRows:
    """The rows of one sequence in a forward pass. They are written to the KV rows kv_first, kv_first + 1, ...

    parents  for each row, the index (within this SeqRows) of the row it follows, or -1 when it follows everything
             before kv_first. None = a chain: row i follows row i - 1 and sees every earlier row.
    """

    seq: int
    tokens: tuple[int, ...]
    kv_first: int
    parents: tuple[int, ...] | None = None

    def depths(self) -> list[int]:
        """Distance of each row from kv_first: row i of a chain has depth i. Its rotary position is kv_first + depth."""
        if self.parents is None:
            return list(range(len(self.tokens)))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return depths


@dataclass(frozen=True)
class ForwardBatch:
    """Rows of several sequences, packed in order; T = all rows.

    logit_rows     indices into 0..T-1 whose logits are wanted
    feature_layers hidden states after these layers are returned for every row (empty: none)
    best_below     None, or a bound of token ids: then no logits are wanted, only each logit row's likeliest id below it
    """

    rows: Sequence[SeqRows]
    logit_rows: Sequence[int]
    feature_layers: tuple[int, ...] = ()
    best_below: int | None = None


@dataclass(frozen=True)
class ForwardOutput:
    """In logit_rows order logits [R, V] float32, or, where the batch has a best_below, best [R] int64 and logits of no
    row; features [T, len(feature_layers) * hidden] or None."""

    logits: Tensor
    features: Tensor | None = None
    best: Tensor | None = None

    @classmethod
    def of(cls, logits: Tensor, batch: ForwardBatch, features: Tensor | None = None) -> ForwardOutput:
        """What the batch asks for, from the logits of its logit rows."""
        if batch.best_below is None:
            return cls(logits, features)
        return cls(logits[:0], features, first_largest(logits[:, : batch.best_below]))


class OutputIds:
    """The token ids that a model gives logits for, where its output projection was cut down to some (`draft_vocab`):
    ascending, ids [N] int64 of a vocabulary of `width`. All others have logit -inf."""

    def __init__(self, ids: Tensor, width: int) -> None:
        if not len(ids) or ids[0] < 0 or ids[-1] >= width or bool((ids.diff() <= 0).any()):
            raise ValueError(f"output ids must ascend within 0..{width - 1}")
        self.ids, self.width = ids, width

    def spread(self, logits: Tensor) -> Tensor:
        """logits [R, N] of the kept ids -> [R, width]."""
        whole = logits.new_full((len(logits), self.width), -torch.inf)
        return whole.index_copy_(1, self.ids.to(logits.device), logits)

    def below(self, bound: int) -> int:
        """How many of them lie below an id."""
        return int(torch.searchsorted(self.ids, bound))


def first_largest(logits: Tensor) -> Tensor:
    """logits [R, V] -> [R] int64: the lowest id among the largest of each row. NaN counts as -inf, as in the law."""
    return torch.where(logits.isnan(), -torch.inf, logits).argmax(-1)


class LanguageModel(Protocol):
    """Anything that turns rows into logits and keeps its keys and values in a KVStore."""

    @property
    def spec(self) -> DecoderSpec: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and stored keys."""
        ...

    @property
    def kernels_name(self) -> str:
        """Which kernels it runs on, for banners and reports."""
        ...

    @property
    def bit_invariant(self) -> bool:
        """True if a row's logits have the same bits in every pass, whatever else is in it."""
        ...

    def weight_bytes(self) -> int:
        """Bytes of all weights in memory."""
        ...

    def pass_bytes(self) -> int:
        """Bytes of weights that a narrow pass reads: not an embedding table beside another output matrix, of which
        it takes a few rows."""
        ...

    def new_store(self, max_bytes: int | None = None, kept: int = 0) -> KVStore:
        """An empty store shaped for this model, which keeps the rows of `kept` ended texts. max_bytes None: bounded
        only by memory."""
        ...

    def forward(self, batch: ForwardBatch, kv: KVStore) -> ForwardOutput:
        """The caller has reserved every row named in the batch; committing is the caller's too."""
        ...
