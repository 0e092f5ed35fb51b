"""A few rows times a matrix of weights: kernel against torch; and every kernel that may start before its predecessor
has ended compiles that way too."""

from pathlib import Path

import pytest
import torch
from triton_tools import COMPILED, DEVICES, SHARED_MEMORY, assert_as_good, check_compiles, interpreted, record_launches

from nanovllm.kernels import (
    activation_triton,
    layernorm_triton,
    linear,
    linear_triton,
    paged_decode_triton,
    qkv_triton,
)

OVERLAPPING = (90, 100, 120)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(
    ("shape", "vector"),
    [
        ((1, 37, 96), True),
        ((1, 64, 1030), True),
        ((3, 130, 257), True),
        ((4, 2, 16), True),
        ((5, 50, 96), False),
        ((17, 33, 300), False),
        ((70, 16, 130), False),
    ],
    ids=str,
)
def test_small_linear(device, shape, vector, bias, gated):
    """Both kernels: rows that are no power of two, N and K that are no multiples of the tile."""
    rows, n, k = shape
    x, weight, b = torch.randn(rows, k), torch.randn(n * (1 + gated), k), torch.randn(n * (1 + gated))
    x, weight, b = (tensor.to(device, torch.bfloat16) for tensor in (x, weight, b))
    exact = x.double() @ weight.double().T + (b.double() if bias else 0)
    if gated:
        exact = torch.nn.functional.silu(exact[:, :n]) * exact[:, n:]
    out = torch.full((rows, n + 3), torch.nan, dtype=torch.bfloat16, device=device)[:, :n]
    overlap = device == "cuda" and torch.cuda.get_device_capability() >= (9, 0)
    got = linear_triton.small_linear(x, weight, b if bias else None, out, gated, vector, overlap)
    assert got is out
    reference = linear.gated_linear_ref if gated else linear.linear_ref
    assert_as_good(got, reference(x, weight, b if bias else None), exact)


def test_which_rows_take_which_kernel():
    """A vector always; a few rows without matrix units only where N is small; with them where launches overlap and W
    is small."""
    assert linear.small_kernel(1, 151936, 1024, overlaps=False) == "vector"
    assert linear.small_kernel(4, 1024, 2048, overlaps=True) == "vector"
    assert linear.small_kernel(2, 4096, 1024, overlaps=True) == "matrix"
    assert linear.small_kernel(64, 1024, 3072, overlaps=True) == "matrix"
    assert linear.small_kernel(2, 4096, 1024, overlaps=False) is None
    assert linear.small_kernel(65, 1024, 1024, overlaps=True) is None
    assert linear.small_kernel(8, 12288, 4096, overlaps=True) is None


def test_on_a_cpu_it_is_torchs():
    x, weight = torch.randn(2, 8), torch.randn(4, 8)
    assert torch.equal(linear.linear(x, weight, None), torch.nn.functional.linear(x, weight))
    out = torch.empty(2, 4)
    assert torch.equal(linear.linear(x, weight, None, out), out)
    gate, up = torch.nn.functional.linear(x, weight).chunk(2, -1)
    assert torch.equal(linear.gated_linear(x, weight, None), torch.nn.functional.silu(gate) * up)


def launches(overlap):
    """One launch of each kernel of a decode step, in the shapes of Qwen3-0.6B."""
    z = lambda *shape: torch.zeros(*shape, dtype=torch.bfloat16)  # noqa: E731
    x, cache, ids = z(3, 1024), z(5, 64, 8, 128), torch.zeros(3, dtype=torch.int64)
    lens, table = torch.ones(3, dtype=torch.int32), torch.zeros(3, 4, dtype=torch.int32)
    heads = (z(3, 4096), 16, 8, z(128), z(128), 1e-6, z(64, 128), z(64, 128), ids, cache, cache, ids)
    decode = (z(3, 16, 128), cache, cache, table, lens, 64, 0.1)
    calls = {
        layernorm_triton: lambda: layernorm_triton.add_rms_norm(x, x, x[0], 1e-6, overlap),
        activation_triton: lambda: activation_triton.silu_and_mul(x, overlap),
        qkv_triton: lambda: qkv_triton.split_norm_rotate_write(*heads, overlap),
        paged_decode_triton: lambda: paged_decode_triton.decode_attention(*decode, splits=4, overlap=overlap),
        linear_triton: lambda: [
            linear_triton.small_linear(z(rows, 1024), z(n, 1024), None, None, gated, rows == 1, overlap)
            for rows in (1, 16, 64)
            for n in (4096, 8192)
            for gated in (False, True)
        ],
    }
    return [launch for module, call in calls.items() for launch in record_launches(module, call)]


@pytest.mark.parametrize("path", sorted(Path(linear.__file__).parent.glob("*_triton.py")), ids=lambda path: path.stem)
def test_successors_start_when_the_predecessor_has_ended(path):
    """No kernel lets the next one start before it has itself waited for the one before. So whatever is older than the
    launch ahead is complete when a kernel starts, and may be read, or written, without waiting."""
    lines = [line.strip() for line in path.read_text().splitlines()]
    starts = [i for i, line in enumerate(lines) if "gdc_launch_dependents" in line]
    assert all("gdc_wait" in lines[i - 1] for i in starts)
    assert len(starts) == sum("gdc_wait" in line for line in lines)


@COMPILED
def test_compiles():
    """On each chip as it is launched there: overlapping from Hopper on."""
    jobs = [(launches(False)[-3], cc) for cc in SHARED_MEMORY if cc not in OVERLAPPING]
    check_compiles(jobs + [(launch, cc) for cc in OVERLAPPING for launch in launches(True)])


@COMPILED
def test_under_the_interpreter():
    with interpreted(__file__) as finish:
        finish()
