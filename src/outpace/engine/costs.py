"""What passes cost: seconds by rows, measured when a model is loaded for adaptive K, and followed while it runs."""

from __future__ import annotations

import bisect
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from outpace.models.base import ForwardBatch, LanguageModel, SeqRows
from outpace.weights.local import Progress, cache_root

# How much of a deviation one observed pass moves: all costs alike (the machine drifts), and its own rows.
_DRIFT, _SHAPE = 0.1, 0.03
_PAST = 64  # committed rows behind which passes are measured
_PATIENCE = 6.0  # seconds after which no further round begins
_VERSION = 1  # of the files; raise it when kernels change what passes cost


class PassCosts:
    """Seconds of a pass by its rows: linear between the measured numbers of rows, and beyond the last two."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        if not seconds or min(seconds.values()) <= 0:
            raise ValueError("costs need at least one number of rows, and positive seconds")
        self._rows = sorted(seconds)
        self._seconds = [seconds[rows] for rows in self._rows]
        self._scale = 1.0  # how much slower passes became, all alike

    def at(self, rows: int) -> float:
        """Seconds of a pass over so many rows."""
        last = len(self._rows) - 1
        i = min(max(bisect.bisect_left(self._rows, rows), 1), last) if last else 0
        if not last or rows <= self._rows[0]:
            return self._seconds[0] * self._scale
        low, high = self._rows[i - 1], self._rows[i]
        slope = (self._seconds[i] - self._seconds[i - 1]) / (high - low)
        if rows > high:
            return (self._seconds[i] + max(slope, 0.0) * (rows - high)) * self._scale
        return (self._seconds[i - 1] + slope * (rows - low)) * self._scale

    def learn(self, rows: int, seconds: float) -> None:
        """A pass took this long."""
        off = self.drift(seconds / self.at(rows))
        i = bisect.bisect_left(self._rows, rows)
        if i < len(self._rows) and self._rows[i] == rows:
            self._seconds[i] *= off**_SHAPE

    def drift(self, off: float) -> float:
        """Passes took `off` times what was expected. One that was interrupted moves no more than one twice as slow."""
        off = min(max(off, 0.5), 2.0)
        self._scale *= off**_DRIFT
        return off

    def as_dict(self) -> dict[int, float]:
        """Seconds by rows, as they stand."""
        return {rows: seconds * self._scale for rows, seconds in zip(self._rows, self._seconds, strict=True)}


def measure(
    model: LanguageModel, widths: Sequence[int], clock: Callable[[], float] = time.perf_counter
) -> dict[int, float]:
    """The least seconds of a pass by its rows, of up to three rounds behind one that is not counted."""
    spec, kv = model.spec, model.new_store()
    past = min(_PAST, spec.max_context // 2)
    widths = [rows for rows in widths if past + rows <= spec.max_context]
    tokens = tuple(i % spec.vocab_size for i in range(past + max(widths)))
    kv.reserve(0, past)
    model.forward(ForwardBatch([SeqRows(0, tokens[:past], 0)], []), kv)
    kv.commit(0, range(past))
    kv.reserve(0, max(widths))
    found: dict[int, float] = {}
    begun = clock()
    for number in range(4):
        for rows in widths if number else widths[:1]:
            batch = ForwardBatch(
                [SeqRows(0, tokens[past : past + rows], past)], range(rows), best_below=spec.vocab_size
            )
            start = clock()
            model.forward(batch, kv)
            if number:
                found[rows] = min(found.get(rows, float("inf")), clock() - start)
        if number and clock() - begun > _PATIENCE:
            break
    return found


def known_costs(
    model: LanguageModel, folder: Path, threads: int, widths: Sequence[int], progress: Progress
) -> PassCosts:
    """Measured once for a model, machine and number of threads, and kept in the model cache from then on."""
    facts = (_VERSION, str(folder), model.kernels_name, str(model.dtype), model.weight_bytes(), threads, *widths)
    machine = (platform.node(), platform.machine(), os.cpu_count())
    digest = hashlib.sha256(repr((facts, machine)).encode()).hexdigest()[:16]
    path = cache_root() / "costs" / f"{folder.name[:60]}-{digest}.json"
    found = _read(path)
    if found is None:
        what = f"what passes of {folder.name} cost (once)"
        progress(what, 0, 1)
        found = measure(model, widths)
        progress(what, 1, 1)
        _write(path, found)
    return PassCosts(found)


def _read(path: Path) -> dict[int, float] | None:
    """None for a file that is not there or holds something else: it is measured again."""
    try:
        seconds = {int(rows): float(value) for rows, value in json.loads(path.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, AttributeError):
        return None
    return seconds if seconds and min(seconds.values()) > 0 else None


def _write(path: Path, seconds: Mapping[int, float]) -> None:
    """Where the cache cannot be written, the next start measures again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(seconds), encoding="utf-8")
        part.replace(path)
    except OSError:
        return
