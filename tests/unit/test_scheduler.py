"""Who runs, with how many rows, and who gives way."""

from __future__ import annotations

import pytest

from outpace.cache.slots import SlotStore
from outpace.engine.policy import FixedDepth
from outpace.engine.scheduler import Plan, Scheduler
from outpace.types import SamplingParams, Sequence

ROW = 8  # bytes


def store(rows: int | None = None) -> SlotStore:
    return SlotStore(1, 1, 1, max_bytes=None if rows is None else rows * ROW)


def sequence(id: int, prompt: int, generated: int = 0, max_tokens: int = 100) -> Sequence:
    made = Sequence(id, [1] * prompt, SamplingParams(max_tokens=max_tokens), 0)
    made.tokens += [2] * generated
    return made


def shape(plan: Plan) -> list[tuple[int, int, int, bool]]:
    return [(w.sequence.id, w.feed, w.depth, w.reaches_frontier) for w in plan.work]


def commit(kv: SlotStore, plan: Plan) -> None:
    for w in plan.work:
        kv.commit(w.sequence.id, range(w.feed))


def test_a_prompt_is_fed_in_chunks_and_drafts_start_behind_the_first_token() -> None:
    kv = store()
    scheduler, one = Scheduler(kv, FixedDepth(4), 8, 10), sequence(0, 25)
    scheduler.add(one)
    for expected in ((0, 10, 0, False), (0, 10, 0, False), (0, 5, 0, True)):
        plan = scheduler.plan()
        assert shape(plan) == [expected]
        commit(kv, plan)
    one.tokens.append(2)
    assert shape(scheduler.plan()) == [(0, 1, 4, True)]


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (6, [(0, 3, 0, True), (1, 3, 0, True)]),
        (8, [(0, 3, 0, True), (1, 3, 0, True), (2, 2, 0, False)]),
        (13, [(0, 3, 3, True), (1, 3, 1, True), (2, 3, 0, True)]),
    ],
)
def test_the_budget_bounds_all_rows_and_own_tokens_come_before_drafts(
    budget: int, expected: list[tuple[int, int, int, bool]]
) -> None:
    scheduler = Scheduler(store(), FixedDepth(3), 8, budget)
    for i in range(3):
        scheduler.add(sequence(i, 2, generated=1))
    assert shape(scheduler.plan()) == expected


def test_the_starved_come_first_on_the_next_step() -> None:
    kv = store()
    scheduler = Scheduler(kv, FixedDepth(3), 8, 6)
    for i in range(3):
        scheduler.add(sequence(i, 2, generated=1))
    commit(kv, scheduler.plan())
    assert scheduler.plan().work[0].sequence.id == 2


def test_no_draft_where_one_token_is_left() -> None:
    scheduler = Scheduler(store(), FixedDepth(4), 8, 100)
    scheduler.add(sequence(0, 2, generated=9, max_tokens=10))
    scheduler.add(sequence(1, 2, generated=7, max_tokens=10))
    assert [w.depth for w in scheduler.plan().work] == [0, 2]


def test_at_most_so_many_sequences_run() -> None:
    scheduler = Scheduler(store(), FixedDepth(0), 2, 100)
    sequences = [sequence(i, 2) for i in range(3)]
    for one in sequences:
        scheduler.add(one)
    assert len(scheduler.plan().work) == 2
    assert (scheduler.running, scheduler.waiting) == (2, 1)
    scheduler.remove(sequences[0])
    scheduler.remove(sequences[2])
    assert (scheduler.running, scheduler.waiting) == (1, 0)


def test_a_draft_is_dropped_before_anybody_loses_rows() -> None:
    kv = store(rows=64)
    scheduler = Scheduler(kv, FixedDepth(8), 8, 1000)
    scheduler.add(sequence(0, 60, generated=1))
    assert shape(scheduler.plan()) == [(0, 61, 0, True)]


def test_the_youngest_gives_way_and_comes_back_first() -> None:
    kv = store(rows=192)
    scheduler = Scheduler(kv, FixedDepth(0), 8, 1000)
    old, young = sequence(0, 64), sequence(1, 64)
    scheduler.add(old)
    scheduler.add(young)
    plan = scheduler.plan()
    assert len(plan.work) == 2
    commit(kv, plan)
    old.tokens.append(2)  # needs a bigger buffer, for which there is no room beside the other
    young.tokens.append(2)
    plan = scheduler.plan()
    assert [s.id for s in plan.preempted] == [1]
    assert shape(plan) == [(0, 1, 0, True)]
    assert kv.length(1) == 0 and scheduler.waiting == 1
    commit(kv, plan)
    scheduler.remove(old)
    kv.release(0)
    assert shape(scheduler.plan()) == [(1, 65, 0, True)]


@pytest.mark.parametrize("rows", [64, 80, 129])
def test_a_newcomer_waits_for_room(rows: int) -> None:
    kv = store(rows)
    scheduler = Scheduler(kv, FixedDepth(0), 8, 1000)
    scheduler.add(sequence(0, 60))
    scheduler.add(sequence(1, 70))
    assert [w.sequence.id for w in scheduler.plan().work] == [0]
    assert kv.reserved(1) == kv.length(1) == 0
    kv.check_integrity()
