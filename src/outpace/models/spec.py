"""What a decoder is: sizes, and the flags in which one family differs from another. Pure Python, no torch.

`DecoderSpec.from_hf` reads a `config.json` as transformers writes it (the old and the version 5 spelling of rotary
settings). A setting that would change the computation and is not implemented is an error, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outpace.errors import ModelError

FULL, SLIDING = "full_attention", "sliding_attention"

# Checkpoint classes per `model_type`, and what transformers assumes when config.json leaves a setting out.
_CLASSES = {
    "llama": ("LlamaForCausalLM",),
    "mistral": ("MistralForCausalLM",),
    "qwen2": ("Qwen2ForCausalLM",),
    "qwen3": ("Qwen3ForCausalLM",),
    "gemma3_text": ("Gemma3ForCausalLM",),
    "gemma3": ("Gemma3ForConditionalGeneration", "Gemma3ForCausalLM"),
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "rope_theta": 1_000_000.0,
    },
}
# Settings that change the maths and are not implemented, with the values that switch them off.
_MUST_BE_OFF: dict[str, tuple[object, ...]] = {
    "mlp_bias": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "partial_rotary_factor": (1, 1.0),
    "use_bidirectional_attention": (False,),
    "num_local_experts": (0, 1),
    "num_experts": (0, 1),
    "attention_chunk_size": (),
    "no_rope_layers": ([],),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "attention_multiplier": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "logit_scale": (1, 1.0),
    "quantization_config": (),
    "per_layer_config": (),
}
_ROPE_KEYS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"}
        | {"mscale", "mscale_all_dim", "truncate", "finetuned"}
    ),
}
_ALTERNATIVES = "vLLM, transformers or llama.cpp may run it"


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position settings. kind: default, linear, llama3 (Llama 3.1) or yarn (Peng 2023, NTK-by-parts).

    `attention_factor` multiplies cosines and sines; lengths are in tokens.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True)
class DecoderSpec:
    """One decoder-only transformer. Every family is a combination of these fields; nothing else selects code.

    windows     per layer, how many positions a row sees, itself included; None = all
    local_rope  the rotary settings of windowed layers where they differ (Gemma 3), else None
    norm_offset added to every norm weight (Gemma: 1)
    sandwich    norms after attention and MLP as well as before (Gemma 3)
    eos_ids     end-of-text ids named by config.json; generation_config.json may name more
    """

    model_type: str
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    norm_eps: float
    activation: str
    tied: bool
    max_context: int
    rope: RopeSpec
    attn_scale: float
    windows: tuple[int | None, ...]
    local_rope: RopeSpec | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    sandwich: bool = False
    norm_offset: float = 0.0
    embed_scale: float = 1.0
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DecoderSpec:
        """Read a parsed `config.json`. ModelError names the first setting that is missing, wrong or unsupported."""
        reader = _Reader.open(config)
        family = reader.model_type
        gemma = family == "gemma3_text"
        hidden, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
        head_dim = reader.integer("head_dim", hidden // heads)
        kv_heads = reader.integer("num_key_value_heads", heads)
        reader.require(heads % kv_heads == 0, "num_key_value_heads", f"must divide {heads} attention heads")
        reader.require(head_dim % 2 == 0, "head_dim", "must be even for rotary positions")
        rope, local_rope = _ropes(reader)
        attention_bias = reader.flag("attention_bias") and family in ("llama", "qwen3", "gemma3_text")
        return cls(
            model_type=family,
            vocab_size=reader.integer("vocab_size"),
            hidden=hidden,
            layers=reader.integer("num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ffn=reader.integer("intermediate_size"),
            norm_eps=reader.number("rms_norm_eps", 1e-6),
            activation=_activation(reader),
            tied=reader.flag("tie_word_embeddings"),
            max_context=_max_context(reader, rope),
            rope=rope,
            attn_scale=reader.number("query_pre_attn_scalar", head_dim) ** -0.5 if gemma else head_dim**-0.5,
            windows=_windows(reader),
            local_rope=local_rope,
            qkv_bias=attention_bias or family == "qwen2",
            o_bias=attention_bias,
            qk_norm=family in ("qwen3", "gemma3_text"),
            sandwich=gemma,
            norm_offset=1.0 if gemma else 0.0,
            embed_scale=math.sqrt(hidden) if gemma else 1.0,
            eos_ids=reader.token_ids("eos_token_id"),
            bos_id=next(iter(reader.token_ids("bos_token_id")), None),
        )

    def rope_of(self, layer: int) -> RopeSpec:
        """The rotary settings of a layer."""
        local = self.local_rope is not None and self.windows[layer] is not None
        return self.local_rope if local and self.local_rope is not None else self.rope

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Canonical name -> shape of every tensor a checkpoint must hold. Matrices are [outputs, inputs]."""
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab_size, self.hidden)}
        layer = self._layer_tensors()
        for i in range(self.layers):
            shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
        shapes["final_norm"] = (self.hidden,)
        if not self.tied:
            shapes["lm_head"] = (self.vocab_size, self.hidden)
        return shapes

    def _layer_tensors(self) -> dict[str, tuple[int, ...]]:
        d, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"attn_norm": (d,), "q": (q, d), "k": (kv, d), "v": (kv, d), "o": (d, q)}
        if self.qkv_bias:
            shapes |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
        if self.o_bias:
            shapes["o_bias"] = (d,)
        if self.qk_norm:
            shapes |= {"q_norm": (self.head_dim,), "k_norm": (self.head_dim,)}
        shapes |= {"mlp_norm": (d,), "gate": (self.ffn, d), "up": (self.ffn, d), "down": (d, self.ffn)}
        if self.sandwich:
            shapes |= {"post_attn_norm": (d,), "post_mlp_norm": (d,)}
        return shapes

    def parameters(self) -> int:
        """Number of weights, tied embeddings counted once."""
        return sum(math.prod(shape) for shape in self.expected_tensors().values())

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of keys and values per token: 2 * layers * kv_heads * head_dim * dtype_bytes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype_bytes


