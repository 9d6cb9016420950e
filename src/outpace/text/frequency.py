"""Which tokens are frequent, so that a draft model's output projection need not cover the whole vocabulary.

Leaving a token out costs speed alone: the draft cannot propose it, the target can still say it. Without a corpus the
order is that of the ids, since BPE numbers its tokens by merge rank, and before it the tokens of `common.txt`: how
assistants write, in Markdown, code and formulas, much of which BPE training data had too rarely.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outpace.errors import ConfigError
from outpace.text.codec import TokenizerCodec

Counts: TypeAlias = NDArray[np.int64]
PIECE = 1 << 18  # characters encoded at once
PATIENCE = 4  # pieces to wait for a line end that no tokenizer joins with what stands around it


def count_tokens(codec: TokenizerCodec, path: Path, piece: int = PIECE) -> Counts:
    """How often each id occurs in a corpus: [V], V = `codec.vocab_size`; special tokens are not added.

    `path` is UTF-8 text or, ending in .jsonl, one JSON value a line, of which every string counts by itself (of a chat
    message, an object with "content", its content alone). Read in pieces of about `piece` characters, cut at line
    ends, so memory is a few pieces, or the longest line. ConfigError: missing, a folder, unreadable, not UTF-8, not
    JSON, or without text.
    """
    counts = np.zeros(codec.vocab_size, np.int64)
    lines = _lines(path)
    for text in _strings(path, lines) if path.suffix == ".jsonl" else _pieces(lines, piece):
        counts += _count(codec, text)
    if not counts.any():
        raise ConfigError(
            f"The corpus {path} holds no text, so it cannot say which tokens are frequent. Name a file with text like"
            " the answers you expect, or leave the corpus out."
        )
    return counts


def frequent_ids(codec: TokenizerCodec, size: int, counts: Counts | None = None) -> Counts:
    """The `size` most frequent ids, ascending: [size]. Most counted first, then the lower id; among them always those
    of `needed_ids`. counts: [V], from `count_tokens`; None: the default order. ConfigError: `size` is below the number
    of needed ids or above the vocabulary."""
    needed = needed_ids(codec)
    if not len(needed) <= size <= codec.vocab_size:
        raise ConfigError(
            f"A draft vocabulary of {size} tokens does not fit this tokenizer: it needs at least {len(needed)}, its"
            f" special tokens and single bytes, and has {codec.vocab_size} in all. Choose a number between the two;"
            " about a fifth of the vocabulary is a good start."
        )
    if counts is None:
        counts = _count(codec, (files("outpace.text") / "common.txt").read_text(encoding="utf-8"))
    ids = np.arange(codec.vocab_size)
    optional = ~np.isin(ids, needed)
    holes = np.array([not codec.token_bytes(i) for i in range(codec.vocab_size)])
    return np.sort(np.lexsort((ids, -counts, holes, optional))[:size])


def needed_ids(codec: TokenizerCodec) -> Counts:
    """Ids that every draft vocabulary keeps, ascending: special tokens, those that end an answer, and every token of a
    single byte, so that with byte-level BPE any text can be written."""
    own = range(codec.vocab_size)
    special = (codec.special_ids | codec.eos_ids) & frozenset(own)
    return np.array(sorted(special | {i for i in own if len(codec.token_bytes(i)) == 1}), np.int64)


def _count(codec: TokenizerCodec, text: str) -> Counts:
    return np.bincount(np.array(codec.encode_continuation(text), np.int64), minlength=codec.vocab_size)


def _lines(path: Path) -> Iterator[str]:
    """Lines with their ends, "\\r\\n" as "\\n"."""
    if path.is_dir():
        raise ConfigError(
            f"The corpus {path} is a folder. Name one UTF-8 text file, or a .jsonl file; `cat` joins several into one."
        )
    number = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                start = len(codecs.BOM_UTF8) if number == 1 and line.startswith(codecs.BOM_UTF8) else 0
                yield line[start:].decode("utf-8").replace("\r\n", "\n")
    except FileNotFoundError as error:
        raise ConfigError(f"The corpus {path} does not exist. Check the path; it is a UTF-8 text or .jsonl.") from error
    except OSError as error:
        raise ConfigError(
            f"The corpus {path} cannot be read: {error.strerror or error}. Check its permissions, or copy it elsewhere."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"The corpus {path} is not UTF-8: line {number} has the byte 0x{error.object[error.start]:02x} where none"
            " may stand. Convert it first, for example with `iconv -f LATIN1 -t UTF-8`."
        ) from error


def _pieces(lines: Iterable[str], size: int) -> Iterator[str]:
    """The lines joined to pieces of at least `size` characters. Tokenizers join line ends with spaces around them, so
    a cut waits for a line end between two other characters, but not longer than `PATIENCE` pieces."""
    held: list[str] = []
    length = 0
    for line in lines:
        clean = bool(held) and not held[-1][-2:-1].isspace() and len(held[-1]) > 1 and not line[0].isspace()
        if length >= size and (clean or length >= PATIENCE * size):
            yield "".join(held)
            held, length = [], 0
        held.append(line)
        length += len(line)
    yield "".join(held)


def _strings(path: Path, lines: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ConfigError(
                f"Line {number} of the corpus {path} is not JSON ({error}). A .jsonl file has one JSON value a line;"
                " give a plain text another ending, such as .txt."
            ) from error
        yield from _texts(value)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)
    elif isinstance(value, dict):
        for part in [value["content"]] if "content" in value else value.values():
            yield from _texts(part)
