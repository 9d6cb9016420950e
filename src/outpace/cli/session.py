"""What every command that runs a model shares: settings, opening the engine, streaming one answer, the summary line."""

from __future__ import annotations

import dataclasses
import os
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outpace.cli.console import Console, LiveTitle
from outpace.cli.settings import BY_NAME, ENGINE, SAMPLING, SPEC, gather
from outpace.config import EngineConfig, SpecConfig
from outpace.errors import ContextOverflow, PromptError, UsageError
from outpace.types import Delta, FinishReason, Request, RequestStats, SamplingParams, TokenKind, TokenLogprob

if TYPE_CHECKING:
    from outpace.engine.build import EngineDescription, LoadedEngine
    from outpace.lab.compare import Generates
    from outpace.text.codec import Codec

Message = dict[str, str]


@dataclass(frozen=True)
class Plan:
    """All settings of one command, validated before anything is loaded."""

    engine: EngineConfig
    spec: SpecConfig
    sampling: Mapping[str, Any]

    def params(self, prompt_tokens: int, context: int, longest: int) -> SamplingParams:
        """Sampling parameters for a prompt. Without an explicit max_tokens the answer may take `longest` tokens or
        what the context leaves. Raises ContextOverflow when not even one token fits."""
        room = context - prompt_tokens
        if "max_tokens" not in self.sampling and room < 1:
            raise ContextOverflow(prompt_tokens, 1, context)
        return SamplingParams(**{"max_tokens": max(1, min(longest, room)), **self.sampling})


def read_plan(args: Namespace, defaults: Mapping[str, Any]) -> Plan:
    """Gather the settings. Raises ConfigError or ParameterError for a wrong one, UsageError without a model."""
    values = gather(args, os.environ, {"temperature": 0.0, **defaults})
    if not values.get("model"):
        raise UsageError(
            "no model given. Name one behind the command: a catalogue name (see `outpace models`), a hub id, a folder"
            " or a .gguf file."
        )
    parts: dict[str, dict[str, Any]] = {ENGINE: {}, SPEC: {}, SAMPLING: {}}
    for name, value in values.items():
        parts[BY_NAME[name].group][name] = value
    SamplingParams(**parts[SAMPLING])
    return Plan(EngineConfig(**parts[ENGINE]), SpecConfig(**parts[SPEC]), parts[SAMPLING])


@contextmanager
def opened(plan: Plan, console: Console) -> Iterator[LoadedEngine]:
    """The engine, loaded with progress and closed at the end. Says when and why speculation is off."""
    from outpace.engine.build import open_engine
    from outpace.kernels import native

    asked = plan.spec.draft != "off"
    if asked and plan.spec.k == 0:
        console.note("K is 0: plain decoding, no speculation.")
    with console.progress() as progress:
        engine = open_engine(plan.engine, plan.spec, progress)
    try:
        about = engine.description
        loaded = f"context {about.context}, loaded in {about.load_seconds:.1f} s"
        console.note(f"{about.model}: {about.dtype}, {about.kernels} kernels, {about.threads} threads, {loaded}")
        if about.device == "cpu" and not native.available():
            console.note(native.missing())
        if asked and about.drafter == "off" and plan.spec.k:
            console.note(f"speculation is off: {about.draft_reason}")
        yield engine
    finally:
        engine.close()


