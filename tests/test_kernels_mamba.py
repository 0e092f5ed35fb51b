"""Mamba's memory side of one token: convolutions, states and the gated norm, kernels against the references.

What belongs to rows that are not named is NaN, and stays so.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from triton_tools import (
    COMPILED,
    DEVICES,
    SHARED_MEMORY,
    assert_as_good,
    check_compiles,
    interpreted,
    nan_filled,
    record_launches,
)

from nanovllm.kernels import mamba_step as ops
from nanovllm.kernels import mamba_step_triton as twin
from nanovllm.kernels.choice import overlaps_launches

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LIVE, PADDING, ROWS = [5, 0, 2], 3, 6
EPS, CUDA = 1e-5, torch.device("cuda")
# L, H, P, G, N, W_c: powers of two, odd sizes, heads of one number, a head that takes several programs.
SHAPES = [(2, 4, 8, 1, 16, 4), (3, 6, 5, 2, 7, 3), (1, 3, 1, 3, 20, 2), (2, 2, 40, 1, 200, 1)]
FULL = (16, 24, 64, 1, 128, 4)
on_each_device = pytest.mark.parametrize("device", DEVICES)
in_each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
in_each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def apart(*shape):
    """Numbers whose first dimension's rows lie apart, NaN between them."""
    wide = torch.full((shape[0], torch.Size(shape[1:]).numel() + 5), torch.nan)
    wide[:, 2:-3] = torch.randn(shape[0], wide.shape[1] - 5)
    return wide[:, 2:-3].unflatten(1, shape[1:])


def with_rows(state, rows):
    """NaN in all rows of `state` [ROWS, ...] but these."""
    lost = [row for row in range(len(state)) if row not in rows]
    state[lost] = torch.nan
    return state


def conv_case(shape, dtype, device, bias=True, rows=LIVE):
    layers, heads, dim, groups, size, width = shape
    channels = heads * dim + groups * size
    projected = torch.randn(len(rows), layers, channels + heads)
    projected[..., channels:] *= 8  # step sizes of all orders of magnitude
    tensors = projected, torch.randn(ROWS, layers, channels, width - 1), torch.randn(layers, channels, width)
    projected, states, weight = (tensor.to(device, dtype) for tensor in tensors)
    biases = torch.randn(layers, channels).to(device, dtype) if bias else None
    dt_bias = torch.randn(layers, heads, device=device)
    return projected, torch.tensor(rows, device=device), with_rows(states, rows), weight, biases, dt_bias


@on_each_device
@in_each_dtype
@in_each_shape
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_convolutions(device, dtype, shape, bias, monkeypatch):
    """All layers at once, several blocks of channels; inputs move by one place and no row of another is touched."""
    monkeypatch.setattr(twin, "_COLUMNS", 32)
    check_conv(conv_case(shape, dtype, device, bias))


def exact_conv(projected, rows, states, weight, bias, dt_bias):
    """The same in float64."""
    inputs, dt = projected.double().split((weight.shape[1], dt_bias.shape[1]), dim=-1)
    window = torch.cat((states[rows].double(), inputs[..., None]), -1)
    total = (window * weight.double()).sum(-1) + (0 if bias is None else bias.double())
    return total * total.sigmoid(), torch.logaddexp(dt + dt_bias.double(), torch.zeros((), device=dt.device).double())


def check_conv(case):
    projected, rows, states, *rest = case
    results = []
    for run in (twin.mamba_conv, ops.mamba_conv_ref):
        own = states.clone()
        with nan_filled():
            results.append((*run(projected, rows, own, *rest), own))
    (xb, dt, moved), (rival, rival_dt, expected) = results
    exact, exact_dt = exact_conv(*case)
    assert_as_good(xb, rival, exact)
    assert torch.equal(moved.nan_to_num(9), expected.nan_to_num(9))
    assert dt.dtype == torch.float32
    # Relative: a small step size is worth as much as a large one.
    ours, theirs = (((found - exact_dt) / exact_dt).abs().max().item() for found in (dt, rival_dt))
    assert ours <= max(2 * theirs, 1e-6)


