"""Tensor names as data: GGUF -> Hugging Face -> canonical (what models/decoder.py asks for).

Canonical: `embed`, `layers.{i}.<part>`, `final_norm`, `lm_head` (absent when tied); a bias is `<part>_bias`.
GGUF names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, section "Standardized tensor names".
"""

from __future__ import annotations

import re

_HF_PREFIXES = ("model.language_model.", "language_model.model.", "model.")  # the first two: multimodal Gemma 3 files
_HF_TOP = {"embed_tokens": "embed", "norm": "final_norm", "lm_head": "lm_head"}
_HF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}
_HF_TWO_NORMS = {"post_attention_layernorm": "mlp_norm"}
_HF_FOUR_NORMS = {
    "post_attention_layernorm": "post_attn_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "post_mlp_norm",
}

_GGUF_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_TWO_NORMS = {"ffn_norm": "post_attention_layernorm"}
_GGUF_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def four_norms(family: str) -> bool:
    """True for families with a norm before and after each block (Gemma 3); `family` is a model_type or GGUF name."""
    return family.startswith("gemma3")


def canonical_name(hf_name: str, model_type: str) -> str | None:
    """`model.layers.3.self_attn.q_proj.bias` -> `layers.3.q_bias`. None: not a tensor of the text decoder."""
    name = hf_name
    for prefix in _HF_PREFIXES:
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            break
    name = name.removeprefix("language_model.")  # language_model.lm_head.weight
    stem, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        return None
    suffix = "_bias" if kind == "bias" else ""
    if stem in _HF_TOP:
        return _HF_TOP[stem] + suffix
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)", stem)
    table = _HF_LAYER | (_HF_FOUR_NORMS if four_norms(model_type) else _HF_TWO_NORMS)
    if layer is None or layer[2] not in table:
        return None
    return f"layers.{int(layer[1])}.{table[layer[2]]}{suffix}"


def ignored(hf_name: str, tied: bool) -> bool:
    """Tensors that checkpoints carry and the decoder does not need: rotary buffers, a copy of a tied output
    projection, and the vision tower of a multimodal Gemma 3."""
    if hf_name.endswith(("rotary_emb.inv_freq", "rotary_emb.original_inv_freq")):
        return True
    if hf_name.startswith(
        ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
    ):
        return True
    return tied and hf_name in ("lm_head.weight", "language_model.lm_head.weight")


def hf_name_of_gguf(name: str, architecture: str) -> str | None:
    """`blk.3.attn_q.bias` -> `model.layers.3.self_attn.q_proj.bias`. None: unknown."""
    stem, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        return None
    if stem in _GGUF_TOP:
        return f"{_GGUF_TOP[stem]}.{kind}"
    layer = re.fullmatch(r"blk\.(\d+)\.(.+)", stem)
    table = _GGUF_LAYER | (_GGUF_FOUR_NORMS if four_norms(architecture) else _GGUF_TWO_NORMS)
    if layer is None or layer[2] not in table:
        return None
    return f"model.layers.{int(layer[1])}.{table[layer[2]]}.{kind}"
