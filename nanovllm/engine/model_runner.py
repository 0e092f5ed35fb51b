"""The device side of an engine: weights, caches, rows; it runs the steps it is given, in order."""

from __future__ import annotations

import logging

import numpy as np
import torch

from nanovllm import platform
from nanovllm.attention.base import AttentionBackend, KVCache
from nanovllm.cache_spec import PagedKVSpec
from nanovllm.config import EngineConfig
from nanovllm.context import ForwardContext, forward_context
from nanovllm.engine.batch import Inputs, Rows, decode_inputs, pack_prefill, prefill_inputs, upload
from nanovllm.engine.cuda_graph import PREFILL_SEQS, StepGraphs, graph_token_counts
from nanovllm.engine.results import PLAIN, PendingResult, draw_tokens, score_chunks
from nanovllm.engine.step import PrefillChunk, Sampling, Step
from nanovllm.layers.embed_head import empty_logits
from nanovllm.models.decoder import CausalDecoder

logger = logging.getLogger(__name__)


class ModelRunner:
    """Runs steps of a decoder on one device.

    Args:
        model: weights on `device`.
        backend: who attends.
        dtype, device: of weights, activations and KV.
        block_size: tokens per KV block.
        max_num_seqs: rows of device state.
        max_model_len: longest sequence.
    """

    def __init__(
        self,
        model: CausalDecoder,
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
        self.specs = model.cache_specs(dtype.itemsize)
        self.bytes_per_block = sum(spec.bytes_per_block(block_size) for spec in self.specs)
        self.max_model_len = max_model_len
        self.num_blocks = 0
        self.num_snapshots: int | None = None  # blocks are all there is to a prefix
        self.graphs: StepGraphs | None = None
        self.caches: list[KVCache] = []
        max_blocks = -(-max_model_len // block_size)
        self.rows = Rows(max_num_seqs, max_blocks, model.config.vocab_size, device)

    def reserve(self, budget: int | None, config: EngineConfig) -> int:
        """Bytes of the `budget` that other caches than blocks take: none."""
        return 0

    def allocate(self, num_blocks: int) -> None:
        """Make the KV pool; one block more than asked for stays zero, for padding to read."""
        self.num_blocks = num_blocks
        self.caches = [self._new_cache(spec) for spec in self.specs]

    def _new_cache(self, spec: PagedKVSpec) -> KVCache:
        shape = (self.num_blocks + 1, self.block_size, spec.num_kv_heads, spec.head_dim)
        cache = KVCache(*(torch.empty(shape, dtype=self.dtype, device=self.device) for _ in range(2)))
        for tensor in cache:
            tensor[-1] = 0  # the others are left untouched: on a CPU their memory is not even taken until used
        return cache

    @torch.inference_mode()
    def warm_up(self, num_tokens: int, max_model_len: int) -> None:
        """Run the largest prefill there can be on throw-away caches, so that memory peaks before the pool is
        sized; `num_tokens` is max_num_batched_tokens."""
        lengths = [max_model_len] * (num_tokens // max_model_len) + [num_tokens % max_model_len]
        lengths = [n for n in lengths if n][: self.rows.last_token.shape[0]]
        self.allocate(sum(-(-n // self.block_size) for n in lengths))
        chunks = [PrefillChunk(i, 0, [0] * n, True, 0, [], 0) for i, n in enumerate(lengths)]
        sampling = Sampling(greedy=False, filtered=True, penalized=[], biases=[], num_logprobs=0)
        first = 0
        for i, n in enumerate(lengths):
            count = -(-n // self.block_size)
            self.rows.block_table[i, :count] = torch.arange(first, first + count)
            first += count
        with platform.as_current(self.device):
            self._prefill(chunks, sampling)
            logits = torch.zeros(len(self.rows.last_token), self.model.config.vocab_size, device=self.device)
            draw_tokens(self.rows, logits, torch.arange(len(logits), device=self.device), sampling)
        platform.synchronize(self.device)
        self.caches = []

    @torch.inference_mode()
    def run(self, step: Step) -> PendingResult:
        """Launch a step; on a GPU this returns before it is done."""
        with platform.as_current(self.device):
            self.rows.apply(step)
            if step.chunks:
                return self._prefill(step.chunks, step.sampling)
            return self._decode(step)

    @torch.inference_mode()
    def capture(self, config: EngineConfig, show_progress: bool) -> float:
        """Capture decode steps and short prefills as CUDA graphs, where device and backend allow it; returns the
        seconds it took."""
        if self.device.type != "cuda" or not self.backend.in_cuda_graph:
            return 0.0
        max_num_seqs = self.rows.padding_row
        self._logits = empty_logits(max_num_seqs, self.model.config.vocab_size, self.dtype, self.device)
        graphs = StepGraphs(
            self._decode_plain,
            self._prefill_plain,
            self._pack_short,
            max_num_seqs,
            graph_token_counts(config.max_num_batched_tokens),
            self.rows.padding_row,
            self.device,
        )
        with platform.as_current(self.device):
            seconds = graphs.capture(show_progress)
        self.graphs = graphs
        return seconds

    def exit(self) -> None:
        """Let go of all memory on the device; a second time does nothing."""
        self.graphs = self._logits = None
        self.model = self.caches = self.rows = None
        platform.empty_cache(self.device)

    def _forward(self, inputs: Inputs) -> torch.Tensor:
        self.backend.prepare(inputs.attention, self.num_blocks, self.block_size)
        with forward_context(ForwardContext(inputs.attention, self.backend)):
            return self.model(inputs.token_ids, inputs.positions, self.caches)

    def _decode(self, step: Step) -> PendingResult:
        if self.graphs is not None:
            rows, token_ids = self.graphs.decode(step.decode_rows)
            logits = self._logits[: len(rows), : self.model.config.vocab_size]
        else:
            rows = upload(step.decode_rows, torch.int64, self.device)
            logits = self._decode_logits(rows, step.context_lens)
            token_ids = None
        if token_ids is not None and step.sampling.is_plain:
            return PendingResult(token_ids, None, [], self.device)
        token_ids, logprobs = draw_tokens(self.rows, logits, rows, step.sampling)
        return PendingResult(token_ids, logprobs, [], self.device)

    def _decode_logits(self, rows: torch.Tensor, seq_lens: list[int], out: torch.Tensor | None = None) -> torch.Tensor:
        """Compute one token of each row and move its context on; returns the logits of the next, [R, V]."""
        inputs = decode_inputs(rows, self.rows, self.block_size, seq_lens)
        hidden = self._forward(inputs)
        self.rows.context_len[rows] = inputs.attention.context_lens.to(torch.int64)
        return self.model.compute_logits(hidden, out)

    def _decode_plain(self, rows: torch.Tensor) -> torch.Tensor:
        """What a CUDA graph holds: a whole decode step, its tokens drawn by temperature alone. The logits are kept
        for steps that draw otherwise."""
        logits = self._decode_logits(rows, [self.max_model_len] * len(rows), self._logits[: len(rows)])
        return draw_tokens(self.rows, logits, rows, PLAIN)[0]

    def _prefill(self, chunks: list[PrefillChunk], sampling: Sampling | None) -> PendingResult:
        query_lens = [len(chunk.token_ids) for chunk in chunks]
        captured = self.graphs.prefill(chunks, sum(query_lens)) if self.graphs is not None else None
        if captured is not None:
            rows, hidden, last, token_ids = captured
        else:
            packed = pack_prefill(chunks, len(chunks), sum(query_lens), self.rows.padding_row)
            seq_lens = [chunk.start + n for chunk, n in zip(chunks, query_lens, strict=True)]
            packed = upload(packed, torch.int64, self.device)
            rows, hidden, last = self._prefill_hidden(packed, query_lens, seq_lens)
        scores = score_chunks(self.model, hidden, chunks)
        if sampling is None:
            return PendingResult(None, None, scores, self.device)
        if captured is not None and sampling.is_plain and all(chunk.samples for chunk in chunks):
            return PendingResult(token_ids[: len(chunks)], None, scores, self.device)
        chosen = upload([i for i, chunk in enumerate(chunks) if chunk.samples], torch.int64, self.device)
        logits = self.model.compute_logits(hidden[last[chosen]])
        token_ids, logprobs = draw_tokens(self.rows, logits, rows[chosen], sampling)
        return PendingResult(token_ids, logprobs, scores, self.device)

    def _prefill_hidden(
        self, packed: torch.Tensor, query_lens: list[int], seq_lens: list[int], num_seqs: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute the tokens of a packed batch and move contexts on; returns rows [S], hidden states [T, hidden_size]
        and where in them each sequence's last token is [S]."""
        rows, inputs = prefill_inputs(
            packed, num_seqs or len(query_lens), self.rows, self.block_size, query_lens, seq_lens
        )
        hidden = self._forward(inputs)
        self.rows.context_len[rows] = inputs.attention.context_lens.to(torch.int64)
        return rows, hidden, inputs.attention.cu_seqlens_q[1:].to(torch.int64) - 1

    def _pack_short(self, chunks: list[PrefillChunk], num_tokens: int) -> np.ndarray | None:
        """What a CUDA graph for so many tokens takes; None where there are too many sequences for it."""
        num_seqs = min(PREFILL_SEQS, self.rows.padding_row)
        return pack_prefill(chunks, num_seqs, num_tokens, self.rows.padding_row) if len(chunks) <= num_seqs else None

    def _prefill_plain(self, packed: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, ...]:
        """What a CUDA graph of a short prefill holds: as `_prefill_hidden`, and a token for each sequence, drawn by
        temperature alone; where that is not what is wanted, the next draw for the row takes its place."""
        num_seqs = min(PREFILL_SEQS, self.rows.padding_row)
        rows, hidden, last = self._prefill_hidden(packed, [num_tokens], [self.max_model_len], num_seqs)
        logits = self.model.compute_logits(hidden[last], self._logits[:num_seqs])
        return rows, hidden, last, draw_tokens(self.rows, logits, rows, PLAIN)[0]