def read_case(shape, dtype, device, drive, rows=LIVE):
    _, heads, dim, groups, size, _ = shape
    n = len(rows)
    x, b, c = (apart(n, *tail).to(dtype).to(device) for tail in ((heads, dim), (groups, size), (groups, size)))
    dt, a_log = torch.rand(n, heads, device=device) * 0.5, torch.randn(heads, device=device)
    states = with_rows(torch.randn(ROWS, 2, heads, dim, size, device=device), rows)[:, 1]
    drive = ops.Drive(b, dt, a_log) if drive else None
    return x, drive, states, torch.tensor(rows, device=device), c, torch.randn(heads, device=device)


def exact_read(x, drive, states, rows, c, d):
    """y and the rows' states, in float64."""
    group = torch.arange(x.shape[1], device=x.device) // (x.shape[1] // c.shape[1])
    own = states[rows].double()
    if drive is not None:
        b, dt, a_log = (tensor.double() for tensor in drive)
        decay = torch.exp(-dt * a_log.exp())[..., None, None]
        own = decay * own + dt[..., None, None] * x.double()[..., None] * b[:, group, None]
    return (own * c.double()[:, group, None]).sum(-1) + d.double()[:, None] * x.double(), own


def check_read(case):
    x, drive, states, rows, c, d = case
    results = []
    for run in (twin.mamba_read, ops.mamba_read_ref):
        own = states._base.clone()[:, 1] if states._base is not None else states.clone()
        with nan_filled():
            results.append((run(x, drive, own, rows, c, d), own))
    (y, moved), (rival, expected) = results
    exact, exact_states = exact_read(*case)
    assert_as_good(y, rival, exact)
    assert_as_good(moved[rows], expected[rows], exact_states)
    others = [row for row in range(len(states)) if row not in rows.tolist()]
    assert moved[others].isnan().all()
    if drive is None:
        assert torch.equal(moved[rows], states[rows])


@on_each_device
@in_each_dtype
@in_each_shape
@pytest.mark.parametrize("drive", [True, False], ids=["moves_on", "reads"])
def test_states(device, dtype, shape, drive):
    """Moved on and read in one pass, or read alone."""
    check_read(read_case(shape, dtype, device, drive))


@on_each_device
def test_padding_touches_no_row(device):
    """A row that belongs to nobody, three times among the others."""
    rows, own = [PADDING, LIVE[0], PADDING, LIVE[1], PADDING], [1, 3]
    others = [row for row in range(ROWS) if row != PADDING]
    projected, index, conv, *rest = conv_case(SHAPES[0], torch.bfloat16, device, rows=rows)
    x, (b, dt, a_log), states, _, c, d = read_case(SHAPES[0], torch.bfloat16, device, True, rows)
    found = []
    for picked in (range(5), own):
        at = list(picked)
        after = conv.clone(), states.clone()
        xb = twin.mamba_conv(projected[at], index[at], after[0], *rest)[0]
        y = twin.mamba_read(x[at], ops.Drive(b[at], dt[at], a_log), after[1], index[at], c[at], d)
        live = slice(None) if picked is own else own
        found.append([xb[live], y[live], *(tensor[others].nan_to_num(9) for tensor in after)])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@on_each_device
@in_each_dtype
@pytest.mark.parametrize(("size", "groups"), [(64, 1), (60, 3), (1536, 1)])
def test_gated_norm(device, dtype, size, groups):
    y, z = torch.randn(5, size, device=device), (3 * apart(5, size)).to(dtype).to(device)
    weight = torch.randn(size).to(dtype).to(device)
    z[:, 0], z[:, 1] = 100, -100  # exp(-z) under- and overflows
    with nan_filled():
        got = twin.gated_norm(y, z, weight, EPS, groups)
    assert_as_good(got, ops.gated_norm_ref(y, z, weight, EPS, groups), exact_norm(y, z, weight, EPS, groups))


def exact_norm(y, z, weight, eps, groups):
    """The same in float64."""
    gated = (y.double() * F.silu(z.double())).unflatten(-1, (groups, -1))
    return (gated * (gated.square().mean(-1, keepdim=True) + eps).rsqrt()).flatten(1) * weight.double()


