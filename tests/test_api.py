"""What a user may pass and what comes back: every wrong value is refused by name, before anything is queued."""

import math

import pytest
import torch
from checkpoints import make_checkpoint
from engine_helpers import check_idle

import nanovllm
from nanovllm import LLM, SamplingParams
from nanovllm.attention.torch import TorchAttention
from nanovllm.config import EngineConfig
from nanovllm.engine import build
from nanovllm.outputs import RequestOutput, SampleOutput, ScoreOutput, StreamOutput

SHORT = SamplingParams(temperature=0, max_tokens=3)


@pytest.fixture
def llm(make_llm, qwen3_path):
    return make_llm(qwen3_path, max_model_len=64)


def generate(llm, prompts, params=SHORT):
    return llm.generate(prompts, params, use_tqdm=False)


# Knobs of the engine

NOT_INTS = (1.5, "8", True, None)
BAD_KNOBS = {
    "dtype": (["int8", "float64", ""], "auto, float32, float16, bfloat16"),
    "device": (["gpu", "cuda:", "cuda:x", "CPU", 0, None], "auto, cpu, cuda or cuda:N"),
    "load_format": (["pt", "", None], "auto, dummy"),
    "attention_backend": (["sdpa", "", None], "auto"),
    "skip_tokenizer_init": ([1, "yes", None], "True or False"),
    "enable_prefix_caching": ([0, "no", None], "True or False"),
    "enforce_eager": ([1, "yes", None], "True or False"),
    "max_model_len": ([1, 0, -5, 1.5, "8", True], "at least 2"),
    "max_num_seqs": ([0, -1, *NOT_INTS], "at least 1"),
    "max_num_batched_tokens": ([0, -1, *NOT_INTS], "at least 1"),
    "tensor_parallel_size": ([0, -1, 9, *NOT_INTS], "at least 1|at most 8"),
    "distributed_executor": (["ray", "", None], "mp, external"),
    "kvcache_block_size": ([0, -16, 1.5, "8", True], "at least 1"),
    "num_kvcache_blocks": ([0, -2, *NOT_INTS], "at least 1, or -1"),
    "gpu_memory_utilization": ([0, -0.1, 1.01, math.nan, math.inf, "0.9", True, None], r"in \(0, 1\]"),
    "sansho_prefix_checkpoints": ([-1, 1.5, "8", True], "at least 0, or None"),
    "sansho_warmup_prompt_lens": ([5, "8", None], "a list of integers"),
    "sansho_warmup_batch_sizes": ([5, "8", None], "a list of integers"),
    "sansho_warmup_decode_tokens": ([0, -1, *NOT_INTS], "at least 1"),
    "sansho_decode_graph_replay_max_tokens": ([-1, 1.5, "8", True], "at least 0, or None"),
    "seed": ([-1, 2**63, *NOT_INTS], r"at least 0|below 2\*\*63"),
    "tokenizer": (["nowhere", 5], "directory"),
    "quantization": (["int4", "", 8, True], "None, int8, w8a8"),
    "quantized_model_path": (["nowhere", 5], "directory"),
}
BAD_KNOB_VALUES = [(name, value, allowed) for name, (values, allowed) in BAD_KNOBS.items() for value in values]


@pytest.mark.parametrize(("name", "value", "allowed"), BAD_KNOB_VALUES)
def test_wrong_knob_is_named_with_what_is_allowed(name, value, allowed, qwen3_path):
    """A86: what, got, allowed; without a model being loaded."""
    with pytest.raises(ValueError, match=rf"{name}={value!r}.*{allowed}"):
        LLM(qwen3_path, **{name: value})


def test_every_knob_has_wrong_values_here():
    """A new knob needs a line above."""
    assert set(EngineConfig.__dataclass_fields__) == {"model", *BAD_KNOBS}
    assert set(SamplingParams.__dataclass_fields__) == set(BAD_PARAMS)


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("max_model_length", "max_model_len"), ("block_size", "kvcache_block_size"), ("max_seqs", "max_num_seqs"),
     ("zzz", "known: model")],
)  # fmt: skip
def test_unknown_knob_names_the_nearest(wrong, near, qwen3_path):
    """A86: nano-vllm drops what it does not know."""
    with pytest.raises(TypeError, match=rf"LLM\(\).*'{wrong}'.*{near}"):
        LLM(qwen3_path, **{wrong: 8})


