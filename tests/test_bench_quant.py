"""The two benchmarks of quantization, on a tiny checkpoint."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from test_quantization import offline

ROOT = Path(__file__).resolve().parent.parent
LENGTHS = {"num-seqs": 3, "min-input-len": 5, "max-input-len": 9, "min-output-len": 2, "max-output-len": 4}
TINY = [part for name, value in LENGTHS.items() for part in (f"--{name}", str(value))]
ENGINE = ["--device", "cpu", "--max-model-len", "64", "--num-kvcache-blocks", "64"]
QUALITY = ["--num-tokens", "200", "--num-logits", "64", "--window", "64", "--stride", "32", "--max-new-tokens", "4"]


@pytest.fixture(scope="module")
def scripts():
    """Both as modules; they stand beside the package, not in it."""
    sys.path.insert(0, str(ROOT))
    try:
        yield importlib.import_module("bench_quant"), importlib.import_module("bench_quant_quality")
    finally:
        sys.path.remove(str(ROOT))


@pytest.fixture
def fake_runs(scripts, monkeypatch):
    """bench_quant without engines: each run notes its settings, and its speed is its place in the order."""
    seen = []

    def run(args, mode):
        seen.append((mode, args.max_num_seqs, args.max_num_batched_tokens, args.num_seqs, args.max_input_len))
        names = [name for _, name, *_ in scripts[0].COLUMNS if not name.endswith("_ratio")]
        return {"mode": mode, scripts[0].SWEPT[args.profile]: 1, "kernels": {}} | dict.fromkeys(names, float(len(seen)))

    monkeypatch.setattr(scripts[0], "run_apart", run)
    return seen


def bench_main(scripts, monkeypatch, capsys, *argv):
    monkeypatch.setattr(sys, "argv", ["bench_quant.py", *argv])
    status = scripts[0].main()
    return status, capsys.readouterr()


def test_modes_run_apart_and_are_compared(scripts, tmp_path, monkeypatch, capsys):
    """A real run of all three modes: figures, kernels and ratios in table and JSON."""
    path = make_checkpoint(tmp_path, "qwen3", vocab_size=10240)  # the workload draws ids up to 10,000
    argv = ["--model", path, *TINY, *ENGINE, "--max-num-seqs", "4"]
    status, captured = bench_main(scripts, monkeypatch, capsys, *argv)
    assert status == 0
    results = json.loads(captured.out.splitlines()[-1])["results"]
    assert [result["mode"] for result in results] == ["bf16", "int8", "w8a8"]
    for result in results:
        assert result["total_tok_s"] > result["output_tok_s"] > 0
        assert 0 < result["ttft_p50_s"] <= result["ttft_p99_s"]
        assert result["total_ratio"] == pytest.approx(result["total_tok_s"] / results[0]["total_tok_s"])
        assert bool(result["kernels"]) == (result["mode"] != "bf16")
    assert results[1]["load_allocated_gib"] < results[0]["load_allocated_gib"]
    assert f"int8: down_proj: {results[1]['kernels']['down_proj']}" in captured.out


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        ("mixed", [(8, 16384, 256, 1024), (16, 16384, 256, 1024)]),
        ("decode_heavy", [(8, 16384, 8, 32), (16, 16384, 16, 32)]),
        ("prefill_heavy", [(512, 8, 64, 4096), (512, 16, 64, 4096)]),
    ],
)
def test_profiles_sweep_their_own_knob(profile, expected, scripts, fake_runs, monkeypatch, capsys):
    """decode_heavy: max_num_seqs at fixed max_num_batched_tokens; prefill_heavy the other way round."""
    argv = ["--profile", profile, "--sweep", "8,16", "--modes", "int8", "bf16"]
    _, captured = bench_main(scripts, monkeypatch, capsys, *argv)
    assert fake_runs == [(mode, *point) for point in expected for mode in ("bf16", "int8")]
    ratios = [result["total_ratio"] for result in json.loads(captured.out.splitlines()[-1])["results"]]
    assert ratios == [1, 2, 1, 4 / 3]


def test_plot_says_what_it_needs(scripts, fake_runs, monkeypatch, capsys, tmp_path):
    """Before anything is measured."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, captured = bench_main(scripts, monkeypatch, capsys, "--plot", str(tmp_path / "x.png"))
    assert status == 1
    assert "pip install 'nanovllm[plot]'" in captured.err
    assert not fake_runs


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_plot_is_drawn(scripts, fake_runs, monkeypatch, capsys, tmp_path):
    """A file comes out."""
    status, _ = bench_main(scripts, monkeypatch, capsys, "--sweep", "1,2", "--plot", str(tmp_path / "x.png"))
    assert status == 0
    assert (tmp_path / "x.png").stat().st_size > 1000


