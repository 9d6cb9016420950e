"""Every family against transformers: tiny random models, float32 logits within 1e-4 relative."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from outpace.kernels import native, select
from outpace.models.base import ForwardBatch, LanguageModel, SeqRows
from outpace.models.decoder import Decoder
from outpace.models.native_decoder import NativeDecoder
from outpace.models.spec import DecoderSpec

TOLERANCE = 1e-4
SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
YARN_MSCALE = YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 16.0, "truncate": False}
FAMILIES: dict[str, dict[str, object]] = {
    "llama2": {"model_type": "llama"},
    "llama2-biased": {"model_type": "llama", "attention_bias": True, "tie_word_embeddings": True},
    "smollm2": {"model_type": "llama", "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e5}},
    "llama3": {"model_type": "llama", "rope_parameters": LLAMA3 | {"rope_theta": 500.0}},
    "llama-linear": {"model_type": "llama", "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
    "llama-yarn": {"model_type": "llama", "rope_parameters": YARN},
    "llama-yarn-mscale": {"model_type": "llama", "rope_parameters": YARN_MSCALE},
    "mistral": {"model_type": "mistral", "sliding_window": 7},
    "mistral-full": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "head_dim": 8},
    "qwen2-yarn": {"model_type": "qwen2", "head_dim": 8, "rope_parameters": YARN | {"rope_theta": 1e6}},
    "qwen2-sliding": {
        "model_type": "qwen2",
        "head_dim": 8,
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 2,
    },
    "qwen3": {"model_type": "qwen3"},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 5, "sliding_window_pattern": 3},
    "gemma3-linear": {
        "model_type": "gemma3_text",
        "sliding_window": 5,
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}
# What each family's config asks for, got wrong in one place: the same weights must then give other logits.
Fault = dict[str, object]
FAULTS: dict[str, list[Fault]] = {
    "llama2": [{"norm_eps": 1e-2}, {"attn_scale": 0.3}, {"activation": "gelu_pytorch_tanh"}, {"rope.theta": 9e3}],
    "llama2-biased": [{"qkv_bias": False}, {"o_bias": False}],
    "smollm2": [{"rope.theta": 1e4}, {"norm_offset": 1.0}],
    "llama3": [
        {"rope.kind": "default"},
        {"rope.factor": 4.0},
        {"rope.original_context": 64},
        {"rope.low_freq_factor": 2.0},
        {"rope.high_freq_factor": 5.0},
    ],
    "llama-linear": [{"rope.kind": "default"}, {"rope.factor": 3.0}],
    "llama-yarn": [
        {"rope.kind": "default"},
        {"rope.kind": "linear"},
        {"rope.attention_factor": 1.0},
        {"rope.factor": 2.0},
        {"rope.beta_fast": 2.0},
        {"rope.original_context": 32},
    ],
    "llama-yarn-mscale": [{"rope.attention_factor": 1.0}, {"rope.truncate": True}, {"rope.beta_slow": 2.0}],
    "mistral": [{"windows": (None,) * 4}, {"windows": (6,) * 4}, {"windows": (8,) * 4}],
    "mistral-full": [{"windows": (39,) * 4}],
    "qwen2": [{"qkv_bias": False}],
    "qwen2-yarn": [{"rope.kind": "default"}],
    "qwen2-sliding": [{"windows": (6,) * 4}, {"windows": (None, None, 7, 7)}, {"windows": (None, None, None, 6)}],
    "qwen3": [{"qk_norm": False}],
    "gemma3": [
        {"local_rope": None},
        {"sandwich": False},
        {"norm_offset": 0.0},
        {"embed_scale": 1.0},
        {"qk_norm": False},
        {"activation": "silu"},
        {"windows": (5,) * 4},
        {"rope.theta": 1e4},
    ],
    "gemma3-linear": [
        {"windows": (6, None, 6, None)},
        {"windows": (4, None, 4, None)},
        {"attn_scale": 0.25},
        {"windows": (None, 5, None, 5)},
        {"rope.kind": "default"},
    ],
}


def with_fault(spec: DecoderSpec, fault: Fault) -> DecoderSpec:
    [(field, value)] = fault.items()
    if field.startswith("rope."):
        return dataclasses.replace(spec, rope=dataclasses.replace(spec.rope, **{field.removeprefix("rope."): value}))
    return dataclasses.replace(spec, **{field: value})


# The reference, and the native kernels on every instruction set of this machine.
DECODERS: dict[str, Callable[[DecoderSpec, dict[str, Tensor]], LanguageModel]] = {
    "torch": lambda spec, weights: Decoder(spec, weights, select("cpu")),
} | {
    isa: lambda spec, weights, isa=isa: NativeDecoder(spec, weights, native.open_native(2, isa))
    for isa in native.isas()
}


class Tiny:
    """A random model of a family, the folder it was saved to, and transformers' logits for a text."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.kernels = name, folder, "torch"
        torch.manual_seed(sum(map(ord, name)))
        config = AutoConfig.for_model(**SIZES | FAMILIES[name])
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for key, weight in model.named_parameters():
                if weight.dim() == 1:  # norms and biases start at constants that would hide a mistake
                    weight.add_(torch.randn_like(weight) * (0.3 if "norm" in key else 1.0))
        model.save_pretrained(folder)
        self.tokens = tuple(torch.randint(3, 97, (40,)).tolist())
        self.other = tuple(torch.randint(3, 97, (23,)).tolist())
        self.model = model
        self.spec = DecoderSpec.from_hf(json.loads((folder / "config.json").read_text()))

    @torch.no_grad()
    def expected(self, tokens: tuple[int, ...]) -> Tensor:
        return self.model(torch.tensor([tokens])).logits[0]

    def decoder(self, spec: DecoderSpec | None = None, dtype: torch.dtype = torch.float32) -> LanguageModel:
        return DECODERS[self.kernels](spec or self.spec, self.weights(dtype))

    def weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        tensors = {k: v.to(dtype) for k, v in load_file(self.folder / "model.safetensors").items()}
        weights = {canonical(k, self.spec.sandwich): v for k, v in tensors.items()}
        if self.spec.tied:
            weights.pop("lm_head", None)
        assert {k: tuple(v.shape) for k, v in weights.items()} == self.spec.expected_tensors()
        return weights


