"""What bytes a token stands for. Text is decoded from bytes, so that streaming and comparing tokenizers are exact."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

from outpace.errors import ModelError

SPACE = "\u2581"  # SentencePiece's visible space
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def bytes_reader(tokenizer: Tokenizer) -> tuple[Callable[[int], bytes], bool]:
    """(bytes of an id, whether a whole text loses one leading space), from the decoder named in tokenizer.json.

    Byte-level BPE spells each byte as a visible character; SentencePiece-style vocabularies show spaces as U+2581 and
    single bytes as <0xNN>. ModelError for any other kind (WordPiece, ...).
    """
    steps = list(_steps(tokenizer))
    kinds = [step.get("type") for step in steps]
    if "ByteLevel" in kinds:
        spell = _byte_level
    elif "Metaspace" in kinds or ("Replace" in kinds and _replaces_space(steps)):
        spell = _sentencepiece
    else:
        named = ", ".join(map(str, kinds)) or "none"
        raise ModelError(
            f"This tokenizer's decoder ({named}) is not one Outpace can stream. It knows byte-level BPE and"
            " SentencePiece-style vocabularies, which all supported model families use."
        )

    def bytes_of(token: int) -> bytes:
        piece = tokenizer.id_to_token(token)
        return b"" if piece is None else spell(piece)

    return bytes_of, any(_strips_space(step) for step in steps)


def _steps(tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    if tokenizer.decoder is None:
        return
    state = json.loads(tokenizer.decoder.__getstate__())
    if state.get("type") == "Sequence":
        yield from state["decoders"]
    else:
        yield state


def _replaces_space(steps: list[dict[str, Any]]) -> bool:
    return any(step.get("pattern") == {"String": SPACE} for step in steps)


def _strips_space(step: dict[str, Any]) -> bool:
    if step.get("type") == "Metaspace":
        return step.get("prepend_scheme") != "never"
    return step.get("type") == "Strip" and step.get("content") == " " and step.get("start") == 1


def _byte_level(piece: str) -> bytes:
    """A piece with a character that stands for no byte was added as plain text."""
    table = _alphabet()
    try:
        return bytes(table[char] for char in piece)
    except KeyError:
        return piece.encode()


def _sentencepiece(piece: str) -> bytes:
    byte = _BYTE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(SPACE, " ").encode()


@lru_cache(maxsize=1)
def _alphabet() -> dict[str, int]:
    """GPT-2's byte alphabet: printable bytes stand for themselves, the others for U+0100 onwards, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}