def test_dtype_may_be_torchs_own(make_llm, qwen3_path):
    """As in transformers."""
    assert make_llm(qwen3_path, dtype=torch.float16).engine.dtype is torch.float16
    with pytest.raises(ValueError, match="dtype='int8'"):
        LLM(qwen3_path, dtype=torch.int8)


def test_model_must_be_a_directory(qwen3_path, tmp_path):
    """Never looked up on a hub; a file is none, nor is a directory without config.json."""
    for path in ("nowhere/at-all", f"{qwen3_path}/config.json"):
        with pytest.raises(ValueError, match=rf"model='{path}'.*not a model directory"):
            LLM(path)
    with pytest.raises(ValueError, match=r"not a model directory: config\.json"):
        LLM(tmp_path)


def test_missing_tokenizer_is_named(tmp_path, make_llm):
    """Weights alone are enough for token ids, not for text; another directory may bring the tokenizer."""
    path = make_checkpoint(tmp_path / "bare", "qwen3")
    with pytest.raises(ValueError, match=r"tokenizer=.*skip_tokenizer_init"):
        LLM(path)
    broken = make_checkpoint(tmp_path / "broken", "qwen3", tokenizer=True)
    (tmp_path / "broken" / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(ValueError, match=r"tokenizer=.*skip_tokenizer_init"):
        LLM(broken)
    whole = make_checkpoint(tmp_path / "whole", "qwen3", tokenizer=True)
    assert generate(make_llm(path, tokenizer=whole), "Hi")[0]["text"]
    assert generate(make_llm(broken, skip_tokenizer_init=True), [[1]])[0]["text"] == ""


# Sizes that must fit together


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"max_model_len": 513}, "max_model_len=513 .*at most 512"),
        ({"num_kvcache_blocks": 1, "kvcache_block_size": 1}, "holds 1 token.*num_kvcache_blocks"),
        ({"num_kvcache_blocks": 2, "kvcache_block_size": 8, "max_model_len": 17}, "max_model_len=17.*holds 16 tokens"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit(knobs, message, qwen3_path):
    """The numbers and the knobs are in the message."""
    with pytest.raises(ValueError, match=message):
        LLM(qwen3_path, device="cpu", **knobs)


def test_small_pool_bounds_the_length(make_llm, qwen3_path):
    """Without max_model_len the pool decides, and what it holds can be used to the last token."""
    llm = make_llm(qwen3_path, num_kvcache_blocks=2, kvcache_block_size=8)
    assert llm.engine.max_model_len == 16
    (output,) = generate(llm, [[5] * 10], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert len(output["token_ids"]) == 6


@pytest.mark.parametrize("size", [16, 255, 257])
def test_block_size_the_backend_cannot_take(size, qwen3_path, monkeypatch):
    """flash-attn's pages are multiples of 256."""

    class Picky(TorchAttention):
        name, default_block_size, block_size_multiple = "picky", 256, 256

    monkeypatch.setattr(build, "choose_backend", lambda *args: (Picky(), "a test wants it"))
    with pytest.raises(ValueError, match=rf"kvcache_block_size={size} .*'picky'.*256.*attention_backend"):
        LLM(qwen3_path, kvcache_block_size=size)
    with LLM(qwen3_path, dtype="float32") as llm:
        assert llm.engine.block_size == 256


# Sampling parameters

BAD_PARAMS = {
    "temperature": ([-0.1, math.nan, math.inf, "1", True, None], "at least 0"),
    "top_p": ([0, -0.5, 1.1, math.nan, "1", True, None], r"in \(0, 1\]"),
    "top_k": ([-2, 1.5, "5", True, None], "at least -1"),
    "min_p": ([-0.1, 1.1, math.nan, "0", None], r"in \[0, 1\]"),
    "max_tokens": ([0, -1, 1.5, "8", True], "at least 1"),
    "min_tokens": ([-1, *NOT_INTS, 65], "at least 0|at most max_tokens=64"),
    "n": ([0, -1, *NOT_INTS], "at least 1"),
    "seed": ([-1, 1.5, "1", True, 2**63], r"at least 0|below 2\*\*63"),
    "stop": (["", [""], ["a", ""], [5], [None], 5, b"a"], "strings"),
    "stop_token_ids": ([[-1], ["a"], [1.5], [True], 5, "ab"], "integer"),
    "ignore_eos": ([1, "yes", None], "True or False"),
    "presence_penalty": ([-2.1, 2.1, math.nan, "0", None], r"in \[-2, 2\]"),
    "frequency_penalty": ([-2.1, 2.1, math.nan, "0", None], r"in \[-2, 2\]"),
    "repetition_penalty": ([0, -1, math.inf, math.nan, "1", None], "above 0"),
    "logit_bias": (
        [[1], {"5": 1.0}, {-1: 1.0}, {5: math.nan}, {5: math.inf}, {5: 1e39}, {5: "1"}, {True: 1.0}],
        "dict|int|finite",
    ),
    "logprobs": ([-1, 1.5, "1", True], "at least 0"),
    "skip_special_tokens": ([0, "no", None], "True or False"),
}
BAD_PARAM_VALUES = [(name, value, allowed) for name, (values, allowed) in BAD_PARAMS.items() for value in values]


@pytest.mark.parametrize(("name", "value", "allowed"), BAD_PARAM_VALUES)
def test_wrong_sampling_parameter_is_named_with_what_is_allowed(name, value, allowed):
    """A86: what, got, allowed."""
    with pytest.raises(ValueError, match=rf"(?s){name}.*({allowed})"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("top_kk", "top_k"), ("temprature", "temperature"), ("max_new_tokens", "max_tokens"), ("best_of", "")],
)
def test_unknown_sampling_parameter_names_the_nearest(wrong, near):
    """A86."""
    with pytest.raises(TypeError, match=rf"SamplingParams\(\).*'{wrong}'.*{near}"):
        SamplingParams(**{wrong: 1})


def test_limits_of_sampling_parameters_are_allowed():
    """The largest and smallest values, and null where it means "none"."""
    SamplingParams(temperature=0, top_p=1, top_k=0, min_p=1, max_tokens=None, min_tokens=100, seed=2**63 - 1)
    SamplingParams(top_p=1e-9, top_k=10**9, stop=None, stop_token_ids=None, presence_penalty=-2, frequency_penalty=2)
    assert SamplingParams(stop="ab") == SamplingParams(stop=["ab"]) == SamplingParams(stop=("ab",))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop_token_ids": [512]}, "512.*stop_token_ids.*below 512"),
        ({"logit_bias": {512: 1.0}}, "512.*logit_bias.*below 512"),
        ({"logprobs": 513}, "logprobs=513.*512"),
    ],
    ids=str,
)
def test_sampling_parameter_that_does_not_fit_the_model(params, message, llm):
    """Known only once there is a vocabulary."""
    with pytest.raises(ValueError, match=message):
        generate(llm, [[5], [6]], [SHORT, SamplingParams(**params)])
    assert not llm.engine.has_unfinished


