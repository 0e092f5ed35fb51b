"""Answer a file of prompts on all GPUs of a Ray cluster: one engine a GPU, and results written as they come.

python examples/ray_batch.py --model DIR --input prompts.jsonl --output answers.jsonl --sampling '{"max_tokens": 64}'

Each line of the input (or row of a Parquet file) has a `prompt`, which is text or token ids, and an `id`; without one
it is known by a hash of what it says. The output has a JSON object a line: id, text, token_ids, finish_reason, error. A
second run with the same files answers what is left. Needs the extra `ray`; without a cluster it takes this machine.
"""

import argparse
import hashlib
import json
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from nanovllm import LLM, SamplingParams


def key(line: str) -> str | int:
    """What an input line is known by. Its id where it has one, so that lines may move between two runs."""
    found = field(line, "id")
    return found if isinstance(found, str | int) else hashlib.sha256(line.encode()).hexdigest()[:16]


def field(line: str, name: str) -> Any:
    """A field of a JSON object; None where the line is none, or has no such field."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):  # the latter of brackets in brackets in brackets
        return None
    return found.get(name) if isinstance(found, dict) else None


class Worker:
    """One engine, in an actor of its own; called with blocks of input lines.

    Args:
        model: directory, as `LLM` takes it.
        engine: further knobs of the engine.
        sampling: fields of `SamplingParams`.
        chat: each prompt is a user's message for the model's chat template.
    """

    def __init__(self, model: str, engine: dict[str, Any], sampling: dict[str, Any], chat: bool) -> None:
        self._llm = LLM(model, **engine)
        self._params = SamplingParams(**sampling)
        self._chat = chat

    def __call__(self, block: dict[str, np.ndarray]) -> dict[str, list[str]]:
        """Answers as JSON, in the order of the lines."""
        lines = [str(line) for line in block["text"]]
        prompts = {i: prompt for i, line in enumerate(lines) if (prompt := field(line, "prompt")) is not None}
        found = {i: {"error": "this is not a JSON object with a prompt"} for i in range(len(lines))}
        found |= zip(prompts, self._answer(list(prompts.values())), strict=True)
        return {"answer": [self._as_json(line, found[i]) for i, line in enumerate(lines)]}

    @staticmethod
    def _as_json(line: str, output: dict[str, Any]) -> str:
        told = {name: output.get(name) for name in ("text", "token_ids", "finish_reason")}
        return json.dumps({"id": key(line), **told, "error": output.get("error") or None})

    def _answer(self, prompts: list[Any]) -> list[dict[str, Any]]:
        """`generate` checks all prompts before it runs any, so those that it refuses are found by halving the list."""
        try:
            if self._chat:
                talks = [[{"role": "user", "content": prompt}] for prompt in prompts]
                return self._llm.chat(talks, self._params, use_tqdm=False)
            return self._llm.generate(prompts, self._params, use_tqdm=False)
        except (ValueError, TypeError) as error:
            if len(prompts) <= 1:
                return [{"error": str(error)} for _ in prompts]
            middle = len(prompts) // 2
            return self._answer(prompts[:middle]) + self._answer(prompts[middle:])


def read(path: Path) -> ray.data.Dataset:
    """Input lines in a column `text`; rows of a Parquet file as the lines they would be in JSON."""
    if path.suffix == ".parquet":
        rows = ray.data.read_parquet(str(path))
        return rows.map(lambda row: {"text": json.dumps(row, default=lambda v: getattr(v, "tolist", v.__str__)())})
    # A line that is no UTF-8 is one bad line, not the end of the run: Latin-1 takes any byte, and gives it back.
    lines = ray.data.read_text(str(path), encoding="latin-1")
    return lines.map(lambda row: {"text": row["text"].encode("latin-1").decode("utf-8", "replace")})


def answered(output: Path) -> set[str | int]:
    """Ids in the output of an earlier run. A line that was cut off does not count."""
    text = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
    return {known for line in text.splitlines() if (known := field(line, "id")) is not None}


def answers(args: argparse.Namespace, known: set[str | int]) -> Iterator[str]:
    """JSON of each answer, as soon as its block is done.

    Raises:
        ValueError: the cluster has no room for the workers.
    """
    gpus, cpus = (int(ray.cluster_resources().get(name, 0)) for name in ("GPU", "CPU"))
    num_workers = args.num_workers or gpus or 1
    needs = {"num_gpus": 1} if gpus else {"num_cpus": args.cpus_per_worker}
    fits = num_workers <= gpus if gpus else num_workers * args.cpus_per_worker < cpus
    if not fits:
        raise ValueError(
            f"num_workers={num_workers} is not allowed: the cluster has {gpus} GPUs and {cpus} CPUs, and a worker "
            f"takes a GPU, or where there is none {args.cpus_per_worker} CPU(s), with one left for reading; lower "
            f"--num-workers or --cpus-per-worker"
        )

    def wanted(row: dict[str, str]) -> list[dict[str, str]]:
        return [row] if row["text"].strip() and key(row["text"]) not in known else []

    left = read(args.input).flat_map(wanted)
    blocks = left.repartition(target_num_rows_per_block=args.block_size)
    done = blocks.map_batches(
        Worker,
        fn_constructor_args=(args.model, args.engine, args.sampling, args.chat),
        batch_size=None,
        compute=ray.data.ActorPoolStrategy(size=num_workers),
        **needs,
    )
    for block in done.iter_batches(batch_size=None):
        yield from map(str, block["answer"])


def run(args: argparse.Namespace) -> None:
    """Answer what is left, and say how much that was.

    Raises:
        OSError: a file cannot be read or written.
        RayError: a worker failed, or could not load the model.
        TypeError, ValueError: a setting that is not allowed.
    """
    if not args.input.is_file():
        raise FileNotFoundError(f"input {str(args.input)!r} is not a file")
    SamplingParams(**args.sampling)  # a mistake in them is told before anything starts
    known, start, num_answers, num_errors = answered(args.output), time.perf_counter(), 0, 0
    ray.init(log_to_driver=False, logging_level=logging.WARNING, ignore_reinit_error=True)
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # it prints what it raises, at length
    ray.data.DataContext.get_current().enable_progress_bars = sys.stderr.isatty()
    with args.output.open("ab+") as output:
        if output.tell():
            output.seek(-1, 2)
            output.write(b"" if output.read(1) == b"\n" else b"\n")  # the last line of an interrupted run
        for answer in answers(args, known):
            output.write(answer.encode() + b"\n")
            output.flush()
            num_answers += 1
            num_errors += json.loads(answer)["error"] is not None
    seconds = time.perf_counter() - start
    print(f"{num_answers} answered ({num_errors} with errors), {len(known)} were there, {seconds:.1f} s")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status; what a user can mend is one line on stderr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--input", required=True, type=Path, help="JSONL, or Parquet where it ends in .parquet")
    parser.add_argument("--output", required=True, type=Path, help="JSONL; answers are added to it")
    parser.add_argument("--engine", type=json.loads, default={}, help="knobs, such as '{\"max_model_len\": 4096}'")
    parser.add_argument("--sampling", type=json.loads, default={}, help="fields of SamplingParams, as JSON")
    parser.add_argument("--chat", action="store_true", help="prompts are messages for the model's chat template")
    parser.add_argument("--num-workers", type=int, help="engines; default: one a GPU, or one where there is no GPU")
    parser.add_argument("--cpus-per-worker", type=int, default=1, help="where there is no GPU (default: %(default)s)")
    parser.add_argument("--block-size", type=int, default=512, help="prompts that a worker takes at a time")
    args = parser.parse_args(argv)
    try:
        run(args)
    except (OSError, TypeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except RayError as error:  # its last line is what a worker raised
        print(f"error: a worker failed: {str(error).strip().splitlines()[-1]}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: what was answered is written; run it again for the rest", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
