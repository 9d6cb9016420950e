"""Where the time of one speculative step goes, part by part, beside the least that the machine allows.

    python -m benchmarks.step_profile qwen2.5-coder-1.5b-instruct --draft qwen2.5-coder-0.5b-instruct -k 4

Answers a tuning prompt of HumanEval with a fixed K and takes the clock around the two models' native calls; then times
the target's own matrices one kind after the other at K + 1 rows, from memory, in turns with whole passes. Writes a page
and its data to docs/results/. Needs the native kernels.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from benchmarks.peers import common

from outpace.config import EngineConfig, SpecConfig
from outpace.engine import local
from outpace.engine.build import LoadedEngine, open_engine
from outpace.engine.step import StepReport
from outpace.kernels import native
from outpace.lab.kernel_bench import Passes, Setup, measure_limits, time_rounds
from outpace.lab.kernels import Limits
from outpace.types import Request, SamplingParams
from outpace.weights.load import load_checkpoint
from outpace.weights.resolve import resolve

PROMPT = '''from typing import List


def moving_average(values: List[float], width: int) -> List[float]:
    """Averages of every window of `width` neighbouring values. Raise ValueError for a width that does not fit.
    >>> moving_average([1.0, 2.0, 3.0, 4.0], 2)
    [1.5, 2.5, 3.5]
    """
'''
KINDS = {
    "query, key, value": ("q", "k", "v"),
    "attention output": ("o",),
    "gate, up": ("gate", "up"),
    "down": ("down",),
}


@dataclass
class Clock:
    """Seconds of each step: what the step says, and what its native calls took by model."""

    steps: list[dict[str, float]] = field(default_factory=list)
    open: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def watch(self, target: int) -> None:
        """Take the time around every native forward pass and every step."""
        forward, step = native.Native.forward, local.step

        def timed_forward(kernels: native.Native, model: native.Model, work: native.Pass) -> None:
            start = time.perf_counter()
            forward(kernels, model, work)
            who = "target" if id(model) == target else "draft"
            self.open[f"{who} kernels"] += time.perf_counter() - start
            self.open[f"{who} passes"] += 1

        def timed_step(*args: object) -> StepReport:
            self.open.clear()
            start = time.perf_counter()
            report: StepReport = step(*args)  # type: ignore[arg-type]
            whole = time.perf_counter() - start
            drafted = sum(emission.drafted for emission in report.emissions.values())
            parts = {"draft": report.draft_seconds, "verify": report.verify_seconds, "other": report.other_seconds}
            self.steps.append({**self.open, **parts, "whole": whole, "drafted": drafted})
            return report

        native.Native.forward = timed_forward  # type: ignore[method-assign]
        local.step = timed_step  # type: ignore[assignment]

    def median(self, name: str, k: int) -> float:
        """Of the steps with a full draft, the first ones left out."""
        full = [step for step in self.steps[2:] if step["drafted"] == k and step["draft passes"] == k]
        return statistics.median(step.get(name, 0.0) for step in full)


def matrices(engine: LoadedEngine, config: EngineConfig, rows: int, rounds: int) -> tuple[dict[str, float], float]:
    """The least seconds of each kind of matrix over all layers, and of a whole pass, at this many rows."""
    spec, weights = load_checkpoint(resolve(config.model, config.dtype), config.dtype, "cpu")
    kernels = native.open_native(engine.description.threads)
    groups = {
        name: [weights[f"layers.{i}.{m}"] for i in range(spec.layers) for m in kind] for name, kind in KINDS.items()
    }
    groups["output projection"] = [weights["embed" if spec.tied else "lm_head"]]
    inputs = {w.shape[1]: torch.randn(rows, w.shape[1]) for group in groups.values() for w in group}

    def run(group: Sequence[native.Weight]) -> Callable[[], None]:
        def call() -> None:
            for weight in group:
                kernels.linear(inputs[weight.shape[1]], weight)

        return call

    calls: dict[str, Callable[[], object]] = {name: run(group) for name, group in groups.items()}
    calls["pass"] = Passes(engine.model, 200, rows).check(rows)
    least = {name: min(seconds) for name, seconds in time_rounds(calls, rounds).items()}
    whole = least.pop("pass")
    return least, whole


def answer(engine: LoadedEngine, tokens: int) -> None:
    """One greedy answer."""
    prompt = tuple(engine.codec.encode_chat([{"role": "user", "content": f"Complete this function.\n\n{PROMPT}"}]))
    request = Request("profile", prompt, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
    for _ in engine.client.generate(request):
        pass


def rows_of(clock: Clock, k: int, parts: dict[str, float], whole: float, floors: tuple[float, ...]) -> list[list[str]]:
    """The table: part, milliseconds, share of the step, and the least possible where there is one."""
    ms = {
        name: clock.median(name, k) * 1e3
        for name in ("whole", "draft", "verify", "other", "draft kernels", "target kernels")
    }
    scale = ms["target kernels"] / (whole * 1e3)  # a pass of the engine and one measured alone need not be equal
    inside = sum(parts.values()) * 1e3 * scale
    draft_floor, memory, arithmetic = (value * 1e3 for value in floors)
    lines = [
        (f"{k} passes of the draft model", ms["draft kernels"], f"{draft_floor:.1f} (memory)"),
        ("around them: Python, one pass to the next", ms["draft"] - ms["draft kernels"], ""),
        (
            "one pass of the target",
            ms["target kernels"],
            f"{max(memory, arithmetic):.1f} (memory {memory:.1f}, arithmetic {arithmetic:.1f})",
        ),
        *((f"- {name}", seconds * 1e3 * scale, "") for name, seconds in parts.items()),
        ("- what is left: attention, norms, threads", ms["target kernels"] - inside, ""),
        ("around it: Python, structs, buffers", ms["verify"] - ms["target kernels"], ""),
        ("laws, rule, stores, what the drafter observes", ms["other"], ""),
        ("**one step**", ms["whole"], ""),
    ]
    return [[name, f"{value:.2f}", f"{value / ms['whole']:.1%}", least] for name, value, least in lines]


def floors(engine: LoadedEngine, limits: Limits, k: int, draft_bytes: int) -> tuple[float, float, float]:
    """Least seconds: all draft passes by memory, the target's pass by memory, and by arithmetic."""
    spec, read = engine.model.spec, limits.read.median
    adds = spec.parameters() - (0 if spec.tied else spec.vocab_size * spec.hidden)
    peak = limits.peak(str(engine.model.dtype).removeprefix("torch.")) or float("inf")
    return k * draft_bytes / read, engine.model.pass_bytes() / read, (k + 1) * adds / peak


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft", required=True)
    parser.add_argument("-k", type=int, default=4)
    parser.add_argument("--draft-vocab", type=int)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    args = parser.parse_args()
    config = EngineConfig(model=args.model, draft_vocab=args.draft_vocab)
    with open_engine(config, SpecConfig(args.draft, args.k)) as engine:
        if not engine.description.bit_invariant:
            raise SystemExit(native.missing())
        clock = Clock()
        clock.watch(id(engine.model._model))  # type: ignore[attr-defined]
        answer(engine, args.tokens)
        threads, drafter = engine.description.threads, engine.client._machine.drafter.inner  # type: ignore[union-attr]
        parts, whole = matrices(engine, config, args.k + 1, args.rounds)
        limits = measure_limits((native.open_native(threads), native.open_native(1)), threads, Setup.full(args.rounds))
        least = floors(engine, limits, args.k, drafter._model.pass_bytes())
        table = rows_of(clock, args.k, parts, whole, least)
        facts = common.circumstances(threads, engine.description.kernels, {})
        publish(args, table, facts, engine, {"steps": clock.steps, "matrices": parts, "pass": whole})


def publish(
    args: argparse.Namespace,
    table: list[list[str]],
    facts: dict[str, object],
    engine: LoadedEngine,
    data: dict[str, object],
) -> None:
    """Page and data."""
    about, machine = engine.description, facts["machine"]
    lines = [
        f"# One speculative step: {args.model} with {args.draft}, K {args.k}",
        "",
        f"Measured {facts['date']} on {machine['cpu']}, {machine['cores']} cores, {about.threads} threads,"  # type: ignore[index]
        f" {about.kernels} kernels, {about.dtype}. {about.draft_reason}. Medians over the steps with a full draft of"
        " one greedy answer; the target's matrices are timed alone, in turns with passes (least of all), and scaled.",
        "",
        *common.table(["part", "ms", "share", "no less than, ms"], table),
    ]
    names = (Path(args.model).name, Path(args.draft).name)
    common.publish(args.out, f"step-{names[0]}-{names[1]}", lines, {**facts, **data, "table": table})


if __name__ == "__main__":
    main()
