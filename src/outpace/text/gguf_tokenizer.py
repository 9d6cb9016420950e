"""Tokenizer files from the metadata of a GGUF file.

A GGUF file holds a vocabulary, its token types, merges or scores, and the name of a pre-tokenizer, under
`tokenizer.ggml.*` (GGUF specification, "Tokenizer"). What the name means is fixed by llama.cpp; here it becomes the
equivalent `tokenizer.json`, spelled as the original model has it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from outpace.errors import ModelError
from outpace.text.token_bytes import SPACE

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5

# Control tokens that end an answer whatever the file names as its eos. llama.cpp stops on them too.
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")

_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = f"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*" + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL
_GPT4O = (
    f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL
)


@dataclass(frozen=True)
class _Split:
    """How a byte-level vocabulary cuts text before merging. regex None: GPT-2's own pattern."""

    regex: str | None = None
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


_GPT2 = _Split()
_DIGITS = _Split(single_digits=True)
_QWEN = _Split(_QWEN2, nfc=True)
_LLAMA = _Split(_LLAMA3, ignore_merges=True, adds_bos=True)
SPLITS: Mapping[str, _Split] = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "olmo": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "codeshell": _DIGITS,
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "qwen35": _Split(_QWEN35, nfc=True),
    "llama-bpe": _LLAMA,
    "llama-v3": _LLAMA,
    "llama3": _LLAMA,
    "tekken": _Split(_TEKKEN, ignore_merges=True, adds_bos=True),
    "gpt-4o": _Split(_GPT4O),
    "llama4": _Split(_GPT4O),
}


@dataclass(frozen=True)
class _Vocabulary:
    """Token texts by id, their GGUF types, and the ids with a role ("bos", "eos", "eot", "unknown", "padding")."""

    tokens: list[str]
    types: list[int]
    roles: Mapping[str, int]

    def ids(self) -> dict[str, int]:
        """Text -> id. Raises ModelError for a text used twice: one of the two ids could never be read back."""
        ids: dict[str, int] = {}
        for i, token in enumerate(self.tokens):
            if ids.setdefault(token, i) != i:
                raise ModelError(
                    f"The tokenizer in this GGUF file gives {token!r} two ids, {ids[token]} and {i}, so text cannot be"
                    " encoded reliably. Convert the model again with a current llama.cpp, or use its safetensors."
                )
        return ids

    def text(self, role: str) -> str | None:
        """The token with this role, None if the file names none."""
        index = self.roles.get(role)
        return None if index is None else self.tokens[index]

    def added(self) -> list[AddedToken]:
        """Tokens matched whole in the text: control ones (special) and user-defined ones, in id order."""
        named = set(self.roles.values())
        return [
            AddedToken(token, special=kind != USER_DEFINED, normalized=False)
            for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in (CONTROL, USER_DEFINED) or i in named
        ]


def build_tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, str]:
    """File name -> JSON text: tokenizer.json, tokenizer_config.json and generation_config.json.

    `metadata` holds the GGUF keys with plain Python values. The files load in `tokenizers` and in transformers.
    Raises ModelError for a missing or damaged vocabulary and for a kind of tokenizer this package does not know.
    """
    kind = metadata.get("tokenizer.ggml.model")
    vocabulary = _read_vocabulary(metadata)
    if kind == "gpt2":
        split = _split_for(metadata)
        tokenizer, adds_bos = _byte_level(vocabulary, _merges(metadata), split), split.adds_bos
    elif kind == "llama":
        vocabulary = replace(vocabulary, tokens=_respelled(vocabulary.tokens, vocabulary.types))
        tokenizer, adds_bos = _sentencepiece(vocabulary, metadata), True
    else:
        raise ModelError(
            f"This GGUF file has a tokenizer of kind {kind!r}, which Outpace cannot read; it knows 'gpt2' (byte-level"
            " BPE) and 'llama' (SentencePiece BPE). Use the model's safetensors folder with its tokenizer.json instead."
        )
    tokenizer.add_tokens(vocabulary.added())
    adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)) and "bos" in vocabulary.roles
    if adds_bos:
        bos = str(vocabulary.text("bos"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos}:0 $A:0",
            pair=f"{bos}:0 $A:0 {bos}:1 $B:1",
            special_tokens=[(bos, vocabulary.roles["bos"])],
        )
    return {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": _dump(_tokenizer_config(vocabulary, metadata, adds_bos)),
        "generation_config.json": _dump(_generation_config(vocabulary)),
    }


def _dump(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def _read_vocabulary(metadata: Mapping[str, Any]) -> _Vocabulary:
    tokens = [str(token) for token in metadata.get("tokenizer.ggml.tokens") or ()]
    if not tokens:
        raise ModelError(
            "This GGUF file has no tokenizer (tokenizer.ggml.tokens is missing), so it cannot turn text into tokens."
            " Take a file that holds the whole model, not a projector, adapter or vocabulary-free part."
        )
    types = [int(kind) for kind in metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)]
    if len(types) != len(tokens):
        raise ModelError(
            f"The tokenizer in this GGUF file is damaged: {len(tokens)} tokens but {len(types)} token types. Download"
            " the file again."
        )
    # Unused ids at the end only pad the embedding; the original tokenizer does not have them.
    while types and types[-1] == UNUSED:
        types.pop()
    return _Vocabulary(tokens[: len(types)], types, _roles(metadata, len(types)))


