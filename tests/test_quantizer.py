"""The quantizer: scales, smoothing, and the directories it writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from engine_helpers import generate, greedy, make_prompts
from safetensors.torch import load_file, save_file
from test_quantization import FORMATS, METHODS, offline

from nanovllm import LLM, loader
from nanovllm.models.registry import load_raw_config, resolve_model
from nanovllm.quantization.quantizer import choose_smoothing, dequantize, quantize_weight, smoothing_factors
from nanovllm.quantize import SMOOTHING_KEY, calibrate, main, quantize_checkpoint

ROOT = Path(__file__).resolve().parent.parent
TEXT = "The quick brown fox jumps over the lazy dog. " * 40


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights(path):
    return load_file(Path(path) / "model.safetensors")


def edit_weights(path, edit):
    tensors = weights(path)
    edit(tensors)
    save_file(tensors, Path(path) / "model.safetensors", metadata={"format": "pt"})


# Scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 64), (64, 96), (1, 1000), (5, 1), (3, 0)])
def test_scales_beat_absmax(shape, dtype):
    """The squared error of no row is above that of absmax / 127, and the largest weight keeps its value."""
    weight = randn(*shape).to(dtype)
    qweight, scales = quantize_weight(weight)
    assert (qweight.dtype, qweight.shape, scales.dtype, scales.shape) == (torch.int8, shape, torch.float32, shape[:1])
    assert (scales > 0).all()
    if not weight.numel():
        return
    wide, plain = weight.double(), weight.float().abs().amax(1, keepdim=True) / 127
    error = (dequantize(qweight, scales).double() - wide).square().sum(1)
    absmax_error = ((weight.float() / plain).round() * plain - wide).square().sum(1)
    assert (error <= absmax_error * (1 + 1e-6) + 1e-12).all()
    assert error.sum() < 0.999 * absmax_error.sum() or min(shape) == 1
    kept = dequantize(qweight, scales).abs().amax(1)
    torch.testing.assert_close(kept, weight.float().abs().amax(1), rtol=4e-3, atol=0)


def test_extreme_rows_have_finite_scales():
    """B15, B1: zeros, a single weight, subnormals, the largest float16; and not a number is refused."""
    weight = torch.zeros(5, 32)
    weight[1, 3], weight[2], weight[3] = 5.0, 1e-42, 65504.0
    weight[4] = randn(32) * 1e-30
    qweight, scales = quantize_weight(weight)
    assert scales.isfinite().all()
    assert scales[0] == 1
    assert not qweight[0].any()
    torch.testing.assert_close(dequantize(qweight, scales)[[1, 3]], weight[[1, 3]])
    torch.testing.assert_close(
        dequantize(qweight, scales)[4], weight[4], rtol=0, atol=1e-2 * weight[4].abs().max().item()
    )
    for bad in (torch.nan, torch.inf):
        weight[1, 0] = bad
        with pytest.raises(ValueError, match="not finite"):
            quantize_weight(weight)


def test_large_weights_are_quantized_in_pieces(monkeypatch):
    """The same, whatever fits at once."""
    weight = randn(50, 40)
    whole = quantize_weight(weight)
    monkeypatch.setattr("nanovllm.quantization.quantizer._ELEMENTS", 100)
    assert all(torch.equal(a, b) for a, b in zip(whole, quantize_weight(weight), strict=True))


# Smoothing


def test_smoothing_factors_are_powers_of_two_and_finite():
    """B15: silent channels and columns of zeros get 1; a loud channel is divided more than a quiet one."""
    inputs, columns = randn(64).abs(), randn(64, seed=1).abs()
    inputs[3], inputs[7], columns[5] = 0, 1e4, 0
    factors = smoothing_factors(inputs, columns, 0.5)
    assert torch.equal(factors.log2(), factors.log2().round())
    assert factors[3] == factors[5] == 1
    assert factors[7] == factors.max() > 1
    assert torch.equal(smoothing_factors(torch.zeros(4), torch.ones(4), 0.5), torch.ones(4))


def test_smoothing_is_chosen_where_it_helps():
    """Outliers in one channel: the product's error falls to less than half; without outliers it never rises."""
    x, weight = randn(64, 128), randn(96, 128, seed=1)
    x[:, 9] *= 60

    def error(x, weight):
        step = x.abs().amax(1, keepdim=True) / 127
        product = ((x / step).round() * step) @ dequantize(*quantize_weight(weight)).T
        return ((product - x @ weight.T).norm() / (x @ weight.T).norm()).item()

    factors = choose_smoothing(x, weight)
    assert error(x / factors, weight * factors) < 0.5 * error(x, weight)
    plain = randn(64, 128, seed=2)
    factors = choose_smoothing(plain, weight)
    assert error(plain / factors, weight * factors) < 1.05 * error(plain, weight)


