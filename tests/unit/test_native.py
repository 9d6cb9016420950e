"""Native kernels: right, and bit for bit the same whatever shares the call."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from outpace.cache.base import KVStore
from outpace.errors import Unsupported
from outpace.kernels import native
from outpace.lab.weight_samples import SCALES
from outpace.models.base import ForwardBatch, LanguageModel, SeqRows, first_largest
from outpace.models.native_decoder import NativeDecoder
from outpace.models.spec import DecoderSpec

pytestmark = pytest.mark.skipif(not native.available(), reason=native.missing())
ISAS = pytest.mark.parametrize("isa", native.isas())
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SPEC = DecoderSpec.from_hf(
    {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 103,
        "hidden_size": 72,
        "intermediate_size": 136,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 20,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@ISAS
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(1, 70), inputs=st.integers(1, 200), outputs=st.integers(1, 90), data=st.data())
def test_a_row_alone_and_in_company_has_the_same_bits(
    isa: str, dtype: str, rows: int, inputs: int, outputs: int, data: st.DataObject
) -> None:
    x, weight = noise(rows, inputs), noise(outputs, inputs, seed=1).to(DTYPES[dtype])
    bias = noise(outputs, seed=2) if data.draw(st.booleans()) else None
    whole = native.open_native(2, isa).linear(x, weight, bias)
    first = data.draw(st.integers(0, rows - 1))
    last = data.draw(st.integers(first + 1, rows))
    threads = data.draw(st.sampled_from([1, 2, 5]))
    assert torch.equal(native.open_native(threads, isa).linear(x[first:last], weight, bias), whole[first:last])
    exact = x.to(DTYPES[dtype]).double() @ weight.double().T + (0 if bias is None else bias.double())
    assert (whole - exact).abs().max() <= 1e-5 * inputs**0.5 * 10


def test_planted_stock_matmul_is_caught() -> None:
    """The same question to torch: a row's bits depend on the number of rows, or the test above proves nothing."""
    x, weight = noise(64, 1536), noise(512, 1536, seed=1)
    whole = torch.nn.functional.linear(x, weight)
    assert any(not torch.equal(torch.nn.functional.linear(x[:n], weight), whole[:n]) for n in (1, 2, 3, 5, 8))


@ISAS
def test_a_pool_survives_thousands_of_small_lists(isa: str) -> None:
    """Lists of a few tasks in a row are what a narrow pass is made of; more threads than cores, on purpose."""
    kernels = native.open_native(8, isa)
    x, weight = noise(1, 8), noise(200, 8, seed=1)
    expected = kernels.linear(x, weight)
    assert all(torch.equal(kernels.linear(x, weight), expected) for _ in range(3000))


def test_unknown_instruction_sets_are_refused() -> None:
    with pytest.raises(Unsupported, match="cannot run the sve kernels"):
        native.open_native(1, "sve")


def weights(spec: DecoderSpec, dtype: torch.dtype) -> dict[str, Tensor]:
    shapes = spec.expected_tensors().items()
    return {name: (noise(*shape, seed=i) * 0.3).to(dtype) for i, (name, shape) in enumerate(shapes)}


def decoder(isa: str, dtype: str, threads: int = 2, window: int | None = None) -> LanguageModel:
    spec = dataclasses.replace(SPEC, windows=(window,) * SPEC.layers)
    return NativeDecoder(spec, weights(spec, DTYPES[dtype]), native.open_native(threads, isa))


def run(model: LanguageModel, kv: KVStore, rows: SeqRows) -> Tensor:
    assert kv.reserve(rows.seq, len(rows.tokens))
    return model.forward(ForwardBatch([rows], range(len(rows.tokens))), kv).logits


def text(model: LanguageModel, tokens: tuple[int, ...], cuts: list[int]) -> Tensor:
    kv, done, found = model.new_store(), 0, []
    for size in cuts:
        found.append(run(model, kv, SeqRows(0, tokens[done : done + size], done)))
        kv.commit(0, range(size))
        done += size
    return torch.cat(found)


