"""The one place where tokens become output: eos, stop ids, stop strings, max_tokens, text, kinds and logprobs.

A step may emit several tokens. They are taken one by one, so that text, ids, logprobs, usage and KV end at the same
token however long the accepted run is.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from outpace.errors import ConstraintError
from outpace.text.stop import TextStream
from outpace.types import FinishReason, Sequence, TokenKind, TokenLogprob


@dataclass(frozen=True)
class Emission:
    """What a step decided for one sequence, before any stop rule.

    tokens  the accepted path, then the target's own token
    kept    draft nodes of the accepted path
    drafted draft nodes offered on this step
    logprob log-probability of tokens[i], called only if the request asked for it
    dead_end why the last token is none at all: the request's constraint allowed nothing there
    """

    tokens: tuple[int, ...]
    kinds: tuple[TokenKind, ...]
    kept: tuple[int, ...]
    drafted: int
    logprob: Callable[[int], TokenLogprob]
    dead_end: str | None = None


@dataclass
class Output:
    """The output side of one request. `take` fills it; the engine empties it into a Delta with `flush`."""

    sequence: Sequence
    stops: frozenset[int]
    stream: TextStream
    finish_reason: FinishReason | None = None
    error: ConstraintError | None = None
    tokens: list[int] = field(default_factory=list)
    kinds: list[TokenKind] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    text: str = ""

    def take(self, emission: Emission) -> int:
        """Append tokens until a stop rule holds; returns how many were taken (at least one). Behind a dead end comes a
        token that nobody sees, so that the rows of the stores fit the text as ever."""
        wants_logprobs = self.sequence.params.logprobs is not None
        for i, (token, kind) in enumerate(zip(emission.tokens, emission.kinds, strict=True)):
            self.sequence.tokens.append(token)
            if emission.dead_end is not None and i + 1 == len(emission.tokens):
                self.error = ConstraintError(emission.dead_end)
                self.text += self.stream.finish()
                return i + 1
            self.tokens.append(token)
            self.kinds.append(kind)
            if wants_logprobs:
                self.logprobs.append(emission.logprob(i))
            self.finish_reason = self._reason(token)
            if self.finish_reason is not None:
                return i + 1
        return len(emission.tokens)

    def _reason(self, token: int) -> FinishReason | None:
        """Stop beats length: a stop token that is also the last allowed one ends with STOP."""
        sequence = self.sequence
        if token in self.stops:
            self.text += self.stream.finish()
            return FinishReason.STOP
        text, matched = self.stream.push(token, sequence.generated >= sequence.params.min_tokens)
        self.text += text
        if matched:
            return FinishReason.STOP
        if sequence.room == 0:
            self.text += self.stream.finish()
            return FinishReason.LENGTH
        return None

    def flush(self) -> tuple[tuple[int, ...], tuple[TokenKind, ...], str, tuple[TokenLogprob, ...]]:
        """Tokens, kinds, text and logprobs since the last flush."""
        new = (tuple(self.tokens), tuple(self.kinds), self.text, tuple(self.logprobs))
        self.tokens, self.kinds, self.text, self.logprobs = [], [], "", []
        return new


def stop_ids(sequence: Sequence, eos_ids: Seq[int] | frozenset[int]) -> frozenset[int]:
    """The ids that end this sequence: eos unless ignored, and the request's own stop_token_ids."""
    own = frozenset(sequence.params.stop_token_ids)
    return own if sequence.params.ignore_eos else own | frozenset(eos_ids)
