"""Tokenizers from GGUF metadata say what the original tokenizer says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from corpus import TEXTS
from outpace.errors import ModelError
from outpace.text.codec import TokenizerCodec
from outpace.text.gguf_tokenizer import CONTROL, NORMAL, SPLITS, UNUSED, build_tokenizer_files

PREFIX = "tokenizer.ggml."
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def original(name: str) -> Tokenizer:
    """A byte-level tokenizer with the pre-tokenizer of this name, trained here."""
    split = SPLITS[name]
    tokenizer = Tokenizer(models.BPE(ignore_merges=split.ignore_merges))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.single_digits else []
    if split.regex:
        steps.append(pre_tokenizers.Split(Regex(split.regex), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.regex is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*TEXTS, "year 2026 1234 12345"] * 3, trainer)
    return tokenizer


def metadata(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    """What a GGUF converter writes."""
    parsed = json.loads(tokenizer.to_str())
    tokens = sorted(parsed["model"]["vocab"], key=parsed["model"]["vocab"].__getitem__)
    return {
        f"{PREFIX}model": "gpt2",
        f"{PREFIX}pre": pre,
        f"{PREFIX}tokens": tokens,
        f"{PREFIX}token_type": [CONTROL if token in SPECIAL else NORMAL for token in tokens],
        f"{PREFIX}merges": [" ".join(pair) for pair in parsed["model"]["merges"]],
        f"{PREFIX}eos_token_id": 2,
        f"{PREFIX}bos_token_id": 1,
        f"{PREFIX}add_bos_token": False,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }


def codec(values: dict[str, Any], folder: Path) -> TokenizerCodec:
    for name, text in build_tokenizer_files(values).items():
        (folder / name).write_text(text, encoding="utf-8")
    return TokenizerCodec.from_folder(folder)


@pytest.mark.parametrize("pre", SPLITS)
def test_ids_are_those_of_the_original(pre: str, tmp_path: Path) -> None:
    tokenizer = original(pre)
    ours = codec(metadata(tokenizer, pre), tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == tokenizer.encode(text, add_special_tokens=False).ids, text
    assert ours.eos_ids == {0, 2} and ours.special_ids == {0, 1, 2}
    assert ours.decode(ours.encode_chat([{"role": "user", "content": "hi"}])) == "hi"


@pytest.mark.parametrize(("pre", "wrong"), [("qwen2", "llama-bpe"), ("gpt-2", "smollm"), ("tekken", "qwen2")])
def test_planted_other_pre_tokenizer_is_caught(pre: str, wrong: str, tmp_path: Path) -> None:
    tokenizer = original(pre)
    ours = codec(metadata(tokenizer, wrong), tmp_path)
    assert any(ours.encode(text) != tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS)


@pytest.mark.parametrize(("value", "first"), [(True, [1]), (False, [])])
def test_bos_is_added_where_the_file_says_so(value: bool, first: list[int], tmp_path: Path) -> None:
    tokenizer = original("gpt-2")
    ours = codec(metadata(tokenizer, "gpt-2") | {f"{PREFIX}add_bos_token": value}, tmp_path)
    assert ours.encode("fox") == first + tokenizer.encode("fox", add_special_tokens=False).ids


def test_unused_ids_at_the_end_are_padding(tmp_path: Path) -> None:
    values = metadata(original("gpt-2"), "gpt-2")
    size = len(values[f"{PREFIX}tokens"])
    values[f"{PREFIX}tokens"] += [f"[PAD{i}]" for i in range(5)]
    values[f"{PREFIX}token_type"] += [UNUSED] * 5
    assert codec(values, tmp_path).vocab_size == size


def sentencepiece() -> dict[str, Any]:
    """Gemma's kind: scores in place of merges, bytes for what the vocabulary lacks."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    words = ["\u2581", "a", "b", "c", "ab", "bc", "abc", "\u2581a", "\u2581ab", "\u2581abc"]
    kinds = [2, CONTROL, CONTROL, *[6] * 256, *[NORMAL] * len(words)]
    scores = [0.0] * 259 + [-float(i) for i in (1, 2, 3, 4, 12, 11, 13, 14, 15, 16)]
    return {
        f"{PREFIX}model": "llama",
        f"{PREFIX}tokens": pieces + words,
        f"{PREFIX}token_type": kinds,
        f"{PREFIX}scores": scores,
        f"{PREFIX}bos_token_id": 1,
        f"{PREFIX}eos_token_id": 2,
        f"{PREFIX}unknown_token_id": 0,
    }


def test_sentencepiece_joins_the_best_scored_pair_first(tmp_path: Path) -> None:
    """ "bc" (-11) scores above "ab" (-12): "abc" is a + bc, then joined to abc."""
    values = sentencepiece()
    ours = codec(values | {f"{PREFIX}add_space_prefix": False}, tmp_path)
    tokens = values[f"{PREFIX}tokens"]
    assert [tokens[i] for i in ours.encode("abc")] == ["<s>", "abc"]
    assert [tokens[i] for i in ours.encode("ab bcé")] == ["<s>", "ab", "\u2581", "bc", "<0xC3>", "<0xA9>"]
    assert ours.decode(ours.encode("ab bcé")) == "ab bcé"


def test_sentencepiece_puts_a_space_in_front_unless_told(tmp_path: Path) -> None:
    ours = codec(sentencepiece(), tmp_path)
    assert [ours.token_text(i) for i in ours.encode("ab")] == ["<s>", " ab"]
    assert ours.decode(ours.encode("ab ab")) == "ab ab"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "rwkv"}, "kind 'rwkv'"),
        ({"tokens": []}, "has no tokenizer"),
        ({"token_type": [1]}, "1 token types"),
        ({"eos_token_id": 10**6}, "its eos token is 1000000"),
        ({"pre": "brand-new"}, "pre-tokenizer 'brand-new'"),
        ({"merges": []}, "without merges"),
        ({"merges": ["a b c"]}, "not two pieces"),
        ({"merges": ["nothere neither"]}, "do not fit its tokens"),
    ],
)
def test_damaged_metadata_is_refused(change: dict[str, Any], said: str) -> None:
    values = metadata(original("gpt-2"), "gpt-2") | {PREFIX + key: value for key, value in change.items()}
    with pytest.raises(ModelError, match=said):
        build_tokenizer_files(values)


def test_a_text_with_two_ids_is_refused() -> None:
    values = metadata(original("gpt-2"), "gpt-2")
    values[f"{PREFIX}tokens"][-1] = values[f"{PREFIX}tokens"][-2]
    with pytest.raises(ModelError, match="two ids"):
        build_tokenizer_files(values)


def test_too_few_scores_are_refused() -> None:
    with pytest.raises(ModelError, match="3 scores"):
        build_tokenizer_files(sentencepiece() | {f"{PREFIX}scores": [0.0, 1.0, 2.0]})
