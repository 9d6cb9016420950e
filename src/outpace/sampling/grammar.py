"""Grammars: which tokens may follow a text, by llguidance, whose lexer and parser work under limits of time and size.

The answer depends on the text alone, never on how the matcher got there. So nothing has to be told which drafted tokens
were rejected, a preempted sequence needs no saved state, and a tree is asked path by path.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from outpace.errors import ParameterError, Unsupported
from outpace.types import Constraint, ConstraintKind

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

COMPILED = 32  # grammars kept for the next request that asks for the same
STATES = 128  # answers kept per text: more than the rows of any draft
# Without a bound a small model may write blanks for ever, which every JSON grammar allows.
JSON_BLANKS = r"[ \n\r\t]{0,32}"


@dataclass(frozen=True)
class Vocabulary:
    """What a grammar must know of a tokenizer.

    token_bytes  the bytes of an id below `size`
    special_ids  ids that are no text: allowed only where a grammar names them
    eos_ids      ids that end an answer
    encode       ids of a text that continues another one: no bos, no space put before it
    """

    size: int
    token_bytes: Callable[[int], bytes]
    special_ids: frozenset[int]
    eos_ids: frozenset[int]
    encode: Callable[[str], list[int]]


@dataclass(frozen=True)
class Allowed:
    """What may follow a text. ends: the text is complete, so it may end here. problem: the grammar ran into a limit
    and cannot say; then nothing is allowed."""

    packed: bytes
    ends: bool
    problem: str = ""

    def mask(self, size: int) -> npt.NDArray[np.bool_]:
        """[size] True for allowed ids; without the ends, unless the grammar itself names one."""
        bits = np.unpackbits(np.frombuffer(self.packed, np.uint8), count=size, bitorder="little")
        return bits.view(np.bool_)


class Grammars:
    """Compiles constraints for one vocabulary, and remembers the last ones. Safe to use from several threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._lock = threading.Lock()
        self._recent: OrderedDict[Constraint, LLMatcher] = OrderedDict()

    def compile(self, constraint: Constraint) -> LLMatcher:
        """A matcher at the start of the grammar, to be copied. A new grammar takes milliseconds as a rule and a few
        seconds at worst, so call it away from the engine's thread, and the event loop, first.

        ParameterError says what in the constraint is wrong, too large or not supported; Unsupported: no llguidance.
        """
        with self._lock:
            found = self._recent.get(constraint)
            if found is not None:
                self._recent.move_to_end(constraint)
                return found
            tokenizer = self._tokenizer
        made = _compiled(constraint, tokenizer)
        with self._lock:
            self._recent[constraint] = made
            if len(self._recent) > COMPILED:
                self._recent.popitem(last=False)
        return made

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """The vocabulary as llguidance wants it: under a second at 150k tokens."""
        _require()
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(_Speller(self.vocabulary)), eos_token=sorted(self.vocabulary.eos_ids))


