"""A runner without a model. It keeps rows and a KV cache as a device would, and refuses a step that no device could
run. Its tokens are a function of the sequence's true prefix as the cache has it, so that a lost, doubled or overwritten
token changes every one that follows; `expected_tokens` says what they must be."""

import math
from collections import deque

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.engine.step import Logprobs, StepResult
from nanovllm.sampling_params import SamplingParams

VOCAB = 101


def extend(state, token):
    """The state after one more token: it stands for the KV of a position, which depends on the whole prefix."""
    return hash((state, token))


def state_of(tokens):
    """The state of a whole prefix."""
    state = 0
    for token in tokens:
        state = extend(state, token)
    return state


def draw(state, seed, banned=()):
    """The token that follows a prefix, for a seed; the first of its candidates that is not banned."""
    tries = 0
    while (token := hash((state, seed, tries)) % VOCAB) in banned:
        tries += 1
    return token


def logprob(state, token):
    """A made-up log probability, unlike for each prefix and token."""
    return -(hash((state, token, -2)) % 10007) / 100


def top_logprobs(state, k):
    """The k "most likely" tokens of a prefix, with their log probabilities."""
    return [(hash((state, i)) % VOCAB, -float(i)) for i in range(k)]


def expected_tokens(prompt, max_tokens, seed=0, stop_ids=(), min_tokens=0):
    """What a sequence must generate, whatever the schedule."""
    state, output = state_of(prompt), []
    while len(output) < max_tokens and not (output and output[-1] in stop_ids):
        output.append(draw(state, seed, stop_ids if len(output) < min_tokens else ()))
        state = extend(state, output[-1])
    return output


def expected_scores(tokens):
    """Log probability of each token but the first."""
    return [logprob(state_of(tokens[:i]), tokens[i]) for i in range(1, len(tokens))]


def sampled_rows(step):
    """Rows that draw a token, in the order of the results."""
    return step.decode_rows or [chunk.row for chunk in step.chunks if chunk.samples]


