"""Steps as CUDA graphs, one per bucket of batch sizes or token counts: a step costs the host one launch instead of
hundreds."""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from tqdm import tqdm

from nanovllm.engine.batch import pack_prefill, upload
from nanovllm.engine.step import PrefillChunk

logger = logging.getLogger(__name__)


def graph_batch_sizes(max_num_seqs: int) -> list[int]:
    """Buckets for every batch of 1 .. max_num_seqs: finer where one row more costs relatively more, and the last
    is max_num_seqs itself, so that no batch is without one."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 512, 16), *range(512, max_num_seqs, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def graph_token_counts(max_num_batched_tokens: int) -> list[int]:
    """Buckets for prefills that are short enough to wait for the host otherwise; longer ones keep the device busy."""
    sizes = [16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048]
    return [size for size in sizes if size <= max_num_batched_tokens]


class StepGraphs:
    """Graphs of decode steps and of short prefills. The bodies read and write everything but their argument where it
    lies on the device, and must not wait for it.

    Args:
        decode: [B] rows to [B] drawn tokens.
        prefill: a packed batch of `prefill_seqs` sequences (`pack_prefill`) to whatever tensors its caller wants.
        max_num_seqs: largest decode batch.
        prefill_seqs: sequences of a short prefill.
        max_num_batched_tokens: largest prefill there is.
        padding_row: a row that belongs to no sequence; it fills a bucket up.
        device: where it runs.
    """

    def __init__(
        self,
        decode: Callable[[torch.Tensor], torch.Tensor],
        prefill: Callable[[torch.Tensor], Any],
        max_num_seqs: int,
        prefill_seqs: int,
        max_num_batched_tokens: int,
        padding_row: int,
        device: torch.device,
    ) -> None:
        self._bodies = decode, prefill
        self._decode_sizes = graph_batch_sizes(max_num_seqs)
        self._prefill_sizes = graph_token_counts(max_num_batched_tokens)
        self._prefill_seqs = prefill_seqs
        self._padding_row = padding_row
        self._device = device
        self._rows = torch.full((max_num_seqs,), padding_row, dtype=torch.int64, device=device)
        self._packed = torch.zeros(3 * prefill_seqs + max(self._prefill_sizes, default=0), dtype=torch.int64).to(device)
        self._packed[:prefill_seqs] = padding_row
        self._uploaded: list[int] = []
        self._graphs: dict[tuple[str, int], tuple[torch.cuda.CUDAGraph, Any]] = {}

    def capture(self, show_progress: bool) -> float:
        """Capture all buckets in one memory pool, largest first, so that the smaller ones fit into what is there.
        Returns the seconds it took."""
        start = time.perf_counter()
        before = torch.cuda.memory_reserved(self._device)
        pool = torch.cuda.graph_pool_handle()
        decode, prefill = self._bodies
        jobs = [("prefill", n, prefill, self._packed[: 3 * self._prefill_seqs + n]) for n in self._prefill_sizes]
        jobs = jobs[::-1] + [("decode", n, decode, self._rows[:n]) for n in self._decode_sizes[::-1]]
        for kind, size, body, argument in tqdm(jobs, desc="Capturing CUDA graphs", disable=not show_progress):
            body(argument)  # compiles kernels and makes library handles, which a capture must not do
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                result = body(argument)
            self._graphs[kind, size] = graph, result
        torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - start
        pool_mib = (torch.cuda.memory_reserved(self._device) - before) / 2**20
        logger.info("captured %d CUDA graphs in %.1f s, %.0f MiB", len(jobs), seconds, pool_mib)
        return seconds

    def decode(self, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a decode step of these rows; returns them as a [n] device tensor and their [n] tokens, both valid
        until the next step."""
        size = _bucket(self._decode_sizes, len(rows))
        padded = rows + [self._padding_row] * (size - len(rows))
        if padded != self._uploaded:
            self._rows[:size] = upload(padded, torch.int64, self._device)
            self._uploaded = padded
        graph, token_ids = self._graphs["decode", size]
        graph.replay()
        return self._rows[: len(rows)], token_ids[: len(rows)]

    def prefill(self, chunks: list[PrefillChunk], num_tokens: int) -> Any:
        """Run a prefill; returns what its body returned, valid until the next step, or None where no graph takes it."""
        if len(chunks) > self._prefill_seqs or num_tokens > max(self._prefill_sizes, default=0):
            return None
        size = _bucket(self._prefill_sizes, num_tokens)
        packed = pack_prefill(chunks, self._prefill_seqs, size, self._padding_row)
        self._packed[: len(packed)] = upload(packed, torch.int64, self._device)
        graph, result = self._graphs["prefill", size]
        graph.replay()
        return result


def _bucket(sizes: list[int], size: int) -> int:
    return sizes[bisect.bisect_left(sizes, size)]
