"""Token counts of a corpus, and which ids a draft vocabulary keeps."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import outpace.text.frequency as frequency
from conftest import TinyModel
from outpace.errors import ConfigError
from outpace.text.codec import TokenizerCodec
from outpace.text.frequency import count_tokens, frequent_ids, needed_ids

LINES = ["the quick brown fox\n", "\n", "    jumps over\n", "the lazy dog\n", "sea shells\n", "def add(a, b):\n"] * 20
SPECIALS = 3


@pytest.fixture(scope="module")
def codec(tiny_model: Path) -> TokenizerCodec:
    return TokenizerCodec.from_folder(tiny_model)


@pytest.fixture(scope="module")
def joining(tmp_path_factory: pytest.TempPathFactory) -> TokenizerCodec:
    """A tokenizer that joins line ends with each other and with the spaces after them."""
    model = TinyModel(corpus=("".join(LINES),) * 3)
    codec = TokenizerCodec.from_folder(model.write(tmp_path_factory.mktemp("models") / "joining"))
    assert len(codec.encode_continuation("fox\n\n    jumps")) < len(codec.encode_continuation("fox")) + 6
    return codec


def written(folder: Path, content: str | bytes, name: str = "corpus.txt") -> Path:
    path = folder / name
    path.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    return path


def expected(codec: TokenizerCodec, *texts: str) -> list[int]:
    found = Counter(i for text in texts for i in codec.encode_continuation(text))
    return [found[i] for i in range(codec.vocab_size)]


def test_a_known_text_is_counted_token_by_token(codec: TokenizerCodec, tmp_path: Path) -> None:
    text = "the quick the quick"
    counts = count_tokens(codec, written(tmp_path, text))
    assert counts.shape == (codec.vocab_size,)
    assert counts.tolist() == expected(codec, text)
    assert counts.sum() == len(codec.encode_continuation(text)) and counts.max() >= 2


def test_a_bos_of_the_model_is_not_counted(tiny_model: Path, tmp_path: Path) -> None:
    """A tokenizer that begins every text with <|im_start|>: counted, it would come first in every list."""
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    own = TokenizerCodec(tokenizer, frozenset({0}))
    assert own.encode("the")[0] == 1
    assert count_tokens(own, written(tmp_path, "the fox\nthe dog\n"), piece=1)[1] == 0


@pytest.mark.parametrize("piece", [10, 30, 100, 10_000])
def test_pieces_give_the_counts_of_the_whole(joining: TokenizerCodec, tmp_path: Path, piece: int) -> None:
    """Some lines are longer than a piece; blank and indented lines follow others."""
    text = "".join([*LINES, "a long line " * 30 + "\n", *LINES])
    assert count_tokens(joining, written(tmp_path, text), piece).tolist() == expected(joining, text)


def test_cuts_at_every_line_end_would_count_wrongly(
    joining: TokenizerCodec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frequency, "PATIENCE", 0)
    text = "".join(LINES)
    assert count_tokens(joining, written(tmp_path, text), 1).tolist() != expected(joining, text)


def test_long_texts_are_cut() -> None:
    pieces = list(frequency._pieces(iter(LINES), 40))
    assert "".join(pieces) == "".join(LINES) and len(pieces) > 10
    assert all(piece.endswith("\n") for piece in pieces)
    longest = max(map(len, LINES))
    assert max(map(len, pieces)) <= frequency.PATIENCE * 40 + longest


def test_text_without_a_clean_line_end_is_cut_all_the_same() -> None:
    """Paragraphs of one line with blank ones between: no line end stands between two other characters."""
    pieces = list(frequency._pieces(["word\n", "\n"] * 500, 40))
    assert "".join(pieces) == "word\n\n" * 500 and max(map(len, pieces)) <= frequency.PATIENCE * 40 + 5


def test_windows_line_ends_and_a_byte_order_mark_do_not_count(codec: TokenizerCodec, tmp_path: Path) -> None:
    counts = count_tokens(codec, written(tmp_path, b"\xef\xbb\xbfthe fox\r\nthe dog\r\n"))
    assert counts.tolist() == expected(codec, "the fox\nthe dog\n")


def test_jsonl_counts_strings_and_only_the_content_of_messages(codec: TokenizerCodec, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "the fox"}, {"role": "x", "content": [{"text": "sea"}]}]}
    lines = [json.dumps("brown"), json.dumps(chat), "", json.dumps({"n": 3, "text": "dog", "none": None})]
    counts = count_tokens(codec, written(tmp_path, "\n".join(lines) + "\n", "corpus.jsonl"))
    assert counts.tolist() == expected(codec, "brown", "the fox", "sea", "dog")


def test_the_most_counted_come_first_and_ties_by_id(codec: TokenizerCodec) -> None:
    needed = set(needed_ids(codec).tolist())
    free = [i for i in range(codec.vocab_size) if i not in needed]
    counts = np.zeros(codec.vocab_size, np.int64)
    counts[free[-1]], counts[free[-2]], counts[free[10]], counts[free[20]] = 9, 5, 5, 5
    for more, wanted in ((1, [-1]), (2, [-1, 10]), (3, [-1, 10, 20]), (4, [-1, 10, 20, -2]), (5, [-1, 10, 20, -2, 0])):
        ids = frequent_ids(codec, len(needed) + more, counts)
        assert ids.tolist() == sorted(needed | {free[at] for at in wanted})


def test_specials_ends_and_bytes_are_kept_whatever_the_corpus_says(codec: TokenizerCodec) -> None:
    needed = needed_ids(codec)
    assert len(needed) == 256 + SPECIALS
    assert set(needed.tolist()) >= codec.special_ids | codec.eos_ids
    assert {codec.token_bytes(int(i)) for i in needed} >= {bytes([value]) for value in range(256)}
    counts = np.full(codec.vocab_size, 1000, np.int64)
    counts[needed] = 0
    assert frequent_ids(codec, len(needed), counts).tolist() == needed.tolist()
    assert set(frequent_ids(codec, len(needed) + 7, counts).tolist()) > set(needed.tolist())


def test_an_end_without_a_token_is_no_id(codec: TokenizerCodec, tiny_model: Path, tmp_path: Path) -> None:
    for path in tiny_model.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 5000]}))
    assert needed_ids(TokenizerCodec.from_folder(tmp_path)).tolist() == needed_ids(codec).tolist()


def test_ids_without_a_token_come_last(tiny_model: Path, tmp_path: Path) -> None:
    for path in tiny_model.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    parsed = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    last = len(parsed["model"]["vocab"])
    parsed["model"]["vocab"]["zqzq"] = last + 4
    (tmp_path / "tokenizer.json").write_text(json.dumps(parsed), encoding="utf-8")
    gaps = TokenizerCodec.from_folder(tmp_path)
    assert gaps.vocab_size == last + 5
    assert frequent_ids(gaps, last + 1).tolist() == [*range(last), last + 4]


def test_the_default_takes_what_assistants_write_and_then_the_lowest_ids(tmp_path: Path) -> None:
    folder = TinyModel(corpus=tuple(["zq zqx zqxw zqxwv"] * 9 + ["```python\n"] * 3)).write(tmp_path / "model")
    codec = TokenizerCodec.from_folder(folder)
    needed = set(needed_ids(codec).tolist())
    free = [i for i in range(codec.vocab_size) if i not in needed]
    [fence] = [i for i in free if codec.token_bytes(i) == b"```"]
    assert fence > free[0] and b"zq" in codec.token_bytes(free[0])
    assert fence in frequent_ids(codec, len(needed) + 3)
    everything = [i for i in range(codec.vocab_size) if codec.token_bytes(i)]
    assert frequent_ids(codec, len(everything)).tolist() == everything
    zero = np.zeros(codec.vocab_size, np.int64)
    assert frequent_ids(codec, len(needed) + 1, zero).tolist() == sorted({*needed, free[0]})


def test_the_same_question_has_the_same_answer(codec: TokenizerCodec, tmp_path: Path) -> None:
    path = written(tmp_path, "".join(LINES))
    first, second = (frequent_ids(codec, 280, count_tokens(codec, path)) for _ in range(2))
    assert first.tolist() == second.tolist() and len(first) == 280
    assert (np.diff(first) > 0).all()


@pytest.mark.parametrize("size", [0, 258, 10_000])
def test_a_size_that_cannot_be_names_both_limits(codec: TokenizerCodec, size: int) -> None:
    with pytest.raises(ConfigError, match=rf"of {size} tokens.*at least 259.*{codec.vocab_size} in all"):
        frequent_ids(codec, size)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.txt", "", r"c\.txt holds no text"),
        ("c.jsonl", '{"n": 1}\n\n', r"c\.jsonl holds no text"),
        ("c.txt", b"fine\nna\xefve\n", r"c\.txt is not UTF-8: line 2 has the byte 0xef.*iconv"),
        ("c.txt", "wide".encode("utf-16"), r"not UTF-8: line 1 has the byte 0xff"),
        ("c.jsonl", '"fine"\nplain\n', r"Line 2 of the corpus .*c\.jsonl is not JSON.*\.txt"),
    ],
)
def test_what_is_wrong_with_a_corpus_is_said(
    codec: TokenizerCodec, tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        count_tokens(codec, written(tmp_path, content, name))


def test_a_corpus_must_be_a_file_that_can_be_read(
    codec: TokenizerCodec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.txt does not exist"):
        count_tokens(codec, tmp_path / "nowhere.txt")
    with pytest.raises(ConfigError, match=r"is a folder.*one UTF-8 text file"):
        count_tokens(codec, tmp_path)

    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = written(tmp_path, "text")
    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(ConfigError, match=r"cannot be read: Permission denied"):
        count_tokens(codec, path)
