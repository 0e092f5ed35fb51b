"""RMSNorm, the fused step between qkv projection and attention, and SwiGLU's activation: kernels against torch."""

import functools

import pytest
import torch
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

from nanovllm.kernels import activation, activation_triton, layernorm, layernorm_triton, qkv, qkv_triton

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = 1e-6
BLOCKS, BLOCK_SIZE, POSITIONS = 50, 16, 300
on_each_device = pytest.mark.parametrize("device", DEVICES)
in_each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def small_is_many(monkeypatch):
    """Programs take several rows or tokens from here on, so that few suffice to test it."""
    monkeypatch.setattr(layernorm_triton, "_MANY_ROWS", 200)
    monkeypatch.setattr(qkv_triton, "_MANY_TOKENS", 50)


def exact_norm(x, weight):
    """RMSNorm in float64."""
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


@pytest.fixture(scope="module")
def interpreter():
    with interpreted(__file__) as finish:
        yield finish


# Few and many rows; D small, odd, a power of two, the largest.
NORM_SHAPES = [(1, 1024), (63, 80), (257, 336), (3, 5120), (2, 16384)]


@on_each_device
@in_each_dtype
@pytest.mark.parametrize("shape", NORM_SHAPES, ids=str)
def test_rms_norm(device, dtype, shape):
    x, residual = torch.randn(2, *shape).to(device, dtype)
    weight = torch.randn(shape[-1]).to(device, dtype)
    before = x.clone(), residual.clone()
    with nan_filled():
        alone = layernorm_triton.rms_norm(x, weight, EPS)
        normed, total = layernorm_triton.add_rms_norm(x, residual, weight, EPS)
    assert_as_good(alone, layernorm.rms_norm_ref(x, weight, EPS), exact_norm(x, weight))
    rival, rival_total = layernorm.add_rms_norm_ref(x, residual, weight, EPS)
    assert torch.equal(total, rival_total)
    # The sum is rounded before it is normalised, so this rounding is no error of the norm.
    assert_as_good(normed, rival, exact_norm(total, weight))
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@on_each_device
@in_each_dtype
def test_rms_norm_of_rows_that_lie_apart(device, dtype):
    wide = torch.full((63, 200), torch.nan).to(device, dtype)
    wide[:, 8:88] = torch.randn(63, 80).to(device, dtype)
    x, weight = wide[:, 8:88], torch.randn(80).to(device, dtype)
    expected = layernorm_triton.rms_norm(x.contiguous(), weight, EPS)
    assert torch.equal(layernorm_triton.rms_norm(x, weight, EPS), expected)
    heads = x.unflatten(1, (5, 16))
    assert layernorm_triton.rms_norm(heads, weight[:16], EPS).shape == heads.shape
    assert layernorm_triton.rms_norm(x[:0], weight, EPS).shape == (0, 80)
    columns = x.T.contiguous().T
    assert torch.equal(layernorm_triton.rms_norm(columns, weight, EPS), expected)


@on_each_device
@in_each_dtype
@pytest.mark.parametrize("shape", [(1, 8), (63, 2 * 336), (2, 3, 2 * 3000)], ids=str)
def test_silu_and_mul(device, dtype, shape):
    x = (4 * torch.randn(shape)).to(device, dtype)
    x[..., :2] = 100  # exp(-gate) under- and overflows
    x[..., 2:4] = -100
    with nan_filled():
        out = activation_triton.silu_and_mul(x)
    assert_as_good(out, activation.silu_and_mul_ref(x), activation.silu_and_mul_ref(x.double()))
    assert activation_triton.silu_and_mul(x[:0]).numel() == 0


