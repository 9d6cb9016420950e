"""Text to token ids and back, from the tokenizer files of a checkpoint folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self

from tokenizers import Tokenizer

from outpace.errors import ModelError, Unsupported
from outpace.text.chat import ChatTemplate, Message, find_template, read_json
from outpace.text.detokenizer import Detokenizer
from outpace.text.token_bytes import bytes_reader

NO_OPTIONS: Mapping[str, Any] = {}
MARK = "\x02"  # a character that no vocabulary joins with others


class Codec(Protocol):
    """What the engine and the front ends know of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Ids are 0..vocab_size - 1. A model's logits may be wider: the rest is padding."""
        ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end an answer."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that are not shown as text."""
        ...

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with the model's own beginning (bos) if it has one. Spellings of special tokens become
        these tokens, as in transformers."""
        ...

    def encode_chat(self, messages: Sequence[Message], options: Mapping[str, Any] = NO_OPTIONS) -> list[int]:
        """Ids of a conversation, up to where the assistant speaks. `options` are further template variables."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a whole sequence, special tokens left out."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for, special tokens in their spelling; b"" for ids without a token."""
        ...

    def token_text(self, token: int) -> str:
        """`token_bytes` as text, U+FFFD for what is no UTF-8 by itself."""
        ...

    def detokenizer(self) -> Detokenizer:
        """A fresh one, which continues a text: unlike `decode`, it keeps a space at the start."""
        ...


class TokenizerCodec:
    """Codec over a `tokenizers` Tokenizer (tokenizer.json)."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: frozenset[int], template: ChatTemplate | None = None) -> None:
        self._tokenizer, self._template = tokenizer, template
        self._bytes_of, self._strips = bytes_reader(tokenizer)
        self.eos_ids = eos_ids
        self.special_ids = frozenset(i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special)

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Read tokenizer.json and what stands beside it (tokenizer_config.json, generation_config.json, config.json,
        chat_template.jinja). ModelError if it is missing, damaged, or of a kind that cannot be decoded by bytes."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(
                f"{folder} has no tokenizer.json. Outpace needs the 'fast' tokenizer file; with transformers,"
                " AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) writes it."
            )
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"Cannot read {path}: {error}. Download the file again.") from error
        settings = read_json(folder / "tokenizer_config.json")
        names = {name: _spelling(value) for name, value in settings.items() if name.endswith("_token")}
        special = {name: text for name, text in names.items() if text is not None}
        eos = _eos_ids(folder, tokenizer, special.get("eos_token"))
        found = find_template(folder, settings)
        template = ChatTemplate(found[0], special, found[1]) if found else None
        return cls(tokenizer, eos, template)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(_well_formed(text)).ids
        return ids

    def encode_continuation(self, text: str) -> list[int]:
        """Ids of a text that continues another one: no bos, and no space put before it."""
        if not self._strips:
            return list(self._tokenizer.encode(_well_formed(text), add_special_tokens=False).ids)
        # Such tokenizers write a space before every text: before this mark, which is then cut off with it.
        marked = self._tokenizer.encode(MARK + _well_formed(text), add_special_tokens=False).ids
        head = self._tokenizer.encode(MARK, add_special_tokens=False).ids
        return list(marked[len(head) :])

    def encode_chat(self, messages: Sequence[Message], options: Mapping[str, Any] = NO_OPTIONS) -> list[int]:
        if self._template is None:
            raise Unsupported(
                "This model has no chat template, so it cannot hold a conversation: it continues text. Use `generate`"
                " with a plain prompt, or take the instruct version of the model."
            )
        text = self._template.render(messages, options)
        # The template writes bos itself where it is wanted.
        ids: list[int] = self._tokenizer.encode(_well_formed(text), add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        shown = b"".join(self._shown(token) for token in ids).decode("utf-8", "replace")
        return shown.removeprefix(" ") if self._strips else shown

    def token_bytes(self, token: int) -> bytes:
        return self._bytes_of(token)

    def token_text(self, token: int) -> str:
        return self._bytes_of(token).decode("utf-8", "replace")

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self._shown)

    def _shown(self, token: int) -> bytes:
        return b"" if token in self.special_ids else self._bytes_of(token)


def _well_formed(text: str) -> str:
    """Lone surrogates (from escaped JSON or odd terminals) are no text: they become U+FFFD instead of an exception."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _spelling(value: object) -> str | None:
    """A special token in tokenizer_config.json is a text, or an object around it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _eos_ids(folder: Path, tokenizer: Tokenizer, eos_token: str | None) -> frozenset[int]:
    """generation_config.json says what ends an answer, config.json where there is none; the tokenizer's own eos too."""
    found = read_json(folder / "generation_config.json").get("eos_token_id")
    if found is None:
        found = read_json(folder / "config.json").get("eos_token_id")
    ids = {int(i) for i in (found if isinstance(found, list) else [found]) if i is not None}
    own = tokenizer.token_to_id(eos_token) if eos_token else None
    return frozenset(ids if own is None else ids | {own})
