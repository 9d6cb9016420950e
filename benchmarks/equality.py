"""Is speculative text the plain text? Many real prompts, long answers, every drafter, several K and batch sizes.

    python benchmarks/equality.py smollm2-135m-instruct --draft lookup --draft smollm2-135m-instruct --dtype float32

Greedy and seeded (temperature 0.8, top-p 0.9). Writes docs/results/equality-MODEL-DTYPE.{md,json}; exit code 3 if any
text differs. A finished configuration is kept in the .json and skipped when the script is started again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from outpace.cli.env import machine_facts
from outpace.config import EngineConfig, SpecConfig
from outpace.engine.build import LoadedEngine, open_engine
from outpace.engine.local import LocalEngine
from outpace.types import Request, SamplingParams

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = ROOT / "tests" / "real" / "prompts.txt"
KINDS = {
    "greedy": SamplingParams(temperature=0, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.8, top_p=0.9, seed=17, ignore_eos=True),
}


def texts(engine: LocalEngine, prompts: list[tuple[int, ...]], params: SamplingParams, batch: int) -> list[list[int]]:
    """Tokens of every answer, `batch` requests open at a time."""
    found: list[list[int]] = []
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        streams = [engine.generate(Request(f"{start + i}", ids, params)) for i, ids in enumerate(part)]
        found += [[token for delta in stream for token in delta.tokens] for stream in streams]
    return found


def load(args: argparse.Namespace, draft: str, k: int) -> LoadedEngine:
    config = EngineConfig(args.model, dtype=args.dtype, draft_dtype=args.draft_dtype, threads=args.threads)
    return open_engine(config, SpecConfig(draft, k))


def configurations(args: argparse.Namespace) -> Iterator[tuple[str, int, int]]:
    for draft in args.draft:
        for k in args.k:
            for batch in args.batch:
                yield draft, k, batch


def measure(args: argparse.Namespace, path: Path) -> dict:
    """All configurations against plain decoding of one request at a time."""
    done = json.loads(path.read_text()) if path.is_file() else {"configurations": {}}
    with load(args, "off", 0) as loaded:
        chats = [[{"role": "user", "content": line}] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
        prompts = [tuple(loaded.codec.encode_chat(chat)) for chat in chats[: args.prompts]]
        done["kernels"], done["threads"] = loaded.description.kernels, loaded.description.threads
        kinds = {name: KINDS[name].replace(max_tokens=args.tokens) for name in args.kinds}
        if "plain" not in done:
            done["plain"] = {name: texts(loaded.client, prompts, params, 1) for name, params in kinds.items()}
            path.write_text(json.dumps(done))
    for draft, k, batch in configurations(args):
        name = f"{draft}, K {k}, batch {batch}"
        if name in done["configurations"]:
            continue
        start, result = time.time(), {}
        with load(args, draft, k) as loaded:
            for kind, params in kinds.items():
                found = texts(loaded.client, prompts, params, batch)
                plain = done["plain"][kind]
                differing = [i for i, (a, b) in enumerate(zip(found, plain, strict=True)) if a != b]
                result[kind] = {"texts": len(found), "tokens": sum(map(len, found)), "differing": differing}
            stats = loaded.client.stats()
            result["acceptance_rate"] = stats["accepted_tokens"] / max(1.0, stats["drafted_tokens"])
        done["configurations"][name] = result
        path.write_text(json.dumps(done))
        publish(args, done)
        print(f"{name}: {result} ({time.time() - start:.0f} s)", flush=True)
    return done


def publish(args: argparse.Namespace, done: dict) -> None:
    """The page and its data, as far as the run has come."""
    stem = args.out / f"equality-{args.model}-{args.dtype}"
    result = {key: value for key, value in done.items() if key != "plain"}
    stem.with_suffix(".md").write_text(page(args, result), encoding="utf-8")
    stem.with_suffix(".json").write_text(json.dumps({"machine": machine_facts(), **result}, indent=1), encoding="utf-8")


def page(args: argparse.Namespace, result: dict) -> str:
    facts = machine_facts()
    lines = [f"# Speculative text against plain text: {args.model}, {args.dtype}", ""]
    lines += [f"{facts['cpu']}, {result['threads']} threads, kernels {result['kernels']}, torch {facts['torch']}.", ""]
    lines += [
        f"{args.prompts} prompts, {args.tokens} tokens each, compared token by token with plain decoding alone.",
        "",
    ]
    lines += [
        "| draft, K, batch | kind | texts | tokens | differing texts | accepted / drafted |",
        "|---|---|---|---|---|---|",
    ]
    for name, kinds in result["configurations"].items():
        for kind in args.kinds:
            cells = [kinds[kind]["texts"], kinds[kind]["tokens"], len(kinds[kind]["differing"])]
            lines.append(f"| {name} | {kind} | {' | '.join(map(str, cells))} | {kinds['acceptance_rate']:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft", action="append", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--draft-dtype", default="bfloat16")
    parser.add_argument("-k", type=int, nargs="+", default=[1, 4, 7])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    partial = args.out / f"equality-{args.model}-{args.dtype}.json.partial"
    result = measure(args, partial)
    publish(args, result)
    partial.unlink()
    bad = [
        name for name, kinds in result["configurations"].items() if any(kinds[kind]["differing"] for kind in args.kinds)
    ]
    print(f"{len(bad)} of {len(result['configurations'])} configurations differ")
    return 3 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
