"""Conversion: models that transformers made, exported the way llama.cpp does it, must come back as they were."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import threading
import tracemalloc
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from outpace.errors import DownloadError, ModelError
from outpace.models.spec import DecoderSpec
from outpace.weights import convert as module
from outpace.weights.convert import convert
from outpace.weights.gguf import GGUFFile, GGUFTensor
from outpace.weights.gguf_config import hf_config
from outpace.weights.load import load_checkpoint

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GEMMA = {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama3": ("Llama", {"head_dim": 64, "rope_parameters": LLAMA3, "max_position_embeddings": 16384}),
    "linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    "mistral": ("Mistral", {"sliding_window": 8, "head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "gemma3": ("Gemma3", GEMMA),
}
ARCH = {"Llama": "llama", "Mistral": "llama", "Qwen2": "qwen2", "Qwen3": "qwen3", "Gemma3": "gemma3"}


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    # Tokenizers have their own tests; here only the hand-over counts.
    fake = types.ModuleType("outpace.text.gguf_tokenizer")
    monkeypatch.setattr(fake, "build_tokenizer_files", tokenizer_files, raising=False)
    monkeypatch.setitem(sys.modules, fake.__name__, fake)


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, str]:
    eos = metadata["tokenizer.ggml.eos_token_id"]
    return {"tokenizer.json": "{}", "generation_config.json": json.dumps({"eos_token_id": [eos]})}


def original(family: str) -> Any:
    kind, changes = FAMILIES[family]
    prefix = kind + ("Text" if kind == "Gemma3" else "")
    config = getattr(transformers, f"{prefix}Config")(**(SIZES | changes))
    torch.manual_seed(3)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases start constant, which would hide a mix-up
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model


def export(model: Any, path: Path, kind: gguf.GGMLQuantizationType | None = None, **extra: Any) -> Path:
    """What llama.cpp's converter does, with gguf's own table of names; matrices in blocks of `kind`."""
    config, family = model.config, type(model).__name__.removesuffix("ForCausalLM")
    arch = ARCH[family]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(model.model.layers[0].self_attn.head_dim)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if family in ("Mistral", "Gemma3"):
        writer.add_sliding_window(config.sliding_window)
    for key, value in extra.items():
        writer.add_uint32(key, value)
    table = gguf.get_tensor_name_map(next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == arch), 2)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = as_stored(name, tensor, arch, config)
        blocks = kind if kind is not None and values.ndim == 2 else None
        if blocks is not None:
            values = gguf.quants.quantize(values, blocks)
        writer.add_tensor(table.get_name(name, (".weight", ".bias")), values, raw_dtype=blocks)
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", divisors(model))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return path


def as_stored(name: str, tensor: torch.Tensor, arch: str, config: Any) -> np.ndarray:
    values = tensor.float().numpy()
    if arch == "gemma3" and name.endswith("norm.weight"):
        return values + 1
    if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        return interleave(values, heads)
    return values


def interleave(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows i and i + d/2 of a head become neighbours 2i and 2i + 1."""
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return np.stack([halves[:, 0], halves[:, 1]], 2).reshape(values.shape)


def divisors(model: Any) -> np.ndarray:
    plain = 1 / 500000.0 ** (np.arange(0, 64, 2) / 64)
    return (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)


def same_as(model: Any, folder: Path) -> bool:
    tied = model.config.tie_word_embeddings
    wanted = {n: t for n, t in model.state_dict().items() if not (tied and n == "lm_head.weight")}
    found = load_file(folder / "model.safetensors")
    assert found.keys() == wanted.keys()
    return all(torch.allclose(found[n], wanted[n], rtol=0, atol=2e-7) for n in wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_survives(family: str, tmp_path: Path) -> None:
    model = original(family)
    folder = convert(export(model, tmp_path / "m.gguf"), "float32")
    assert same_as(model, folder)
    again, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()) and type(again) is type(model)
    tokens = torch.arange(3, 60)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-5)
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [2]}
    spec, weights = load_checkpoint(folder, "float32", "cpu")
    assert spec == DecoderSpec.from_hf(model.config.to_dict())
    assert spec.parameters() == sum(w.numel() for w in weights.values()) == model.num_parameters()


