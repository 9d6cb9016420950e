"""An output projection cut down to some tokens: their logits as before, all others impossible."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from outpace.kernels import native
from outpace.models.base import ForwardBatch, ForwardOutput, LanguageModel, OutputIds, SeqRows, first_largest
from outpace.models.loading import Placement, make_decoder
from outpace.models.spec import DecoderSpec

KERNELS = ["torch", *(["native"] if native.available() else [])]
TIED = DecoderSpec.from_hf(
    {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 211,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
)
IDS = torch.tensor([0, 3, *range(20, 60), 100, 101, 210])


def make(spec: DecoderSpec, place: Placement, ids: Tensor | None) -> LanguageModel:
    shapes = spec.expected_tensors().items()
    noise = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, (_, shape) in enumerate(shapes)]
    weights = {name: (values * 0.3).bfloat16() for (name, _), values in zip(shapes, noise, strict=True)}
    return make_decoder(spec, weights, place, ids)


def forward(model: LanguageModel, best_below: int | None = None) -> ForwardOutput:
    kv, tokens = model.new_store(), (5, 200, 17, 90, 4)
    assert kv.reserve(0, len(tokens))
    return model.forward(ForwardBatch([SeqRows(0, tokens, 0)], range(5), best_below=best_below), kv)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("tied", [True, False])
def test_kept_tokens_have_their_logits_and_the_others_none(kernels: str, quantization: str, tied: bool) -> None:
    if quantization != "none" and kernels == "torch":
        pytest.skip("torch does not quantise")
    spec, place = dataclasses.replace(TIED, tied=tied), Placement(kernels=kernels, quantization=quantization)
    whole, cut = make(spec, place, None), make(spec, place, IDS)
    expected = torch.full((5, 211), -torch.inf).index_copy_(1, IDS, forward(whole).logits[:, IDS])
    found = forward(cut)
    assert found.best is None and torch.equal(found.logits, expected)
    assert cut.spec.vocab_size == 211  # it still reads any token
    for below in (1, 55, 101, 211):
        best = forward(cut, below).best
        assert best is not None and torch.equal(best, first_largest(expected[:, :below]))
    assert not torch.equal(first_largest(forward(whole).logits), best)
    saved = (211 - len(IDS)) * (64 * 2 if quantization == "none" else 64 * 34 // 32)
    assert cut.pass_bytes() == whole.pass_bytes() - saved


@pytest.mark.parametrize("ids", [[], [3, 2], [2, 2], [-1, 4], [4, 211]])
def test_ids_must_ascend_within_the_vocabulary(ids: list[int]) -> None:
    with pytest.raises(ValueError, match=r"within 0\.\.210"):
        OutputIds(torch.tensor(ids, dtype=torch.int64), 211)
