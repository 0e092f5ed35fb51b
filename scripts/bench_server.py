"""Throughput of the server under many streaming clients, beside `generate` on the same prompts.

python scripts/bench_server.py --model qwen3-0.6b --load-format dummy      # 256 clients, the workload of bench.py
python scripts/bench_server.py --model DIR --device cpu --num-seqs 8 --max-input-len 64 --max-output-len 128
python scripts/bench_server.py --model NAME --url http://127.0.0.1:8000    # a server that runs; nothing to compare with

Server, clients and `generate` have processes of their own; `generate` runs when the server is gone. Knobs of the
engine, under their own names, hold for both. A table, and the same as one line of JSON.
"""

import argparse
import asyncio
import json
import multiprocessing
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import make_workload  # noqa: E402
from nanovllm import LLM  # noqa: E402
from nanovllm.config import EngineConfig  # noqa: E402
from nanovllm.server.cli import add_engine_options, engine_config, listen  # noqa: E402

START = "import sys; from nanovllm.server import main; sys.exit(main())"
# Ids of a dummy model that have a word.
VOCABULARY = 151936
# Until the clients' first requests, so that their processes are there by then.
HEAD_START = 0.5


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line: the workload, and every knob of the engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-seqs", type=int, default=256, help="clients, each with one prompt")
    parser.add_argument("--min-input-len", type=int, default=100)
    parser.add_argument("--max-input-len", type=int, default=1024)
    parser.add_argument("--min-output-len", type=int, default=100)
    parser.add_argument("--max-output-len", type=int, default=1024)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--workload-seed", type=int, default=0)
    parser.add_argument("--client-processes", type=int, default=4, help="over which the clients are spread")
    parser.add_argument("--url", help="measure the server there in place of one started here")
    add_engine_options(parser.add_argument_group("engine"))
    return parser.parse_args(argv)


@dataclass
class Stream(asyncio.Protocol):
    """One client: sends a request and counts what comes. Bare sockets, so that 256 clients cost less than the server.

    Times are those of `time.perf_counter`, which all processes of a machine share.
    """

    request: bytes
    ended: asyncio.Future
    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0
    num_chunks: int = 0
    num_events: int = 0
    head: bytes = b""
    tail: bytes = b""

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.sent = time.perf_counter()
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        if not self.head:
            self.head = data[:64]
        num_events = data.count(b"data: ")
        if num_events:
            self.last = time.perf_counter()
            self.first = self.first or self.last
            self.num_chunks += 1
            self.num_events += num_events
        self.tail = (self.tail + data)[-1024:]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def figures(self) -> tuple[float, float, float, int, int, int]:
        """When the request was sent, its first and last event came; chunks, events, and tokens by the server's count.

        Raises:
            RuntimeError: it did not end as a stream does.
        """
        if not self.head.startswith(b"HTTP/1.1 200") or b"data: [DONE]" not in self.tail:
            raise RuntimeError(f"no stream: {self.head!r} ... {self.tail.decode(errors='replace')}")
        usage = self.tail[self.tail.rindex(b'"completion_tokens":') :]
        num_tokens = int(usage.partition(b":")[2].partition(b",")[0])
        return self.sent, self.first, self.last, self.num_chunks, self.num_events, num_tokens


def run_clients(url: str, bodies: list[dict], start: float) -> list[tuple]:
    """Some of the clients, in a process of their own; all of them ask at `start` (`time.time`)."""
    host, port = urlsplit(url).hostname, urlsplit(url).port

    async def ask(body: dict) -> tuple:
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        head += f"connection: close\r\ncontent-length: {len(content)}\r\n\r\n"
        loop = asyncio.get_running_loop()
        stream = Stream(head.encode() + content, loop.create_future())
        await asyncio.sleep(start - time.time())
        await loop.create_connection(lambda: stream, host, port)
        await stream.ended
        return stream.figures()

    async def all_of_them() -> list[tuple]:
        return await asyncio.gather(*map(ask, bodies))

    return asyncio.run(all_of_them())


