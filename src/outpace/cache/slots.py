"""One contiguous buffer per sequence, grown geometrically. Views cost nothing; nothing is shared between sequences: a
common beginning is copied, which takes about as long as reading it once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outpace.cache.prefix import Prefixes

FIRST_CAPACITY = 64  # rows; a short chat then grows four times, copying less than it holds in the end


@dataclass
class _Slot:
    """Rows of one sequence. planes[layer] = (keys, values), [kv_heads, capacity, head_dim] each, views of `buffer`."""

    buffer: Tensor
    planes: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    length: int = 0
    reserved: int = 0

    def __post_init__(self) -> None:
        self.planes = [(layer[0], layer[1]) for layer in self.buffer]

    @property
    def capacity(self) -> int:
        return int(self.buffer.shape[3])


class SlotStore:
    """KVStore (cache/base.py) for one model on one device.

    layers, kv_heads, head_dim  shape of the model's keys and values
    kept                        texts whose rows are kept behind their end (cache/prefix.py)
    max_bytes                   the most `used_bytes()` may be, or None. The old and the new buffer of a sequence that
                                grows exist together for the time of the copy; only the new one is counted.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        max_bytes: int | None = None,
        kept: int = 0,
    ) -> None:
        self._shape = (layers, 2, kv_heads, head_dim)
        self._dtype, self._device = dtype, torch.device(device)
        self._max_bytes = max_bytes
        self._slots: dict[int, _Slot] = {}
        self._prefixes: Prefixes[_Slot] = Prefixes(kept)
        self._used = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one row over all layers."""
        layers, two, kv_heads, head_dim = self._shape
        return layers * two * kv_heads * head_dim * self._dtype.itemsize

    def reserve(self, seq: int, n: int) -> bool:
        """Add n >= 0 reserved rows; False (and no change) when they do not fit into max_bytes."""
        if n < 0:
            raise ValueError(f"cannot reserve {n} rows")
        slot = self._slots.get(seq)
        rows, capacity = (slot.length + slot.reserved, slot.capacity) if slot else (0, 0)
        if slot is None or rows + n > capacity:
            wanted = self._make_room(rows + n, capacity)
            if wanted is None:
                return False
            slot = self._move(seq, slot, wanted)
        slot.reserved += n
        return True

    def _make_room(self, rows: int, held: int) -> int | None:
        """`_capacity_for`, at the cost of kept texts; of none if all of them together would not do."""
        kept = sum(kept.rows.capacity for kept in self._prefixes.kept)
        wanted = self._capacity_for(rows, held)
        if wanted is None and self._capacity_for(rows, held + kept) is None:
            return None
        while wanted is None and (oldest := self._prefixes.evict()):
            self._free(oldest)
            wanted = self._capacity_for(rows, held)
        return wanted

    def _capacity_for(self, rows: int, held: int) -> int | None:
        """Rows to allocate: twice what is held, less where the budget ends, None where it cannot hold `rows`."""
        generous = max(rows, 2 * held, FIRST_CAPACITY)
        if self._max_bytes is None:
            return generous
        affordable = (self._max_bytes - self._used) // self.row_bytes + held
        return min(generous, affordable) if rows <= affordable else None

    def _move(self, seq: int, old: _Slot | None, capacity: int) -> _Slot:
        layers, two, kv_heads, head_dim = self._shape
        with torch.inference_mode(False):  # a buffer born in inference mode could not be changed outside of it
            new = _Slot(torch.empty(layers, two, kv_heads, capacity, head_dim, dtype=self._dtype, device=self._device))
        held = 0
        if old is not None:
            rows = old.length + old.reserved
            new.buffer[:, :, :, :rows] = old.buffer[:, :, :, :rows]
            new.length, new.reserved, held = old.length, old.reserved, old.capacity
        self._slots[seq] = new
        self._used += (capacity - held) * self.row_bytes
        return new

    def write(self, layer: int, seq: int, first: int, k: Tensor, v: Tensor) -> None:
        """Store reserved rows first..first+t-1; k, v [t, kv_heads, head_dim]."""
        slot, t = self._slots[seq], k.shape[0]
        if first < slot.length or first + t > slot.length + slot.reserved:
            raise ValueError(
                f"rows {first}..{first + t - 1} of sequence {seq} are not reserved"
                f" ({slot.length} committed, {slot.reserved} reserved)"
            )
        keys, values = slot.planes[layer]
        keys.narrow(1, first, t).copy_(k.transpose(0, 1))
        values.narrow(1, first, t).copy_(v.transpose(0, 1))

    def view(self, layer: int, seq: int) -> tuple[Tensor, Tensor]:
        """Keys and values [kv_heads, length + reserved, head_dim]: views, valid until the next reserve."""
        slot = self._slots[seq]
        keys, values = slot.planes[layer]
        rows = slot.length + slot.reserved
        return keys.narrow(1, 0, rows), values.narrow(1, 0, rows)

    def rows(self, seq: int) -> Tensor:
        """[layers, 2, kv_heads, capacity, head_dim]."""
        return self._slots[seq].buffer

    def commit(self, seq: int, keep: Sequence[int]) -> None:
        """Keep reserved rows at these ascending offsets, drop the others."""
        slot = self._slots[seq]
        if list(keep) != sorted(set(keep).intersection(range(slot.reserved))):
            raise ValueError(f"cannot keep rows {list(keep)} of {slot.reserved} reserved rows: not ascending offsets")
        first_moved = next((i for i, row in enumerate(keep) if row != i), len(keep))
        moved = keep[first_moved:]
        if moved:
            source = torch.tensor(moved, device=self._device) + slot.length
            start = slot.length + first_moved
            slot.buffer[:, :, :, start : start + len(moved)] = slot.buffer.index_select(3, source)
        slot.length += len(keep)
        slot.reserved = 0

    def adopt(self, seq: int, tokens: Sequence[int]) -> int:
        """A text that goes on takes the buffer over; of one that parts, the common rows are copied, or it is cut where
        there is no room for both."""
        if seq in self._slots:
            raise ValueError(f"sequence {seq} has begun already")
        found = self._prefixes.find(tokens)
        if found is None:
            return 0
        kept, rows = found
        if rows < len(kept.tokens) and (capacity := self._capacity_for(rows, 0)):
            slot = self._move(seq, None, capacity)
            slot.buffer[:, :, :, :rows] = kept.rows.buffer[:, :, :, :rows]
        else:
            self._prefixes.take(kept)
            slot = self._slots[seq] = kept.rows
        slot.length, slot.reserved = rows, 0
        return rows

    def release(self, seq: int, tokens: Sequence[int] = ()) -> None:
        """Forget a sequence, and keep its rows or give their bytes back. Unknown ids are ignored."""
        slot = self._slots.pop(seq, None)
        if slot is not None:
            slot.reserved = 0
            for dropped in self._prefixes.put(tokens[: slot.length], slot):
                self._free(dropped)

    def _free(self, slot: _Slot) -> None:
        self._used -= slot.capacity * self.row_bytes

    def length(self, seq: int) -> int:
        """Committed rows, 0 for unknown ids."""
        slot = self._slots.get(seq)
        return slot.length if slot else 0

    def reserved(self, seq: int) -> int:
        """Reserved rows, 0 for unknown ids."""
        slot = self._slots.get(seq)
        return slot.reserved if slot else 0

    def used_bytes(self) -> int:
        """Bytes of all buffers, rows not in use included."""
        return self._used

    def check_integrity(self) -> None:
        """AssertionError unless every slot's rows fit its buffer and the byte count is the buffers' own."""
        for seq, slot in self._slots.items():
            rows = slot.length + slot.reserved
            assert slot.length >= 0 and slot.reserved >= 0, f"sequence {seq}: negative rows"
            assert rows <= slot.capacity, f"sequence {seq}: {rows} rows in a buffer of {slot.capacity}"
        for kept in self._prefixes.kept:
            assert len(kept.tokens) <= kept.rows.length and not kept.rows.reserved, "kept tokens without rows"
        held = sum(slot.buffer.nbytes for slot in [*self._slots.values(), *(kept.rows for kept in self._prefixes.kept)])
        assert held == self._used, f"{self._used} bytes counted, {held} held"
        assert self._max_bytes is None or held <= self._max_bytes, f"{held} bytes held, {self._max_bytes} allowed"
