r"""Tokens per second of whole answers: llama-server and Outpace, each plain and with a draft model, on the same files.

    python benchmarks/prompts.py PROMPTS
    python -m benchmarks.peers.llama_cpp.generate DIR TARGET.gguf --draft DRAFT.gguf \
        --prompts PROMPTS/code-held-out.jsonl

DIR is the folder of `build`. Greedy; both engines get the same token ids, made with the model's chat template, and the
same files: Outpace reads them with `--dtype native` (bfloat16 for a BF16 file). For every prompt all sides answer one
after the other, the first moving on by one each time. Speed counts the tokens after the first over the time they took,
as both engines report it themselves. Choose K on the tuning prompts, report the held-out ones. Writes
docs/results/peers-llama_cpp-generate-TARGET-PROMPTS.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.common import RESULTS, circumstances, figures, machine_line, publish, summary, table, turns
from benchmarks.peers.llama_cpp.build import description, program
from benchmarks.peers.llama_cpp.files import dtype_for, file_type
from benchmarks.peers.llama_cpp.server import Server, serving

from outpace.cli import report
from outpace.cli.compare import read_prompts
from outpace.config import EngineConfig, SpecConfig
from outpace.engine.build import LoadedEngine, open_engine
from outpace.engine.local import LocalEngine
from outpace.lab.compare import measure
from outpace.types import Request, SamplingParams

LLAMA, OUTPACE = "llama.cpp", "Outpace"
CONTEXT = 4096


@dataclass(frozen=True)
class Answer:
    """One answer. speed in tokens/s after the first token, seconds with reading the prompt; tokens without the end."""

    prompt: str
    speed: float
    seconds: float
    tokens: tuple[int, ...]
    drafted: int
    accepted: int


Ask = Callable[[str, tuple[int, ...]], Answer]
"""(name of the prompt, its ids) -> Answer"""


def name_of(engine: str, k: int) -> str:
    return f"{engine}, K {k}" if k else f"{engine}, plain"


def llama_command(args: argparse.Namespace, k: int) -> list[str | Path]:
    """llama-server on one slot; k 0 is plain."""
    command: list[str | Path] = [
        program(args.folder, "llama-server"),
        "-m",
        args.target,
        "-c",
        str(CONTEXT),
        "-np",
        "1",
    ]
    command += ["-t", str(args.threads), "-tb", str(args.threads), "--cache-ram", "0"]
    if k:
        command += ["--spec-type", "draft-simple", "-md", args.draft, "--spec-draft-n-max", str(k)]
        command += ["-td", str(args.threads), "-tbd", str(args.threads)]
    return command


def ask_llama(server: Server, length: int, ends: frozenset[int]) -> Ask:
    def ask(prompt: str, ids: tuple[int, ...]) -> Answer:
        start = time.perf_counter()
        answer = server.ask(ids, length)
        seconds, timings = time.perf_counter() - start, answer["timings"]
        drafts = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
        return Answer(prompt, timings["predicted_per_second"], seconds, without_end(answer["tokens"], ends), *drafts)

    return ask


def ask_outpace(engine: LocalEngine, length: int, ends: frozenset[int]) -> Ask:
    def ask(prompt: str, ids: tuple[int, ...]) -> Answer:
        request = Request(f"{prompt} {time.monotonic_ns()}", ids, SamplingParams(temperature=0, max_tokens=length))
        run = measure("", engine, request)
        drafts = run.stats.drafted, run.stats.accepted
        return Answer(prompt, run.speed, run.seconds, without_end(run.tokens, ends), *drafts)

    return ask


def without_end(tokens: Sequence[int], ends: frozenset[int]) -> tuple[int, ...]:
    """One engine reports the token that ended the answer, the other does not."""
    return tuple(tokens[:-1] if tokens and tokens[-1] in ends else tokens)


def open_outpace(args: argparse.Namespace) -> LoadedEngine:
    draft = str(args.draft) if args.draft else "off"
    draft_dtype = dtype_for(args.draft) if args.draft else "auto"
    config = EngineConfig(
        str(args.target),
        dtype=dtype_for(args.target),
        draft_dtype=args.draft_dtype or draft_dtype,
        threads=args.threads,
        max_model_len=CONTEXT,
    )
    return open_engine(config, SpecConfig(draft, args.k))


@contextmanager
def all_sides(args: argparse.Namespace, engine: LoadedEngine) -> Iterator[dict[str, Ask]]:
    """Every engine in every mode, all loaded, one of them working at a time."""
    ends, logs = engine.codec.eos_ids, args.folder / "logs"
    with ExitStack() as stack:
        sides: dict[str, Ask] = {}
        for k in [0, *args.llama_k] if args.draft else [0]:
            server = stack.enter_context(serving(llama_command(args, k), logs / f"server-{k}.log"))
            sides[name_of(LLAMA, k)] = ask_llama(server, args.tokens, ends)
        sides[name_of(OUTPACE, 0)] = ask_outpace(engine.plain(), args.tokens, ends)
        if engine.description.k:
            sides[name_of(OUTPACE, engine.description.k)] = ask_outpace(engine.client, args.tokens, ends)
        yield sides


def chosen(prompts: list[dict[str, str]], count: int | None) -> list[dict[str, str]]:
    """`count` of them, spread evenly over the set."""
    count = min(count or len(prompts), len(prompts))
    return [prompts[i * len(prompts) // count] for i in range(count)]


def run(args: argparse.Namespace, engine: LoadedEngine) -> dict[str, list[Answer]]:
    """All answers by side, one after the other."""
    prompts = chosen(read_prompts(str(args.prompts)), args.count)
    with all_sides(args, engine) as sides:
        answers: dict[str, list[Answer]] = {side: [] for side in sides}
        encoded = [tuple(engine.codec.encode_chat([{"role": "user", "content": p["prompt"]}])) for p in prompts]
        for ask in sides.values():
            ask("warm-up", encoded[0])
        for number in range(len(prompts) * args.repeats):
            at = number % len(prompts)
            for side in turns(list(sides), number):
                answers[side].append(sides[side](prompts[at]["name"], encoded[at]))
            speeds = ", ".join(f"{side} {found[-1].speed:.1f}" for side, found in answers.items())
            print(f"{prompts[at]['name']}: {speeds} tok/s", flush=True)
    return answers


def best(answers: dict[str, list[Answer]], engine: str) -> str:
    """The mode of an engine with the highest median speed."""
    sides = [side for side in answers if side.startswith(engine)]
    return max(sides, key=lambda side: statistics.median(answer.speed for answer in answers[side]))


def ratios(answers: dict[str, list[Answer]], side: str, base: str) -> list[float]:
    """Speed of one side over another, prompt by prompt, where there is anything to time."""
    pairs = zip(answers[side], answers[base], strict=True)
    return [one.speed / other.speed for one, other in pairs if one.speed and other.speed]


def page(args: argparse.Namespace, facts: dict[str, Any], answers: dict[str, list[Answer]]) -> list[str]:
    """A row per side, then the best of each."""
    files = f"{args.target.stem} ({file_type(args.target)})"
    files += f" with draft {args.draft.stem} ({file_type(args.draft)})" if args.draft else ""
    count = len(next(iter(answers.values())))
    lines = [f"# llama-server and Outpace on {args.prompts.stem}: {files}", "", machine_line(facts), ""]
    lines += [
        f"{count} answers per row ({args.repeats} per prompt), at most {args.tokens} tokens, greedy, the same token ids"
        " and files for all; median (quartiles). Ratios are taken prompt by prompt. Same text: answers equal to those"
        " of the same engine without a draft.",
        "",
    ]
    cells = []
    for side, found in answers.items():
        plain = answers[name_of(side.split(",")[0], 0)]
        drafted, accepted = sum(a.drafted for a in found), sum(a.accepted for a in found)
        same = sum(a.tokens == b.tokens for a, b in zip(found, plain, strict=True))
        row = [side, figures([a.speed for a in found]), figures(ratios(answers, side, name_of(LLAMA, 0)), 2)]
        row += [figures([a.seconds for a in found], 2), f"{accepted / drafted:.2f}" if drafted else "-"]
        cells.append([*row, f"{same} of {len(found)}"])
    header = ["side", "tok/s", "x llama.cpp, plain", "whole answer, s", "accepted / drafted", "same text"]
    ours, theirs = best(answers, OUTPACE), best(answers, LLAMA)
    equal = sum(a.tokens == b.tokens for a, b in zip(answers[ours], answers[theirs], strict=True))
    lines += [*table(header, cells), ""]
    lines += [f"Best mode of each: {ours} / {theirs} = {figures(ratios(answers, ours, theirs), 2)}."]
    return [*lines, f"The two give the same tokens in {equal} of {count} answers: engines round differently."]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("target", type=Path, metavar="TARGET.gguf")
    parser.add_argument("--draft", type=Path, metavar="DRAFT.gguf")
    parser.add_argument("--draft-dtype", help="how Outpace reads the draft (default: the file's own blocks)")
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument("--count", type=int, help="that many prompts, spread over the file (default: all)")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("-k", type=int, default=4, help="Outpace's K")
    parser.add_argument(
        "--llama-k", type=int, nargs="+", default=[3, 5], metavar="K", help="llama-server's, one or more"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    with open_outpace(args) as engine:
        about = engine.description
        answers = run(args, engine)
    facts = circumstances(args.threads, about.kernels, description())
    settings = {"target": args.target.name, "draft": args.draft.name if args.draft else None}
    settings |= {"dtype": about.dtype, "draft_reason": about.draft_reason, "tokens": args.tokens}
    settings |= {"prompts": args.prompts.name, "repeats": args.repeats}
    ours, theirs = best(answers, OUTPACE), best(answers, LLAMA)
    data = {
        "circumstances": facts,
        "settings": settings,
        "best": {"ours": ours, "theirs": theirs, "ratio": summary(ratios(answers, ours, theirs))},
        "tokens_per_second": {side: summary([a.speed for a in found]) for side, found in answers.items()},
        "answers": {side: [asdict(answer) for answer in found] for side, found in answers.items()},
    }
    name = report.file_name("peers-llama_cpp-generate", args.target.stem, args.prompts.stem)
    publish(args.out, name, page(args, facts, answers), data)


if __name__ == "__main__":
    main()