# Prompts

PROMPTS = {
    "a string": ("Hello", 1),
    "strings": (["Hello", "there"], 2),
    "ids": ([5, 6, 7], 1),
    "lists of ids": ([[5, 6, 7], [8]], 2),
    "mixed": (["Hello", [5, 6, 7], "there"], 3),
    "a tuple of ids": ((5, 6, 7), 1),
    "none": ([], 0),
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_forms_of_prompts(kind, llm):
    """One result per prompt, in order; a list of no prompts has no results (A68)."""
    prompts, count = PROMPTS[kind]
    outputs = generate(llm, prompts)
    assert len(outputs) == len(llm.score(prompts)) == count
    one_by_one = prompts if kind in ("strings", "lists of ids", "mixed") else [prompts][:count]
    for output, prompt in zip(outputs, one_by_one, strict=True):
        ids = llm.engine.tokenizer.encode([prompt])[0] if isinstance(prompt, str) else list(prompt)
        assert output["prompt_token_ids"] == ids
        assert output["token_ids"] == generate(llm, [ids])[0]["token_ids"]


@pytest.mark.parametrize("empty", ["", [""], [[]], ["Hello", ""], [[5], []]], ids=repr)
def test_empty_prompt_is_refused(empty, llm):
    """A68: by every way in; the next request is fine."""
    for call in (llm.generate, llm.score):
        with pytest.raises(ValueError, match="prompt is empty"):
            call(empty)
    assert len(generate(llm, "Hello")) == 1


@pytest.mark.parametrize(
    "bad", [None, 5, [5, "a"], ["a", 5], [5, [6]], {"prompt": "Hello"}, b"Hello", [None]], ids=repr
)
def test_what_is_no_prompt_is_refused(bad, llm):
    """Never taken for something else: a dict is not the list of its keys, bytes are not token ids."""
    for call in (llm.generate, llm.score, llm.stream):
        with pytest.raises((ValueError, TypeError), match="prompt"):
            call(bad)


@pytest.mark.parametrize("several", [["a", "b"], [[5], [6]], [], ["a"], [[5]]], ids=repr)
def test_stream_takes_one_prompt(several, llm):
    """A second one would be dropped without a word; and n is 1."""
    if len(several) == 1:
        assert "".join(part["text"] for part in llm.stream(several, SHORT)) == generate(llm, several)[0]["text"]
        return
    with pytest.raises(ValueError, match="prompt"):
        llm.stream(several, SHORT)
    with pytest.raises(ValueError, match="n=2"):
        llm.stream("a", SamplingParams(n=2))


def test_prompt_too_long_is_refused_and_the_longest_is_not(llm):
    """A20: both numbers and the knob; one token of room is enough, and score() needs none."""
    for count in (64, 65, 1000):
        with pytest.raises(ValueError, match=rf"{count} tokens.*max_model_len is 64.*raise max_model_len"):
            generate(llm, [[5], [5] * count])
    assert len(generate(llm, [[5] * 63])[0]["token_ids"]) == 1
    assert len(llm.score([[5] * 64])[0]["token_logprobs"]) == 64
    with pytest.raises(ValueError, match="65 tokens"):
        llm.score([[5] * 65])


def test_sampling_params_for_all_or_one_each(llm):
    """Two prompts with one or three parameters would drop something."""
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (1, 2, 3)]
    assert [len(output["token_ids"]) for output in generate(llm, [[5], [6], [7]], params)] == [1, 2, 3]
    assert [len(output["token_ids"]) for output in generate(llm, [[5], [6]], params[2])] == [3, 3]
    assert len(llm.generate([[5]], use_tqdm=False)[0]["token_ids"]) > 0
    for count in (0, 1, 3):
        with pytest.raises(ValueError, match=rf"{count} sampling_params for 2 prompts"):
            generate(llm, [[5], [6]], params[:count])
    for bad in ({"temperature": 0}, [{"temperature": 0}], "greedy", 0.5):
        with pytest.raises((TypeError, ValueError), match="sampling_params"):
            generate(llm, [[5]], bad)


