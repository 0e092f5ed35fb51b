"""Everything that needs a GPU, in one call: the GPU tests, then the chosen benchmarks; a short table last.

python scripts/gpu_check.py                       # all
python scripts/gpu_check.py --only tests mixed    # some; --list names them

Full logs go to the folder $OUT, or gpu_check_out/ where that is not set.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def fixed(num_seqs: int, input_len: int, output_len: int) -> list[str]:
    """Arguments of bench.py for sequences that are all alike."""
    lens = {"min-input": input_len, "max-input": input_len, "min-output": output_len, "max-output": output_len}
    return ["--num-seqs", str(num_seqs), *(part for name, n in lens.items() for part in (f"--{name}-len", str(n)))]


DUMMY = ["bench.py", "--load-format", "dummy", "--model", "qwen3-0.6b"]
DUMMY_8B = ["bench.py", "--load-format", "dummy", "--model", "qwen3-8b"]
TP2 = ["--tensor-parallel-size", "2"]

QUANT_06B = ["bench_quant.py", "--load-format", "dummy", "--model", "qwen3-0.6b"]
QUANT_8B = ["bench_quant.py", "--load-format", "dummy", "--model", "qwen3-8b"]

JOBS: dict[str, list[str]] = {
    "kernels": ["scripts/bench_kernels.py", "--compile"],
    "mixed": [*DUMMY, "--rounds", "3"],
    "decode_512": [*DUMMY, *fixed(512, 32, 512)],
    "decode_128": [*DUMMY, *fixed(512, 32, 512), "--max-num-seqs", "128"],
    "decode_1024": [*DUMMY, *fixed(1024, 32, 512), "--max-num-seqs", "1024"],
    "latency_1": [*DUMMY, *fixed(1, 128, 512), "--rounds", "3"],
    "latency_8": [*DUMMY, *fixed(8, 128, 512), "--rounds", "3"],
    "prefill_heavy": [*DUMMY, *fixed(64, 4096, 8), "--max-model-len", "8192", "--rounds", "3"],
    "server_mixed": ["scripts/bench_server.py", *DUMMY[1:]],
    "mixed_8b": DUMMY_8B,
    "latency_1_8b": [*DUMMY_8B, *fixed(1, 128, 512)],
    "prefill_heavy_8b": [*DUMMY_8B, *fixed(64, 4096, 8), "--max-model-len", "8192"],
    # On two GPUs; beside the same without tp2.
    "tp2_mixed": [*DUMMY, *TP2, "--rounds", "3"],
    "tp2_latency_1": [*DUMMY, *TP2, *fixed(1, 128, 512)],
    "tp2_prefill_heavy": [*DUMMY, *TP2, *fixed(64, 4096, 8), "--max-model-len", "8192"],
    "tp2_mixed_8b": [*DUMMY_8B, *TP2],
    "tp2_latency_1_8b": [*DUMMY_8B, *TP2, *fixed(1, 128, 512)],
    "tp2_prefill_heavy_8b": [*DUMMY_8B, *TP2, *fixed(64, 4096, 8), "--max-model-len", "8192"],
    "quant_mixed": QUANT_06B,
    "quant_decode": [*QUANT_06B, "--profile", "decode_heavy", "--sweep", "512,768,1024"],
    "quant_latency_8b": [*QUANT_8B, *fixed(1, 128, 512)],
    "quant_prefill_8b": [*QUANT_8B, "--profile", "prefill_heavy"],
}


# A process for each file with GPU tests, all at once: compiling kernels takes most of their time.
TESTS = {
    path.stem: ["-m", "pytest", "-m", "gpu", "-q", "--durations=5", str(path.relative_to(ROOT))]
    for path in sorted((ROOT / "tests").glob("test_*.py"))
    if "triton_tools" in path.read_text() or "mark.gpu" in path.read_text()
}


def run_tests(out: Path, timeout: float) -> list[dict]:
    """Run all of TESTS side by side; results as of `run_job`."""
    with ThreadPoolExecutor(len(TESTS)) as pool:
        return list(pool.map(lambda name: run_job(name, TESTS[name], out, timeout), TESTS))


def run_job(name: str, argv: list[str], out: Path, timeout: float) -> dict:
    """Run one job in a process of its own; returns its name, seconds, exit status and the JSON it printed last."""
    log = out / f"{name}.log"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # also where the package is not installed
    start = time.perf_counter()
    with log.open("w") as file:
        try:
            run = subprocess.run(
                [sys.executable, *argv],
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=timeout,
            )
            status = run.returncode
        except subprocess.TimeoutExpired:
            status = -1
    lines = log.read_text().splitlines()
    found = next((json.loads(line) for line in reversed(lines) if line.startswith("{")), {})
    return {"job": name, "status": status, "seconds": time.perf_counter() - start, "last": lines[-1:], **found}


def row(result: dict) -> str:
    """One line of the table."""
    head = f"{result['job']:<25}{'ok' if result['status'] == 0 else 'FAILED':<8}{result['seconds']:>7.1f} s  "
    if "results" in result:  # of bench_quant.py, a line each
        return "\n".join([head, *(_quant_row(one) for one in result["results"])])
    if "tb_s" in result:  # of bench_kernels.py
        return head + "   ".join(f"{name} {value:.2f}" for name, value in result["tb_s"].items()) + " TB/s"
    if "output_tok_s" not in result:
        return head + " ".join(result["last"])[-100:]
    return head + (
        f"{result['output_tok_s']:>10,.0f} tok/s   prefill {result['prefill_tok_s']:>9,.0f}   "
        f"decode {result['decode_tok_s']:>9,.0f}   ttft {result['ttft_mean_s'] * 1e3:>8.1f} ms   "
        f"peak {result['peak_memory_gib']:.1f} GiB   {result['backend']}"
    )


def _quant_row(one: dict) -> str:
    """One run of bench_quant.py; the swept setting is the second thing it names."""
    swept = list(one)[1]
    ratios = "   ".join(f"{kind} {one[f'{kind}_ratio'] or 0:.2f}x" for kind in ("total", "prefill", "decode"))
    return (
        f"    {one['mode']:<6}{swept} {one[swept]:>6,}  {one['output_tok_s']:>10,.0f} tok/s out   {ratios}   "
        f"ttft {one['ttft_mean_s'] * 1e3:>8.1f} ms   loaded {one['load_allocated_gib']:.2f} GiB"
    )


def main() -> int:
    """Run the jobs; the exit status is 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["tests", *JOBS]
    default = [name for name in names if not name.startswith("tp2_")]
    parser.add_argument("--only", nargs="+", choices=names, default=default, help="those of two GPUs only if named")
    parser.add_argument("--list", action="store_true", help="name the jobs and their commands")
    parser.add_argument("--timeout", type=float, default=400, help="seconds a job may take")
    args = parser.parse_args()
    if args.list:
        for name, argv in (TESTS | JOBS).items():
            print(f"{name:<25}{' '.join(argv)}")
        return 0
    out = Path(os.environ.get("OUT", ROOT / "gpu_check_out"))
    out.mkdir(parents=True, exist_ok=True)
    results = []
    for name in args.only:
        done = [run_job(name, JOBS[name], out, args.timeout)] if name in JOBS else run_tests(out, args.timeout)
        print("\n".join(map(row, done)), flush=True)  # not all at the end: a call that is cut off shows what it had
        results += done
        (out / "results.json").write_text(json.dumps(results, indent=1))
    return int(any(result["status"] != 0 for result in results))


if __name__ == "__main__":
    sys.exit(main())
