"""Every setting once: its flag, its environment variable, its key in a file. Flag > environment > file > default.

Environment: OUTPACE_ and the setting's name in capitals (OUTPACE_DRAFT). File: TOML, flat, the same names.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outpace.config import DTYPES, KERNELS, QUANTIZATIONS, RULES
from outpace.errors import ConfigError
from outpace.types import Constraint

ENV_PREFIX = "OUTPACE_"
SPEC, SAMPLING, ENGINE = "speculation", "sampling", "engine"


@dataclass(frozen=True)
class Setting:
    """One setting. `name` is its field in EngineConfig, SpecConfig or SamplingParams; `parse` reads its text form;
    `hidden` are spellings that work but are not listed; `advanced` settings are listed by --help-all only."""

    name: str
    group: str
    flags: tuple[str, ...]
    parse: Callable[[str], Any]
    help: str
    metavar: str = "N"
    hidden: tuple[str, ...] = ()
    advanced: bool = False
    repeat: bool = False

    @property
    def environment(self) -> str:
        """Its environment variable."""
        return ENV_PREFIX + self.name.upper()


def _boolean(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in words:
        raise ValueError(f"expected true or false, got {text!r}")
    return words[text.lower()]


def _depth(text: str) -> int | None:
    return None if text == "auto" else int(text)


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    return int(token), float(bias)


def _constraint(text: str) -> Constraint:
    return Constraint.of(json.loads(text))


def _size(text: str) -> int:
    units = {"k": 2**10, "m": 2**20, "g": 2**30}
    return int(float(text[:-1]) * units[text[-1].lower()]) if text[-1:].lower() in units else int(text)


SETTINGS = (
    Setting("model", ENGINE, (), str, "the target model", "MODEL"),
    Setting("draft", SPEC, ("--draft",), str, "lookup, off, or a model", "DRAFT", ("--speculative-model",)),
    Setting(
        "num_speculative_tokens",
        SPEC,
        ("-k", "--draft-tokens"),
        _depth,
        "draft length K: auto (default) chooses for every step, 0 is plain",
        "K",
        ("--num-speculative-tokens",),
    ),
    Setting("rule", SPEC, ("--rule",), str, f"acceptance rule: {', '.join(RULES)}", "RULE", advanced=True),
    Setting("temperature", SAMPLING, ("--temperature",), float, "0 takes the likeliest token", "T"),
    Setting("top_k", SAMPLING, ("--top-k",), int, "keep the N likeliest tokens (0: off)"),
    Setting("top_p", SAMPLING, ("--top-p",), float, "keep the likeliest tokens of this total mass", "P"),
    Setting("min_p", SAMPLING, ("--min-p",), float, "drop tokens below P times the likeliest", "P", advanced=True),
    Setting("repetition_penalty", SAMPLING, ("--repetition-penalty",), float, "above 1 discourages repeats", "X"),
    Setting(
        "presence_penalty", SAMPLING, ("--presence-penalty",), float, "flat penalty on used tokens", "X", advanced=True
    ),
    Setting(
        "frequency_penalty", SAMPLING, ("--frequency-penalty",), float, "penalty per use of a token", "X", advanced=True
    ),
    Setting("seed", SAMPLING, ("--seed",), int, "makes the answer repeatable, whatever the draft"),
    Setting("max_tokens", SAMPLING, ("--max-tokens",), int, "longest answer, in tokens"),
    Setting("stop", SAMPLING, ("--stop",), str, "end before this text (repeatable)", "TEXT", repeat=True),
    Setting("logprobs", SAMPLING, ("--logprobs",), int, "log-probabilities and N alternatives per token"),
    # Its flags are those of `generate`: one per kind.
    Setting("constraint", SAMPLING, (), _constraint, "the form of the answer, as in --json-schema", "JSON"),
    Setting("min_tokens", SAMPLING, ("--min-tokens",), int, "shortest answer, in tokens", advanced=True),
    Setting(
        "stop_token_ids", SAMPLING, ("--stop-token-ids",), int, "end at this token (repeatable)", "ID", (), True, True
    ),
    Setting("logit_bias", SAMPLING, ("--logit-bias",), _bias, "add to a logit (repeatable)", "ID=BIAS", (), True, True),
    Setting("ignore_eos", SAMPLING, ("--ignore-eos",), _boolean, "true: go on past the end", "BOOL", advanced=True),
    Setting("dtype", ENGINE, ("--dtype",), str, f"weights of the target: {', '.join(DTYPES)}", "DTYPE", ("--weights",)),
    Setting("draft_dtype", ENGINE, ("--draft-dtype",), str, "weights of the draft model", "DTYPE", advanced=True),
    Setting(
        "draft_quantization",
        ENGINE,
        ("--draft-quantization",),
        str,
        f"rounding of the draft model's weights: {', '.join(QUANTIZATIONS)}",
        "KIND",
        advanced=True,
    ),
    Setting(
        "draft_vocab",
        ENGINE,
        ("--draft-vocab",),
        int,
        "tokens that a draft model may say: the N most frequent",
        advanced=True,
    ),
    Setting(
        "draft_vocab_corpus",
        ENGINE,
        ("--draft-vocab-corpus",),
        str,
        "text (.txt, .jsonl) to count frequent tokens in, like what the model will write",
        "FILE",
        advanced=True,
    ),
    Setting("device", ENGINE, ("--device",), str, "where to run (default cpu)", "DEVICE", advanced=True),
    Setting("threads", ENGINE, ("--threads",), int, "CPU threads (default: all cores)"),
    Setting("kernels", ENGINE, ("--kernels",), str, f"arithmetic: {', '.join(KERNELS)}", "NAME", advanced=True),
    Setting("max_model_len", ENGINE, ("--max-model-len",), int, "longest context, in tokens", hidden=("--ctx-size",)),
    Setting("max_num_seqs", ENGINE, ("--max-num-seqs",), int, "most requests at a time", advanced=True),
    Setting("max_batched_tokens", ENGINE, ("--max-batched-tokens",), int, "most rows of a forward pass", advanced=True),
    Setting(
        "memory_utilisation",
        ENGINE,
        ("--memory-utilisation",),
        float,
        "share of the free memory for keys and values (default 0.8)",
        "X",
        ("--memory-utilization",),
        advanced=True,
    ),
    Setting(
        "prefix_cache",
        ENGINE,
        ("--prefix-cache",),
        _boolean,
        "false: compute the beginning of every text again",
        "BOOL",
        advanced=True,
    ),
    Setting(
        "kv_cache_bytes", ENGINE, ("--kv-cache-bytes",), _size, "memory for keys and values", "SIZE", advanced=True
    ),
)
BY_NAME = {setting.name: setting for setting in SETTINGS}


def gather(args: Namespace, environ: Mapping[str, str], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """All settings given anywhere, by name, the strongest source winning. Raises ConfigError."""
    values = dict(defaults)
    if getattr(args, "config", None):
        values.update(read_file(Path(args.config)))
    values.update(read_environment(environ))
    values.update(_vllm_config(getattr(args, "speculative_config", None)))
    given = vars(args)
    values.update({name: _frozen(name, given[name]) for name in BY_NAME if name in given})
    return values


def read_file(path: Path) -> dict[str, Any]:
    """The settings of a flat TOML file. Unknown keys are errors."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise ConfigError(f"Cannot read the settings file {str(path)!r}: {problem.strerror}.") from problem
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise ConfigError(f"The settings file {str(path)!r} is not valid TOML: {problem}.") from problem
    for key in content:
        if key not in BY_NAME:
            raise ConfigError(f"Unknown setting {key!r} in {str(path)!r}.{nearest(key, BY_NAME)}")
    return {key: _frozen(key, value) for key, value in content.items()}


