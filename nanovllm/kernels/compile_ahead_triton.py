"""Compiling kernels side by side before the first of them runs: one after another they are most of a cold start."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from triton import knobs


def compile_ahead(bodies: list[Callable[[], object]], device: torch.device) -> int:
    """Compile what the bodies launch and was not compiled before; returns how many kernels.

    The bodies run inside a CUDA graph that is thrown away, so nothing in them happens on the device. What they launch
    is noted and skipped, as one name of a kernel stands for many that are specialised by their arguments.

    Args:
        bodies: must not wait for the device.
        device: a GPU.
    """
    wanted = {}

    def note(*, fn: object, compile: dict, **_: object) -> bool:
        kernel = fn.jit_function
        wanted[id(kernel), compile["key"]] = kernel, compile["specialization_data"]
        return True  # neither compiled nor launched

    def compile_one(job: tuple) -> None:
        kernel, data = job
        with torch.cuda.device(device):
            kernel.preload(data).run  # noqa: B018 - looked up, it is loaded, and its launcher is compiled too

    torch.mm(*torch.zeros(2, 16, 16, device=device))  # library handles are made outside of a graph
    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, note
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="relaxed"):
            for body in bodies:
                body()
    finally:
        knobs.runtime.jit_cache_hook = before
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(compile_one, wanted.values()))
    return len(wanted)
