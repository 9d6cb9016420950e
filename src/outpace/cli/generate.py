"""`outpace generate`: one prompt in, one answer on stdout."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from outpace.cli.arguments import Parser
from outpace.cli.console import Console
from outpace.cli.session import (
    Answer,
    Message,
    encode_prompt,
    never,
    opened,
    read_plan,
    show_logprobs,
    stats_dict,
    stream,
    summary,
)
from outpace.cli.settings import ENGINE, SAMPLING, SPEC
from outpace.errors import PromptError, UsageError
from outpace.types import Constraint, FinishReason, Request

if TYPE_CHECKING:
    from outpace.text.codec import Codec

LONGEST_ANSWER = 256


def configure(parser: Parser) -> None:
    """The options of this command."""
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt; without it, stdin is read")
    parser.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a file")
    parser.add_argument("--system", metavar="TEXT", help="system message before the prompt")
    parser.add_argument("--raw", action="store_true", help="continue the text itself, without the chat template")
    parser.add_argument("--stats", action="store_true", help="all figures of the request, on stderr")
    forms = parser.add_mutually_exclusive_group()
    for flag, parse, metavar, text in (
        ("--json-schema", _json_schema, "FILE|TEXT", "answer with JSON of this schema (or use one of the next two)"),
        ("--regex", _regex, "RE", "answer with a text that matches"),
        ("--grammar", _grammar, "FILE", "answer with a text of this Lark grammar"),
    ):
        forms.add_argument(flag, dest="constraint", type=parse, default=argparse.SUPPRESS, metavar=metavar, help=text)
    parser.add_settings(SPEC, SAMPLING, ENGINE)
    parser.add_json()


def run(args: Namespace, console: Console) -> int:
    """Generate once. Returns the exit code."""
    prompt = read_prompt(args)
    plan = read_plan(args, {})
    if args.raw and args.system is not None:
        raise UsageError("--system needs the chat template, and --raw turns it off. Use one of them.")
    with opened(plan, console) as engine:
        codec, about = engine.codec, engine.description
        raw = args.raw or not codec.has_chat_template
        if raw and not args.raw:
            if args.system is not None:
                raise UsageError(f"--system needs a chat template, and {about.model} has none. Put it into the prompt.")
            console.note(f"{about.model} has no chat template: the prompt is used as it is (--raw).")
        ids = encode_prompt(codec, _messages(args.system, prompt), raw)
        request = Request("generate", tuple(ids), plan.params(len(ids), about.context, LONGEST_ANSWER))
        shown = (lambda text: None) if args.json else (lambda text: console.data(text, end=""))
        answer = stream(engine.client, request, shown, console, never)
        if args.json:
            report = {**answer.as_dict(codec), "engine": dataclasses.asdict(about)}
            console.data(json.dumps(report, ensure_ascii=False, indent=2))
        else:
            console.data("")
        _after(answer, codec, args, console)
        if request.params.constraint is not None and answer.finish_reason is FinishReason.LENGTH:
            console.note("the answer was cut at --max-tokens: it may not have the form that was asked for")
        console.note(summary(answer, about))
    return 0


def read_prompt(args: Namespace) -> str:
    """The prompt from -p, --prompt-file or stdin; one line end behind a file's text is dropped. Raises UsageError."""
    if args.prompt is not None and args.prompt_file is not None:
        raise UsageError("-p and --prompt-file both give the prompt. Use one of them.")
    if args.prompt is not None:
        text = args.prompt
    elif args.prompt_file is not None:
        text = read_text(args.prompt_file).removesuffix("\n")
    elif sys.stdin.isatty():
        raise UsageError("no prompt given. Use -p TEXT, --prompt-file FILE, or pipe the text in.")
    else:
        text = sys.stdin.read().removesuffix("\n")
    if not text:
        raise PromptError("The prompt is empty. Give some text with -p, --prompt-file or stdin.")
    return str(text)


def read_text(path: str) -> str:
    """A UTF-8 text file. Raises UsageError naming it."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as problem:
        raise UsageError(f"Cannot read {path!r}: {problem.strerror}. Check the path.") from problem
    except UnicodeDecodeError as problem:
        raise UsageError(f"{path!r} is not UTF-8 text ({problem}). Convert it first.") from problem


def _json_schema(given: str) -> Constraint:
    """The schema itself, or the file that holds it."""
    inline = given.lstrip().startswith("{")
    return Constraint.of({"json": given if inline else read_text(given)})


def _regex(given: str) -> Constraint:
    return Constraint.of({"regex": given})


def _grammar(path: str) -> Constraint:
    return Constraint.of({"grammar": read_text(path)})


def _messages(system: str | None, prompt: str) -> list[Message]:
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": prompt}]


def _after(answer: Answer, codec: Codec, args: Namespace, console: Console) -> None:
    if not args.json:
        show_logprobs(answer, codec, console)
    if args.stats:
        for name, value in stats_dict(answer.stats).items():
            console.detail(f"  {name:<24} {value:.4f}" if isinstance(value, float) else f"  {name:<24} {value}")
