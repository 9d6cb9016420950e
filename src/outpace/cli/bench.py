"""`outpace bench WHAT`: the measurements. Each is a module of its own, bench_WHAT.py."""

from __future__ import annotations

from argparse import Namespace

from outpace.cli.arguments import Parser
from outpace.cli.console import Console
from outpace.cli.settings import nearest
from outpace.errors import UsageError

SUBJECTS = {"kernels": "what this machine gives at most, and what a pass costs by its number of rows"}


def summary(subject: str) -> str:
    """What a measurement is about. Raises UsageError for one that does not exist."""
    if subject not in SUBJECTS:
        raise UsageError(f"unknown measurement {subject!r}.{nearest(subject, SUBJECTS)} There are: {_listed()}.")
    return SUBJECTS[subject]


def configure(parser: Parser) -> None:
    """Only a list: the options belong to the measurements."""
    parser.epilog = "; ".join(f"outpace bench {name} [MODEL]: {text}" for name, text in SUBJECTS.items())


def run(args: Namespace, console: Console) -> int:
    """Without a subject there is nothing to do. Raises UsageError."""
    raise UsageError(f"bench needs to know what to measure, behind it at once: {_listed()}.")


def _listed() -> str:
    return ", ".join(f"`outpace bench {name}`" for name in SUBJECTS)
