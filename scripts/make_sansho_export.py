"""Write a Sansho export with random weights and a real tokenizer, to time and test with.

python scripts/make_sansho_export.py --shape sansho-500m --output DIR
"""

import argparse
import json
import math
from pathlib import Path
from pydoc_data.topics import topics  # English prose that every Python carries

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from nanovllm.models.sansho_config import SANSHO_500M

END = "<|endoftext|>"
# Sizes that nothing divides by chance, and a window that is soon full.
TINY = SANSHO_500M | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_self_decoder_layers": 2,
    "universal_loop": 2,
    "layer_types": ["sliding_attention"] * 2 + ["cross_mamba", "cross_attention", "cross_mamba", "cross_mamba"],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "cross_num_key_value_heads": 3,
    "sliding_window": 8,
    "max_position_embeddings": 512,
    "mamba_d_ssm": 48,
    "mamba_d_state": 10,
    "mamba_d_head": 12,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 6,
    "dtype": "float32",
}
SHAPES = {"sansho-500m": SANSHO_500M, "tiny": TINY}


def tensor_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Every tensor of an export by name."""
    d, f, dim = (config[name] for name in ("hidden_size", "intermediate_size", "head_dim"))
    names = ("num_attention_heads", "num_key_value_heads", "cross_num_key_value_heads")
    q, kv, shared = (dim * config[name] for name in names)
    e, gn = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    heads, width = e // config["mamba_d_head"], config["mamba_d_conv"]
    qk_norm = {"q_norm.weight": (dim,), "k_norm.weight": (dim,)} if config["qk_norm"] else {}
    parts = {
        "sliding_attention": {f"self_attn.{part}_proj.weight": (n, d) for part, n in (("q", q), ("k", kv), ("v", kv))}
        | {"self_attn.o_proj.weight": (d, q)}
        | {f"self_attn.{name}": shape for name, shape in qk_norm.items()},
        "cross_attention": {"cross_attn.q_proj.weight": (q, d), "cross_attn.o_proj.weight": (d, q)}
        | ({"cross_attn.q_norm.weight": (dim,)} if qk_norm else {}),
        "cross_mamba": {
            "cross_mamba.in_proj.weight": (e + gn, d),
            "cross_mamba.memory_proj.weight": (e + gn + heads, d),
            "cross_mamba.conv1d.weight": (e + gn, 1, width),
            **({"cross_mamba.conv1d.bias": (e + gn,)} if config["mamba_conv_bias"] else {}),
            **{f"cross_mamba.{name}": (heads,) for name in ("A_log", "D", "dt_bias")},
            "cross_mamba.norm.weight": (e,),
            "cross_mamba.out_proj.weight": (d, e),
        },
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], d)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], d)
    for i, kind in enumerate(config["layer_types"]):
        layer = {"input_layernorm.weight": (d,), "post_attention_layernorm.weight": (d,)} | parts[kind]
        layer |= {"mlp.gate_proj.weight": (f, d), "mlp.up_proj.weight": (f, d), "mlp.down_proj.weight": (d, f)}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes |= {"model.yoco_norm.weight": (d,), "model.norm.weight": (d,)}
    shapes |= {"model.yoco_k_proj.weight": (shared, d), "model.yoco_v_proj.weight": (shared, d)}
    return shapes | ({"model.yoco_k_norm.weight": (dim,)} if qk_norm else {})


def draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """One random tensor, such that attention looks at positions, states remember a few dozen tokens, and greedy
    decoding wanders."""
    if name.endswith("A_log"):
        return torch.empty(shape).uniform_(1.0, 16.0, generator=generator).log()
    if name.endswith("dt_bias"):
        dt = torch.empty(shape).uniform_(math.log(0.005), math.log(0.2), generator=generator).exp()
        return dt + torch.log(-torch.expm1(-dt))  # softplus of it is dt
    normal = torch.randn(shape, generator=generator)
    if name.endswith("bias"):
        return 0.3 * normal
    if "norm" in name or name.endswith(".D"):
        mean = 3.0 if name == "model.norm.weight" else 1.4 if "q_norm" in name or "k_norm" in name else 1.0
        return mean * (1.0 + 0.3 * normal)
    if "embed_tokens" in name or "lm_head" in name:
        # Small beside what the layers add: with a tied head a loud embedding just votes for the token it came from.
        return 0.05 * normal
    gains = {"q_proj": 1.4, "k_proj": 1.4, "down_proj": 2.0, "out_proj": 2.0, "memory_proj": 1.5}
    return gains.get(name.split(".")[-2], 1.0) * normal / math.sqrt(shape[-1])


def make_tokenizer(directory: str | Path, size: int) -> int:
    """Write a byte-level BPE of exactly `size` tokens; returns the id of END, its last one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([topics[name] for name in sorted(topics)], trainer)
    # Prose this short yields fewer merges than a large vocabulary has room for.
    tokenizer.add_tokens([f"<|unused{i}|>" for i in range(size - 1 - tokenizer.get_vocab_size())])
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(Path(directory) / "tokenizer.json"))
    # The one class name that both transformers 4 and 5 know for "tokenizer.json is all there is".
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END}
    settings = json.dumps(names | {"clean_up_tokenization_spaces": False}, indent=2)
    (Path(directory) / "tokenizer_config.json").write_text(settings + "\n", encoding="utf-8")
    return size - 1


def make_export(directory: str | Path, shape: str = "tiny", seed: int = 0, tokenizer: bool = True, **overrides) -> str:
    """Write an export into `directory`; returns it as a str.

    Args:
        directory: made if it is not there.
        shape: a name in SHAPES.
        seed: of the weights.
        tokenizer: whether to write one too.
        overrides: fields of config.json that differ from the shape's.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = SHAPES[shape] | overrides
    end = make_tokenizer(directory, config["vocab_size"]) if tokenizer else config["vocab_size"] - 1
    config |= {"bos_token_id": end, "eos_token_id": end}
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config["dtype"])
    tensors = {name: draw(name, size, generator).to(dtype) for name, size in tensor_shapes(config).items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return str(directory)


def main() -> None:
    """Write one export and say how large it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="sansho-500m")
    parser.add_argument("--output", required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    directory = make_export(args.output, args.shape, args.seed)
    count = sum(math.prod(size) for size in tensor_shapes(SHAPES[args.shape]).values())
    size = (Path(directory) / "model.safetensors").stat().st_size
    print(f"{directory}: {count:,} parameters, model.safetensors {size:,} bytes")


if __name__ == "__main__":
    main()