def canonical(name: str, sandwich: bool) -> str:
    """Written apart from weights/names.py on purpose: a second opinion on the same table."""
    name = name.removeprefix("model.")
    for old, new in (
        ("embed_tokens.weight", "embed"),
        ("lm_head.weight", "lm_head"),
        ("input_layernorm.weight", "attn_norm"),
        ("post_attention_layernorm.weight", "post_attn_norm" if sandwich else "mlp_norm"),
        ("pre_feedforward_layernorm.weight", "mlp_norm"),
        ("post_feedforward_layernorm.weight", "post_mlp_norm"),
        ("self_attn.", ""),
        ("mlp.", ""),
        ("_proj.weight", ""),
        ("_proj.bias", "_bias"),
        ("_norm.weight", "_norm"),
    ):
        name = name.replace(old, new)
    return "final_norm" if name == "norm.weight" else name


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    torch.set_num_threads(1)
    return Tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(params=DECODERS)
def tiny(family: Tiny, request: pytest.FixtureRequest) -> Tiny:
    family.kernels = request.param
    return family


def feed(decoder: LanguageModel, tokens: tuple[int, ...], sizes: list[int], features: tuple[int, ...] = ()) -> Tensor:
    """Logits of every row, the tokens fed in chunks of these sizes, each committed whole."""
    kv, done, logits = decoder.new_store(), 0, []
    for size in sizes:
        chunk = tokens[done : done + size]
        assert kv.reserve(0, len(chunk))
        out = decoder.forward(ForwardBatch([SeqRows(0, chunk, done)], range(len(chunk)), features), kv)
        kv.commit(0, range(len(chunk)))
        logits.append(out.logits)
        done += len(chunk)
    assert done == len(tokens) == kv.length(0)
    kv.check_integrity()
    return torch.cat(logits)