class FakeRunner:
    """Runs the steps of a scheduler.

    Every check is an assert with a message: a failure is a fault of the scheduler. `broken_tokens` are those at which
    the model's logits are not finite.
    """

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.num_rows = scheduler._num_rows
        self.budget = scheduler.max_num_batched_tokens
        self.block_size = scheduler.block_manager.block_size
        self.num_blocks = len(scheduler.block_manager.blocks)
        self.broken_tokens = set()
        self.kv = {}  # slot: (token, state)
        self.last_token, self.context_len, self.block_table, self.history = {}, {}, {}, {}
        self.starts = {}  # row: RowStart
        self.row_state, self.snapshots = {}, {}  # what a row, or a slot, keeps beside the cache: the state at its end

    def run(self, step):
        """The StepResult of a step."""
        assert bool(step.chunks) != bool(step.decode_rows), "a step is either a prefill or a decode"
        rows = [chunk.row for chunk in step.chunks] or step.decode_rows
        assert len(set(rows)) == len(rows), f"a row is used twice in a step: {rows}"
        self._live = {seq.row: seq for seq in self.scheduler.running}
        assert set(rows) <= self._live.keys(), f"rows {rows} are not all held by running sequences"
        self._start_rows(step, rows)
        self._update_tables(step)
        if step.chunks:
            states, scores = self._prefill(step)
        else:
            states, scores = self._decode(step), []
        for row in rows:
            assert self.block_table[row] == self._live[row].block_table, f"row {row}: host and device tables differ"
        return self._sample(step, states, scores)

    def _start_rows(self, step, rows):
        for start in step.starts:
            assert start.row in rows and 0 <= start.row < self.num_rows, f"row {start.row} starts and does not run"
            self.starts[start.row] = start
            self.block_table[start.row] = []
            self.context_len[start.row] = self.last_token[start.row] = None
            self.history[start.row] = [*start.prompt_token_ids, *start.output_token_ids]
            self.row_state[start.row] = 0 if start.snapshot is None else self.snapshots[start.snapshot]
        assert len({start.row for start in step.starts}) == len(step.starts), "a row starts twice in a step"

    def _update_tables(self, step):
        updates = step.block_updates
        for row, column, block_id in zip(updates.rows, updates.columns, updates.block_ids, strict=True):
            table = self.block_table[row]
            assert 0 <= block_id < self.num_blocks, f"block {block_id} of {self.num_blocks}"
            assert column == len(table), f"row {row}: column {column} is written and {len(table)} are there"
            assert block_id not in table, f"row {row} holds block {block_id} twice"
            table.append(block_id)

    def _prefill(self, step):
        num_tokens = sum(len(chunk.token_ids) for chunk in step.chunks)
        assert num_tokens == step.num_tokens <= self.budget, f"{num_tokens} tokens, the budget is {self.budget}"
        # Everything is read before anything is written: a prefix of this very step is not there yet.
        befores = [self._read_chunk(chunk) for chunk in step.chunks]
        sampled, scores = [], []
        for chunk, before in zip(step.chunks, befores, strict=True):
            states = [before]
            for offset, token in enumerate(chunk.token_ids):
                states.append(self._write(chunk.row, chunk.start + offset, token, states[-1]))
            self.context_len[chunk.row] = chunk.start + len(chunk.token_ids)
            self._snapshot(chunk, states)
            if chunk.samples:
                sampled.append(states[-1])
            if chunk.score_targets:
                scores.append(self._score(chunk, states[1:]))
        return sampled, scores

    def _snapshot(self, chunk, states):
        """A row that needs more than blocks goes on from where it stands, and leaves snapshots on the way."""
        if self.scheduler.block_manager._snapshots is None:
            assert not chunk.snapshots, "a snapshot is taken and none is needed"
            return
        assert self.row_state[chunk.row] == states[0], f"row {chunk.row} does not stand at position {chunk.start}"
        self.row_state[chunk.row] = states[-1]
        for length, slot in chunk.snapshots:
            assert chunk.start < length <= chunk.start + len(chunk.token_ids), "a snapshot of another chunk"
            self.snapshots[slot] = states[length - chunk.start]

    def _read_chunk(self, chunk):
        """The state before a chunk."""
        assert chunk.token_ids, f"row {chunk.row}: an empty chunk"
        known = self.context_len[chunk.row]
        if known is None:  # started in this step, maybe behind a known prefix
            assert chunk.start % self.block_size == 0, f"a prefix of {chunk.start} tokens is shared: no whole blocks"
        else:
            assert chunk.start == known, f"row {chunk.row}: a chunk starts at {chunk.start}, {known} are computed"
        self._check_covered(chunk.row, chunk.start + len(chunk.token_ids))
        return self._read(chunk.row, chunk.start)

    def _score(self, chunk, states):
        first = chunk.score_start - chunk.start
        assert first >= 0 and first + len(chunk.score_targets) <= len(states), "rows of another chunk are scored"
        pairs = list(zip(states[first:], chunk.score_targets, strict=False))
        tops = [top_logprobs(state, chunk.num_score_logprobs) for state, _ in pairs]
        chosen = [math.nan if target in self.broken_tokens else logprob(state, target) for state, target in pairs]
        return Logprobs(chosen, [[i for i, _ in top] for top in tops], [[value for _, value in top] for top in tops])

    def _decode(self, step):
        states = []
        for row, context_len in zip(step.decode_rows, step.context_lens, strict=True):
            position = self.context_len[row]
            assert context_len == position + 1, f"row {row}: the host says {context_len} tokens, there are {position}"
            self._check_covered(row, context_len)
            states.append(self._write(row, position, self.last_token[row], self._read(row, position)))
            self.context_len[row] = context_len
        return states

    def _sample(self, step, states, scores):
        rows, sampling = sampled_rows(step), step.sampling
        assert (sampling is not None) == bool(rows), "sampling is said where nothing is sampled, or the reverse"
        if sampling is None:
            return StepResult([], None, scores)
        starts = [self.starts[row] for row in rows]
        assert sampling.greedy == all(start.params.greedy for start in starts)
        assert sampling.filtered == any(start.params.filtered for start in starts)
        assert sampling.penalized == [i for i, start in enumerate(starts) if start.params.penalized]
        banned = {
            position: {i for i, value in zip(ids, values, strict=True) if value == -math.inf}
            for position, ids, values in sampling.biases
        }
        token_ids = [
            draw(state, start.seed, banned.get(i, ()))
            for i, (state, start) in enumerate(zip(states, starts, strict=True))
        ]
        for i, row in enumerate(rows):
            if i in sampling.penalized:
                context = [self.kv[self._slot(row, p)][0] for p in range(self.context_len[row])]
                assert self.history[row] == context, "penalties are computed from other tokens than the sequence has"
                self.history[row].append(token_ids[i])
        chosen = [logprob(state, token) for state, token in zip(states, token_ids, strict=True)]
        token_ids = [-1 if token in self.broken_tokens else token for token in token_ids]
        self.last_token.update((row, max(token, 0)) for row, token in zip(rows, token_ids, strict=True))
        if sampling.num_logprobs < 0:
            return StepResult(token_ids, None, scores)
        tops = [top_logprobs(state, sampling.num_logprobs) for state in states]
        top_ids, top = [[i for i, _ in one] for one in tops], [[value for _, value in one] for one in tops]
        return StepResult(token_ids, Logprobs(chosen, top_ids, top), scores)

    # The cache

    def _slot(self, row, position):
        return self.block_table[row][position // self.block_size] * self.block_size + position % self.block_size

    def _check_covered(self, row, num_tokens):
        held, needed = len(self.block_table[row]), -(-num_tokens // self.block_size)
        assert held == needed, f"row {row} holds {held} blocks; {num_tokens} tokens need {needed}"

    def _read(self, row, num_tokens):
        """The state after the first tokens of a row, as the cache has them; they must be those of one sequence."""
        state = 0
        for position in range(num_tokens):
            slot = self._slot(row, position)
            assert slot in self.kv, f"row {row}: position {position} is read and was never written"
            token, cached = self.kv[slot]
            state = extend(state, token)
            assert cached == state, f"row {row}: what is cached for position {position} belongs to another prefix"
        return state

    def _write(self, row, position, token, before):
        slot = self._slot(row, position)
        block_id = slot // self.block_size
        owners = [other for other, seq in self._live.items() if block_id in seq.block_table]
        assert owners == [row], f"row {row} writes block {block_id}, which rows {owners} hold"
        state = extend(before, token)
        self.kv[slot] = (token, state)
        return state


class FakeEngine:
    """A scheduler and a fake runner, driven one step apart as `LLMEngine.step` does; checks the books at each step.

    lag: steps by which reading is behind launching.
    """

    def __init__(
        self, block_size=4, num_blocks=64, max_num_seqs=8, budget=64, prefix_caching=True, lag=1, num_snapshots=None
    ):
        self.blocks = BlockManager(num_blocks, block_size, prefix_caching, num_snapshots)
        self.scheduler = Scheduler(max_num_seqs, budget, self.blocks)
        self.runner = FakeRunner(self.scheduler)
        self.steps = []  # every step launched
        self.seqs = []
        self._lag = lag
        self._in_flight = deque()

    def add(self, prompt, max_tokens=4, seed=0, stop_ids=(), prompt_logprobs=None, **params):
        """Queue a sequence."""
        prompt = list(prompt)
        longest = len(prompt) + max_tokens
        assert self.blocks.num_blocks_for(longest) <= len(self.blocks.blocks), "the engine would refuse this request"
        seq = Sequence(
            len(self.seqs),
            prompt,
            SamplingParams(**{"temperature": 0.0, **params}),
            seed,
            max_tokens,
            frozenset(stop_ids),
            prompt_logprobs,
        )
        self.seqs.append(seq)
        self.scheduler.add(seq)
        return seq

    def step(self):
        """Launch, then read the step before; returns the step launched."""
        step = self.scheduler.schedule()
        if step is not None:
            self.steps.append(step)
            self._in_flight.append(self.runner.run(step))
        stuck = step is None and not self._in_flight and self.scheduler.has_unfinished
        assert not stuck, "nothing goes on any more"
        if self._in_flight and (step is None or len(self._in_flight) > self._lag):
            self.scheduler.update(self._in_flight.popleft())
        self.scheduler.check()
        for seq in self.scheduler.waiting:
            assert not seq.block_table and seq.row == -1, "a waiting sequence holds something"
        return step

    def step_until(self, condition, limit=1000):
        """Step until condition() holds."""
        for _ in range(limit):
            if condition():
                return
            self.step()
        raise AssertionError(f"not after {limit} steps")

    def run(self, limit=1000):
        """Step until everything is over; all must be free then."""
        self.step_until(lambda: not self.scheduler.has_unfinished, limit)
        self.check_idle()

    def lose_step(self):
        """An exception in a step: what was in flight is gone."""
        self._in_flight.clear()
        return self.scheduler.reset()

    def check_idle(self):
        """Nobody holds anything."""
        assert all(seq.status is Status.FINISHED for seq in self.seqs)
        assert self.blocks.num_free == len(self.blocks.blocks)
        assert sorted(self.scheduler._free_rows) == list(range(self.runner.num_rows))
        assert not any(block.ref_count for block in self.blocks.blocks)
        assert all(seq.num_pending == 0 or seq.finish_reason != "length" for seq in self.seqs)


def check_output(seq):
    """A sequence that ended by itself has its tokens, its reason and its log probabilities; each once."""
    prompt = seq.token_ids[: seq.num_prompt_tokens]
    expected = expected_tokens(prompt, seq.max_tokens, seq.seed, seq.stop_ids, seq.params.min_tokens)
    assert seq.output_token_ids == expected
    stopped = bool(expected) and expected[-1] in seq.stop_ids
    assert seq.finish_reason == ("stop" if stopped else "length")
    if seq.params.logprobs is not None:
        states = [state_of(seq.token_ids[:i]) for i in range(len(prompt), len(seq.token_ids))]
        assert seq.logprobs == [logprob(*pair) for pair in zip(states, expected, strict=True)]
        assert seq.top_logprobs == [top_logprobs(state, seq.params.logprobs) for state in states]
    if seq.prompt_logprobs is not None:
        assert seq.prompt_token_logprobs == expected_scores(prompt)
        states = [state_of(prompt[:i]) for i in range(1, len(prompt))]
        assert seq.prompt_top_logprobs == [top_logprobs(state, seq.prompt_logprobs) for state in states]


def finish_all(engine, limit=1000):
    """Run to the end; every sequence that was not aborted and did not fail has what it must have."""
    engine.run(limit)
    for seq in engine.seqs:
        if seq.finish_reason not in ("abort", "error"):
            check_output(seq)
