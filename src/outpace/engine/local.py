"""The engine in this process: one thread runs steps, front ends talk to it through thread-safe inboxes."""

from __future__ import annotations

import asyncio
import itertools
import queue
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

from outpace.engine.policy import Policy
from outpace.engine.scheduler import Scheduler
from outpace.engine.stats import EngineMeter, RequestMeter
from outpace.engine.step import Machine, step
from outpace.engine.stopping import Output, stop_ids
from outpace.errors import CapacityError, ContextOverflow, EngineDead, OutpaceError, PromptError, UsageError
from outpace.text.codec import Codec
from outpace.text.stop import TextStream
from outpace.types import Delta, FinishReason, Request, Sequence

# What a request's consumer receives: deltas, the last with a finish_reason, or one error.
Sink = Callable[[Delta | OutpaceError], None]


@dataclass(frozen=True)
class Limits:
    """max_model_len in tokens; kv_rows the most KV rows one request may ever need, None without a bound."""

    max_model_len: int
    max_num_seqs: int = 8
    max_batched_tokens: int = 512
    kv_rows: int | None = None


@dataclass
class _Job:
    request: Request
    output: Output
    meter: RequestMeter
    sink: Sink


class Stream:
    """Deltas of one request, for a synchronous caller."""

    def __init__(self, deltas: queue.SimpleQueue[Delta | OutpaceError], abort: Callable[[], None]) -> None:
        self._deltas, self._abort, self._ended = deltas, abort, False

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Delta:
        if self._ended:
            raise StopIteration
        item = self._deltas.get()
        self._ended = isinstance(item, OutpaceError) or item.finish_reason is not None
        return _raised(item)

    def close(self) -> None:
        """Abort the request, unless it has ended."""
        if not self._ended:
            self._ended = True
            self._abort()

    def __del__(self) -> None:
        self.close()