def read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """The settings among OUTPACE_* variables; an empty variable counts as not set."""
    values = {}
    for setting in SETTINGS:
        text = environ.get(setting.environment, "")
        if not text:
            continue
        try:
            parsed = setting.parse(text)
        except (ValueError, KeyError) as problem:
            raise ConfigError(f"The environment variable {setting.environment}={text!r} cannot be read.") from problem
        values[setting.name] = _frozen(setting.name, [parsed] if setting.repeat else parsed)
    return values


def misspelt_variables(environ: Mapping[str, str]) -> list[str]:
    """One warning per OUTPACE_* variable that looks like a misspelt setting."""
    known = [setting.environment for setting in SETTINGS]
    warnings = []
    for name in environ:
        near = difflib.get_close_matches(name, known, 1, cutoff=0.85) if name.startswith(ENV_PREFIX) else []
        if near and name not in known:
            warnings.append(f"warning: the environment variable {name} is not a setting; did you mean {near[0]}?")
    return warnings


def nearest(word: str, known: Iterable[str]) -> str:
    """' Did you mean ...?' for a misspelt word, or the empty string."""
    near = difflib.get_close_matches(word, list(known), 1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _frozen(name: str, value: Any) -> Any:
    """Lists become tuples; logit_bias becomes a mapping from token ids, from flags or a TOML table alike; a table for
    constraint ({regex = "..."}) becomes one."""
    if name == "constraint":
        return value if isinstance(value, Constraint) else Constraint.of(value)
    if name == "logit_bias":
        pairs = value.items() if isinstance(value, Mapping) else value
        try:
            return {int(token): bias for token, bias in pairs}
        except (TypeError, ValueError) as problem:
            raise ConfigError("logit_bias must map token ids to numbers.") from problem
    if BY_NAME[name].repeat:
        return tuple(value) if isinstance(value, list | tuple) else (value,)
    return value


def _vllm_config(text: str | None) -> dict[str, Any]:
    """vLLM's --speculative-config JSON, as far as it says something we do; anything else in it is an error."""
    if text is None:
        return {}
    try:
        given = json.loads(text)
    except json.JSONDecodeError as problem:
        raise ConfigError(f"--speculative-config is not valid JSON: {problem}. Use --draft and -k.") from problem
    if not isinstance(given, dict):
        raise ConfigError("--speculative-config must be a JSON object. Use --draft and -k.")
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key == "num_speculative_tokens":
            values["num_speculative_tokens"] = value
        elif key == "model":
            values["draft"] = value
        elif key == "method" and value in ("ngram", "draft_model"):
            values.setdefault("draft", "lookup") if value == "ngram" else None
        else:
            raise ConfigError(f"--speculative-config: {key}={value!r} has no counterpart here. Use --draft and -k.")
    return values
