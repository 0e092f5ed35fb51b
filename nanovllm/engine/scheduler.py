"""Who runs next. Continuous batching with chunked prefill, and preemption by recompute when blocks run out.

The policy: a step is either a prefill (chunks of waiting prompts, first come first served, up to
`max_num_batched_tokens`) or a decode (one token for every running sequence). Waiting prompts go first, but never two
prefill steps in a row while somebody could decode: so a running sequence waits at most one prefill step for its next
token, however many prompts keep coming.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field

from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.engine.step import Logprobs, PrefillChunk, RowStart, Sampling, Step, StepResult


@dataclass(slots=True)
class _Plan:
    """A step and whose results it brings, in their order; of a prefill, while it is made: the tokens it may still
    compute, and the blocks it makes known, which can be read from the next step on."""

    budget: int = 0
    step: Step = field(default_factory=Step)
    sampled: list[Sequence] = field(default_factory=list)
    scored: list[Sequence] = field(default_factory=list)
    computing: set[int] = field(default_factory=set)


class Scheduler:
    """Queues, rows and blocks; no device, no model.

    Args:
        max_num_seqs: rows of device state, and so the most sequences that run at once.
        max_num_batched_tokens: most tokens of a prefill step.
        block_manager: the pool; it must hold at least one sequence of the longest length that is ever added.
    """

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int, block_manager: BlockManager) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self.block_manager = block_manager
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._unfinished: dict[int, Sequence] = {}  # also those on their way between `waiting` and `running`
        self._free_rows = list(range(max_num_seqs))
        self._num_rows = max_num_seqs
        self._launched: deque[_Plan] = deque()
        self._last_was_prefill = False

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence waits or runs, or a launched step is not read yet."""
        return bool(self.waiting or self.running or self._launched)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence."""
        self._unfinished[seq.seq_id] = seq
        self.waiting.append(seq)

    def schedule(self) -> Step | None:
        """The next step to launch, or None when nothing can go on before results are read.

        Everything in the books counts as done once a step is launched: steps run in launch order.
        """
        ready = [seq for seq in self.running if seq.is_decoding and seq.wants_token]
        step = None if ready and self._last_was_prefill else self._schedule_prefill()
        self._last_was_prefill = step is not None
        return step or self._schedule_decode(ready)

    def update(self, result: StepResult) -> list[Sequence]:
        """Take in the results of the oldest launched step; returns the sequences that went on or ended.

        Results of sequences that ended since the launch are dropped.
        """
        launched = self._launched.popleft()
        touched: dict[int, Sequence] = {}
        for seq, scores in zip(launched.scored, result.scores, strict=True):
            if seq.status is not Status.FINISHED:
                self._take_scores(seq, scores)
                touched[seq.seq_id] = seq
        for i, seq in enumerate(launched.sampled):
            if seq.status is not Status.FINISHED:
                self._take_token(seq, result.token_ids[i], result.logprobs, i)
                touched[seq.seq_id] = seq
        return list(touched.values())

    def finish(self, seq: Sequence, reason: str, stop_reason: str | int | None = None) -> None:
        """End a sequence wherever it is, and free what it holds; a second time changes nothing but the reason."""
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        if seq.status is Status.RUNNING:
            self._leave_row(seq)
        elif seq.status is Status.WAITING:
            self.waiting.remove(seq)
        seq.status = Status.FINISHED
        self._unfinished.pop(seq.seq_id, None)

    def reset(self) -> list[Sequence]:
        """A step was lost, maybe with this scheduler half way through it: whatever the books say, end every sequence
        with reason "abort" and start from free rows and an empty pool.

        Returns the sequences that were ended.
        """
        ended = list(self._unfinished.values())
        for seq in ended:
            seq.status, seq.finish_reason = Status.FINISHED, "abort"
            seq.row, seq.is_decoding, seq.block_table = -1, False, []
        self._unfinished.clear()
        self.waiting.clear()
        self.running.clear()
        self._launched.clear()
        self._free_rows = list(range(self._num_rows))
        self._last_was_prefill = False
        self.block_manager.reset()
        return ended

    def check(self) -> None:
        """Compare rows and blocks with what the running sequences hold.

        Raises:
            RuntimeError: the books do not balance; the message has the numbers.
        """
        rows = sorted([seq.row for seq in self.running] + self._free_rows)
        if rows != list(range(self._num_rows)):
            raise RuntimeError(
                f"rows do not balance: {len(self.running)} running + {len(self._free_rows)} free of {self._num_rows}"
            )
        self.block_manager.check(self.running)

    # Prefill

    def _schedule_prefill(self) -> Step | None:
        plan = _Plan(self.max_num_batched_tokens)
        if self.running and not self.running[-1].is_decoding:
            # Admission stops at a prompt that the budget cuts, so one prefill at most is unfinished; it stays the last.
            seq = self.running[-1]
            end = min(seq.num_computed + plan.budget, len(seq.token_ids))
            if self.block_manager.num_new_blocks(seq, end, []) > self.block_manager.num_free:
                return None  # who decodes now ends or makes room by preemption, and nobody may overtake
            self._admit(plan, plan.budget // 2, seq)
            self._add_chunk(seq, plan)
        if not self.running or self.running[-1].is_decoding:
            self._admit(plan, plan.budget)
        return self._launch(plan) if plan.step.chunks else None

    def _launch(self, plan: _Plan) -> Step:
        plan.step.sampling = self._sampling(plan.sampled)
        for seq in plan.sampled:
            seq.num_pending += 1
        self._launched.append(plan)
        return plan.step

    def _admit(self, plan: _Plan, room: int, unfinished: Sequence | None = None) -> None:
        """Start waiting sequences in order of arrival while rows, blocks and `room` tokens of the budget last. Beside
        an unfinished prefill only those that fit whole: a short prompt does not wait for all chunks of a long one."""
        deferred: list[Sequence] = []
        least = plan.budget - room
        while self.waiting and self._free_rows and plan.budget > least:
            seq = self.waiting[0]
            if seq.num_pending:
                break  # preempted a moment ago: its last token is not read yet
            prefix = self.block_manager.find_prefix(seq)
            if self._is_computing(prefix, plan):
                # An equal prefix is being computed in this very step; one step later it is there to share.
                deferred.append(self.waiting.popleft())
                continue
            # Room for the whole prompt, not only its first chunk, and a block to grow for each running sequence:
            # admitting more would soon preempt it again.
            needed = self.block_manager.num_new_blocks(seq, len(seq.token_ids), prefix) + len(self.running)
            if unfinished is not None:
                needed += self.block_manager.num_new_blocks(unfinished, len(unfinished.token_ids), [])
                if len(seq.token_ids) - len(prefix) * self.block_manager.block_size > plan.budget - least:
                    break
            if needed > self.block_manager.num_free:
                break
            self.waiting.popleft()
            self._start(seq, prefix, plan.step)
            if unfinished is not None:
                self.running[-2:] = seq, unfinished
            self._add_chunk(seq, plan)
        self.waiting.extendleft(reversed(deferred))

    def _is_computing(self, prefix: list[Block], plan: _Plan) -> bool:
        slot = self.block_manager.snapshot_slot(prefix)
        taking = slot is not None and any(slot == other for chunk in plan.step.chunks for _, other in chunk.snapshots)
        return taking or any(block.block_id in plan.computing for block in prefix)

    def _start(self, seq: Sequence, prefix: list[Block], step: Step) -> None:
        seq.row = heapq.heappop(self._free_rows)
        seq.status = Status.RUNNING
        snapshot = self.block_manager.snapshot_slot(prefix)
        self.block_manager.share(seq, prefix)
        if seq.num_preemptions == 0:
            seq.num_cached_tokens = seq.num_computed
        self.running.append(seq)
        wanted = seq.token_ids if seq.params.penalized else []
        prompt, output = wanted[: seq.num_prompt_tokens], wanted[seq.num_prompt_tokens :]
        step.starts.append(RowStart(seq.row, seq.params, seq.seed, prompt, output, snapshot))
        step.block_updates.add(seq.row, 0, seq.block_table)

    def _add_chunk(self, seq: Sequence, plan: _Plan) -> None:
        """As many of the sequence's tokens as the budget allows."""
        start = seq.num_computed
        end = min(start + plan.budget, len(seq.token_ids))
        plan.budget -= end - start
        plan.step.block_updates.add(seq.row, len(seq.block_table), self.block_manager.grow(seq, end))
        seq.num_computed = end
        seq.is_decoding = end == len(seq.token_ids)
        samples = seq.is_decoding and seq.wants_token
        known = seq.num_hashed_blocks
        snapshots = self.block_manager.remember(seq)
        plan.computing.update(seq.block_table[known : seq.num_hashed_blocks])
        scores = self._score_targets(seq, start, end)
        chunk = PrefillChunk(seq.row, start, seq.token_ids[start:end], samples, *scores, snapshots)
        plan.step.chunks.append(chunk)
        if samples:
            plan.sampled.append(seq)
        if chunk.score_targets:
            plan.scored.append(seq)

    @staticmethod
    def _score_targets(seq: Sequence, start: int, end: int) -> tuple[int, list[int], int]:
        """The last three fields of a PrefillChunk: prompt tokens that were not scored before a preemption."""
        score_start = max(start, seq.num_scored)
        score_end = min(end, seq.num_prompt_tokens - 1)
        if seq.prompt_logprobs is None or score_end <= score_start:
            return start, [], 0
        seq.num_scored = score_end
        return score_start, seq.token_ids[score_start + 1 : score_end + 1], seq.prompt_logprobs

    # Decode

    def _schedule_decode(self, ready: list[Sequence]) -> Step | None:
        plan = _Plan()
        for seq in ready:
            if seq.status is not Status.RUNNING:
                continue  # preempted for one before it
            if self._make_room(seq):
                held = len(seq.block_table)
                new_blocks = self.block_manager.grow(seq, seq.num_computed + 1)
                if new_blocks:
                    plan.step.block_updates.add(seq.row, held, new_blocks)
                plan.sampled.append(seq)
        if not plan.sampled:
            return None
        for seq in plan.sampled:
            seq.num_computed += 1
        plan.step.decode_rows = [seq.row for seq in plan.sampled]
        plan.step.context_lens = [seq.num_computed for seq in plan.sampled]
        return self._launch(plan)

    def _make_room(self, seq: Sequence) -> bool:
        """Preempt, last come first, until `seq` can grow by one token; False when it had to go itself."""
        needed = seq.num_computed + 1 > len(seq.block_table) * self.block_manager.block_size
        while needed and self.block_manager.num_free == 0:
            victim = self.running[-1]
            self._leave_row(victim)
            victim.status = Status.WAITING
            victim.num_preemptions += 1
            self.waiting.appendleft(victim)  # its KV is computed anew later
            if victim is seq:
                return False
        return True

    def _leave_row(self, seq: Sequence) -> None:
        self.running.remove(seq)
        heapq.heappush(self._free_rows, seq.row)
        seq.row, seq.is_decoding = -1, False
        self.block_manager.release(seq)

    # Sampling and results

    @staticmethod
    def _sampling(seqs: list[Sequence]) -> Sampling | None:
        if not seqs:
            return None
        biases = []
        for i, seq in enumerate(seqs):
            bias = dict(seq.params.logit_bias or {})
            if seq.num_tokens - seq.num_prompt_tokens < seq.params.min_tokens:
                bias |= dict.fromkeys(seq.stop_ids, -math.inf)
            if bias:
                biases.append((i, list(bias), list(bias.values())))
        return Sampling(
            greedy=all(seq.params.greedy for seq in seqs),
            filtered=any(seq.params.filtered for seq in seqs),
            penalized=[i for i, seq in enumerate(seqs) if seq.params.penalized],
            biases=biases,
            num_logprobs=max(-1 if seq.params.logprobs is None else seq.params.logprobs for seq in seqs),
        )

    def _fail(self, seq: Sequence) -> None:
        seq.error = (
            f"the model's logits are not finite after {len(seq.token_ids)} tokens; a wider dtype "
            "(bfloat16 or float32 for float16) may help"
        )
        self.finish(seq, "error")

    def _take_scores(self, seq: Sequence, scores: Logprobs) -> None:
        seq.prompt_token_logprobs += scores.chosen
        seq.prompt_top_logprobs += _pairs(scores.top_ids, scores.top, seq.prompt_logprobs)
        if any(math.isnan(value) for value in scores.chosen):
            self._fail(seq)
        elif seq.max_tokens == 0 and len(seq.prompt_token_logprobs) == seq.num_prompt_tokens - 1:
            self.finish(seq, "length")

    def _take_token(self, seq: Sequence, token_id: int, logprobs: Logprobs | None, index: int) -> None:
        seq.num_pending -= 1
        if token_id < 0:
            self._fail(seq)
            return
        seq.record_token(token_id)
        if logprobs is not None and seq.params.logprobs is not None:
            seq.logprobs.append(logprobs.chosen[index])
            seq.top_logprobs += _pairs([logprobs.top_ids[index]], [logprobs.top[index]], seq.params.logprobs)
        if token_id in seq.stop_ids:
            self.finish(seq, "stop", token_id if token_id in seq.params.stop_token_ids else None)
        elif seq.num_output_tokens >= seq.max_tokens:
            self.finish(seq, "length")
        elif seq.status is Status.RUNNING:
            self.block_manager.remember(seq)


def _pairs(top_ids: list[list[int]], top: list[list[float]], num_top: int) -> list[list[tuple[int, float]]]:
    """Per token the `num_top` most likely (id, log probability); the step may have computed more for others."""
    return [list(zip(ids[:num_top], values[:num_top], strict=True)) for ids, values in zip(top_ids, top, strict=True)]
