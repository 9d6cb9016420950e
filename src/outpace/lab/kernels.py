"""What a machine gives at most, what a pass costs by its rows, and how far the one is from the other.

v(rows) is the cost of a pass over `rows` rows relative to one row. A pass reads its weights once and multiplies each
with every row, so it cannot take less than bytes / read bandwidth, nor less than rows x multiply-adds / peak.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outpace.lab.compare import Spread, spread

ROWS = (1, 2, 3, 4, 5, 6, 8, 16, 32)
# A draft is cheap to check while checking it costs less than this many plain passes.
CHEAP = 1.4


@dataclass(frozen=True)
class Limits:
    """What the machine gave, with all threads and with one. read, copy: bytes per second (a copy counts the bytes read
    and those written); multiply: multiply-adds per second by the dtype of the factors, only dtypes with a unit."""

    kernels: str
    threads: int
    buffer_bytes: int
    read: Spread
    read_one: Spread
    copy: Spread
    copy_one: Spread
    multiply: Mapping[str, Spread]
    multiply_one: Mapping[str, Spread]

    def peak(self, unit: str | None) -> float | None:
        """Multiply-adds per second of the unit a product in this dtype runs on, None where none was measured: those of
        the best round, for only a lost core can slow registers. bfloat16 without a unit is widened to float32."""
        if unit == "bfloat16" and unit not in self.multiply:
            unit = "float32"
        found = self.multiply.get(unit) if unit else None
        return found.high if found else None


@dataclass(frozen=True)
class Curve:
    """What one kind of pass cost. `weight_bytes` are read by a pass, `multiply_adds` done per row; `unit` is the dtype
    of its products (None: integers, or blocks that are widened on the way). seconds[rows][i] and read_rates[i] (bytes
    per second) belong to one round i; no read_rates where none were taken in between."""

    name: str
    kernels: str
    weight_bytes: int
    multiply_adds: int
    unit: str | None
    seconds: Mapping[int, Sequence[float]]
    read_rates: Sequence[float] = ()

    @property
    def rows(self) -> list[int]:
        """The measured numbers of rows, ascending."""
        return sorted(self.seconds)

    def time(self, rows: int) -> Spread:
        """Seconds of a pass."""
        return spread(self.seconds[rows])

    def v(self, rows: int) -> Spread:
        """Cost relative to one row, taken within each round, so that drift of the machine falls on both alike."""
        return spread([many / one for many, one in zip(self.seconds[rows], self.seconds[1], strict=True)])

    def rate(self) -> Spread:
        """Bytes of weights per second at one row."""
        return spread([self.weight_bytes / seconds for seconds in self.seconds[1]])

    def share(self, limits: Limits) -> Spread:
        """`rate` over the read bandwidth of the same round, or of the whole run where rounds took none."""
        read = self.read_rates or [limits.read.median] * len(self.seconds[1])
        return spread([self.weight_bytes / t / r for t, r in zip(self.seconds[1], read, strict=True)])

    def memory_seconds(self, limits: Limits) -> float:
        """The least that reading the weights takes."""
        return self.weight_bytes / (statistics.median(self.read_rates) if self.read_rates else limits.read.median)

    def arithmetic_seconds(self, limits: Limits, rows: int) -> float | None:
        """The least that multiplying takes, None without a peak for its unit."""
        peak = limits.peak(self.unit)
        return None if peak is None else rows * self.multiply_adds / peak

    def least_seconds(self, limits: Limits, rows: int) -> float:
        """The least that a pass can take: the larger of the two."""
        return max(self.memory_seconds(limits), self.arithmetic_seconds(limits, rows) or 0.0)

    def cheap_rows(self, limit: float = CHEAP) -> int:
        """The most rows up to which every measured v stays at or below the limit; at least 1."""
        cheap = 1
        for rows in self.rows:
            if self.v(rows).median > limit:
                break
            cheap = rows
        return cheap

    def as_dict(self, limits: Limits) -> dict[str, Any]:
        """The JSON form: every round, and what is derived from them."""
        return {
            "name": self.name,
            "kernels": self.kernels,
            "weight_bytes": self.weight_bytes,
            "multiply_adds_per_row": self.multiply_adds,
            "unit": self.unit,
            "bytes_per_second": dataclasses.asdict(self.rate()),
            "share_of_read_bandwidth": dataclasses.asdict(self.share(limits)),
            "rows": {rows: self._row_dict(limits, rows) for rows in self.rows},
            "read_bytes_per_second": list(self.read_rates),
        }

    def _row_dict(self, limits: Limits, rows: int) -> dict[str, Any]:
        derived = {"seconds": dataclasses.asdict(self.time(rows)), "v": dataclasses.asdict(self.v(rows))}
        return {**derived, "least_seconds": self.least_seconds(limits, rows), "rounds": list(self.seconds[rows])}


@dataclass(frozen=True)
class KernelReport:
    """Limits, one product of `shape` = (outputs, inputs) in every weight format, and a whole forward pass."""

    limits: Limits
    shape: tuple[int, int]
    products: Sequence[Curve]
    whole: Curve

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "limits": dataclasses.asdict(self.limits),
            "shape": list(self.shape),
            "products": [curve.as_dict(self.limits) for curve in self.products],
            "pass": self.whole.as_dict(self.limits),
            "conclusions": conclusions(self.whole, self.limits),
        }


def conclusions(curve: Curve, limits: Limits) -> list[str]:
    """Sentences: the limits of this pass, how near it comes to them, and what a draft may cost."""
    return [_memory_line(curve, limits), *_arithmetic_lines(curve, limits), _draft_line(curve)]


def _memory_line(curve: Curve, limits: Limits) -> str:
    least = curve.memory_seconds(limits)
    return (
        f"one pass over {curve.name} reads {curve.weight_bytes / 1e9:.3g} GB: at {curve.weight_bytes / least / 1e9:.3g}"
        f" GB/s no less than {_ms(least)}; measured {_ms(curve.time(1).median)}, {curve.share(limits).median:.0%} of"
        f" the read bandwidth, {curve.rate().median / limits.copy.median:.0%} of what a copy moves"
    )


def _arithmetic_lines(curve: Curve, limits: Limits) -> list[str]:
    widest = curve.rows[-1]
    least, peak = curve.arithmetic_seconds(limits, widest), limits.peak(curve.unit)
    if least is None or peak is None:
        return [f"no arithmetic limit for {curve.name}: its products are not plain float32 or bfloat16"]
    share = least / curve.time(widest).median
    work = widest * curve.multiply_adds / 1e9
    crossing = curve.memory_seconds(limits) / (curve.multiply_adds / peak)
    return [
        f"{widest} rows are {work:.3g} G multiply-adds: at {peak / 1e9:.3g} G/s no less than {_ms(least)}; measured"
        f" {_ms(curve.time(widest).median)}, {share:.0%} of the peak",
        f"memory is the limit up to {crossing:.1f} rows, arithmetic beyond",
    ]


def _draft_line(curve: Curve) -> str:
    rows = curve.cheap_rows()
    if rows == 1:
        first = next((rows for rows in curve.rows if rows > 1), None)
        if first is None:
            return "only one row was measured: nothing to say about drafts"
        return f"no draft is cheap here: v({first}) = {curve.v(first).median:.2f} is above {CHEAP}"
    return (
        f"a draft of up to K = {rows - 1} tokens is cheap to check: v({rows}) = {curve.v(rows).median:.2f}, at most"
        f" {CHEAP}; it pays when a step brings more tokens than that plus the drafter's own time in passes"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