class LocalEngine:
    """EngineClient over a Machine. `submit` is the asynchronous edge, `generate` the synchronous one."""

    def __init__(self, machine: Machine, codec: Codec, limits: Limits, policy: Policy) -> None:
        self._machine, self._codec, self._limits, self._policy = machine, codec, limits, policy
        self._scheduler = Scheduler(machine.store, policy, limits.max_num_seqs, limits.max_batched_tokens)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._jobs: dict[int, _Job] = {}
        self._ids: dict[str, int] = {}
        self._serial = itertools.count()
        self._meter = EngineMeter()
        self._dead: EngineDead | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="outpace-engine", daemon=True)
        self._thread.start()

    # -- edges, any thread ------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> AsyncIterator[Delta]:
        """See EngineClient. What can never run raises here; the request is queued when iteration begins."""
        self.check(request)
        return self._deltas(request)

    async def _deltas(self, request: Request) -> AsyncIterator[Delta]:
        loop = asyncio.get_running_loop()
        deltas: asyncio.Queue[Delta | OutpaceError] = asyncio.Queue()
        serial = self._open(request, lambda item: _post(loop, deltas, item))
        try:
            while True:
                delta = _raised(await deltas.get())
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            self._inbox.put(lambda: self._abort(serial))

    def generate(self, request: Request) -> Stream:
        """The same for synchronous callers; the request is queued at once. Closing the stream aborts the request."""
        self.check(request)
        deltas: queue.SimpleQueue[Delta | OutpaceError] = queue.SimpleQueue()
        serial = self._open(request, deltas.put)
        return Stream(deltas, lambda: self._inbox.put(lambda: self._abort(serial)))

    def check(self, request: Request) -> None:
        """Raise what `submit` would raise: PromptError, ContextOverflow, CapacityError, ParameterError, Unsupported.

        It compiles the request's constraint, which may take seconds: an event loop should call it in a worker thread
        first, and `submit` then finds it done.
        """
        if not request.prompt_ids:
            raise PromptError("The prompt is empty: it holds no tokens. Give at least one.")
        vocabulary = self._machine.pipeline.n_real_tokens
        wrong = next((t for t in request.prompt_ids if not 0 <= t < vocabulary), None)
        if wrong is not None:
            raise PromptError(
                f"The prompt holds token id {wrong}, but this model's ids go from 0 to {vocabulary - 1}."
                " Encode the text with this model's own tokenizer."
            )
        prompt, longest = len(request.prompt_ids), request.params.max_tokens
        if prompt + longest > self._limits.max_model_len:
            raise ContextOverflow(prompt, longest, self._limits.max_model_len)
        if self._limits.kv_rows is not None and prompt + longest > self._limits.kv_rows:
            raise CapacityError(
                f"The request may need the keys and values of {prompt + longest} tokens, but the KV store holds"
                f" {self._limits.kv_rows}. Ask for fewer tokens, or give it more memory with --kv-cache-bytes."
            )
        self._machine.pipeline.check(request.params)

    def abort(self, request_id: str) -> None:
        """Stop a request before its next step. Unknown ids are ignored."""
        with self._lock:
            serial = self._ids.get(request_id)
        if serial is not None:
            self._inbox.put(lambda: self._abort(serial))

    def stats(self) -> Mapping[str, float]:
        """Totals since start, and how full the engine is now."""
        now = {
            "num_requests_running": float(self._scheduler.running),
            "num_requests_waiting": float(self._scheduler.waiting),
            "kv_used_bytes": float(self._machine.store.used_bytes()),
        }
        return {**self._meter.snapshot(), **now}

    async def close(self) -> None:
        """Abort everything and stop the thread."""
        await asyncio.to_thread(self.shutdown)

    def shutdown(self) -> None:
        """`close` for synchronous callers. Safe to call twice."""
        self._inbox.put(None)
        self._thread.join()

    def _open(self, request: Request, sink: Sink) -> int:
        with self._lock:
            if self._dead is not None or self._closed:
                raise self._dead or EngineDead("The engine is closed and takes no more requests.")
            if request.id in self._ids:
                raise UsageError(f"A request with id {request.id!r} is already open; ids must be unique.")
            serial = self._ids[request.id] = next(self._serial)
        meter = RequestMeter(len(request.prompt_ids))
        self._inbox.put(lambda: self._start(serial, request, meter, sink))
        return serial

    # -- engine thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._receive():
                self._advance()
            self._fail_all(EngineDead("The engine was closed before this request ended."))
        except BaseException as error:  # whatever it was, nobody may wait for ever
            dead = EngineDead(f"The engine stopped after an internal error: {type(error).__name__}: {error}")
            dead.__cause__ = error
            self._dead = dead
            self._fail_all(dead)

    def _receive(self) -> bool:
        """Handle what has arrived; wait only when there is nothing to do. False: close."""
        while True:
            idle = not self._jobs
            try:
                message = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            if message is None:
                return False
            message()

    def _start(self, serial: int, request: Request, meter: RequestMeter, sink: Sink) -> None:
        seed = request.params.seed
        key = secrets.randbits(64) if seed is None else seed
        sequence = Sequence(serial, request.prompt_ids, request.params, key)
        stream = TextStream(self._codec.detokenizer(), request.params.stop)
        output = Output(sequence, stop_ids(sequence, self._codec.eos_ids), stream)
        self._jobs[serial] = _Job(request, output, meter, sink)
        self._machine.pipeline.follow(request.params, sequence.tokens)
        self._scheduler.add(sequence)
        self._meter.count("prompt_tokens", len(request.prompt_ids))
        self._meter.count("requests")

    def _advance(self) -> None:
        plan = self._scheduler.plan()
        for sequence in plan.preempted:
            self._release(sequence)
            self._meter.count("preemptions")
        if not plan.work:
            return
        outputs = {w.sequence.id: self._jobs[w.sequence.id].output for w in plan.work}
        for serial in outputs:
            self._jobs[serial].meter.begin(self._machine.store.length(serial))
        report = step(self._machine, plan.work, outputs)
        self._meter.add(report)
        self._policy.observe(plan.work, report)
        for serial in outputs:
            job = self._jobs[serial]
            job.meter.share(report, len(outputs))
            if serial in report.taken:
                job.meter.emitted(report.emissions[serial], report.taken[serial])
                self._deliver(serial, job)

    def _deliver(self, serial: int, job: _Job) -> None:
        reason, error = job.output.finish_reason, job.output.error
        tokens, kinds, text, logprobs = job.output.flush()
        stats = job.meter.snapshot() if reason is not None else None
        if reason is not None or error is not None:
            self._finish(serial, job)  # before the consumer hears of it, so that it finds the stores empty
        if tokens or error is None:
            job.sink(Delta(job.request.id, tokens, kinds, text, logprobs, reason, stats))
        if error is not None:
            job.sink(error)

    def _abort(self, serial: int) -> None:
        job = self._jobs.get(serial)
        if job is None:  # it had ended before the abort arrived
            return
        job.output.finish_reason = FinishReason.ABORT
        job.output.text += job.output.stream.finish()
        self._meter.count("aborts")
        self._deliver(serial, job)

    def _finish(self, serial: int, job: _Job) -> None:
        del self._jobs[serial]
        with self._lock:
            del self._ids[job.request.id]
        self._scheduler.remove(job.output.sequence)
        self._machine.pipeline.forget(job.output.sequence.tokens)
        self._policy.release(serial)
        self._release(job.output.sequence)

    def _release(self, sequence: Sequence) -> None:
        self._machine.store.release(sequence.id, sequence.tokens)
        if self._machine.drafter is not None:
            self._machine.drafter.release(sequence.id)

    def _fail_all(self, error: EngineDead) -> None:
        with self._lock:
            self._closed = True
        while not self._inbox.empty():  # requests that arrived after the last step get the error too
            message = self._inbox.get()
            if message is not None:
                message()
        for serial, job in list(self._jobs.items()):
            self._finish(serial, job)
            job.sink(error)


def _raised(item: Delta | OutpaceError) -> Delta:
    if isinstance(item, OutpaceError):
        raise item
    return item


def _post(
    loop: asyncio.AbstractEventLoop, deltas: asyncio.Queue[Delta | OutpaceError], item: Delta | OutpaceError
) -> None:
    if not loop.is_closed():  # a consumer that went away needs nothing
        loop.call_soon_threadsafe(deltas.put_nowait, item)