@on_each_device
def test_no_row(device):
    conv, read = (make(SHAPES[0], torch.float32, device, True, []) for make in (conv_case, read_case))
    assert twin.mamba_conv(*conv)[0].shape == (0, 2, 48)
    assert twin.mamba_read(*read).shape == (0, 4, 8)
    assert twin.gated_norm(torch.empty(0, 8), torch.empty(0, 8), torch.ones(8), EPS, 1).shape == (0, 8)


def full_cases(num_rows, device="cuda"):
    """Arguments of the three in the 500m shape, bfloat16, as many rows."""
    layers, heads, dim, groups, size, width = FULL
    channels = heads * dim + groups * size
    index, half = torch.arange(num_rows, device=device), {"device": device, "dtype": torch.bfloat16}
    conv = (
        torch.randn(num_rows, layers, channels + heads, **half), index,
        torch.randn(num_rows, layers, channels, width - 1, **half), torch.randn(layers, channels, width, **half),
        torch.randn(layers, channels, **half), torch.randn(layers, heads, device=device),
    )  # fmt: skip
    zc = torch.randn(num_rows, heads * dim + groups * size, **half)
    read = (
        torch.randn(num_rows, heads, dim, **half),
        ops.Drive(
            torch.randn(num_rows, groups, size, **half),
            torch.rand(num_rows, heads, device=device),
            torch.randn(heads, device=device),
        ),
        torch.randn(num_rows, heads, dim, size, device=device),
        index,
        zc[:, heads * dim :].unflatten(1, (groups, size)),
        torch.randn(heads, device=device),
    )
    y = torch.randn(num_rows, heads * dim, device=device)
    return conv, read, (y, zc[:, : heads * dim], torch.randn(heads * dim, **half), EPS, groups)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 8, 64])
def test_at_full_size(num_rows, monkeypatch):
    """The 500m shape by the public functions: launches overlap where the chip can."""
    for name in ("mamba_conv", "mamba_read"):
        monkeypatch.setattr(twin, name, functools.partial(getattr(twin, name), overlap=overlaps_launches(CUDA)))
    conv, read, norm = full_cases(num_rows)
    check_conv(conv)
    check_read(read)
    check_read((read[0], None, *read[2:]))
    assert_as_good(ops.gated_norm(*norm), ops.gated_norm_ref(*norm), exact_norm(*norm))


@pytest.mark.gpu
def test_in_a_cuda_graph():
    """A chain as a layer launches it, with work of torch's own ahead: what is captured follows its inputs."""
    conv, read, norm = full_cases(4)
    fresh = conv[2].clone(), read[2].clone()

    def step():
        xb, dt = ops.mamba_conv(conv[0] * 2, *conv[1:])
        zc = read[4] * 2
        y = ops.mamba_read(read[0], read[1], read[2], read[3], zc, read[5])
        return xb, dt, y, ops.gated_norm(y.flatten(1), *norm[1:]), conv[2].clone(), read[2].clone()

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    conv[0].normal_()
    read[4].normal_()
    results = []
    for run in (lambda: graph.replay() or captured, step):
        conv[2].copy_(fresh[0])
        read[2].copy_(fresh[1])
        results.append([tensor.clone() for tensor in run()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def launches(overlap):
    """What one token launches in the 500m shape, states moved on and read alone, and without a bias."""
    conv, read, norm = full_cases(2, "cpu")
    runs = [
        lambda: twin.mamba_conv(*conv, overlap),
        lambda: twin.mamba_conv(*conv[:4], None, conv[5], overlap),
        lambda: twin.mamba_read(*read, overlap),
        lambda: twin.mamba_read(read[0], None, *read[2:], overlap),
        lambda: twin.gated_norm(*norm, overlap),
    ]
    return [launch for run in runs for launch in record_launches(twin, run)]


@COMPILED
@pytest.mark.parametrize("cc", SHARED_MEMORY)
def test_compiles(cc):
    """On each chip as it is launched there: overlapping from Hopper on."""
    check_compiles([(launch, cc) for launch in launches(cc >= 90)])


@COMPILED
def test_under_the_interpreter():
    with interpreted(__file__) as finish:
        finish()
