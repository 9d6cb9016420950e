"""Tokenizers from GGUF metadata say what the original tokenizer says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from corpus import TEXTS
from outpace.errors import ModelError
from outpace.text.codec import TokenizerCodec
from outpace.text.gguf_tokenizer import CONTROL, NORMAL, SPLITS, UNUSED, USER_DEFINED, build_tokenizer_files

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


# What the original tokenizers make of one text, written down piece by piece.
SAMPLE = "I'LL see  you 12345\n\n in_fooBar नमस्ते//\n"
PIECES = {
    "gpt-2": "I|'|LL| see| | you| 12345|\n\n| in|_|fooBar| नमस|्|त|े//|\n",
    "smollm": "I|'|LL| see| | you| |1|2|3|4|5|\n\n| in|_|fooBar| नमस|्|त|े//|\n",
    "qwen2": "I|'LL| see| | you| |1|2|3|4|5|\n\n| in|_fooBar| नमस|्त|े//\n",
    "qwen35": "I|'LL| see| | you| |1|2|3|4|5|\n\n| in|_fooBar| नमस्ते|//\n",
    "llama-bpe": "I|'LL| see| | you| |123|45|\n\n| in|_fooBar| नमस|्त|े//\n",
    "tekken": "I|'LL| see| | you| |1|2|3|4|5|\n\n| in|_foo|Bar| नमस्ते|//\n",
    "gpt-4o": "I'LL| see| | you| |123|45|\n\n| in|_foo|Bar| नमस्ते|//\n",
}


def pieces(pre: str) -> list[str]:
    parsed = Tokenizer.from_str(build_tokenizer_files(metadata(original("gpt-2"), pre))["tokenizer.json"])
    return [SAMPLE[a:b] for _, (a, b) in parsed.pre_tokenizer.pre_tokenize_str(SAMPLE)]


@pytest.mark.parametrize("pre", PIECES)
def test_text_is_cut_as_the_original_cuts_it(pre: str) -> None:
    assert pieces(pre) == PIECES[pre].split("|")


def test_every_kind_of_cut_has_its_sample() -> None:
    assert {(SPLITS[pre].regex, SPLITS[pre].single_digits) for pre in PIECES} == {
        (split.regex, split.single_digits) for split in SPLITS.values()
    }
    assert SPLITS["qwen2"].regex == PRETOKENIZE_REGEX


@pytest.mark.parametrize(("value", "first"), [(True, [1]), (False, [])])
def test_bos_is_added_where_the_file_says_so(value: bool, first: list[int], tmp_path: Path) -> None:
    tokenizer = original("gpt-2")
    ours = codec(metadata(tokenizer, "gpt-2") | {f"{PREFIX}add_bos_token": value}, tmp_path)
    assert ours.encode("fox") == first + tokenizer.encode("fox", add_special_tokens=False).ids


@pytest.mark.parametrize(("pre", "whole"), [("llama-bpe", True), ("tekken", True), ("qwen2", False)])
def test_words_no_merge_leads_to_count_where_the_original_has_them(pre: str, whole: bool, tmp_path: Path) -> None:
    values = metadata(original(pre), pre)
    values[f"{PREFIX}tokens"].append("xyzzyx")
    values[f"{PREFIX}token_type"].append(NORMAL)
    ours = codec(values, tmp_path)
    assert (ours.encode("xyzzyx")[-1] == ours.vocab_size - 1) == whole


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


def test_words_of_the_user_are_matched_whole(tmp_path: Path) -> None:
    """User-defined tokens are found in plain text and shown; llama.cpp writes their visible spaces as spaces."""
    values = sentencepiece() | {f"{PREFIX}add_space_prefix": False, f"{PREFIX}add_bos_token": False}
    for token in ("  ", "   ", "<tool>"):
        values[f"{PREFIX}tokens"].append(token)
        values[f"{PREFIX}token_type"].append(USER_DEFINED)
        values[f"{PREFIX}scores"].append(-1000.0)
    ours = codec(values, tmp_path)
    size = ours.vocab_size
    two, three, tool = range(size - 3, size)
    assert ours.encode("a  b<tool>") == [260, two, 261, tool]
    assert ours.decode(ours.encode("a  b<tool>")) == "a  b<tool>" and not {two, three, tool} & ours.special_ids
    # Runs are joined pair by pair, like all pieces: five spaces are 2 + 3, not the longest token first.
    assert ours.encode("a     b") == [260, two, three, 261]


def test_runs_of_spaces_in_a_byte_level_vocabulary_stay_spaces(tmp_path: Path) -> None:
    values = metadata(original("gpt-2"), "gpt-2")
    values[f"{PREFIX}tokens"].append("    ")
    values[f"{PREFIX}token_type"].append(USER_DEFINED)
    ours = codec(values, tmp_path)
    assert ours.encode("fox    fox")[1:].count(ours.vocab_size - 1) == 1
    assert ours.decode(ours.encode("fox    fox")) == "fox    fox"


def best_pair_first(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's way: join the neighbours with the best-scored result, the leftmost of equals, until none fit."""
    parts = list(text)
    while fits := [i for i in range(len(parts) - 1) if parts[i] + parts[i + 1] in scores]:
        at = max(fits, key=lambda i: (scores[parts[i] + parts[i + 1]], -i))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