@pytest.mark.parametrize("name", ["qwen3_path", "llama_path", "qwen2_path"])
def test_smoothing_leaves_the_float_model_as_it_was(name, request, tmp_path, make_llm):
    """B22: it does change norms and weights, by powers of two, and not what the float model computes."""
    source = request.getfixturevalue(name)
    smoothing = calibrate(source, TEXT, "cpu")
    before = weights(source)
    after = {tensor: smoothing.apply(tensor, value) for tensor, value in before.items()}
    changed = {tensor for tensor in before if not torch.equal(before[tensor], after[tensor])}
    assert any("layernorm" in tensor for tensor in changed)
    assert {tensor.split(".")[-2] for tensor in changed} <= {
        "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj", "input_layernorm", "post_attention_layernorm"
    }  # fmt: skip
    for file in Path(source).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(after, tmp_path / "model.safetensors", metadata={"format": "pt"})
    prompt = make_prompts(40)[0]
    scores = [torch.tensor(make_llm(str(p)).score([prompt])[0]["token_logprobs"][1:]) for p in (source, tmp_path)]
    torch.testing.assert_close(*scores, rtol=0, atol=1e-5)


def test_smoothed_directory_is_closer(tmp_path, llama_path, make_llm):
    """B22: with a text the scales differ from those without, and loud channels of the norms cost less."""
    path = make_checkpoint(tmp_path / "model", "llama", tokenizer=True)

    def edit(tensors):
        for name in tensors:
            if "layernorm" in name:
                tensors[name][5] *= 40
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")):
                tensors[name][:, 5] /= 20

    edit_weights(path, edit)
    plain = offline(path, tmp_path / "plain", "w8a8")
    smooth = offline(path, tmp_path / "smooth", "w8a8", calibration=TEXT)
    one, other = weights(plain), weights(smooth)
    layer = "model.layers.0.self_attn.q_proj"
    assert not torch.equal(one[f"{layer}.w_scales"], other[f"{layer}.w_scales"])
    assert not torch.equal(one["model.layers.0.input_layernorm.weight"], other["model.layers.0.input_layernorm.weight"])
    assert json.loads((tmp_path / "smooth" / "config.json").read_text())[SMOOTHING_KEY] is True
    prompt = make_prompts(60)[0]
    exact, *found = (torch.tensor(make_llm(p).score([prompt])[0]["token_logprobs"][1:]) for p in (path, plain, smooth))
    errors = [(score - exact).square().mean().sqrt() for score in found]
    assert errors[1] < 0.7 * errors[0]


def test_silent_channels_are_survived(tmp_path):
    """B15: a float16 model with a column of zeros and a channel that is always zero."""
    path = make_checkpoint(tmp_path / "model", "qwen3", dtype="float16", tokenizer=True)

    def edit(tensors):
        tensors["model.layers.0.input_layernorm.weight"][3] = 0
        for part in "qkv":
            tensors[f"model.layers.0.self_attn.{part}_proj.weight"][:, 5] = 0
        tensors["model.layers.1.mlp.up_proj.weight"][7] = 0

    edit_weights(path, edit)
    quantized = weights(offline(path, tmp_path / "quantized", "w8a8", calibration=TEXT))
    assert all(tensor.isfinite().all() for tensor in quantized.values())
    assert all((tensor > 0).all() for name, tensor in quantized.items() if name.endswith("w_scales"))


# Directories


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("method", METHODS)
def test_tied_embedding_stays_tied_and_as_it_was(method, file_format, tmp_path, qwen3_path, make_llm):
    """B9, B10: no head is written, the config says tied, and the directory loads and generates."""
    path = offline(qwen3_path, tmp_path / "quantized", method, file_format=file_format)
    tensors, exact = weights(path), weights(qwen3_path)
    assert not [name for name in tensors if name.startswith("lm_head")]
    assert torch.equal(tensors["model.embed_tokens.weight"], exact["model.embed_tokens.weight"])
    config, original = (json.loads((Path(p) / "config.json").read_text()) for p in (path, qwen3_path))
    assert config.pop("quantization_config")["quant_method"] == file_format
    assert config == original
    llm = make_llm(path)
    assert llm.engine.runner.model.lm_head is None
    assert generate(llm, ["Hello"], greedy(5))[0]["text"]


