"""What share of the card's copy bandwidth the memory-bound kernels reach, in the shapes of Qwen3-0.6B or Sansho-500m.

python scripts/bench_kernels.py                # attention of 256 sequences, the others at 8192 tokens
python scripts/bench_kernels.py --tokens 512
python scripts/bench_kernels.py --compile      # beside what torch.compile makes of the references
python scripts/bench_kernels.py --sansho --num-seqs 64    # what a decode step of Sansho adds to these, beside torch's
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from nanovllm.kernels import mamba_step, window_decode
from nanovllm.kernels.activation import silu_and_mul, silu_and_mul_ref
from nanovllm.kernels.kv_cache import write_kv_ref
from nanovllm.kernels.layernorm import add_rms_norm, add_rms_norm_ref, rms_norm, rms_norm_ref
from nanovllm.kernels.paged_attention import decode_attention
from nanovllm.kernels.qkv import split_norm_rotate_write
from nanovllm.kernels.rotary import rotary_ref

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 1024, 3072, 16, 8, 128, 64
# Inputs are taken in turn from so many bytes of them, so that none is found in L2.
ROTATED_BYTES = 400 << 20
Case = tuple[int, Callable[[], Callable[[], object]]]


def random(*shape: int) -> torch.Tensor:
    """bfloat16 noise on the GPU."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def microseconds(runs: list[Callable[[], object]]) -> float:
    """Time of one of `runs`, all of them in one CUDA graph; the median of nine replays."""
    for run in runs:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    times = []
    for _ in range(9):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(runs))
    return statistics.median(times)


