"""Models against transformers in float32, whatever a checkpoint looks like; what does not fit is refused by name."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from checkpoints import hf_full_logprobs, hf_greedy, hf_logprobs, make_checkpoint
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams, platform
from nanovllm.kernels.layernorm import add_rms_norm_ref, rms_norm_ref
from nanovllm.models.config import ModelConfig
from nanovllm.models.registry import BUILTIN_SHAPES

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
INDEX = "model.safetensors.index.json"


def token_ids(count, vocab_size=500, seed=1):
    return torch.randint(3, vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPT = token_ids(40)


def full_logprobs(llm, ids):
    """log p(. | ids[:i+1]) for every i but the last, of shape [len(ids) - 1, V]."""
    vocab_size = llm.engine.model_config.vocab_size
    table = torch.zeros(len(ids) - 1, vocab_size)
    for row, top in zip(table, llm.score([ids], logprobs=vocab_size)[0]["top_logprobs"][1:], strict=True):
        row[list(top)] = torch.tensor([entry.logprob for entry in top.values()])
    return table


def own_logprobs(llm, ids):
    return torch.tensor(llm.score([ids])[0]["token_logprobs"][1:])


def check_like_transformers(llm, path, ids=PROMPT, num_tokens=24):
    """The whole distribution at every place of the prompt, and the greedy continuation."""
    torch.testing.assert_close(full_logprobs(llm, ids), hf_full_logprobs(path, ids)[:-1], atol=1e-4, rtol=0)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    (output,) = llm.generate([ids], params, use_tqdm=False)
    assert output["token_ids"] == hf_greedy(path, ids, num_tokens)


def edit_config(path, remove=(), **changes):
    file = Path(path) / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in config.items() if name not in remove}))


def edit_weights(path, edit, file="model.safetensors"):
    tensors = load_file(Path(path) / file)
    edit(tensors)
    save_file(tensors, Path(path) / file, metadata={"format": "pt"})


@pytest.fixture
def bare_llm(make_llm):
    """make_llm without a tokenizer, which most checkpoints here lack."""
    return lambda path, **knobs: make_llm(path, skip_tokenizer_init=True, num_kvcache_blocks=128, **knobs)


# Families


@pytest.mark.parametrize("name", ["qwen3_path", "llama_path", "qwen2_path"])
def test_family_matches_transformers(name, request, bare_llm):
    """Logits of a long prompt and 64 greedy tokens; Qwen3's head_dim is not hidden_size / heads (A34, A45)."""
    path = request.getfixturevalue(name)
    check_like_transformers(bare_llm(path), path, token_ids(300), num_tokens=64)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen3", {"attention_bias": True}),
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"head_dim": 32}),
        ("qwen3", {"num_key_value_heads": 1}),
        ("qwen2", {"num_attention_heads": 6, "hidden_size": 96, "num_key_value_heads": 2}),
        ("qwen3", {"rms_norm_eps": 1e-2}),
        ("llama", {"vocab_size": 131, "num_hidden_layers": 1}),
    ],
)
def test_config_option_matches_transformers(family, overrides, tmp_path, bare_llm):
    """A39, A45: biases of o_proj and of the MLP, any head_dim, any share of KV heads, odd vocabularies."""
    path = make_checkpoint(tmp_path, family, **overrides)
    check_like_transformers(bare_llm(path), path, token_ids(40, overrides.get("vocab_size", 500)))


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [("qwen3", "head_dim", 16), ("llama", "head_dim", 16), ("llama", "num_key_value_heads", 4)],
)
@pytest.mark.parametrize("spelling", ["null", "absent"])
def test_head_sizes_that_config_leaves_open(family, name, value, spelling, tmp_path, bare_llm):
    """A45: newer transformers write head_dim: null; Llama 2 lacks both, and then hidden_size and heads decide."""
    path = make_checkpoint(tmp_path, family, **{name: value})
    expected = hf_logprobs(path, PROMPT)
    edit_config(path, remove=[name] if spelling == "absent" else [], **{name: None})
    torch.testing.assert_close(own_logprobs(bare_llm(path), PROMPT), expected, atol=1e-4, rtol=0)


