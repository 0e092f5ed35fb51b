"""From a model directory (or the name of a built-in shape) to a model class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nanovllm.config import read_json
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalDecoder
from nanovllm.models.llama import LlamaForCausalLM, Qwen2ForCausalLM
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.models.sansho import SanshoForCausalLM
from nanovllm.models.sansho_config import SANSHO_500M, SanshoConfig

ARCHITECTURES: dict[str, type[CausalDecoder] | type[SanshoForCausalLM]] = {
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "LlamaForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "SanshoForCausalLM": SanshoForCausalLM,
}


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
    }


# Shapes of public checkpoints, for timing with random weights where the checkpoint itself is not at hand.
BUILTIN_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, tied=False),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, tied=False),
    "sansho-500m": SANSHO_500M,
}


def load_raw_config(model: str, load_format: str) -> dict[str, Any]:
    """config.json of a model directory, or with load_format "dummy" also a built-in shape.

    Raises:
        ValueError: `model` is neither.
    """
    if load_format == "dummy" and model in BUILTIN_SHAPES:
        return BUILTIN_SHAPES[model]
    if not Path(model).is_dir():
        hint = f"; with load_format='dummy' also one of {', '.join(BUILTIN_SHAPES)}"
        raise ValueError(f"model={model!r} is not a model directory: no such directory{hint}")
    return read_json(Path(model) / "config.json")


def resolve_model(
    raw: dict[str, Any],
) -> tuple[type[CausalDecoder] | type[SanshoForCausalLM], ModelConfig | SanshoConfig]:
    """Model class and typed config for a raw config.json.

    Raises:
        ValueError: an architecture, or a value in the config, that is not implemented.
    """
    names = raw.get("architectures") or []
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        raise ValueError(
            f"config.json: architectures={names} is not supported: exactly one of {', '.join(ARCHITECTURES)}"
        )
    config_class = SanshoConfig if ARCHITECTURES[names[0]] is SanshoForCausalLM else ModelConfig
    return ARCHITECTURES[names[0]], config_class.from_dict(raw)