def test_head_that_copies_the_embedding_is_left_out(tmp_path):
    """B9: some checkpoints with tied embeddings carry one."""
    path = make_checkpoint(tmp_path / "model", "qwen3")
    edit_weights(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert "lm_head.weight" not in weights(offline(path, tmp_path / "quantized", "int8"))


def test_shards_and_index(tmp_path, llama_path, make_llm):
    """No file above the limit but for single tensors, every tensor in the index, the same weights as in one file."""
    whole = weights(offline(llama_path, tmp_path / "one", "int8"))
    sharded = Path(offline(llama_path, tmp_path / "many", "int8", shard_bytes=40_000))
    index = json.loads((sharded / loader.INDEX).read_text())
    files = sorted(sharded.glob("*.safetensors"))
    assert len(files) > 3
    assert not (sharded / loader.SINGLE).exists()
    merged = {}
    for file in files:
        tensors = load_file(file)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 40_000
        assert {index["weight_map"][name] for name in tensors} == {file.name}
        merged |= tensors
    assert merged.keys() == whole.keys()
    assert all(torch.equal(merged[name], whole[name]) for name in whole)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    prompt = make_prompts(20)[0]
    assert make_llm(str(sharded)).score([prompt]) == make_llm(str(tmp_path / "one")).score([prompt])


def test_what_vllm_expects_of_compressed_tensors(tmp_path, llama_path):
    """Names, shapes and types per projection, and the config's vocabulary."""
    seen = {}
    for method in METHODS:
        path = offline(llama_path, tmp_path / method, method, file_format="compressed-tensors")
        config = json.loads((Path(path) / "config.json").read_text())["quantization_config"]
        group = config["config_groups"]["group_0"]
        assert group["targets"] == ["Linear"]
        assert "lm_head" in config["ignore"]
        assert (group["input_activations"] is None) == (method == "int8")
        seen[method] = {
            name.rpartition(".")[2]: (config["format"], tensor.dtype, tuple(tensor.shape))
            for name, tensor in weights(path).items()
            if name.startswith("model.layers.0.self_attn.k_proj")
        }
    assert seen["w8a8"] == {
        "weight": ("int-quantized", torch.int8, (32, 64)),
        "weight_scale": ("int-quantized", torch.float32, (32, 1)),
    }
    assert seen["int8"] == {
        "weight_packed": ("pack-quantized", torch.int32, (32, 16)),
        "weight_scale": ("pack-quantized", torch.float32, (32, 1)),
        "weight_shape": ("pack-quantized", torch.int64, (2,)),
    }


def test_every_small_file_is_copied(tmp_path, qwen3_path):
    """Tokenizer, chat template, generation config, licence; no other weights."""
    source = tmp_path / "model"
    source.mkdir()
    for file in Path(qwen3_path).iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    (source / "LICENSE").write_text("free")
    (source / "pytorch_model.bin").write_bytes(b"weights")
    (source / "folder").mkdir()
    target = Path(offline(str(source), tmp_path / "quantized", "int8"))
    assert {file.name for file in target.iterdir()} == {
        file.name for file in source.iterdir() if file.name not in ("pytorch_model.bin", "folder")
    }


def test_refused_before_anything_is_written(tmp_path, qwen3_path):
    """A full directory, a quantized model, a text that nobody would use."""
    done = offline(qwen3_path, tmp_path / "done", "int8")
    fresh = str(tmp_path / "fresh")
    for arguments, options, message in [
        ((qwen3_path, done, "int8"), {}, "output=.*is not an empty directory"),
        ((done, fresh, "int8"), {}, "is quantized already"),
        ((qwen3_path, fresh, "int4"), {}, "quantization='int4'"),
        ((qwen3_path, fresh, "int8"), {"calibration": TEXT}, "calibration=.*'w8a8' alone"),
        ((qwen3_path, fresh, "w8a8"), {"calibration": ""}, "calibration text is empty"),
        ((qwen3_path, fresh, "w8a8"), {"file_format": "gguf"}, "format='gguf'"),
    ]:
        with pytest.raises(ValueError, match=message):
            quantize_checkpoint(*arguments, device="cpu", **options)
    assert not Path(fresh).exists()


def test_interrupted_directory_is_no_model(tmp_path, qwen3_path, monkeypatch):
    """config.json comes last."""
    monkeypatch.setattr("nanovllm.quantize._copy_rest", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        offline(qwen3_path, tmp_path / "quantized", "int8")
    with pytest.raises(ValueError, match=r"not a model directory: config\.json"):
        LLM(str(tmp_path / "quantized"))


def test_skeleton_takes_no_memory():
    """Names of a 32B model are known at once."""
    model_class, config = resolve_model(load_raw_config("qwen3-32b", "dummy"))
    meta = torch.device("meta")
    model = loader.build_model(lambda: model_class(config, 1, torch.float32), torch.float32, meta)
    assert {param.device for param in model.parameters()} == {meta}


def test_command_line(tmp_path, qwen3_path, monkeypatch, capsys):
    """The script, with a progress bar; the console command says what is wrong and returns 1."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    target = tmp_path / "quantized"
    argv = ["--model", qwen3_path, "--output", str(target), "--quantization", "w8a8", "--device", "cpu"]
    command = [sys.executable, "scripts/quantize.py", *argv, "--calibration", str(text)]
    run = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    assert "Quantizing: 100%" in run.stderr
    assert (target / "config.json").is_file()
    monkeypatch.setattr(sys, "argv", ["nanovllm-quantize", *argv])
    assert main() == 1
    assert "is not an empty directory" in capsys.readouterr().err
