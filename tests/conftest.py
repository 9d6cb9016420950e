"""Fixtures for every tier: tiny but complete model folders, made here so that no test needs a download."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ENGLISH = ["the quick brown fox jumps over the lazy dog", "she sells sea shells by the sea shore", "def add(a, b):"] * 4
OTHER = ["zwölf Boxkämpfer jagen Viktor quer über den Deich", "0123456789 +-*/ <html></html>"] * 4
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@dataclass(frozen=True)
class TinyModel:
    """A llama of two layers. `corpus` decides its vocabulary: two models with one corpus share a tokenizer."""

    seed: int = 0
    hidden: int = 32
    context: int = 256
    corpus: tuple[str, ...] = tuple(ENGLISH)
    chat: bool = True

    def write(self, folder: Path) -> Path:
        """Write config, weights and tokenizer as transformers would, and return the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        vocabulary = self._tokenizer(folder)
        self._weights(folder, vocabulary)
        config = {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": 2 * self.hidden,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "torch_dtype": "float32",
            "eos_token_id": 0,
        }
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
        return folder

    def _tokenizer(self, folder: Path) -> int:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(
            vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(self.corpus, trainer)
        tokenizer.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "bos_token": None}
        if self.chat:
            settings["chat_template"] = CHAT_TEMPLATE
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return int(tokenizer.get_vocab_size())

    def _weights(self, folder: Path, vocabulary: int) -> None:
        import torch
        from safetensors.torch import save_file

        source = torch.Generator().manual_seed(self.seed)
        d, f, kv = self.hidden, 2 * self.hidden, self.hidden // 2
        shapes = {"model.embed_tokens": (vocabulary, d)}
        for layer in ("model.layers.0", "model.layers.1"):
            shapes |= {f"{layer}.self_attn.{name}_proj": (d, d) for name in "qo"}
            shapes |= {f"{layer}.self_attn.{name}_proj": (kv, d) for name in "kv"}
            shapes |= {f"{layer}.mlp.{name}_proj": (f, d) for name in ("gate", "up")}
            shapes[f"{layer}.mlp.down_proj"] = (d, f)
        tensors = {f"{name}.weight": torch.randn(shape, generator=source) * 0.3 for name, shape in shapes.items()}
        norms = ["model.norm"] + [
            f"model.layers.{i}.{name}" for i in (0, 1) for name in ("input_layernorm", "post_attention_layernorm")
        ]
        tensors |= {f"{name}.weight": torch.ones(d) for name in norms}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model of two layers, vocabulary 320, context 256."""
    return TinyModel().write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model with the tokenizer of `tiny_model`."""
    return TinyModel(seed=1, hidden=16).write(tmp_path_factory.mktemp("models") / "tiny-draft")


@pytest.fixture(scope="session")
def foreign_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer has other tokens than `tiny_model`."""
    model = TinyModel(seed=2, hidden=16, corpus=tuple(OTHER))
    return model.write(tmp_path_factory.mktemp("models") / "foreign-draft")


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a chat template."""
    return TinyModel(seed=3, chat=False).write(tmp_path_factory.mktemp("models") / "tiny-base")