TOKENS = tuple(int(t) for t in torch.randint(0, SPEC.vocab_size, (90,), generator=torch.Generator().manual_seed(3)))


@ISAS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 11])
def test_logits_have_the_same_bits_however_the_text_is_cut(isa: str, dtype: str, window: int | None) -> None:
    whole = text(decoder(isa, dtype, window=window), TOKENS, [90])
    for cuts, threads in (([1] * 90, 1), ([40, 1, 5, 17, 1, 26], 3), ([7] * 12 + [6], 2)):
        assert torch.equal(text(decoder(isa, dtype, threads, window), TOKENS, cuts), whole)


@ISAS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 4])
def test_a_node_of_a_tree_has_the_bits_of_its_path(isa: str, dtype: str, window: int | None) -> None:
    model, kv = decoder(isa, dtype, window=window), decoder(isa, dtype, window=window).new_store()
    run(model, kv, SeqRows(0, TOKENS[:20], 0))
    kv.commit(0, range(20))
    parents = (-1, 0, 0, 1, 1, 2, 3, 6, 7)
    tree = run(model, kv, SeqRows(0, TOKENS[30:39], 20, parents))
    for node in range(9):
        path, at = [], node
        while at >= 0:
            path.insert(0, at)
            at = parents[at]
        tokens = (*TOKENS[:20], *(TOKENS[30 + i] for i in path))
        assert torch.equal(text(model, tokens, [20, len(path)])[-1], tree[node]), path
    kv.commit(0, [0, 1, 3, 6])
    after = run(model, kv, SeqRows(0, (5,), 24))
    told = (*TOKENS[:20], TOKENS[30], TOKENS[31], TOKENS[33], TOKENS[36], 5)
    assert torch.equal(text(model, told, [25])[-1:], after)


@ISAS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_best_id_of_a_row_is_the_first_of_its_largest_logits(isa: str, dtype: str, threads: int) -> None:
    """Equal rows of the output matrix give equal logits in several tasks; NaN, and a row of nothing else."""
    spec = dataclasses.replace(SPEC, vocab_size=4103)
    held = weights(spec, DTYPES[dtype])
    held["embed"][2000:4000] = held["embed"][:2000].clone()
    held["embed"][7] = held["embed"][2500] = float("nan")
    model, kv = NativeDecoder(spec, held, native.open_native(threads, isa)), decoder(isa, dtype).new_store()
    tokens = (*TOKENS[:60], 7)
    assert kv.reserve(0, 61)
    for below in (1, 40, 2001, 3999, 4103):
        batch = ForwardBatch([SeqRows(0, tokens, 0)], [*range(60, 0, -1)])
        logits = model.forward(batch, kv).logits
        out = model.forward(dataclasses.replace(batch, best_below=below), kv)
        assert out.best is not None and not len(out.logits)
        assert torch.equal(out.best, first_largest(logits[:, :below]))
        assert logits[0].isnan().all() and out.best[0] == 0
    assert len(set(out.best.tolist())) > 5
    with pytest.raises(ValueError, match=r"more than there are \(4103\)"):
        model.forward(dataclasses.replace(batch, best_below=4104), kv)


def test_what_would_read_or_write_elsewhere_is_refused() -> None:
    model = decoder(native.isas()[0], "float32")
    kv = model.new_store()
    assert kv.reserve(0, 3)
    for tokens, first, wanted in (
        ((1, 2, 3, 4), 0, [0]),
        ((1,), 3, [0]),
        ((103,), 0, [0]),
        ((-1,), 0, [0]),
        ((1,), 0, [1]),
    ):
        with pytest.raises(ValueError, match=r"not reserved|must lie in"):
            model.forward(ForwardBatch([SeqRows(0, tokens, first)], wanted), kv)
    with pytest.raises(ValueError, match="at least one row"):
        model.forward(ForwardBatch([], []), kv)


