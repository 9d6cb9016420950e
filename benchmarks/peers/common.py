"""What the comparisons with other engines share: whose turn it is, what is said about the machine, page and data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from outpace.cli import report
from outpace.kernels import native
from outpace.lab.compare import spread
from outpace.models.base import LanguageModel
from outpace.models.loading import Placement
from outpace.weights.load import load_decoder
from outpace.weights.resolve import resolve

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"


def turns(sides: Sequence[str], number: int) -> list[str]:
    """The sides in the order of this round: who comes first moves on by one, so that drift falls on all alike."""
    start = number % len(sides)
    return [*sides[start:], *sides[:start]]


def figures(values: Sequence[float], digits: int = 1) -> str:
    """Median with quartiles, for a cell of a table."""
    if not values:
        return "-"
    found = spread(values)
    middle, low, high = (f"{value:.{digits}f}" for value in (found.median, found.q1, found.q3))
    return f"{middle} ({low}-{high})"


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles, extremes and the values themselves, for the data file."""
    return {**asdict(spread(values)), "values": [round(value, 4) for value in values]}


def circumstances(threads: int, kernels: str, peer: dict[str, str]) -> dict[str, Any]:
    """All that a reader needs to judge the figures. `peer` says what the other engine is and how it was built."""
    return report.dated({"threads": threads, "kernels": kernels, "peer": peer})


def machine_line(facts: dict[str, Any]) -> str:
    """The circumstances in a sentence or two."""
    machine, peer = facts["machine"], ", ".join(f"{name} {value}" for name, value in facts["peer"].items())
    where = f"{machine['cpu']}, {machine['cores']} cores, {facts['threads']} threads each"
    return f"Measured {facts['date']} on {where}. Outpace: kernels {facts['kernels']}. The other side: {peer}."


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Markdown lines."""
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def publish(folder: Path, name: str, lines: Sequence[str], data: dict[str, Any]) -> None:
    """Write NAME.md and NAME.json, and show the page. data holds its circumstances."""
    page = "\n".join(lines) + "\n"
    content = {".md": page, ".json": json.dumps(data, ensure_ascii=False, indent=1) + "\n"}
    report.write_files(folder, name, content)
    print(page)


def load(model: str, dtype: str, threads: int) -> LanguageModel:
    """The model as Outpace runs it, on the native kernels."""
    if not native.available():
        raise SystemExit(native.missing())
    torch.set_num_threads(1)  # as the engine does: the kernels have threads of their own
    return load_decoder(resolve(model, dtype), dtype, Placement(threads=threads))
