"""config.json -> DecoderSpec: both spellings, family defaults, and refusals that name the setting."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import outpace
from outpace.errors import ModelError
from outpace.models.spec import DecoderSpec, RopeSpec

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}
SMALL = LLAMA | {"num_hidden_layers": 12, "vocab_size": 100}
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_sizes_of_a_published_model() -> None:
    """Llama 3 70B, the planner's reference case: 131.4 GiB in 16 bits, 320 KiB of KV per token."""
    spec = DecoderSpec.from_hf(LLAMA)
    assert spec.parameters() == 70_553_706_496
    assert spec.kv_bytes_per_token(2) == 320 * 1024
    assert (spec.head_dim, spec.eos_ids, spec.bos_id) == (128, (128001, 128008, 128009), 128000)
    assert spec.expected_tensors()["layers.79.k"] == (1024, 8192)
    assert spec.expected_tensors()["lm_head"] == (128256, 8192)
    tied = DecoderSpec.from_hf(LLAMA | {"tie_word_embeddings": True})
    assert "lm_head" not in tied.expected_tensors()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_SCALING}},
            {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_SCALING},
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        ),
        ({"rope_scaling": None, "rope_theta": 1e4}, {"rope_theta": 1e4}),
    ],
)
def test_both_spellings_of_rotary_settings(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert DecoderSpec.from_hf(SMALL | old) == DecoderSpec.from_hf(SMALL | {"rope_parameters": new})


def test_yarn() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    spec = DecoderSpec.from_hf(SMALL | {"max_position_embeddings": 32768, "rope_scaling": scaling})
    assert spec.max_context == 131072
    assert spec.rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)


def test_gemma3_multimodal_config_with_defaults_left_out() -> None:
    """The published 4B file names only what differs from the class's defaults, and eos at the top."""
    spec = DecoderSpec.from_hf(
        {
            "model_type": "gemma3",
            "architectures": ["Gemma3ForConditionalGeneration"],
            "eos_token_id": [1, 106],
            "vision_config": {"hidden_size": 1152},
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
        }
    )
    assert spec.windows[:7] == (1024,) * 5 + (None, 1024)
    assert spec.rope == RopeSpec(1e6, "linear", 8.0)
    assert spec.rope_of(0) == RopeSpec(1e4) and spec.rope_of(5) == spec.rope
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.vocab_size) == (8, 4, 256, 262208)
    assert (spec.tied, spec.eos_ids, spec.sandwich, spec.embed_scale) == (True, (1, 106), True, math.sqrt(2560))


def test_windows() -> None:
    mistral = SMALL | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    assert DecoderSpec.from_hf(mistral).windows == (4096,) * 12  # absent: the class's default
    assert DecoderSpec.from_hf(mistral | {"sliding_window": None}).windows == (None,) * 12
    qwen = SMALL | {"model_type": "qwen2", "architectures": None, "sliding_window": 64, "max_window_layers": 10}
    assert DecoderSpec.from_hf(qwen).windows == (None,) * 12  # use_sliding_window is off
    assert DecoderSpec.from_hf(qwen | {"use_sliding_window": True}).windows == (None,) * 10 + (64, 64)


def test_biases() -> None:
    assert DecoderSpec.from_hf(SMALL).qkv_bias is False
    biased = DecoderSpec.from_hf(SMALL | {"attention_bias": True}).expected_tensors()
    assert biased["layers.0.o_bias"] == (8192,) and biased["layers.0.k_bias"] == (1024,)
    qwen = DecoderSpec.from_hf(SMALL | {"model_type": "qwen2", "architectures": None}).expected_tensors()
    assert "layers.0.q_bias" in qwen and "layers.0.o_bias" not in qwen


REFUSED: dict[str, dict[str, Any]] = {
    "model_type": {"model_type": "mixtral"},
    "architecture": {"architectures": ["LlamaForSequenceClassification"]},
    "mlp_bias": {"mlp_bias": True},
    "attn_logit_softcapping": {"attn_logit_softcapping": 50.0},
    "partial_rotary_factor": {"partial_rotary_factor": 0.5},
    "num_local_experts": {"num_local_experts": 8},
    "quantization_config": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    "hidden_act": {"hidden_act": "relu"},
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "mrope_section": {"rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]}},
    "rotates only a part": {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
    "factor": {"rope_scaling": {"type": "linear"}},
    "num_hidden_layers": {"num_hidden_layers": "12"},
    "vocab_size": {"vocab_size": None},
    "num_key_value_heads": {"num_key_value_heads": 7},
    "rms_norm_eps": {"rms_norm_eps": float("nan")},
    "tie_word_embeddings": {"tie_word_embeddings": "yes"},
    "eos_token_id": {"eos_token_id": "</s>"},
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_cannot_run_is_refused_by_name(named: str) -> None:
    with pytest.raises(ModelError, match=named) as caught:
        DecoderSpec.from_hf(SMALL | REFUSED[named])
    assert "vLLM" in str(caught.value) and "\n" not in str(caught.value)


def test_switched_off_settings_are_accepted() -> None:
    off = {"mlp_bias": False, "attn_logit_softcapping": None, "partial_rotary_factor": 1.0, "quantization_config": None}
    assert DecoderSpec.from_hf(SMALL | off) == DecoderSpec.from_hf(SMALL)


def test_reading_a_config_does_not_load_torch() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import outpace.models.spec; print('torch' in sys.modules)"
    source = Path(outpace.__file__).parents[1]
    run = subprocess.run([sys.executable, "-c", code, source], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "False"