@dataclass(frozen=True)
class _Reader:
    """Typed access to a config whose family is known and whose unsupported settings are refused."""

    model_type: str
    values: Mapping[str, Any]

    @classmethod
    def open(cls, config: Mapping[str, Any]) -> _Reader:
        model_type = config.get("model_type")
        if model_type not in _CLASSES:
            raise ModelError(
                f"config.json: model_type {model_type!r} is not one this package runs ({', '.join(_CLASSES)})."
                f" {_ALTERNATIVES}; with vLLM installed, try the vllm engine."
            )
        for name in config.get("architectures") or ():
            if name not in _CLASSES[model_type]:
                raise ModelError(
                    f"config.json: architecture {name!r} is not a text generator of family {model_type!r} that this"
                    f" package runs ({', '.join(_CLASSES[model_type])}). {_ALTERNATIVES}."
                )
        values = dict(config)
        if model_type == "gemma3":
            model_type, values = "gemma3_text", values | dict(values.get("text_config") or {})
        given = {key: value for key, value in values.items() if value is not None}
        # Null is not absent: "sliding_window": null means no window, "num_key_value_heads": null one per head.
        defaults = {key: value for key, value in _DEFAULTS[model_type].items() if key not in values}
        reader = cls(model_type, defaults | given)
        for key, off in _MUST_BE_OFF.items():
            reader.require(key not in given or given[key] in off, key, "is not supported", given.get(key))
        return reader

    def require(self, ok: bool, key: str, problem: str, value: object = None) -> None:
        if not ok:
            shown = self.values.get(key) if value is None else value
            text = repr(shown)
            text = text if len(text) <= 80 else text[:77] + "..."
            raise ModelError(
                f"config.json of this {self.model_type} model: {key} = {text} {problem}. If the value is as published,"
                f" this package cannot run the model; {_ALTERNATIVES}."
            )

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key, default)
        self.require(
            isinstance(value, int) and not isinstance(value, bool) and value > 0, key, "must be an integer > 0"
        )
        return int(value)

    def number(self, key: str, default: float) -> float:
        value = self.values.get(key, default)
        ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
        self.require(ok, key, "must be a number > 0")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.values.get(key, False)
        self.require(isinstance(value, bool), key, "must be true or false")
        return bool(value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self.values.get(key, ())
        ids = tuple(value) if isinstance(value, list | tuple) else (value,)
        self.require(all(isinstance(i, int) and not isinstance(i, bool) for i in ids), key, "must hold token ids")
        return ids


def _activation(reader: _Reader) -> str:
    key = "hidden_activation" if reader.model_type == "gemma3_text" else "hidden_act"
    name = reader.values.get(key, "silu")
    reader.require(name in ("silu", "gelu_pytorch_tanh"), key, "is not silu or gelu_pytorch_tanh")
    return str(name)


def _max_context(reader: _Reader, rope: RopeSpec) -> int:
    stated = reader.integer("max_position_embeddings")
    return max(stated, int(rope.original_context * rope.factor)) if rope.kind == "yarn" else stated


def _windows(reader: _Reader) -> tuple[int | None, ...]:
    """Per layer the window or None, from sliding_window and whatever says which layers use it."""
    layers, family = reader.integer("num_hidden_layers"), reader.model_type
    unused = family == "llama" or (family in ("qwen2", "qwen3") and not reader.flag("use_sliding_window"))
    if unused or "sliding_window" not in reader.values:
        return (None,) * layers
    window = reader.integer("sliding_window")
    if family == "mistral":
        return (window,) * layers
    types = reader.values.get("layer_types") or _layer_types(reader, layers)
    known = isinstance(types, list) and len(types) == layers and set(types) <= {FULL, SLIDING}
    reader.require(known, "layer_types", f"must name {FULL} or {SLIDING} for each of {layers} layers", types)
    return tuple(window if kind == SLIDING else None for kind in types)


def _layer_types(reader: _Reader, layers: int) -> list[str]:
    if reader.model_type == "gemma3_text":
        every = reader.integer("sliding_window_pattern", 6)
        return [SLIDING if (i + 1) % every else FULL for i in range(layers)]
    first = reader.values.get("max_window_layers", 28)
    reader.require(isinstance(first, int), "max_window_layers", "must be an integer")
    return [SLIDING if i >= first else FULL for i in range(layers)]


def _ropes(reader: _Reader) -> tuple[RopeSpec, RopeSpec | None]:
    """Global and local settings from `rope_parameters` (version 5), or `rope_scaling` with `rope_theta` (before)."""
    key = "rope_scaling" if "rope_scaling" in reader.values else "rope_parameters"
    given = reader.values.get(key, {})
    reader.require(isinstance(given, dict), key, "must be an object")
    theta = reader.number("rope_theta", 10000.0)
    if FULL in given or SLIDING in given:
        local = _rope(reader, key, given.get(SLIDING) or {}, reader.number("rope_local_base_freq", 10000.0))
        everywhere = _rope(reader, key, given.get(FULL) or {}, theta)
        return everywhere, None if local == everywhere else local
    if reader.model_type == "gemma3_text":
        return _rope(reader, key, given, theta), RopeSpec(reader.number("rope_local_base_freq", 10000.0))
    return _rope(reader, key, given, theta), None


def _rope(reader: _Reader, key: str, given: Mapping[str, Any], theta: float) -> RopeSpec:
    values = {k: v for k, v in given.items() if v is not None}
    kind = values.pop("rope_type", values.pop("type", "default"))
    values.pop("type", None)
    reader.require(values.pop("partial_rotary_factor", 1) == 1, key, "rotates only a part of each head")
    theta = float(values.pop("rope_theta", theta))
    reader.require(kind in _ROPE_KEYS, key, f"has a kind of rotary scaling other than {', '.join(_ROPE_KEYS)}")
    extra = sorted(set(values) - _ROPE_KEYS[kind])
    reader.require(not extra, key, f"holds {', '.join(extra)}, which {kind} rotary scaling does not have")
    if kind == "default":
        return RopeSpec(theta)
    scaling = _Reader(reader.model_type, values)
    if kind == "linear":
        return RopeSpec(theta, kind, scaling.number("factor", math.nan))
    stated = values.get("original_max_position_embeddings", reader.integer("max_position_embeddings"))
    original = reader.integer("original_max_position_embeddings", stated)
    if kind == "llama3":
        low, high = scaling.number("low_freq_factor", math.nan), scaling.number("high_freq_factor", math.nan)
        return RopeSpec(theta, kind, scaling.number("factor", math.nan), original, low, high)
    return _yarn(reader, scaling, theta, original)


def _yarn(reader: _Reader, scaling: _Reader, theta: float, original: int) -> RopeSpec:
    """YaRN (Peng 2023): the attention factor defaults to 0.1 ln(factor) + 1."""
    factor = scaling.number("factor", reader.integer("max_position_embeddings") / original)

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention = temperature(1.0)
    if scaling.values.get("mscale") and scaling.values.get("mscale_all_dim"):
        attention = temperature(scaling.number("mscale", 1.0)) / temperature(scaling.number("mscale_all_dim", 1.0))
    return RopeSpec(
        theta,
        "yarn",
        factor,
        original,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        truncate=bool(scaling.values.get("truncate", True)),
        attention_factor=scaling.number("attention_factor", attention),
    )