@st.composite
def vocabularies(draw: st.DrawFn) -> dict[str, float]:
    """Pieces over a, b, c, each the join of two others in one way only, with scores all different."""
    known = ["a", "b", "c"]
    for _ in range(draw(st.integers(1, 8))):
        new = draw(st.sampled_from(known)) + draw(st.sampled_from(known))
        grown = [*known, new]
        ways = [sum(p[:i] in grown and p[i:] in grown for i in range(1, len(p))) for p in grown]
        if new not in known and max(ways) == 1:
            known = grown
    order = draw(st.permutations(range(len(known))))
    return {piece: -float(place) for piece, place in zip(known, order, strict=True)}


def scored(pieces: dict[str, float]) -> dict[str, Any]:
    return {
        f"{PREFIX}model": "llama",
        f"{PREFIX}tokens": list(pieces),
        f"{PREFIX}scores": list(pieces.values()),
        f"{PREFIX}add_space_prefix": False,
    }


def spelled(values: dict[str, Any], text: str) -> list[str]:
    return list(Tokenizer.from_str(build_tokenizer_files(values)["tokenizer.json"]).encode(text).tokens)


@given(vocabularies(), st.text("abc", max_size=12))
def test_scores_join_as_sentencepiece_does(pieces: dict[str, float], text: str) -> None:
    assert spelled(scored(pieces), text) == best_pair_first(text, pieces)


def test_planted_merging_in_order_of_ids_is_caught() -> None:
    pieces = {"a": -1.0, "b": -2.0, "c": -3.0, "ab": -12.0, "bc": -11.0}
    by_id = scored(pieces) | {f"{PREFIX}merges": ["a b", "b c"]}
    assert spelled(scored(pieces), "abc") == best_pair_first("abc", pieces) == ["a", "bc"]
    assert spelled(by_id, "abc") == ["ab", "c"]


def test_control_words_never_arise_from_plain_pieces(tmp_path: Path) -> None:
    """Merges make no special token: only its spelling, matched whole, does."""
    values = scored({"a": -1.0, "b": -2.0, "ab": -3.0, "c": -4.0, "abc": -5.0})
    kinds = [NORMAL, NORMAL, CONTROL, NORMAL, NORMAL]
    ours = codec(values | {f"{PREFIX}token_type": kinds}, tmp_path)
    assert ours.encode("abb") == [2, 1] and ours.special_ids == {2}
    merges = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))["model"]["merges"]
    assert merges == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "rwkv"}, "kind 'rwkv'"),
        ({"tokens": []}, "has no tokenizer"),
        ({"token_type": [1]}, "1 token types"),
        ({"eos_token_id": 10**6}, "its eos token is 1000000"),
        ({"pre": "brand-new"}, "pre-tokenizer 'brand-new'"),
        ({"pre": "default"}, "pre-tokenizer 'default'"),
        ({"bos_token_id": -1}, "its bos token is -1"),
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


def test_a_file_that_names_no_pre_tokenizer_is_refused() -> None:
    values = metadata(original("gpt-2"), "gpt-2")
    del values[f"{PREFIX}pre"]
    with pytest.raises(ModelError, match="pre-tokenizer 'default'"):
        build_tokenizer_files(values)


def test_end_of_turn_tokens_end_an_answer_whatever_eos_says(tmp_path: Path) -> None:
    values = metadata(original("qwen2"), "qwen2") | {f"{PREFIX}eos_token_id": 0, f"{PREFIX}eot_token_id": 1}
    assert codec(values, tmp_path).eos_ids == {0, 1, 2}


def test_too_few_scores_are_refused() -> None:
    with pytest.raises(ModelError, match="3 scores"):
        build_tokenizer_files(sentencepiece() | {f"{PREFIX}scores": [0.0, 1.0, 2.0]})