class _Speller:
    """The attributes that TokenizerWrapper asks for."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        special = vocabulary.special_ids | vocabulary.eos_ids
        self.bos_token_id = None
        self.eos_token_id = min(vocabulary.eos_ids)
        self.tokens = [vocabulary.token_bytes(i) for i in range(vocabulary.size)]
        self.special_token_ids = sorted(special)
        self._encode, self._special = vocabulary.encode, special

    def __call__(self, text: str) -> list[int]:
        """A forced text may spell a special token, but must not become one: then letter by letter."""
        if not isinstance(text, str):
            raise TypeError("only texts are encoded")
        ids = self._encode(text)
        return ids if self._special.isdisjoint(ids) else [i for char in text for i in self._encode(char)]


class Cursor:
    """A matcher that goes to whatever text it is asked about, by the shortest way: back to where the texts part, and
    on from there."""

    def __init__(self, start: LLMatcher, vocabulary: Vocabulary) -> None:
        self._start, self._vocabulary = start, vocabulary
        self._matcher = start.deep_copy()
        self._text: list[int] = []  # what the matcher has consumed
        self._known: dict[int, Allowed] = {}  # by length, of beginnings of `_text`

    def after(self, text: Sequence[int]) -> Allowed | None:
        """What may follow `text`; None if the grammar does not allow the text itself, or it goes on behind its end."""
        known = self._known.get(len(text))
        if known is not None and self._text[: len(text)] == list(text):
            return known
        found = self._ask(text)
        if found is not None and found.problem:
            # Limits count what earlier questions cost too. A fresh matcher says what depends on this text alone.
            self._restart()
            found = self._ask(text)
        if found is not None:
            self._known[len(text)] = found
            self._known.pop(len(text) - STATES, None)
        return found

    def forced(self, text: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens that must follow, as far as there is no choice."""
        found: list[int] = []
        while len(found) < most and self._reach([*text, *found]):
            step = self._matcher.compute_ff_tokens() or self._only([*text, *found])
            if not step:
                break
            found += step
            if step[-1] in self._vocabulary.eos_ids:
                break
        return found[:most]

    def legal(self, text: Sequence[int], draft: Sequence[int]) -> int:
        """How many tokens of a chain may follow `text`, one after the other."""
        if not self._reach(text):
            return 0
        inside = next((i for i, token in enumerate(draft) if token >= self._vocabulary.size), len(draft))
        return self._matcher.validate_tokens(list(draft[:inside]))

    def _only(self, text: Sequence[int]) -> list[int]:
        state = self.after(text)
        if state is None:
            return []
        ids: list[int] = np.flatnonzero(state.mask(self._vocabulary.size)).tolist()
        return ids if len(ids) == 1 else []

    def _ask(self, text: Sequence[int]) -> Allowed | None:
        if self._reach(text):
            packed = self._matcher.compute_bitmask()
            ends = self._matcher.is_accepting()
            if not self._matcher.is_error():
                return Allowed(packed, ends)
        if self._matcher.is_error():
            return Allowed(bytes(-(-self._vocabulary.size // 8)), False, _one_line(self._matcher.get_error()))
        return None

    def _reach(self, text: Sequence[int]) -> bool:
        """Move to `text`, or to the last allowed token of it."""
        if self._matcher.is_error():  # a matcher never leaves that state
            self._restart()
        shared = _shared(self._text, text)
        if shared < len(self._text):
            self._known = {length: state for length, state in self._known.items() if length <= shared}
            if not self._matcher.rollback(len(self._text) - shared):
                self._restart()
                shared = 0
        new = list(text[shared:])
        inside = next((i for i, token in enumerate(new) if token >= self._vocabulary.size), len(new))
        taken = self._matcher.try_consume_tokens(new[:inside]) if inside else 0
        self._text = [*self._text[:shared], *new[:taken]]
        return taken == len(new)

    def _restart(self) -> None:
        self._matcher, self._text, self._known = self._start.deep_copy(), [], {}


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning, by halving: comparing lists is quick, a loop over a long text is not."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def _require() -> None:
    try:
        import llguidance  # noqa: F401
    except ImportError as problem:
        raise Unsupported(
            "Constrained output (a JSON schema, a regex, a grammar) needs the package llguidance, which is not"
            " installed. Run: pip install 'outpace[grammar]'"
        ) from problem


def _limits() -> LLParserLimits:
    """A step may cost a fraction of llguidance's own limits: it runs between two passes that others wait for."""
    from llguidance import LLParserLimits

    return LLParserLimits(step_lexer_fuel=50_000, step_max_items=20_000, verbose_errors=False)


def _compiled(constraint: Constraint, tokenizer: LLTokenizer) -> LLMatcher:
    from llguidance import LLMatcher

    try:
        source = _source(constraint)
    except ValueError as problem:
        raise ParameterError("constraint", f"{constraint} cannot be read: {_one_line(str(problem))}") from problem
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=_limits())
    # The first mask builds most of the lexer: done here, so that the first step does not pay for it.
    start = matcher.deep_copy()
    begins = any(start.compute_bitmask()) or start.is_accepting()
    problem_text = matcher.get_error() or start.get_error()
    if problem_text:
        raise ParameterError(
            "constraint",
            f"{constraint} cannot be used: {_one_line(problem_text)}. Change or simplify what is named there",
        )
    if not begins:
        raise ParameterError("constraint", f"{constraint} allows no text at all. Check it for contradictions")
    return matcher


def _source(constraint: Constraint) -> str:
    """The constraint as llguidance reads it. ValueError if a schema is no JSON."""
    from llguidance import LLMatcher

    kind, text = constraint.kind, constraint.text
    if kind is ConstraintKind.REGEX:
        return LLMatcher.grammar_from_regex(text)
    if kind is ConstraintKind.GRAMMAR:
        return LLMatcher.grammar_from_lark(text)
    if kind is ConstraintKind.CHOICE:
        options = [json.dumps(option, ensure_ascii=False) for option in json.loads(text)]
        return LLMatcher.grammar_from_lark("start: " + " | ".join(options))
    schema = text if kind is ConstraintKind.JSON_SCHEMA else '{"type": "object"}'
    return LLMatcher.grammar_from_json_schema(schema, {"whitespace_pattern": JSON_BLANKS})


def _one_line(text: str) -> str:
    """llguidance's messages are long; the first words say what is wrong."""
    line = " ".join(text.replace("<non-verbose/>", " ").split()).rstrip(".")
    return line if len(line) <= 300 else f"{line[:297]}..."
