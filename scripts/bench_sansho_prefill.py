"""What a Sansho prefill takes: against the plain reference, without the early exit, and with a resumed prefix.

python scripts/bench_sansho_prefill.py                          # random weights of the 500m shape, on a GPU
python scripts/bench_sansho_prefill.py --shape tiny --device cpu --lengths 2x40 --ttft-tokens 60   # does it run
"""

import argparse
import json
import statistics
import tempfile
import time

import torch
from make_sansho_export import SHAPES, make_export

from nanovllm import LLM, SamplingParams, platform
from nanovllm.models.sansho_reference import SanshoReference

RUNS = 3
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


class ForwardTimer:
    """Seconds inside a model's forward pass, which leaves out the head: every row of a scored prompt has logits."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self.device, self.seconds = device, 0.0
        model.register_forward_pre_hook(lambda *_: self._add(-1))
        model.register_forward_hook(lambda *_: self._add(1))

    def _add(self, sign: int) -> None:
        platform.synchronize(self.device)
        self.seconds += sign * time.perf_counter()


def draw(count: int, tokens: int, vocab_size: int) -> list[list[int]]:
    """Prompts that have no prefix in common with any before."""
    return torch.randint(3, vocab_size - 1, (count, tokens)).tolist()


def measure(llm: LLM, count: int, tokens: int, vocab_size: int, timer: ForwardTimer) -> dict[str, float]:
    """Tokens a second of prefills from end to end, and of the forward pass alone with and without the early exit;
    medians, after one run that compiles."""
    found = {"prefill_tok_s": [], "forward_tok_s": [], "forward_all_rows_tok_s": []}
    for _ in range(RUNS + 1):
        prompts, timer.seconds = draw(count, tokens, vocab_size), 0.0
        start = time.perf_counter()
        llm.generate(prompts, ONE_TOKEN, use_tqdm=False)
        found["prefill_tok_s"].append(count * tokens / (time.perf_counter() - start))
        found["forward_tok_s"].append(count * tokens / timer.seconds)
        timer.seconds = 0.0
        llm.score(draw(count, tokens, vocab_size))
        found["forward_all_rows_tok_s"].append(count * tokens / timer.seconds)
    return {name: statistics.median(values[1:]) for name, values in found.items()}


def first_token(llm: LLM, tokens: int, vocab_size: int) -> dict[str, float]:
    """Milliseconds to the first token of one prompt: new, and again with its prefix there; medians."""
    found = {"ttft_cold_ms": [], "ttft_hit_ms": [], "cached_tokens": []}
    for _ in range(RUNS + 1):
        (prompt,) = draw(1, tokens, vocab_size)
        cold, hit = (llm.generate([prompt], ONE_TOKEN, use_tqdm=False)[0] for _ in range(2))
        found["ttft_cold_ms"].append(cold["time_to_first_token"] * 1e3)
        found["ttft_hit_ms"].append(hit["time_to_first_token"] * 1e3)
        found["cached_tokens"].append(hit["num_cached_tokens"])
    return {name: statistics.median(values[1:]) for name, values in found.items()}


def reference_speed(path: str, device: torch.device, tokens: int, vocab_size: int) -> float:
    """Tokens a second of the plain reference, one prompt at a time in float32, as it is written."""
    reference = SanshoReference(path, str(device))
    (warm,), (prompt,) = draw(1, min(tokens, 64), vocab_size), draw(1, tokens, vocab_size)
    reference.logits(warm)
    platform.synchronize(device)
    start = time.perf_counter()
    reference.logits(prompt)
    platform.synchronize(device)
    return tokens / (time.perf_counter() - start)


def main() -> None:
    """A table, and the same as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="sansho-500m")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lengths", nargs="+", default=["8x8064"], help="prompts x tokens, more than graphs take")
    parser.add_argument("--ttft-tokens", type=int, default=8000)
    args = parser.parse_args()
    cases = {case: tuple(map(int, case.split("x"))) for case in args.lengths}
    # All prompts of a case in one step: that keeps the device busy longer than the host takes to launch it.
    step = max(count * tokens for count, tokens in cases.values())
    longest, vocab_size = max(tokens for _, tokens in cases.values()), SHAPES[args.shape]["vocab_size"]
    device = torch.device(args.device)
    result = {"shape": args.shape, "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu"}
    with tempfile.TemporaryDirectory() as path:
        make_export(path, args.shape, tokenizer=False)
        pool = {} if device.type == "cuda" else {"num_kvcache_blocks": 64, "kvcache_block_size": 16}
        with LLM(
            path,
            device=args.device,
            skip_tokenizer_init=True,
            max_num_seqs=16,
            max_num_batched_tokens=step,
            sansho_prefix_checkpoints=16,
            **pool,
        ) as llm:
            # Before the hooks, which wait for the device.
            result |= first_token(llm, args.ttft_tokens, vocab_size)
            timer = ForwardTimer(llm.engine.runner.model, device)
            for case, (count, tokens) in cases.items():
                result[case] = measure(llm, count, tokens, vocab_size, timer)
        result["reference_tok_s"] = reference_speed(path, device, longest, vocab_size)
    for case in cases:
        own = result[case]
        own["vs_reference"] = own["prefill_tok_s"] / result["reference_tok_s"]
        own["early_exit"] = own["forward_tok_s"] / own["forward_all_rows_tok_s"]
        print(f"{case:<10}{own['prefill_tok_s']:>12,.0f} tok/s, {own['vs_reference']:.1f} x the reference (target 2)")
        print(f"{'':<10}{own['early_exit']:>12.2f} x the forward pass of all rows (target 1.2)")
    print(f"reference {result['reference_tok_s']:>12,.0f} tok/s")
    print(
        f"{args.ttft_tokens} tokens: first token after {result['ttft_cold_ms']:.1f} ms, "
        f"{result['ttft_hit_ms']:.1f} ms with {result['cached_tokens']:.0f} of them cached"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
