"""Measure the int8 kernels on the GPU at hand and write the fastest configurations for its chip.

python scripts/tune_quant_linear.py                                # all shapes; minutes
python scripts/tune_quant_linear.py --shapes 8b --methods w8a8 --rows 1 16
python scripts/tune_quant_linear.py --check                        # the shipped configurations only; writes nothing

Times come from CUDA graphs, with weights that rotate over more bytes than L2 holds; a ratio is to torch's bf16 product
of the same shape in the same run, and from 128 rows on w8a8 includes quantizing the activations. The result goes to
nanovllm/kernels/quant_linear_configs.json, and as it grows to the folder $OUT where that is set.
"""

import argparse
import copy
import json
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F

from nanovllm.kernels import quant_linear_triton
from nanovllm.kernels.quant_linear import BUCKETS, CONFIGS, FIELDS, chip_table, config_for
from nanovllm.kernels.quantize import quantize_tokens

SHAPES = {
    "0.6b": [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)],
    "8b": [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)],
    "32b": [(10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600)],
}
VECTORS = [
    *[(1, 4096, 4), (1, 2048, 2), (2, 2048, 2), (2, 4096, 4), (4, 1024, 1)],
    *[(4, 1024, 2), (4, 2048, 4), (4, 4096, 4), (8, 1024, 2), (8, 1024, 4), (8, 2048, 4)],
]
# BLOCK_M, BLOCK_N, BLOCK_K, SLICES, SPLIT_K, warps, stages; by the most rows of digits.
TILES = {
    16: [(16, 16, 256, 4, 1, 4, 3), (16, 16, 128, 4, 1, 4, 4), (16, 16, 256, 8, 1, 8, 3), (16, 32, 128, 4, 1, 4, 4),
        (16, 32, 256, 4, 2, 4, 3), (16, 64, 256, 1, 4, 4, 4), (16, 64, 128, 1, 8, 4, 5)],
    32: [(32, 16, 256, 4, 1, 4, 3), (32, 32, 128, 4, 1, 4, 4), (32, 32, 256, 4, 1, 4, 3), (32, 64, 128, 1, 1, 4, 5),
        (32, 64, 256, 1, 4, 4, 4), (32, 64, 128, 1, 8, 4, 5), (32, 128, 128, 1, 4, 4, 5), (32, 64, 128, 4, 2, 4, 3),
        (32, 16, 128, 4, 1, 4, 4), (32, 32, 256, 1, 1, 4, 4), (32, 64, 256, 1, 2, 4, 4)],
    64: [(64, 64, 128, 1, 2, 4, 5), (64, 64, 128, 1, 4, 4, 5), (64, 64, 256, 1, 4, 4, 4),
        (64, 128, 128, 1, 1, 4, 4), (64, 128, 128, 1, 2, 4, 4), (64, 128, 128, 1, 4, 4, 4),
        (64, 32, 128, 4, 2, 4, 3), (64, 32, 256, 1, 1, 4, 4), (64, 32, 128, 4, 1, 4, 3), (64, 64, 256, 1, 1, 4, 4),
        (64, 64, 128, 1, 1, 4, 5)],
    128: [(64, 64, 128, 1, 2, 4, 4), (128, 64, 128, 1, 1, 4, 4), (128, 64, 128, 1, 2, 4, 4),
        (128, 64, 128, 1, 4, 4, 4), (128, 128, 128, 1, 1, 8, 4), (128, 64, 256, 1, 2, 4, 3),
        (64, 64, 128, 1, 1, 4, 5), (64, 64, 128, 1, 4, 4, 4), (64, 64, 256, 1, 2, 4, 3), (64, 32, 256, 1, 1, 4, 4)],
    256: [(64, 64, 128, 1, 1, 4, 4), (128, 64, 128, 1, 1, 4, 4), (128, 128, 128, 1, 1, 4, 4),
        (128, 128, 128, 1, 1, 8, 4), (128, 128, 128, 1, 2, 8, 4), (256, 64, 128, 1, 1, 4, 4),
        (256, 128, 128, 1, 1, 8, 3), (64, 64, 128, 1, 2, 4, 4), (64, 64, 128, 1, 4, 4, 4),
        (128, 64, 128, 1, 2, 4, 4), (64, 32, 256, 1, 1, 4, 4)],
    512: [(64, 64, 128, 1, 1, 4, 4), (64, 64, 128, 1, 2, 4, 4), (128, 64, 128, 1, 2, 4, 4),
        (128, 64, 128, 1, 1, 4, 4), (128, 128, 128, 1, 1, 4, 4), (128, 128, 128, 1, 1, 8, 4),
        (256, 128, 128, 1, 1, 8, 3), (128, 256, 128, 1, 1, 8, 3)],
    1024: [(128, 128, 128, 1, 1, 4, 4), (128, 128, 128, 1, 1, 8, 4), (256, 128, 128, 1, 1, 8, 3),
        (256, 128, 128, 1, 1, 8, 4), (128, 256, 128, 1, 1, 8, 3), (128, 256, 128, 1, 1, 8, 4)],
    4096: [(128, 128, 128, 1, 1, 4, 4), (128, 128, 128, 1, 1, 8, 4), (256, 128, 128, 1, 1, 8, 3),
        (256, 128, 128, 1, 1, 8, 4), (128, 256, 128, 1, 1, 8, 3), (128, 256, 128, 1, 1, 8, 4)],
}  # fmt: skip
DIGITS = {"int8": 2, "w8a8": 1}
ROTATED_BYTES = 160 << 20
TOLERANCE = 0.02  # of the product's norm, against bf16 weights: a kernel that is wrong is off by far more


