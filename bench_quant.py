"""Quantized weights against 16-bit ones: speed, time to first token and memory, each run in a process of its own.

python bench_quant.py --model qwen3-0.6b --load-format dummy --profile mixed
python bench_quant.py --model DIR --profile decode_heavy --sweep 128,256,512,768,1024 --plot x.png

Profiles (any option of bench.py overrides their lengths and counts):
  mixed          256 sequences of 100 to 1024 tokens in and out; --sweep sets max_num_seqs
  decode_heavy   short inputs, long outputs; --sweep sets max_num_seqs and the number of sequences
  prefill_heavy  long inputs, short outputs; --sweep sets max_num_batched_tokens

Mode "bf16" is the model unquantized, in --dtype.
"""

import argparse
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor

import bench

MODES = {"bf16": None, "int8": "int8", "w8a8": "w8a8"}
SWEPT = {"mixed": "max_num_seqs", "decode_heavy": "max_num_seqs", "prefill_heavy": "max_num_batched_tokens"}
PROFILES = {
    "mixed": {},
    "decode_heavy": {"min_input_len": 32, "max_input_len": 32, "min_output_len": 512, "max_output_len": 512},
    "prefill_heavy": {
        "num_seqs": 64, "min_input_len": 4096, "max_input_len": 4096, "min_output_len": 8, "max_output_len": 8,
        "max_model_len": 8192,
    },
}  # fmt: skip
COLUMNS = [  # heading, name in the result, factor, decimals
    ("total tok/s", "total_tok_s", 1, 0), ("prefill", "prefill_tok_s", 1, 0), ("decode", "decode_tok_s", 1, 0),
    ("ttft ms", "ttft_mean_s", 1e3, 1), ("p50", "ttft_p50_s", 1e3, 1), ("p99", "ttft_p99_s", 1e3, 1),
    ("loaded GiB", "load_allocated_gib", 1, 3), ("reserved", "load_reserved_gib", 1, 3),
    ("peak", "peak_memory_gib", 1, 2),
    ("total x", "total_ratio", 1, 2), ("prefill x", "prefill_ratio", 1, 2), ("decode x", "decode_ratio", 1, 2),
]  # fmt: skip


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """bench.py's options, with the profile's values as defaults."""
    parser = bench.make_parser(__doc__)
    parser.add_argument("--profile", choices=PROFILES, default="mixed")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--sweep", type=lambda text: [int(part) for part in text.split(",")], default=None)
    parser.add_argument("--quantized", nargs="*", default=[], metavar="MODE=DIR", help="directories made beforehand")
    parser.add_argument("--plot", metavar="FILE.png", help="total throughput over the swept value, a line per mode")
    parser.set_defaults(**PROFILES[parser.parse_known_args(argv)[0].profile])
    args = parser.parse_args(argv)
    args.quantized = dict(pair.split("=", 1) for pair in args.quantized)
    return args


def run(args: argparse.Namespace, mode: str) -> dict:
    """One mode at one point of the sweep."""
    result = bench.measured_run(args, quantization=MODES[mode], quantized_model_path=args.quantized.get(mode))
    tokens = result["input_tokens"] + result["output_tokens"]
    return {"mode": mode, SWEPT[args.profile]: getattr(args, SWEPT[args.profile])} | result | {
        "total_tok_s": tokens / result["seconds"]
    }  # fmt: skip


def run_apart(args: argparse.Namespace, mode: str) -> dict:
    """`run` in a new process, so that no peak, cache or allocation of another mode shows in it."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run, args, mode).result()


def sweep(args: argparse.Namespace) -> list[dict]:
    """All points and modes; each result carries its ratios to bf16 at the same point, if that is run."""
    results = []
    for value in args.sweep or [getattr(args, SWEPT[args.profile])]:
        point = argparse.Namespace(**{**vars(args), SWEPT[args.profile]: value})
        if args.profile == "decode_heavy" and args.sweep:
            point.num_seqs = value
        base = None
        for mode in sorted(args.modes, key=lambda mode: mode != "bf16"):
            result = run_apart(point, mode)
            base = result if mode == "bf16" else base
            for kind in ("total", "prefill", "decode"):
                result[f"{kind}_ratio"] = result[f"{kind}_tok_s"] / base[f"{kind}_tok_s"] if base else None
            results.append(result)
            done = f"{mode} {SWEPT[args.profile]}={value}: {result['total_tok_s']:,.0f} tok/s in and out"
            print(done, file=sys.stderr, flush=True)
    return results


def print_table(results: list[dict], swept: str) -> None:
    """For people: a row per run, and which kernels each mode ran on."""
    print(f"{'mode':<6}{swept:>24}" + "".join(f"{heading:>13}" for heading, *_ in COLUMNS))
    for result in results:
        cells = [(result[name], factor, digits) for _, name, factor, digits in COLUMNS]
        row = ("-" if value is None else f"{value * factor:,.{digits}f}" for value, factor, digits in cells)
        print(f"{result['mode']:<6}{result[swept]:>24,}" + "".join(f"{cell:>13}" for cell in row))
    for mode, kernels in {result["mode"]: result["kernels"] for result in results}.items():
        for kind, path in kernels.items():
            print(f"{mode}: {kind}: {path}")


def plot(results: list[dict], swept: str, file: str) -> None:
    """Total throughput over the swept value."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots()
    for mode in dict.fromkeys(result["mode"] for result in results):
        points = [(result[swept], result["total_tok_s"]) for result in results if result["mode"] == mode]
        axes.plot(*zip(*points, strict=True), marker="o", label=mode)
    axes.set(xlabel=swept, ylabel="tokens per second, in and out", ylim=(0, None))
    axes.legend()
    figure.savefig(file)


def main() -> int:
    """Run, print the table and one line of JSON, draw; returns the exit status."""
    args = parse_args()
    if args.plot:
        try:
            import matplotlib  # noqa: F401 - before hours of measuring, not after
        except ImportError:
            print("error: --plot needs matplotlib: pip install 'nanovllm[plot]'", file=sys.stderr)
            return 1
    results = sweep(args)
    print_table(results, SWEPT[args.profile])
    print(json.dumps({"profile": args.profile, "results": results}))
    if args.plot:
        plot(results, SWEPT[args.profile], args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