def test_norms_leave_their_input_unchanged():
    """A34: an in-place norm spoils the residual, and in float32 nothing else copies it."""
    x, residual, weight = torch.randn(5, 8), torch.randn(5, 8), torch.rand(8)
    kept = x.clone(), residual.clone(), x + residual
    normed, total = add_rms_norm_ref(x, residual, weight, 1e-6)
    torch.testing.assert_close(rms_norm_ref(total, weight, 1e-6), normed)
    assert all(torch.equal(*pair) for pair in zip((x, residual, total), kept, strict=True))


# Rotary embedding

THETA = 1e4
INSTALLED = "v5" if int(transformers.__version__.split(".")[0]) >= 5 else "v4"


def rope_keys(spelling, theta=THETA, **scaling):
    """Keys of config.json, as transformers 5 or 4 spells them."""
    if spelling == "v5":
        return {"rope_parameters": {"rope_type": "default", **scaling, "rope_theta": theta}}
    return {"rope_theta": theta, "rope_scaling": scaling or None}


def check_rope(path, expected, make, ids, **keys):
    """The same log probabilities with these keys for the rope, and others without scaling."""
    edit_config(path, remove={"rope_parameters", "rope_theta", "rope_scaling"} - keys.keys(), **keys)
    torch.testing.assert_close(own_logprobs(make(path), ids), expected, atol=1e-4, rtol=0)
    edit_config(path, remove=["rope_parameters", "rope_scaling"], rope_theta=THETA)
    assert (own_logprobs(make(path), ids) - expected).abs().max() > 0.1, "the difference does not show"


