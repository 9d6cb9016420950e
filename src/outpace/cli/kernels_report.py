"""How `bench kernels` shows its result: tables on the terminal, a page, its data, a picture."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from outpace.cli import report
from outpace.lab.compare import Spread
from outpace.lab.kernels import CHEAP, Curve, KernelReport, Limits, conclusions

NO_PICTURE = 'no picture: matplotlib is not installed. Get it with: pip install "outpace[plot]"'
QUICK = "A quick run on small data: these figures say nothing about the machine."
COPY_NOTE = "A copy counts the bytes read and those written."
SHARE_NOTE = "GB/s: bytes of weights over the time of one row; share: of the read bandwidth in the same rounds."

_COLOURS = 10  # of matplotlib's cycle; then they repeat
_WORDS = ("", "weights", "kernels")  # headings of columns that hold no figures

Table = tuple[str, list[str], list[list[str]]]
"""Title, headings, rows of cells."""


def show(result: KernelReport, facts: Mapping[str, Any]) -> None:
    """Tables and conclusions on stdout."""
    from rich.table import Table as RichTable
    from rich.text import Text

    out = report.stdout()
    for title, heads, rows in tables(result):
        table = RichTable(title=Text(title), title_justify="left", header_style="", pad_edge=False)
        for head in heads:
            table.add_column(Text(head), justify="left" if head in _WORDS else "right")
        for row in rows:
            table.add_row(*map(Text, row))
        out.print(table)
    for line in _lines(result, facts):
        out.print(line, markup=False, highlight=False)


def tables(result: KernelReport) -> list[Table]:
    """Machine, products, pass."""
    outputs, inputs = result.shape
    limits = result.limits
    return [
        (f"machine ({limits.kernels})", ["", f"{limits.threads} threads", "1 thread"], list(_machine_rows(limits))),
        (
            f"one product of {outputs} x {inputs}, weights from memory: v(rows)",
            ["weights", "kernels", "MB", "ms", "GB/s", "share", *_v_heads(result.products)],
            [_product_row(curve, limits) for curve in result.products],
        ),
        (
            f"one pass of {result.whole.name} ({result.whole.kernels})",
            ["rows", "ms", "quartiles", "v", "quartiles", "no less than", "because of"],
            [_pass_row(result.whole, limits, rows) for rows in result.whole.rows],
        ),
    ]


def markdown(result: KernelReport, facts: Mapping[str, Any], picture: str | None) -> str:
    """The page: conclusions, tables, times of every product, the picture's file if there is one."""
    kind = facts["dtype"] if facts["quantization"] == "none" else f"{facts['dtype']}, {facts['quantization']}"
    lines = [f"# What {facts['model']} ({kind}) costs by rows, and what the machine gives", ""]
    lines += [report.measured_on(facts), f"{facts['rounds']} rounds; medians, and quartiles where they are given.", ""]
    lines += ["```", *_lines(result, facts), "```", ""]
    if picture:
        lines += [f"![v by rows, and milliseconds per pass beside the limits]({picture})", ""]
    for title, heads, rows in [*tables(result), _times(result.products)]:
        lines += [f"## {title[0].upper() + title[1:]}", "", *_grid(heads, rows), ""]
    return "\n".join(lines)


def name(facts: Mapping[str, Any], result: KernelReport) -> str:
    """File name without suffix: what was measured, on which arithmetic."""
    kind = facts["dtype"] if facts["quantization"] == "none" else facts["quantization"]
    return report.file_name("kernels", facts["model"], kind, result.limits.kernels)


def files(result: KernelReport, facts: Mapping[str, Any]) -> tuple[dict[str, str | bytes], str | None]:
    """Contents by suffix, and what is missing: without matplotlib there is no picture."""
    drawn = picture(result)
    linked = f"{name(facts, result)}.png" if drawn else None
    content: dict[str, str | bytes] = {".md": markdown(result, facts, linked)}
    content[".json"] = report.as_json(result.as_dict(), facts) + "\n"
    return (content | {".png": drawn}, None) if drawn else (content, NO_PICTURE)


