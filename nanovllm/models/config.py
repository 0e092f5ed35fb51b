"""A checkpoint's config.json, read once into one typed record; transformers 4 and 5 spell some fields apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nanovllm.layers.rotary_embedding import SUPPORTED_ROPE_TYPES

_ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder-only model. rope: parameters with "rope_type" and "rope_theta" always there.

    dtype is None where the checkpoint states none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    rope: dict[str, Any]
    dtype: str | None
    eos_token_ids: frozenset[int]

    @property
    def max_model_len(self) -> int:
        """Longest context the checkpoint states; yarn stretches the original one by its factor."""
        if self.rope["rope_type"] == "yarn":
            stretched = int(self.rope["original_max_position_embeddings"] * self.rope["factor"])
            return max(stretched, self.max_position_embeddings)
        return self.max_position_embeddings

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> ModelConfig:
        """Read the fields of a config.json.

        Raises:
            ValueError: a needed field is missing, or its value is one this library does not implement.
        """
        _refuse_unsupported(raw)
        heads = need(raw, "num_attention_heads")
        hidden = need(raw, "hidden_size")
        config = cls(
            architecture=raw["architectures"][0],
            vocab_size=need(raw, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=need(raw, "intermediate_size"),
            num_hidden_layers=need(raw, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or hidden // heads,
            max_position_embeddings=need(raw, "max_position_embeddings"),
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            tie_word_embeddings=raw.get("tie_word_embeddings", False),
            attention_bias=raw.get("attention_bias", False),
            mlp_bias=raw.get("mlp_bias", False),
            rope=rope_parameters(raw),
            dtype=raw.get("dtype") or raw.get("torch_dtype"),
            eos_token_ids=as_id_set(raw.get("eos_token_id")),
        )
        if config.num_attention_heads % config.num_key_value_heads:
            raise ValueError(
                f"config.json: num_attention_heads={heads} is not a multiple of "
                f"num_key_value_heads={config.num_key_value_heads}"
            )
        return config

    def check_ranks(self, size: int) -> None:
        """Refuse a number of ranks that this model cannot be cut for.

        Raises:
            ValueError: names the count that does not divide.
        """
        check_divides(size, num_attention_heads=self.num_attention_heads, intermediate_size=self.intermediate_size)
        if self.num_key_value_heads % size and size % self.num_key_value_heads:
            raise ValueError(
                f"tensor_parallel_size={size} is not allowed: it neither divides num_key_value_heads="
                f"{self.num_key_value_heads} of config.json nor is a multiple of it; change tensor_parallel_size"
            )


def check_divides(size: int, **counts: int) -> None:
    """Raise ValueError unless each of `counts`, fields of config.json, is a multiple of tensor_parallel_size."""
    for name, count in counts.items():
        if count % size:
            fitting = ", ".join(str(n) for n in range(1, 9) if count % n == 0)
            raise ValueError(
                f"tensor_parallel_size={size} is not allowed: {name}={count} of config.json is not a multiple of it; "
                f"change it to one of {fitting}"
            )


def as_id_set(ids: int | list[int] | None) -> frozenset[int]:
    """Token ids of a config field that holds one id, several, or null."""
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def need(raw: dict[str, Any], name: str) -> Any:
    """A field that the model cannot do without; ValueError where it is missing or null."""
    if raw.get(name) is None:
        raise ValueError(f"config.json has no {name!r}, which this model needs")
    return raw[name]


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"config.json: hidden_act={raw['hidden_act']!r} is not supported: only 'silu'")
    layer_types = set(raw.get("layer_types") or []) - {"full_attention"}
    if layer_types:
        raise ValueError(f"config.json: layer_types {sorted(layer_types)} are not supported: only 'full_attention'")
    if raw.get("use_sliding_window"):
        raise ValueError("config.json: use_sliding_window=true is not supported: only full attention")


def rope_parameters(raw: dict[str, Any]) -> dict[str, Any]:
    """Checked rotary parameters. transformers 5 keeps all in `rope_parameters`; 4 keeps `rope_theta` beside
    `rope_scaling` (null for none), whose type is under "rope_type" or, before that, "type"."""
    nested = [name for name, value in (raw.get("rope_parameters") or {}).items() if isinstance(value, dict)]
    if nested:
        raise ValueError(f"config.json: rope_parameters per layer type ({', '.join(nested)}) are not supported")
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    rope["rope_theta"] = rope.get("rope_theta") or raw.get("rope_theta") or 10000.0
    if rope["rope_type"] not in SUPPORTED_ROPE_TYPES:
        raise ValueError(
            f"config.json: rope type {rope['rope_type']!r} is not supported: one of {', '.join(SUPPORTED_ROPE_TYPES)}"
        )
    if rope["rope_type"] == "yarn":
        rope.setdefault("original_max_position_embeddings", raw.get("max_position_embeddings"))
    missing = [name for name in _ROPE_NEEDS[rope["rope_type"]] if rope.get(name) is None]
    if missing:
        raise ValueError(f"config.json: rope type {rope['rope_type']!r} lacks {', '.join(missing)}")
    partial = raw.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ValueError(f"config.json: partial_rotary_factor={partial} is not supported: only 1.0")
    return rope
