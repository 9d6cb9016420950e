"""What does one pass cost that checks n rows? llama.cpp against Outpace, on the same .gguf file.

    python -m benchmarks.peers.llama_cpp.passes DIR FILE.gguf [FILE.gguf ...]

DIR is the folder of `build`. Both engines read the file's own weights (Outpace: `--dtype native`, bfloat16 for a BF16
file) and give the logits of every row, as the check of a draft needs them. llama.cpp: `llama-batched-bench`, n rows
behind one shared text. Outpace: `LanguageModel.forward`. A sample is the mean of a few passes of one width in a row, so
that neither side pays for a change of width. Rounds alternate. Writes docs/results/peers-llama_cpp-passes-FILE.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.common import (
    RESULTS,
    circumstances,
    figures,
    load,
    machine_line,
    publish,
    summary,
    table,
    turns,
)
from benchmarks.peers.llama_cpp.build import description, program
from benchmarks.peers.llama_cpp.files import dtype_for, file_type

from outpace.cli import report
from outpace.lab.kernel_bench import Passes

LLAMA, OUTPACE = "llama.cpp", "Outpace"
Samples = dict[str, dict[int, list[float]]]


def llama_round(args: argparse.Namespace, path: Path) -> dict[int, float]:
    """Milliseconds per pass by rows. The first width runs twice: once to warm up."""
    command: list[str | Path] = [program(args.folder, "llama-batched-bench"), "-m", path]
    command += ["-c", str(-(-(args.past + max(args.rows) * args.passes) // 256) * 256)]
    command += [
        "-npp",
        str(args.past),
        "-ntg",
        str(args.passes),
        "-npl",
        ",".join(map(str, [args.rows[0], *args.rows])),
    ]
    command += ["-pps", "-kvu", "-t", str(args.threads), "-tb", str(args.threads), "--output-format", "jsonl"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if [entry["pl"] for entry in found[1:]] != list(args.rows):
        raise SystemExit(f"llama-batched-bench did not measure every width:\n{done.stdout[-2000:]}")
    return {entry["pl"]: entry["t_tg"] / args.passes * 1e3 for entry in found[1:]}


def outpace_round(args: argparse.Namespace, passes: Passes) -> dict[int, float]:
    """The same of Outpace."""
    found = {}
    for rows in [args.rows[0], *args.rows]:
        start = time.perf_counter()
        for _ in range(args.passes):
            passes.check(rows)()
        found[rows] = (time.perf_counter() - start) / args.passes * 1e3
    return found


def measure(args: argparse.Namespace, path: Path) -> tuple[Samples, str]:
    """All samples in milliseconds, and the name of Outpace's kernels."""
    model = load(str(path), dtype_for(path), args.threads)
    passes = Passes(model, args.past, max(args.rows))
    sides = {LLAMA: lambda: llama_round(args, path), OUTPACE: lambda: outpace_round(args, passes)}
    samples: Samples = {side: {rows: [] for rows in args.rows} for side in sides}
    for number in range(args.rounds):
        for side in turns(list(sides), number):
            for rows, value in sides[side]().items():
                samples[side][rows].append(value)
            print(f"{path.name}, round {number + 1} of {args.rounds}: {side} done", flush=True)
    return samples, model.kernels_name


def page(args: argparse.Namespace, path: Path, facts: dict[str, Any], samples: Samples) -> list[str]:
    """Milliseconds, cost relative to one row, and the ratio of both engines in each round."""
    what = f"{path.stem}, {file_type(path)}, {path.stat().st_size / 1e9:.2f} GB"
    lines = [f"# Cost of one pass by rows, llama.cpp and Outpace: {what}", "", machine_line(facts), ""]
    lines += [
        f"Milliseconds per pass, logits of every row, {args.past} tokens of text before; median (quartiles) of"
        f" {args.rounds} alternating rounds, {args.passes} passes each. v: cost relative to one row."
        " llama.cpp / Outpace: median of the rounds' ratios.",
        "",
    ]
    cells: list[Sequence[str]] = []
    for rows in args.rows:
        theirs, ours = samples[LLAMA][rows], samples[OUTPACE][rows]
        row = [str(rows)]
        for side, values in ((LLAMA, theirs), (OUTPACE, ours)):
            relative = statistics.median(values) / statistics.median(samples[side][args.rows[0]])
            row += [figures(values), f"{relative:.2f}"]
        cells.append([*row, figures([a / b for a, b in zip(theirs, ours, strict=True)], 2)])
    header = ["rows", "llama.cpp ms", "v", "Outpace ms", "v", "llama.cpp / Outpace"]
    return [*lines, *table(header, cells)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 8, 16])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--passes", type=int, default=5, help="of one width in a row, whose mean is one sample")
    parser.add_argument("--past", type=int, default=16, help="tokens of text before the rows")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    for path in args.files:
        samples, kernels = measure(args, path)
        facts = circumstances(args.threads, kernels, description())
        data = {
            "circumstances": {**facts, "file": path.name, "type": file_type(path), "bytes": path.stat().st_size},
            "settings": {"rounds": args.rounds, "passes": args.passes, "past": args.past},
            "milliseconds": {
                side: {rows: summary(values) for rows, values in found.items()} for side, found in samples.items()
            },
        }
        name = report.file_name("peers-llama_cpp-passes", path.stem)
        publish(args.out, name, page(args, path, facts, samples), data)


if __name__ == "__main__":
    main()
