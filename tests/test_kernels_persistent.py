"""Decode steps of a few rows in persistent kernels, against the layers one by one: in bfloat16 as a rival, in float32
as what is exact. Interpreted, one program does everything; on a GPU there is one on each multiprocessor."""

import multiprocessing
import sys
import time
from dataclasses import replace

import pytest
import torch
from checkpoints import load_script
from triton.runtime import interpreter
from triton_tools import COMPILED, DEVICES, INTERPRETED, check_compiles, interpreted, record_launches

from nanovllm.attention.base import KVCache
from nanovllm.attention.window import Ring, WindowMetadata
from nanovllm.kernels import cross_decoder_triton, self_decoder_triton
from nanovllm.kernels.persistent_decode import MOST_ROWS, can_persist
from nanovllm.layers.mamba import MambaState
from nanovllm.loader import build_model
from nanovllm.models import sansho
from nanovllm.models.sansho_config import SanshoConfig
from nanovllm.models.sansho_decode import Runs, make_runs
from nanovllm.quantization.int8 import Int8

ROWS, STEPS, BLOCK, PROGRAMS = 10, 3, 4, 5
FORK = multiprocessing.get_context("fork")
PLAIN = {"mamba_n_groups": 1, "layer_types": ["sliding_attention"] * 2 + ["cross_mamba"] * 3, "num_hidden_layers": 5}
SHAPES = {
    "tiny": PLAIN,
    "no_qk_norm": PLAIN | {"qk_norm": False},
    "wide": PLAIN | {"intermediate_size": 1100, "num_key_value_heads": 6},  # more than one step along K
}
CASES = [
    (shape, n) for i, shape in enumerate(SHAPES) for j, n in enumerate((1, 3, MOST_ROWS)) if not INTERPRETED or i == j
]
on_each_device = pytest.mark.parametrize("device", DEVICES)


def model_of(shape, device, dtype):
    """A model whose numbers neither vanish nor grow, the same in every dtype; without attention in its cross-decoder,
    so that a step needs no backend."""
    config = SanshoConfig.from_dict(load_script("make_sansho_export").TINY | SHAPES[shape])
    model = build_model(lambda: sansho.SanshoForCausalLM(config, 64, dtype), dtype, torch.device(device))
    draw = torch.Generator().manual_seed(5)
    for param in model.parameters():
        noise = torch.randn(param.shape, generator=draw)
        noise = noise * param.shape[-1] ** -0.5 if param.dim() > 1 else 1 + noise / 4
        param.copy_(noise.bfloat16())
    return model.model


def caches_of(model, device, dtype):
    """Windows, states and inputs of convolutions that something has left there."""
    c, draw = model.config, torch.Generator().manual_seed(6)

    def noise(*shape, dtype=dtype):
        return torch.randn(shape, generator=draw).bfloat16().to(device, dtype)

    pages = ROWS * Ring(c.sliding_window, BLOCK).num_blocks
    loops, heads = c.universal_loop * c.num_self_decoder_layers, c.num_key_value_heads
    windows = KVCache(*(noise(loops, pages, BLOCK, heads, c.head_dim) for _ in range(2)))
    shared = KVCache(*(noise(4, BLOCK, c.cross_num_key_value_heads, c.head_dim) for _ in range(2)))
    layers, channels = model.memory_conv.weight.shape[:2]
    ssm = noise(ROWS, layers, c.mamba_heads, c.mamba_d_head, c.mamba_d_state, dtype=torch.float32)
    return sansho.SanshoCaches(windows, shared, MambaState(noise(ROWS, layers, channels, c.mamba_d_conv - 1), ssm))


def decode(model, device, dtype, rows, runs=None):
    """Hidden states of STEPS steps of these rows, whose positions differ, and the caches."""
    caches, found = caches_of(model, device, dtype), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sansho, "can_persist", lambda x: runs is not None)
        model._runs = runs
        index = torch.tensor(rows, device=device)
        for i in range(STEPS):
            step = sansho.SanshoStep(
                WindowMetadata(model.config.sliding_window, rows=index), torch.full_like(index, -1), index
            )
            found.append(model(5 * index + i, 3 * index + i, step, caches))
    return torch.stack(found), caches


def rms(got, exact):
    return (got.double() - exact.double()).square().mean().sqrt().item()


def assert_no_worse(got, rival, exact):
    """By root mean squares: errors have come a long way, and whose largest is larger is chance."""
    ours, theirs = rms(got, exact), rms(rival, exact)
    assert ours <= 1.5 * theirs, f"error {ours:.3e}, layer by layer {theirs:.3e}"


@on_each_device
@pytest.mark.parametrize(("shape", "num_rows"), CASES)
def test_steps_are_as_exact_as_layer_by_layer(device, shape, num_rows):
    """Hidden states, and what the rows leave behind; other rows' caches stay. Tags pass their highest on the way."""
    rows = [7, 0, 9, 4, 2, 1, 8, 3][:num_rows]
    half = model_of(shape, device, torch.bfloat16)
    runs = Runs(half.layers, half.config, 1 if INTERPRETED else None)
    for run in (runs.decoder, runs.cross):
        run._words[:, 0] = 65534
    ours, own = decode(half, device, torch.bfloat16, rows, runs)
    rival, theirs = decode(half, device, torch.bfloat16, rows)
    exact, true = decode(model_of(shape, device, torch.float32), device, torch.float32, rows)
    assert_no_worse(ours, rival, exact)
    for got, other, right in (
        *zip(own.windows, theirs.windows, true.windows, strict=True),
        (own.state.ssm, theirs.state.ssm, true.state.ssm),
    ):
        assert_no_worse(got, other, right)
    before, others = caches_of(half, device, torch.bfloat16), [row for row in range(ROWS) if row not in rows]
    assert torch.equal(own.state.ssm[others], before.state.ssm[others])
    for got, other, old in zip(own.windows, theirs.windows, before.windows, strict=True):
        assert torch.equal((got == old).all(-1), (other == old).all(-1))  # the same slots are written