def relative_error(got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape and got.dtype == torch.float32
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("sizes", [[40], [1] * 40, [13, 1, 20, 6]], ids=["at once", "one by one", "in chunks"])
def test_prompt(tiny: Tiny, sizes: list[int]) -> None:
    got = feed(tiny.decoder(), tiny.tokens, sizes)
    assert relative_error(got, tiny.expected(tiny.tokens)) < TOLERANCE


def test_long_prompt_in_wide_chunks(tiny: Tiny) -> None:
    """Chunks wider than the folded attention path, and positions past the trained context of the scaled families."""
    tokens = (tiny.tokens + tiny.other) * 3
    got = feed(tiny.decoder(), tokens, [100, 89])
    assert relative_error(got, tiny.expected(tokens)) < TOLERANCE


def test_planted_faults_show(tiny: Tiny) -> None:
    expected = tiny.expected(tiny.tokens)
    for fault in FAULTS[tiny.name]:
        wrong = with_fault(tiny.spec, fault)
        assert wrong != tiny.spec, f"{fault} is no fault"
        assert relative_error(feed(tiny.decoder(wrong), tiny.tokens, [40]), expected) > 10 * TOLERANCE, fault


def test_query_heads_share_the_right_keys(family: Tiny) -> None:
    """Planted fault: query heads dealt to the key heads in turn (0, 1, 0, 1) instead of in blocks (0, 0, 1, 1)."""
    family.kernels = "torch"
    decoder = Decoder(family.spec, family.weights(torch.float32), select("cpu"))
    kernels = decoder._kernels
    q_heads, kv_heads = family.spec.heads, family.spec.kv_heads
    order = torch.arange(q_heads).view(-1, kv_heads).T.flatten()

    class Dealt(type(kernels)):  # type: ignore[misc]
        def attention(self, q, *rest):  # type: ignore[no-untyped-def]
            out = super().attention(q[:, order].contiguous(), *rest).view(len(q), q_heads, -1)
            return out[:, order.argsort()].reshape(len(q), -1)

    decoder._kernels = Dealt()
    expected = family.expected(family.tokens)
    assert relative_error(feed(decoder, family.tokens, [40]), expected) > 10 * TOLERANCE
    decoder._kernels = kernels
    assert relative_error(feed(decoder, family.tokens, [40]), expected) < TOLERANCE


def tree_logits(tiny: Tiny, parents: tuple[int, ...] | None, nodes: tuple[int, ...]) -> Tensor:
    decoder, prompt = tiny.decoder(), tiny.tokens[:20]
    kv = decoder.new_store()
    assert kv.reserve(0, 20 + len(nodes))
    decoder.forward(ForwardBatch([SeqRows(0, prompt, 0)], []), kv)
    kv.commit(0, range(20))
    assert kv.reserve(0, len(nodes))
    return decoder.forward(ForwardBatch([SeqRows(0, nodes, 20, parents)], range(len(nodes))), kv).logits


def paths_error(tiny: Tiny, got: Tensor, parents: tuple[int, ...], nodes: tuple[int, ...]) -> float:
    worst = 0.0
    for i in range(len(nodes)):
        path, node = [], i
        while node >= 0:
            path.append(node)
            node = parents[node]
        text = tiny.tokens[:20] + tuple(nodes[n] for n in reversed(path))
        worst = max(worst, relative_error(got[i], tiny.expected(text)[-1]))
    return worst


def test_tree_rows_equal_their_paths(tiny: Tiny) -> None:
    parents = (-1, 0, 0, 1, 1, 2, 3, 6, 7, 8)  # long enough for the small windows to slide inside the tree
    nodes = tiny.other[:10]
    assert paths_error(tiny, tree_logits(tiny, parents, nodes), parents, nodes) < TOLERANCE
    as_chain = tree_logits(tiny, None, nodes)
    assert paths_error(tiny, as_chain, parents, nodes) > 10 * TOLERANCE


def test_committed_tree_path_continues(tiny: Tiny) -> None:
    """Keep one path of a tree; the next token's logits are those of the path's text."""
    decoder, prompt, nodes = tiny.decoder(), tiny.tokens[:20], tiny.other[:6]
    kv = decoder.new_store()
    assert kv.reserve(7, 26)
    rows = SeqRows(7, prompt + nodes, 0, (*range(-1, 19), 19, 19, 20, 21, 22, 23))
    decoder.forward(ForwardBatch([rows], []), kv)
    kv.commit(7, [*range(20), 21, 23, 25])
    assert kv.reserve(7, 1)
    got = decoder.forward(ForwardBatch([SeqRows(7, (5,), 23)], [0]), kv).logits
    text = (*prompt, nodes[1], nodes[3], nodes[5], 5)
    assert relative_error(got, tiny.expected(text)[-1:]) < TOLERANCE


def test_uncommitted_rows_are_seen(tiny: Tiny) -> None:
    """A draft model feeds its draft row by row before anything is committed."""
    decoder = tiny.decoder()
    kv = decoder.new_store()
    logits = []
    for i, token in enumerate(tiny.tokens[:12]):
        assert kv.reserve(3, 1)
        logits.append(decoder.forward(ForwardBatch([SeqRows(3, (token,), i)], [0]), kv).logits)
    assert kv.length(3) == 0
    assert relative_error(torch.cat(logits), tiny.expected(tiny.tokens[:12])) < TOLERANCE


def test_sequences_in_one_batch(tiny: Tiny) -> None:
    """A prompt chunk, a tree and a single row together, with logits of some rows only."""
    decoder = tiny.decoder()
    kv = decoder.new_store()
    for seq, n in ((1, 15), (2, 8), (3, 30)):
        assert kv.reserve(seq, n)
        decoder.forward(ForwardBatch([SeqRows(seq, tiny.tokens[:n], 0)], []), kv)
        kv.commit(seq, range(n))
        assert kv.reserve(seq, 9)  # more than the pass below uses: rows nobody wrote must not be read
        for plane in (plane for layer in range(4) for plane in kv.view(layer, seq)):
            plane[:, n:] = float("nan")
    batch = [
        SeqRows(1, tiny.tokens[15:21], 15),
        SeqRows(2, tiny.other[:3], 8, (-1, 0, 0)),
        SeqRows(3, tiny.tokens[30:31], 30),
    ]
    got = decoder.forward(ForwardBatch(batch, [9, 5, 8, 0]), kv).logits
    expected = torch.stack(
        [
            tiny.expected(tiny.tokens[:31])[-1],
            tiny.expected(tiny.tokens[:21])[-1],
            tiny.expected((*tiny.tokens[:8], tiny.other[0], tiny.other[2]))[-1],
            tiny.expected(tiny.tokens[:16])[-1],
        ]
    )
    assert relative_error(got, expected) < TOLERANCE


def test_features_are_the_layers_outputs(tiny: Tiny) -> None:
    with torch.no_grad():
        hidden = tiny.model(torch.tensor([tiny.tokens]), output_hidden_states=True).hidden_states
    decoder = tiny.decoder()
    kv = decoder.new_store()
    assert kv.reserve(0, 40)
    out = decoder.forward(ForwardBatch([SeqRows(0, tiny.tokens, 0)], [], (2, 0, 4)), kv)
    assert out.logits.shape == (0, 97) and out.features is not None
    expected = torch.cat([hidden[3][0], hidden[1][0], hidden[4][0]], -1)  # transformers' last one is normed
    assert relative_error(out.features, expected) < TOLERANCE


def test_bfloat16_tracks_transformers(tiny: Tiny) -> None:
    """Same rounding points: no further from float32 than transformers in bfloat16, and close to that."""
    exact = tiny.expected(tiny.tokens)
    theirs = AutoModelForCausalLM.from_pretrained(tiny.folder, dtype=torch.bfloat16, attn_implementation="eager").eval()
    with torch.no_grad():
        rounded = theirs(torch.tensor([tiny.tokens])).logits[0].float()
    got = feed(tiny.decoder(dtype=torch.bfloat16), tiny.tokens, [40])
    noise = (rounded - exact).abs().mean()
    assert (got - exact).abs().mean() < 1.25 * noise
    assert (got - rounded).abs().mean() < 1.5 * noise
