"""The server's benchmark, on a tiny checkpoint."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import load_script, make_checkpoint

ROOT = Path(__file__).resolve().parent.parent
LENGTHS = {"num-seqs": 5, "min-input-len": 5, "max-input-len": 9, "min-output-len": 8, "max-output-len": 8}
TINY = [part for name, value in LENGTHS.items() for part in (f"--{name}", str(value))]
ENGINE = ["--device", "cpu", "--dtype", "float32", "--max-model-len", "64", "--num-kvcache-blocks", "64"]


def test_clients_are_counted_and_compared_with_generate(tmp_path):
    """A real run: a server, clients in two processes, `generate`; every token is counted once."""
    path = make_checkpoint(tmp_path, "qwen3", vocab_size=10240, tokenizer=True)  # the workload draws ids up to 10,000
    command = [sys.executable, "scripts/bench_server.py", "--model", path, *TINY, *ENGINE, "--client-processes", "2"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["output_tokens"] == 5 * 8 and result["clients"] == 5
    assert 0 < result["ttft_p50_s"] <= result["ttft_p99_s"] <= result["server_seconds"]
    assert result["share_of_offline"] == pytest.approx(result["server_tok_s"] / result["offline_tok_s"])


def test_an_answer_that_is_no_whole_stream_is_an_error():
    """A server that fails half-way must not look fast."""
    stream = load_script("bench_server").Stream(b"", None)
    whole = [
        b"HTTP/1.1 200 OK\r\n\r\n",
        b'data: {"id":"x","choices":[{"text":"a"}]}\n\ndata: {"id":"x","choices":[{"text":"b"}]}\n\n',
        b'data: {"id":"x","usage":{"prompt_tokens":3,"completion_tokens":7,"total_tokens":10}}\n\ndata: [DONE]\n\n',
    ]
    for data in whole[:2]:
        stream.data_received(data)
    with pytest.raises(RuntimeError, match="no stream"):
        stream.figures()
    stream.data_received(whole[2])
    assert stream.figures()[3:] == (2, 4, 7)
