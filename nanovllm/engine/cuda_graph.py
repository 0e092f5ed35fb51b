"""Steps as CUDA graphs, one per bucket of batch sizes or token counts: a step costs the host one launch instead of
hundreds."""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from nanovllm.engine.batch import upload
from nanovllm.engine.step import PrefillChunk

logger = logging.getLogger(__name__)

# Sequences that a captured prefill has room for.
PREFILL_SEQS = 16


def graph_batch_sizes(max_num_seqs: int) -> list[int]:
    """Buckets for every batch of 1 .. max_num_seqs: finer where one row more costs relatively more, and the last
    is max_num_seqs itself, so that no batch is without one."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 512, 16), *range(512, max_num_seqs, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def graph_token_counts(max_num_batched_tokens: int, longest: int = 2048) -> list[int]:
    """Buckets for prefills that are short enough to wait for the host otherwise; those longer than `longest` keep the
    device busy."""
    sizes = [16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, *range(2048, longest + 1, 1024)]
    return [size for size in sizes if size <= max_num_batched_tokens]


class StepGraphs:
    """Graphs of decode steps and of short prefills. The bodies read and write everything but their argument where it
    lies on the device, and must not wait for it.

    Args:
        decode: [B] rows to [B] drawn tokens.
        prefill: a packed prefill on the device, and the size of its bucket, to whatever tensors its caller wants.
        pack: chunks and the size of a bucket to int64 numbers, or None where no graph takes them; without chunks,
            padding alone.
        max_num_seqs: largest decode batch.
        prefill_sizes: buckets of short prefills by tokens, ascending.
        padding_row: a row that belongs to no sequence; it fills a bucket up.
        device: where it runs.
    """

    def __init__(
        self,
        decode: Callable[[torch.Tensor], torch.Tensor],
        prefill: Callable[[torch.Tensor, int], Any],
        pack: Callable[[list[PrefillChunk], int], np.ndarray | None],
        max_num_seqs: int,
        prefill_sizes: list[int],
        padding_row: int,
        device: torch.device,
    ) -> None:
        self._decode, self._prefill, self._pack = decode, prefill, pack
        self._decode_sizes = graph_batch_sizes(max_num_seqs)
        self._prefill_sizes = prefill_sizes
        self._padding_row = padding_row
        self._device = device
        self._rows = torch.full((max_num_seqs,), padding_row, dtype=torch.int64, device=device)
        longest = max((len(pack([], size)) for size in prefill_sizes), default=0)
        self._packed = torch.zeros(longest, dtype=torch.int64, device=device)
        self._uploaded: list[int] = []
        self._graphs: dict[tuple[str, int], tuple[torch.cuda.CUDAGraph, Any]] = {}

    def capture(self, show_progress: bool) -> float:
        """Capture all buckets in one memory pool, largest first, so that the smaller ones fit into what is there.
        Returns the seconds it took."""
        start = time.perf_counter()
        before = torch.cuda.memory_reserved(self._device)
        pool = torch.cuda.graph_pool_handle()
        jobs = [("prefill", size) for size in self._prefill_sizes[::-1]]
        jobs += [("decode", size) for size in self._decode_sizes[::-1]]
        for kind, size in tqdm(jobs, desc="Capturing CUDA graphs", disable=not show_progress):
            body = self._prefill_body(size) if kind == "prefill" else partial(self._decode, self._rows[:size])
            body()  # compiles kernels and makes library handles, which a capture must not do
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                result = body()
            self._graphs[kind, size] = graph, result
        torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - start
        pool_mib = (torch.cuda.memory_reserved(self._device) - before) / 2**20
        logger.info("captured %d CUDA graphs in %.1f s, %.0f MiB", len(jobs), seconds, pool_mib)
        return seconds

    def _prefill_body(self, size: int) -> Callable[[], Any]:
        """The body of a bucket over padding, which is uploaded now."""
        return partial(self._prefill, self._upload(self._pack([], size)), size)

    def _upload(self, packed: np.ndarray) -> torch.Tensor:
        """To where graphs look for it."""
        self._packed[: len(packed)] = upload(packed, torch.int64, self._device)
        return self._packed[: len(packed)]

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
        if num_tokens > max(self._prefill_sizes, default=0):
            return None
        size = _bucket(self._prefill_sizes, num_tokens)
        packed = self._pack(chunks, size)
        if packed is None:
            return None
        self._upload(packed)
        graph, result = self._graphs["prefill", size]
        graph.replay()
        return result


def _bucket(sizes: list[int], size: int) -> int:
    return sizes[bisect.bisect_left(sizes, size)]
