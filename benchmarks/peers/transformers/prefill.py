"""How long does reading a prompt take? transformers against Outpace, the same weights in the same dtype.

    python -m benchmarks.peers.transformers.prefill MODEL [MODEL ...] [--dtypes bfloat16 float32]

MODEL is a catalogue name or anything else that Outpace takes; transformers reads the same converted folder. One pass
over 512 tokens from an empty store, logits of the last one. Rounds alternate. Writes
docs/results/peers-transformers-prefill.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
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

from outpace.lab.kernel_bench import Passes
from outpace.weights.resolve import resolve

PEER, OUTPACE = "transformers", "Outpace"
Prefill = Callable[[Sequence[int]], int]
"""token ids -> the most likely next one"""


def peer_prefill(model: str, dtype: str, threads: int) -> Prefill:
    """transformers as it comes: its own choice of attention."""
    folder = resolve(model, dtype)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))

    @torch.inference_mode()
    def prefill(tokens: Sequence[int]) -> int:
        torch.set_num_threads(threads)
        logits = loaded(torch.tensor([list(tokens)]), use_cache=True, logits_to_keep=1).logits
        torch.set_num_threads(1)  # for Outpace's turn
        return int(logits[0, -1].argmax())

    return prefill


def measure(args: argparse.Namespace, model: str, dtype: str) -> dict[str, Any]:
    """Seconds of both sides, and whether they agree on what comes next."""
    own = load(model, dtype, args.threads)
    passes = Passes(own, 0, args.tokens)
    sides: dict[str, Prefill] = {
        PEER: peer_prefill(model, dtype, args.threads),
        OUTPACE: lambda tokens: int(passes.read(tokens)().logits[0].argmax()),
    }
    tokens = random.Random(0).choices(range(1000, own.spec.vocab_size // 2), k=args.tokens)
    says = {side: prefill(tokens) for side, prefill in sides.items()}  # the warm-up
    samples: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(args.rounds):
        for side in turns(list(sides), number):
            start = time.perf_counter()
            sides[side](tokens)
            samples[side].append(time.perf_counter() - start)
    ratio = [theirs / ours for theirs, ours in zip(samples[PEER], samples[OUTPACE], strict=True)]
    found = {"model": model, "dtype": dtype, "kernels": own.kernels_name, "seconds": samples, "ratio": ratio}
    print(f"{model}, {dtype}: {figures(samples[PEER], 2)} s against {figures(samples[OUTPACE], 2)} s", flush=True)
    return {**found, "same_next_token": says[PEER] == says[OUTPACE]}


def page(args: argparse.Namespace, facts: dict[str, Any], found: list[dict[str, Any]]) -> list[str]:
    """A row per model and dtype."""
    lines = [f"# Reading a prompt of {args.tokens} tokens: transformers and Outpace", "", machine_line(facts), ""]
    lines += [
        f"Seconds, median (quartiles) of {args.rounds} alternating rounds after one that is not counted; tokens per"
        " second of the medians. Ratio: median of the rounds' ratios. Same next token: whether both find the same one"
        " most likely.",
        "",
    ]
    cells = []
    for entry in found:
        row = [entry["model"], entry["dtype"]]
        for side in (PEER, OUTPACE):
            values = entry["seconds"][side]
            row += [figures(values, 2), f"{args.tokens / summary(values)['median']:.0f}"]
        cells.append([*row, figures(entry["ratio"], 2), "yes" if entry["same_next_token"] else "no"])
    header = [
        "model",
        "dtype",
        "transformers s",
        "tok/s",
        "Outpace s",
        "tok/s",
        "transformers / Outpace",
        "same next token",
    ]
    return [*lines, *table(header, cells)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    found = [measure(args, model, dtype) for model in args.models for dtype in args.dtypes]
    peer = {"transformers": transformers.__version__, "on torch": torch.__version__}
    facts = circumstances(args.threads, found[0]["kernels"], peer)
    results = [
        {
            **entry,
            "seconds": {side: summary(values) for side, values in entry["seconds"].items()},
            "ratio": summary(entry["ratio"]),
        }
        for entry in found
    ]
    data = {"circumstances": facts, "tokens": args.tokens, "results": results}
    publish(args.out, "peers-transformers-prefill", page(args, facts, found), data)


if __name__ == "__main__":
    main()
