"""Measuring for `lab.kernels`: memory, arithmetic, one product in every weight format, a whole forward pass.

Numbers of rows take turns within a round, a first round is not counted, and weights come from memory: from copies that
no cache holds together. A round also times a plain read, so that like is compared with like when the machine drifts.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from outpace.config import EngineConfig
from outpace.errors import Unsupported
from outpace.kernels import native
from outpace.lab.compare import spread
from outpace.lab.kernels import ROWS, Curve, KernelReport, Limits
from outpace.lab.weight_samples import DTYPES, copies, dense, make_weight, weight_formats
from outpace.models.base import ForwardBatch, ForwardOutput, LanguageModel, SeqRows
from outpace.models.loading import Placement, physical_cores
from outpace.weights.load import load_decoder
from outpace.weights.resolve import resolve

Progress = Callable[[str, int, int], None]
Key = TypeVar("Key")
READ = 0  # among the numbers of rows: a plain read of memory
_SEQUENCE = 0
_CACHES = Path("/sys/devices/system/cpu")
_ASSUMED_CACHE = 64 * 2**20


@dataclass(frozen=True)
class Setup:
    """How to measure. `buffer_bytes` are read and copied for the bandwidth, `read_bytes` of them in every round; a
    product goes round copies of its matrix of `stream_bytes` together; `tasks` is the length of the arithmetic loop; a
    pass sees `past` committed rows."""

    rounds: int
    buffer_bytes: int
    read_bytes: int
    stream_bytes: int
    rows: Sequence[int] = ROWS
    shape: tuple[int, int] = (8960, 1536)
    tasks: int = 64
    past: int = 100

    @classmethod
    def full(cls, rounds: int) -> Setup:
        """Sizes that leave the caches no part in the result."""
        cache = cache_bytes()
        return cls(rounds, max(512 * 2**20, 8 * cache), max(256 * 2**20, 4 * cache), max(256 * 2**20, 4 * cache))

    @classmethod
    def quick(cls, rounds: int) -> Setup:
        """Sizes that only show that everything runs."""
        return cls(rounds, 2**20, 2**20, 0, shape=(96, 256), tasks=2, past=8)


class Meter(Protocol):
    """What measures the limits: `kernels.native.Native`, or torch."""

    @property
    def isa(self) -> str:
        """Name of the arithmetic."""
        ...

    def measure_read(self, data: Tensor) -> object: ...

    def measure_copy(self, to: Tensor, data: Tensor) -> None: ...

    def measure_multiply(self, dtype: torch.dtype, tasks: int) -> int:
        """How many multiply-adds it did; 0 without a unit for this dtype."""
        ...


class TorchMeter:
    """The limits as far as stock torch reaches them: multiplying is its own square matmul, not a loop on registers."""

    isa = "torch"
    side = 1024

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def measure_read(self, data: Tensor) -> object:
        """Sum the data."""
        with torch_threads(self._threads):
            return data.sum()

    def measure_copy(self, to: Tensor, data: Tensor) -> None:
        """Copy to a tensor of the same size."""
        with torch_threads(self._threads):
            to.copy_(data)

    def measure_multiply(self, dtype: torch.dtype, tasks: int) -> int:
        """One product, of 16 rows a task up to a square."""
        rows = min(self.side, 16 * tasks)
        with torch_threads(self._threads):
            torch.mm(torch.ones(rows, self.side, dtype=dtype), torch.ones(self.side, self.side, dtype=dtype))
        return rows * self.side**2


@dataclass(frozen=True)
class Reader:
    """The plain read of a round."""

    meter: Meter
    data: Tensor

    def read(self) -> None:
        """Read it all."""
        self.meter.measure_read(self.data)


def bench_kernels(config: EngineConfig, quantization: str, setup: Setup, progress: Progress) -> KernelReport:
    """Measure everything on the kernels that the settings choose. Raises what loading the model raises, and Unsupported
    for another device than the CPU and for a quantization without native kernels."""
    own = config.kernels != "torch" and native.available()
    if torch.device(config.device).type != "cpu":
        raise Unsupported(f"bench kernels measures the CPU, not {config.device!r}. Leave --device out.")
    if quantization != "none" and not own:
        raise Unsupported(f"{quantization} weights need the native kernels, which are not in use. Leave it out.")
    threads = config.threads or physical_cores()
    place = Placement(config.device, config.threads, config.kernels, quantization)
    model = load_decoder(resolve(config.model, config.dtype, progress), config.dtype, place)
    mine: tuple[Meter, Meter] = TorchMeter(threads), TorchMeter(1)
    if own:
        mine = native.open_native(threads), native.open_native(1)
    with torch_threads(1):  # else torch's threads would spin beside the pool's
        progress("memory and arithmetic", 0, 1)
        limits = measure_limits(mine, threads, setup)
        progress("memory and arithmetic", 1, 1)
        reader = Reader(mine[0], torch.ones(setup.read_bytes // 4))
        products = list(_products(native.open_native(threads) if own else None, threads, setup, reader, progress))
        what = f"passes of {config.model}"
        progress(what, 0, 1)
        plain = quantization == "none" and config.dtype != "native"
        unit = str(model.dtype).removeprefix("torch.") if plain else None
        with torch_threads(1 if model.bit_invariant else threads):
            whole = measure_pass(model, config.model, unit, reader, setup)
        progress(what, 1, 1)
    return KernelReport(limits, setup.shape, products, whole)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Another number of torch's own threads, for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cache_bytes(root: Path = _CACHES) -> int:
    """All last-level caches of the machine together; a guess where the system does not tell."""
    found: dict[tuple[int, str], int] = {}
    units = {"K": 2**10, "M": 2**20}
    for folder in root.glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            level, size, shared = ((folder / name).read_text().strip() for name in ("level", "size", "shared_cpu_list"))
            found[int(level), shared] = int(size.rstrip("KM")) * units.get(size[-1:], 1)
        except (OSError, ValueError):
            continue
    last = max((level for level, _ in found), default=0)
    return sum(size for (level, _), size in found.items() if level == last) or _ASSUMED_CACHE


def time_rounds(
    calls: Mapping[Key, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[Key, list[float]]:
    """Seconds of every call in every round. One round more comes first and is dropped; each begins one call later than
    the one before, so that no call has a place of its own, nor follows itself and finds its data in a cache."""
    seconds: dict[Key, list[float]] = {key: [] for key in calls}
    keys = list(calls)
    for number in range(rounds + 1):
        first = number % len(keys)
        for key in keys[first:] + keys[:first]:
            start = clock()
            calls[key]()
            if number:
                seconds[key].append(clock() - start)
    return seconds


def measure_limits(meters: tuple[Meter, Meter], threads: int, setup: Setup) -> Limits:
    """Bandwidths and peaks with all threads (the first meter) and with one (the second), in turns."""
    data = torch.ones(setup.buffer_bytes // 4)
    to = torch.ones_like(data)
    work: dict[tuple[str, int], tuple[int, Callable[[], object]]] = {}
    for number, meter in enumerate(meters):
        work["read", number] = data.nbytes, partial(meter.measure_read, data)
        work["copy", number] = 2 * data.nbytes, partial(meter.measure_copy, to, data)
        for name, dtype in DTYPES.items():
            done = meter.measure_multiply(dtype, setup.tasks)
            if done:
                work[name, number] = done, partial(meter.measure_multiply, dtype, setup.tasks)
    seconds = time_rounds({key: call for key, (_, call) in work.items()}, setup.rounds)
    rates = {key: spread([units / s for s in seconds[key]]) for key, (units, _) in work.items()}
    peaks = [{name: rates[name, number] for name in DTYPES if (name, number) in rates} for number in (0, 1)]
    return Limits(
        kernels=meters[0].isa,
        threads=threads,
        buffer_bytes=data.nbytes,
        read=rates["read", 0],
        read_one=rates["read", 1],
        copy=rates["copy", 0],
        copy_one=rates["copy", 1],
        multiply=peaks[0],
        multiply_one=peaks[1],
    )


def measure_product(kernels: native.Native, name: str, setup: Setup, reader: Reader) -> Curve:
    """The native product with weights in this format."""
    weights = itertools.cycle(copies(make_weight(name, setup.shape), setup.stream_bytes))
    inputs = {rows: torch.randn(rows, setup.shape[1]) for rows in setup.rows}
    calls = {rows: lambda x=x: kernels.linear(x, next(weights)) for rows, x in inputs.items()}
    held = next(weights)
    outputs, columns = held.shape
    empty = Curve(name, kernels.isa, held.nbytes, outputs * columns, name if name in DTYPES else None, {})
    return _measured(empty, calls, setup.rounds, reader)


@torch.inference_mode()
def measure_torch_product(name: str, threads: int, setup: Setup) -> Curve:
    """torch's linear with weights and inputs of this dtype. No read in between: torch's threads would disturb it."""
    first = dense(setup.shape, DTYPES[name])
    held = [weight for weight in copies(first, setup.stream_bytes) if not isinstance(weight, native.Blocks)]
    weights = itertools.cycle(held)
    inputs = {rows: torch.randn(rows, setup.shape[1]).to(first.dtype) for rows in setup.rows}
    calls = {rows: lambda x=x: torch.nn.functional.linear(x, next(weights)) for rows, x in inputs.items()}
    with torch_threads(threads):
        return _measured(Curve(name, "torch", first.nbytes, first.numel(), name, {}), calls, setup.rounds, None)


class Passes:
    """Forward passes of a model over up to `most` new rows, behind `past` committed ones that stay as they are."""

    def __init__(self, model: LanguageModel, past: int, most: int) -> None:
        self._model, self._past, self._kv = model, past, model.new_store()
        if past:
            self._kv.reserve(_SEQUENCE, past)
            self._run(_rows(past, 0, model.spec.vocab_size), [past - 1])()
            self._kv.commit(_SEQUENCE, range(past))
        self._kv.reserve(_SEQUENCE, most)

    def check(self, rows: int) -> Callable[[], ForwardOutput]:
        """A pass over arbitrary tokens with the logits of each, as a draft is checked; its batch is made beforehand."""
        return self._run(_rows(rows, self._past, self._model.spec.vocab_size), range(rows))

    def read(self, tokens: Sequence[int]) -> Callable[[], ForwardOutput]:
        """A pass over these tokens with the logits of the last, as a prompt is read."""
        return self._run(SeqRows(_SEQUENCE, tuple(tokens), self._past), [len(tokens) - 1])

    def _run(self, rows: SeqRows, wanted: Sequence[int]) -> Callable[[], ForwardOutput]:
        return partial(self._model.forward, ForwardBatch([rows], wanted), self._kv)


def measure_pass(model: LanguageModel, name: str, unit: str | None, reader: Reader, setup: Setup) -> Curve:
    """A whole forward pass behind committed rows, with logits for every row. Widths that the model's context cannot
    hold are left out."""
    spec = model.spec
    past = min(setup.past, spec.max_context // 2)
    widths = [rows for rows in setup.rows if past + rows <= spec.max_context]
    passes = Passes(model, past, max(widths))
    calls = {rows: passes.check(rows) for rows in widths}
    multiply_adds = spec.parameters() - (0 if spec.tied else spec.vocab_size * spec.hidden)
    empty = Curve(name, model.kernels_name, model.pass_bytes(), multiply_adds, unit, {})
    return _measured(empty, calls, setup.rounds, reader)


def _products(
    kernels: native.Native | None, threads: int, setup: Setup, reader: Reader, progress: Progress
) -> Iterator[Curve]:
    """Every format on the native kernels, if there are any, each behind torch's own for comparison."""
    names = weight_formats() if kernels else list(DTYPES)
    what = f"products of {setup.shape[0]} x {setup.shape[1]}"
    for done, name in enumerate(names):
        progress(what, done, len(names))
        if kernels:
            yield measure_product(kernels, name, setup, reader)
        if name in DTYPES:
            yield measure_torch_product(name, threads, setup)
    progress(what, len(names), len(names))


def _measured(empty: Curve, calls: Mapping[int, Callable[[], object]], rounds: int, reader: Reader | None) -> Curve:
    timed = {READ: reader.read, **calls} if reader else calls
    seconds = time_rounds(timed, rounds)
    reads = seconds.pop(READ) if reader else []
    rates = [reader.data.nbytes / s for s in reads] if reader else []
    return dataclasses.replace(empty, seconds=seconds, read_rates=rates)


def _rows(count: int, first: int, vocabulary: int) -> SeqRows:
    """Arbitrary tokens, no two alike where the vocabulary allows it."""
    return SeqRows(_SEQUENCE, tuple((first + i) % vocabulary for i in range(count)), first)
