"""`outpace models`: the catalogue, what of it is on this machine, and `models pull NAME`."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

from outpace.cli.arguments import Parser
from outpace.cli.console import Console
from outpace.errors import UsageError

ACTIONS = ("list", "pull")


def configure(parser: Parser) -> None:
    """The options of this command."""
    parser.add_argument("action", nargs="?", default="list", metavar="list|pull", help="what to do (default: list)")
    parser.add_argument("names", nargs="*", metavar="NAME", help="for pull: catalogue names")
    parser.add_json()


def run(args: Namespace, console: Console) -> int:
    """List, or download. Returns the exit code."""
    if args.action not in ACTIONS:
        raise UsageError(f"unknown action {args.action!r}. Use `outpace models` or `outpace models pull NAME`.")
    if args.action == "pull":
        return _pull(args, console)
    if args.names:
        raise UsageError(f"`outpace models list` takes no name, got {args.names[0]!r}. To download it, use pull.")
    return _list(args, console)


def _list(args: Namespace, console: Console) -> int:
    from outpace.weights import catalog

    rows: list[dict[str, Any]] = [
        {"name": entry.name, "bytes": entry.size, "licence": entry.licence, "cached": catalog.is_cached(entry.name)}
        for entry in catalog.entries()
    ]
    if args.json:
        console.data(json.dumps(rows, indent=2))
        return 0
    for row in rows:
        state = "cached" if row["cached"] else "not downloaded"
        console.data(f"{row['name']:<30} {row['bytes'] / 1e6:6.0f} MB  {state:<15} {row['licence']}")
    return 0


def _pull(args: Namespace, console: Console) -> int:
    if not args.names:
        raise UsageError("`outpace models pull` needs a name. `outpace models` lists them.")
    from outpace.weights import catalog

    found = {}
    for name in args.names:
        with console.progress() as progress:
            found[name] = str(catalog.pull(name, progress))
        if not args.json:
            console.data(found[name])
    if args.json:
        console.data(json.dumps(found, indent=2))
    return 0
