"""Decode steps as CUDA graphs, one per batch-size bucket: a step costs the host one launch instead of hundreds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np
import torch
from tqdm import tqdm

from nanovllm.engine.batch import upload

logger = logging.getLogger(__name__)


def graph_batch_sizes(max_num_seqs: int) -> list[int]:
    """Buckets for every batch of 1 .. max_num_seqs: finer where one row more costs relatively more, and the last
    is max_num_seqs itself, so that no batch is without one."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 512, 16), *range(512, max_num_seqs, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class DecodeGraphs:
    """Graphs of `decode`, which maps a [B] tensor of rows to a [B] tensor of drawn tokens and reads and writes
    everything else where it lies on the device.

    Args:
        decode: the body of a decode step; it must not wait for the device.
        max_num_seqs: largest batch.
        padding_row: a row that belongs to no sequence; it fills a bucket up.
        device: where it runs.
    """

    def __init__(
        self,
        decode: Callable[[torch.Tensor], torch.Tensor],
        max_num_seqs: int,
        padding_row: int,
        device: torch.device,
    ) -> None:
        self._decode = decode
        self._sizes = graph_batch_sizes(max_num_seqs)
        self._padding_row = padding_row
        self._device = device
        self._rows = torch.full((max_num_seqs,), padding_row, dtype=torch.int64, device=device)
        self._uploaded: list[int] = []
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._bucket = [next(size for size in self._sizes if size >= n) for n in range(1, max_num_seqs + 1)]

    def capture(self, show_progress: bool) -> float:
        """Capture all buckets in one memory pool, largest first, so that the smaller ones fit into what is there.
        Returns the seconds it took."""
        start = time.perf_counter()
        before = torch.cuda.memory_reserved(self._device)
        pool = torch.cuda.graph_pool_handle()
        for size in tqdm(self._sizes[::-1], desc="Capturing CUDA graphs", disable=not show_progress):
            rows = self._rows[:size]
            self._decode(rows)  # compiles kernels and makes library handles, which a capture must not do
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                token_ids = self._decode(rows)
            self._graphs[size] = graph, token_ids
        torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - start
        pool_mib = (torch.cuda.memory_reserved(self._device) - before) / 2**20
        logger.info("captured %d CUDA graphs in %.1f s, %.0f MiB", len(self._sizes), seconds, pool_mib)
        return seconds

    def replay(self, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a decode step of these rows; returns them as a [n] device tensor and their [n] tokens, both valid
        until the next replay."""
        size = self._bucket[len(rows) - 1]
        padded = rows + [self._padding_row] * (size - len(rows))
        if padded != self._uploaded:
            self._rows[:size] = upload(np.array(padded), torch.int64, self._device)
            self._uploaded = padded
        graph, token_ids = self._graphs[size]
        graph.replay()
        return self._rows[: len(rows)], token_ids[: len(rows)]
