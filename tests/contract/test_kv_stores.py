"""The KVStore contract, for every store: a state machine against lists of rows, and a planted fault it must catch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from outpace.cache.base import KVStore
from outpace.cache.prefix import SHORTEST
from outpace.cache.slots import SlotStore

LAYERS, HEADS, DIM = 2, 2, 4
ROW_BYTES = LAYERS * 2 * HEADS * DIM * 4
BUDGET_ROWS = 260
SEQUENCES = st.integers(0, 3)

STORES: dict[str, Callable[[int | None], KVStore]] = {
    "slots": lambda max_bytes: SlotStore(LAYERS, HEADS, DIM, torch.float32, "cpu", max_bytes),
    "slots, kept": lambda max_bytes: SlotStore(LAYERS, HEADS, DIM, torch.float32, "cpu", max_bytes, kept=3),
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


class AdoptsAll(SlotStore):
    """Planted fault: a text that parts from a kept one takes all its rows."""

    def adopt(self, seq: int, tokens: Sequence[int]) -> int:
        found = self._prefixes.find(tokens)
        return super().adopt(seq, found[0].tokens.tolist() if found else tokens)


class KeepsDrafts(SlotStore):
    """Planted fault: rows that were never committed are kept too."""

    def release(self, seq: int, tokens: Sequence[int] = ()) -> None:
        if seq in self._slots:
            self.commit(seq, range(self.reserved(seq)))
        super().release(seq, tokens)


FAULTS = [KeepsAll, KeepsPrefix, ShortCopy, AdoptsAll]


def machine(make: Callable[[int | None], KVStore]) -> type[RuleBasedStateMachine]:
    """The model of a store: per sequence a list of stamps, one per row; a row's keys and values spell its stamp."""

    class Machine(RuleBasedStateMachine):
        @initialize()
        def begin(self) -> None:
            self.store = make(BUDGET_ROWS * ROW_BYTES)
            self.committed: dict[int, list[int]] = {}
            self.pending: dict[int, list[int]] = {}
            self.ended: list[list[int]] = []
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

        @rule(seq=SEQUENCES, data=st.data(), whole=st.booleans())
        def commit(self, seq: int, data: st.DataObject, whole: bool) -> None:
            rows = self.pending.get(seq)
            if rows is None:
                return
            some = st.sets(st.integers(0, len(rows) - 1)) if rows else st.just(set())
            keep = list(range(len(rows))) if whole else sorted(data.draw(some))
            self.store.commit(seq, keep)
            self.committed[seq] += [rows[i] for i in keep]
            self.pending[seq] = []

        @rule(seq=SEQUENCES, keep=st.booleans())
        def release(self, seq: int, keep: bool) -> None:
            rows = self.committed.pop(seq, [])
            self.store.release(seq, rows if keep else ())
            self.pending.pop(seq, None)
            self.ended += [rows] if keep and rows else []

        @rule(seq=SEQUENCES, n=st.integers(SHORTEST, 60), data=st.data())
        def end_and_begin_alike(self, seq: int, n: int, data: st.DataObject) -> None:
            """A row's stamp is its token: the rows must be those of the text's own beginning."""
            self.reserve_and_write(seq, n)
            if seq in self.pending:
                self.store.commit(seq, range(len(self.pending[seq])))
                self.committed[seq] += self.pending.pop(seq)
            self.release(seq, True)
            if not self.ended:
                return
            old = data.draw(st.sampled_from(self.ended))
            text = old[: data.draw(st.integers(1, len(old)))] + [self.stamp + 1] * data.draw(st.integers(0, 2))
            rows = self.store.adopt(seq, text)
            assert rows == 0 or SHORTEST <= rows <= len(text)
            if rows:
                self.committed[seq], self.pending[seq] = text[:rows], []

        @invariant()
        def books_balance(self) -> None:
            if "store" in vars(self):
                self.store.check_integrity()
                assert self.store.used_bytes() <= BUDGET_ROWS * ROW_BYTES
                assert self.store.used_bytes() or not self.committed
                assert not self.store.used_bytes() or self.committed or self.ended

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
        run(lambda max_bytes: fault(LAYERS, HEADS, DIM, torch.float32, "cpu", max_bytes, kept=3), 100)


def filled(store: KVStore, seq: int, tokens: Sequence[int]) -> None:
    assert store.reserve(seq, len(tokens) - store.length(seq))
    store.commit(seq, range(store.reserved(seq)))


def test_a_text_begins_with_the_longest_kept_one() -> None:
    store = STORES["slots, kept"](None)
    for i, text in enumerate(([*range(20)], [*range(40)], [*range(30), 77, 78])):
        filled(store, i, text)
        store.release(i, text)
    held = store.used_bytes()
    assert store.adopt(9, [*range(35), 5]) == 35  # a copy
    assert store.used_bytes() > held
    assert store.adopt(10, [*range(30), 77, 78, 1]) == 32  # goes on: its buffer, no copy
    assert store.adopt(11, [*range(15), 99]) == store.adopt(12, [8] * 50) == 0  # too little in common
    with pytest.raises(ValueError, match="has begun already"):
        store.adopt(9, [1])


def test_kept_rows_give_way_and_the_oldest_first() -> None:
    store = STORES["slots, kept"](200 * ROW_BYTES)
    texts = [[i] * 60 for i in range(3)]
    for i, text in enumerate(texts):
        filled(store, i, text)
        store.release(i, text)
    assert store.reserve(7, 100)
    store.check_integrity()
    assert [store.adopt(20 + i, text) for i, text in enumerate(texts)] == [0, 0, 60]


def test_a_parting_text_is_cut_where_there_is_no_room_for_both() -> None:
    store = STORES["slots, kept"](100 * ROW_BYTES)
    filled(store, 0, [*range(90)])
    store.release(0, [*range(90)])
    assert store.adopt(1, [*range(50), 7]) == 50
    store.check_integrity()
    store.release(1)
    assert store.used_bytes() == 0


def test_only_committed_rows_are_kept() -> None:
    store = STORES["slots, kept"](None)
    filled(store, 0, [*range(30)])
    assert store.reserve(0, 20)
    store.release(0, [*range(50)])
    store.check_integrity()
    assert store.adopt(1, [*range(50)]) == 30
    faulty = KeepsDrafts(LAYERS, HEADS, DIM, kept=3)
    filled(faulty, 0, [*range(30)])
    assert faulty.reserve(0, 20)
    faulty.release(0, [*range(50)])
    assert faulty.adopt(1, [*range(50)]) == 50  # what the assertion above would catch


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
