"""Whether two tokenizers speak the same ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from outpace.text.codec import TokenizerCodec
from outpace.text.vocab_map import compare_vocabularies


def changed(folder: Path, to: Path, change) -> TokenizerCodec:  # type: ignore[no-untyped-def]
    """The tokenizer of `folder` after `change(parsed tokenizer.json)`."""
    to.mkdir()
    for path in folder.glob("*.json"):
        (to / path.name).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    parsed = json.loads((to / "tokenizer.json").read_text(encoding="utf-8"))
    change(parsed)
    (to / "tokenizer.json").write_text(json.dumps(parsed), encoding="utf-8")
    return TokenizerCodec.from_folder(to)


def test_models_of_one_family_agree(tiny_model: Path, tiny_draft: Path) -> None:
    verdict = compare_vocabularies(TokenizerCodec.from_folder(tiny_model), TokenizerCodec.from_folder(tiny_draft))
    assert verdict.same and verdict.differing == 0 and "agree" in str(verdict)


def test_25_padding_of_the_output_layer_is_no_difference(tiny_model: Path, tmp_path: Path) -> None:
    """One tokenizer, embeddings of 512 and 528 rows."""
    codecs = [changed(tiny_model, tmp_path / str(size), lambda parsed: None) for size in (512, 528)]
    for codec, size in zip(codecs, (512, 528), strict=True):
        path = tmp_path / str(size) / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": size}))
        assert codec.vocab_size == TokenizerCodec.from_folder(path.parent).vocab_size < 512
    verdict = compare_vocabularies(*codecs)
    assert verdict.same and verdict.sizes[0] == verdict.sizes[1] == codecs[0].vocab_size


def test_one_other_ordinary_token_is_a_difference(tiny_model: Path, tmp_path: Path) -> None:
    def rename(parsed: dict) -> None:
        vocab = parsed["model"]["vocab"]
        lost = next(token for token, i in vocab.items() if i == 310)
        parsed["model"]["vocab"] = {token if i != 310 else "zqzq": i for token, i in vocab.items()}
        parsed["model"]["merges"] = [pair for pair in parsed["model"]["merges"] if lost not in ("".join(pair), *pair)]

    target, draft = TokenizerCodec.from_folder(tiny_model), changed(tiny_model, tmp_path / "x", rename)
    verdict = compare_vocabularies(target, draft)
    assert not verdict.same and verdict.differing == 1 and verdict.sizes[0] == verdict.sizes[1]
    assert "first is 310" in verdict.text and "'zqzq'" in verdict.text


def test_spelling_does_not_matter_where_the_bytes_are_equal(tmp_path: Path) -> None:
    """A byte-level and a SentencePiece-style tokenizer that give every id the same bytes."""
    codecs = []
    for name, space, decoder in (("bytes", "Ġ", decoders.ByteLevel()), ("pieces", "▁", decoders.Metaspace())):
        tokenizer = Tokenizer(models.BPE({"a": 0, f"{space}a": 1, space: 2}, [(space, "a")]))
        tokenizer.decoder = decoder
        (tmp_path / name).mkdir()
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
        codecs.append(TokenizerCodec.from_folder(tmp_path / name))
    assert compare_vocabularies(*codecs).same


def test_another_tokenizer_is_named_with_its_first_difference(tiny_model: Path, foreign_draft: Path) -> None:
    target, draft = (TokenizerCodec.from_folder(folder) for folder in (tiny_model, foreign_draft))
    verdict = compare_vocabularies(target, draft)
    assert not verdict.same and verdict.differing > 10
    first = next(i for i in range(400) if target.token_bytes(i) != draft.token_bytes(i))
    assert f"first is {first}" in verdict.text and repr(target.token_text(first)) in verdict.text


def test_one_swapped_pair_is_enough(tiny_model: Path, tmp_path: Path) -> None:
    """Equal sizes and equal sets of tokens, but two ids exchanged: sizes and names would not show it."""

    def swap(parsed: dict) -> None:
        vocab = parsed["model"]["vocab"]
        a, b = (token for token, i in vocab.items() if i in (300, 301))
        vocab[a], vocab[b] = vocab[b], vocab[a]

    target, draft = TokenizerCodec.from_folder(tiny_model), changed(tiny_model, tmp_path / "x", swap)
    verdict = compare_vocabularies(target, draft)
    assert not verdict.same and verdict.differing == 2 and verdict.sizes[0] == verdict.sizes[1]
    # What a comparison of the sets of tokens would see:
    tokens = [{codec.token_bytes(i) for i in range(codec.vocab_size)} for codec in (target, draft)]
    assert tokens[0] == tokens[1]


def test_special_tokens_may_differ(tiny_model: Path, tmp_path: Path) -> None:
    def rename_and_add(parsed: dict) -> None:
        parsed["added_tokens"][1]["content"] = "<|user|>"
        parsed["model"]["vocab"] = {
            t.replace("<|im_start|>", "<|user|>"): i for t, i in parsed["model"]["vocab"].items()
        }
        extra = dict(parsed["added_tokens"][0], id=len(parsed["model"]["vocab"]), content="<|tool|>")
        parsed["added_tokens"].append(extra)

    other = changed(tiny_model, tmp_path / "x", rename_and_add)
    verdict = compare_vocabularies(TokenizerCodec.from_folder(tiny_model), other)
    assert verdict.same and verdict.sizes[1] == verdict.sizes[0] + 1
    assert f"agree on all {verdict.sizes[0] - 1} tokens. 2 special tokens differ" in verdict.text


@pytest.mark.parametrize("flip", [False, True])
def test_an_ordinary_token_that_only_one_side_has_counts(tiny_model: Path, tmp_path: Path, flip: bool) -> None:
    def add(parsed: dict) -> None:
        parsed["model"]["vocab"]["zqzq"] = len(parsed["model"]["vocab"])

    pair = [TokenizerCodec.from_folder(tiny_model), changed(tiny_model, tmp_path / "x", add)]
    verdict = compare_vocabularies(*(reversed(pair) if flip else pair))
    assert not verdict.same and verdict.differing == 1 and "nothing" in verdict.text
