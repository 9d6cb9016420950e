"""What the comparisons with other engines share: whose turn it is, what is said about the machine, page and data."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from outpace.cli.env import machine_facts
from outpace.kernels import native
from outpace.lab.compare import spread
from outpace.models.base import ForwardBatch, LanguageModel, SeqRows
from outpace.models.loading import Placement, make_decoder
from outpace.weights.load import load_checkpoint
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
    about = {"threads": threads, "kernels": kernels, "peer": peer}
    return {"date": datetime.date.today().isoformat(), **about, "machine": machine_facts()}


def machine_line(facts: dict[str, Any]) -> str:
    """The circumstances in a sentence or two."""
    machine, peer = facts["machine"], ", ".join(f"{name} {value}" for name, value in facts["peer"].items())
    where = f"{machine['cpu']}, {machine['cores']} cores, {facts['threads']} threads each"
    return f"Measured {facts['date']} on {where}. Outpace: kernels {facts['kernels']}. The other side: {peer}."


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Markdown lines."""
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def slug(text: str) -> str:
    """For the name of a result file."""
    return re.sub(r"[^\w.]+", "-", text).strip("-").lower()


def publish(folder: Path, name: str, lines: Sequence[str], data: dict[str, Any]) -> None:
    """Write NAME.md and NAME.json, and show the page."""
    folder.mkdir(parents=True, exist_ok=True)
    page = "\n".join(lines) + "\n"
    (folder / f"{name}.md").write_text(page, encoding="utf-8")
    (folder / f"{name}.json").write_text(json.dumps(data, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(page)


class Passes:
    """Forward passes of a model as Outpace runs it, over a text of `past` tokens that stays as it is."""

    def __init__(self, model: str, dtype: str, threads: int, past: int, most: int) -> None:
        if not native.available():
            raise SystemExit(native.missing())
        torch.set_num_threads(1)  # as the engine does: the kernels have threads of their own
        spec, weights = load_checkpoint(resolve(model, dtype), dtype, "cpu")
        self.model: LanguageModel = make_decoder(spec, weights, Placement(threads=threads))
        self._store, self._past = self.model.new_store(), past
        if past:
            self._store.reserve(0, past)
            self._run(tuple(range(5, 5 + past)), 0, [past - 1])
            self._store.commit(0, range(past))
        self._store.reserve(0, most)

    def verify(self, rows: int) -> None:
        """One pass over `rows` new tokens, with the logits of each."""
        self._run(tuple(range(50, 50 + rows)), self._past, list(range(rows)))

    def prefill(self, tokens: Sequence[int]) -> int:
        """One pass over these tokens, with the logits of the last. Returns the most likely next token."""
        return int(self._run(tuple(tokens), self._past, [len(tokens) - 1])[0].argmax())

    def _run(self, tokens: tuple[int, ...], first: int, wanted: list[int]) -> torch.Tensor:
        batch = ForwardBatch([SeqRows(0, tokens, first)], wanted)
        return self.model.forward(batch, self._store).logits
