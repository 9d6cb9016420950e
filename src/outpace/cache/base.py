"""KV rows of token positions: reserve, write, commit. Rollback is what commit does not keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class KVStore(Protocol):
    """Keys and values of one model, for every sequence, by sequence id.

    Life of a row: `reserve` makes room behind the committed rows, the forward pass `write`s it and sees it through
    `view`, `commit` keeps some of the reserved rows and drops the rest. Rows of one sequence are ordered: committed
    rows 0..length-1, then reserved rows.
    """

    def reserve(self, seq: int, n: int) -> bool:
        """Add n reserved rows (reservations accumulate until commit). False: no room, and nothing changed."""
        ...

    def write(self, layer: int, seq: int, first: int, k: Tensor, v: Tensor) -> None:
        """Store rows first..first+t-1 of a layer; k, v [t, kv_heads, head_dim]. `first` >= length(seq)."""
        ...

    def view(self, layer: int, seq: int) -> tuple[Tensor, Tensor]:
        """Keys and values [kv_heads, length + reserved, head_dim], no copy where the layout allows it."""
        ...

    def rows(self, seq: int) -> Tensor:
        """All rows of a known sequence: [layers, 2 (keys, values), kv_heads, capacity, head_dim], the last two
        contiguous. Valid until the next reserve; kernels that take a whole pass read and write it directly."""
        ...

    def commit(self, seq: int, keep: Sequence[int]) -> None:
        """Keep the reserved rows at these ascending offsets (0 = first reserved), drop the rest of the reservation.
        A prefix is a length update; anything else moves rows (a tree path: its keys are rotated for their depth)."""
        ...

    def adopt(self, seq: int, tokens: Sequence[int]) -> int:
        """Begin an unknown sequence with the kept rows of the longest beginning of `tokens`. How many are committed."""
        ...

    def release(self, seq: int, tokens: Sequence[int] = ()) -> None:
        """Forget a sequence; unknown ids are ignored. `tokens` name its committed rows, in order, which may be kept for
        `adopt` until room is wanted."""
        ...

    def length(self, seq: int) -> int:
        """Committed rows; the only authority on how many tokens of a sequence have KV. 0 for unknown ids."""
        ...

    def reserved(self, seq: int) -> int:
        """Rows reserved and not committed."""
        ...

    def used_bytes(self) -> int:
        """Bytes held now, kept rows included."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError if the store's books do not balance."""
        ...
