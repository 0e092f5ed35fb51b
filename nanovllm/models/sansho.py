"""Sansho: a looped self-decoder over sliding windows writes one memory; a cross-decoder reads it by attention and
through Mamba-2 states (YOCO: arXiv 2405.05254, Universal YOCO: arXiv 2604.01220).

Nothing that a later token needs depends on the cross-decoder. So a prefill runs it on the rows alone whose logits
somebody wants: the keys, values and states that it reads are made from the memory of all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from nanovllm import distributed
from nanovllm.attention.base import KVCache
from nanovllm.attention.window import WindowMetadata, window_attention
from nanovllm.cache_spec import CacheSpec, PagedKVSpec, StateSpec, WindowKVSpec
from nanovllm.distributed import ALONE, Cut
from nanovllm.kernels.qkv import split_norm_rotate_write
from nanovllm.kernels.ssd import Piece
from nanovllm.layers.attention import Attention
from nanovllm.layers.embed_head import Embedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import Linear
from nanovllm.layers.mamba import CrossMamba, MambaCuts, MambaState, MemorySide, Scan, Stacked, StateRows
from nanovllm.layers.rotary_embedding import Rotary, RotaryEmbedding
from nanovllm.models.decoder import DecoderOptions, SwiGLU
from nanovllm.models.sansho_config import SanshoConfig


@dataclass(slots=True)
class SanshoCaches:
    """windows: one ring cache per (loop, self layer); shared: of all cross_attention layers; state: of all rows."""

    windows: list[KVCache]
    shared: KVCache
    state: MambaState


@dataclass(slots=True)
class SanshoStep:
    """Where a step's T tokens belong, beside the attention metadata in the context, which is that of the rows that
    meet the cross-decoder.

    window: of all window caches.
    shared_slots: [T] int64, where their shared keys and values are written; -1: nowhere.
    rows: [R] int64, of the tokens that meet the cross-decoder; all of a decode step's.
    pieces: of a prefill, one where `last` is None; None for a decode step.
    last: [R] int64, of a prefill, those R tokens, each its row's last one in this step; None for all T.
    """

    window: WindowMetadata
    shared_slots: torch.Tensor
    rows: torch.Tensor
    pieces: list[Piece] | None = None
    last: torch.Tensor | None = None


def _attention_cuts(config: SanshoConfig, kv_heads: int) -> tuple[Cut, Cut]:
    """Of queries and of keys, by heads; where these cannot be divided every rank has them all, as attention is a small
    part of this model."""
    group, heads = distributed.current(), config.num_attention_heads
    if heads % group.size or (kv_heads % group.size and group.size % kv_heads):
        group = ALONE
    return group.cut((heads * config.head_dim, heads)), group.cut((kv_heads * config.head_dim, kv_heads))


def _mamba_sections(config: SanshoConfig) -> tuple[tuple[int, int], tuple[int, int]]:
    """Channels and their units of x (or z), and of B (or C)."""
    groups = config.mamba_n_groups
    return (config.mamba_d_ssm, config.mamba_heads), (groups * config.mamba_d_state, groups)


def _mamba_cuts(config: SanshoConfig) -> MambaCuts:
    group, (x, b) = distributed.current(), _mamba_sections(config)
    return MambaCuts(group.cut((config.mamba_heads, config.mamba_heads)), group.cut(x), group.cut(x, b))


class SelfAttention(nn.Module):
    """Attention over the window cache of one loop."""

    def __init__(self, config: SanshoConfig) -> None:
        super().__init__()
        dim = config.head_dim
        q, kv = _attention_cuts(config, config.num_key_value_heads)
        self.num_heads, self.num_kv_heads = q.size // dim, kv.size // dim
        self.qkv_proj = Linear(config.hidden_size, {"q_proj": q, "k_proj": kv, "v_proj": kv})
        self.q_norm = RMSNorm(dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(dim, config.rms_norm_eps) if config.qk_norm else None
        self.o_proj = Linear(q, {"o_proj": config.hidden_size})

    def forward(self, x: torch.Tensor, rotary: Rotary, ring: KVCache, window: WindowMetadata) -> torch.Tensor:
        norm = (None, None, 0.0) if self.q_norm is None else (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        return self.o_proj(window_attention(self.qkv_proj(x), self.num_heads, norm, rotary, ring, window).flatten(1))


class CrossAttention(nn.Module):
    """Queries of its own over the shared cache."""

    def __init__(self, config: SanshoConfig) -> None:
        super().__init__()
        dim = config.head_dim
        q, kv = _attention_cuts(config, config.cross_num_key_value_heads)
        self.q_proj = Linear(config.hidden_size, {"q_proj": q})
        self.q_norm = RMSNorm(dim, config.rms_norm_eps) if config.qk_norm else None
        self.attn = Attention(q.size // dim, kv.size // dim, dim)
        self.o_proj = Linear(q, {"o_proj": config.hidden_size})

    def forward(self, x: torch.Tensor, shared: KVCache) -> torch.Tensor:
        q = self.q_proj(x).unflatten(-1, (self.attn.num_heads, self.attn.head_dim))
        return self.o_proj(self.attn(q if self.q_norm is None else self.q_norm(q), shared))


class Layer(nn.Module):
    """A mixer, called as layer_types says, and an MLP, each behind a norm; the residual travels beside."""

    def __init__(self, config: SanshoConfig, kind: str) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if kind == "sliding_attention":
            self.self_attn = SelfAttention(config)
            self.mixer, self.reads = "self_attn", "qkv_proj"
        elif kind == "cross_attention":
            self.cross_attn = CrossAttention(config)
            self.mixer, self.reads = "cross_attn", "q_proj"
        else:
            cuts, groups = _mamba_cuts(config), config.mamba_n_groups
            self.cross_mamba = CrossMamba(config.hidden_size, cuts, groups, config.rms_norm_eps)
            self.mixer, self.reads = "cross_mamba", "in_proj"
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config, DecoderOptions())

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, *context: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mixer = getattr(self, self.mixer)
        x, residual = self.input_layernorm.add(x, residual, getattr(mixer, self.reads).input_digits(x))
        x = mixer(x, *context)
        x, residual = self.post_attention_layernorm.add(x, residual, self.mlp.gate_up_proj.input_digits(x))
        return self.mlp(x), residual


class SanshoModel(nn.Module):
    """Embedding, self-decoder, memory, cross-decoder, final norm."""

    def __init__(self, config: SanshoConfig, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = Embedding(config.vocab_size, hidden)
        self.layers = nn.ModuleList(Layer(config, kind) for kind in config.layer_types)
        self.rotary = RotaryEmbedding(config.head_dim, max_positions, config.rope, dtype)
        self.norm = RMSNorm(hidden, eps)

        group, (_, shared) = distributed.current(), _attention_cuts(config, config.cross_num_key_value_heads)
        self.num_shared_heads = shared.size // config.head_dim
        self.yoco_norm = RMSNorm(hidden, eps)
        self.yoco_kv_proj = Linear(hidden, {"yoco_k_proj": shared, "yoco_v_proj": shared})
        self.yoco_k_norm = RMSNorm(config.head_dim, eps) if config.qk_norm else None

        cuts, heads = _mamba_cuts(config), config.mamba_heads
        paths = [f"layers.{i}.cross_mamba" for i in config.mamba_layers]
        memory = group.cut(*_mamba_sections(config), (heads, heads))
        self.memory_proj = Linear(hidden, {f"{path}.memory_proj": memory for path in paths})
        conv: dict[str, tuple[int, ...]] = {"weight": (1, config.mamba_d_conv)}
        if config.mamba_conv_bias:
            conv["bias"] = ()
        self.memory_conv = Stacked([f"{path}.conv1d" for path in paths], cuts.conv, conv)
        self.memory_ssm = Stacked(paths, cuts.heads, dict.fromkeys(("A_log", "D", "dt_bias"), ()), torch.float32)
        num_groups = max(1, config.mamba_n_groups // group.size)
        self.memory_side = MemorySide(self.memory_proj, self.memory_conv, self.memory_ssm, num_groups)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: SanshoStep, caches: SanshoCaches
    ) -> torch.Tensor:
        x, residual = self.embed_tokens(token_ids), None
        rotary, depth = self.rotary.at(positions), self.config.num_self_decoder_layers
        for i, ring in enumerate(caches.windows):  # the layers once per loop, with a cache of its own each time
            x, residual = self.layers[i % depth](x, residual, rotary, ring, step.window)
        memory, hidden = self.yoco_norm.add(x, residual)
        self._write_shared(memory, step.shared_slots, caches.shared)

        side, state = self.memory_side, caches.state
        if step.pieces is None:
            source = side.step(memory, step.rows, state)
        elif step.last is None:
            source = side.scan(memory, step.pieces[0], state)
        else:
            source = side.absorb(memory, step.pieces, state, step.last, step.rows)
            hidden = hidden[step.last]
        return self._cross(hidden, source, caches.shared)

    def _write_shared(self, memory: torch.Tensor, slots: torch.Tensor, shared: KVCache) -> None:
        norm = (None, None, 0.0) if (k_norm := self.yoco_k_norm) is None else (*2 * (k_norm.weight,), k_norm.eps)
        kv_heads = self.config.cross_num_key_value_heads
        split_norm_rotate_write(self.yoco_kv_proj(memory), 0, kv_heads, *norm, None, None, None, *shared, slots)

    def _cross(self, x: torch.Tensor, source: StateRows | Scan, shared: KVCache) -> torch.Tensor:
        residual, index = None, 0
        if not len(x):
            return x
        for layer in self.layers[self.config.num_self_decoder_layers :]:
            if layer.mixer == "cross_attn":
                x, residual = layer(x, residual, shared)
            else:
                x, residual = layer(x, residual, source, index)
                index += 1
        return self.norm.add(x, residual)[0]


class SanshoForCausalLM(nn.Module):
    """Hidden states of the wanted rows by `forward`, their logits by `compute_logits`."""

    def __init__(self, config: SanshoConfig, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.model = SanshoModel(config, max_positions, dtype)
        self.lm_head = None if config.tie_word_embeddings else Embedding(config.vocab_size, config.hidden_size)

    @property
    def unneeded_tensors(self) -> frozenset[str]:
        """None: an export with a tensor too many is not this model."""
        return frozenset()

    def cache_specs(self, dtype_size: int) -> list[CacheSpec]:
        """Window caches by loop and layer, the shared one, then the convolutions' and the scans' states."""
        c, model = self.config, self.model
        window = WindowKVSpec(c.sliding_window, model.layers[0].self_attn.num_kv_heads, c.head_dim, dtype_size)
        shared = PagedKVSpec(model.num_shared_heads, c.head_dim, dtype_size)
        conv = StateSpec((*model.memory_conv.weight.shape[:2], c.mamba_d_conv - 1), dtype_size)
        ssm = StateSpec((*model.memory_ssm.D.shape, c.mamba_d_head, c.mamba_d_state), 4)
        return [window] * (c.universal_loop * c.num_self_decoder_layers) + [shared, conv, ssm]

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: SanshoStep, caches: SanshoCaches
    ) -> torch.Tensor:
        """[T] token ids and positions to [R, hidden_size]."""
        return self.model(token_ids, positions, step, caches)

    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[R, hidden_size] to [R, vocab_size], in `out` if given."""
        return (self.lm_head or self.model.embed_tokens).logits(hidden, out)
