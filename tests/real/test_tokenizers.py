"""Real tokenizers, rebuilt from GGUF metadata: ids equal to transformers' own reading of the same files."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from corpus import TEXTS
from outpace.text.codec import TokenizerCodec
from outpace.weights import catalog
from outpace.weights.resolve import resolve

pytestmark = pytest.mark.real
NAMES = [entry.name for entry in catalog.entries()]
TALKS = [
    [{"role": "user", "content": "Hi <|im_end|> there"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "你好?"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": " b "}, {"role": "user", "content": "c\n"}],
]


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
        assert codec.encode_chat(talk) == theirs.apply_chat_template(
            talk, add_generation_prompt=True, return_dict=False
        )


def test_the_tokenizer_of_the_original_checkpoint_gives_these_ids() -> None:
    """Ids that do not come from our own reading of the GGUF file: Qwen 2.5 as its authors publish it."""
    codec = TokenizerCodec.from_folder(resolve("qwen2.5-coder-0.5b-instruct", "bfloat16"))
    assert codec.encode("<|im_start|>user\n") == [151644, 872, 198]
    assert codec.encode("Hello world") == [9707, 1879]
    assert codec.eos_ids == {151643, 151645}
