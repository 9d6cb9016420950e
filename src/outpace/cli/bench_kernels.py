"""`outpace bench kernels [MODEL]`: the limits of this machine, and the cost of a pass by its number of rows."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.cli import kernels_report, report
from outpace.cli.arguments import Parser
from outpace.cli.console import Console
from outpace.cli.session import Plan, read_plan
from outpace.config import QUANTIZATIONS, stored_dtype
from outpace.errors import UsageError

if TYPE_CHECKING:
    from outpace.lab.kernels import KernelReport

DEFAULT_MODEL = "smollm2-135m-instruct"
ROUNDS, QUICK_ROUNDS = 20, 2
ROUNDINGS = tuple(kind for kind in QUANTIZATIONS if kind != "auto")


def configure(parser: Parser) -> None:
    """The options of this command."""
    kinds = ", ".join(ROUNDINGS)
    parser.add_argument("--rounds", metavar="N", type=int, help=f"rounds of timings (default {ROUNDS})")
    parser.add_argument("--quantization", metavar="KIND", default="none", help=f"rounding of the weights: {kinds}")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run? The figures say nothing")
    parser.add_argument("--out", metavar="DIR", help="also write the result there as .md, .json and .png")
    parser.add_settings("dtype", "threads", "kernels", "device")
    parser.add_json()


def run(args: Namespace, console: Console) -> int:
    """Measure and report. Returns the exit code."""
    from outpace.kernels import native
    from outpace.lab.kernel_bench import Setup, bench_kernels

    rounds = args.rounds if args.rounds is not None else QUICK_ROUNDS if args.quick else ROUNDS
    if rounds < 1:
        raise UsageError(f"--rounds must be at least 1, got {rounds}.")
    if args.quantization not in ROUNDINGS:
        raise UsageError(f"--quantization must be one of {', '.join(ROUNDINGS)}, got {args.quantization!r}.")
    plan = read_plan(args, {"model": DEFAULT_MODEL})
    if not native.available():
        console.note(f"{native.missing()} Measured is torch.")
    setup = Setup.quick(rounds) if args.quick else Setup.full(rounds)
    with console.progress() as progress:
        result = bench_kernels(plan.engine, args.quantization, setup, progress)
    facts = circumstances(plan, args, result)
    if args.json:
        console.data(report.as_json(result.as_dict(), facts))
    else:
        kernels_report.show(result, facts)
    if args.out:
        content, missing = kernels_report.files(result, facts)
        if missing:
            console.note(missing)
        for path in report.write_files(Path(args.out), kernels_report.name(facts, result), content):
            console.note(f"wrote {path}")
    return 0


def circumstances(plan: Plan, args: Namespace, result: KernelReport) -> dict[str, Any]:
    """All that a reader needs to judge the figures."""
    settings = {
        "model": plan.engine.model,
        "dtype": stored_dtype(plan.engine.dtype),
        "quantization": args.quantization,
        "threads": result.limits.threads,
        "kernels": result.whole.kernels,
        "rounds": len(result.whole.seconds[1]),
        "quick": args.quick,
    }
    return report.dated(settings)
