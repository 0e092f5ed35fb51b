"""examples/ray_batch.py on a small Ray of its own."""

import json
import os

import pytest
from checkpoints import load_script

from nanovllm import LLM, SamplingParams

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'nanovllm[ray]'")
pandas = pytest.importorskip("pandas")

ENGINE = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "num_kvcache_blocks": 256}
SAMPLING = {"temperature": 0, "max_tokens": 8}
PROMPTS = [f"Number {i} of many" for i in range(30)]


@pytest.fixture(scope="module")
def example():
    """The script as a module, and one Ray for all tests. It has two CPUs whatever the machine has."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield load_script("ray_batch", "examples")
    ray.shutdown()


@pytest.fixture
def answer(example, capsys):
    """answer(path, source, target, *options): exit status, and the last line that was printed."""

    def run(path, source, target, *options):
        argv = ["--model", path, "--input", str(source), "--output", str(target), "--engine", json.dumps(ENGINE)]
        argv += ["--sampling", json.dumps(SAMPLING), "--block-size", "8", *options]
        status = example.main(argv)
        printed = capsys.readouterr()
        return status, (printed.err if status else printed.out).splitlines()[-1]

    return run


def read(target):
    return [json.loads(line) for line in target.read_text().splitlines()]


@pytest.fixture(scope="module")
def expected(qwen3_path):
    """What `generate` says, by prompt."""
    with LLM(qwen3_path, **ENGINE) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(**SAMPLING), use_tqdm=False)
    return {prompt: (one["text"], one["token_ids"]) for prompt, one in zip(PROMPTS, outputs, strict=True)}


def test_all_prompts_are_answered_and_a_second_run_does_what_is_left(answer, qwen3_path, expected, tmp_path):
    """As `generate` answers them. A bad line, whatever is bad about it, gives one line with its error."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bad = {"no json": b"{no json", "no prompt": b'{"id": "none"}', "no utf-8": b'{"id": "\xff", "prompt": ["\xff"]}'}
    bad |= {"too deep": b"[" * 100_000, "too long": json.dumps({"id": "long", "prompt": "a " * 500}).encode()}
    lines = [json.dumps({"id": i, "prompt": prompt}).encode() for i, prompt in enumerate(PROMPTS)]
    nameless = json.dumps({"prompt": [5, 6, 7]}).encode()
    source.write_bytes(b"\n".join([*lines[:10], *bad.values(), b"", nameless, *lines[10:]]))
    status, printed = answer(qwen3_path, source, target)
    assert status == 0, printed
    assert "36 answered (5 with errors), 0 were there" in printed
    found = {one["id"]: one for one in read(target)}
    assert len(found) == 36
    for i, prompt in enumerate(PROMPTS):
        assert (found[i]["text"], found[i]["token_ids"]) == expected[prompt] and found[i]["error"] is None
    assert "128" in found["long"]["error"] and "prompt" in found["none"]["error"]
    assert sum(one["error"] is not None for one in found.values()) == 5

    kept = [line for line in target.read_text().splitlines(True) if json.loads(line)["id"] not in (3, 7)]
    target.write_text("".join(kept) + '{"id": 3, "text": "cut o')
    status, printed = answer(qwen3_path, source, target)
    assert status == 0 and "2 answered (0 with errors), 34 were there" in printed
    *before, cut, first, second = target.read_text().splitlines(True)
    assert before == kept and cut == '{"id": 3, "text": "cut o\n'
    assert {json.loads(first)["id"], json.loads(second)["id"]} == {3, 7}


def test_parquet_is_read_too(answer, qwen3_path, expected, tmp_path):
    """Its rows are the lines they would be in JSON."""
    source, target = tmp_path / "in.parquet", tmp_path / "out.jsonl"
    pandas.DataFrame({"id": [f"row {i}" for i in range(30)], "prompt": PROMPTS}).to_parquet(source)
    status, printed = answer(qwen3_path, source, target)
    assert status == 0, printed
    assert {one["id"]: one["text"] for one in read(target)} == {
        f"row {i}": expected[prompt][0] for i, prompt in enumerate(PROMPTS)
    }


def test_what_a_user_can_mend_is_one_line(answer, qwen3_path, tmp_path):
    """No such input, no such model, a setting that is not allowed, more workers than there is room for."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"prompt": "x"}))
    for path, options, named in [
        (qwen3_path, ["--input", "nowhere"], "nowhere"),
        (qwen3_path, ["--sampling", '{"top_kk": 1}'], "top_kk"),
        (qwen3_path, ["--num-workers", "9"], "--num-workers"),
        ("no-model", [], "no-model"),
    ]:
        status, printed = answer(path, source, target, *options)
        assert status == 1 and printed.startswith("error: ") and named in printed
    assert target.read_text() == ""