def picture(result: KernelReport) -> bytes | None:
    """A PNG: v(rows) of every format, and a pass beside its limits. None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, curve in enumerate(result.products):
        line, label = ("--", f"{curve.name}, torch") if curve.kernels == "torch" else ("-", curve.name)
        mark = "o" if number < _COLOURS else "x"
        left.plot(curve.rows, [curve.v(rows).median for rows in curve.rows], line, marker=mark, label=label)
    left.axhline(CHEAP, color="grey", linewidth=0.8)
    left.set(title=f"one product of {result.shape[0]} x {result.shape[1]}", ylabel="v (cost of one row = 1)")
    whole, limits = result.whole, result.limits
    spreads = [whole.time(rows) for rows in whole.rows]
    right.plot(whole.rows, [s.median * 1e3 for s in spreads], marker=".", label="measured (band: quartiles)")
    right.fill_between(whole.rows, [s.q1 * 1e3 for s in spreads], [s.q3 * 1e3 for s in spreads], alpha=0.3)
    least = [whole.least_seconds(limits, rows) * 1e3 for rows in whole.rows]
    right.plot(whole.rows, least, "--", color="grey", label="no less than (memory, arithmetic)")
    right.set(title=f"one pass of {whole.name}", ylabel="ms")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xlabel("rows")
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small")
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=120)
    return data.getvalue()


def _lines(result: KernelReport, facts: Mapping[str, Any]) -> list[str]:
    warning = [QUICK] if facts["quick"] else []
    return [*warning, *conclusions(result.whole, result.limits), COPY_NOTE, SHARE_NOTE]


def _machine_rows(limits: Limits) -> Iterator[list[str]]:
    for what, rates in (("read", (limits.read, limits.read_one)), ("copy", (limits.copy, limits.copy_one))):
        yield [what, *(_spread(rate, 1e9, "GB/s") for rate in rates)]
    for dtype, rate in limits.multiply.items():
        one = limits.multiply_one.get(dtype)
        yield [f"{dtype} multiply-adds", _spread(rate, 1e9, "G/s"), _spread(one, 1e9, "G/s") if one else "-"]


def _spread(value: Spread, scale: float, unit: str) -> str:
    middle, low, high, best = (f"{x / scale:.1f}" for x in (value.median, value.q1, value.q3, value.high))
    return f"{middle} {unit} ({low} to {high}), best {best}"


def _v_heads(curves: Sequence[Curve]) -> list[str]:
    return [f"v({rows})" for rows in _common_rows(curves) if rows > 1]


def _common_rows(curves: Sequence[Curve]) -> list[int]:
    return curves[0].rows if curves else []


def _product_row(curve: Curve, limits: Limits) -> list[str]:
    first = [curve.name, curve.kernels, f"{curve.weight_bytes / 1e6:.1f}", f"{curve.time(1).median * 1e3:.2f}"]
    rates = [f"{curve.rate().median / 1e9:.1f}", f"{curve.share(limits).median:.0%}"]
    return [*first, *rates, *(f"{curve.v(rows).median:.2f}" for rows in curve.rows if rows > 1)]


def _pass_row(curve: Curve, limits: Limits, rows: int) -> list[str]:
    time, v = curve.time(rows), curve.v(rows)
    arithmetic = curve.arithmetic_seconds(limits, rows) or 0.0
    which = "arithmetic" if arithmetic > curve.memory_seconds(limits) else "memory"
    return [
        str(rows),
        f"{time.median * 1e3:.2f}",
        f"{time.q1 * 1e3:.2f} to {time.q3 * 1e3:.2f}",
        f"{v.median:.2f}",
        f"{v.q1:.2f} to {v.q3:.2f}",
        f"{curve.least_seconds(limits, rows) * 1e3:.2f} ms",
        which,
    ]


def _times(curves: Sequence[Curve]) -> Table:
    """Milliseconds of every product with their quartiles."""
    rows = [[curve.name, curve.kernels, *(_milliseconds(curve.time(rows)) for rows in curve.rows)] for curve in curves]
    return "products in ms (quartiles)", ["weights", "kernels", *map(str, _common_rows(curves))], rows


def _milliseconds(value: Spread) -> str:
    return f"{value.median * 1e3:.2f} ({value.q1 * 1e3:.2f} to {value.q3 * 1e3:.2f})"


def _grid(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = "|" + "|".join("---" if head in _WORDS else "---:" for head in heads) + "|"
    return [f"| {' | '.join(heads)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)]
