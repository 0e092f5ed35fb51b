"""What quantizing costs in quality: weights, logits, greedy texts and perplexity against the unquantized model.

python bench_quant_quality.py --model DIR                                       # quantizes while loading
python bench_quant_quality.py --model DIR --modes w8a8 --quantized w8a8=DIR2    # a directory made beforehand
python bench_quant_quality.py --model DIR --text FILE --max-ppl-delta 1.0       # exit status 1 if it is missed

Without --text or --dataset the text is the English prose that Python carries in pydoc_data.topics.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch

from nanovllm import LLM, SamplingParams, loader
from nanovllm.config import read_json
from nanovllm.models.registry import load_raw_config
from nanovllm.quantize import SMOOTHING_KEY, skeleton

PROMPTS = [
    "The capital of France is", "Once upon a time there was a", "To sort a list in Python, you can",
    "Water boils at a temperature of", "The three laws of motion are", "My favourite recipe begins with",
    "In 1969, the first people on the Moon", "A prime number is",
]  # fmt: skip


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory of the unquantized model")
    parser.add_argument("--modes", nargs="+", choices=("int8", "w8a8"), default=["int8", "w8a8"])
    parser.add_argument("--quantized", nargs="*", default=[], metavar="MODE=DIR", help="directories made beforehand")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--text", metavar="FILE")
    source.add_argument("--dataset", metavar="NAME", help="a configuration of wikitext, such as wikitext-2-raw-v1")
    parser.add_argument("--num-tokens", type=int, default=8192, help="of the text, for perplexity")
    parser.add_argument("--num-logits", type=int, default=512, help="tokens whose logits are compared")
    parser.add_argument("--window", type=int, default=512, help="tokens a prediction can see, at most")
    parser.add_argument("--stride", type=int, default=256, help="by which the window slides")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="of each greedy text")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-ppl-delta", type=float, help="per cent; a bound")
    parser.add_argument("--max-rel-l2", type=float, help="of the mean over the layers; a bound")
    parser.add_argument("--min-cosine", type=float, help="of every layer; a bound")
    args = parser.parse_args(argv)
    args.quantized = dict(pair.split("=", 1) for pair in args.quantized)
    if not 0 < args.stride <= args.window:
        parser.error(f"--stride {args.stride}: from 1 to --window {args.window}")
    return args


def read_text(args: argparse.Namespace) -> str:
    """The text to measure on."""
    if args.text:
        return Path(args.text).read_text(encoding="utf-8")
    if not args.dataset:
        return "\n\n".join(topics[name] for name in sorted(topics))
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError("--dataset needs the package datasets: pip install datasets; or use --text FILE") from None
    return "\n\n".join(load_dataset("wikitext", args.dataset, split="test")["text"])


def observe(llm: LLM, text: str, args: argparse.Namespace) -> dict:
    """What a model says about the text: logits [n, V], perplexity, and its greedy texts as token ids."""
    ids = llm.engine.tokenizer.encode([text[: 16 * args.num_tokens]])[0][: args.num_tokens]
    model, rows = llm.engine.runner.model, []
    compute = model.compute_logits

    def keep(hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        rows.append(compute(hidden, out).float().cpu())
        return rows[-1].to(hidden.device)

    model.compute_logits = keep
    for start in range(0, min(len(ids), args.num_logits), args.window):
        llm.score([ids[start : min(start + args.window, args.num_logits)]])
    model.compute_logits = compute
    params = SamplingParams(temperature=0, max_tokens=args.max_new_tokens)
    texts = llm.generate(PROMPTS, params, use_tqdm=False)
    return {
        "logits": torch.cat(rows),
        "perplexity": perplexity(llm, ids, args.window, args.stride),
        "texts": [output["token_ids"] for output in texts],
    }


def perplexity(llm: LLM, ids: list[int], window: int, stride: int) -> float:
    """exp of the mean negative log probability of each token but the first, each seen after at least window - stride
    others, or as many as there are."""
    total, count, end = 0.0, 0, 0
    for start in range(0, len(ids), stride):
        piece = ids[start : start + window]
        logprobs = llm.score([piece])[0]["token_logprobs"]
        new = logprobs[max(end - start, 1) :]
        total, count, end = total - sum(new), count + len(new), start + len(piece)
        if end == len(ids):
            break
    return math.exp(total / max(count, 1))


def compare_weights(llm: LLM, model: str, smoothed: bool) -> list[dict]:
    """Each quantized projection against the float checkpoint's, smoothed alike."""
    views = {f"{name}.weight": (m, v) for name, m, v in loader.linear_parts(llm.engine.runner.model) if m.name}
    bare = skeleton(load_raw_config(model, "auto"), None)
    found = []
    needed = frozenset(loader.checkpoint_targets(bare))
    for name, tensor in loader.read_tensors(model, needed, bare.unneeded_tensors, None):
        if name not in views:
            continue
        method, parameters = views[name]
        kept = method.dequantize(parameters).cpu()
        weight = smoothed_like(kept, tensor.float()) if smoothed else tensor.float()
        error = ((kept - weight).double().norm() / weight.double().norm().clamp(min=1e-30)).item()
        cosine = torch.cosine_similarity(kept.double().flatten(), weight.double().flatten(), 0).item()
        stored = ", ".join(f"{kind} {list(v.shape)} {str(v.dtype)[6:]}" for kind, v in parameters.items())
        found.append({"layer": name.removesuffix(".weight"), "stored": stored, "rel_l2": error, "cosine": cosine})
    return found


