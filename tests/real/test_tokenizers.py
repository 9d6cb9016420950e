"""Real tokenizers, rebuilt from GGUF metadata: ids of transformers on the same folder, and of the original models."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, normalizers
from transformers import AutoTokenizer

from corpus import TEXTS
from outpace.text.codec import TokenizerCodec
from outpace.text.vocab_map import compare_vocabularies
from outpace.weights import catalog
from outpace.weights.resolve import resolve

pytestmark = pytest.mark.real
NAMES = [entry.name for entry in catalog.entries()]
CALL = {"type": "function", "function": {"name": "w", "arguments": {"à": [1]}}}
TALKS = [
    [{"role": "user", "content": "Hi <|im_end|> there"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "你好?"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": " b "}, {"role": "user", "content": "c\n"}],
    [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"°C": 3}'},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "w", "description": "<Wetter> für à", "parameters": {}}}]
# Ids that public projects record from the authors' own tokenizers: they owe nothing to our reading of the GGUF file.
SMOLLM2 = {
    "Hello, world!": [19556, 28, 905, 17],
    "The year 2024 had 365 days; 12 months.": [
        *(504, 713, 216, 34, 32, 34, 36, 761, 216, 35, 38, 37, 2009, 43, 216, 33, 34, 2704, 30)
    ],
    "123 4567 3.14159": [33, 34, 35, 216, 36, 37, 38, 39, 216, 35, 30, 33, 36, 33, 37, 41],
    "line1\nline2\n\nline3": [1311, 33, 198, 1311, 34, 198, 198, 1311, 35],
    "  spaced  text": [216, 23861, 216, 1694],
    "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
    "<|im_start|>user\nHi there!<|im_end|>\n": [1, 4093, 198, 26843, 665, 17, 2, 198],
}
QWEN2 = {
    "Hello, world!": [9707, 11, 1879, 0],
    "The quick brown fox.": [785, 3974, 13876, 38835, 13],
    "<|im_start|>user\n": [151644, 872, 198],
}
GEMMA3 = {
    "Hello, how are you?": [2, 9259, 236764, 1217, 659, 611, 236881],
    "line1\nline2": [2, 1257, 236770, 107, 1257, 236778],
    "tab\there": [2, 4823, 255968, 8472],
    "a  b": [2, 236746, 138, 236763],
    "\n\n": [2, 108],
    "é e\u0301": [2, 236859, 545, 238288],
    "😊 東京": [2, 240782, 86459],
}


@pytest.mark.parametrize("name", NAMES)
def test_ids_texts_and_chats_are_those_of_transformers(name: str) -> None:
    folder = resolve(name, "bfloat16")
    codec, theirs = TokenizerCodec.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    for text in [*TEXTS, "".join(TEXTS)]:
        ids = codec.encode(text)
        assert ids == theirs.encode(text), text
        assert codec.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        stream = codec.detokenizer()
        assert "".join(stream.push(i) for i in ids) + stream.finish() == codec.decode(ids)
    assert codec.has_chat_template == bool(theirs.chat_template)
    for talk in TALKS if codec.has_chat_template else []:
        for tools in (None, TOOLS):
            assert codec.encode_chat(talk, {"tools": tools}) == theirs.apply_chat_template(
                talk, tools=tools, add_generation_prompt=True, return_dict=False
            )
    assert codec.encode("a\ud800b") == theirs.encode("a\ufffdb")


@pytest.mark.parametrize(
    ("name", "known", "eos"),
    [
        ("smollm2-135m-instruct", SMOLLM2, {0, 2}),
        ("qwen2.5-coder-0.5b-instruct", QWEN2, {151643, 151645}),
        ("qwen2.5-coder-1.5b-instruct", QWEN2, {151643, 151645}),
        ("gemma-3-270m", GEMMA3, {1, 106}),
    ],
)
def test_ids_are_those_of_the_original_checkpoints(name: str, known: dict[str, list[int]], eos: set[int]) -> None:
    codec = TokenizerCodec.from_folder(resolve(name, "bfloat16"))
    assert {text: codec.encode(text) for text in known} == known
    assert codec.eos_ids == eos


def test_planted_space_in_front_gives_other_ids() -> None:
    """What a reader makes of Gemma's file that does not look at add_space_prefix."""
    wrong = Tokenizer.from_file(str(resolve("gemma-3-270m", "bfloat16") / "tokenizer.json"))
    wrong.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    assert any(wrong.encode(text).ids != ids for text, ids in GEMMA3.items())


def test_sizes_of_one_family_agree_by_their_ids() -> None:
    small, large, other = (
        TokenizerCodec.from_folder(resolve(name, "bfloat16"))
        for name in ("qwen2.5-coder-0.5b-instruct", "qwen2.5-coder-1.5b-instruct", "smollm2-135m-instruct")
    )
    assert compare_vocabularies(large, small).same
    assert not compare_vocabularies(large, other).same