def _roles(metadata: Mapping[str, Any], size: int) -> dict[str, int]:
    roles = {}
    for role in ("bos", "eos", "eot", "unknown", "padding"):
        index = metadata.get(f"tokenizer.ggml.{role}_token_id")
        if index is not None and not 0 <= int(index) < size:
            raise ModelError(
                f"The tokenizer in this GGUF file is damaged: its {role} token is {index}, but it has {size} tokens."
                " Download the file again."
            )
        if index is not None:
            roles[role] = int(index)
    return roles


def _respelled(tokens: list[str], types: list[int]) -> list[str]:
    """llama.cpp stores user-defined runs of spaces as spaces; the original has SentencePiece's visible ones."""
    return [
        token.replace(" ", SPACE) if kind == USER_DEFINED and token and not token.strip(" ") else token
        for token, kind in zip(tokens, types, strict=True)
    ]


def _split_for(metadata: Mapping[str, Any]) -> _Split:
    # Old files name none, or "default": neither says what the model was trained with.
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in SPLITS:
        raise ModelError(
            f"This GGUF file asks for the pre-tokenizer {name!r} (tokenizer.ggml.pre), which Outpace does not know, and"
            f" guessing would change the model's answers. Known: {', '.join(SPLITS)}. Use the model's safetensors"
            " folder with its tokenizer.json instead."
        )
    return SPLITS[name]


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges = []
    for line in metadata.get("tokenizer.ggml.merges") or ():
        left, space, right = line.partition(" ")
        if not (left and space and right) or " " in right:
            raise ModelError(
                f"The tokenizer in this GGUF file is damaged: the merge {line!r} is not two pieces with one space"
                " between. Download the file again."
            )
        merges.append((left, right))
    return merges


def _bpe(build: Callable[[], BPE]) -> BPE:
    try:
        return build()
    except Exception as error:  # the library raises plain Exception
        raise ModelError(
            f"The tokenizer in this GGUF file is damaged: its merges do not fit its tokens ({error}). Download the file"
            " again."
        ) from error


def _byte_level(vocabulary: _Vocabulary, merges: list[tuple[str, str]], split: _Split) -> Tokenizer:
    if not merges:
        raise ModelError(
            "The tokenizer in this GGUF file is damaged: byte-level BPE without merges (tokenizer.ggml.merges) cannot"
            " join any two bytes. Download the file again."
        )
    ids = vocabulary.ids()
    tokenizer = Tokenizer(_bpe(lambda: BPE(vocab=ids, merges=merges, ignore_merges=split.ignore_merges)))
    steps: list[Any] = []
    if split.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.regex:
        steps.append(pre_tokenizers.Split(Regex(split.regex), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.regex is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(vocabulary: _Vocabulary, metadata: Mapping[str, Any]) -> Tokenizer:
    """SentencePiece BPE: spaces made visible, bytes for what the vocabulary lacks, a space in front unless the file
    says no (`add_space_prefix`, Gemma)."""
    merges = _merges(metadata) or list(_implied_merges(vocabulary, metadata))
    ids, unknown = vocabulary.ids(), vocabulary.text("unknown")
    tokenizer = Tokenizer(
        _bpe(lambda: BPE(vocab=ids, merges=merges, unk_token=unknown, byte_fallback=True, fuse_unk=True))
    )
    visible: Any = normalizers.Replace(" ", SPACE)
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        visible = normalizers.Sequence([normalizers.Prepend(SPACE), visible])
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = visible
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _implied_merges(vocabulary: _Vocabulary, metadata: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """SentencePiece keeps no merges: any two pieces that spell a third may join, the best-scored result first.

    User-defined pieces come before scored ones, as in Gemma's own tokenizer.json. Control, byte and unknown tokens
    take no part, so that plain text can never merge into one.
    """
    scores = metadata.get("tokenizer.ggml.scores") or ()
    if len(scores) < len(vocabulary.tokens):
        raise ModelError(
            f"The tokenizer in this GGUF file is damaged: {len(vocabulary.tokens)} tokens but {len(scores)} scores."
            " Download the file again."
        )
    pieces = {
        token: (0.0, i) if kind == USER_DEFINED else (1.0 - float(scores[i]) + best, i)
        for best in (max(map(float, scores)),)
        for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind in (NORMAL, USER_DEFINED)
    }
    for token in sorted(pieces, key=pieces.__getitem__):
        yield from _cuts(token, pieces)


def _cuts(token: str, pieces: Iterable[str]) -> Iterator[tuple[str, str]]:
    for i in range(1, len(token)):
        if token[:i] in pieces and token[i:] in pieces:
            yield token[:i], token[i:]


def _tokenizer_config(vocabulary: _Vocabulary, metadata: Mapping[str, Any], adds_bos: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        # The generic class takes tokenizer.json as it is; a model's own class would rebuild parts of it.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": vocabulary.text("bos"),
        "eos_token": vocabulary.text("eos"),
        "unk_token": vocabulary.text("unknown"),
        "pad_token": vocabulary.text("padding"),
        "add_bos_token": adds_bos,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return {key: value for key, value in config.items() if value is not None}


def _generation_config(vocabulary: _Vocabulary) -> dict[str, Any]:
    roles, types = vocabulary.roles, vocabulary.types
    ends = [roles[role] for role in ("eos", "eot") if role in roles]
    ends += [i for i, token in enumerate(vocabulary.tokens) if types[i] == CONTROL and token in END_OF_TURN]
    config: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(ends))}
    for name, role in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        if role in roles:
            config[name] = roles[role]
    return config
