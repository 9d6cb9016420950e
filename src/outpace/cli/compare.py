"""`outpace compare`: plain and speculative decoding of the same prompts, side by side."""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.cli import report
from outpace.cli.arguments import Parser
from outpace.cli.console import Console
from outpace.cli.generate import read_text
from outpace.cli.session import Plan, encode_prompt, opened, read_plan
from outpace.cli.settings import ENGINE, SAMPLING, SPEC
from outpace.errors import PromptError, UsageError

if TYPE_CHECKING:
    from outpace.engine.build import EngineDescription, LoadedEngine
    from outpace.lab.compare import Case, CaseResult, Comparison

LONGEST_ANSWER = 128
DIFFERENT = 3


def configure(parser: Parser) -> None:
    """The options of this command."""
    parser.add_argument("--prompts", metavar="FILE", help='a prompt per line, or .jsonl with "prompt" (default: demo)')
    parser.add_argument("--repeats", metavar="N", type=int, default=2, help="pairs of runs per prompt (default 2)")
    parser.add_argument("--raw", action="store_true", help="no chat template")
    parser.add_argument("--full", action="store_true", help="show whole answers")
    parser.add_argument("--out", metavar="DIR", help="also write the result there as .md and .json")
    parser.add_settings(SPEC, SAMPLING, ENGINE)
    parser.add_json()


def run(args: Namespace, console: Console) -> int:
    """Measure, report, and return 3 when a text differs outside a near tie."""
    if args.repeats < 1:
        raise UsageError(f"--repeats must be at least 1, got {args.repeats}.")
    plan = read_plan(args, {"draft": "lookup"})
    if plan.sampling["temperature"] and "seed" not in plan.sampling:
        console.note("temperature is above 0, so both sides need one seed to be comparable: using --seed 0.")
        plan = Plan(plan.engine, plan.spec, {**plan.sampling, "seed": 0})
    # Both sides read every prompt from its beginning, or a second run would have less to do than the first.
    plan = dataclasses.replace(plan, engine=dataclasses.replace(plan.engine, prefix_cache=False))
    prompts = read_prompts(args.prompts)
    with opened(plan, console) as engine:
        if not engine.description.k:
            console.note("both sides decode plainly: this run measures only the noise of the machine.")
        raw = args.raw or not engine.codec.has_chat_template
        cases = [_case(engine, plan, prompt, raw) for prompt in prompts]
        result = _measure(engine, cases, args, console)
        facts = circumstances(engine.description, plan, args.repeats, len(cases))
    if args.json:
        console.data(report.as_json(result.as_dict(), facts))
    else:
        report.show_summary(result, facts)
    if args.out:
        for path in report.write(Path(args.out), result, facts):
            console.note(f"wrote {path}")
    return 0 if result.lossless else DIFFERENT


def read_prompts(path: str | None) -> list[dict[str, str]]:
    """Prompts with name and kind, from a file or the built-in demo set. Raises UsageError naming the bad line."""
    if path is None:
        text = (files("outpace.lab") / "prompts" / "demo.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]
    lines = [(number, line) for number, line in enumerate(read_text(path).splitlines(), 1) if line.strip()]
    if not lines:
        raise PromptError(f"{path!r} holds no prompts. Write one per line, or JSON objects with the key prompt.")
    if not path.endswith((".jsonl", ".json")):
        return [{"name": f"line {number}", "kind": "own", "prompt": line} for number, line in lines]
    return [_json_prompt(path, number, line) for number, line in lines]


def circumstances(about: EngineDescription, plan: Plan, repeats: int, prompts: int) -> dict[str, Any]:
    """All that a reader needs to judge the figures."""
    settings = {
        "model": about.model,
        "dtype": about.dtype,
        "draft": about.drafter,
        "draft_reason": about.draft_reason,
        "k": about.shown_k,
        "threads": about.threads,
        "kernels": about.kernels,
        "prompts": prompts,
        "pairs_per_prompt": repeats,
        "sampling": {"max_tokens": LONGEST_ANSWER, **plan.sampling},
    }
    return report.dated(settings)


def _json_prompt(path: str, number: int, line: str) -> dict[str, str]:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as problem:
        raise UsageError(f"{path!r}, line {number}: not JSON ({problem.msg}). Each line is one object.") from problem
    prompt = entry.get("prompt") if isinstance(entry, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise UsageError(f'{path!r}, line {number}: needs a non-empty string under "prompt".')
    return {"name": str(entry.get("name", f"line {number}")), "kind": str(entry.get("kind", "own")), "prompt": prompt}


def _case(engine: LoadedEngine, plan: Plan, prompt: dict[str, str], raw: bool) -> Case:
    from outpace.lab.compare import Case

    ids = encode_prompt(engine.codec, [{"role": "user", "content": prompt["prompt"]}], raw)
    params = plan.params(len(ids), engine.description.context, LONGEST_ANSWER)
    return Case(prompt["name"], prompt["kind"], tuple(ids), params)


def _measure(engine: LoadedEngine, cases: list[Case], args: Namespace, console: Console) -> Comparison:
    from outpace.lab.compare import Setup, compare
    from outpace.lab.judge import TeacherJudge

    console.note(f"{len(cases)} prompts, pairs of runs per prompt: {args.repeats}, after a warm-up that is not counted")

    def show(result: CaseResult) -> None:
        if not args.json:
            report.show_case(result, args.full)
        else:
            console.note(f"{result.case.name}: {len(result.differences)} differences")

    # All cases share their sampling settings but max_tokens, which no verdict depends on.
    setup = Setup(repeats=args.repeats, judge=TeacherJudge(engine.model, cases[0].params, engine.model.bit_invariant))
    return compare(cases, engine.plain(), engine.client, setup, show)
