"""Quantized models in the engine: loaded from a float checkpoint or a quantized one, against the float model."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from engine_helpers import generate, greedy, make_prompts
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams, loader
from nanovllm.kernels.quant_linear import w8a8_linear
from nanovllm.kernels.quantize import QuantizedActivation, quantize_tokens
from nanovllm.layers.linear import Linear
from nanovllm.quantization.formats import make_config, resolve_scheme
from nanovllm.quantization.quantizer import dequantize, quantize_weight
from nanovllm.quantize import quantize_checkpoint

METHODS = ("int8", "w8a8")
FORMATS = ("nanovllm", "compressed-tensors")


def offline(source, target, quantization, **options):
    quantize_checkpoint(source, str(target), quantization, device="cpu", **options)
    return str(target)


def edit_config(path, **changes):
    file = Path(path) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def state(llm):
    return {name: param.clone() for name, param in llm.engine.runner.model.named_parameters()}


def assert_same_state(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


@pytest.fixture
def llm_of(make_llm):
    return lambda path, **knobs: make_llm(path, skip_tokenizer_init=True, num_kvcache_blocks=256, **knobs)


# Close to the float model


def as_floats(x):
    return x.values * x.scales[:, None] if isinstance(x, QuantizedActivation) else x.clone()


def outputs_of(llm, prompts):
    """What each linear layer puts out in each step of a prefill and three decode steps whose tokens are forced."""
    seen, hooks = {}, []
    for path, module in llm.engine.runner.model.named_modules():
        if isinstance(module, Linear):
            hook = lambda module, args, out, path=path: seen.setdefault(path, []).append(as_floats(out))  # noqa: E731
            hooks.append(module.register_forward_hook(hook))
    generate(llm, prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logit_bias={7: 100.0}))
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("name", ["qwen3_path", "llama_path", "qwen2_path"])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("method", METHODS)
def test_every_layer_is_close_to_the_float_models(method, batch, name, request, llm_of):
    """B12: prefill and decode, batch 1 and 8."""
    path, prompts = request.getfixturevalue(name), make_prompts(*range(20, 20 + batch))
    knobs = {"max_num_batched_tokens": 512}
    exact = outputs_of(llm_of(path, **knobs), prompts)
    found = outputs_of(llm_of(path, quantization=method, **knobs), prompts)
    assert exact.keys() == found.keys()
    for layer, steps in exact.items():
        assert [len(out) for out in steps[1:]] == [batch] * 3
        for step, (a, b) in enumerate(zip(steps, found[layer], strict=True)):
            assert torch.cosine_similarity(a.flatten(), b.flatten(), 0) > 0.99, (layer, step)


@pytest.mark.parametrize("method", METHODS)
def test_generates_with_finite_logprobs_and_a_float_cache(method, make_llm, qwen3_path):
    """B14, B24: only linear layers are quantized, keys and values keep the model's dtype."""
    llm = make_llm(qwen3_path, quantization=method, dtype="bfloat16")
    (output,) = generate(llm, ["The"], greedy(5, logprobs=3))
    assert len(output["token_ids"]) == 5
    values = [*output["logprobs"], *(entry.logprob for top in output["top_logprobs"] for entry in top.values())]
    assert all(map(math.isfinite, values))
    assert {tensor.dtype for cache in llm.engine.runner.caches for tensor in cache} == {torch.bfloat16}
    dtypes = {name: param.dtype for name, param in llm.engine.runner.model.named_parameters()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.int8} == {
        name for name in dtypes if name.endswith("_proj.qweight")
    }
    others = {dtype for name, dtype in dtypes.items() if not name.endswith(("qweight", "scales"))}
    assert others == {torch.bfloat16}


def test_activations_get_a_scale_per_token():
    """B11: one loud channel in one token must not cost the other tokens their digits, as one scale for all does."""
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    x[3, 5] *= 100
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    qweight, scales = quantize_weight(weight)
    exact = x @ weight.T
    step = x.abs().max() / 127
    per_tensor = QuantizedActivation((x / step).round().to(torch.int8), step.expand(16).clone(), x.dtype)

    def error(activation):
        got = w8a8_linear(activation, qweight, scales, None)
        return ((got - exact).norm(dim=1) / exact.norm(dim=1)).median().item()

    assert error(quantize_tokens(x)) < 0.02
    assert error(per_tensor) > 5 * error(quantize_tokens(x))


