"""GGUF metadata -> the `config.json` that transformers would have had for the same model."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from outpace.errors import ModelError
from outpace.weights.gguf import GGUFFile, decode_rows

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
# Not in the file: llama.cpp fixes them in code for gemma3, and transformers has them as defaults.
_GEMMA_PATTERN, _GEMMA_LOCAL_BASE, _GEMMA_27B_LAYERS = 6, 10000.0, 62
# llama3 rope scaling as Meta published it; GGUF keeps only the resulting divisors (see _llama3_scaling).
_LLAMA3_CONTEXT, _LLAMA3_LOW, _LLAMA3_HIGH = 8192, 1.0, 4.0


class _Fields:
    """Metadata of one architecture, by the part of the key after its name."""

    def __init__(self, file: GGUFFile) -> None:
        self.file, self.arch = file, str(file.metadata.get("general.architecture", ""))

    def get(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.arch}.{key}")

    def number(self, key: str, default: float) -> float:
        """A positive number (0 counts as absent), or the default."""
        return self.need(key) if self.get(key) not in (None, 0) else default

    def need(self, key: str) -> float:
        value = self.get(key)
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ModelError(
                f"{self.file.path}: metadata {self.arch}.{key} is {'missing' if value is None else repr(value)}, so the"
                " model cannot be built. The file is damaged or unusual; take another conversion of this model."
            )
        return value

    @property
    def head_dim(self) -> int:
        return int(
            self.number("attention.key_length", self.need("embedding_length") // self.need("attention.head_count"))
        )


def hf_config(file: GGUFFile, dtype: str) -> dict[str, Any]:
    """ModelError: an architecture or feature that the decoder does not run, or missing metadata."""
    fields = _Fields(file)
    _check_supported(fields)
    heads = int(fields.need("attention.head_count"))
    model_type = _model_type(fields)
    config: dict[str, Any] = {
        "architectures": [_CLASSES[model_type]],
        "model_type": model_type,
        "vocab_size": _vocabulary(fields),
        "hidden_size": int(fields.need("embedding_length")),
        "intermediate_size": int(fields.need("feed_forward_length")),
        "num_hidden_layers": int(fields.need("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields.number("attention.head_count_kv", heads)),
        "head_dim": fields.head_dim,
        "max_position_embeddings": int(fields.need("context_length")),
        "rms_norm_eps": _short_decimal(fields.need("attention.layer_norm_rms_epsilon")),
        "rope_theta": float(fields.number("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(fields),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "torch_dtype": dtype,
    }
    for key in ("bos", "eos"):
        config[f"{key}_token_id"] = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
    return config | _family_fields(fields, model_type)


def _check_supported(fields: _Fields) -> None:
    if fields.arch not in ARCHITECTURES:
        raise ModelError(
            f"{fields.file.path} holds a model of architecture {fields.arch!r}, which Outpace does not run; it runs"
            f" {', '.join(ARCHITECTURES)}. Use llama.cpp for this file, or vLLM for the original checkpoint."
        )
    if fields.file.metadata.get("split.count", 1) not in (0, 1):
        raise ModelError(
            f"{fields.file.path} is one part of a split GGUF. Join the parts with `llama-gguf-split --merge` first."
        )
    sizes = ("feed_forward_length", "attention.head_count", "attention.head_count_kv")
    if any(isinstance(fields.get(key), list) for key in sizes):
        raise _unsupported(fields, ["layers of different shapes"])
    head_dim = fields.head_dim
    unsupported = {
        "a mixture of experts": fields.number("expert_count", 0) > 0,
        "value heads of another size than its keys": fields.number("attention.value_length", head_dim) != head_dim,
        "rotation of only a part of each head": fields.number("rope.dimension_count", head_dim) != head_dim,
        "logit soft-capping": bool(fields.get("final_logit_softcapping") or fields.get("attn_logit_softcapping")),
    }
    found = [what for what, present in unsupported.items() if present]
    if found:
        raise _unsupported(fields, found)


def _unsupported(fields: _Fields, what: list[str]) -> ModelError:
    return ModelError(
        f"{fields.file.path} ({fields.arch}) uses {' and '.join(what)}, which Outpace does not run. Use llama.cpp for"
        " this file, or vLLM for the original checkpoint."
    )


def _model_type(fields: _Fields) -> str:
    if fields.arch == "llama" and fields.get("attention.sliding_window"):
        return "mistral"
    return "gemma3_text" if fields.arch == "gemma3" else fields.arch


def _vocabulary(fields: _Fields) -> int:
    embedding = fields.file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{fields.file.path} has no tensor 'token_embd.weight'. It is not a complete language model.")
    return embedding.shape[0]


def _family_fields(fields: _Fields, model_type: str) -> dict[str, Any]:
    layers = int(fields.need("block_count"))
    if model_type == "mistral":
        return {"hidden_act": "silu", "sliding_window": int(fields.need("attention.sliding_window"))}
    if model_type != "gemma3_text":
        return {"hidden_act": "silu"} | (
            {"mlp_bias": False} if model_type == "llama" else {"use_sliding_window": False}
        )
    scale = fields.head_dim
    if layers == _GEMMA_27B_LAYERS:
        scale = int(fields.need("embedding_length") // fields.need("attention.head_count"))
    period = int(fields.number("attention.sliding_window_pattern", _GEMMA_PATTERN))
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scale,
        "sliding_window": int(fields.need("attention.sliding_window")),
        "rope_local_base_freq": float(fields.number("rope.freq_base_swa", _GEMMA_LOCAL_BASE)),
        "layer_types": ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers)],
    }


def _rope_scaling(fields: _Fields) -> dict[str, Any] | None:
    if "rope_freqs.weight" in fields.file.tensors:
        return _llama3_scaling(fields)
    kind = fields.get("rope.scaling.type")
    if kind in (None, "none"):
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": float(fields.need("rope.scaling.factor"))}
    if kind == "linear":
        return scaling
    if kind == "yarn":
        original = int(fields.number("rope.scaling.original_context_length", fields.need("context_length")))
        return scaling | {"original_max_position_embeddings": original}
    raise ModelError(
        f"{fields.file.path} uses rope scaling {kind!r}, which Outpace does not run (it runs none, linear, yarn and"
        " llama3). Use llama.cpp for this file."
    )


def _llama3_scaling(fields: _Fields) -> dict[str, Any]:
    """`rope_freqs.weight` holds the divisor of each rotary frequency. Recover the four published numbers and prove
    them by computing the divisors again."""
    tensor = fields.file.tensors["rope_freqs.weight"]
    stored = np.concatenate([part.ravel() for part in decode_rows(fields.file.rows(tensor), tensor.kind, 1)])
    factor = float(stored.max())
    context = int(fields.number("rope.scaling.original_context_length", _LLAMA3_CONTEXT))
    base = float(fields.number("rope.freq_base", 10000.0))
    wavelength = 2 * math.pi * base ** (np.arange(0, fields.head_dim, 2) / fields.head_dim)
    smooth = np.clip((context / wavelength - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-3):
        raise ModelError(
            f"{fields.file.path}: the rotary divisors in 'rope_freqs.weight' are not the published llama3 scaling, and"
            " config.json has no other way to say them. Use llama.cpp for this file."
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": context,
    }


def _short_decimal(value: float) -> float:
    """The file stores float32: 9.999999747378752e-06 was 1e-05."""
    return float(f"{value:.7g}")
