"""What a neighbour costs: passes of a model while another process keeps one core busy, against passes without it.

    python -m benchmarks.busy_core smollm2-135m-instruct

Rounds with and without the neighbour take turns. Tasks are taken from one list, so the threads that still run do the
lost core's share; with N threads no more than N / (N - 1) is lost by that, and with two cores of which one is half lost
nothing should cost more than twice. Writes a page and its data to docs/results/.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.peers import common

from outpace.lab.kernel_bench import Passes
from outpace.models.loading import physical_cores

ROWS = (1, 5)
SECONDS = 1.0  # of each turn, at least


def spin(core: int) -> None:
    """Keep a core busy until killed."""
    os.sched_setaffinity(0, {core})
    while True:
        sum(range(1000))


@contextmanager
def neighbour(busy: bool) -> Iterator[None]:
    """A process on the first of our cores, or nobody."""
    if not busy:
        yield
        return
    process = multiprocessing.get_context("spawn").Process(
        target=spin, args=(min(os.sched_getaffinity(0)),), daemon=True
    )
    process.start()
    time.sleep(1.5)  # until it has started Python
    try:
        yield
    finally:
        process.kill()
        process.join()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    args = parser.parse_args()
    threads = physical_cores()
    model = common.load(args.model, args.dtype, threads)
    passes = Passes(model, 100, max(ROWS))
    calls = {rows: passes.check(rows) for rows in ROWS}
    seconds: dict[tuple[int, bool], list[float]] = {(rows, busy): [] for rows in ROWS for busy in (False, True)}
    for call in calls.values():
        call()
    for number in range(args.rounds):
        for busy in (False, True) if number % 2 else (True, False):
            with neighbour(busy):
                for rows, call in calls.items():
                    start = time.perf_counter()
                    while time.perf_counter() - start < SECONDS:
                        begun = time.perf_counter()
                        call()
                        seconds[rows, busy].append(time.perf_counter() - begun)
    ms = {key: [value * 1e3 for value in values] for key, values in seconds.items()}
    ratio = {rows: common.spread(ms[rows, True]).median / common.spread(ms[rows, False]).median for rows in ROWS}
    table = [
        [str(rows), common.figures(ms[rows, False]), common.figures(ms[rows, True]), f"{ratio[rows]:.2f}"]
        for rows in ROWS
    ]
    facts = common.circumstances(threads, model.kernels_name, {"a Python loop": "on one core"})
    lines = [
        f"# Passes of {args.model} while another process has a core",
        "",
        common.machine_line(facts),
        f"Turns of {SECONDS:.0f} s with and without it, {args.rounds} each; medians and quartiles.",
        "",
        *common.table(["rows", "alone, ms", "with a busy core, ms", "ratio"], table),
    ]
    data = {f"{rows} rows, {'busy' if busy else 'alone'}": common.summary(ms[rows, busy]) for rows, busy in ms}
    common.publish(args.out, f"busy-core-{Path(args.model).name}", lines, {**facts, "ms": data, "ratio": ratio})


if __name__ == "__main__":
    main()
