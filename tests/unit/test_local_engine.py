"""The engine's edges: two ways in, aborts and early closes, refusals, and what happens when something breaks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from fakes import VOCAB, Rig, ScriptedDrafter, TableModel, draft_model, gather
from outpace.engine.local import Limits
from outpace.errors import CapacityError, ContextOverflow, EngineDead, ParameterError, PromptError, UsageError
from outpace.types import Delta, FinishReason, Request, SamplingParams

TARGET = TableModel()
LONG = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)
SHORT = LONG.replace(max_tokens=12)


def request(id: str = "r", params: SamplingParams = SHORT, prompt: tuple[int, ...] = (1, 2)) -> Request:
    return Request(id, prompt, params)


def rig(**settings: object) -> Rig:
    return Rig(TARGET, draft_model(), 4, **settings)  # type: ignore[arg-type]


def idle(used: Rig) -> bool:
    return used.store is not None and used.store.used_bytes() == used.drafter.store.used_bytes() == 0  # type: ignore[union-attr]


def test_both_ways_in_say_the_same() -> None:
    with rig().engine() as engine:

        async def collect() -> list[Delta]:
            return [delta async for delta in engine.submit(request())]

        deltas = asyncio.run(collect())
        answer = gather([engine.generate(request())])[0]
    assert tuple(token for delta in deltas for token in delta.tokens) == answer.tokens
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert deltas[-1].stats is not None and all(d.stats is None for d in deltas[:-1])


def test_many_requests_on_one_event_loop() -> None:
    async def one(engine, i: int) -> tuple[int, ...]:  # type: ignore[no-untyped-def]
        return tuple([token async for delta in engine.submit(request(str(i), prompt=(i,))) for token in delta.tokens])

    async def everybody(engine) -> list[tuple[int, ...]]:  # type: ignore[no-untyped-def]
        return await asyncio.gather(*(one(engine, i) for i in range(1, 10)))

    with rig(limits=Limits(4096, max_num_seqs=3)).engine() as engine:
        found = asyncio.run(everybody(engine))
    alone = [rig().run(((i,), SHORT))[0].tokens for i in range(1, 10)]
    assert found == alone


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_a_closed_stream_frees_everything_and_disturbs_nobody(taken: int) -> None:
    """Scenario 20."""
    used = rig()
    with used.engine() as engine:
        stream = engine.generate(request("long", LONG))
        other = engine.generate(request("other"))
        for _ in range(taken):
            next(stream)
        stream.close()
        assert list(stream) == []
        answer = gather([other])[0]
        gather([engine.generate(request("next"))])  # by now the abort has been handled
        assert idle(used)
        assert engine.stats()["aborts"] == 1
    assert answer.tokens == rig().run(((1, 2), SHORT))[0].tokens


def test_a_forgotten_stream_is_a_closed_one() -> None:
    used = rig()
    with used.engine() as engine:
        next(engine.generate(request("long", LONG)))
        gather([engine.generate(request("next"))])
        assert idle(used)


def test_leaving_an_asynchronous_stream_aborts_it() -> None:
    used = rig()

    async def leave(engine) -> None:  # type: ignore[no-untyped-def]
        stream = engine.submit(request("long", LONG))
        await anext(stream)
        await stream.aclose()

    with used.engine() as engine:
        asyncio.run(leave(engine))
        gather([engine.generate(request("next"))])
        assert idle(used)


def test_abort_by_id_ends_the_stream_with_its_statistics() -> None:
    used = rig()
    with used.engine() as engine:
        stream = engine.generate(request("x", LONG))
        next(stream)
        engine.abort("x")
        engine.abort("nobody")
        last = list(stream)[-1]
        assert last.finish_reason is FinishReason.ABORT
        assert last.stats is not None and 0 < last.stats.output_tokens < 2000
        gather([engine.generate(request("x"))])  # the id is free again
        assert idle(used)


def test_an_abort_shows_text_that_was_held_back() -> None:
    with Rig(TARGET).engine() as engine:
        stream = engine.generate(request("x", LONG.replace(stop=("bcdefghijkl" * 200,))))
        next(stream)
        engine.abort("x")
        deltas = list(stream)
    assert deltas[-1].finish_reason is FinishReason.ABORT


@pytest.mark.parametrize(
    ("made", "error", "said"),
    [
        (lambda: request(prompt=()), PromptError, "prompt is empty"),
        (lambda: request(prompt=(1, VOCAB)), PromptError, f"token id {VOCAB}"),
        (lambda: request(prompt=(-1,)), PromptError, "token id -1"),
        (lambda: request(params=SHORT.replace(logit_bias={VOCAB: 1.0})), ParameterError, "logit_bias"),
        (lambda: request(params=SHORT.replace(stop_token_ids=(VOCAB,))), ParameterError, "stop_token_ids"),
        (lambda: request(params=LONG.replace(max_tokens=60)), ContextOverflow, "maximum context length is 50"),
        (lambda: request(params=LONG.replace(max_tokens=45)), CapacityError, "kv-cache-bytes"),
    ],
)
def test_what_can_never_run_is_refused_at_once(made: Callable[[], Request], error: type, said: str) -> None:
    limits = Limits(50, kv_rows=40)
    with rig(limits=limits).engine() as engine:
        for call in (engine.generate, engine.submit):
            with pytest.raises(error, match=said):
                call(made())
        assert len(gather([engine.generate(request())])[0].tokens) == 12


def test_two_open_requests_may_not_share_an_id() -> None:
    with rig().engine() as engine:
        stream = engine.generate(request("x", LONG))
        with pytest.raises(UsageError, match="'x' is already open"):
            engine.generate(request("x"))
        stream.close()


def test_an_internal_error_reaches_every_consumer_and_later_ones() -> None:
    def broken(tokens, depth):  # type: ignore[no-untyped-def]
        raise ZeroDivisionError("planted")

    with Rig(TARGET, ScriptedDrafter(broken), 4).engine() as engine:
        streams = [engine.generate(request(str(i))) for i in range(3)]
        for stream in streams:
            with pytest.raises(EngineDead, match="ZeroDivisionError: planted"):
                list(stream)
        with pytest.raises(EngineDead, match="planted"):
            engine.generate(request("later"))


def test_closing_the_engine_ends_open_streams() -> None:
    with rig().engine() as engine:
        stream = engine.generate(request("x", LONG))
        next(stream)
        asyncio.run(engine.close())
        with pytest.raises(EngineDead, match="closed"):
            list(stream)
        with pytest.raises(EngineDead, match="closed"):
            engine.generate(request("later"))
        engine.shutdown()


def test_requests_from_many_threads() -> None:
    found: dict[int, tuple[int, ...]] = {}
    with rig().engine() as engine:

        def work(i: int) -> None:
            found[i] = gather([engine.generate(request(str(i), prompt=(i,)))])[0].tokens

        threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {i: rig().run(((i,), SHORT))[0].tokens for i in range(1, 8)}


def test_every_part_of_a_request_is_timed() -> None:
    stats = rig().run(((1, 2), SHORT))[0].stats
    assert stats.prompt_tokens == 2 and stats.output_tokens == 12
    assert stats.draft_seconds > 0 and stats.verify_seconds > 0 and stats.other_seconds > 0
    assert stats.first_token_seconds > 0 and stats.decode_seconds > 0
