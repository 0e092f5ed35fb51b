"""Convolution and state scan of a prefill: kernels against torch."""

import functools

import pytest
import torch
from triton_tools import (
    COMPILED,
    DEVICES,
    SHARED_MEMORY,
    assert_as_good,
    check_compiles,
    error,
    interpreted,
    nan_filled,
    record_launches,
)

from nanovllm.kernels import ssd, ssd_triton
from nanovllm.kernels.ssd import Piece, Segment, span_table

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
on_each_device = pytest.mark.parametrize("device", DEVICES)
in_each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

# Rows 0 to 7. Among them: one token; several sequences; a row that stays one; copies; what goes on from a row that was
# just written, cut also within the reach of the convolution; and back into the row that all began from.
SEGMENTS = {
    "one_token": [Segment(0, 1, 0, 0)],
    "one_sequence": [Segment(0, 77, 2, 2)],
    "sequences": [Segment(0, 5, 0, 0), Segment(5, 6, 3, 4), Segment(6, 40, 1, 1)],
    "snapshots": [Segment(0, 20, 0, 6), Segment(20, 50, 6, 7), Segment(50, 50, 7, 0), Segment(50, 61, 1, 1)],
    "short": [Segment(0, 1, 0, 0), Segment(1, 2, 0, 5), Segment(2, 3, 5, 6), Segment(3, 3, 6, 0), Segment(3, 5, 2, 2)],
    "one_row": [Segment(0, 9, 1, 1), Segment(9, 10, 1, 1), Segment(10, 30, 1, 1)],
}
# L, H, P, G, N: usual ones, and such that nothing is a power of two.
SIZES = [(2, 2, 40, 1, 128), (2, 6, 12, 2, 10)]


@pytest.fixture(scope="module")
def interpreter():
    with interpreted(__file__) as finish:
        yield finish


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch, request):
    """Small tiles from here on, so that few tokens fill several; what is compiled stays as it is."""
    if "compiles" not in request.node.name:
        monkeypatch.setattr(ssd_triton, "_TOKENS", 16)
        monkeypatch.setattr(ssd_triton, "_STATE", 4096)
        monkeypatch.setattr(ssd_triton, "_CONV_TOKENS", 8)


def table_of(segments, chunk_size, device):
    """With spans at the end that are there for room alone, as a CUDA graph has them."""
    padding = [(0, 0, -1, -1, 0, 0)] * 3
    return torch.tensor(span_table(segments, chunk_size) + padding, dtype=torch.int32, device=device)


def parts_of(num_tokens, layers, sizes, dtype, device):
    """[num_tokens, layers, size] for each of sizes, side by side between NaNs as a projection leaves them."""
    wide = torch.full((num_tokens + 2, layers, sum(sizes) + 8), torch.nan)
    wide[1:-1, :, : sum(sizes)] = torch.randn(num_tokens, layers, sum(sizes))
    return wide.to(device, dtype)[1:-1, :, : sum(sizes)].split(sizes, -1)


def scan_case(num_tokens, layers, heads, dim, groups, size, dtype, device):
    """Arguments of the scan: x, dt, b, c, a_log, dt_bias, d; step sizes from 1e-4 to 20; one head forgets
    at once, one hardly."""
    sizes = (heads * dim, groups * size, groups * size, heads)
    x, b, c, dt = parts_of(num_tokens, layers, sizes, dtype, device)
    x, b, c = x.unflatten(-1, (heads, dim)), b.unflatten(-1, (groups, size)), c.unflatten(-1, (groups, size))
    a_log = torch.empty(layers, heads).uniform_(-3, 2.5)
    dt_bias = torch.empty(layers, heads).uniform_(-8, 1)
    dt_bias[-1, -2:], a_log[-1, -2:] = torch.tensor([20.0, 3.0]), torch.tensor([2.0, -5.0])
    return [x, dt, b, c, *(part.to(device) for part in (a_log, dt_bias, torch.randn(layers, heads)))]


def exact_scan(x, dt, b, c, a_log, dt_bias, d, states, segments):
    """Outputs and states, one token after the other in float64."""
    x, dt, b, c, a_log, dt_bias, d, states = (t.double().cpu() for t in (x, dt, b, c, a_log, dt_bias, d, states))
    group = torch.arange(x.shape[2]) // (x.shape[2] // b.shape[2])
    dt = torch.nn.functional.softplus(dt + dt_bias, threshold=40)
    y = torch.empty_like(x)
    for first, end, source, target in segments:
        state = states[source].clone()
        for t in range(first, end):
            state *= torch.exp(-dt[t] * a_log.exp())[..., None, None]
            state += torch.einsum("lh,lhp,lhn->lhpn", dt[t], x[t], b[t][:, group])
            y[t] = torch.einsum("lhpn,lhn->lhp", state, c[t][:, group]) + d[..., None] * x[t]
        states[target] = state
    return y, states


# A GPU's exponential is off by two units in the last place, torch's by half of one; results are float32 whatever x is.
_TIMES = 4


