"""Value types shared by every layer. Tensors appear in annotations only, so importing this file does not load torch.

Row convention, the one index rule of the package: row 0 is the frontier (the last known token, whose KV is not
written yet), row i + 1 is draft node i. S sequences, N most draft nodes of any of them, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from outpace.errors import ParameterError

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOGPROBS = 20
SEED_BITS = 64
MAX_CONSTRAINT_BYTES = 65536  # grammars of this size compile in well under a second


def _check(parameter: str, ok: bool, message: str) -> None:
    if not ok:
        raise ParameterError(parameter, message)


def _check_number(parameter: str, value: object, low: float, high: float, shown: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    _check(parameter, number and low <= float(value) <= high, f"must be a number {shown}, got {value!r}")  # type: ignore[arg-type]


def _check_integer(parameter: str, value: object, low: int, shown: str) -> None:
    integer = isinstance(value, int) and not isinstance(value, bool)
    _check(parameter, integer and value >= low, f"must be {shown}, got {value!r}")  # type: ignore[operator]


class ConstraintKind(StrEnum):
    """What the text of a Constraint is. The values are vLLM's names for structured outputs."""

    JSON_SCHEMA = "json"  # a JSON schema
    JSON_OBJECT = "json_object"  # nothing: any JSON object
    REGEX = "regex"  # a regular expression that the whole answer matches, without look-around
    GRAMMAR = "grammar"  # a Lark grammar in llguidance's dialect, starting at `start`
    CHOICE = "choice"  # a JSON list of strings


