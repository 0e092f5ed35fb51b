"""Tiny random checkpoints written by transformers, and what transformers itself computes on them: the oracle. (Of a
Sansho export, which transformers does not know, the library's plain reference is.)

Weights are drawn so that mistakes show: no bias is 0, no norm weight is 1, attention is peaked enough for positions
to matter, and greedy decoding wanders instead of repeating one token.
"""

import importlib.util
import inspect
import json
import math
from functools import lru_cache
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig

from nanovllm.models.sansho_reference import SanshoReference

transformers.logging.disable_progress_bar()  # or each checkpoint draws two in the output of a failed test

TOKENIZER_SIZE = 512
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # the last ids of the tokenizer, as in Qwen
BOS_TOKEN = "<|begin_of_text|>"  # add_bos only; stands before SPECIAL_TOKENS
ROPE_THETA = 10000.0

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}"""


def special_id(token, vocab_size=TOKENIZER_SIZE):
    """The id of a special token, with or without a tokenizer in the checkpoint."""
    return min(vocab_size, TOKENIZER_SIZE) - len(SPECIAL_TOKENS) - 1 + (BOS_TOKEN, *SPECIAL_TOKENS).index(token)


def make_checkpoint(
    directory,
    family="qwen3",
    seed=0,
    dtype="float32",
    tie=True,
    *,
    tokenizer=False,
    add_bos=False,
    max_shard_size=None,
    legacy_config=False,
    **config_overrides,
):
    """Write a tiny random checkpoint of family qwen3, llama or qwen2 into directory; return its path as a str.

    max_shard_size: bytes or "40KB"; forces shards and an index. legacy_config: config.json with the rope and dtype
    keys of transformers 4, which most published checkpoints have. add_bos: a Llama-like tokenizer, BOS included.
    config_overrides: any key of the transformers config, e.g. num_hidden_layers=3, head_dim=32, vocab_size=640.
    """
    config = _make_config(family, tie, add_bos, config_overrides)
    model = _random_model(config, seed).to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    vocab_size = config.vocab_size
    end = special_id("<|im_end|>", vocab_size)
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=[end, special_id("<|endoftext|>", vocab_size)],
        pad_token_id=special_id("<|endoftext|>", vocab_size),
    )
    shards = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    model.save_pretrained(directory, **shards)
    if legacy_config:
        _to_legacy_config(Path(directory) / "config.json")
    if tokenizer:
        make_tokenizer(directory, min(vocab_size, TOKENIZER_SIZE), add_bos)
    return str(directory)


def _make_config(family, tie, add_bos, overrides):
    """The transformers config of one family, at tiny shapes."""
    vocab_size = overrides.get("vocab_size", TOKENIZER_SIZE)
    values = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tie,
        "eos_token_id": special_id("<|im_end|>", vocab_size),
        "bos_token_id": special_id(BOS_TOKEN, vocab_size) if add_bos else None,
    }
    if int(transformers.__version__.split(".")[0]) >= 5:
        values["rope_parameters"] = {"rope_type": "default", "rope_theta": ROPE_THETA}
    else:
        values["rope_theta"] = ROPE_THETA
    if family == "qwen3":
        values["head_dim"] = 16
    classes = {"qwen3": "Qwen3Config", "llama": "LlamaConfig", "qwen2": "Qwen2Config"}
    return getattr(transformers, classes[family])(**{**values, **overrides})


def _random_model(config, seed):
    """A float32 model with every parameter drawn by name order from one generator, whatever transformers' own init."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            parameter.copy_(_draw(name, parameter.shape, generator))
    return model.eval()