def test_packed_projections_keep_scales_of_their_own(tmp_path, llm_of):
    """B6: q, k and v of magnitudes 1, 10 and 100 in one matrix, quantized while loading and offline."""
    path = make_checkpoint(tmp_path / "model", "qwen3")
    tensors = load_file(Path(path) / "model.safetensors")
    for name in tensors:
        tensors[name] *= 10.0 if "k_proj" in name else 100.0 if "v_proj" in name else 1.0
    save_file(tensors, Path(path) / "model.safetensors", metadata={"format": "pt"})
    for knobs in ({"quantization": "int8"}, {"quantized_model_path": offline(path, tmp_path / "quantized", "int8")}):
        llm = llm_of(path, **knobs)
        parts = list(loader.linear_parts(llm.engine.runner.model))
        assert len(parts) == 14
        for name, method, views in parts:
            weight = tensors[f"{name}.weight"]
            assert (method.dequantize(views) - weight).norm() < 0.01 * weight.norm(), name


# Where the weights come from


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("method", METHODS)
def test_quantized_while_loading_is_the_offline_directory(method, file_format, dtype, tmp_path, llm_of):
    """Bit for bit, whether the directory is the model itself or the quantized_model_path."""
    path = make_checkpoint(tmp_path / "model", "qwen2", dtype=dtype, tie=False)
    quantized = offline(path, tmp_path / "quantized", method, file_format=file_format)
    loaded = state(llm_of(path, quantization=method))
    for llm in (
        llm_of(quantized),
        llm_of(path, quantized_model_path=quantized),
        llm_of(quantized, quantization=method),
    ):
        assert_same_state(state(llm), loaded)


def test_random_weights_are_quantized_too(qwen3_path, llm_of):
    """load_format="dummy": what the float model would have got, quantized."""
    exact = state(llm_of(qwen3_path, load_format="dummy"))
    found = state(llm_of(qwen3_path, load_format="dummy", quantization="w8a8"))
    for name, tensor in exact.items():
        if "_proj.weight" in name:
            layer = name.removesuffix(".weight")
            qweight, scales = quantize_weight(tensor)
            assert torch.equal(found[f"{layer}.qweight"], qweight)
            assert torch.equal(found[f"{layer}.w_scales"], scales)
        else:
            assert torch.equal(found[name], tensor)


def test_quantized_directory_brings_its_tokenizer(qwen3_path, tmp_path, make_llm):
    """It stands alone, and `tokenizer` still overrides it."""
    quantized = offline(qwen3_path, tmp_path / "quantized", "int8")
    llm = make_llm(make_checkpoint(tmp_path / "bare", "qwen3"), quantized_model_path=Path(quantized))
    assert llm.engine.tokenizer.encode(["Hello"]) == make_llm(qwen3_path).engine.tokenizer.encode(["Hello"])
    assert llm.engine.eos_token_ids == make_llm(qwen3_path).engine.eos_token_ids


def test_kernels_are_named(qwen3_path, llm_of, caplog):
    """Once per kind of layer, in the log and for the benchmark."""
    with caplog.at_level("INFO", "nanovllm"):
        llm = llm_of(qwen3_path, quantization="int8")
    assert set(llm.engine.kernel_paths) == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    for kind, path in llm.engine.kernel_paths.items():
        assert path.startswith("int8, ")
        assert caplog.text.count(f"{kind}: {path}") == 1
    assert llm_of(qwen3_path).engine.kernel_paths == {}


def test_what_loading_took_is_less(qwen3_path, llm_of):
    """The seven projections of a layer at one byte a weight in place of four."""
    exact, found = (llm_of(qwen3_path, quantization=q).engine for q in (None, "int8"))
    weights = sum(view.numel() for _, _, v in loader.linear_parts(exact.runner.model) for view in v.values())
    rows = sum(len(v["weight"]) for _, _, v in loader.linear_parts(exact.runner.model))
    assert exact.stats.load_allocated - found.stats.load_allocated == 3 * weights - 4 * rows


# Refused


def test_contradictions_are_refused(qwen3_path, tmp_path):
    """What the directory says and what is asked for."""
    quantized = offline(qwen3_path, tmp_path / "quantized", "int8")
    with pytest.raises(ValueError, match=r"quantization='w8a8' contradicts .*quantized with int8"):
        LLM(quantized, quantization="w8a8")
    with pytest.raises(ValueError, match=r"quantized_model_path=.* is not quantized"):
        LLM(qwen3_path, quantized_model_path=qwen3_path)
    with pytest.raises(ValueError, match=r"quantized_model_path='/nowhere' is not a model directory"):
        LLM(qwen3_path, quantized_model_path="/nowhere")
    with pytest.raises(ValueError, match=r"quantization='int4' is not allowed.*int8, w8a8"):
        LLM(qwen3_path, quantization="int4")