@dataclass(frozen=True)
class Constraint:
    """The form an answer must have. Compare and hash by value; compiled where a request is submitted.

    OpenAI's response_format {"type": "json_schema", "json_schema": {"schema": S}} is Constraint.of({"json": S}), and
    {"type": "json_object"} is Constraint.of({"json_object": True}). vLLM's structured_outputs go to `of` as they are.
    An answer cut at max_tokens (finish reason length) is the beginning of such a text, and may be no valid one.
    """

    kind: ConstraintKind
    text: str = ""

    def __post_init__(self) -> None:
        _check("constraint", isinstance(self.text, str), f"{self.kind} must be a text, got {self.text!r}")
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError as problem:
            raise ParameterError("constraint", f"{self.kind} holds characters that are no text ({problem})") from None
        shown = f"{self.kind} has {size} bytes, at most {MAX_CONSTRAINT_BYTES} are compiled. Simplify or split it"
        _check("constraint", size <= MAX_CONSTRAINT_BYTES, shown)
        _check("constraint", bool(self.text) or self.kind is ConstraintKind.JSON_OBJECT, f"{self.kind} is empty")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """From one pair of kind and value: {"json": schema or its text}, {"json_object": True}, {"regex": pattern},
        {"grammar": Lark text}, {"choice": [strings]}. ParameterError for anything else."""
        kinds = [kind.value for kind in ConstraintKind]
        one = isinstance(given, Mapping) and len(given) == 1 and next(iter(given)) in kinds
        _check("constraint", one, f"must be one of {', '.join(kinds)} with its value, got {_shortened(given)}")
        name, value = next(iter(given.items()))
        kind = ConstraintKind(name)
        if kind is ConstraintKind.JSON_OBJECT:
            _check("constraint", value is True, f"json_object must be true, got {value!r}")
            return cls(kind)
        if kind is ConstraintKind.CHOICE:
            listed = isinstance(value, list | tuple) and bool(value)
            texts = listed and all(isinstance(text, str) and text for text in value)
            _check("constraint", texts, f"choice must be a list of non-empty strings, got {_shortened(value)}")
            return cls(kind, json.dumps(list(value), ensure_ascii=False))
        if kind is ConstraintKind.JSON_SCHEMA and not isinstance(value, str):
            try:
                value = json.dumps(value, ensure_ascii=False, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as problem:
                raise ParameterError("constraint", f"the JSON schema is no JSON: {problem}") from None
        return cls(kind, value)

    def __str__(self) -> str:
        return f"{self.kind} {_shortened(self.text)}" if self.text else str(self.kind)


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@dataclass(frozen=True)
class SamplingParams:
    """What a client may ask of one request. Validated on construction (ParameterError names the field).

    top_k 0 and top_p 1.0 and min_p 0.0 mean "off". `seed` makes the text a function of (prompt, seed, target) alone.
    Speculation settings are not here: they belong to the operator (`SpecConfig`).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, 100.0, "from 0 to 100")
        _check_integer("top_k", self.top_k, 0, "an integer >= 0 (0 turns it off)")
        _check_number("top_p", self.top_p, 0.0, 1.0, "above 0 and at most 1")
        _check("top_p", self.top_p > 0, f"must be above 0 and at most 1, got {self.top_p!r}")
        _check_number("min_p", self.min_p, 0.0, 1.0, "from 0 to 1")
        _check_number("repetition_penalty", self.repetition_penalty, 1e-3, 100.0, "above 0 and at most 100")
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0, "from -2 to 2")
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "from -2 to 2")
        for token, bias in self.logit_bias.items():
            _check_integer("logit_bias", token, 0, "a mapping from token ids >= 0")
            _check_number("logit_bias", bias, -100.0, 100.0, "from -100 to 100 for every token")
        if self.seed is not None:
            integer = isinstance(self.seed, int) and not isinstance(self.seed, bool)
            _check("seed", integer and -(2**63) <= self.seed < 2**64, f"must fit 64 bits, got {self.seed!r}")
        _check_integer("max_tokens", self.max_tokens, 1, "an integer >= 1")
        _check_integer("min_tokens", self.min_tokens, 0, "an integer >= 0")
        _check("min_tokens", self.min_tokens <= self.max_tokens, "must not exceed max_tokens")
        self._freeze_stops()
        _check("ignore_eos", isinstance(self.ignore_eos, bool), f"must be true or false, got {self.ignore_eos!r}")
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, 0, f"an integer from 0 to {MAX_LOGPROBS}")
            _check("logprobs", self.logprobs <= MAX_LOGPROBS, f"must be at most {MAX_LOGPROBS}, got {self.logprobs}")
        object.__setattr__(self, "logit_bias", MappingProxyType(dict(self.logit_bias)))
        self._check_constraint()

    def _check_constraint(self) -> None:
        if self.constraint is not None:
            known = isinstance(self.constraint, Constraint)
            _check("constraint", known, f"must be a Constraint, got {_shortened(self.constraint)}")
            # Behind the end of a grammar nothing but the end may follow: there is no text to go on with.
            _check("constraint", not self.ignore_eos, "cannot be combined with ignore_eos. Leave one of them out")

    def _freeze_stops(self) -> None:
        _check("stop", not isinstance(self.stop, str), "must be a sequence of strings, not one string")
        for text in self.stop:
            _check("stop", isinstance(text, str) and text != "", f"must hold non-empty strings, got {text!r}")
        for token in self.stop_token_ids:
            _check_integer("stop_token_ids", token, 0, "a sequence of token ids >= 0")
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    @property
    def greedy(self) -> bool:
        """Temperature 0: the law is one-hot on the first maximum. The only definition of greedy in the package."""
        return self.temperature == 0

    def replace(self, **changes: object) -> SamplingParams:
        """A copy with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Request:
    """One generation: token ids in, `Delta`s out. `id` is the caller's and must be unique among open requests."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)


class Sequence:
    """The tokens of one request inside the engine. KV lengths and draft state live in their stores, keyed by `id`."""

    __slots__ = ("id", "key", "params", "prompt_len", "tokens")

    def __init__(self, id: int, prompt_ids: Iterable[int], params: SamplingParams, key: int) -> None:
        self.id = id
        self.tokens = list(prompt_ids)
        self.prompt_len = len(self.tokens)
        self.params = params
        self.key = key % 2**SEED_BITS  # of the counter-based noise: the seed, or drawn by the engine when there is none

    @property
    def generated(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def room(self) -> int:
        """Output tokens still allowed by max_tokens."""
        return self.params.max_tokens - self.generated

    @property
    def coupled(self) -> bool:
        """True when the text is a function of (prompt, seed, target): seeded or greedy. Such sequences use the
        coupled rule, and their drafter draws with the shared noise."""
        return self.params.greedy or self.params.seed is not None


@dataclass(frozen=True)
class Draft:
    """The proposals of one step, for all sequences that share a drafter.

    tokens  [S, N] int64, -1 pads (padding is always at the end of a row)
    parent  [S, N] int64, -1 = child of the frontier; parent[i] < i.  A chain is parent[i] = i - 1
    q       [S, N + 1, V] float32, or None

    If `q` is given, the children of row r were drawn from q[s, r] in node order without replacement; a sequence for
    which nothing is claimed carries the point mass of its tokens. If tokens were chosen any other way (arg max,
    lookup, top-k, coupled noise), q is None: a point mass on what was proposed, which is always safe.
    """

    tokens: Tensor
    parent: Tensor
    q: Tensor | None = None

    @property
    def nodes(self) -> int:
        """N, the widest draft of the batch."""
        return int(self.tokens.shape[1])

    def length(self, s: int) -> int:
        """Draft nodes of sequence s, padding excluded."""
        return int((self.tokens[s] >= 0).sum())


class FinishReason(StrEnum):
    """Why a request ended. `STOP` covers eos, stop token ids and stop strings."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of an emitted token under the model's own law (before temperature, penalties and filters),
    and the most likely alternatives, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TokenKind(StrEnum):
    """Where an emitted token came from."""

    ACCEPTED = "accepted"  # drafted, and confirmed by the target
    CORRECTION = "correction"  # the target's own token after a rejected draft token
    BONUS = "bonus"  # the target's own token after a fully accepted draft
    PLAIN = "plain"  # a step without a draft


@dataclass(frozen=True)
class RequestStats:
    """What one request cost. Times in seconds. Acceptance rate = accepted / drafted; mean acceptance length =
    1 + accepted / steps (bonus or correction included)."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0  # verify passes that emitted tokens
    draft_steps: int = 0  # of these, steps with a non-empty draft
    drafted: int = 0
    accepted: int = 0  # accepted draft tokens, including those cut off by a stop rule
    drafted_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()
    queue_seconds: float = 0.0
    first_token_seconds: float = 0.0  # from submission to the first emitted token
    decode_seconds: float = 0.0  # from the first emitted token to the last
    draft_seconds: float = 0.0  # this and the two below: the request's share of each step
    verify_seconds: float = 0.0
    other_seconds: float = 0.0
    cached_tokens: int = 0  # of the prompt: not computed again, because another text had begun alike

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted, 0.0 when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per step, 1.0 for plain decoding."""
        return 1.0 + self.accepted / self.steps if self.steps else 1.0

    @property
    def tokens_per_second(self) -> float:
        """Decode speed: output tokens after the first, over the time they took."""
        return (self.output_tokens - 1) / self.decode_seconds if self.decode_seconds > 0 else 0.0


@dataclass(frozen=True)
class Delta:
    """What one step adds to a request. `text` may lag behind `tokens` (unfinished UTF-8, possible stop strings) and
    catches up with the last delta, which carries finish_reason and stats."""

    request_id: str
    tokens: tuple[int, ...] = ()
    kinds: tuple[TokenKind, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stats: RequestStats | None = None