def test_nothing_is_queued_after_an_error(llm):
    """Good requests beside a bad one leave nothing behind for the next call."""
    expected = generate(llm, [[9, 8]])[0]["token_ids"]
    with pytest.raises(ValueError, match="empty"):
        generate(llm, [[5], [6], []])
    with pytest.raises(ValueError, match="empty"):
        llm.score([[5, 6], []])
    assert not llm.engine.has_unfinished
    assert [output["token_ids"] for output in generate(llm, [[9, 8]])] == [expected]


def test_chat_is_refused_like_a_prompt(llm, make_llm, llama_path, tmp_path):
    """No conversations, no results; what the template cannot render is an error of the caller's."""
    assert llm.chat([], SHORT, use_tqdm=False) == []
    for bad in ("Hello", [[]], [{"role": "user"}], [5], None):
        with pytest.raises((TypeError, ValueError)):
            llm.chat(bad, SHORT, use_tqdm=False)
    with pytest.raises(ValueError, match="skip_tokenizer_init"):
        make_llm(llama_path, skip_tokenizer_init=True).chat([{"role": "user", "content": "Hi"}])
    assert not llm.engine.has_unfinished


def test_what_needs_a_tokenizer_says_so(make_llm, qwen3_path):
    """Text prompts and stop strings; token ids and stop_token_ids do not."""
    llm = make_llm(qwen3_path, skip_tokenizer_init=True)
    for prompts, params in (("Hello", SHORT), ([[5], "Hello"], SHORT), ([[5]], SamplingParams(stop="a"))):
        with pytest.raises(ValueError, match="tokenizer"):
            generate(llm, prompts, params)
    assert len(generate(llm, [[5]], SamplingParams(stop_token_ids=[7]))) == 1


