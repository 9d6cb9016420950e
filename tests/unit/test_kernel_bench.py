"""What `bench kernels` derives from timings, from made-up ones; and that it knows every weight format."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from outpace.config import EngineConfig
from outpace.errors import Unsupported
from outpace.kernels import native
from outpace.kernels.registry import select
from outpace.lab import weight_samples
from outpace.lab.compare import spread
from outpace.lab.kernel_bench import Setup, TorchMeter, bench_kernels, cache_bytes, measure_limits, time_rounds
from outpace.lab.kernels import Curve, Limits, conclusions
from outpace.lab.weight_samples import copies, make_weight, weight_formats
from outpace.models.decoder import Decoder
from outpace.models.native_decoder import NativeDecoder
from outpace.models.spec import DecoderSpec

NATIVE = pytest.mark.skipif(not native.available(), reason=native.missing())
GB = 1e9


def limits(**peaks: float) -> Limits:
    """20 GB/s, and peaks in G multiply-adds per second."""
    multiply = {name: spread([peak * 1e9]) for name, peak in peaks.items()}
    return Limits("avx2", 2, 2**20, *(spread([rate * GB]) for rate in (20.0, 10.0, 15.0, 8.0)), multiply, multiply)


def curve(unit: str | None = "float32", reads: tuple[float, ...] = ()) -> Curve:
    """1 GB and 1 G multiply-adds a row. The second round was twice as slow, for every number of rows alike."""
    milliseconds = {1: 60.0, 2: 66.0, 4: 78.0, 8: 120.0, 16: 240.0}
    seconds = {rows: [ms / 1e3, 2 * ms / 1e3] for rows, ms in milliseconds.items()}
    return Curve("m", "native", 10**9, 10**9, unit, seconds, reads)


def test_v_is_taken_within_rounds() -> None:
    v = curve().v(4)
    assert (v.q1, v.median, v.q3) == pytest.approx((1.3, 1.3, 1.3))
    assert curve().v(1).median == 1 and curve().time(4).median == pytest.approx(0.117)


def test_share_is_of_the_reads_of_the_same_rounds() -> None:
    assert curve(reads=(20 * GB, 10 * GB)).share(limits()).median == pytest.approx(1 / 0.06 / 20)
    # Without reads of its own: of the run's 20 GB/s, and the slow round counts against the curve.
    assert curve().share(limits()).median == pytest.approx((1 / 0.06 + 1 / 0.12) / 2 / 20)
    assert curve().rate().high == pytest.approx(GB / 0.06)


def test_a_pass_takes_no_less_than_memory_and_arithmetic_allow() -> None:
    given = limits(float32=100.0)
    assert curve().memory_seconds(given) == pytest.approx(0.05)
    assert curve(reads=(10 * GB, 10 * GB)).memory_seconds(given) == pytest.approx(0.1)
    assert [curve().least_seconds(given, rows) for rows in (1, 4, 8)] == pytest.approx([0.05, 0.05, 0.08])
    assert curve().arithmetic_seconds(given, 16) == pytest.approx(0.16)


def test_bfloat16_runs_on_its_own_unit_or_is_widened() -> None:
    assert curve("bfloat16").arithmetic_seconds(limits(float32=100.0), 1) == pytest.approx(0.01)
    assert curve("bfloat16").arithmetic_seconds(limits(float32=100.0, bfloat16=400.0), 1) == pytest.approx(0.0025)
    assert curve(None).arithmetic_seconds(limits(float32=100.0), 1) is None
    assert curve(None).least_seconds(limits(float32=100.0), 16) == pytest.approx(0.05)


def test_cheap_rows_end_at_the_first_dear_one() -> None:
    assert curve().cheap_rows() == 4
    assert curve().cheap_rows(2.0) == 8 and curve().cheap_rows(1.05) == 1
    dented = dataclasses.replace(curve(), seconds={1: [1.0], 2: [1.5], 3: [1.2]})
    assert dented.cheap_rows() == 1


def test_conclusions_say_limits_distance_and_draft() -> None:
    memory, arithmetic, crossing, draft = conclusions(curve(reads=(20 * GB, 10 * GB)), limits(float32=100.0))
    # 1 GB at the median of 20 and 10 GB/s; measured: the median of 60 and 120 ms; in both rounds 83% of what was read.
    assert memory == (
        "one pass over m reads 1 GB: at 15 GB/s no less than 66.7 ms; measured 90 ms, 83% of the read bandwidth, 83%"
        " of what a copy moves"
    )
    assert arithmetic == (
        "16 rows are 16 G multiply-adds: at 100 G/s no less than 160 ms; measured 360 ms, 44% of the peak"
    )
    assert crossing == "memory is the limit up to 6.7 rows, arithmetic beyond"
    assert draft.startswith("a draft of up to K = 3 tokens is cheap to check: v(4) = 1.30, at most 1.4;")


def test_conclusions_without_a_peak_or_a_cheap_draft() -> None:
    dear = dataclasses.replace(curve(None), seconds={1: [0.06], 2: [0.1]})
    _, arithmetic, draft = conclusions(dear, limits(float32=100.0))
    assert arithmetic == "no arithmetic limit for m: its products are not plain float32 or bfloat16"
    assert draft == "no draft is cheap here: v(2) = 1.67 is above 1.4"
    alone = dataclasses.replace(curve(), seconds={1: [0.06]})
    assert "nothing to say about drafts" in conclusions(alone, limits(float32=100.0))[-1]


def test_rounds_take_turns_and_the_first_is_dropped() -> None:
    now, order = [0.0], []

    def call(key: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            order.append(key)
            # A cold start that must not be counted.
            now[0] += seconds + (100 if len(order) <= 3 else 0)

        return run

    calls = {"a": call("a", 1), "b": call("b", 2), "c": call("c", 4)}
    assert time_rounds(calls, 2, lambda: now[0]) == {"a": [1, 1], "b": [2, 2], "c": [4, 4]}
    assert "".join(order) == "abcbcacab"
    assert all(before != after for before, after in itertools.pairwise(order))


def test_last_level_caches_are_added_up(tmp_path: Path) -> None:
    for cpu, index, level, size, shared in [
        *((0, 0, 1, "32K", "0"), (0, 3, 3, "16M", "0-1"), (1, 3, 3, "16M", "0-1")),
        *((2, 3, 3, "16M", "2-3"), (2, 2, 2, "512K", "2")),
    ]:
        folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
        folder.mkdir(parents=True)
        for name, value in (("level", level), ("size", size), ("shared_cpu_list", shared)):
            (folder / name).write_text(f"{value}\n")
    assert cache_bytes(tmp_path) == 32 * 2**20
    assert cache_bytes(tmp_path / "none") == 64 * 2**20
    assert Setup.full(3).buffer_bytes >= 8 * cache_bytes()


@NATIVE
def test_every_format_of_the_kernels_is_measured() -> None:
    """The list in the C++ header decides, so that a new format cannot be forgotten."""
    header = (Path(native.__file__).parent / "abi.h").read_text()
    (body,) = re.findall(r"enum Format \{(.*?)\}", header, re.DOTALL)
    weights = [make_weight(name, (4, 256)) for name in weight_formats()]
    found = sorted(native.describe(weight).format for weight in weights)
    assert found == sorted(int(number) for number in re.findall(r"= (\d+)", body)) and len(found) >= 9


@NATIVE
@pytest.mark.parametrize("name", [*weight_samples.DTYPES, *native.BLOCK_FORMATS])
def test_samples_are_valid(name: str) -> None:
    kernels = native.open_native(1)
    weight = make_weight(name, (128, 512))
    product = kernels.linear(torch.eye(512)[::9], weight)
    # Random bytes where a scale belongs would give huge values, infinity or none.
    assert weight.shape == (128, 512) and product.std() > 0 and product.abs().max() < 1000
    held = copies(weight, 5 * weight.nbytes - 1)
    assert len(held) == 5 and len(copies(weight, 0)) == 2
    pointers = {(w.data if isinstance(w, native.Blocks) else w).data_ptr() for w in held}
    assert len(pointers) == 5


def test_a_block_format_without_known_scales_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_samples, "SCALES", {})
    with pytest.raises(KeyError, match="Q4_K"):
        weight_samples._blocks("Q4_K", (2, 256))


@pytest.mark.parametrize("tied", [True, False])
def test_a_pass_does_not_read_an_embedding_table_of_its_own(tied: bool) -> None:
    config = {"model_type": "llama", "vocab_size": 50, "hidden_size": 32, "intermediate_size": 64}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-5}
    config |= {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64, "hidden_act": "silu"}
    spec = DecoderSpec.from_hf(config | {"tie_word_embeddings": tied})

    def weights() -> dict[str, torch.Tensor]:
        return {name: torch.ones(shape) for name, shape in spec.expected_tensors().items()}

    models = [Decoder(spec, weights(), select("cpu"))]
    if native.available():
        models += [NativeDecoder(spec, weights(), native.open_native(1))]
    for model in models:
        assert model.weight_bytes() - model.pass_bytes() == (0 if tied else 50 * 32 * 4)


def test_torch_gives_limits_too() -> None:
    threads = torch.get_num_threads()
    found = measure_limits((TorchMeter(2), TorchMeter(1)), 2, Setup.quick(2))
    assert found.kernels == "torch" and set(found.multiply) == {"float32", "bfloat16"}
    assert all(value.low > 0 for value in (found.read, found.read_one, found.copy, found.copy_one))
    assert torch.get_num_threads() == threads


def test_what_cannot_be_measured_is_refused(tiny_model: Path) -> None:
    def quiet(what: str, done: int, total: int) -> None: ...

    with pytest.raises(Unsupported, match="not 'cuda'"):
        bench_kernels(EngineConfig(str(tiny_model), device="cuda"), "none", Setup.quick(1), quiet)
    with pytest.raises(Unsupported, match="int8 weights need the native kernels"):
        bench_kernels(EngineConfig(str(tiny_model), kernels="torch"), "int8", Setup.quick(1), quiet)
