"""Which keys a row sees, rotary tables, and the decoder's own rules."""

from __future__ import annotations

import pytest
import torch

from outpace.errors import Unsupported
from outpace.kernels import KERNELS, select
from outpace.kernels.reference import FOLDED_ROWS
from outpace.models.base import ForwardBatch, SeqRows
from outpace.models.decoder import Decoder
from outpace.models.layers import RopeTable, inverse_frequencies, visible_rows
from outpace.models.spec import DecoderSpec, RopeSpec

CPU = torch.device("cpu")
CONFIG = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def random_weights(spec: DecoderSpec, seed: int = 0) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=noise) for name, shape in spec.expected_tensors().items()}


def sees_by_definition(rows: SeqRows, window: int | None) -> list[set[int]]:
    """The key rows each row sees, from the contract's words, one row at a time."""
    parents = rows.parents if rows.parents is not None else tuple(range(-1, len(rows.tokens) - 1))
    depths, seen = rows.depths(), []
    for i in range(len(rows.tokens)):
        line, node = {i}, i
        while parents[node] >= 0:
            node = parents[node]
            line.add(node)
        position = {k: k for k in range(rows.kv_first)} | {rows.kv_first + j: rows.kv_first + depths[j] for j in line}
        here = rows.kv_first + depths[i]
        seen.append({k for k, at in position.items() if window is None or here - at < window})
    return seen


@pytest.mark.parametrize("window", [None, 1, 3, 6, 50])
@pytest.mark.parametrize("kv_first", [0, 2, 9])
@pytest.mark.parametrize("parents", [None, (-1,), (-1, -1, 0, 1, 1, 4, 5), (-1, 0, 1, 2, 2, 4, 4)])
def test_visible_rows(parents: tuple[int, ...] | None, kv_first: int, window: int | None) -> None:
    rows = SeqRows(0, tuple(range(len(parents) if parents else 7)), kv_first, parents)
    first, visible = visible_rows(rows, window, CPU)
    stop = kv_first + len(rows.tokens)
    if visible is None:
        visible = torch.ones(len(rows.tokens), stop - first, dtype=torch.bool)
    got = [{first + int(k) for k in row.nonzero()} for row in visible]
    assert got == sees_by_definition(rows, window)


def test_rope_table_grows_and_keeps_its_rows() -> None:
    table = RopeTable(RopeSpec(1e4), 8, torch.float32, CPU)
    near = torch.tensor([0, 5, 1023])
    before = table.rows(near, 1023)
    cos, sin = table.rows(torch.tensor([5000]), 5000)
    assert all(torch.equal(a, b) for a, b in zip(before, table.rows(near, 1023), strict=True))
    angle = torch.tensor(5000.0) * inverse_frequencies(RopeSpec(1e4), 8)
    assert torch.equal(cos[0, 0], angle.cos().repeat(2))
    assert torch.equal(sin[0, 0], torch.cat((-angle.sin(), angle.sin())))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("t", [1, 5, FOLDED_ROWS, FOLDED_ROWS + 1])
def test_attention_is_softmax_attention(name: str, t: int) -> None:
    """Both paths against the textbook, in float64, head by head."""
    kernels = KERNELS[name]()
    noise = torch.Generator().manual_seed(t)
    q = torch.randn(t, 6, 8, generator=noise)
    keys, values = torch.randn(2, 3, 90, 8, generator=noise)
    visible = torch.rand(t, 90, generator=noise) < 0.7
    visible[:, 0] = True
    got = kernels.attention(q, keys, values, kernels.mask(visible, 2, torch.float32), 0.3).view(t, 6, 8)
    for head in range(6):
        scores = (q[:, head].double() @ keys[head // 2].double().T * 0.3).masked_fill(~visible, float("-inf"))
        expected = scores.softmax(-1) @ values[head // 2].double()
        assert torch.allclose(got[:, head].double(), expected, atol=1e-5)
    unmasked = kernels.attention(q, keys, values, None, 0.3)
    assert not torch.allclose(unmasked, got.reshape(t, -1), atol=1e-2)


def test_weights_are_taken_over_and_counted() -> None:
    spec = DecoderSpec.from_hf(CONFIG)
    weights = random_weights(spec)
    decoder = Decoder(spec, weights, select("cpu"))
    assert weights == {}
    assert decoder.weight_bytes() == 4 * spec.parameters()
    tied = DecoderSpec.from_hf(CONFIG | {"tie_word_embeddings": True})
    assert Decoder(tied, random_weights(tied), select("cpu")).weight_bytes() == 4 * tied.parameters()


def test_store_is_shaped_and_bounded_for_the_model() -> None:
    spec = DecoderSpec.from_hf(CONFIG)
    decoder = Decoder(spec, random_weights(spec), select("cpu"))
    store = decoder.new_store(max_bytes=10 * spec.kv_bytes_per_token(4))
    assert store.reserve(0, 10) and not store.reserve(0, 1) and not store.reserve(1, 1)
    assert store.view(1, 0)[0].shape == (1, 10, 8)
    assert store.used_bytes() == 10 * spec.kv_bytes_per_token(4)


def test_rows_that_were_not_reserved_are_an_error() -> None:
    spec = DecoderSpec.from_hf(CONFIG)
    decoder = Decoder(spec, random_weights(spec), select("cpu"))
    store = decoder.new_store()
    assert store.reserve(0, 3)
    with pytest.raises(ValueError, match="not reserved"):
        decoder.forward(ForwardBatch([SeqRows(0, (1, 2, 3, 4), 0)], [0]), store)
    with pytest.raises(ValueError, match="at least one row"):
        decoder.forward(ForwardBatch([SeqRows(0, (), 0)], []), store)


def test_unknown_kernels_are_refused() -> None:
    with pytest.raises(Unsupported, match="no kernels named 'fast'"):
        select("cpu", "fast")