@on_each_device
@in_each_dtype
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", SEGMENTS)
def test_scan(name, sizes, dtype, device):
    """States alone, and with outputs of one layer or all; chunks of two tiles and a bit."""
    segments, (layers, heads, dim, _, size) = SEGMENTS[name], sizes
    case = scan_case(segments[-1].end, *sizes, dtype, device)
    before = torch.randn(8, layers, heads, dim, size, device=device)
    table = table_of(segments, 36, device)
    y, states = exact_scan(*case, before, segments)
    # The bound is the worse of two chunk sizes, as they differ by luck.
    rivals = [(before.clone(), chunk_size) for chunk_size in (16, 36)]
    outputs = [ssd.ssd_ref(*case, mine, segments, chunk_size) for mine, chunk_size in rivals]
    rival_states = max((mine for mine, _ in rivals), key=lambda mine: error(mine, states))
    rival = max(outputs, key=lambda output: error(output, y))
    for c in (None, case[3]):
        ours = before.clone()
        with nan_filled():
            got = ssd_triton.ssd(*case[:3], c, *case[4:], ours, table, 36)
        assert_as_good(ours, rival_states, states, _TIMES)
        assert (got is None) == (c is None)
    assert_as_good(got, rival, y, _TIMES)
    at = slice(layers - 1, layers)
    alone = before.clone()
    one = [*(part[:, at] for part in case[:4]), *(part[at] for part in case[4:]), alone[:, at]]
    got[:, at] = ssd_triton.ssd(*one, table, 36)
    assert_as_good(got, rival, y, _TIMES)
    assert torch.equal(alone[:, :-1], before[:, :-1])
    assert_as_good(torch.cat((ours[:, :-1], alone[:, at]), 1), rival_states, states, _TIMES)


@on_each_device
@in_each_dtype
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("name", SEGMENTS)
def test_convolution(name, width, bias, dtype, device):
    """Every row is as the reference leaves it, bit by bit: histories are copies."""
    segments, layers, channels = SEGMENTS[name], 2, 150
    (x, _) = parts_of(segments[-1].end, layers, (channels, 3), dtype, device)
    weight = torch.randn(layers, channels, width).to(device, dtype)
    bias = torch.randn(layers, channels).to(device, dtype) if bias else None
    before = torch.randn(8, layers, channels, width - 1).to(device, dtype)
    ours, theirs = before.clone(), before.clone()
    with nan_filled():
        got = ssd_triton.causal_conv(x, weight, bias, ours, table_of(segments, 36, device), 36)
    rival = ssd.causal_conv_ref(x, weight, bias, theirs, segments)
    wide = [None if part is None else part.double() for part in (weight, bias, before)]
    # The reference in float64; that it is right is shown by test_sansho_parts.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        exact = ssd.causal_conv_ref(x.double(), *wide, segments)
    assert exact.dtype == torch.float64 and got.is_contiguous()
    assert_as_good(got, rival, exact)
    assert torch.equal(ours, theirs)


def test_spans_of_segments():
    """Chunks of 16; who goes on from whom, and where all of them began."""
    assert span_table(SEGMENTS["snapshots"][:3], 16) == [
        (0, 16, 0, -1, 0, 0), (16, 20, -1, 6, 0, 0), (20, 36, -1, -1, 0, 0), (36, 50, -1, 7, 0, 0),
        (50, 50, -1, 0, 0, 0),
    ]  # fmt: skip
    assert span_table(SEGMENTS["sequences"], 64) == [(0, 5, 0, 0, 0, 0), (5, 6, 3, 4, 5, 3), (6, 40, 1, 1, 6, 1)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_device_decides(device):
    """A CPU runs the references; a GPU the kernels, which give the same."""
    segments = SEGMENTS["snapshots"]
    piece = Piece(0, 61, segments, 36, table_of(segments, 36, device))
    case = scan_case(61, 2, 4, 64, 1, 128, torch.float32, device)
    conv = case[0].flatten(2), torch.randn(2, 256, 4, device=device), None
    results = []
    for scan, convolve, how in ((ssd.ssd, ssd.causal_conv, (piece,)), (ssd.ssd_ref, ssd.causal_conv_ref, (segments,))):
        torch.manual_seed(1)
        states, histories = torch.randn(8, 2, 4, 64, 128).to(device), torch.randn(8, 2, 256, 3).to(device)
        out = convolve(*conv, histories, *how)
        results.append((scan(*case, states, *how, *([36] if how[0] is segments else [])), states, out, histories))
    for ours, theirs in zip(*results, strict=True):
        if device == "cpu":
            assert torch.equal(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def launches_of(op):
    """What an op launches in bf16 for the 500m shape, compiled for each chip; at other sizes and dtypes, for one."""
    z = torch.zeros
    shapes = [
        (tuple(SHARED_MEMORY), (24, 64, 1, 128), torch.bfloat16),
        ((86,), (6, 12, 2, 10), torch.float32),
        ((86,), (24, 64, 1, 128), torch.float32),
        ((86, 90), (4, 128, 2, 256), torch.bfloat16),
    ]
    table = table_of([Segment(0, 600, 0, 0)], 256, "cpu")
    for chips, (heads, dim, groups, size), dtype in shapes[: None if op != "conv" else 2]:
        channels = heads * dim + groups * size
        x = z(600, 2, channels + heads, dtype=dtype)
        if op == "conv":
            rest = z(2, channels, 4, dtype=dtype), z(2, channels, dtype=dtype), z(1, 2, channels, 3, dtype=dtype)
            run = functools.partial(ssd_triton.causal_conv, x[..., :channels], *rest, table, 256)
        else:
            xs, b = z(600, 2, channels, dtype=dtype).split((heads * dim, groups * size), -1)
            xs, b = xs.unflatten(-1, (heads, dim)), b.unflatten(-1, (groups, size))
            params, states = [z(2, heads)] * 3, z(1, 2, heads, dim, size)
            rest = (b if op == "outputs" else None, *params, states, table, 256)
            run = functools.partial(ssd_triton.ssd, xs, x[..., channels:], b, *rest)
        yield chips, record_launches(ssd_triton, run)


@COMPILED
@pytest.mark.parametrize("op", ["conv", "states", "outputs"])
def test_compiles(op, interpreter):
    check_compiles([(launch, chip) for chips, launches in launches_of(op) for launch in launches for chip in chips])


@COMPILED
def test_under_the_interpreter(interpreter):
    interpreter()
