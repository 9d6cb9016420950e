"""A scripted engine behind the real command line: `outpace.engine.build.open_engine` is replaced by one that answers
from a list of texts."""

from __future__ import annotations

import logging
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from outpace.cli.main import main
from outpace.config import EngineConfig, SpecConfig
from outpace.errors import ContextOverflow
from outpace.lab.compare import Verdict
from outpace.types import Delta, FinishReason, Request, RequestStats, TokenKind, TokenLogprob


class ByteCodec:
    """One token per UTF-8 byte."""

    def __init__(self, has_chat_template: bool) -> None:
        self.has_chat_template = has_chat_template

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode()

    def token_text(self, token: int) -> str:
        return chr(token)


@dataclass(frozen=True)
class Description:
    """The fields of EngineDescription."""

    model: str = "fake"
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1
    kernels: str = "fake"
    bit_invariant: bool = True
    context: int = 1000
    weight_bytes: int = 1000
    kv_bytes_per_token: int = 10
    drafter: str = "lookup"
    draft_reason: str = "asked for"
    draft_weight_bytes: int = 0
    k: int = 4
    shown_k: str = "4"
    load_seconds: float = 0.1


@dataclass
class Client:
    """Answers requests with `answers` in turn, `step` characters per delta; keeps the requests it got."""

    answers: Sequence[str]
    step: int
    context: int = 1000
    before: Callable[[int], None] = lambda position: None
    requests: list[Request] = field(default_factory=list)
    closed: int = 0

    def generate(self, request: Request) -> Iterator[Delta]:
        prompt, longest = len(request.prompt_ids), request.params.max_tokens
        if prompt + longest > self.context:
            raise ContextOverflow(prompt, longest, self.context)
        text = self.answers[len(self.requests) % len(self.answers)][:longest]
        self.requests.append(request)
        try:
            for start in range(0, len(text), self.step):
                self.before(start)
                yield self._delta(request, text, start)
        finally:
            self.closed += 1

    def _delta(self, request: Request, text: str, start: int) -> Delta:
        piece = text[start : start + self.step]
        last = start + self.step >= len(text)
        steps = -(-len(text) // self.step)
        drafted = (self.step - 1) * steps
        stats = RequestStats(len(request.prompt_ids), len(text), steps, steps, drafted, len(text) - steps)
        logprobs = tuple(TokenLogprob(ord(c), -0.5, ((ord(c), -0.5),)) for c in piece)
        return Delta(
            request.id,
            tuple(piece.encode()),
            (TokenKind.ACCEPTED,) * (len(piece) - 1) + (TokenKind.BONUS,),
            piece,
            logprobs if request.params.logprobs is not None else (),
            FinishReason.STOP if last else None,
            stats if last else None,
        )


@dataclass
class Engine:
    """LoadedEngine with scripted clients."""

    client: Client
    plain_client: Client
    description: Description
    codec: ByteCodec
    model: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(bit_invariant=True))
    closed: bool = False

    def plain(self) -> Client:
        return self.plain_client

    def close(self) -> None:
        self.closed = True


@dataclass
class Fake:
    """What a test can set before and look at after running a command."""

    answers: list[str] = field(default_factory=lambda: ["hello world"])
    plain_answers: list[str] | None = None
    description: Description = field(default_factory=Description)
    chat_template: bool = True
    before: Callable[[int], None] = lambda position: None
    engine: Engine | None = None
    configs: tuple[EngineConfig, SpecConfig] | None = None

    def open_engine(self, config: EngineConfig, spec: SpecConfig, progress: Any = None) -> Engine:
        self.configs = (config, spec)
        context = self.description.context
        client = Client(self.answers, 3, context, self.before)
        plain = Client(self.plain_answers or self.answers, 1, context)
        self.engine = Engine(client, plain, self.description, ByteCodec(self.chat_template))
        return self.engine

    @property
    def requests(self) -> list[Request]:
        assert self.engine is not None
        return self.engine.client.requests


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Put a scripted engine behind the command line."""
    engine = Fake()
    module = types.ModuleType("outpace.engine.build")
    module.open_engine = engine.open_engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "outpace.engine.build", module)
    verdict = Verdict(False, "not a tie")
    monkeypatch.setattr("outpace.lab.judge.TeacherJudge", lambda model, params, bits_equal: lambda *runs: verdict)
    return engine


@dataclass(frozen=True)
class Outcome:
    """What a command did."""

    code: int
    out: str
    err: str


@pytest.fixture
def outpace(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Outcome]]:
    """Run a command line in this process, with no OUTPACE_* variable of the outside and a terminal's stdin."""
    for name in [name for name in os.environ if name.startswith("OUTPACE_")]:
        monkeypatch.delenv(name)

    def run(*words: str) -> Outcome:
        code = main(words)
        shown = capsys.readouterr()
        return Outcome(code, shown.out, shown.err)

    yield run
    logging.disable(logging.NOTSET)
