"""Throughput of one engine on nano-vllm's workload: 256 sequences of 100 to 1024 random tokens in, 100 to 1024 out.

python bench.py                                                     # ~/huggingface/Qwen3-0.6B
python bench.py --model qwen3-0.6b --load-format dummy              # the same shape, random weights
python bench.py --num-seqs 8 --max-input-len 128 --max-output-len 128   # finishes on a laptop
python bench.py --model sansho-500m --load-format dummy --profile roofline   # decode beside what memory allows
"""

import argparse
import json
import os
import random
import resource
import statistics
import sys
import time

import numpy as np
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.cache_spec import PagedKVSpec, WindowKVSpec
from nanovllm.platform import resolve_device, synchronize


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Options of workload and engine; engine knobs keep the engine's names and defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=os.path.expanduser("~/huggingface/Qwen3-0.6B"))
    parser.add_argument("--load-format", default="auto", help="'dummy' for random weights in the model's shape")
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--min-input-len", type=int, default=100)
    parser.add_argument("--max-input-len", type=int, default=1024)
    parser.add_argument("--min-output-len", type=int, default=100)
    parser.add_argument("--max-output-len", type=int, default=1024)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--seed", type=int, default=0, help="of the workload")
    parser.add_argument("--rounds", type=int, default=1, help="workloads of seed, seed + 1, ...; medians are printed")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--max-num-batched-tokens", type=int, default=16384)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--num-kvcache-blocks", type=int, default=-1)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--enforce-eager", action="store_true")
    return parser


