"""How a comparison is shown: side by side on the terminal, as Markdown and JSON in files."""

from __future__ import annotations

import datetime
import json
import re
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.cli.env import machine_facts
from outpace.errors import UsageError
from outpace.lab.compare import PLAIN, CaseResult, Comparison, Difference, Spread
from outpace.lab.diff import diff_texts, side_by_side, unified

if TYPE_CHECKING:
    from rich.console import Console as RichConsole

_LINES, _CHARACTERS, _WIDTH = 8, 480, 110


def show_case(result: CaseResult, full: bool) -> None:
    """Both answers in two columns, and one line saying whether they are the same and how fast they came."""
    from rich.text import Text

    out = stdout()
    plain, speculative = result.plain[0].text, result.speculative[0].text
    diff = diff_texts(plain, speculative)
    labels = (f"plain, {_speed(result.plain)}", f"speculative, {_speed(result.speculative)}")
    out.rule(Text(f"{result.case.name} ({result.case.kind})"), align="left")
    cut = "" if full or not diff.equal else _rest(plain)
    shown = diff_texts(_head(plain), _head(speculative)) if cut else diff
    out.print(side_by_side(shown, *labels))
    out.print(f"{cut}{_verdict(result)}", markup=False, highlight=False)
    for difference in result.differences:
        out.print(explain(difference), markup=False, highlight=False)


def show_summary(result: Comparison, facts: Mapping[str, Any]) -> None:
    """The figures of the whole comparison."""
    out = stdout()
    out.rule("result", align="left")
    for line in summary_lines(result, facts):
        out.print(line, markup=False, highlight=False)


def summary_lines(result: Comparison, facts: Mapping[str, Any]) -> list[str]:
    """The result in a few sentences, the same on the terminal and in Markdown."""
    count = len(result.differences)
    runs = sum(len(case.plain) + len(case.speculative) for case in result.cases)
    texts = f"the same to the character in all {runs} runs" if not count else f"{count} of {runs} runs differ"
    if count:
        texts += ", every one a near tie of the target" if result.lossless else "; this must not happen"
    low, high = result.interval
    lines = [
        f"text:        {texts}",
        f"plain:       {_spread(result.plain_speed, ' tok/s')}",
        f"speculative: {_spread(result.speculative_speed, ' tok/s')}",
        f"speedup:     {_spread(result.speedup, 'x', 2)}, 95% interval of the median {low:.2f} to {high:.2f}",
    ]
    lines += [f"  {kind:<10} {_spread(value, 'x', 2)}" for kind, value in result.by_kind.items()]
    lines.append(f"whole answer (with reading the prompt): {_spread(result.answer_speedup, 'x', 2)}")
    lines.append(
        f"acceptance:  {result.acceptance_rate:.0%} of drafted tokens, {result.mean_acceptance_length:.2f} tokens per"
        f" step, draft {facts['draft']}, K {facts['k']}"
    )
    return lines


def explain(difference: Difference) -> str:
    """Where two answers part, what both say there, and the judge's word."""
    diff = difference.diff
    plain, other = diff.continuations()
    who = "plain decoding does not repeat itself" if difference.side == PLAIN else "speculative text differs"
    place = diff.line_and_column
    if place is None:
        where = f"at token {difference.token} with the same characters"
    else:
        where = f"at character {diff.first} (line {place[0]}, column {place[1]}, token {difference.token})"
    verdict = difference.verdict.message if difference.verdict else "not judged"
    return f"{who} {where}, run {difference.repeat + 1}: {plain!r} against {other!r}; {verdict}"


def write(folder: Path, result: Comparison, facts: Mapping[str, Any]) -> list[Path]:
    """Write compare-MODEL-DRAFT.md and .json into `folder`, made if need be. Raises UsageError if it cannot."""
    content = {".md": markdown(result, facts), ".json": as_json(result.as_dict(), facts) + "\n"}
    return write_files(folder, file_name("compare", facts["model"], facts["draft"]), content)