def measure_server(url: str, bodies: list[dict], num_processes: int) -> dict[str, float]:
    """Figures of all clients together; times in seconds."""
    context = multiprocessing.get_context("fork")  # ready at once: this process has no threads and holds no device
    with ProcessPoolExecutor(num_processes, context) as pool:
        start = time.time() + HEAD_START
        shares = [pool.submit(run_clients, url, bodies[i::num_processes], start) for i in range(num_processes)]
        sent, first, last, num_chunks, num_events, num_tokens = np.array([s for one in shares for s in one.result()]).T
    seconds = last.max() - sent.min()
    return {
        "output_tokens": int(num_tokens.sum()),
        "server_seconds": seconds,
        "server_tok_s": num_tokens.sum() / seconds,
        "tokens_per_event": num_tokens.sum() / num_events.sum(),
        "events_per_chunk": num_events.sum() / num_chunks.sum(),
        "ttft_p50_s": np.percentile(first - sent, 50),
        "ttft_p99_s": np.percentile(first - sent, 99),
        "chunk_gap_mean_s": np.mean((last - first)[num_chunks > 1] / (num_chunks[num_chunks > 1] - 1)),
    }


def engine_options(args: argparse.Namespace) -> list[str]:
    """The knobs of the engine that were given, as the server's command takes them."""
    options = []
    for knob in fields(EngineConfig):
        value, flag = getattr(args, knob.name), f"--{knob.name.replace('_', '-')}"
        if isinstance(value, bool):
            options.append(flag if value else f"--no-{flag[2:]}")
        elif value != knob.default:
            options += [flag, *map(str, value if isinstance(value, (list, tuple)) else [value])]
    return options


def serve_and_measure(args: argparse.Namespace, bodies: list[dict]) -> dict[str, float]:
    """Start a server, measure it (after eight clients that warm it up) and stop it."""
    with listen("127.0.0.1", 0) as sock:  # a free port
        port = sock.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-c", START, "--port", str(port), *engine_options(args)]
    with subprocess.Popen(command, cwd=ROOT) as server:
        try:
            while not _is_up(url):
                if server.poll() is not None:
                    raise SystemExit(f"the server ended with status {server.returncode}")
                time.sleep(0.2)
            measure_server(url, bodies[:8], 1)
            return measure_server(url, bodies, args.client_processes)
        finally:
            server.send_signal(signal.SIGTERM)


def _is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def measure_offline(args: argparse.Namespace) -> float:
    """Tokens per second of `generate` on the same prompts."""
    prompts, params = make_workload(args, args.workload_seed)
    config = engine_config(args)
    knobs = {knob.name: getattr(config, knob.name) for knob in fields(config) if knob.name != "model"}
    with LLM(config.model, **knobs) as llm:
        llm.generate(prompts[:8], params[:8], use_tqdm=False)
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return sum(len(output["token_ids"]) for output in outputs) / (time.perf_counter() - start)


def make_tokenizer(directory: str) -> str:
    """A tokenizer with a word for every id of a dummy model: its tokens become text, as those of a real one do."""
    tokenizer = Tokenizer(models.WordLevel({f" w{i}": i for i in range(VOCABULARY)}, unk_token=" w0"))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    return directory


def main(argv: list[str] | None = None) -> None:
    """The server, then `generate`."""
    args = parse_args(argv)
    prompts, params = make_workload(args, args.workload_seed)
    common = {"temperature": args.temperature, "ignore_eos": True, "logprobs": None, "stream": True}
    common["stream_options"] = {"include_usage": True}
    bodies = [
        {**common, "prompt": prompt, "max_tokens": one.max_tokens} for prompt, one in zip(prompts, params, strict=True)
    ]
    with tempfile.TemporaryDirectory() as directory:
        if args.load_format == "dummy" and args.tokenizer is None and not args.skip_tokenizer_init:
            args.tokenizer = make_tokenizer(directory)
        if args.url is not None:
            result = measure_server(args.url, bodies, args.client_processes)
        else:
            result = serve_and_measure(args, bodies)
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                result["offline_tok_s"] = pool.submit(measure_offline, args).result()
            result["share_of_offline"] = result["server_tok_s"] / result["offline_tok_s"]
    result = {name: float(value) for name, value in result.items()} | {"clients": args.num_seqs, "model": args.model}
    for name, value in result.items():
        print(f"{name:<20}{value:>16,.4f}" if isinstance(value, float) else f"{name:<20}{value:>16}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
