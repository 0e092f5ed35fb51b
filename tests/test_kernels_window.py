"""Decode through rings: norm, rotary, remembering and attention in one kernel, against the reference and against
attention over the whole sequence. Slots that no query sees hold NaN. And the way of a prefill's keys and values out of
rings and back."""

import pytest
import torch
from triton_tools import (
    COMPILED,
    DEVICES,
    INTERPRETED,
    SHARED_MEMORY,
    assert_as_good,
    check_compiles,
    interpreted,
    nan_filled,
    record_launches,
)

from nanovllm.kernels import kv_cache, kv_cache_triton
from nanovllm.kernels import window_decode as ops
from nanovllm.kernels import window_decode_triton as twin
from nanovllm.kernels.choice import overlaps_launches

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS, EPS, PADDING = 9, 1e-5, 4
# H, KV, D, slots of a ring, window: one tile and several, the last one not full; groups of 1 to 40; a window shorter
# than the ring, of one key, and as long.
SHAPES = [
    (12, 3, 64, 256, 256),
    (4, 2, 16, 48, 40),
    (5, 1, 80, 16, 1),
    (40, 1, 64, 64, 64),
    (2, 2, 256, 208, 200),
    (16, 1, 96, 3, 2),
]
on_each_device = pytest.mark.parametrize("device", DEVICES)
CASES = [
    (shape, dtype) for i, shape in enumerate(SHAPES) for j, dtype in enumerate(DTYPES) if not INTERPRETED or i % 3 == j
]


def positions_of(size, window):
    """The first token, rings not full yet, just full and wrapped."""
    return [0, 1, min(window, size) - 1, window, size, size + 1, 3 * size + 5]


