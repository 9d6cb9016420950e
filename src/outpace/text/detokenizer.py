"""Token ids to text, one at a time, never cutting a character in two."""

from __future__ import annotations

import codecs
from collections.abc import Callable


class Detokenizer:
    """Continues a text token by token. The pieces joined, `finish` included, are the text of all tokens.

    token_bytes  the bytes of an id, b"" for one that is not shown. Bytes that are no UTF-8 become U+FFFD.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The characters that this token completes; "" while one is unfinished."""
        return self._decoder.decode(self._token_bytes(token))

    def finish(self) -> str:
        """What is left: U+FFFD for an unfinished character, else "". The next push begins a new text."""
        return self._decoder.decode(b"", True)