def _draw(name, shape, generator):
    """One random tensor for the parameter called name.

    The gains are measured: lower ones and a tied model soon repeats a handful of tokens; higher ones and float32
    rounding alone moves a log probability by 1e-4, which is the bound that the engine is held to.
    """
    normal = torch.randn(shape, generator=generator)
    if name.endswith("bias"):
        return 0.3 * normal
    if "norm" in name:
        # q_norm and k_norm set how peaked attention is; the last norm makes up for the quiet embedding.
        mean = 5.0 if name == "model.norm.weight" else 1.4 if "q_norm" in name or "k_norm" in name else 1.0
        return mean * (1.0 + 0.3 * normal)
    if "embed_tokens" in name or "lm_head" in name:
        # Small beside what the layers add: with a tied head a loud embedding just votes for the token it came from.
        return 0.05 * normal
    # With scores near 0 every position would weigh the same, and a wrong rotary would go unseen.
    gains = {"q_proj": 1.4, "k_proj": 1.4, "down_proj": 2.0}
    return gains.get(name.split(".")[-2], 1.0) * normal / math.sqrt(shape[-1])


def _to_legacy_config(file):
    """Rewrite config.json with the keys that transformers 4 wrote."""
    config = json.loads(file.read_text())
    rope = dict(config.pop("rope_parameters", None) or {})
    if rope:
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else rope
    config["torch_dtype"] = config.pop("dtype", None) or config.get("torch_dtype")
    file.write_text(json.dumps(config, indent=2))


@lru_cache(maxsize=4)
def _train_tokenizer(size, add_bos):
    """A byte-level BPE of exactly size tokens, as the JSON text of the tokenizers library."""
    from pydoc_data.topics import topics  # English prose that every Python carries

    special = ([BOS_TOKEN] if add_bos else []) + list(SPECIAL_TOKENS)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([topics[name] for name in sorted(topics)], trainer)
    tokenizer.add_special_tokens(special)
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS_TOKEN} $A",
            pair=f"{BOS_TOKEN} $A {BOS_TOKEN} $B",
            special_tokens=[(BOS_TOKEN, tokenizer.token_to_id(BOS_TOKEN))],
        )
    return tokenizer.to_str()


def make_tokenizer(directory, size=TOKENIZER_SIZE, add_bos=False):
    """Write the tokenizer files into directory; with add_bos both encode() and the chat template write BOS."""
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_train_tokenizer(size, add_bos)),
        bos_token=BOS_TOKEN if add_bos else None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=("{{- bos_token }}\n" if add_bos else "") + CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(directory)


def load_script(name, folder="scripts"):
    """A module of a folder that is no package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent.parent / folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@lru_cache(maxsize=16)
def sansho_reference(path):
    """The oracle of an export, or None where path is a checkpoint that transformers knows. Cached: do not change it."""
    config = json.loads((Path(path) / "config.json").read_text())
    return SanshoReference(path) if config["model_type"] == "sansho" else None


@lru_cache(maxsize=8)
def hf_model(path):
    """transformers' own model in float32, whatever dtype the checkpoint has. Cached: do not change it."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def hf_greedy(path, prompt_ids, max_new_tokens, eos_ids=()):
    """Greedy continuation of one prompt with transformers' cache; an id of eos_ids ends it and is its last entry."""
    if sansho_reference(path) is not None:
        return sansho_reference(path).greedy(prompt_ids, max_new_tokens, eos_ids)
    model, output, step_ids = hf_model(path), [], list(prompt_ids)
    # transformers 5 renames the argument, and warns about the old name.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache = {name: DynamicCache()}
    while len(output) < max_new_tokens:
        logits = model(torch.tensor([step_ids]), use_cache=True, **cache).logits
        step_ids = [int(logits[0, -1].argmax())]
        output += step_ids
        if step_ids[0] in eos_ids:
            break
    return output


@torch.inference_mode()
def hf_full_logprobs(path, ids):
    """log p(. | ids[:i+1]) for every i, of shape [len(ids), V]."""
    if sansho_reference(path) is not None:
        return sansho_reference(path).logits(list(ids)).log_softmax(-1)
    logits = hf_model(path)(torch.tensor([list(ids)]), use_cache=False).logits[0]
    return logits.float().log_softmax(-1)


def hf_logprobs(path, ids):
    """log p(ids[i+1] | ids[:i+1]), of shape [len(ids) - 1]."""
    return hf_full_logprobs(path, ids)[:-1].gather(1, torch.tensor(list(ids[1:]))[:, None])[:, 0]