def window_case(shape, dtype, device, norm=True, positions=None):
    """Arguments; one row for each position, last row first."""
    heads, kv_heads, dim, size, window = shape
    positions = positions_of(size, window) if positions is None else positions
    rows = [ROWS - 1 - i for i in range(len(positions))]
    qkv = torch.full((len(rows), (heads + 2 * kv_heads) * dim + 16), torch.nan)
    qkv[:, 8:-8] = torch.randn(len(rows), qkv.shape[1] - 16)
    rings = torch.full((2, ROWS, size, kv_heads, dim), torch.nan)
    for row, position in zip(rows, positions, strict=True):
        for old in range(max(0, position - window + 1), position):
            rings[:, row, old % size] = torch.randn(2, kv_heads, dim)
    angles = torch.rand(4 * size + 6, dim // 2) * 7
    cos, sin = angles.cos(), angles.sin()
    tables = (torch.cat(pair, -1).to(device, dtype) for pair in ((cos, cos), (-sin, sin)))
    weights = torch.randn(2, dim).to(device, dtype) if norm else (None, None)
    return [
        qkv.to(device, dtype)[:, 8:-8], *weights, EPS, *tables, torch.tensor(positions, device=device),
        *rings.to(device, dtype), torch.tensor(rows, device=device), window,
    ]  # fmt: skip


def with_rings(run, case, **knobs):
    """Output and rings after run() of a case, whose own rings stay as they are."""
    case = [*case[:7], case[7].clone(), case[8].clone(), *case[9:]]
    return run(*case, **knobs), case[7], case[8]


def exact_window(qkv, q_weight, k_weight, eps, cos, sin, positions, k_ring, v_ring, rows, window):
    """The same in float64, row by row and key by key; keys and values are rounded when they are remembered."""
    size, kv_heads, dim = k_ring.shape[1:]
    dtype, heads = qkv.dtype, qkv.double().unflatten(1, (-1, dim))
    q, k, v = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), 1)
    if q_weight is not None:
        q, k = (
            x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
            for x, weight in ((q, q_weight), (k, k_weight))
        )
    c, s = (table[positions, None, dim // 2 :].double() for table in (cos, sin))
    q, k = (torch.cat((a * c - b * s, b * c + a * s), -1) for a, b in (x.tensor_split((dim // 2,), -1) for x in (q, k)))
    k_ring, v_ring, out = k_ring.double(), v_ring.double(), torch.empty_like(q)
    for i, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
        k_ring[row, position % size], v_ring[row, position % size] = k[i].to(dtype).double(), v[i]
        seen = [old % size for old in range(max(0, position - window + 1), position + 1)]
        for head in range(q.shape[1]):
            kv = head // (q.shape[1] // kv_heads)
            scores = k_ring[row, seen, kv] @ q[i, head] * dim**-0.5
            out[i, head] = scores.softmax(0) @ v_ring[row, seen, kv]
    return out, k_ring, v_ring


def check(case, **knobs):
    with nan_filled():
        ours = with_rings(twin.window_decode, case, **knobs)
    rivals = with_rings(ops.window_decode_ref, case)
    exact = exact_window(*case)
    assert ours[0].isfinite().all()
    for part in zip(ours[0], rivals[0], exact[0], strict=True):
        assert_as_good(*part)
    # Old keys and values are as they were, and what was NaN is so but for the new ones.
    for got, rival, before in zip(ours[1:], rivals[1:], case[7:9], strict=True):
        assert torch.equal(got.isnan(), rival.isnan())
        written = (rival != before) & ~(rival.isnan() & before.isnan())
        assert torch.equal(got[~written].nan_to_num(9), before[~written].nan_to_num(9))
    assert_as_good(ours[1].nan_to_num(0), rivals[1].nan_to_num(0), exact[1].nan_to_num(0))
    assert torch.equal(ours[2].nan_to_num(9), rivals[2].nan_to_num(9))  # values are copied


@on_each_device
@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no_norm"])
def test_window_decode(device, shape, dtype, norm):
    check(window_case(shape, dtype, device, norm))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no_norm"])
def test_the_reference(shape, norm):
    """Against softmax written out, in float32; and it is what runs on a CPU."""
    case = window_case(shape, torch.float32, "cpu", norm)
    for run in (ops.window_decode_ref, ops.window_decode):
        for got, exact in zip(with_rings(run, case), exact_window(*case), strict=True):
            torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=2e-5, equal_nan=True)


@on_each_device
def test_padding_touches_no_row(device):
    """A row that belongs to nobody, three times among the others, always at its first token."""
    case = window_case((4, 2, 64, 32, 20), torch.bfloat16, device, positions=[0, 7, 0, 90, 0])
    case[9][[0, 2, 4]] = PADDING
    out, *rings = with_rings(twin.window_decode, case)
    assert out.isfinite().all()
    own = [1, 3]
    alone = [case[0][own], *case[1:6], case[6][own], *case[7:9], case[9][own], case[10]]
    expected, *others = with_rings(twin.window_decode, alone)
    assert torch.equal(out[own], expected)
    live = [row for row in range(ROWS) if row != PADDING]
    assert all(torch.equal(a[live].nan_to_num(9), b[live].nan_to_num(9)) for a, b in zip(rings, others, strict=True))


@on_each_device
def test_no_row(device):
    case = window_case((4, 2, 64, 32, 20), torch.bfloat16, device, positions=[])
    assert twin.window_decode(*case).shape == (0, 4, 64)


@on_each_device
def test_steps_follow_one_another(device):
    """A ring of 32 filled token by token, past its end twice: each step sees what the ones before remembered."""
    case = window_case((4, 2, 32, 32, 32), torch.float32, device, positions=[0, 5])
    rings = [torch.full_like(ring, torch.nan) for ring in case[7:9]]
    exact = [ring.clone() for ring in rings]
    for step in range(70):
        qkv = torch.randn(1, case[0].shape[1], device=device)
        at = torch.tensor([step], device=device)
        got = twin.window_decode(qkv, *case[1:6], at, *rings, case[9][:1], 32)
        expected, *exact = exact_window(qkv, *case[1:6], at, *exact, case[9][:1], 32)
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 8, 64])
def test_at_full_size(num_rows, dtype, monkeypatch):
    """The 500m shape as it is launched there: overlapping where the chip can."""
    monkeypatch.setitem(globals(), "ROWS", num_rows)
    positions = [(37 * i * i + 255) % 1000 for i in range(num_rows)]
    case = window_case((12, 3, 64, 256, 256), dtype, "cuda", positions=positions)
    check(case, overlap=overlaps_launches(case[0].device))


@pytest.mark.gpu
def test_in_a_cuda_graph():
    """Behind other work, at positions and rows that change between replays."""
    case = window_case((12, 3, 64, 256, 256), torch.bfloat16, "cuda")
    fresh = [ring.clone() for ring in case[7:9]]

    def step():
        return ops.window_decode(case[0] * 2, *case[1:])

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    case[0].normal_()
    case[6].copy_(case[6].flip(0))
    case[9].copy_(case[9].flip(0))
    results = []
    for run in (lambda: graph.replay() or captured, step):
        for ring, saved in zip(case[7:9], fresh, strict=True):
            ring.copy_(saved)
        results.append([run().clone(), case[7].clone(), case[8].clone()])
    assert all(torch.equal(a.nan_to_num(9), b.nan_to_num(9)) for a, b in zip(*results, strict=True))


def moves(width, count, dtype, device):
    """Two caches, keys and values, of blocks of 4 slots of `width` numbers, and `count` slots to move, every third to
    nowhere."""
    source, target = (torch.randn(2, 40, 4, *width, device=device).to(dtype) for _ in range(2))
    slots = torch.stack([torch.randperm(160)[:count] for _ in range(2)])
    slots[1, 1::3] = -1
    return source, target, slots.to(device)


@on_each_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [(3, 64), (1, 5), (8, 256)], ids=str)
@pytest.mark.parametrize("count", [0, 1, 50, 160])
def test_moving_keys_and_values(width, count, dtype, device):
    """As by hand, in the reference and in the kernel; the rest of the target stays."""
    source, target, slots = moves(width, count, dtype, device)
    expected = target.flatten(1, 2).clone()
    for begin, end in slots.T.tolist():
        if end >= 0:
            expected[:, end] = source.flatten(1, 2)[:, begin]
    for run in (kv_cache.move_kv, kv_cache.move_kv_ref, *([kv_cache_triton.move_kv] if count else [])):
        moved = target.clone()
        run(tuple(source), tuple(moved), slots)
        assert torch.equal(moved.flatten(1, 2), expected)


def launches(shape, dtype, overlap):
    """What one layer launches."""
    case = window_case(shape, dtype, "cpu")
    return record_launches(twin, lambda: twin.window_decode(*case, overlap))


@COMPILED
@pytest.mark.parametrize("cc", SHARED_MEMORY)
def test_compiles(cc):
    """On each chip as it is launched there: overlapping from Hopper on. The 500m shape, then heads of 256 and a ring
    of several tiles."""
    found = [
        *launches(SHAPES[0], torch.bfloat16, cc >= 90), *launches(SHAPES[4], torch.float16, cc >= 90),
        *launches((8, 1, 128, 4096, 4096), torch.bfloat16, cc >= 90), *launches(SHAPES[0], torch.float32, cc >= 90),
    ]  # fmt: skip
    source, target, slots = moves((3, 64), 50, torch.bfloat16, "cpu")
    found += record_launches(kv_cache_triton, lambda: kv_cache_triton.move_kv(tuple(source), tuple(target), slots))
    check_compiles([(launch, cc) for launch in found])


@COMPILED
def test_under_the_interpreter():
    with interpreted(__file__) as finish:
        finish()
