"""`outpace chat`: a conversation that streams. Ctrl-C stops the answer, not the program."""

from __future__ import annotations

import signal
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

from outpace.cli.arguments import Parser
from outpace.cli.console import Console, is_terminal
from outpace.cli.session import Message, Plan, encode_prompt, opened, read_plan, show_logprobs, stream, summary
from outpace.cli.settings import ENGINE, SAMPLING, SPEC
from outpace.errors import ContextOverflow, ParameterError, PromptError, Unsupported
from outpace.types import Request

if TYPE_CHECKING:
    from outpace.engine.build import LoadedEngine

LONGEST_ANSWER = 1024
HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


def configure(parser: Parser) -> None:
    """The options of this command."""
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    parser.add_settings(SPEC, SAMPLING, ENGINE)


def run(args: Namespace, console: Console) -> int:
    """Talk until /exit or the end of the input. Returns the exit code."""
    plan = read_plan(args, {})
    with opened(plan, console) as engine:
        if not engine.codec.has_chat_template:
            raise Unsupported(
                f"{engine.description.model} has no chat template, so it cannot hold a conversation. Use an instruct"
                " model, or `outpace generate --raw` to continue a text."
            )
        console.note(HELP)
        conversation = Conversation(engine, plan, args.system, console)
        for line in _lines(console):
            if line == "/exit":
                break
            if line == "/reset":
                conversation.reset()
            elif line == "/help":
                console.note(HELP)
            elif line.startswith("/") and " " not in line:
                console.note(f"unknown command {line!r}. {HELP}")
            elif line:
                conversation.ask(line)
    return 0


class Conversation:
    """The messages so far, and how to get the next answer."""

    def __init__(self, engine: LoadedEngine, plan: Plan, system: str | None, console: Console) -> None:
        self._engine, self._plan, self._console = engine, plan, console
        self._start: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages: list[Message] = list(self._start)
        self._asked = 0

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = list(self._start)
        self._console.note("The conversation is empty again.")

    def ask(self, text: str) -> None:
        """Stream the answer to `text`. A question that cannot be answered is reported and not kept."""
        messages = [*self.messages, {"role": "user", "content": text}]
        about = self._engine.description
        self._asked += 1
        try:
            ids = encode_prompt(self._engine.codec, messages, False)
            params = self._plan.params(len(ids), about.context, LONGEST_ANSWER)
            request = Request(f"chat-{self._asked}", tuple(ids), params)
            with _interruptible() as pressed:
                show = self._console
                answer = stream(
                    self._engine.client, request, lambda t: show.data(t, end=""), show, lambda: bool(pressed)
                )
        except ContextOverflow as problem:
            self._console.error(f"{problem} Or start over with /reset.")
            return
        except (ParameterError, PromptError) as problem:
            self._console.error(str(problem))
            return
        self._console.data("")
        show_logprobs(answer, self._engine.codec, self._console)
        self._console.note(summary(answer, about))
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """The first Ctrl-C is noted, so that a step is never cut in half; a second one interrupts as usual."""
    pressed: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _lines(console: Console) -> Iterator[str]:
    """What the person types, line by line, until the end of the input. Ctrl-C at the prompt only gives a hint."""
    interactive = sys.stdin.isatty() and is_terminal(sys.stdout)
    if interactive:
        with suppress(ImportError):
            import readline  # noqa: F401
    while True:
        try:
            yield input("> " if interactive else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            if not interactive:
                raise
            console.note(f"\n{HELP}")