@pytest.mark.parametrize(
    ("family", "fault"), [("llama", "permutation"), ("mistral", "permutation"), ("gemma3", "norm")]
)
def test_the_comparison_sees_faults(family: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "permutation":
        monkeypatch.setattr(module, "_unpermute", lambda rows, tensor, heads: rows)
    else:
        monkeypatch.setattr(module, "hf_config", lambda *a, real=module.hf_config: real(*a) | {"model_type": "qwen3"})
    model = original(family)
    assert not same_as(model, convert(export(model, tmp_path / "m.gguf"), "float32"))


def rotate_pairs(v: np.ndarray, position: int) -> np.ndarray:
    """llama.cpp: neighbours (2i, 2i + 1) turn together. v [heads, width]."""
    z = (v[:, 0::2] + 1j * v[:, 1::2]) * np.exp(1j * position * ANGLES)
    return np.stack([z.real, z.imag], -1).reshape(v.shape)


def rotate_halves(v: np.ndarray, position: int) -> np.ndarray:
    """Hugging Face: i and i + width / 2 turn together."""
    half = v.shape[1] // 2
    z = (v[:, :half] + 1j * v[:, half:]) * np.exp(1j * position * ANGLES)
    return np.concatenate([z.real, z.imag], -1)


ANGLES = np.array([0.3, 0.7, 1.1, 1.9])


def test_permutation_is_the_change_of_rotary_convention() -> None:
    """Attention scores of the stored rows in llama.cpp's convention = those of the converted rows in Hugging Face's."""
    rng, heads, width = np.random.default_rng(0), 2, 8
    stored = rng.standard_normal((heads * width, 4)).astype(np.float32)
    tensor = GGUFTensor("q", gguf.GGMLQuantizationType.F32, stored.shape, 0, stored.nbytes)
    converted = module._unpermute(stored.view(np.uint8), tensor, heads).view(np.float32)
    bias = module._unpermute(stored[:, 0].copy().view(np.uint8)[None], tensor_of_bias(stored), heads).view(np.float32)
    np.testing.assert_array_equal(bias[0], converted[:, 0])
    x, y = rng.standard_normal((2, 4))

    def scores(weight: np.ndarray, rotate: Callable[[np.ndarray, int], np.ndarray]) -> np.ndarray:
        q, k = (weight @ x).reshape(heads, width), (weight @ y).reshape(heads, width)
        return (rotate(q, 5) * rotate(k, 2)).sum(-1)

    wanted = scores(stored, rotate_pairs)
    np.testing.assert_allclose(scores(converted, rotate_halves), wanted, rtol=1e-5)
    assert not np.allclose(scores(stored, rotate_halves), wanted, rtol=1e-2)
    with pytest.raises(ModelError, match="cannot share equally"):
        module._unpermute(stored.view(np.uint8), tensor, 3)


def tensor_of_bias(stored: np.ndarray) -> GGUFTensor:
    return GGUFTensor("q", gguf.GGMLQuantizationType.F32, stored.shape[:1], 0, 4 * len(stored))


def test_llama3_scaling_is_recovered_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = original("llama3")
    path = export(model, tmp_path / "m.gguf")
    config = json.loads((convert(path, "float32") / "config.json").read_text())
    assert config["rope_theta"] == 500000.0
    kept = {key: value for key, value in config["rope_scaling"].items() if key != "rope_type"}
    assert config["rope_scaling"]["rope_type"] == "llama3"
    assert kept == pytest.approx({key: LLAMA3[key] for key in kept}) and len(kept) == 4
    bent = divisors(model) * np.linspace(1, 1.1, 32, dtype=np.float32)
    monkeypatch.setitem(globals(), "divisors", lambda model: bent)
    with pytest.raises(ModelError, match="not the published llama3 scaling"):
        convert(export(model, tmp_path / "bent.gguf"), "float32")


def test_bfloat16_rounds_to_nearest_even(tmp_path: Path) -> None:
    model = original("qwen2")
    values = model.model.embed_tokens.weight.data
    values.view(torch.int32)[:8] = (values.view(torch.int32)[:8] & ~0xFFFF) | 0x8000  # exactly between two neighbours
    found = load_file(convert(export(model, tmp_path / "m.gguf"), "bfloat16") / "model.safetensors")
    embed = found["model.embed_tokens.weight"]
    assert embed.dtype == torch.bfloat16 and torch.equal(embed, values.to(torch.bfloat16))
    low_bits = embed[:8].view(torch.int16) & 1
    assert not low_bits.any()  # ties went to even
    cut = (values.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    assert not torch.equal(embed, cut)  # the control: cutting bits off would differ


REFUSED = {
    "phi3": ({"general.architecture": "phi3"}, r"'phi3'.*llama\.cpp.*vLLM"),
    "experts": ({"qwen2.expert_count": 8}, r"mixture of experts.*llama\.cpp"),
    "partial rotation": ({"qwen2.rope.dimension_count": 8}, "rotation of only a part"),
    "value heads": ({"qwen2.attention.value_length": 8}, "value heads"),
    "soft-capping": ({"qwen2.final_logit_softcapping": 30.0}, "soft-capping"),
    "per layer": ({"qwen2.feed_forward_length": [64, 64]}, "layers of different shapes"),
    "rope scaling": ({"qwen2.rope.scaling.type": "longrope", "qwen2.rope.scaling.factor": 2.0}, "'longrope'"),
    "split": ({"split.count": 3}, "llama-gguf-split --merge"),
    "no layers": ({"qwen2.block_count": None}, r"qwen2\.block_count is missing"),
    "odd heads": ({"qwen2.attention.head_count": "4"}, r"head_count is '4'"),
    "no embedding": ({}, r"no tensor 'token_embd\.weight'"),
    "infinite": ({"qwen2.embedding_length": math.inf}, "embedding_length is inf"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_models(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, message = REFUSED[case]
    path = export(original("qwen2"), tmp_path / "m.gguf")
    real = module.read_gguf

    def changed(path: Path) -> GGUFFile:
        file = real(path)
        metadata = {k: v for k, v in (file.metadata | changes).items() if v is not None}
        return GGUFFile(file.path, metadata, {} if case == "no embedding" else file.tensors)

    monkeypatch.setattr(module, "read_gguf", changed)
    with pytest.raises(ModelError, match=message) as caught:
        convert(path, "float32")
    assert "\n" not in str(caught.value) and leftovers(tmp_path) == []
    monkeypatch.setattr(module, "read_gguf", real)
    assert convert(path, "float32").is_dir()  # the control: without the change it converts


def test_unknown_tensors_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = export(original("qwen2"), tmp_path / "m.gguf")
    monkeypatch.setattr(
        module, "hf_name_of_gguf", lambda n, a, real=module.hf_name_of_gguf: real(n, a) if "up" not in n else None
    )
    with pytest.raises(ModelError, match=r"2 tensors.*blk\.0\.ffn_up\.weight"):
        convert(path, "float32")


def test_yarn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = export(original("qwen2"), tmp_path / "m.gguf")
    file = module.read_gguf(path)
    scaling = {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0}
    scaling["qwen2.rope.scaling.original_context_length"] = 64
    found = hf_config(GGUFFile(path, file.metadata | scaling, file.tensors), "float32")
    assert found["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert DecoderSpec.from_hf(found).rope.kind == "yarn"


def test_the_gemma_27b_scale(tmp_path: Path) -> None:
    path = export(original("gemma3"), tmp_path / "m.gguf")
    file = module.read_gguf(path)
    assert hf_config(file, "float32")["query_pre_attn_scalar"] == 32
    wide = GGUFFile(path, file.metadata | {"gemma3.block_count": 62}, file.tensors)
    assert hf_config(wide, "float32")["query_pre_attn_scalar"] == 64 // 4


def leftovers(tmp_path: Path) -> list[str]:
    """Folders in the cache; the empty lock files do not count."""
    return [path.name for path in (tmp_path / "cache" / "converted").glob("*") if path.is_dir()]


def test_only_once_and_again_when_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = export(original("qwen2"), tmp_path / "m.gguf")
    first = convert(path, "float32")
    os.utime(path, ns=(1, 1))
    second = convert(path, "float32")
    monkeypatch.setattr(module, "read_gguf", lambda path: pytest.fail("opened the GGUF again"))
    assert convert(path, "float32") == second != first
    with pytest.raises(ModelError, match="Cannot read"):
        convert(tmp_path / "none.gguf", "float32")


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            DownloadError,
            "disk of the model cache is full.*OUTPACE_CACHE",
        ),
        (OSError(errno.EACCES, "Permission denied"), DownloadError, "Cannot write.*OUTPACE_CACHE"),
        (KeyboardInterrupt("stop"), KeyboardInterrupt, "stop"),
    ],
)
def test_nothing_half_done(
    fault: BaseException, error: type[BaseException], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = export(original("qwen2"), tmp_path / "m.gguf")

    def fail(descriptor: int) -> None:
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(error, match=message):
            convert(path, "float32")
    assert leftovers(tmp_path) == []
    assert (convert(path, "float32") / "model.safetensors").is_file()


def test_two_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = export(original("qwen2"), tmp_path / "m.gguf")
    opened, waiting, folders = [], threading.Event(), []
    real = module.read_gguf

    def slow(path: Path) -> GGUFFile:
        opened.append(path)
        assert waiting.wait(10)  # until the other one has met the lock
        return real(path)

    def progress(what: str, done: int, total: int) -> None:
        if "waiting for another process" in what:
            waiting.set()

    monkeypatch.setattr(module, "read_gguf", slow)
    threads = [threading.Thread(target=lambda: folders.append(convert(path, "float32", progress))) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(opened) == 1 and len(set(folders)) == 1 and len(folders) == 2


def test_memory_is_a_piece_not_a_tensor(tmp_path: Path) -> None:
    path = tmp_path / "big.gguf"
    values = np.ones((1 << 14, 1 << 10), np.float32)  # 64 MB
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_tensor("token_embd.weight", values)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    file = module.read_gguf(path)
    tensor = file.tensors["token_embd.weight"]
    tracemalloc.start()
    total = sum(
        len(piece) for piece in module._pieces(file, tensor, "model.embed_tokens.weight", {"model_type": "qwen2"})
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == 1 << 14 and peak < values.nbytes / 4