# What comes back


def test_outputs_have_exactly_the_documented_keys(llm):
    """Plain dicts whose keys outputs.py describes; what was not asked for is not there."""
    sample = {"text", "token_ids", "finish_reason", "stop_reason"}
    request = sample | {"prompt_token_ids", "num_cached_tokens", "time_to_first_token"}
    logprobs = {"logprobs", "top_logprobs"}
    (plain,), (full,) = (
        generate(llm, "Hi", SamplingParams(max_tokens=3, **more)) for more in ({}, {"n": 2, "logprobs": 1})
    )
    assert set(plain) == request
    assert set(full) == request | logprobs | {"outputs"}
    assert [set(one) for one in full["outputs"]] == [sample | logprobs] * 2
    assert all(set(part) == sample == set(StreamOutput.__annotations__) for part in llm.stream("Hi", SHORT))
    assert all(set(score) == set(ScoreOutput.__annotations__) for score in llm.score(["Hi", "there"], logprobs=2))
    assert set(SampleOutput.__annotations__) == sample | logprobs | {"error"}
    assert set(RequestOutput.__annotations__) >= request | logprobs | {"outputs"}


def test_score_of_one_token_and_of_many(llm):
    """The first token has nothing before it: None in its place, and no part in the sum."""
    one, many = llm.score([[5], [5, 6, 7]], logprobs=2)
    assert (one["token_logprobs"], one["top_logprobs"], one["sum_logprob"]) == ([None], [None], 0.0)
    assert many["token_logprobs"][0] is many["top_logprobs"][0] is None
    assert many["sum_logprob"] == pytest.approx(sum(many["token_logprobs"][1:]))
    assert [len(top) for top in many["top_logprobs"][1:]] == [2, 2]
    assert many["tokens"] == [llm.engine.tokenizer.token_text(i) for i in (5, 6, 7)]
    with pytest.raises(ValueError, match="logprobs=-1"):
        llm.score([[5, 6]], logprobs=-1)


def test_leaving_a_stream_early_frees_its_blocks(llm):
    """At once, not when the next request comes."""
    for _ in llm.stream([5, 6, 7], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)):
        assert llm.engine.scheduler.running
        break
    check_idle(llm)


def test_stream_without_a_tokenizer(make_llm, qwen3_path):
    """Token ids in, token ids out as they come; text stays empty."""
    llm = make_llm(qwen3_path, skip_tokenizer_init=True)
    (whole,) = generate(llm, [[5, 6, 7]], SHORT)
    parts = list(llm.stream([5, 6, 7], SHORT))
    assert [part["token_ids"] for part in parts if part["token_ids"]] == [[i] for i in whole["token_ids"]]
    assert whole["text"] == "".join(part["text"] for part in parts) == ""
    assert parts[-1]["finish_reason"] == "length"


def test_public_names():
    """All that `from nanovllm import ...` offers."""
    assert sorted(nanovllm.__all__) == ["LLM", "RequestOutput", "SamplingParams", "__version__"]
