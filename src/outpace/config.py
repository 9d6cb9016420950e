"""Operator settings: frozen, flat, unknown keys are errors, every "auto" resolved once at load."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from outpace.errors import ConfigError

MAX_DRAFT_TOKENS = 64
QUANTIZATIONS = ("auto", "none", "int8", "int4")
KERNELS = ("auto", "native", "torch")
DTYPES = ("auto", "bfloat16", "float32", "native")
RULES = ("auto", "token", "block", "tree")


# Longest draft where K is chosen step by step. Lookup proposes long drafts only behind a long match, and those are
# mostly right.
MOST_K = {"lookup": 16}
MOST_MODEL_K = 8


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


def stored_dtype(dtype: str) -> str:
    """The dtype a setting stands for: "auto" is bfloat16. ConfigError for one that does not exist."""
    _require(dtype in DTYPES, f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    return "bfloat16" if dtype == "auto" else dtype


@dataclass(frozen=True)
class _Config:
    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Build from a parsed file; an unknown key is an error that suggests the nearest known one."""
        known = [f.name for f in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                hint = f" Did you mean {near[0]!r}?" if near else f" Known settings: {', '.join(known)}."
                raise ConfigError(f"Unknown setting {key!r}.{hint}")
        return cls(**values)


@dataclass(frozen=True)
class SpecConfig(_Config):
    """How to speculate.

    draft                    "off", "lookup", or a model reference (hub id, folder, .gguf file, catalogue name)
    num_speculative_tokens   K, the length of every draft; 0 turns speculation off, None chooses K for every step
    rule                     acceptance rule for unseeded sampling; "auto" takes block for a chain with a q, else token.
                             Greedy and seeded requests always use the coupled rule.
    """

    draft: str = "off"
    num_speculative_tokens: int | None = None
    rule: str = "auto"

    def __post_init__(self) -> None:
        _require(bool(self.draft), "draft must name a drafter or a model; use 'off' for plain decoding.")
        k = self.num_speculative_tokens
        _require(
            k is None or (isinstance(k, int) and not isinstance(k, bool) and 0 <= k <= MAX_DRAFT_TOKENS),
            f"num_speculative_tokens (-k) must be an integer from 0 (plain decoding) to {MAX_DRAFT_TOKENS}, got {k!r}."
            " Useful values are 2 to 8: later tokens of a long draft are rarely accepted.",
        )
        _require(self.rule in RULES, f"rule must be one of {', '.join(RULES)}, got {self.rule!r}.")

    @property
    def k(self) -> int:
        """The longest draft: 0 without one."""
        if self.draft == "off":
            return 0
        given = self.num_speculative_tokens
        return MOST_K.get(self.draft, MOST_MODEL_K) if given is None else given

    @property
    def adaptive(self) -> bool:
        """Whether K is chosen for every step."""
        return self.draft != "off" and self.num_speculative_tokens is None


@dataclass(frozen=True)
class EngineConfig(_Config):
    """How to run the target. Sizes in bytes, lengths in tokens; None means "decide at load". memory_utilisation is the
    share of the memory still free after loading that all keys and values may take, if kv_cache_bytes does not say."""

    model: str
    dtype: str = "auto"
    draft_dtype: str = "auto"
    draft_quantization: str = "auto"
    draft_vocab: int | None = None
    draft_vocab_corpus: str | None = None
    device: str = "cpu"
    threads: int | None = None
    kernels: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 8
    max_batched_tokens: int = 512
    kv_cache_bytes: int | None = None
    memory_utilisation: float = 0.8
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        _require(bool(self.model), "model is empty: give a hub id, a folder, a .gguf file or a catalogue name.")
        for name in ("dtype", "draft_dtype"):
            value = getattr(self, name)
            _require(value in DTYPES, f"{name} must be one of {', '.join(DTYPES)}, got {value!r}.")
        _require(self.kernels in KERNELS, f"kernels must be one of {', '.join(KERNELS)}, got {self.kernels!r}.")
        _require(
            self.draft_quantization in QUANTIZATIONS,
            f"draft_quantization must be one of {', '.join(QUANTIZATIONS)}, got {self.draft_quantization!r}.",
        )
        share = self.memory_utilisation
        _require(
            isinstance(share, int | float) and 0 < share <= 1,
            f"memory_utilisation is the share of the free memory that keys and values may take, above 0 and at most 1,"
            f" got {share!r}.",
        )
        _require(
            self.draft_vocab_corpus is None or self.draft_vocab is not None,
            "draft_vocab_corpus says which tokens are frequent, but not how many a draft may use. Set draft_vocab, for"
            " example 32768.",
        )
        for name in ("draft_vocab", "threads", "max_model_len", "max_num_seqs", "max_batched_tokens", "kv_cache_bytes"):
            value = getattr(self, name)
            if value is not None:
                integer = isinstance(value, int) and not isinstance(value, bool)
                _require(integer and value >= 1, f"{name} must be an integer >= 1, got {value!r}.")