def test_positions_beyond_the_first_table() -> None:
    model = decoder(native.isas()[0], "float32")
    tokens = TOKENS * 15
    assert torch.equal(text(model, tokens, [600, 750])[-1], text(model, tokens, [1350])[-1])


# ---- block formats ----

KINDS = pytest.mark.parametrize("kind", native.BLOCK_FORMATS)


def random_blocks(kind: str, rows: int, cols: int) -> native.Blocks:
    """Random bytes are valid blocks, if the half-precision scales in them are finite."""
    per_block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    source = np.random.default_rng(5)
    raw = source.integers(0, 256, (rows, cols // per_block, size), dtype=np.uint8)
    for at in SCALES[kind]:
        scales = source.normal(0, 0.01, raw.shape[:2]).astype(np.float16)
        scales[0, 0] = 6e-8  # the smallest subnormal number
        raw[..., at : at + 2] = scales.view(np.uint8).reshape(*raw.shape[:2], 2)
    return native.Blocks(torch.from_numpy(raw.reshape(rows, -1)), kind, cols)


@ISAS
@KINDS
def test_block_formats_are_those_of_gguf_to_the_bit(isa: str, kind: str) -> None:
    """The identity matrix reads the weights back: each must be what the gguf package makes of the block."""
    blocks = random_blocks(kind, 35, 512)
    expected = gguf.quants.dequantize(blocks.data.numpy(), gguf.GGMLQuantizationType[kind]).reshape(35, 512)
    read = native.open_native(2, isa).linear(torch.eye(512), blocks).T.contiguous()
    assert torch.equal(read, torch.from_numpy(expected))


def rounding(x: Tensor, values: Tensor) -> Tensor:
    """What a product [T, outputs] may be wrong by: 2^-15 of each group's largest activation, and float32's part."""
    group = 32 if x.shape[1] % 256 else 256
    largest = x.abs().double().unflatten(1, (-1, group)).amax(2)
    weight = values.abs().double().unflatten(1, (-1, group)).sum(2)
    return 2**-15 * largest @ weight.T + 1e-6 * x.abs().double().sum(1, keepdim=True) * values.abs().max()


@ISAS
@KINDS
@pytest.mark.parametrize("cols", [768, 416])
def test_block_products_are_right_and_row_invariant(isa: str, kind: str, cols: int) -> None:
    """416 columns leave the last eight blocks incomplete."""
    if cols % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]:
        cols = 512
    blocks, x = random_blocks(kind, 35, cols), noise(23, cols)
    x[1, 64:96], x[2, 5], x[3] = 0, 3e4, x[3] * 1e-30
    values = gguf.quants.dequantize(blocks.data.numpy(), gguf.GGMLQuantizationType[kind]).reshape(35, cols)
    exact = x.double() @ torch.from_numpy(values).double().T
    whole = native.open_native(2, isa).linear(x, blocks)
    assert ((whole - exact).abs() <= rounding(x, torch.from_numpy(values))).all()
    for first, last in ((0, 1), (3, 5), (7, 12), (1, 23)):
        assert torch.equal(native.open_native(1, isa).linear(x[first:last], blocks), whole[first:last])


@ISAS
@KINDS
def test_activations_lose_less_than_bfloat16_would_take(isa: str, kind: str) -> None:
    """Normal ones, and with one column in 256 a hundred times larger: these share a scale with 255 others."""
    blocks, x = random_blocks(kind, 64, 1536), noise(8, 1536)
    outliers = x.clone()
    outliers[:, 100::256] *= 100
    values = gguf.quants.dequantize(blocks.data.numpy(), gguf.GGMLQuantizationType[kind]).reshape(64, 1536)
    weight = torch.from_numpy(values).double()
    for inputs, limit in ((x, 1e-4), (outliers, 4e-4)):
        exact = inputs.double() @ weight.T
        error = (native.open_native(1, isa).linear(inputs, blocks) - exact).norm()
        assert error <= limit * exact.norm()
        assert error <= 0.3 * (inputs.bfloat16().double() @ weight.T - exact).norm()


@ISAS
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_the_largest_integers_do_not_overflow(isa: str, kind: str, sign: int) -> None:
    """Weights and activations at their extremes: sums of integers must still fit in 32 bits."""
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    raw = np.full((3, 2, size), 0x00 if kind == "Q6_K" else 0xFF, dtype=np.uint8)
    if kind == "Q6_K":
        raw[..., 192:208] = 0x80  # scales of -128, and weights of -32
    for at in SCALES[kind]:
        raw[..., at : at + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    blocks = native.Blocks(torch.from_numpy(raw.reshape(3, -1)), kind, 512)
    values = gguf.quants.dequantize(blocks.data.numpy(), gguf.GGMLQuantizationType[kind]).reshape(3, 512)
    x = torch.full((7, 512), sign * 1.9999999)
    exact = x.double() @ torch.from_numpy(values).double().T
    assert ((native.open_native(1, isa).linear(x, blocks) - exact).abs() <= 1e-4 * exact.abs()).all()


@ISAS
@KINDS
def test_what_is_not_finite_shows(isa: str, kind: str) -> None:
    """An overflow in one row must not hide behind integers, nor reach the next row."""
    x = torch.ones(3, 512)
    x[1, 7] = float("inf")
    found = native.open_native(1, isa).linear(x, random_blocks(kind, 5, 512)).isnan()
    assert found[1].all() and not found[[0, 2]].any()


# ---- integers, for drafters ----

INTEGERS = pytest.mark.parametrize("kind", native.QUANTISED)


@ISAS
@INTEGERS
def test_quantised_weights_are_those_of_gguf(isa: str, kind: str) -> None:
    weight = noise(35, 320)
    weight[3] = 0
    weight[4, :32] *= 1e-5  # scales among the subnormal half numbers
    weight[5, 40] = 1e4
    made = native.QUANTISED[kind]
    blocks = native.open_native(2, isa).quantise(weight, kind)
    expected = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[made])
    assert blocks.kind == made and blocks.shape == (35, 320)
    assert torch.equal(blocks.data, torch.from_numpy(expected))


@ISAS
@INTEGERS
def test_bfloat16_weights_round_like_their_float32_values(isa: str, kind: str) -> None:
    weight, kernels = noise(9, 128).bfloat16(), native.open_native(2, isa)
    assert torch.equal(kernels.quantise(weight, kind).data, kernels.quantise(weight.float(), kind).data)


def test_columns_that_fill_no_group_are_refused() -> None:
    with pytest.raises(ValueError, match="50 columns"):
        native.open_native(1).quantise(noise(4, 50), "int8")


@INTEGERS
def test_a_quantised_model_is_close_to_its_original(kind: str) -> None:
    spec = dataclasses.replace(SPEC, hidden=64, ffn=128, head_dim=32, heads=4)
    made = weights(spec, torch.bfloat16)
    models = [NativeDecoder(spec, dict(made), native.open_native(2), quantise) for quantise in (None, kind)]
    pair = [text(model, TOKENS, [90]) for model in models]
    assert not torch.equal(*pair)
    assert (pair[0] - pair[1]).norm() < {"int8": 0.1, "int4": 0.8}[kind] * pair[0].norm()


def test_calls_from_several_threads_take_turns() -> None:
    """Two engines of one process share the pool and its buffers."""
    model = decoder(native.isas()[0], "bfloat16")
    expected = text(model, TOKENS, [30, 30, 30])
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda cuts: text(model, TOKENS, cuts), [[30, 30, 30], [7] * 12 + [6], [1] * 90] * 8))
    assert all(torch.equal(logits, expected) for logits in found)