def quality(scripts, capsys, *argv):
    status = scripts[1].main([*argv, *QUALITY, "--device", "cpu", "--dtype", "float32"])
    captured = capsys.readouterr()
    return status, captured, json.loads(captured.out.splitlines()[-1]) if captured.out else None


def test_quality_of_both_methods(scripts, qwen3_path, capsys):
    """All figures, within what 8 bits can do; stated bounds are kept."""
    bounds = ["--max-ppl-delta", "10", "--max-rel-l2", "0.01", "--min-cosine", "0.9999"]
    status, captured, found = quality(scripts, capsys, "--model", qwen3_path, *bounds)
    assert status == 0
    assert "no stated bound is missed" in captured.out
    for mode in ("int8", "w8a8"):
        result = found[mode]
        assert len(result["layers"]) == 14
        assert 0.002 < result["mean_rel_l2"] < 0.01
        assert result["min_cosine"] > 0.9999
        assert result["logit_cosine"] > 0.99
        assert 0 < result["kl"] < 0.1
        assert result["top1"] > 0.7
        assert len(result["texts_part_at"]) == len(scripts[1].PROMPTS)
        assert result["perplexity"] == pytest.approx(found["perplexity"] * (1 + result["ppl_delta_percent"] / 100))
    assert found["w8a8"]["kl"] > found["int8"]["kl"]


def test_quality_of_a_smoothed_directory(scripts, qwen3_path, tmp_path, capsys):
    """Its weights are compared with the float ones smoothed alike; a bound that is missed makes the status 1."""
    path = offline(qwen3_path, tmp_path / "quantized", "w8a8", calibration="The quick brown fox. " * 60)
    argv = ["--model", qwen3_path, "--modes", "w8a8", "--quantized", f"w8a8={path}", "--max-rel-l2", "0.0001"]
    status, captured, found = quality(scripts, capsys, *argv)
    assert status == 1
    assert "missed: w8a8: mean_rel_l2" in captured.out
    assert found["w8a8"]["mean_rel_l2"] < 0.03


def test_quality_says_what_it_needs(scripts, qwen3_path, capsys, monkeypatch, tmp_path):
    """A missing package or file is an error of one line."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    for argv, message in [
        (["--dataset", "wikitext-2-raw-v1"], "pip install datasets"),
        (["--text", str(tmp_path / "nowhere")], "nowhere"),
        (["--quantized", "int8=/nowhere"], "quantized_model_path"),
    ]:
        status, captured, _ = quality(scripts, capsys, "--model", qwen3_path, *argv)
        assert status == 1
        assert message in captured.err


def test_perplexity_counts_each_token_once(scripts):
    """Windows overlap; every token but the first is scored exactly once, with as much context as there is."""

    class Fake:
        def score(self, prompts):
            (ids,) = prompts
            return [{"token_logprobs": [None, *(-float(i) for i in ids[1:])]}]

    ids = torch.arange(100).tolist()
    for window, stride in ((100, 100), (32, 16), (30, 7), (200, 50), (10, 10)):
        found = scripts[1].perplexity(Fake(), ids, window, stride)
        counted = [i for i in ids[1:] if stride < window or i % stride]
        assert found == pytest.approx(2.718281828459045 ** (sum(counted) / len(counted)))
