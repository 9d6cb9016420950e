"""What SlotStore promises beyond the contract: growth, budget, views."""

from __future__ import annotations

import pytest
import torch

from outpace.cache.slots import FIRST_CAPACITY, SlotStore


def store(max_rows: int | None = None) -> SlotStore:
    made = SlotStore(3, 2, 4, torch.bfloat16, "cpu")
    return made if max_rows is None else SlotStore(3, 2, 4, torch.bfloat16, "cpu", max_rows * made.row_bytes)


def test_growth_is_geometric() -> None:
    """A thousand single rows move the buffer a handful of times, not a thousand."""
    kv, sizes = store(), set()
    for _ in range(1000):
        assert kv.reserve(0, 1)
        kv.commit(0, [0])
        sizes.add(kv.used_bytes())
    assert len(sizes) <= 6
    assert max(sizes) < 2.1 * 1000 * kv.row_bytes


def test_budget_is_used_to_its_last_row() -> None:
    kv = store(max_rows=FIRST_CAPACITY + 10)
    assert kv.reserve(0, FIRST_CAPACITY)
    assert not kv.reserve(1, 11)
    assert kv.reserve(0, 10)  # doubling would not fit, the ten rows do
    assert not kv.reserve(0, 1) and not kv.reserve(1, 1)
    kv.release(0)
    assert kv.used_bytes() == 0 and kv.reserve(1, FIRST_CAPACITY + 10)


def test_views_share_memory_with_the_buffer() -> None:
    kv = store()
    assert kv.reserve(0, 4)
    row = torch.ones(1, 2, 4, dtype=torch.bfloat16)
    keys, values = kv.view(2, 0)
    kv.write(2, 0, 3, row, 2 * row)
    assert torch.equal(keys[:, 3], row[0]) and torch.equal(values[:, 3], 2 * row[0])


def test_a_buffer_made_in_inference_mode_can_be_changed_outside() -> None:
    kv = store()
    with torch.inference_mode():
        assert kv.reserve(0, 3)
        row = torch.ones(3, 2, 4, dtype=torch.bfloat16)
        kv.write(0, 0, 0, row, row)
    kv.commit(0, [1, 2])
    kv.check_integrity()
    assert kv.length(0) == 2


def test_integrity_check_notices_wrong_books() -> None:
    kv = store()
    assert kv.reserve(0, 3)
    kv.check_integrity()
    kv._used += 1
    with pytest.raises(AssertionError, match="bytes counted"):
        kv.check_integrity()
    kv._used -= 1
    kv._slots[0].length = FIRST_CAPACITY
    with pytest.raises(AssertionError, match="rows in a buffer"):
        kv.check_integrity()


def test_negative_reservations_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot reserve"):
        store().reserve(0, -1)