def make_workload(args: argparse.Namespace, seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts and their parameters, drawn in the order in which nano-vllm's bench.py draws them."""
    draw = random.Random(seed)
    prompts = [
        [draw.randint(0, 10000) for _ in range(draw.randint(args.min_input_len, args.max_input_len))]
        for _ in range(args.num_seqs)
    ]
    params = [
        SamplingParams(
            temperature=args.temperature,
            ignore_eos=True,
            max_tokens=draw.randint(args.min_output_len, args.max_output_len),
        )
        for _ in range(args.num_seqs)
    ]
    return prompts, params


def peak_memory_gib() -> float:
    """Most memory held so far: by torch on the GPU, or by the process on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved() / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def measure(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> dict[str, float]:
    """Run the workload once and put its figures together; times in seconds."""
    before = llm.engine.stats.copy()
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    after = llm.engine.stats
    first_token = np.array([output["time_to_first_token"] for output in outputs])
    num_output = sum(len(output["token_ids"]) for output in outputs)
    return {
        "input_tokens": sum(map(len, prompts)),
        "output_tokens": num_output,
        "seconds": seconds,
        "output_tok_s": num_output / seconds,
        "prefill_tok_s": (after.prefill_tokens - before.prefill_tokens)
        / max(after.prefill_seconds - before.prefill_seconds, 1e-9),
        "decode_tok_s": (after.decode_tokens - before.decode_tokens)
        / max(after.decode_seconds - before.decode_seconds, 1e-9),
        "ttft_mean_s": float(first_token.mean()),
        "ttft_p50_s": float(np.percentile(first_token, 50)),
        "ttft_p99_s": float(np.percentile(first_token, 99)),
        "peak_memory_gib": peak_memory_gib(),
        "load_s": after.load_seconds,
        "load_allocated_gib": after.load_allocated / 2**30,
        "load_reserved_gib": after.load_reserved / 2**30,
        "capture_s": after.capture_seconds,
    }


def make_llm(args: argparse.Namespace, **knobs: object) -> LLM:
    """The engine that the command line asks for, but for `knobs`."""
    given: dict[str, object] = dict(
        load_format=args.load_format,
        skip_tokenizer_init=True,
        dtype=args.dtype,
        device=args.device,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        gpu_memory_utilization=args.gpu_memory_utilization,
        num_kvcache_blocks=args.num_kvcache_blocks,
        attention_backend=args.attention_backend,
        tensor_parallel_size=args.tensor_parallel_size,
        enforce_eager=args.enforce_eager,
    )
    return LLM(args.model, **{**given, **knobs})


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of the fastest of ten copies of 1 GiB (64 MiB on a CPU)."""
    source = torch.zeros(1 << (30 if device.type == "cuda" else 26), dtype=torch.uint8, device=device)
    target, best = torch.empty_like(source), float("inf")
    for _ in range(10):
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * source.nbytes / best


def decode_bytes(llm: LLM, context: int) -> tuple[int, int, int]:
    """Bytes of all weights, of the weights that a decode step reads (looped layers once per loop), and of what it
    reads and writes for each sequence of `context` tokens."""
    runner, config = llm.engine.runner, llm.engine.model_config
    model, kinds = runner.model, getattr(config, "layer_types", ())
    weights = sum(param.nbytes for param in model.parameters())
    looped = model.model.layers[: kinds.count("sliding_attention")]
    read = weights + (getattr(config, "universal_loop", 1) - 1) * sum(p.nbytes for p in looped.parameters())
    if model.lm_head is not None:
        read -= model.model.embed_tokens.weight.nbytes
    own = 0
    for spec in runner.specs:
        if isinstance(spec, PagedKVSpec):  # the last one written may be read by several layers
            own += spec.bytes_per_block(context) * max(1, kinds.count("cross_attention"))
        elif isinstance(spec, WindowKVSpec):
            own += spec.bytes_per_row(1) * min(context, spec.window) // spec.window
        else:
            own += 2 * spec.bytes_per_row(1)
    return weights, read, own


def roofline(args: argparse.Namespace) -> None:
    """Decode tok/s at each concurrency, the crude roof (the weights once a step) and the true one (looped weights and
    caches too), the share of each, and memory; a table, and the same as one line of JSON."""
    num_in, num_out, rows = 512, 128, []
    device = resolve_device(args.device)
    bandwidth = copy_bandwidth(device)
    for concurrency in args.concurrency:
        if device.type == "cuda":  # neither the copy nor the engine before counts
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        with make_llm(args, max_num_seqs=concurrency, max_model_len=num_in + num_out) as llm:
            runner, stats = llm.engine.runner, llm.engine.stats
            weights, read, own = decode_bytes(llm, num_in + num_out // 2)
            params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=num_out)
            draw = random.Random(args.seed)
            rates = []
            for _ in range(2):  # the first one warms up
                prompts = [[draw.randrange(500) for _ in range(num_in)] for _ in range(concurrency)]
                before = stats.copy()
                llm.generate(prompts, params, use_tqdm=False)
                tokens, seconds = (getattr(stats, n) - getattr(before, n) for n in ("decode_tokens", "decode_seconds"))
                rates.append(tokens / seconds)
            slots = runner.rows.padding_row + 1 + (runner.num_snapshots or 0)
            caches = runner.num_blocks * runner.bytes_per_block + slots * getattr(runner, "bytes_per_row", 0)
            crude = bandwidth / weights * concurrency
            true = bandwidth / (read + concurrency * own) * concurrency
            row = {
                "concurrency": concurrency, "decode_tok_s": rates[-1], "crude_roof": crude, "true_roof": true,
                "of_crude": rates[-1] / crude, "of_true": rates[-1] / true, "copy_gb_s": bandwidth / 1e9,
                "peak_gib": peak_memory_gib(), "beyond_caches_gib": peak_memory_gib() - (weights + caches) / 2**30,
                "capture_s": stats.capture_seconds,
            }  # fmt: skip
            rows.append(row)
    print("".join(f"{name:>18}" for name in rows[0]))
    for row in rows:
        print("".join(f"{value:>18,.3f}" if isinstance(value, float) else f"{value:>18}" for value in row.values()))
    print(json.dumps({"model": args.model, "profile": "roofline", "rows": rows}))


def measured_run(args: argparse.Namespace, **knobs: object) -> dict:
    """An engine of its own, one warm-up, the measured rounds; returns their medians and what ran.

    Args:
        args: as `make_parser` makes them.
        knobs: further ones of the engine.
    """
    with make_llm(args, **knobs) as llm:
        llm.generate([[1] * 16], SamplingParams(temperature=args.temperature, max_tokens=16), use_tqdm=False)
        rounds = [measure(llm, *make_workload(args, args.seed + i)) for i in range(args.rounds)]
        result: dict = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        result |= {"model": args.model, "backend": llm.engine.backend.name, "dtype": str(llm.engine.dtype)}
        return result | {"kernels": llm.engine.kernel_paths}


def main() -> None:
    """A table, and the same as one line of JSON."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--profile",
        choices=["roofline"],
        help="512 tokens in, 128 out at several concurrencies, beside the time that memory traffic alone takes; an "
        "engine each, and the arguments of the workload are not used",
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 64, 256], help="of --profile roofline")
    args = parser.parse_args()
    if args.profile == "roofline":
        return roofline(args)
    result = measured_run(args)
    del result["kernels"]
    for name, value in result.items():
        print(f"{name:<20}{value:>16,.3f}" if isinstance(value, float) else f"{name:<20}{value:>16}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
