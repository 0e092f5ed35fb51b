"""Throughput of one engine on nano-vllm's workload: 256 sequences of 100 to 1024 random tokens in, 100 to 1024 out.

python bench.py                                                     # ~/huggingface/Qwen3-0.6B
python bench.py --model qwen3-0.6b --load-format dummy              # the same shape, random weights
python bench.py --num-seqs 8 --max-input-len 128 --max-output-len 128   # finishes on a laptop
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


def measured_run(args: argparse.Namespace, **knobs: object) -> dict:
    """An engine of its own, one warm-up, the measured rounds; returns their medians and what ran.

    Args:
        args: as `make_parser` makes them.
        knobs: further ones of the engine.
    """
    llm = LLM(
        args.model,
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
        enforce_eager=args.enforce_eager,
        **knobs,
    )
    with llm:
        llm.generate([[1] * 16], SamplingParams(temperature=args.temperature, max_tokens=16), use_tqdm=False)
        rounds = [measure(llm, *make_workload(args, args.seed + i)) for i in range(args.rounds)]
        result: dict = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        result |= {"model": args.model, "backend": llm.engine.backend.name, "dtype": str(llm.engine.dtype)}
        return result | {"kernels": llm.engine.kernel_paths}


def main() -> None:
    """A table, and the same as one line of JSON."""
    result = measured_run(make_parser(__doc__).parse_args())
    del result["kernels"]
    for name, value in result.items():
        print(f"{name:<20}{value:>16,.3f}" if isinstance(value, float) else f"{name:<20}{value:>16}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
