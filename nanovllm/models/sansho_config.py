"""config.json of a Sansho export, read once and refused where it does not fit: nothing is guessed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nanovllm.models.config import as_id_set, check_divides, need, rope_parameters

_SELF, _MAMBA, _ATTENTION = "sliding_attention", "cross_mamba", "cross_attention"
_COUNTS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_self_decoder_layers"),
    *("universal_loop", "num_attention_heads", "num_key_value_heads", "head_dim", "cross_num_key_value_heads"),
    *("sliding_window", "max_position_embeddings", "mamba_d_ssm", "mamba_d_state", "mamba_d_head"),
    *("mamba_n_groups", "mamba_d_conv", "mamba_chunk_size"),
)
# Fields whose other values mean another model.
_ONLY = {"cross_mamba_type": "memory_ssm", "mamba_ssm_cache_dtype": "float32", "hidden_act": "silu"}

# The retained export's shape.
SANSHO_500M = {
    "architectures": ["SanshoForCausalLM"],
    "model_type": "sansho",
    "vocab_size": 50257,
    "hidden_size": 768,
    "intermediate_size": 2368,
    "num_hidden_layers": 40,
    "num_self_decoder_layers": 20,
    "universal_loop": 3,
    "layer_types": ["sliding_attention"] * 20 + (["cross_mamba"] * 4 + ["cross_attention"]) * 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "cross_num_key_value_heads": 3,
    "sliding_window": 256,
    "rope_theta": 10000.0,
    "qk_norm": True,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
    "mamba_d_ssm": 1536,
    "mamba_d_state": 128,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_conv_bias": True,
    "mamba_chunk_size": 256,
    "mamba_ssm_cache_dtype": "float32",
    "cross_mamba_type": "memory_ssm",
    "dtype": "bfloat16",
}


@dataclass(frozen=True)
class SanshoConfig:
    """Shape of a Sansho model; fields are named as in config.json, and the derived ones come last.

    layer_types: of all layers; the first num_self_decoder_layers run universal_loop times.
    rope: {"rope_type": "default", "rope_theta": ...}.
    mamba_heads: E / P.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_self_decoder_layers: int
    universal_loop: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    cross_num_key_value_heads: int
    sliding_window: int
    max_position_embeddings: int
    mamba_d_ssm: int
    mamba_d_state: int
    mamba_d_head: int
    mamba_n_groups: int
    mamba_d_conv: int
    mamba_chunk_size: int
    layer_types: tuple[str, ...]
    rope: dict[str, Any]
    qk_norm: bool
    rms_norm_eps: float
    tie_word_embeddings: bool
    mamba_conv_bias: bool
    dtype: str | None
    eos_token_ids: frozenset[int]

    def check_ranks(self, size: int) -> None:
        """As `ModelConfig.check_ranks`; attention is not divided where its heads cannot be."""
        heads = {"mamba_d_ssm / mamba_d_head": self.mamba_heads}
        check_divides(size, intermediate_size=self.intermediate_size, **heads)
        if self.mamba_n_groups % size and size % self.mamba_n_groups:
            raise ValueError(
                f"tensor_parallel_size={size} is not allowed: it neither divides mamba_n_groups="
                f"{self.mamba_n_groups} of config.json nor is a multiple of it; change tensor_parallel_size"
            )

    @property
    def max_model_len(self) -> int:
        """Longest context the checkpoint states."""
        return self.max_position_embeddings

    @property
    def mamba_heads(self) -> int:
        """Heads of a cross_mamba layer."""
        return self.mamba_d_ssm // self.mamba_d_head

    @property
    def mamba_layers(self) -> list[int]:
        """Indices of the cross_mamba layers."""
        return [i for i, kind in enumerate(self.layer_types) if kind == _MAMBA]

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> SanshoConfig:
        """Read the fields of a config.json.

        Raises:
            ValueError: a field is missing, or its value is not one that is defined; the message names it.
        """
        for name, value in _ONLY.items():
            if raw.get(name, value) != value:
                raise ValueError(f"config.json: {name}={raw[name]!r} is not supported: only {value!r}")
        need(raw, "cross_mamba_type")
        for name in _COUNTS:
            if isinstance(need(raw, name), bool) or not isinstance(raw[name], int) or raw[name] < 1:
                raise ValueError(f"config.json: {name}={raw[name]!r} is not allowed: an integer of at least 1")
        for name in ("qk_norm", "tie_word_embeddings", "mamba_conv_bias"):
            if not isinstance(need(raw, name), bool):
                raise ValueError(f"config.json: {name}={raw[name]!r} is not allowed: true or false")
        rope = rope_parameters(raw)
        if rope["rope_type"] != "default":
            raise ValueError(f"config.json: rope type {rope['rope_type']!r} is not supported: only 'default'")
        config = cls(
            architecture=raw["architectures"][0],
            **{name: raw[name] for name in _COUNTS},
            layer_types=tuple(need(raw, "layer_types")),
            rope=rope,
            qk_norm=raw["qk_norm"],
            rms_norm_eps=need(raw, "rms_norm_eps"),
            tie_word_embeddings=raw["tie_word_embeddings"],
            mamba_conv_bias=raw["mamba_conv_bias"],
            dtype=raw.get("dtype") or raw.get("torch_dtype"),
            eos_token_ids=as_id_set(raw.get("eos_token_id")),
        )
        config._check_layers()
        config._check_multiples()
        return config

    def _check_layers(self) -> None:
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"config.json: layer_types has {len(self.layer_types)} entries, num_hidden_layers is "
                f"{self.num_hidden_layers}"
            )
        for i, kind in enumerate(self.layer_types):
            allowed = (_SELF,) if i < self.num_self_decoder_layers else (_MAMBA, _ATTENTION)
            if kind not in allowed:
                raise ValueError(
                    f"config.json: layer_types[{i}]={kind!r} is not supported there: {' or '.join(map(repr, allowed))}"
                )

        if not self.mamba_layers:
            raise ValueError(f"config.json: layer_types has no {_MAMBA!r}, of which this model needs one at least")

    def _check_multiples(self) -> None:
        if self.head_dim % 2:
            raise ValueError(f"config.json: head_dim={self.head_dim} is odd, but rotary turns pairs")
        for name, of in (
            ("num_attention_heads", "num_key_value_heads"),
            ("num_attention_heads", "cross_num_key_value_heads"),
            ("mamba_d_ssm", "mamba_d_head"),
            ("mamba_heads", "mamba_n_groups"),
        ):
            value, divisor = getattr(self, name), getattr(self, of)
            if value % divisor:
                raise ValueError(f"config.json: {name}={value} is not a multiple of {of}={divisor}")
