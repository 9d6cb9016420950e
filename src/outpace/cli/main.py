"""The `outpace` command: find the verb, import only its module, turn every failure into one paragraph and a code.

Exit codes: 0 ok, 1 failure while running, 2 wrong usage, setting or model, 3 verification failed, 130 interrupted.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import sys
import warnings
from collections.abc import Sequence

from outpace.cli.arguments import Parser
from outpace.cli.console import Console
from outpace.cli.settings import misspelt_variables, nearest
from outpace.errors import OutpaceError, UsageError

VERBS = {
    "generate": "answer one prompt",
    "chat": "talk to a model",
    "compare": "plain and speculative decoding side by side: same text, how much faster",
    "bench": "measure this machine and what a pass costs on it: `outpace bench kernels`",
    "inspect": "sizes, memory, and whether a draft model fits",
    "models": "the catalogue, and what is downloaded",
    "env": "facts about this machine for a bug report",
}
# Commands of several: the next word names one, `bench kernels` is cli/bench_kernels.py, and cli/bench.py lists them.
GROUPS = ("bench",)
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; never raises for a user's mistake."""
    words = list(sys.argv[1:] if argv is None else argv)
    console = Console(quiet=bool({"-q", "--quiet"} & set(words)), verbose=bool({"-v", "--verbose"} & set(words)))
    try:
        return _dispatch(words, console)
    except SystemExit as leaving:  # argparse leaves this way after printing help
        return leaving.code if isinstance(leaving.code, int) else 0
    except KeyboardInterrupt:
        console.note("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader went away (`| head`): leave quietly, and keep Python from complaining while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OutpaceError as problem:
        return _fail(console, str(problem), problem.exit_code)
    except Exception as problem:
        text = f"{type(problem).__name__}: {problem}. This is a bug in outpace, not in your input."
        return _fail(console, f"{text} Run again with -v for the traceback, and report it with `outpace env`.", 1)


def _fail(console: Console, text: str, code: int) -> int:
    if console.verbose:
        import traceback

        traceback.print_exc()
    console.error(" ".join(text.split()))
    return code


def _dispatch(words: list[str], console: Console) -> int:
    if not words or words[0] in ("-h", "--help", "--help-all", "help"):
        print(_overview())
        return 0
    if words[0] in ("-V", "--version", "version"):
        print(f"outpace {version()}")
        return 0
    verb, rest = words[0], words[1:]
    if verb not in VERBS:
        kind = "option" if verb.startswith("-") else "command"
        raise UsageError(f"unknown {kind} {verb!r}.{nearest(verb, VERBS)} Commands: {', '.join(VERBS)}.")
    module, title = importlib.import_module(f"outpace.cli.{verb}"), VERBS[verb]
    if verb in GROUPS and rest and not rest[0].startswith("-"):
        title = module.summary(rest[0])
        module = importlib.import_module(f"outpace.cli.{verb}_{rest[0]}")
        verb, rest = f"{verb} {rest[0]}", rest[1:]
    parser = Parser(verb, title[0].upper() + title[1:] + ".", "--help-all" in rest)
    module.configure(parser)
    args = parser.read(rest)
    _quieten(console)
    for warning in misspelt_variables(os.environ):
        console.note(warning)
    code: int = module.run(args, console)
    return code


def version() -> str:
    """The installed version, or a word saying that there is none."""
    try:
        return importlib.metadata.version("outpace")
    except importlib.metadata.PackageNotFoundError:
        return "(source tree, not installed)"


def _overview() -> str:
    lines = [
        "outpace: faster answers from language models, the same text.",
        "",
        "usage: outpace COMMAND MODEL [options]",
    ]
    lines += ["", *(f"  {verb:<10} {summary}" for verb, summary in VERBS.items()), ""]
    lines += ["`outpace COMMAND --help` lists a command's options. Try: outpace compare smollm2-135m-instruct"]
    return "\n".join(lines)


def _quieten(console: Console) -> None:
    """Other libraries' warnings are noise to a user, and help to a developer."""
    if console.verbose:
        return
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for name, value in (("TOKENIZERS_PARALLELISM", "false"), ("HF_HUB_DISABLE_TELEMETRY", "1")):
        os.environ.setdefault(name, value)