def qkv_case(tokens, heads, kv_heads, dim, dtype, device, norm=True):
    """Arguments of the fused step: rows of qkv between NaNs, caches of NaNs, some tokens that are not written."""
    size = (heads + 2 * kv_heads) * dim
    rows = torch.full((tokens, size + 16), torch.nan)
    rows[:, 8 : 8 + size] = torch.randn(tokens, size)
    weights = torch.randn(2, dim).to(device, dtype) if norm else (None, None)
    angles = torch.rand(POSITIONS, dim // 2) * 7
    cos, sin = angles.cos(), angles.sin()
    tables = [torch.cat(pair, -1).to(device, dtype) for pair in ((cos, cos), (-sin, sin))]
    slots = torch.randperm(BLOCKS * BLOCK_SIZE)[:tokens]
    slots[1::7] = -1
    caches = torch.full((2, BLOCKS + 1, BLOCK_SIZE, kv_heads, dim), torch.nan).to(device, dtype)
    return [
        rows.to(device, dtype)[:, 8 : 8 + size],
        heads,
        kv_heads,
        *weights,
        EPS,
        *tables,
        torch.randint(POSITIONS, (tokens,)).to(device),
        *caches,
        slots.to(device),
    ]


def with_caches(run, case):
    """Queries and both caches after run() of a case, whose own caches stay as they are."""
    case = [*case[:9], case[9].clone(), case[10].clone(), case[11]]
    return run(*case), case[9], case[10]


def exact_qkv(rows, heads, kv_heads, q_weight, k_weight, eps, cos, sin, positions, k_cache, v_cache, slots):
    """The fused step in float64, pair by pair."""
    dim = k_cache.shape[-1]
    q, k, v = rows.double().unflatten(1, (-1, dim)).split((heads, kv_heads, kv_heads), 1)
    if q_weight is not None:
        q, k = exact_norm(q, q_weight), exact_norm(k, k_weight)
    c, s = (0, 0) if cos is None else (table[positions, None, dim // 2 :].double() for table in (cos, sin))

    def turned(x):
        if cos is None:
            return x
        a, b = x.chunk(2, -1)
        return torch.cat((a * c - b * s, b * c + a * s), -1)

    caches = k_cache.double().flatten(0, 1), v_cache.double().flatten(0, 1)
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            caches[0][slot], caches[1][slot] = turned(k)[t], v[t]
    return turned(q), *(cache.view(k_cache.shape) for cache in caches)


# T, H, KV, D; one token or many, heads that share a power of two or none.
QKV_CASES = [
    *((shape, torch.bfloat16, True) for shape in [(1, 4, 2, 64), (257, 4, 4, 96), (5, 16, 8, 128), (3, 2, 1, 256)]),
    *(((63, 3, 1, 80), dtype, norm) for dtype in DTYPES for norm in (True, False)),
]


@on_each_device
@pytest.mark.parametrize(("shape", "dtype", "norm"), QKV_CASES, ids=str)
def test_split_norm_rotate_write(device, shape, dtype, norm):
    case = qkv_case(*shape, dtype, device, norm)
    with nan_filled():
        ours = with_caches(qkv_triton.split_norm_rotate_write, case)
    rivals = with_caches(qkv.split_norm_rotate_write_ref, case)
    for got, rival, exact in zip(ours, rivals, exact_qkv(*case), strict=True):
        assert_as_good(got, rival, exact)
    assert torch.equal(ours[2].nan_to_num(9), rivals[2].nan_to_num(9))  # values are copied


@on_each_device
@pytest.mark.parametrize("tokens", [5, 63])
@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no_norm"])
def test_keys_and_values_alone(device, tokens, norm):
    """No queries and no rotation: what a cache takes that other layers query."""
    case = qkv_case(tokens, 0, 3, 64, torch.bfloat16, device, norm)
    case[6:9] = None, None, None
    with nan_filled():
        ours = with_caches(qkv_triton.split_norm_rotate_write, case)
    rivals = with_caches(qkv.split_norm_rotate_write_ref, case)
    for got, rival, exact in zip(ours, rivals, exact_qkv(*case), strict=True):
        assert_as_good(got, rival, exact)
    assert torch.equal(ours[2].nan_to_num(9), rivals[2].nan_to_num(9))


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no_norm"])
def test_split_norm_rotate_write_of_the_reference(norm):
    case = qkv_case(63, 4, 2, 16, torch.float32, "cpu", norm)
    results = with_caches(qkv.split_norm_rotate_write_ref, case)
    for got, exact in zip(results, exact_qkv(*case), strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5, equal_nan=True)
    written = (case[-1] >= 0).sum() * 2 * 16
    assert all(cache.isfinite().sum() == written for cache in results[1:])


@on_each_device
def test_no_token(device):
    case = qkv_case(0, 4, 2, 64, torch.float32, device)
    q, k_cache, v_cache = with_caches(qkv_triton.split_norm_rotate_write, case)
    assert q.shape == (0, 4, 64) and k_cache.isnan().all() and v_cache.isnan().all()


def test_on_a_cpu_the_references_run():
    x, residual, weight = torch.randn(5, 64), torch.randn(5, 64), torch.randn(64)
    assert torch.equal(layernorm.rms_norm(x, weight, EPS), layernorm.rms_norm_ref(x, weight, EPS))
    pairs = zip(
        layernorm.add_rms_norm(x, residual, weight, EPS),
        layernorm.add_rms_norm_ref(x, residual, weight, EPS),
        strict=True,
    )
    assert all(torch.equal(a, b) for a, b in pairs)
    assert torch.equal(activation.silu_and_mul(x), activation.silu_and_mul_ref(x))
    case = qkv_case(9, 4, 2, 16, torch.float32, "cpu")
    results = [with_caches(f, case) for f in (qkv.split_norm_rotate_write, qkv.split_norm_rotate_write_ref)]
    assert all(torch.equal(a.nan_to_num(9), b.nan_to_num(9)) for a, b in zip(*results, strict=True))


@pytest.mark.gpu
def test_in_a_cuda_graph():
    """All four, and the public functions that choose them: what is captured follows its inputs' new values."""
    case = qkv_case(63, 4, 2, 64, torch.bfloat16, "cuda")
    x, residual = torch.randn(2, 63, 256, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(256, device="cuda", dtype=torch.bfloat16)

    def step():
        normed, total = layernorm.add_rms_norm(x, residual, weight, EPS)
        q = qkv.split_norm_rotate_write(*case)
        return normed, total, layernorm.rms_norm(x, weight, EPS), activation.silu_and_mul(x), q, case[9], case[10]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    x.normal_()
    case[0].normal_()
    case[-1].copy_(torch.randperm(BLOCKS * BLOCK_SIZE)[:63])
    case[9].fill_(torch.nan)
    case[10].fill_(torch.nan)
    graph.replay()
    got = [tensor.clone() for tensor in captured]
    expected = step()
    assert all(torch.equal(a.nan_to_num(9), b.nan_to_num(9)) for a, b in zip(got, expected, strict=True))


def launches_of(op):
    """What an op launches in bf16: for decode and prefill of a usual model, compiled for each chip; at other sizes,
    for one."""
    z = torch.zeros
    chips = [(tuple(SHARED_MEMORY), 1024, 128), ((86,), 16384, 80), ((86,), 5120, 256)]
    for chip, hidden, dim in chips if op != "silu_and_mul" else chips[:1]:
        for tokens in (8, 2048) if hidden == 1024 and op != "silu_and_mul" else (8,):
            x = z(tokens, hidden, dtype=torch.bfloat16)
            case = qkv_case(0, 16, 8, dim, torch.bfloat16, "cpu")
            case[0] = z(tokens, 32 * dim, dtype=torch.bfloat16)
            kv_case = [case[0], 0, 3, *case[3:6], None, None, None, *case[9:]]
            runs = {
                "rms_norm": (layernorm_triton, layernorm_triton.rms_norm, (x, x[0], EPS)),
                "add_rms_norm": (layernorm_triton, layernorm_triton.add_rms_norm, (x, x, x[0], EPS)),
                "qkv": (qkv_triton, qkv_triton.split_norm_rotate_write, case),
                "kv": (qkv_triton, qkv_triton.split_norm_rotate_write, kv_case),
                "silu_and_mul": (activation_triton, activation_triton.silu_and_mul, (x,)),
            }
            module, run, arguments = runs[op]
            yield chip, record_launches(module, functools.partial(run, *arguments))


@COMPILED
@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm", "qkv", "kv", "silu_and_mul"])
def test_compiles(op, interpreter):
    check_compiles([(launch, chip) for chips, launches in launches_of(op) for launch in launches for chip in chips])


@COMPILED
def test_under_the_interpreter(interpreter):
    interpreter()