def smoothed_like(kept: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`weight` [N, K] with the powers of two by which the columns and rows of `kept` differ from its own: what was
    quantized when `kept` was made."""
    for dim in (0, 1):
        known = (weight != 0) & (kept != 0)
        ratio = (kept / weight).abs().where(known, torch.nan)
        weight = weight * torch.exp2(ratio.nanmedian(dim, keepdim=True).values.log2().round().nan_to_num(0.0))
    return weight


def compare(reference: dict, found: dict) -> dict:
    """Logits, texts and perplexity of a quantized model beside those of the reference."""
    a, b = reference["logits"].double(), found["logits"].double()
    log_p, log_q = a.log_softmax(-1), b.log_softmax(-1)
    top = (a.topk(5).indices[:, :, None] == b.topk(5).indices[:, None, :]).any(-1)
    parts = []
    for one, other in zip(reference["texts"], found["texts"], strict=True):
        same = next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other)))
        parts.append(None if one == other else same)
    return {
        "logit_cosine": torch.cosine_similarity(a, b).mean().item(),
        "kl": (log_p.exp() * (log_p - log_q)).sum(-1).mean().item(),
        "top1": (a.argmax(-1) == b.argmax(-1)).double().mean().item(),
        "top5": top.double().mean().item(),
        "texts_part_at": parts,
        "perplexity": found["perplexity"],
        "ppl_delta_percent": 100 * (found["perplexity"] / reference["perplexity"] - 1),
    }


def measure(args: argparse.Namespace, mode: str | None, text: str) -> tuple[dict, list[dict], dict[str, str]]:
    """Load one mode, or the reference for None; returns what it says, its weights' errors and its kernels."""
    directory = args.quantized.get(mode)
    knobs = {"quantization": mode, "quantized_model_path": directory, "dtype": args.dtype, "device": args.device}
    with LLM(args.model, max_num_seqs=len(PROMPTS), max_num_batched_tokens=2048, **knobs) as llm:
        if llm.engine.max_model_len < args.window + 1:
            raise ValueError(f"--window {args.window} does not fit the model's {llm.engine.max_model_len} tokens")
        smoothed = directory is not None and read_json(Path(directory) / "config.json").get(SMOOTHING_KEY, False)
        weights = compare_weights(llm, args.model, smoothed) if mode else []
        return observe(llm, text, args), weights, llm.engine.kernel_paths


def missed_bounds(result: dict, args: argparse.Namespace) -> list[str]:
    """The stated bounds that a mode does not keep."""
    bounds = [
        ("ppl_delta_percent", args.max_ppl_delta, 1), ("mean_rel_l2", args.max_rel_l2, 1),
        ("min_cosine", args.min_cosine, -1),
    ]  # fmt: skip
    return [
        f"{name} {result[name]:.6g}, bound {b:g}" for name, b, s in bounds if b is not None and s * result[name] > s * b
    ]


def print_result(mode: str, result: dict, layers: list[dict]) -> None:
    """For people: a line per layer, then the figures."""
    for layer in layers:
        print(f"{mode:<5}{layer['layer']:<42}{layer['rel_l2']:>9.5f}{layer['cosine']:>11.7f}  {layer['stored']}")
    for name, value in result.items():
        print(f"{mode:<5}{name:<20}{value:>14.6f}" if isinstance(value, float) else f"{mode:<5}{name:<20}{value}")


def main(argv: list[str] | None = None) -> int:
    """Measure, print the table and one line of JSON; returns the exit status."""
    args = parse_args(argv)
    try:
        text = read_text(args)
        reference = measure(args, None, text)[0]
        results, failed = {"perplexity": reference["perplexity"]}, []
        for mode in args.modes:
            found, layers, kernels = measure(args, mode, text)
            errors, cosines = ([layer[name] for layer in layers] for name in ("rel_l2", "cosine"))
            result = {"mean_rel_l2": sum(errors) / len(errors), "max_rel_l2": max(errors), "min_cosine": min(cosines)}
            result |= compare(reference, found) | {"kernels": kernels}
            print_result(mode, result, layers)
            failed += [f"{mode}: {line}" for line in missed_bounds(result, args)]
            results[mode] = result | {"layers": layers}
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"reference perplexity {reference['perplexity']:.4f}")
    print("\n".join(f"missed: {line}" for line in failed) or "no stated bound is missed")
    print(json.dumps(results))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
