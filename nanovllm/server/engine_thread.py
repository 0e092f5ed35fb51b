"""The engine in a thread of its own. Requests go in through a queue and join the running batch before the next step;
what became of them comes out on the event loop. Nothing that one side changes is read by the other."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial

from nanovllm.engine.detokenizer import TextStream
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.metrics import Metrics
from nanovllm.server.protocol import ApiError

logger = logging.getLogger(__name__)

TopLogprobs = list[list[tuple[int, float]]]
# A hand-over that keeps the event loop busy for less than this many seconds disturbs nobody.
_BRIEF = 0.001
# Of a longer one's time, how much more passes before the next.
_REST = 4


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a request, checked: see `LLMEngine.add`."""

    token_ids: list[int]
    params: SamplingParams
    prompt_logprobs: int | None = None
    generate: bool = True


@dataclass(frozen=True, slots=True)
class Delta:
    """What came of one sample since its last delta.

    index: prompt * n + sample.
    logprobs, top_logprobs: one entry per token, when asked for.
    prompt_logprobs, prompt_top: of the prompt's tokens but the first, with the first delta, when asked for.
    num_output_tokens: of the sample so far.
    finish_reason: None until the last one.
    first_token_time, time: of the first token, and of this delta, by `time.perf_counter`.
    """

    index: int
    time: float
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: TopLogprobs = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_top: TopLogprobs = field(default_factory=list)
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str = ""
    first_token_time: float | None = None


class Job:
    """One request on its way through the engine; iterating over it gives its deltas.

    Without `stream` each sample has one delta, when it is over.
    """

    def __init__(self, thread: EngineThread, prompts: list[Prompt], stream: bool) -> None:
        self.prompts = prompts
        self.stream = stream
        self.started = time.perf_counter()
        self.seqs: list[Sequence] = []  # the engine thread's
        self.is_open = True
        self._thread = thread
        self._num_open = sum(prompt.params.n for prompt in prompts)
        self._deltas: deque[Delta] = deque()
        self._error: ApiError | None = None
        self._wake = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while self._num_open:
            if self._deltas:
                delta = self._deltas.popleft()
                self._num_open -= delta.finish_reason is not None
                yield delta
            elif self._error is not None:
                raise self._error
            else:
                self._wake.clear()
                await self._wake.wait()

    @property
    def must_wait(self) -> bool:
        """Whether whoever iterates has all that is there and is to get more."""
        return bool(self._num_open) and not self._deltas and self._error is None

    def put(self, delta: Delta) -> None:
        """Hand a delta to whoever iterates."""
        self._deltas.append(delta)
        self._wake.set()

    def fail(self, error: ApiError) -> None:
        """Whoever iterates gets `error` after the deltas that are there."""
        self._error = error
        self._wake.set()

    def close(self) -> None:
        """Nobody waits any more; what still runs ends before the next step. A second time does nothing."""
        if self.is_open:
            self.is_open = False
            self._thread.forget(self, finished=not self._num_open)


@dataclass(slots=True)
class _Watch:
    """A sequence whose tokens somebody waits for, and how many were handed over."""

    job: Job
    index: int
    seq: Sequence
    text: TextStream | None
    num_sent: int = 0