def test_missing_or_wrong_scales_are_refused(qwen3_path, tmp_path):
    """By name, whether a tensor is missing, of another shape or of floats."""
    file = Path(offline(qwen3_path, tmp_path / "quantized", "int8")) / "model.safetensors"
    layer = "model.layers.1.mlp.up_proj"
    edits = [
        (lambda t: t.pop(f"{layer}.scales"), rf"missing {layer}\.scales"),
        (lambda t: t.update({f"{layer}.scales": torch.ones(1)}), rf"'{layer}\.scales' has shape \(1,\)"),
        (lambda t: t.update({f"{layer}.qweight": t[f"{layer}.qweight"].float()}), r"qweight' is of torch\.float32"),
        (lambda t: t.update({"lm_head.weight_scale": torch.ones(1)}), r"unexpected lm_head\.weight_scale"),
    ]
    intact = load_file(file)
    for edit, message in edits:
        tensors = dict(intact)
        edit(tensors)
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=message):
            LLM(str(tmp_path / "quantized"), skip_tokenizer_init=True, num_kvcache_blocks=8)


def test_old_gpu_is_refused_while_loading(monkeypatch):
    """B20: not in the first forward."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ValueError, match=r"quantization='int8'.*sm_75.*sm_80"):
        resolve_scheme(None, "int8", "", converted=False).check_device(torch.device("cuda", 0))
    resolve_scheme(None, None, "", converted=False).check_device(torch.device("cuda", 0))
    resolve_scheme(None, "int8", "", converted=False).check_device(torch.device("cpu"))


# compressed-tensors


def compressed(method="w8a8", weights=(), inputs=(), group=(), **changes):
    """A quantization_config as compressed-tensors writes it, with changes."""
    config = json.loads(json.dumps(make_config(method, "compressed-tensors")[0]))
    one = config["config_groups"]["group_0"]
    one["weights"].update(weights)
    if one["input_activations"]:
        one["input_activations"].update(inputs)
    one.update(group)
    return {**config, **changes}


REFUSED = [
    (compressed(weights={"num_bits": 4}), r"weights\.num_bits=4"),
    (compressed(weights={"type": "float"}), r"weights\.type='float'"),
    (compressed(weights={"strategy": "group", "group_size": 128}), r"weights\.strategy='group'"),
    (compressed(weights={"symmetric": False}), r"weights\.symmetric=False"),
    (compressed(inputs={"dynamic": False, "strategy": "tensor"}), r"input_activations\.strategy='tensor'"),
    (compressed(inputs={"symmetric": False}), r"input_activations\.symmetric=False"),
    (compressed(group={"output_activations": {"num_bits": 8}}), "output_activations="),
    (compressed(format="float-quantized"), r"format='float-quantized'.*'int-quantized' for w8a8"),
    (compressed("int8", format="int-quantized"), r"format='int-quantized'.*'pack-quantized' for int8"),
    (compressed(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme="),
    (compressed(sparsity_config={"format": "sparse-bitmask"}), "sparsity_config="),
    (compressed(config_groups={}), "config_groups="),
    ({"quant_method": "gptq", "bits": 8}, "quant_method='gptq'.*'nanovllm' or 'compressed-tensors'"),
    ({"quant_method": "nanovllm", "quantization": "int4"}, "quantization='int4'.*'int8' or 'w8a8'"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_other_schemes_are_refused_by_name(config, message, tmp_path):
    """B13."""
    path = make_checkpoint(tmp_path, "qwen3")
    edit_config(path, quantization_config=config)
    with pytest.raises(ValueError, match=f"quantization_config with .*{message}"):
        LLM(path, skip_tokenizer_init=True)


def test_variants_of_other_writers_are_taken():
    """B13: fields left out, a group size of -1, the format stated by the group, observers and ratios."""
    found = compressed(
        weights={"group_size": -1, "observer": "mse", "observer_kwargs": {}},
        inputs={"observer": "memoryless"},
        group={"format": "int-quantized"},
        format="mixed-precision",
        global_compression_ratio=1.5,
        version="0.9.4",
    )
    del found["config_groups"]["group_0"]["weights"]["dynamic"]
    assert resolve_scheme(found, "w8a8", "", converted=True).method_of(["model.layers.0.mlp.down_proj"]).name == "w8a8"


@pytest.mark.parametrize(
    ("changes", "left_alone"),
    [
        (
            {"ignore": ["lm_head", "re:.*down_proj", "model.layers.0.self_attn.o_proj"]},
            r"down_proj|0\.self_attn\.o_proj",
        ),
        ({"targets": [r"re:.*layers\.1\..*(q|k|v|o|up|gate)_proj$"]}, r"layers\.0|down_proj"),
    ],
    ids=["ignore", "targets"],
)
def test_only_the_layers_listed_are_quantized(changes, left_alone, tmp_path, llm_of):
    """B26: the others are read as floats and computed as such."""
    source = make_checkpoint(tmp_path / "model", "qwen3")
    path = offline(source, tmp_path / "quantized", "w8a8", file_format="compressed-tensors")
    tensors, exact = load_file(Path(path) / "model.safetensors"), load_file(Path(source) / "model.safetensors")
    is_alone = re.compile(left_alone).search
    for name in [name for name in tensors if "_proj.weight" in name and is_alone(name)]:
        tensors.pop(name)
        if name.endswith(".weight"):
            tensors[name] = exact[name]
    save_file(tensors, Path(path) / "model.safetensors", metadata={"format": "pt"})
    group = {"targets": changes.pop("targets", ["Linear"])}
    edit_config(path, quantization_config=compressed(group=group, **changes))
    llm = llm_of(path)
    methods = {name: method.name for name, method, _ in loader.linear_parts(llm.engine.runner.model)}
    assert {name for name, method in methods.items() if method is None} == set(filter(is_alone, methods))
    assert set(methods.values()) == {None, "w8a8"}
    prompt = make_prompts(30)[0]
    score = torch.tensor(llm.score([prompt])[0]["token_logprobs"][1:])
    expected = torch.tensor(llm_of(source).score([prompt])[0]["token_logprobs"][1:])
    assert (score - expected).abs().mean() < 0.1


def test_one_matrix_cannot_be_half_quantized(tmp_path):
    """B26: q without k and v."""
    path = make_checkpoint(tmp_path, "qwen3")
    edit_config(path, quantization_config=compressed(ignore=["lm_head", "model.layers.1.self_attn.q_proj"]))
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.q_proj.*differently"):
        LLM(path, skip_tokenizer_init=True)


def test_packing_is_four_offset_bytes_a_word(tmp_path, llm_of):
    """Little end first, 128 added, rows padded to whole words: as its definition says; scales are columns."""
    source = make_checkpoint(tmp_path / "model", "qwen3", intermediate_size=90)
    path = offline(source, tmp_path / "quantized", "int8", file_format="compressed-tensors")
    tensors, layer = load_file(Path(path) / "model.safetensors"), "model.layers.0.mlp.down_proj"
    weight = load_file(Path(source) / "model.safetensors")[f"{layer}.weight"]
    qweight, scales = quantize_weight(weight)
    packed, scale, shape = (
        tensors.pop(f"{layer}.{kind}") for kind in ("weight_packed", "weight_scale", "weight_shape")
    )
    assert (packed.dtype, packed.shape, shape.tolist()) == (torch.int32, (64, 23), [64, 90])
    assert torch.equal(scale, scales[:, None])
    words = packed.tolist()
    for row, column in ((0, 0), (5, 7), (63, 89), (12, 88)):
        byte = (words[row][column // 4] >> (8 * (column % 4))) & 255
        assert byte - 128 == qweight[row, column].item()
    assert f"{layer}.weight" not in tensors
    assert torch.equal(dequantize(qweight, scales), qweight.float() * scales[:, None])
    (method, views), *_ = [(m, v) for n, m, v in loader.linear_parts(llm_of(path).engine.runner.model) if n == layer]
    assert torch.equal(method.dequantize(views), dequantize(qweight, scales))


@pytest.mark.parametrize(("method", "bound"), [("int8", 0.25), ("w8a8", 0.5)])
def test_the_other_family_quantizes_too(method, bound, make_llm, sansho_path, tmp_path):
    """All its linear layers, also those that are stacked or run several times a step: scores stay close, prefill and
    decode go on, and two engines agree. (Wrong weights are 2 off and more: the spread of scores is 1.5.)"""
    knobs = {"skip_tokenizer_init": True, "num_kvcache_blocks": 64}
    prompts = make_prompts(20, 33)
    exact, *found = (
        [
            lp
            for score in make_llm(sansho_path, quantization=q, **knobs).score(prompts)
            for lp in score["token_logprobs"][1:]
        ]
        for q in (None, method, method)
    )
    assert found[0] == found[1] != exact
    assert (torch.tensor(exact) - torch.tensor(found[0])).square().mean().sqrt() < bound
    llm = make_llm(sansho_path, quantization=method, **knobs)
    outputs = generate(llm, prompts, greedy(6, ignore_eos=True))
    quantize_checkpoint(sansho_path, str(tmp_path / "quantized"), method)
    offline = generate(make_llm(str(tmp_path / "quantized"), **knobs), prompts, greedy(6, ignore_eos=True))
    assert [output["token_ids"] for output in outputs] == [output["token_ids"] for output in offline]
    assert [len(output["token_ids"]) for output in outputs] == [6, 6]
    assert set(llm.engine.kernel_paths) >= {"qkv_proj", "memory_proj", "in_proj", "out_proj", "down_proj"}
