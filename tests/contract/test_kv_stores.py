"""The KVStore contract, for every store: a state machine against lists of rows, and a planted fault it must catch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from outpace.cache.base import KVStore
from outpace.cache.slots import SlotStore

LAYERS, HEADS, DIM = 2, 2, 4
ROW_BYTES = LAYERS * 2 * HEADS * DIM * 4
BUDGET_ROWS = 260
SEQUENCES = st.integers(0, 3)

STORES: dict[str, Callable[[int | None], KVStore]] = {
    "slots": lambda max_bytes: SlotStore(LAYERS, HEADS, DIM, torch.float32, "cpu", max_bytes),
}


class KeepsAll(SlotStore):
    """Planted fault: rollback forgotten."""

    def commit(self, seq: int, keep: Sequence[int]) -> None:
        super().commit(seq, range(self.reserved(seq)))


class KeepsPrefix(SlotStore):
    """Planted fault: a tree path is committed as if it were a prefix."""

    def commit(self, seq: int, keep: Sequence[int]) -> None:
        super().commit(seq, range(len(keep)))


class ShortCopy(SlotStore):
    """Planted fault: growing forgets the reserved rows."""

    def _move(self, seq, old, capacity):  # type: ignore[no-untyped-def]
        new = super()._move(seq, old, capacity)
        new.buffer[:, :, :, new.length :] = 0
        return new


FAULTS = [KeepsAll, KeepsPrefix, ShortCopy]


def machine(make: Callable[[int | None], KVStore]) -> type[RuleBasedStateMachine]:
    """The model of a store: per sequence a list of stamps, one per row; a row's keys and values spell its stamp."""

    class Machine(RuleBasedStateMachine):
        @initialize()
        def begin(self) -> None:
            self.store = make(BUDGET_ROWS * ROW_BYTES)
            self.committed: dict[int, list[int]] = {}
            self.pending: dict[int, list[int]] = {}
            self.stamp = 0

        @rule(seq=SEQUENCES, n=st.integers(1, 90))
        def reserve_and_write(self, seq: int, n: int) -> None:
            before = self.store.used_bytes(), self.store.length(seq), self.store.reserved(seq)
            if not self.store.reserve(seq, n):
                assert before == (self.store.used_bytes(), self.store.length(seq), self.store.reserved(seq))
                return
            stamps = list(range(self.stamp + 1, self.stamp + n + 1))
            self.stamp += n
            first = self.store.length(seq) + len(self.pending.get(seq, []))
            for layer in range(LAYERS):
                k, v = (stamped(stamps, layer, plane) for plane in (0, 1))
                self.store.write(layer, seq, first, k, v)
            self.pending.setdefault(seq, []).extend(stamps)
            self.committed.setdefault(seq, [])

        @rule(seq=SEQUENCES, data=st.data())
        def commit(self, seq: int, data: st.DataObject) -> None:
            rows = self.pending.get(seq)
            if rows is None:
                return
            keep = sorted(data.draw(st.sets(st.integers(0, len(rows) - 1)) if rows else st.just(set())))
            self.store.commit(seq, keep)
            self.committed[seq] += [rows[i] for i in keep]
            self.pending[seq] = []

        @rule(seq=SEQUENCES)
        def release(self, seq: int) -> None:
            self.store.release(seq)
            self.committed.pop(seq, None)
            self.pending.pop(seq, None)

        @invariant()
        def books_balance(self) -> None:
            if "store" in vars(self):
                self.store.check_integrity()
                assert self.store.used_bytes() <= BUDGET_ROWS * ROW_BYTES
                assert bool(self.store.used_bytes()) == bool(self.committed)

        @invariant()
        def rows_are_the_models(self) -> None:
            for seq in vars(self).get("committed", ()):
                rows = self.committed[seq] + self.pending[seq]
                assert self.store.length(seq) == len(self.committed[seq])
                assert self.store.reserved(seq) == len(self.pending[seq])
                for layer in range(LAYERS):
                    for plane, held in enumerate(self.store.view(layer, seq)):
                        assert torch.equal(held.transpose(0, 1), stamped(rows, layer, plane))

    return Machine


def stamped(stamps: Sequence[int], layer: int, plane: int) -> torch.Tensor:
    """[rows, HEADS, DIM]: every number tells its row, layer, plane, head and dimension."""
    place = torch.arange(HEADS * DIM, dtype=torch.float32).view(HEADS, DIM) / 100
    return torch.tensor(stamps, dtype=torch.float32)[:, None, None] * 10 + layer * 2 + plane + place


def run(make: Callable[[int | None], KVStore], examples: int) -> None:
    quick = settings(
        max_examples=examples,
        stateful_step_count=20,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine(make), settings=quick)


@pytest.mark.parametrize("name", STORES)
def test_any_history_leaves_the_rows_of_the_model(name: str) -> None:
    run(STORES[name], 150)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault: type[SlotStore]) -> None:
    with pytest.raises(AssertionError):
        run(lambda max_bytes: fault(LAYERS, HEADS, DIM, torch.float32, "cpu", max_bytes), 60)


@pytest.mark.parametrize("name", STORES)
def test_unknown_sequences(name: str) -> None:
    store = STORES[name](None)
    store.release(5)
    assert (store.length(5), store.reserved(5), store.used_bytes()) == (0, 0, 0)


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize("keep", [[3], [-1], [1, 0], [0, 0]])
def test_impossible_commits_are_refused_and_change_nothing(name: str, keep: list[int]) -> None:
    store = STORES[name](None)
    assert store.reserve(0, 3)
    with pytest.raises(ValueError, match="cannot keep"):
        store.commit(0, keep)
    assert (store.length(0), store.reserved(0)) == (0, 3)


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize("first", [0, 1, 4])
def test_only_reserved_rows_can_be_written(name: str, first: int) -> None:
    store = STORES[name](None)
    assert store.reserve(0, 2)
    store.commit(0, [0, 1])
    assert store.reserve(0, 2)
    k = torch.zeros(2, HEADS, DIM)
    store.write(0, 0, 2, k, k)
    if first == 4:
        k = k[:1]
    with pytest.raises(ValueError, match="not reserved"):
        store.write(0, 0, first, k, k)