class EngineThread:
    """Runs the steps of `engine`. All public methods belong to the event loop that called `start`.

    Attributes:
        failure: what went wrong when a step raised; the engine is dead then.
        stopping: no new requests are taken.
    """

    def __init__(self, engine: LLMEngine, metrics: Metrics) -> None:
        self.engine = engine
        self.metrics = metrics
        self.failure = ""
        self.stopping = False
        self._jobs: set[Job] = set()
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._watched: dict[int, _Watch] = {}
        self._news: dict[int, _Watch] = {}
        self._loop_has_time = True
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="nanovllm-engine", daemon=True)

    @property
    def num_jobs(self) -> int:
        """Requests that somebody waits for."""
        return len(self._jobs)

    def start(self) -> None:
        """Start the thread; results come to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def check(self) -> None:
        """Refuse when no request can be served.

        Raises:
            ApiError: status 503, with the reason.
        """
        if self.failure:
            raise ApiError(503, f"the engine is dead: {self.failure}")
        if self.stopping:
            raise ApiError(503, "the server is stopping")

    def submit(self, prompts: list[Prompt], stream: bool) -> Job:
        """Queue a request whose prompts were checked. Close the job when nobody waits for it any more.

        Raises:
            ApiError: status 503, as in `check`.
        """
        self.check()
        job = Job(self, prompts, stream)
        self._jobs.add(job)
        self._orders.put(partial(self._add, job))
        return job

    def forget(self, job: Job, finished: bool) -> None:
        """A job was closed."""
        self._jobs.discard(job)
        if not finished:
            self.metrics.count_abort()
            self._orders.put(partial(self._abort, job))

    async def drain(self, seconds: float) -> None:
        """Take no more requests, and wait at most so long for those that run; the others fail with status 503."""
        self.stopping = True
        deadline = time.perf_counter() + seconds
        while self._jobs and time.perf_counter() < deadline:
            await asyncio.sleep(0.02)
        self._fail_all(ApiError(503, "the server is stopping"))

    def stop(self, seconds: float) -> bool:
        """End the thread after the step it is in and free the model; False when that step took longer than this."""
        self.stopping = True
        self._orders.put(None)
        if self._thread.ident is not None:
            self._thread.join(seconds)
        if self._thread.is_alive():
            return False
        self.engine.exit()
        return True

    # In the event loop

    def _hand_out(self, news: list[tuple[Job, Delta]]) -> None:
        started = time.perf_counter()
        for job, delta in news:
            if job.is_open:
                if delta.finish_reason is not None:
                    prompt = job.prompts[delta.index // job.prompts[0].params.n]
                    self.metrics.observe(delta, len(prompt.token_ids), job.started)
                job.put(delta)
        # Whoever was woken runs before this.
        self._loop.call_soon(self._rest, started)

    def _rest(self, started: float) -> None:
        """Ask for more news after a multiple of what the last took to write. Python runs one thread at a time: with
        hundreds of streams the loop would take that time from the engine; so tokens gather, and each write carries
        several."""
        busy = time.perf_counter() - started
        if busy < _BRIEF:
            self._loop_has_time = True
        else:
            self._loop.call_later(_REST * busy, setattr, self, "_loop_has_time", True)

    def _fail_all(self, error: ApiError) -> None:
        for job in self._jobs:
            job.fail(error)

    def _die(self, reason: str) -> None:
        self.failure = reason
        self._fail_all(ApiError(500, f"the engine failed: {reason}"))

    # In the engine's thread

    def _run(self) -> None:
        try:
            while self._take_orders():
                self._publish(self.engine.step())
        except BaseException as error:
            logger.exception("the engine failed")
            self.engine.recover()
            self._tell(self._die, f"{type(error).__name__}: {error}")

    def _tell(self, function: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop was closed, so nobody listens
            logger.debug("the event loop is closed")

    def _take_orders(self) -> bool:
        """Carry out what the loop asked for, and wait for it while there is nothing to step. False: stop."""
        while True:
            idle = not self.engine.has_unfinished
            if idle and self._news:
                self._flush()
            try:
                order = self._orders.get(block=idle)
            except queue.Empty:
                return True
            if order is None:
                return False
            order()

    def _add(self, job: Job) -> None:
        if not job.is_open:
            return
        index = 0
        for prompt in job.prompts:
            if not prompt.generate and (prompt.prompt_logprobs is None or len(prompt.token_ids) == 1):
                # There is nothing to compute: no token is wanted, and a first one has nothing before it.
                nothing = Delta(index, time.perf_counter(), finish_reason="length")
                self._tell(self._hand_out, [(job, nothing)])
                index += 1
                continue
            for seq in self.engine.add(prompt.token_ids, prompt.params, prompt.prompt_logprobs, prompt.generate):
                # With stop strings the engine itself keeps the text, step by step.
                own_text = seq.text is None and self.engine.tokenizer is not None
                text = self.engine.new_text_stream(prompt.params) if own_text else seq.text
                self._watched[seq.seq_id] = _Watch(job, index, seq, text)
                job.seqs.append(seq)
                index += 1

    def _abort(self, job: Job) -> None:
        self.engine.abort(job.seqs)
        for seq in job.seqs:
            self._watched.pop(seq.seq_id, None)
            self._news.pop(seq.seq_id, None)

    def _publish(self, touched: list[Sequence]) -> None:
        for seq in touched:
            watch = self._watched.get(seq.seq_id)
            if watch is None:
                continue
            if seq.status is Status.FINISHED:
                del self._watched[seq.seq_id]
            elif not watch.job.stream:
                continue
            self._news[seq.seq_id] = watch
        if self._news and self._loop_has_time:
            self._flush()

    def _flush(self) -> None:
        now = time.perf_counter()
        news = [(watch.job, self._delta(watch, now)) for watch in self._news.values()]
        self._news.clear()
        self._loop_has_time = False
        self._tell(self._hand_out, news)

    def _delta(self, watch: _Watch, now: float) -> Delta:
        seq, text, start = watch.seq, watch.text, watch.num_sent
        end = watch.num_sent = seq.num_output_tokens
        token_ids = seq.token_ids[seq.num_prompt_tokens + start :]
        finished = seq.status is Status.FINISHED
        if text is not None and seq.text is None:
            text.push(token_ids)
            if finished:
                text.finish()
        return Delta(
            watch.index,
            now,
            text=text.take_delta() if text is not None else "",
            token_ids=token_ids,
            logprobs=seq.logprobs[start:end],
            top_logprobs=seq.top_logprobs[start:end],
            prompt_logprobs=[] if start else seq.prompt_token_logprobs,
            prompt_top=[] if start else seq.prompt_top_logprobs,
            num_cached_tokens=seq.num_cached_tokens,
            num_output_tokens=end,
            finish_reason=seq.finish_reason if finished else None,
            stop_reason=seq.stop_reason,
            error=seq.error,
            first_token_time=seq.first_token_time,
        )
