"""Prefill of Sansho: 8 prompts of 8,064 tokens, beside the plain reference on the same device; what leaving the
cross-decoder early is worth; and the first token of an 8,000-token prompt, cold and after a prefix hit.

python scripts/bench_sansho_prefill.py                                   # sansho-500m on a GPU, random weights
python scripts/bench_sansho_prefill.py --shape tiny --prompt-len 96      # to see it run on a CPU

A table, and the same as one line of JSON.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from nanovllm import LLM, SamplingParams  # noqa: E402
from nanovllm.engine import sansho_runner  # noqa: E402
from nanovllm.engine.results import PLAIN  # noqa: E402
from nanovllm.engine.step import BlockUpdates, PrefillChunk, RowStart, Step  # noqa: E402
from nanovllm.models.sansho_reference import SanshoReference  # noqa: E402
from scripts.make_sansho_export import make_export  # noqa: E402


def seconds_of(call, rounds: int = 3) -> float:
    """The median of `rounds` runs after one that warms up."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[rounds // 2]


def prefill(llm: LLM, prompts: list[list[int]], tokens_per_step: int, everywhere: bool) -> None:
    """Steps of whole prompts, straight to the runner; `everywhere`: all rows pass the cross-decoder."""
    runner = llm.engine.runner
    blocks = -(-len(prompts[0]) // runner.block_size)
    per_step = max(1, tokens_per_step // len(prompts[0]))
    for first in range(0, len(prompts), per_step):
        starts, updates, chunks = [], BlockUpdates(), []
        for row, prompt in enumerate(prompts[first : first + per_step]):
            starts.append(RowStart(row, SamplingParams(), 0, [], []))
            updates.add(row, 0, list(range(row * blocks, (row + 1) * blocks)))
            chunks.append(PrefillChunk(row, 0, prompt, True, 0, prompt[1:] if everywhere else [], 0))
        runner.run(Step(starts, updates, chunks, [], [], PLAIN)).wait()


def first_token_seconds(llm: LLM, prompt: list[int]) -> float:
    """Submission to the first token."""
    start = time.perf_counter()
    llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), use_tqdm=False)
    return time.perf_counter() - start


def measure(directory: str, args: argparse.Namespace) -> dict[str, float]:
    """All figures: tokens per second, and seconds."""
    draw = torch.Generator().manual_seed(0)
    fresh = lambda: torch.randint(3, 200, (args.prompt_len,), generator=draw).tolist()  # noqa: E731
    prompts, tokens = [fresh() for _ in range(args.num_seqs)], args.num_seqs * args.prompt_len
    results = {}
    knobs = {"max_num_batched_tokens": args.tokens_per_step, "max_model_len": args.prompt_len + 64}
    with LLM(directory, skip_tokenizer_init=True, max_num_seqs=args.num_seqs, **knobs) as llm:
        results["tok_s"] = tokens / seconds_of(lambda: prefill(llm, prompts, args.tokens_per_step, False))
        wanted, sansho_runner.score_chunks = sansho_runner.score_chunks, lambda *args: []  # the head is not measured
        results["tok_s_without_early_exit"] = tokens / seconds_of(
            lambda: prefill(llm, prompts, args.tokens_per_step, True)
        )
        sansho_runner.score_chunks = wanted
        llm.generate([fresh()], SamplingParams(max_tokens=1), use_tqdm=False)
        rounds = [(first_token_seconds(llm, prompt), first_token_seconds(llm, prompt)) for prompt in prompts[:3]]
        results["ttft_cold_s"], results["ttft_hit_s"] = (sorted(times)[len(times) // 2] for times in zip(*rounds))
    reference = SanshoReference(directory, "cuda" if torch.cuda.is_available() else "cpu")
    reference.weights = {name: tensor.to(args.reference_dtype) for name, tensor in reference.weights.items()}
    reference.logits(prompts[0][:64])
    start = time.perf_counter()
    int(reference.logits(prompts[0])[-1].argmax())  # waits for the device
    results["reference_tok_s"] = args.prompt_len / (time.perf_counter() - start)
    results["of_reference"] = results["tok_s"] / results["reference_tok_s"]
    results["early_exit"] = results["tok_s"] / results["tok_s_without_early_exit"]
    results["hit_speedup"] = results["ttft_cold_s"] / results["ttft_hit_s"]
    return results


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="sansho-500m")
    parser.add_argument("--num-seqs", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=8064)
    parser.add_argument("--tokens-per-step", type=int, default=16384)
    parser.add_argument("--reference-dtype", type=lambda name: getattr(torch, name), default=torch.float32)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        results = measure(make_export(Path(folder), args.shape, tokenizer=False), args)
    for name, value in results.items():
        print(f"{name:<26}{value:>14,.4f}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