def candidates(method: str, rows: int) -> list[tuple]:
    """(kernel, its numbers ...) for a bucket."""
    if rows == 1:
        return [("vector", *numbers) for numbers in VECTORS] + [("tile", *TILES[16][0])]
    slices = (2048, 4096, 8192, 65536) if method == "int8" and rows >= 128 else ()
    tiles = TILES.get(rows * DIGITS[method], [])  # beyond, two digits take longer than cuBLAS and 16 bits
    return [("tile", *numbers) for numbers in tiles] + [("dequantize", part) for part in slices]


def expand(choice: tuple) -> dict:
    """As `linear` takes it."""
    return {"kernel": choice[0], **dict(zip(FIELDS[choice[0]], choice[1:], strict=True))}


def make_case(method: str, rows: int, n: int, k: int, copies: int) -> dict:
    """Random x and int8 weights, `copies` of the latter; and the product with the first of them in bf16."""
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    weights = torch.randint(-127, 128, (copies, n, k), device="cuda", dtype=torch.int8)
    scales = torch.rand(n, device="cuda") * 1e-3 + 1e-4
    exact = F.linear(x, (weights[0].float() * scales[:, None]).bfloat16())
    return {
        "method": method,
        "x": x,
        "act": quantize_tokens(x, DIGITS[method]),
        "weights": weights,
        "scales": scales,
        "exact": exact,
    }


def product(case: dict, i: int, config: dict) -> torch.Tensor:
    """The case's product with its i-th weights."""
    x, act = case["x"], case["act"]
    if case["method"] == "w8a8" and x.shape[0] >= 128:
        act = quantize_tokens(x)
    left = (x, None) if config["kernel"] == "dequantize" else (act.values, act.scales)
    overlap = torch.cuda.get_device_capability() >= (9, 0)
    return quant_linear_triton.linear(*left, case["weights"][i], case["scales"], None, x.dtype, config, overlap)


