"""Where the time of a decode step goes on a GPU: kernels by time, and how long the GPU idles.

python scripts/profile_decode.py                     # 1, 8, 256 and 512 sequences
python scripts/profile_decode.py --cases 1x128       # sequences x context
"""

import argparse
import time
from collections import defaultdict

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from nanovllm import LLM, SamplingParams

STEPS = 10


def start(llm: LLM, num_seqs: int, context: int) -> list:
    """Sequences that have left their prefill and decode on for a while."""
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=200)
    prompts = [[(7 * i + 13 * j) % 10000 for j in range(context)] for i in range(num_seqs)]
    seqs = [seq for prompt in prompts for seq in llm.engine.add(prompt, params)]
    while not all(seq.is_decoding for seq in seqs):
        llm.engine.step()
    return seqs


def time_steps(llm: LLM, count: int) -> float:
    """Microseconds a step."""
    begin = time.perf_counter()
    for _ in range(count):
        llm.engine.step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count * 1e6


def report(events: list, most: int = 16) -> None:
    """Kernels by time; those that overlap their predecessor count their waiting too."""
    kernels = [event for event in events if event.device_type == DeviceType.CUDA]
    spent, calls = defaultdict(float), defaultdict(int)
    for event in kernels:
        spent[event.name] += event.time_range.end - event.time_range.start
        calls[event.name] += 1
    span = max(event.time_range.end for event in kernels) - min(event.time_range.start for event in kernels)
    busy = sum(spent.values())
    print(f"  profiled: {span / STEPS:.0f} us a step, GPU idle {100 * (1 - busy / span):.1f}%")
    for name in sorted(spent, key=spent.get, reverse=True)[:most]:
        each = spent[name] / calls[name]
        print(f"  {spent[name] / STEPS:9.1f} us {calls[name] / STEPS:6.1f} x {each:7.2f}  {name[:80]}")


def main() -> None:
    """Profile each case in one engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help="a built-in shape (random weights)")
    parser.add_argument("--cases", nargs="+", default=["1x128", "8x128", "256x900", "512x300"])
    args = parser.parse_args()
    with LLM(args.model, load_format="dummy", skip_tokenizer_init=True, max_model_len=4096) as llm:
        for case in args.cases:
            num_seqs, context = map(int, case.split("x"))
            seqs = start(llm, num_seqs, context)
            time_steps(llm, 20)
            print(f"{num_seqs} sequences, context {context}: {time_steps(llm, 50):.0f} us a step")
            with profile(activities=[ProfilerActivity.CUDA]) as profiled:
                time_steps(llm, STEPS)
            report(profiled.events())
            llm.engine.abort(seqs)
            llm.engine.drain()


if __name__ == "__main__":
    main()
