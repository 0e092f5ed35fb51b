"""Sansho in plain torch, written to be read: one sequence, all of it at once, no cache, in float32.

It loads an export and generates by itself, and is what the serving model is tested against.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from nanovllm.models.sansho_config import SanshoConfig


class SanshoReference:
    """An export as its tensors by name, and the forward pass over them.

    Args:
        directory: of the export.
        device: where to compute.

    Raises:
        ValueError: config.json does not describe a model that is defined.
        KeyError: a tensor that is needed is not there.
    """

    def __init__(self, directory: str, device: str = "cpu") -> None:
        self.config = SanshoConfig.from_dict(json.loads((Path(directory) / "config.json").read_text(encoding="utf-8")))
        self.weights: dict[str, Tensor] = {}
        for file in sorted(Path(directory).glob("*.safetensors")):
            self.weights |= {name: tensor.float() for name, tensor in load_file(file, device=device).items()}

    def __getitem__(self, name: str) -> Tensor:
        return self.weights[f"model.{name}"]

    @torch.inference_mode()
    def greedy(self, prompt_ids: list[int], max_tokens: int, stop_ids: tuple[int, ...] = ()) -> list[int]:
        """Most likely continuation of one prompt; an id of stop_ids ends it and is its last entry."""
        ids = list(prompt_ids)
        for _ in range(max_tokens):
            ids.append(int(self.logits(ids)[-1].argmax()))
            if ids[-1] in stop_ids:
                break
        return ids[len(prompt_ids) :]

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> Tensor:
        """[len(ids)] token ids to [len(ids), vocab_size]."""
        c = self.config
        h = self["embed_tokens.weight"][torch.tensor(ids, device=self["norm.weight"].device)]  # [T, d]
        for _ in range(c.universal_loop):
            for i in range(c.num_self_decoder_layers):
                h = h + self.self_attention(i, self.norm(h, f"layers.{i}.input_layernorm"))
                h = h + self.swiglu(i, self.norm(h, f"layers.{i}.post_attention_layernorm"))

        memory = self.norm(h, "yoco_norm")
        k = self.heads(memory, "yoco_k_proj")  # [T, KVx, hd]
        v = self.heads(memory, "yoco_v_proj")
        k = self.norm(k, "yoco_k_norm") if c.qk_norm else k

        x = h
        for i in range(c.num_self_decoder_layers, c.num_hidden_layers):
            u = self.norm(x, f"layers.{i}.input_layernorm")
            if c.layer_types[i] == "cross_attention":
                x = x + self.cross_attention(i, u, k, v)
            else:
                x = x + self.cross_mamba(i, u, memory)
            x = x + self.swiglu(i, self.norm(x, f"layers.{i}.post_attention_layernorm"))
        head = self["embed_tokens.weight"] if c.tie_word_embeddings else self.weights["lm_head.weight"]
        return self.norm(x, "norm") @ head.T

    def self_attention(self, i: int, u: Tensor) -> Tensor:
        """Attention of each token over its last W ones, itself included."""
        name = f"layers.{i}.self_attn"
        q, k, v = (self.heads(u, f"{name}.{part}_proj") for part in "qkv")
        if self.config.qk_norm:
            q, k = self.norm(q, f"{name}.q_norm"), self.norm(k, f"{name}.k_norm")
        out = attention(self.rope(q), self.rope(k), v, self.config.sliding_window)
        return out @ self[f"{name}.o_proj.weight"].T

    def cross_attention(self, i: int, u: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention over the shared keys of all tokens so far, without rotary."""
        name = f"layers.{i}.cross_attn"
        q = self.heads(u, f"{name}.q_proj")
        q = self.norm(q, f"{name}.q_norm") if self.config.qk_norm else q
        return attention(q, k, v, window=len(u)) @ self[f"{name}.o_proj.weight"].T

    def cross_mamba(self, i: int, u: Tensor, memory: Tensor) -> Tensor:
        """A state that is driven by the memory, read by this layer's own hidden states."""
        c, name = self.config, f"layers.{i}.cross_mamba"
        e, g, n, p = c.mamba_d_ssm, c.mamba_n_groups, c.mamba_d_state, c.mamba_d_head
        z, read = (u @ self[f"{name}.in_proj.weight"].T).split((e, g * n), dim=-1)
        xb, dt = (memory @ self[f"{name}.memory_proj.weight"].T).split((e + g * n, e // p), dim=-1)

        bias = self[f"{name}.conv1d.bias"] if c.mamba_conv_bias else None
        past = F.pad(xb.T, (c.mamba_d_conv - 1, 0))  # [E + GN, T + W_c - 1]
        xb = F.silu(F.conv1d(past, self[f"{name}.conv1d.weight"], bias, groups=len(past)).T)
        x = xb[:, :e].unflatten(-1, (-1, p))  # [T, heads, P]
        repeats = x.shape[1] // g  # head h uses group h // (heads / G)
        b = xb[:, e:].unflatten(-1, (g, n)).repeat_interleave(repeats, 1)  # [T, heads, N]
        read = read.unflatten(-1, (g, n)).repeat_interleave(repeats, 1)
        dt = F.softplus(dt + self[f"{name}.dt_bias"])  # [T, heads]
        decay = torch.exp(dt * -torch.exp(self[f"{name}.A_log"]))

        state = x.new_zeros(*x.shape[1:], n)  # [heads, P, N]
        y = torch.empty_like(x)
        for t in range(len(x)):
            state = decay[t, :, None, None] * state + (dt[t, :, None] * x[t])[:, :, None] * b[t, :, None, :]
            y[t] = (state @ read[t, :, :, None])[..., 0]
        y = (y + self[f"{name}.D"][:, None] * x).flatten(1) * F.silu(z)
        y = F.rms_norm(y.unflatten(-1, (g, e // g)), (e // g,), eps=c.rms_norm_eps).flatten(1)
        return (self[f"{name}.norm.weight"] * y) @ self[f"{name}.out_proj.weight"].T

    def swiglu(self, i: int, u: Tensor) -> Tensor:
        """The gated MLP of any layer."""
        gate, up = (u @ self[f"layers.{i}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        return (F.silu(gate) * up) @ self[f"layers.{i}.mlp.down_proj.weight"].T

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm over the last dimension."""
        return F.rms_norm(x, x.shape[-1:], self[f"{name}.weight"], self.config.rms_norm_eps)

    def heads(self, x: Tensor, name: str) -> Tensor:
        """A projection cut into heads: [T, d] to [T, heads, hd]."""
        return (x @ self[f"{name}.weight"].T).unflatten(-1, (-1, self.config.head_dim))

    def rope(self, x: Tensor) -> Tensor:
        """Turn the pairs (x[i], x[i + hd/2]) of [T, heads, hd] by angles that grow with the position."""
        half = x.shape[-1] // 2
        frequency = self.config.rope["rope_theta"] ** (-torch.arange(half, device=x.device) / half)
        angle = torch.outer(torch.arange(len(x), device=x.device).float(), frequency)[:, None, :]  # [T, 1, hd/2]
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1)


def attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Queries [T, H, hd] over keys and values [T, KV, hd]; token i sees j where i - window < j <= i. [T, H * hd]."""
    k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
    i, j = torch.arange(len(q), device=q.device)[:, None], torch.arange(len(q), device=q.device)[None]
    scores = scores.masked_fill((j > i) | (j <= i - window), -torch.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)