class Forked:
    """A kernel whose programs are processes, so that they run at once, which the interpreter's do not."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*args, **options):
            for arg in args:
                if isinstance(arg, torch.Tensor):
                    arg.untyped_storage().share_memory_()
            processes = [FORK.Process(target=self.program, args=(i, args, options)) for i in range(grid[0])]
            for process in processes:
                process.start()
            ends = time.monotonic() + 60
            for process in processes:
                process.join(max(0, ends - time.monotonic()))
            codes = [process.exitcode for process in processes]
            for process in processes:
                process.kill()
            assert codes == [0] * grid[0], "a program failed, or waits for good"

        return launch

    def program(self, i, args, options):
        builder = interpreter.interpreter_builder
        builder.set_grid_idx = lambda *_: setattr(builder, "grid_idx", (i, 0, 0))
        interpreter.GridExecutor._restore_args_dev = lambda *_: None  # would write what others have changed meanwhile
        self.kernel[(1,)](*args, **options | {"AHEAD": False})  # a prefetch cannot be interpreted


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU programs run at once in every test")
def test_interpreted_programs_wait_for_each_other(monkeypatch):
    """Some have columns of every product, some of none."""
    for module, name in (
        (self_decoder_triton, "_self_decoder_kernel"),
        (cross_decoder_triton, "_cross_decoder_kernel"),
    ):
        monkeypatch.setattr(module, name, Forked(getattr(module, name)))
    half, rows = model_of("tiny", "cpu", torch.bfloat16), [3, 8]
    monkeypatch.setattr(sys.modules[__name__], "STEPS", 1)
    ours, own = decode(half, "cpu", torch.bfloat16, rows, Runs(half.layers, half.config, PROGRAMS))
    monkeypatch.undo()
    monkeypatch.setattr(sys.modules[__name__], "STEPS", 1)
    alone, theirs = decode(half, "cpu", torch.bfloat16, rows, Runs(half.layers, half.config, 1))
    assert torch.equal(ours, alone)
    assert torch.equal(own.state.ssm, theirs.state.ssm)
    assert all(torch.equal(*pair) for pair in zip(own.windows, theirs.windows, strict=True))


@on_each_device
def test_a_row_may_stand_there_more_than_once(device):
    """As padding does; the others do not notice."""
    half = model_of("tiny", device, torch.bfloat16)
    runs = Runs(half.layers, half.config, 1 if INTERPRETED else None)
    padded, with_padding = decode(half, device, torch.bfloat16, [4, 9, 9, 9], runs)
    alone, without = decode(half, device, torch.bfloat16, [4], runs)
    for got, expected in ((padded[:, :1], alone), (with_padding.state.ssm[:9], without.state.ssm[:9])):
        torch.testing.assert_close(got, expected, rtol=0.03, atol=0.03)  # the head of the memory has other sums


def test_what_goes_that_way():
    """On a CPU nothing does; nor do layers of which one is quantized or cut, or whose states have several groups."""
    assert not can_persist(torch.zeros(1, 8, dtype=torch.bfloat16))
    half = model_of("tiny", "cpu", torch.bfloat16)
    assert isinstance(make_runs(half.layers, half.config, 1), Runs)
    assert make_runs(half.layers, replace(half.config, mamba_n_groups=2), 1) is None
    half.layers[1].mlp.down_proj.use(Int8())
    assert make_runs(half.layers, half.config, 1) is None


def full_launches(num_rows):
    """Both kernels in the 500m shape on 132 multiprocessors."""
    half, index = torch.bfloat16, torch.zeros(num_rows, dtype=torch.int64)
    x, words = torch.empty(num_rows, 768, dtype=half), torch.zeros(60000, dtype=torch.int32)
    tables, rings = torch.empty(2, 600, 64, dtype=half), torch.empty(2, 60, 3, 256, 3, 64, dtype=half)
    table = torch.zeros(20, 8, dtype=torch.int64)
    rest = (words, 256, 2368, 12, True, 1e-5, 132)
    yield from record_launches(
        self_decoder_triton,
        lambda: self_decoder_triton.self_decoder(x, table, *tables, index, index, *rings, *rest),
    )
    xb, dt = torch.empty(num_rows, 16, 1664, dtype=half), torch.empty(num_rows, 16, 24)
    conv, b = xb[..., :1536].unflatten(-1, (24, 64)), xb[..., 1536:].unflatten(-1, (1, 128))
    states = torch.empty(3, 16, 24, 64, 128)
    memory = (conv, b, dt, dt[0], dt[0])
    yield from record_launches(
        cross_decoder_triton,
        lambda: cross_decoder_triton.cross_decoder(
            x, x, table, (5, 4, 4), 768, memory, states, index, words, 2368, 1e-5, 132, True
        ),
    )


@COMPILED
def test_kernels_compile_and_fit():
    """Where they are used: on Hopper and on Blackwell's data center chips."""
    with interpreted(__file__) as finish:
        check_compiles([(launch, cc) for n in (1, MOST_ROWS) for launch in full_launches(n) for cc in (90, 100)])
        finish()
