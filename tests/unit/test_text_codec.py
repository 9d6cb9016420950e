"""Ids and texts equal to transformers' on small tokenizers of every kind; damaged folders are refused."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from corpus import TEXTS
from outpace.errors import ModelError
from outpace.text.codec import TokenizerCodec

SPECIAL = ["<unk>", "<s>", "</s>"]
EOS = {
    "__type": "AddedToken",
    "content": "</s>",
    "lstrip": False,
    "normalized": False,
    "rstrip": False,
    "special": True,
}
BYTES = [f"<0x{i:02X}>" for i in range(256)]


def byte_level(space: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def sentencepiece(prefix: bool) -> Tokenizer:
    """Llama 2's kind: visible spaces, single bytes for unknown characters."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    replace = normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace]) if prefix else replace
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=[*SPECIAL, *BYTES], limit_alphabet=60, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS[:2] * 5, trainer)
    parsed = json.loads(tokenizer.to_str())
    parsed["added_tokens"] = parsed["added_tokens"][:3]  # bytes are ordinary tokens, not matched in the text
    tokenizer = Tokenizer.from_str(json.dumps(parsed))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def metaspace(prepend: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend)
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


KINDS = {
    "byte level": lambda: byte_level(False),
    "byte level, space in front": lambda: byte_level(True),
    "sentencepiece": lambda: sentencepiece(True),
    "sentencepiece, no space in front": lambda: sentencepiece(False),
    "metaspace": lambda: metaspace("always"),
    "metaspace, no space in front": lambda: metaspace("never"),
}
LOSSLESS = [kind for kind in KINDS if not kind.startswith("metaspace")]  # the others lack characters


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: write(KINDS[kind](), tmp_path_factory.mktemp("tokenizer")) for kind in KINDS}


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    return folders[request.param]


def write(tokenizer: Tokenizer, path: Path) -> Path:
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": EOS}
    settings |= {"unk_token": "<unk>", "clean_up_tokenization_spaces": False}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def test_ids_and_text_are_those_of_transformers(folder: Path) -> None:
    codec, theirs = TokenizerCodec.from_folder(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    for text in [*TEXTS, "".join(TEXTS)]:
        ids = codec.encode(text)
        assert ids == theirs.encode(text), text
        assert codec.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text


# Special tokens are not shown, and a visible space is a space.
PLAIN = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=20).filter(
    lambda text: not any(token in text for token in SPECIAL)
)


@given(PLAIN)
@example(" x")
@example("  \n\t x  ")
def test_text_survives_the_way_to_ids_and_back(folders: dict[str, Path], text: str) -> None:
    for kind in LOSSLESS:
        codec = codec_of(folders[kind])
        # A tokenizer that puts a space in front of every text shows it, unless its decoder takes it away again.
        front = " " if kind == "byte level, space in front" and text and not text.startswith(" ") else ""
        assert codec.decode(codec.encode(text)) == front + text, kind


codec_of = lru_cache(TokenizerCodec.from_folder)


def test_planted_joining_of_single_tokens_is_caught(folders: dict[str, Path]) -> None:
    """Decoding each token by itself, as `tokenizers` does it, breaks characters or loses spaces in every kind."""
    for kind in LOSSLESS:
        codec, theirs = codec_of(folders[kind]), PreTrainedTokenizerFast.from_pretrained(folders[kind])
        ids = codec.encode("fox jumps 你好")
        assert "".join(theirs.decode([i], skip_special_tokens=True) for i in ids) != codec.decode(ids)


def test_the_detokenizer_continues_a_text(folder: Path) -> None:
    """Unlike `decode`, which reads a whole text, it keeps the space before the first word."""
    codec = TokenizerCodec.from_folder(folder)
    ids = [i for i in codec.encode("fox jumps over 你好") if i not in codec.special_ids]
    stream = codec.detokenizer()
    text = "".join(stream.push(i) for i in ids) + stream.finish()
    assert text.removeprefix(" ") == codec.decode(ids).removeprefix(" ")
    assert text == b"".join(codec.token_bytes(i) for i in ids).decode("utf-8", "replace")


def test_special_tokens_are_found_in_text_and_not_shown(folder: Path) -> None:
    codec = TokenizerCodec.from_folder(folder)
    ids = codec.encode("a</s>b")
    assert 2 in ids and "</s>" not in codec.decode(ids)
    assert codec.token_text(2) == "</s>" and codec.special_ids >= {0, 1, 2}
    assert codec.token_bytes(10**6) == b""


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("a\ud800b", "a\ufffdb"),
        ("\udfff", "\ufffd"),
        ("\ud800\ud83d\ude00", "\ufffd😀"),
        ("\ufeffx\ud800", "\ufeffx\ufffd"),
        ("\ud83d\ude00", "😀"),
    ],
)
def test_lone_surrogates_become_the_replacement_character(text: str, same: str, folder: Path) -> None:
    codec = TokenizerCodec.from_folder(folder)
    assert codec.encode(text) == codec.encode(same)


def test_added_tokens_that_are_plain_text_are_shown(folders: dict[str, Path], tmp_path: Path) -> None:
    """Also where their characters are not in the byte alphabet."""
    tokenizer = Tokenizer.from_file(str(folders["byte level"] / "tokenizer.json"))
    tokenizer.add_tokens(["<think>", "空 白"])
    codec = TokenizerCodec.from_folder(write(tokenizer, tmp_path))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ids = codec.encode("a<think>b空 白c")
    assert ids == theirs.encode("a<think>b空 白c") and max(ids) == codec.vocab_size - 1
    assert codec.decode(ids) == "a<think>b空 白c" == theirs.decode(ids)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, {2}),
        ({"config.json": {"eos_token_id": 5}}, {2, 5}),
        ({"config.json": {"eos_token_id": 5}, "generation_config.json": {"eos_token_id": [7, 8]}}, {2, 7, 8}),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": None}}, {2}),
    ],
)
def test_what_ends_an_answer(files: dict, expected: set[int], folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert TokenizerCodec.from_folder(tmp_path).eos_ids == expected


def test_a_missing_tokenizer_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json.*save_pretrained"):
        TokenizerCodec.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer_config.json", "{"),
        ("generation_config.json", "["),
        ("chat_template.json", "{'"),
    ],
)
def test_damaged_files_are_named(name: str, content: str, tiny_model: Path, tmp_path: Path) -> None:
    for path in tiny_model.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        TokenizerCodec.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        (decoders.WordPiece(), r"decoder \(WordPiece\)"),
        (decoders.Sequence([decoders.Replace("_", " "), decoders.Fuse()]), r"decoder \(Replace, Fuse\)"),
        (None, r"decoder \(none\)"),
    ],
)
def test_tokenizers_that_cannot_be_streamed_are_refused(decoder: Any, named: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match=named):
        TokenizerCodec.from_folder(tmp_path)