def copies(make: Callable[[], Callable[[], object]], num_bytes: int) -> list[Callable[[], object]]:
    """As many runs with inputs of their own as it takes to leave L2 behind, a thousand at most."""
    return [make() for _ in range(min(1000, max(2, ROTATED_BYTES // num_bytes)))]


def norm_case(tokens: int, add: bool, norm: Callable = rms_norm, add_norm: Callable = add_rms_norm) -> Case:
    """Bytes of a run, and what makes one."""
    weight = random(HIDDEN)

    def make() -> Callable:
        x, residual = random(tokens, HIDDEN), random(tokens, HIDDEN)
        return (lambda: add_norm(x, residual, weight, 1e-6)) if add else (lambda: norm(x, weight, 1e-6))

    return (4 if add else 2) * 2 * tokens * HIDDEN, make


def silu_case(tokens: int, silu: Callable = silu_and_mul) -> Case:
    """As `norm_case`."""

    def make() -> Callable:
        x = random(tokens, 2 * INTERMEDIATE)
        return lambda: silu(x)

    return 3 * 2 * tokens * INTERMEDIATE, make


def qkv_case(tokens: int, run: Callable = split_norm_rotate_write) -> Case:
    """As `norm_case`; the tokens' positions and slots lie in order, as in a long prompt."""
    cos, sin, weight = random(tokens, HEAD_DIM), random(tokens, HEAD_DIM), random(HEAD_DIM)
    index = torch.arange(tokens, device="cuda")

    def make() -> Callable:
        qkv = random(tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        cache = random(2, -(-tokens // BLOCK_SIZE), BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        rest = (weight, weight, 1e-6, cos, sin, index, *cache, index)
        return lambda: run(qkv, HEADS, KV_HEADS, *rest)

    return 2 * 2 * tokens * (HEADS + 2 * KV_HEADS) * HEAD_DIM + 2 * 2 * tokens * HEAD_DIM, make


def qkv_ref(
    qkv: torch.Tensor, heads: int, kv_heads: int, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float,
    cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """`split_norm_rotate_write_ref` without its question whether some tokens are padding, which waits for the device
    and keeps torch.compile from fusing across it."""
    q, k, v = qkv.unflatten(-1, (-1, HEAD_DIM)).split((heads, kv_heads, kv_heads), dim=1)
    cos, sin = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    q, k = rotary_ref(rms_norm_ref(q, q_weight, eps), cos, sin), rotary_ref(rms_norm_ref(k, k_weight, eps), cos, sin)
    write_kv_ref(k, v, k_cache, v_cache, slots)
    return q


def compiled_cases(tokens: int) -> dict[str, Case]:
    """The references as torch.compile fuses them, and how long that takes."""
    start = time.perf_counter()
    norm, add_norm, silu, qkv = (
        torch.compile(run, dynamic=False) for run in (rms_norm_ref, add_rms_norm_ref, silu_and_mul_ref, qkv_ref)
    )
    cases = {
        "rms_norm, compiled": norm_case(tokens, False, norm=norm),
        "add_rms_norm, compiled": norm_case(tokens, True, add_norm=add_norm),
        "silu_and_mul, compiled": silu_case(tokens, silu),
        "split_norm_..., compiled": qkv_case(tokens, qkv),
    }
    for _, make in cases.values():
        make()()
    torch.cuda.synchronize()
    print(f"torch.compile took {time.perf_counter() - start:.1f} s for {len(cases)} functions at one size")
    return cases


def attention_case(num_seqs: int, context: int) -> Case:
    """As `norm_case`: decode, blocks anywhere in the pool."""
    blocks = -(-context // BLOCK_SIZE)
    lens = torch.full((num_seqs,), context, dtype=torch.int32, device="cuda")

    def make() -> Callable:
        cache = random(2, num_seqs * blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        table = torch.randperm(num_seqs * blocks, device="cuda").to(torch.int32).view(num_seqs, blocks)
        q = random(num_seqs, HEADS, HEAD_DIM)
        return lambda: decode_attention(q, *cache, table, lens, context, HEAD_DIM**-0.5)

    return 2 * 2 * num_seqs * context * KV_HEADS * HEAD_DIM, make


def window_case(num_seqs: int, run: Callable) -> Case:
    """As `norm_case`: one layer, full windows of 256 keys."""
    heads, kv_heads, dim, window = 12, 3, 64, 256
    cos, sin, weight = random(2 * window, dim), random(2 * window, dim), random(dim)
    rows = torch.arange(num_seqs, device="cuda")
    positions = window + rows % window

    def make() -> Callable:
        qkv, rings = random(num_seqs, (heads + 2 * kv_heads) * dim), random(2, num_seqs, window, kv_heads, dim)
        return lambda: run(qkv, weight, weight, 1e-5, cos, sin, positions, *rings, rows, window)

    return 2 * 2 * num_seqs * window * kv_heads * dim, make


def mamba_cases(num_seqs: int, conv: Callable, read: Callable, norm: Callable) -> dict[str, Case]:
    """As `norm_case`: the convolutions of 16 layers, then the states and the norm of one."""
    layers, heads, dim, size, width = 16, 24, 64, 128, 4
    inner, channels = heads * dim, heads * dim + size
    rows, factor = torch.arange(num_seqs, device="cuda"), torch.rand(layers, heads, device="cuda")
    weight, bias = random(layers, channels, width), random(layers, channels)

    def make_conv() -> Callable:
        projected, states = random(num_seqs, layers, channels + heads), random(num_seqs, layers, channels, width - 1)
        return lambda: conv(projected, rows, states, weight, bias, factor)

    def make_read() -> Callable:
        x, b, c = random(num_seqs, heads, dim), random(num_seqs, 1, size), random(num_seqs, 1, size)
        states = torch.randn(num_seqs, heads, dim, size, device="cuda")
        drive = mamba_step.Drive(b, torch.rand(num_seqs, heads, device="cuda"), factor[0])
        return lambda: read(x, drive, states, rows, c, factor[1])

    def make_norm() -> Callable:
        y, z = torch.randn(num_seqs, inner, device="cuda"), random(num_seqs, inner)
        return lambda: norm(y, z, weight.flatten()[:inner], 1e-5, 1)

    num_bytes = 2 * num_seqs * layers * (2 * channels * width + heads) + 2 * layers * channels * (width + 1)
    return {
        "mamba_conv": (num_bytes, make_conv),
        "mamba_read": (2 * 4 * num_seqs * inner * size, make_read),
        "gated_norm": (8 * num_seqs * inner, make_norm),
    }


def sansho_cases(num_seqs: int) -> dict[str, Case]:
    """Kernels and references."""
    cases = {"window_decode": window_case(num_seqs, window_decode.window_decode)}
    cases |= mamba_cases(num_seqs, mamba_step.mamba_conv, mamba_step.mamba_read, mamba_step.gated_norm)
    torch_cases = {"window_decode": window_case(num_seqs, window_decode.window_decode_ref)}
    torch_cases |= mamba_cases(
        num_seqs, mamba_step.mamba_conv_ref, mamba_step.mamba_read_ref, mamba_step.gated_norm_ref
    )
    return cases | {f"{name}, torch": case for name, case in torch_cases.items()}


def copy_case() -> Case:
    """The roof: bytes read and written by a kernel that computes nothing worth the name."""

    def make() -> Callable:
        source, target = random(1 << 28), random(1 << 28)
        return lambda: torch.neg(source, out=target)  # a kernel: in a graph copy_ goes to a copy engine, at 2.8 TB/s

    return 2 * 2 * (1 << 28), make


def main() -> None:
    """A table, and the same as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--sansho", action="store_true", help="the kernels of its decode step in place of these")
    args = parser.parse_args()
    cases = {"copy": copy_case()}
    cases |= (
        sansho_cases(args.num_seqs)
        if args.sansho
        else {
            "rms_norm": norm_case(args.tokens, add=False),
            "add_rms_norm": norm_case(args.tokens, add=True),
            "silu_and_mul": silu_case(args.tokens),
            "split_norm_rotate_write": qkv_case(args.tokens),
            "decode_attention": attention_case(args.num_seqs, args.context),
        }
    )
    if args.compile:
        cases |= compiled_cases(args.tokens)
    result = {}
    for name, (num_bytes, make) in cases.items():
        time = microseconds(copies(make, num_bytes))
        result[name] = num_bytes / time * 1e-6
        share = result[name] / result["copy"]
        print(f"{name:<26}{time:>10.1f} us {result[name]:>8.2f} TB/s {share:>7.0%} of a copy")
    print(json.dumps({"device": torch.cuda.get_device_name(), "tb_s": result}))


if __name__ == "__main__":
    main()