@pytest.mark.parametrize(
    "spelling",
    [
        rope_keys("v5", 1e6),
        {"rope_parameters": {"rope_theta": 1e6}},
        rope_keys("v4", 1e6),
        {"rope_theta": 1e6},
        rope_keys("v4", 1e6, rope_type="default"),
        rope_keys("v4", 1e6, type="default"),
    ],
    ids=str,
)
def test_rope_without_scaling_in_every_spelling(spelling, tmp_path, bare_llm):
    """A35: transformers 5 keeps a dict where 4 has null and rope_theta; theta counts in both."""
    path = make_checkpoint(tmp_path, "qwen3", **rope_keys(INSTALLED, 1e6))
    check_rope(path, hf_logprobs(path, PROMPT), bare_llm, PROMPT, **spelling)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS = [
    {"rope_type": "linear", "factor": 4.0},
    {**LLAMA3, "original_max_position_embeddings": 64},
    YARN,
    {**YARN, "beta_fast": 2, "beta_slow": 0.5},
    {**YARN, "attention_factor": 0.8},
    {**YARN, "truncate": False},
    {**YARN, "mscale": 1.5, "mscale_all_dim": 0.5},
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("spelling", ["v5", "v4", "older v4"])
def test_rope_scaling_matches_transformers(scaling, spelling, tmp_path, bare_llm):
    """A37: scaled at positions far beyond the original context; the type was once under "type"."""
    ids, sizes = token_ids(220), {"head_dim": 32, "max_position_embeddings": 256}
    path = make_checkpoint(tmp_path, "llama", **sizes, **rope_keys(INSTALLED, **scaling))
    if spelling == "older v4":
        scaling = {("type" if name == "rope_type" else name): value for name, value in scaling.items()}
    check_rope(path, hf_logprobs(path, ids), bare_llm, ids, **rope_keys(spelling, **scaling))


def test_yarn_stretches_the_longest_context(tmp_path, bare_llm):
    """A checkpoint that states its original length as max_position_embeddings takes factor times as much."""
    path = make_checkpoint(tmp_path, "llama", max_position_embeddings=256, **rope_keys(INSTALLED, **YARN))
    expected = hf_logprobs(path, token_ids(200))
    for scaling in (YARN, {"rope_type": "yarn", "factor": 4.0}):
        edit_config(path, max_position_embeddings=64, **rope_keys(INSTALLED, **scaling))
        llm = bare_llm(path)
        assert llm.engine.max_model_len == 256
        torch.testing.assert_close(own_logprobs(llm, token_ids(200)), expected, atol=1e-4, rtol=0)


# What is refused

REFUSED = [
    ({"architectures": ["MixtralForCausalLM"]}, "architectures.*MixtralForCausalLM.*Qwen3ForCausalLM"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'.*yarn"),
    ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope type 'longrope'"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "'yarn' lacks factor"),
    ({"rope_parameters": {**LLAMA3}}, "'llama3' lacks original_max_position_embeddings"),
    ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0}}}, "rope_parameters.*full_attention"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ({"use_sliding_window": True, "sliding_window": 16}, "use_sliding_window"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantization_config.*'awq'"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ({"hidden_size": None}, "'hidden_size'"),
    ({"num_attention_heads": 3}, "num_attention_heads=3.*num_key_value_heads=2"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda value: str(value)[:60])
def test_config_is_refused_by_name(changes, message, qwen2_path, tmp_path):
    """A37 and the like: a setting that would change the numbers is never ignored."""
    config = json.loads((Path(qwen2_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ValueError, match=message):
        LLM(str(tmp_path), skip_tokenizer_init=True)


def test_config_that_only_mentions_a_feature_is_taken(qwen2_path):
    """Qwen2.5 states a window that it does not use."""
    config = json.loads((Path(qwen2_path) / "config.json").read_text())
    unused = {"use_sliding_window": False, "sliding_window": 16, "quantization_config": None}
    assert ModelConfig.from_dict({**config, **unused}) == ModelConfig.from_dict(config)


# Weights on disk


OLD_ROTARY = "model.layers.0.self_attn.rotary_emb.inv_freq"


@pytest.mark.parametrize(
    ("tie", "edit"),
    [
        (False, lambda tensors: None),
        (True, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})),
        (True, lambda tensors: tensors.update({OLD_ROTARY: torch.ones(8)})),
    ],
    ids=["a head of its own", "a tied head and a copy of it", "rotary tables of Llama 2 conversions"],
)
def test_checkpoint_with(tie, edit, tmp_path, bare_llm):
    """What is needed is read, and what some checkpoints carry besides does no harm. A48: nor do leftovers."""
    path = make_checkpoint(tmp_path, "llama", tie=tie)
    edit_weights(path, edit)
    save_file({"model.norm.weight": torch.full((64,), 9.0)}, tmp_path / "older.safetensors")
    check_like_transformers(bare_llm(path), path)


def test_shards_are_read_by_index_alone(tmp_path, bare_llm):
    """A48: a stale model.safetensors and stale shards beside the index are not touched."""
    path = make_checkpoint(tmp_path, "qwen3", max_shard_size="100KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    tensors = {name: torch.full_like(tensor, 9.0) for name, tensor in load_file(shards[0]).items()}
    for stale in ("model.safetensors", "model-00009-of-00009.safetensors", "pytorch_model.safetensors"):
        save_file({**tensors, "stale.weight": torch.ones(2)}, tmp_path / stale, metadata={"format": "pt"})
    llm = bare_llm(path)
    (tmp_path / "model.safetensors").unlink()  # transformers prefers it to the index
    check_like_transformers(llm, path)


def test_missing_weight_files_are_named(tmp_path):
    """A47: a shard by its name, before anything is read; a directory may also hold pytorch_model.bin alone."""
    path = make_checkpoint(tmp_path, "qwen3", max_shard_size="100KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ValueError, match=rf"lacks {shard.name}.*index"):
        LLM(path, skip_tokenizer_init=True)
    (tmp_path / INDEX).unlink()
    with pytest.raises(ValueError, match="no weights"):
        LLM(path, skip_tokenizer_init=True)


def put(name, *shape):
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


BAD_WEIGHTS = [
    (lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"), r"missing model.*k_proj\.weight; unexp"),
    (lambda tensors: tensors.pop("model.layers.0.self_attn.q_norm.weight"), r"missing .*q_norm"),
    (put("model.layers.2.mlp.up_proj.weight", 96, 64), r"unexpected model\.layers\.2\.mlp\.up_proj\.weight"),
    (put("model.layers.0.self_attn.q_proj.bias", 64), r"unexpected model\.layers\.0\.self_attn\.q_proj\.bias"),
    (put("model.layers.1.mlp.up_proj.weight", 64, 96), r"up_proj\.weight.*\(64, 96\).*\(96, 64\)"),
    (put("model.norm.weight", 1), r"model\.norm\.weight.*\(1,\).*\(64,\)"),
    (lambda tensors: tensors.clear(), r"missing .* and \d+ more"),
]


@pytest.mark.parametrize(("edit", "message"), BAD_WEIGHTS, ids=[message for _, message in BAD_WEIGHTS])
def test_weights_that_do_not_fit_are_named(edit, message, tmp_path):
    """A47: missing, unexpected or wrongly shaped tensors; nothing is broadcast or left uninitialised."""
    path = make_checkpoint(tmp_path, "qwen3")
    edit_weights(path, edit)
    with pytest.raises(ValueError, match=message):
        LLM(path, skip_tokenizer_init=True)


CORRUPT = {
    "config.json": (b"", b'{"architectures": [', b"[]", b"\xff\xfe{}"),
    "generation_config.json": (b"{", b"[]"),
    "model.safetensors": (b"", b"no weights but some text"),
    INDEX: (b"{}", b'{"weight_map": ', b"[]"),
}


@pytest.mark.parametrize(("file", "content"), [(file, c) for file, contents in CORRUPT.items() for c in contents])
def test_corrupt_file_is_named(file, content, tmp_path):
    """Cut off by an interrupted download, not what its name says, not even text."""
    path = make_checkpoint(tmp_path, "qwen3")
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(file)):
        LLM(path, skip_tokenizer_init=True)


# Dtypes, and random weights


@pytest.mark.parametrize("spelling", ["dtype", "torch_dtype", "neither"])
@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
def test_checkpoint_of_any_dtype_loads(stored, spelling, tmp_path, bare_llm):
    """A38: config.json names the dtype in one of two ways, or not at all; float32 is float32 in any case."""
    path = make_checkpoint(tmp_path, "qwen3", dtype=stored)
    edit_config(path, remove=["dtype", "torch_dtype"])
    if spelling != "neither":
        edit_config(path, **{spelling: stored})
    llm = bare_llm(path, dtype="float32")
    assert llm.engine.model_config.dtype == (None if spelling == "neither" else stored)
    check_like_transformers(llm, path)


def test_auto_dtype(monkeypatch):
    """A38: the checkpoint's own dtype on a GPU, bfloat16 where none is stated; on a CPU what it is fast in."""
    for stored in ("float16", "bfloat16", "float32", None):
        assert platform.resolve_dtype("auto", stored, torch.device("cuda")) is getattr(torch, stored or "bfloat16")
        for has_units in (False, True):
            monkeypatch.setattr(platform, "cpu_has_bf16_units", lambda has_units=has_units: has_units)
            fast = torch.bfloat16 if stored == "bfloat16" and has_units else torch.float32
            assert platform.resolve_dtype("auto", stored, torch.device("cpu")) is fast


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_as_exact_as_in_transformers(dtype, qwen3_path, bare_llm):
    """A float32 checkpoint rounds on loading; the error stays within twice transformers' own in that dtype."""
    exact = hf_full_logprobs(qwen3_path, PROMPT)[:-1]
    rival = transformers.AutoModelForCausalLM.from_pretrained(qwen3_path, dtype=getattr(torch, dtype))
    with torch.inference_mode():
        theirs = rival(torch.tensor([PROMPT])).logits[0, :-1].float().log_softmax(-1)
    ours = full_logprobs(bare_llm(qwen3_path, dtype=dtype), PROMPT)
    assert (ours - exact).square().mean() <= 4 * (theirs - exact).square().mean()
    assert (ours - exact).abs().max() > 1e-4, "this was float32"


POISON = 77  # a token whose embedding overflows float16


def test_overflow_fails_the_request_and_no_other(tmp_path, bare_llm):
    """A49: logits that are not finite never turn into token 0; neighbours keep their tokens, and score() raises."""
    path = make_checkpoint(tmp_path, "llama", tie=False)
    edit_weights(path, lambda tensors: tensors["model.embed_tokens.weight"][POISON].fill_(1e6))
    llm = bare_llm(path, dtype="float16")
    healthy, poisoned = [token_ids(9, seed=i) for i in (2, 3)], [5, POISON, 6]
    alone = [llm.generate([ids], GREEDY, use_tqdm=False)[0]["token_ids"] for ids in healthy]
    before, failed, after = llm.generate([healthy[0], poisoned, healthy[1]], GREEDY, use_tqdm=False)
    assert (failed["finish_reason"], failed["token_ids"]) == ("error", [])
    assert "not finite" in failed["error"]
    assert [before["token_ids"], after["token_ids"]] == alone
    assert before["finish_reason"] == after["finish_reason"] == "length"
    with pytest.raises(RuntimeError, match="not finite"):
        llm.score([healthy[0], poisoned])
    assert llm.score([healthy[0]])[0]["sum_logprob"] < 0


def test_infinite_logit_fails_too(tmp_path, bare_llm):
    """A49: the head's weights fit and their sum does not: infinity, not NaN, and only where it is positive."""
    path = make_checkpoint(tmp_path, "llama", tie=False)
    edit_weights(path, lambda tensors: tensors["lm_head.weight"][POISON].mul_(3e5))
    llm = bare_llm(path, dtype="float16")
    assert llm.generate([PROMPT], GREEDY, use_tqdm=False)[0]["finish_reason"] == "error"
    with pytest.raises(RuntimeError, match="not finite"):
        llm.score([PROMPT])


def test_dummy_weights_of_a_built_in_shape(monkeypatch, bare_llm):
    """No files at all; the seed alone decides, and a shape that is not there names those that are."""
    tiny = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    tiny |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    monkeypatch.setitem(BUILTIN_SHAPES, "qwen3-0.6b", {**BUILTIN_SHAPES["qwen3-0.6b"], **tiny})
    knobs = {"load_format": "dummy", "max_model_len": 64}
    scores = [bare_llm("qwen3-0.6b", seed=seed, **knobs).score([[1, 2, 3]])[0]["sum_logprob"] for seed in (0, 0, 1)]
    assert scores[0] == scores[1] != scores[2]
    with pytest.raises(ValueError, match=r"qwen3-0\.7b.*qwen3-0\.6b.*qwen3-8b"):
        LLM("qwen3-0.7b", load_format="dummy")


def test_dummy_weights_of_a_directory_with_config_alone(qwen2_path, tmp_path, bare_llm):
    """Weights are neither needed nor read."""
    (tmp_path / "config.json").write_text((Path(qwen2_path) / "config.json").read_text())
    output = bare_llm(str(tmp_path), load_format="dummy").generate([PROMPT], GREEDY, use_tqdm=False)[0]
    assert (output["finish_reason"], len(output["token_ids"])) == ("length", 24)
