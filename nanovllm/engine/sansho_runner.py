"""The device side of an engine for Sansho: beside rows and blocks, every row owns window caches and states."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace

import numpy as np
import torch

from nanovllm import platform
from nanovllm.attention.base import AttentionBackend, AttentionMetadata, KVCache
from nanovllm.attention.window import Ring, WindowMetadata
from nanovllm.config import EngineConfig
from nanovllm.context import ForwardContext, forward_context
from nanovllm.engine.batch import Inputs, Rows, decode_inputs, prefill_inputs, upload
from nanovllm.engine.cuda_graph import PREFILL_SEQS, StepGraphs, graph_token_counts
from nanovllm.engine.results import PLAIN, PendingResult, draw_tokens, score_chunks
from nanovllm.engine.sansho_batch import Plan, Room, pack, plan_prefill, snapshot_rows, unpack
from nanovllm.engine.step import BlockUpdates, PrefillChunk, RowStart, Sampling, Step
from nanovllm.kernels.ssd import Segment
from nanovllm.layers.embed_head import empty_logits
from nanovllm.layers.mamba import MambaState
from nanovllm.models.sansho import SanshoCaches, SanshoForCausalLM, SanshoStep
from nanovllm.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

# Snapshots of prefixes when sansho_prefix_checkpoints is not given: at most so many, in at most this share of memory.
_MOST_SNAPSHOTS, _SNAPSHOT_SHARE = 256, 0.25
# Tokens of the longest captured prefill, as hundreds of launches for looped layers take the host longer than their work
# takes the device; and so many of them give a graph room for one more sequence.
_LONGEST_CAPTURED, _TOKENS_A_SEQ = 16384, 512


class SanshoModelRunner:
    """Runs steps of a Sansho model on one device. Rows of state are the sequences' rows, the padding row, and behind
    it the snapshots, so that taking and resuming one is a copy between rows.

    Args: as of `ModelRunner`.
    """

    def __init__(
        self,
        model: SanshoForCausalLM,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        self.model = model
        self.backend = backend
        self.dtype = dtype
        self.device = device
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.specs = model.cache_specs(dtype.itemsize)
        self.bytes_per_block = sum(spec.bytes_per_block(block_size) for spec in self.specs)
        self.bytes_per_row = sum(spec.bytes_per_row(block_size) for spec in self.specs)
        self.ring = Ring(model.config.sliding_window, block_size)
        self.num_blocks = 0
        self.num_snapshots: int | None = 0
        self.graphs: StepGraphs | None = None
        self.caches: SanshoCaches | None = None
        self._replay_most: int | None = None
        self._make_rows(max_num_seqs)

    def _make_rows(self, num_rows: int) -> None:
        max_blocks = -(-self.max_model_len // self.block_size)
        self.rows = Rows(num_rows, max_blocks, self.model.config.vocab_size, self.device)
        self._decoded = [0] * num_rows

    def reserve(self, budget: int | None, config: EngineConfig) -> int:
        """Decide on rows and snapshots, which `allocate` makes; returns the bytes they take.

        Args:
            budget: bytes for all caches; None where the number of blocks is given. Rows take half of it at most, and
                are fewer than max_num_seqs if need be.
        """
        rows, snapshots = config.max_num_seqs, config.sansho_prefix_checkpoints
        fit = None if budget is None else budget // 2 // self.bytes_per_row - 1
        if fit is not None and fit < rows:
            if fit < 1:
                raise ValueError(
                    f"no memory for the state of one sequence: {self.bytes_per_row / 2**20:.1f} MiB each, and "
                    f"{budget / 2**20:.0f} MiB are there for all caches; raise gpu_memory_utilization"
                )
            logger.warning("at most %d sequences run at once, not max_num_seqs=%d: memory holds no more", fit, rows)
            self._make_rows(fit)
        if snapshots is None:
            snapshots = min(_MOST_SNAPSHOTS, 2 * self.rows.padding_row)
            if budget is not None:
                snapshots = min(snapshots, int(budget * _SNAPSHOT_SHARE) // self.bytes_per_row)
        self.num_snapshots = snapshots
        return (self.rows.padding_row + 1 + snapshots) * self.bytes_per_row

    def allocate(self, num_blocks: int) -> None:
        """Make all caches, with one block more than asked for, which stays zero for padding to read."""
        self._allocate(num_blocks, self.rows.padding_row + 1 + self.num_snapshots)

    def _allocate(self, num_blocks: int, num_rows: int) -> None:
        self.num_blocks = num_blocks
        *windows, shared, conv, ssm = self.specs
        ring = (num_rows * self.ring.num_blocks, self.block_size, windows[0].num_kv_heads, windows[0].head_dim)
        self._rings = KVCache(*(self._empty(len(windows), *ring) for _ in range(2)))
        pool = (num_blocks + 1, self.block_size, shared.num_kv_heads, shared.head_dim)
        # What is not written stays untouched: on a CPU its memory is not even taken until used.
        kv = KVCache(*(self._empty(*pool) for _ in range(2)))
        state = MambaState(self._empty(num_rows, *conv.shape), self._empty(num_rows, *ssm.shape, dtype=torch.float32))
        padding = min(self.rows.padding_row, num_rows - 1)
        for tensor, index in ((kv.k, num_blocks), (kv.v, num_blocks), (state.conv, padding), (state.ssm, padding)):
            tensor[index] = 0
        self.caches = SanshoCaches([KVCache(*pair) for pair in zip(*self._rings, strict=True)], kv, state)

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    @torch.inference_mode()
    def warm_up(self, num_tokens: int, max_model_len: int) -> None:
        """Run the largest prefill there can be on throw-away caches; see `ModelRunner.warm_up`."""
        lengths = [max_model_len] * (num_tokens // max_model_len) + [num_tokens % max_model_len]
        lengths = [n for n in lengths if n][: self.rows.padding_row]
        needed = [-(-n // self.block_size) for n in lengths]
        self._allocate(sum(needed), len(lengths))
        chunks = [PrefillChunk(i, 0, [0] * n, True, 0, [], 0) for i, n in enumerate(lengths)]
        sampling = Sampling(greedy=False, filtered=True, penalized=[], biases=[], num_logprobs=0)
        first = 0
        for i, count in enumerate(needed):
            self.rows.block_table[i, :count] = torch.arange(first, first + count)
            first += count
        with platform.as_current(self.device):
            self._clear(list(range(len(lengths))))
            self._prefill(chunks, sampling)
            logits = torch.zeros(len(self.rows.last_token), self.model.config.vocab_size, device=self.device)
            draw_tokens(self.rows, logits, torch.arange(len(logits), device=self.device), sampling)
        platform.synchronize(self.device)
        self.caches = self._rings = None

    @torch.inference_mode()
    def run(self, step: Step) -> PendingResult:
        """Launch a step; on a GPU this returns before it is done."""
        with platform.as_current(self.device):
            self.rows.apply(step)
            self._start(step.starts)
            if step.chunks:
                return self._prefill(step.chunks, step.sampling)
            return self._decode(step)

    @torch.inference_mode()
    def capture(self, config: EngineConfig, show_progress: bool) -> float:
        """Capture decode steps and short prefills as CUDA graphs, where device, backend and config allow it; returns
        the seconds it took."""
        self._replay_most = config.sansho_decode_graph_replay_max_tokens
        if self.device.type != "cuda" or not self.backend.in_cuda_graph or self._replay_most == 0:
            return 0.0
        max_num_seqs = self.rows.padding_row
        self._logits = empty_logits(max_num_seqs, self.model.config.vocab_size, self.dtype, self.device)
        graphs = StepGraphs(
            self._decode_plain,
            self._prefill_plain,
            self._pack_short,
            max_num_seqs,
            graph_token_counts(config.max_num_batched_tokens, _LONGEST_CAPTURED),
            self.rows.padding_row,
            self.device,
        )
        with platform.as_current(self.device):
            seconds = graphs.capture(show_progress)
        self.graphs = graphs
        return seconds

    def touch(self, config: EngineConfig) -> None:
        """Run every wanted shape of prompts once, and its decode steps; rows and blocks are void afterwards, as when a
        sequence ends."""
        steps = config.sansho_warmup_decode_tokens
        for length, size in itertools.product(config.sansho_warmup_prompt_lens, config.sansho_warmup_batch_sizes):
            blocks = -(-(length + steps) // self.block_size)
            too_long = length + steps > self.max_model_len or length * size > config.max_num_batched_tokens
            if too_long or size > self.rows.padding_row or blocks * size > self.num_blocks:
                logger.info("not touched: %d prompts of %d tokens do not fit", size, length)
                continue
            rows, updates = list(range(size)), BlockUpdates()
            for row in rows:
                updates.add(row, 0, list(range(row * blocks, (row + 1) * blocks)))
            starts = [RowStart(row, SamplingParams(), 0, [], []) for row in rows]
            chunks = [PrefillChunk(row, 0, [0] * length, True, 0, [], 0) for row in rows]
            self.run(Step(starts, updates, chunks, [], [], PLAIN)).wait()
            for i in range(steps):
                self.run(Step([], BlockUpdates(), [], rows, [length + i + 1] * size, PLAIN)).wait()

    def exit(self) -> None:
        """Let go of all memory on the device; a second time does nothing."""
        self.graphs = self._logits = None
        self.model = self.caches = self._rings = self.rows = None
        platform.empty_cache(self.device)

    def _start(self, starts: list[RowStart]) -> None:
        """Rows begin with empty states, or with a copy of a snapshot; rings need no clearing, as nobody looks behind a
        sequence's first token."""
        fresh = [start.row for start in starts if start.snapshot is None]
        resumed = [
            (start.row, self.rows.padding_row + 1 + start.snapshot) for start in starts if start.snapshot is not None
        ]
        for start in starts:
            self._decoded[start.row] = 0
        if fresh:
            self._clear(fresh)
        if resumed:
            rows, sources = upload(list(zip(*resumed, strict=True)), torch.int64, self.device)
            for tensor in self.caches.state:
                tensor[rows] = tensor[sources]
            for tensor in self._rings:
                by_row = tensor.unflatten(1, (-1, self.ring.num_blocks))
                by_row[:, rows] = by_row[:, sources]

    def _clear(self, rows: list[int]) -> None:
        index = upload(rows, torch.int64, self.device)
        for tensor in self.caches.state:
            tensor.index_fill_(0, index, 0)

    def _forward(self, inputs: Inputs, meta: AttentionMetadata, step: SanshoStep) -> torch.Tensor:
        """`meta` is that of the rows that meet the cross-decoder."""
        if meta.seq_lens:
            self.backend.prepare(meta, self.num_blocks, self.block_size)
        with forward_context(ForwardContext(meta, self.backend)):
            return self.model(inputs.token_ids, inputs.positions, step, self.caches)

    def _decode(self, step: Step) -> PendingResult:
        longest = max(self._decoded[row] for row in step.decode_rows)
        for row in step.decode_rows:
            self._decoded[row] += 1
        token_ids = None
        if self.graphs is not None and (self._replay_most is None or longest < self._replay_most):
            rows, token_ids = self.graphs.decode(step.decode_rows)
            logits = self._logits[: len(rows), : self.model.config.vocab_size]
        else:
            rows = upload(step.decode_rows, torch.int64, self.device)
            logits = self._decode_logits(rows, step.context_lens)
        if token_ids is not None and step.sampling.is_plain:
            return PendingResult(token_ids, None, [], self.device)
        token_ids, logprobs = draw_tokens(self.rows, logits, rows, step.sampling)
        return PendingResult(token_ids, logprobs, [], self.device)

    def _decode_logits(self, rows: torch.Tensor, seq_lens: list[int], out: torch.Tensor | None = None) -> torch.Tensor:
        """Compute one token of each row and move its context on; returns the logits of the next, [R, V]."""
        inputs = decode_inputs(rows, self.rows, self.block_size, seq_lens)
        meta = inputs.attention
        window = WindowMetadata(self.ring.window, rows=rows)
        hidden = self._forward(inputs, meta, SanshoStep(window, meta.slot_mapping, rows))
        self.rows.context_len[rows] = meta.context_lens.to(torch.int64)
        return self.model.compute_logits(hidden, out)

    def _decode_plain(self, rows: torch.Tensor) -> torch.Tensor:
        """What a CUDA graph holds; see `ModelRunner`."""
        logits = self._decode_logits(rows, [self.max_model_len] * len(rows), self._logits[: len(rows)])
        return draw_tokens(self.rows, logits, rows, PLAIN)[0]

    def _prefill(self, chunks: list[PrefillChunk], sampling: Sampling | None) -> PendingResult:
        query_lens = [len(chunk.token_ids) for chunk in chunks]
        scored, samples = any(chunk.score_targets for chunk in chunks), sampling is not None
        captured = self.graphs.prefill(chunks, sum(query_lens)) if self.graphs is not None and samples else None
        if captured is not None:
            rows, hidden, last, token_ids = captured
        else:
            seq_lens = [chunk.start + n for chunk, n in zip(chunks, query_lens, strict=True)]
            plan = self._plan(chunks)
            room = plan.room(self._chunk_size, scored)
            packed = upload(pack(plan, room, self._chunk_size, self.rows.padding_row), torch.int64, self.device)
            lens = query_lens, seq_lens
            rows, hidden, last = self._prefill_hidden(packed, room, *lens, scored, samples, plan.segments)
        scores = score_chunks(self.model, hidden, chunks) if scored else []
        if not samples:
            return PendingResult(None, None, scores, self.device)
        if captured is not None and sampling.is_plain and all(chunk.samples for chunk in chunks):
            return PendingResult(token_ids[: len(chunks)], None, [], self.device)
        chosen = upload([i for i, chunk in enumerate(chunks) if chunk.samples], torch.int64, self.device)
        logits = self.model.compute_logits(hidden[last[chosen] if scored else chosen])
        token_ids, logprobs = draw_tokens(self.rows, logits, rows[chosen], sampling)
        return PendingResult(token_ids, logprobs, scores, self.device)

    def _plan(self, chunks: list[PrefillChunk]) -> Plan:
        return plan_prefill(chunks, snapshot_rows(chunks, self.rows.padding_row + 1), self.ring)

    @property
    def _chunk_size(self) -> int:
        return self.model.config.mamba_chunk_size

    def _prefill_hidden(
        self,
        packed: torch.Tensor,
        room: Room,
        query_lens: list[int],
        seq_lens: list[int],
        scored: bool = False,
        samples: bool = True,
        segments: list[Segment] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute the tokens of a packed batch and move contexts on.

        Args:
            packed, room, segments: see `unpack`.
            query_lens, seq_lens: as `prefill_inputs` takes them.
            scored: all tokens' hidden states are wanted.
            samples: some chunk's last one is.

        Returns:
            rows [S]; hidden states of all tokens, of the sequences' last ones or of none; which tokens those are [S].
        """
        base, window, pieces = unpack(packed, room, self.ring, self._chunk_size, segments)
        rows, inputs = prefill_inputs(base, room.seqs, self.rows, self.block_size, query_lens, seq_lens)
        meta = inputs.attention
        last = window.cu_seqlens_q[1:].to(torch.int64) - 1
        step = SanshoStep(window, meta.slot_mapping, rows, pieces)
        if not scored:
            reading = len(rows) if samples else 0
            step.last, step.rows = last[:reading], rows[:reading]
            one = {"query_lens": [1] * reading, "seq_lens": seq_lens[:reading], "is_decode": True, "scratch": {}}
            meta = replace(meta, cu_seqlens_q=None, cu_seqlens_k=None, **one)
        hidden = self._forward(inputs, meta, step)
        self.rows.context_len[rows] = inputs.attention.context_lens.to(torch.int64)
        return rows, hidden, last

    def _short_room(self, num_tokens: int) -> Room:
        seqs = max(PREFILL_SEQS, num_tokens // _TOKENS_A_SEQ)
        return Room.bucket(min(seqs, self.rows.padding_row), num_tokens, self.ring, self._chunk_size)

    def _pack_short(self, chunks: list[PrefillChunk], num_tokens: int) -> np.ndarray | None:
        """What a CUDA graph for so many tokens takes; None for scored prompts, too many sequences or snapshots."""
        plan, room = self._plan(chunks), self._short_room(num_tokens)
        fits = room.holds(plan.room(self._chunk_size, False)) and not any(chunk.score_targets for chunk in chunks)
        return pack(plan, room, self._chunk_size, self.rows.padding_row) if fits else None

    def _prefill_plain(self, packed: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, ...]:
        """What a CUDA graph of a short prefill holds; see `ModelRunner`."""
        room = self._short_room(num_tokens)
        rows, hidden, last = self._prefill_hidden(packed, room, [num_tokens], [self.max_model_len] * room.seqs)
        logits = self.model.compute_logits(hidden, self._logits[: room.seqs])
        return rows, hidden, last, draw_tokens(self.rows, logits, rows, PLAIN)[0]