def dated(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The circumstances of a measurement: its settings, between the date and the machine."""
    return {"date": datetime.date.today().isoformat(), **settings, "machine": machine_facts()}


def measured_on(facts: Mapping[str, Any]) -> str:
    """The sentence that opens a page of results; facts from `dated`, with threads and kernels."""
    machine = facts["machine"]
    where = f"{machine['cpu']}, {machine['cores']} cores, {facts['threads']} threads, kernels {facts['kernels']}"
    return f"Measured {facts['date']} on {where}, torch {machine['torch']}."


def as_json(result: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """A result behind its circumstances."""
    return json.dumps({"circumstances": facts, **result}, ensure_ascii=False, indent=2)


def file_name(*parts: object) -> str:
    """Lower-case words with hyphens; of a path only its last part."""
    return "-".join(re.sub(r"[^\w.]+", "-", Path(str(part)).name).lower() for part in parts)


def write_files(folder: Path, name: str, content: Mapping[str, str | bytes]) -> list[Path]:
    """Write name + suffix for every suffix, into a folder made if need be. Raises UsageError if it cannot."""
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for suffix, data in content.items():
            paths.append(folder / f"{name}{suffix}")
            paths[-1].write_bytes(data if isinstance(data, bytes) else data.encode("utf-8"))
    except OSError as problem:
        raise UsageError(f"Cannot write the result to {str(folder)!r}: {problem.strerror}.") from problem
    return paths


def markdown(result: Comparison, facts: Mapping[str, Any]) -> str:
    """A page with circumstances, summary and one row per prompt."""
    lines = [f"# {facts['model']} with draft {facts['draft']} (K {facts['k']}, {facts['dtype']})", ""]
    lines += [measured_on(facts), "", "```", *summary_lines(result, facts), "```", ""]
    lines += ["| prompt | kind | tokens | plain tok/s | speculative tok/s | speedup | same text |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for case in result.cases:
        ratio = f"{statistics.median(case.speedups):.2f}" if case.speedups else "-"
        same = "no" if case.differences else "yes"
        cells = [case.case.name, case.case.kind, str(len(case.plain[0].tokens)), _number(case.plain)]
        lines.append("| " + " | ".join([*cells, _number(case.speculative), ratio, same]) + " |")
    lines += [f"\n{explain(difference)}" for difference in result.differences]
    for case in result.cases:
        changed = unified(diff_texts(case.plain[0].text, case.speculative[0].text))
        lines += ["", "~~~diff", changed, "~~~"] if changed else []
    return "\n".join(lines) + "\n"


def stdout() -> RichConsole:
    """Tables and rules go here: as wide as the terminal, or a fixed width."""
    from rich.console import Console as RichConsole

    terminal = sys.stdout.isatty()
    return RichConsole(file=sys.stdout, width=None if terminal else _WIDTH, soft_wrap=False)


def _verdict(result: CaseResult) -> str:
    length = len(result.plain[0].text)
    same = "DIFFERENT" if result.differences else f"identical, {length} characters"
    ratio = f"; {statistics.median(result.speedups):.2f}x" if result.speedups else "; too short to time"
    return same + ratio


def _head(text: str) -> str:
    return "\n".join(text.split("\n")[:_LINES])[:_CHARACTERS]


def _rest(text: str) -> str:
    left = len(text) - len(_head(text))
    return f"... {left} more characters (--full shows them). " if left else ""


def _number(runs: tuple[Any, ...]) -> str:
    speeds = [run.speed for run in runs if run.speed]
    return f"{statistics.median(speeds):.1f}" if speeds else "-"


def _speed(runs: tuple[Any, ...]) -> str:
    return f"{_number(runs)} tok/s"


def _spread(value: Spread, unit: str, digits: int = 1) -> str:
    if not value.n:
        return "nothing to time (answers of one step)"
    middle, low, high = (f"{x:.{digits}f}" for x in (value.median, value.q1, value.q3))
    return f"{middle}{unit} median, quartiles {low} to {high}, n = {value.n}"
