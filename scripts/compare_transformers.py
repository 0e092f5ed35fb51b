"""Decoding speed on a CPU beside transformers' own generate: the demo model, one chat prompt and eight of them.

python scripts/compare_transformers.py --dtype bfloat16
"""

import argparse
import time
from collections.abc import Callable

import torch
from demo_model import demo_model_path
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanovllm import LLM, SamplingParams


def best_rate(run: Callable[[], object], num_tokens: int) -> float:
    """Tokens per second of the faster of two runs."""
    rates = []
    for _ in range(2):
        begin = time.perf_counter()
        run()
        rates.append(num_tokens / (time.perf_counter() - begin))
    return max(rates)


def main() -> None:
    """Print three rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--num-tokens", type=int, default=128)
    args = parser.parse_args()
    path = str(demo_model_path())
    talks = [[{"role": "user", "content": f"Tell me {i + 2} facts about Paris."}] for i in range(8)]
    params = SamplingParams(temperature=0, max_tokens=args.num_tokens, ignore_eos=True)
    with LLM(path, dtype=args.dtype, device="cpu") as llm:
        llm.chat(talks[:1], SamplingParams(max_tokens=4), use_tqdm=False)
        one = best_rate(lambda: llm.chat(talks[:1], params, use_tqdm=False), args.num_tokens)
        eight = best_rate(lambda: llm.chat(talks, params, use_tqdm=False), 8 * args.num_tokens)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, args.dtype)).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    inputs = tokenizer.apply_chat_template(talks[0], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    limits = {"max_new_tokens": args.num_tokens, "min_new_tokens": args.num_tokens, "do_sample": False}
    with torch.inference_mode():
        theirs = best_rate(lambda: model.generate(**inputs, **limits), args.num_tokens)
    print(f"{args.dtype}: transformers {theirs:.1f} tok/s, ours {one:.1f} ({one / theirs:.2f}x), eight {eight:.1f}")


if __name__ == "__main__":
    main()