def time_graph(call, copies: int, about: float) -> float:
    """Microseconds of one call(i), i over the copies, in a CUDA graph: the median of five replays. `about`: a guess."""
    for i in range(min(copies, 2)):
        call(i)
    torch.cuda.synchronize()
    count = max(2, copies, min(20, int(1e3 / about)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            call(i % copies)
    times = []
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / count)
    return sorted(times[1:])[2]


def attempt(case: dict, config: dict, base: float | None) -> float:
    """Microseconds of a configuration, or infinity, with the reason printed. Without `base`, bf16's microseconds, it is
    launched but not timed."""
    shape = f"{case['method']} M={case['x'].shape[0]} {list(case['weights'].shape[1:])} {list(config.values())}"
    try:
        error = (product(case, 0, config).float() - case["exact"].float()).norm() / case["exact"].float().norm()
        if not error <= TOLERANCE:
            print(f"  WRONG, error {error:.3f}: {shape}", flush=True)
        elif base is not None:
            return time_graph(lambda i: product(case, i, config), len(case["weights"]), base)
    except Exception as problem:  # such as a tile that does not fit this chip
        print(f"  {type(problem).__name__}: {str(problem)[:80]}: {shape}", flush=True)
    return float("inf")


def compile_bucket(job: tuple[str, int, list[tuple[int, int]]]) -> None:
    """Launch a bucket's candidates once, so that this process's compilations land in Triton's cache."""
    method, rows, shapes = job
    for n, k in shapes:
        case = make_case(method, rows, n, k, 1)
        for choice in candidates(method, rows):
            attempt(case, expand(choice), None)


def measure_bf16(rows: int, n: int, k: int) -> float:
    """Microseconds of torch's own product."""
    copies = max(1, -(-ROTATED_BYTES // (2 * n * k)))
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    weights = torch.randn(copies, n, k, device="cuda", dtype=torch.bfloat16)
    return time_graph(lambda i: F.linear(x, weights[i]), copies, 2 * rows * n * k / 7e8 + 2 * n * k / 4e6)


def measure(method: str, rows: int, n: int, k: int, base: float, choices: list[tuple]) -> tuple | None:
    """Print the fastest choice and return it, if any worked."""
    case = make_case(method, rows, n, k, max(1, -(-ROTATED_BYTES // (n * k))))
    took, choice = min((attempt(case, expand(choice), base), choice) for choice in choices)
    if took == float("inf"):
        return None
    rate = f"{n * k / took / 1e3:6.0f} GB/s " if rows <= 64 else f"{2 * rows * n * k / took / 1e6:6.0f} TF/s "
    line = f"{method:<5}{rows:>5}  {n}x{k:<8}{took:9.1f} us {rate} bf16 {base:9.1f} us  {base / took:5.2f}x"
    print(f"{line}  {' '.join(map(str, choice))}", flush=True)
    return choice


def dump(node: dict | list, depth: int = 0) -> str:
    """JSON with a line for each choice."""
    if isinstance(node, list):
        return json.dumps(node)
    lines = [f"{' ' * (depth + 1)}{json.dumps(key)}: {dump(value, depth + 1)}" for key, value in node.items()]
    return "{\n" + ",\n".join(lines) + "\n" + " " * depth + "}"


def main() -> None:
    """Compile, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--methods", nargs="+", choices=DIGITS, default=list(DIGITS))
    parser.add_argument("--rows", nargs="+", type=int, choices=BUCKETS, default=list(BUCKETS))
    parser.add_argument("--check", action="store_true", help="time the shipped configurations, write nothing")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile")
    args = parser.parse_args()
    shapes = [shape for name in args.shapes for shape in SHAPES[name]]
    if not args.check:
        jobs = [(method, rows, shapes[:4]) for method in args.methods for rows in args.rows]
        with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
            list(pool.map(compile_bucket, jobs))
    major, minor = torch.cuda.get_device_capability()
    table, capability = json.loads(CONFIGS.read_text()), 10 * major + minor
    chip = table.setdefault(str(capability), copy.deepcopy(chip_table(capability)))
    for rows in args.rows:
        base = {shape: measure_bf16(rows, *shape) for shape in shapes}
        for method in args.methods:
            found = {}
            for n, k in shapes:
                shipped = tuple(config_for(method, rows, n, k, capability).values())
                choices = [shipped] if args.check else candidates(method, rows)
                choice = measure(method, rows, n, k, base[n, k], choices)
                found |= {f"{n}x{k}": list(choice)} if choice else {}
            buckets, whole = chip[method], set(args.shapes) == set(SHAPES)
            buckets[str(rows)] = found if whole and found else {**buckets[str(rows)], **found}
            for path in [] if args.check else [CONFIGS, *([Path(os.environ["OUT"])] if "OUT" in os.environ else [])]:
                (path / CONFIGS.name if path.is_dir() else path).write_text(dump(table) + "\n")


if __name__ == "__main__":
    main()
