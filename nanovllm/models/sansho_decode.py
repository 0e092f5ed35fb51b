"""Sansho's layers as runs for persistent kernels, where that is possible: whole, in bfloat16 and unquantized."""

from __future__ import annotations

from torch import nn

from nanovllm.kernels.persistent_decode import Run
from nanovllm.layers.linear import Linear
from nanovllm.models.sansho_config import SanshoConfig
from nanovllm.quantization.base import UNQUANTIZED


class Runs:
    """decoder: the self-decoder's layers. cross: all others, of which a launch takes those up to an attention, and
    attention itself is none's: cross-Mamba layers that follow one another (how many), and the attention behind."""

    def __init__(self, layers: nn.ModuleList, config: SanshoConfig, programs: int | None) -> None:
        d, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        q, kv = config.num_attention_heads * dim, config.num_key_value_heads * dim
        looped, crossing = layers[: config.num_self_decoder_layers], layers[config.num_self_decoder_layers :]
        channels = config.mamba_d_ssm
        width = 2 * d + inner + q
        self.decoder = Run([_parts(layer) for layer in looped], width + q + 2 * kv, inner, programs)
        memory = 2 * channels + config.mamba_d_state
        self.cross = Run([_parts(layer) for layer in crossing], width + memory, inner, programs)
        self.stretches: list[tuple[int, nn.Module | None]] = [(0, None)]
        for layer in crossing:
            count, _ = self.stretches[-1]
            if layer.mixer == "cross_attn":
                self.stretches[-1:] = [(count, layer.cross_attn), (0, None)]
            else:
                self.stretches[-1] = (count + 1, None)


def make_runs(layers: nn.ModuleList, config: SanshoConfig, programs: int | None = None) -> Runs | None:
    """None where kernels do not know such layers: if any is quantized or cut, or states have several groups. Parameters
    must stay where they are from then on."""
    linear = [layer for layer in layers.modules() if isinstance(layer, Linear)]
    whole = all(layer.method is UNQUANTIZED and not layer.is_cut for layer in linear)
    return Runs(layers, config, programs) if whole and config.mamba_n_groups == 1 else None


def _parts(layer: nn.Module) -> list[nn.Parameter | None]:
    """As `Run` takes them."""
    mixer, mlp = getattr(layer, layer.mixer), layer.mlp
    norms = [getattr(mixer, name, None) for name in ("q_norm", "k_norm")]
    if layer.mixer == "cross_mamba":
        norms = [mixer.norm, None]
    out = mixer.out_proj if layer.mixer == "cross_mamba" else mixer.o_proj
    modules = [layer.input_layernorm, getattr(mixer, layer.reads), *norms, out, layer.post_attention_layernorm]
    return [None if module is None else module.weight for module in (*modules, mlp.gate_up_proj, mlp.down_proj)]
