"""The drafter contract: propose tokens, observe what became of them, release a sequence."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from outpace.types import Draft, Sequence


@dataclass(frozen=True)
class Needs:
    """What a drafter requires of the engine and claims about its drafts.

    proposes_law    its drafts carry q for unseeded sampling (so the block rule may be used)
    tree            its drafts may branch
    feature_layers  target layers whose hidden states it must be given (empty: none)
    """

    proposes_law: bool = False
    tree: bool = False
    feature_layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class DraftRequest:
    """A draft of at most `depth` tokens (depth >= 1) behind the sequence's frontier is wanted."""

    sequence: Sequence
    depth: int


@dataclass(frozen=True)
class StepUpdate:
    """What a step made of a draft.

    kept    accepted draft nodes, in path order, cut to what was really emitted
    tokens  every token the step appended to the sequence (accepted ones and the target's own)
    """

    sequence: Sequence
    kept: tuple[int, ...]
    tokens: tuple[int, ...]


class Drafter(Protocol):
    """Three verbs, no flags. A drafter never sees the target's law before proposing."""

    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> Needs: ...

    def propose(self, requests: Seq[DraftRequest]) -> Draft:
        """One row per request, in order; a row may be empty (all -1). Catch up first: feed own state
        tokens[kv.length(seq):], however many they are."""
        ...

    def observe(self, updates: Seq[StepUpdate]) -> None:
        """Called after every step, before sequences are released, for the sequences that took part in propose."""
        ...

    def release(self, seq: int) -> None:
        """Forget a sequence. Unknown ids are ignored."""
        ...