@dataclass
class Answer:
    """One streamed answer, as far as it came."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    kinds: list[TokenKind] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stats: RequestStats = field(default_factory=RequestStats)
    seconds: float = 0.0

    def add(self, delta: Delta) -> None:
        """Append what one step brought."""
        self.text += delta.text
        self.tokens += delta.tokens
        self.kinds += delta.kinds
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.stats = delta.stats or self.stats

    def as_dict(self, codec: Codec) -> dict[str, Any]:
        """The JSON form."""
        shown: dict[str, Any] = {
            "text": self.text,
            "tokens": self.tokens,
            "kinds": [str(kind) for kind in self.kinds],
            "finish_reason": str(self.finish_reason) if self.finish_reason else None,
            "stats": stats_dict(self.stats),
        }
        if self.logprobs:
            shown["logprobs"] = [_logprob_dict(entry, codec) for entry in self.logprobs]
        return shown


def stream(
    engine: Generates, request: Request, show: Callable[[str], None], console: Console, stop: Callable[[], bool]
) -> Answer:
    """Run one request, handing each piece of text to `show`; `stop` is asked after every step and aborts it."""
    answer, title, start = Answer(), LiveTitle(not console.quiet), time.perf_counter()
    with closing(title), closing(engine.generate(request)) as deltas:  # type: ignore[type-var]
        for delta in deltas:
            answer.add(delta)
            answer.seconds = time.perf_counter() - start
            show(delta.text)
            title.show(_live(answer))
            if stop():
                answer.finish_reason = answer.finish_reason or FinishReason.ABORT
                break
    return answer


def never() -> bool:
    """A `stop` for `stream` that lets the answer finish."""
    return False


def encode_prompt(codec: Codec, messages: Sequence[Message], raw: bool) -> list[int]:
    """Token ids of a conversation, or of the last message's bare text. Raises PromptError when there are none."""
    ids = codec.encode(messages[-1]["content"]) if raw else codec.encode_chat(list(messages))
    if not ids:
        raise PromptError("The prompt is empty: it holds no tokens. Give some text with -p, --prompt-file or stdin.")
    return list(ids)


def summary(answer: Answer, about: EngineDescription) -> str:
    """One line: tokens, time, speed, and what speculation did."""
    stats, count = answer.stats, len(answer.tokens)
    line = f"{count} token{'' if count == 1 else 's'} in {answer.seconds:.2f} s"
    if stats.tokens_per_second:
        line += f", {stats.tokens_per_second:.1f} tok/s"
    if stats.drafted:
        line += f", acceptance {stats.acceptance_rate:.0%} ({stats.accepted} of {stats.drafted} drafted)"
        line += f", {stats.mean_acceptance_length:.2f} tokens per step, K {about.shown_k}, draft {about.drafter}"
    elif about.drafter != "off" and about.k:
        line += f", nothing drafted (draft {about.drafter}, K {about.shown_k})"
    else:
        line += ", plain decoding"
    endings = {FinishReason.LENGTH: " [stopped at --max-tokens]", FinishReason.ABORT: " [interrupted]"}
    return f"[{line}]" + (endings.get(answer.finish_reason, "") if answer.finish_reason else "")


def show_logprobs(answer: Answer, codec: Codec, console: Console) -> None:
    """One line per token on stderr: the token, its log-probability, the alternatives."""
    for entry in answer.logprobs:
        others = "  ".join(f"{codec.token_text(token)!r} {value:.3f}" for token, value in entry.top)
        console.detail(f"{codec.token_text(entry.token)!r:<16} {entry.logprob:8.3f}   {others}")


def stats_dict(stats: RequestStats) -> dict[str, Any]:
    """RequestStats with its derived figures."""
    derived = {
        "acceptance_rate": stats.acceptance_rate,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "tokens_per_second": stats.tokens_per_second,
    }
    return {**dataclasses.asdict(stats), **derived}


def _live(answer: Answer) -> str:
    drafted = [kind for kind in answer.kinds if kind is TokenKind.ACCEPTED]
    share = f", {len(drafted) / len(answer.kinds):.0%} drafted" if answer.kinds else ""
    return f"outpace {len(answer.tokens) / answer.seconds:.1f} tok/s{share}" if answer.seconds else "outpace"


def _logprob_dict(entry: TokenLogprob, codec: Codec) -> dict[str, Any]:
    top = [{"token": codec.token_text(token), "id": token, "logprob": value} for token, value in entry.top]
    return {"token": codec.token_text(entry.token), "id": entry.token, "logprob": entry.logprob, "top": top}
