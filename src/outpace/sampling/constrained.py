"""The pipeline stage of constrained decoding: tokens that the request's grammar does not allow get probability 0."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outpace.errors import ParameterError
from outpace.sampling.grammar import Allowed, Cursor, Grammars
from outpace.sampling.penalties import RowContext, Scores
from outpace.types import Constraint, SamplingParams

FOLLOWED = 256  # texts whose matcher is kept. One that was dropped is read again from its start


@dataclass(frozen=True)
class _Followed:
    tokens: Sequence[int]  # held, so that no other list can have its id
    constraint: Constraint
    cursor: Cursor


class GrammarMask:
    """An `Edit` for one engine: its target's and its draft model's pipeline share it, and with it what was computed.
    Only `check` may be called from other threads than the engine's."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars, self._vocabulary = grammars, grammars.vocabulary
        self._followed: OrderedDict[int, _Followed] = OrderedDict()

    def check(self, params: SamplingParams) -> None:
        """Compile the constraint. See Grammars.compile for the errors and for what it costs."""
        if params.constraint is None:
            return
        if not self._vocabulary.eos_ids:
            raise ParameterError("constraint", "this model has no token that ends a text, so no grammar can end")
        self._grammars.compile(params.constraint)

    def follow(self, params: SamplingParams, tokens: Sequence[int]) -> None:
        """Keep the compiled grammar for a sequence until `forget`, however many others are compiled meanwhile."""
        if params.constraint is not None:
            self._cursor(params.constraint, tokens)

    def forget(self, tokens: Sequence[int]) -> None:
        """Drop what belongs to a sequence."""
        self._followed.pop(id(tokens), None)

    def wants(self, row: RowContext) -> bool:
        return row.params.constraint is not None

    def apply(self, scores: Scores, row: RowContext) -> None:
        """Rows behind a token that cannot be kept (forbidden, or behind the end) stay as they are: nothing is ever
        emitted from them."""
        state = self._state(row)
        if state is not None:
            allowed = self._ids(state, row.params)
            scores[: len(allowed)][~allowed[: len(scores)]] = -np.inf
            scores[len(allowed) :] = -np.inf

    def dead_end(self, row: RowContext) -> str | None:
        """Why no token may follow here, or None if one may."""
        state = self._state(row) if row.params.constraint is not None else None
        if state is None:
            return None
        allowed = self._ids(state, row.params)
        early = row.generated < row.params.min_tokens
        if early:
            allowed[self._ends(row.params)] = False
        if allowed.any():
            return None
        if state.problem:
            reason = f"it became too complex to follow ({state.problem}). Simplify it"
        elif state.ends and early:
            reason = f"the text is complete, but min_tokens ({row.params.min_tokens}) forbids its end. Lower min_tokens"
        else:
            reason = "no token of this model's vocabulary continues it. Check it for parts that cannot be written"
        return f"The constraint {row.params.constraint} led to a dead end after {row.generated} tokens: {reason}."

    def forced(self, row: RowContext, most: int) -> list[int]:
        """Up to `most` tokens that must follow this row's text; none without a constraint."""
        constraint = row.params.constraint
        if constraint is None:
            return []
        return self._cursor(constraint, row.history.tokens).forced(_text(row), most)

    def legal(self, row: RowContext, draft: Sequence[int]) -> int:
        """How many tokens of a chain behind this row the grammar allows."""
        constraint = row.params.constraint
        if constraint is None:
            return len(draft)
        return self._cursor(constraint, row.history.tokens).legal(_text(row), draft)

    def _ids(self, state: Allowed, params: SamplingParams) -> npt.NDArray[np.bool_]:
        """[vocabulary] what may follow, ends included where the text is complete."""
        allowed = state.mask(self._vocabulary.size)
        if state.ends:
            allowed[self._ends(params)] = True
        return allowed

    def _ends(self, params: SamplingParams) -> list[int]:
        return [i for i in (*self._vocabulary.eos_ids, *params.stop_token_ids) if i < self._vocabulary.size]

    def _state(self, row: RowContext) -> Allowed | None:
        assert row.params.constraint is not None
        return self._cursor(row.params.constraint, row.history.tokens).after(_text(row))

    def _cursor(self, constraint: Constraint, tokens: Sequence[int]) -> Cursor:
        found = self._followed.get(id(tokens))
        if found is None or found.constraint != constraint:
            cursor = Cursor(self._grammars.compile(constraint), self._vocabulary)
            found = self._followed[id(tokens)] = _Followed(tokens, constraint, cursor)
        self._followed.move_to_end(id(tokens))
        if len(self._followed) > FOLLOWED:
            self._followed.popitem(last=False)
        return found.cursor


def _text(row: RowContext) -> list[int]:
    """Output tokens before the one this row decides: the grammar begins behind the prompt."""
    return [*row.history.tokens[row.history.prompt_len :], *row.path]
