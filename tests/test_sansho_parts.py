"""Parts of Sansho alone: the chunked scan against the recurrence, rings against whole contexts, snapshots."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from nanovllm.attention.base import KVCache
from nanovllm.attention.window import Ring, WindowMetadata, window_attention
from nanovllm.engine import sansho_batch
from nanovllm.engine.sansho_batch import Plan, Room, pack, plan_prefill, snapshot_rows, state_segments, unpack
from nanovllm.engine.snapshots import Snapshots
from nanovllm.engine.step import PrefillChunk
from nanovllm.kernels.mamba_step import Drive, gated_norm_ref, mamba_conv_ref, mamba_read_ref
from nanovllm.kernels.ssd import Segment, causal_conv_ref, ssd_ref
from nanovllm.models.sansho_reference import attention

L, H, P, G, N = 3, 6, 5, 2, 7


def scan_inputs(num_tokens):
    """x, dt, b, c, a_log, dt_bias, d of one sequence."""
    x, dt = torch.randn(num_tokens, L, H, P), torch.randn(num_tokens, L, H)
    return x, dt, *torch.randn(2, num_tokens, L, G, N), *torch.randn(3, L, H)


def recurrence(x, dt, b, c, a_log, dt_bias, d, state):
    """One token after the other, in float64."""
    x, dt, b, c, a_log, dt_bias, d, state = (tensor.double() for tensor in (x, dt, b, c, a_log, dt_bias, d, state))
    group = torch.arange(H) // (H // G)
    y = torch.empty_like(x)
    dt = F.softplus(dt + dt_bias)
    for t in range(len(x)):
        decay = torch.exp(-dt[t] * a_log.exp())[..., None, None]
        state = decay * state + torch.einsum("lh,lhp,lhn->lhpn", dt[t], x[t], b[t][:, group])
        y[t] = torch.einsum("lhpn,lhn->lhp", state, c[t][:, group]) + d[..., None] * x[t]
    return y.float(), state.float()


# The scan


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 8, 9, 31])
@pytest.mark.parametrize("chunk_size", [1, 4, 8, 64])
def test_chunks_are_the_recurrence(num_tokens, chunk_size):
    inputs, states = scan_inputs(num_tokens), torch.randn(3, L, H, P, N)
    expected, last = recurrence(*inputs, states[1])
    before = states.clone()
    y = ssd_ref(*inputs, states, [Segment(0, num_tokens, 1, 2)], chunk_size)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states[2], last, rtol=1e-4, atol=1e-4)
    assert torch.equal(states[:2], before[:2])
    without = before.clone()
    assert ssd_ref(*inputs[:3], None, *inputs[4:], without, [Segment(0, num_tokens, 1, 2)], chunk_size) is None
    torch.testing.assert_close(without, states)


def test_segments_go_on_from_one_another():
    """Two sequences; the first leaves a copy of itself after 4 tokens and at its end."""
    inputs, states = scan_inputs(12), torch.randn(5, L, H, P, N)
    before = states.clone()
    segments = [Segment(0, 4, 0, 3), Segment(4, 9, 3, 4), Segment(9, 9, 4, 0), Segment(9, 12, 1, 1)]
    y = ssd_ref(*inputs, states, segments, 3)
    one, two, other = slice(0, 4), slice(0, 9), slice(9, 12)
    for part, first, found in ((one, 0, 3), (two, 0, 4), (two, 0, 0), (other, 1, 1)):
        own = [*(tensor[part] for tensor in inputs[:4]), *inputs[4:]]
        expected, last = recurrence(*own, before[first])
        torch.testing.assert_close(y[part], expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(states[found], last, rtol=1e-4, atol=1e-4)
    assert torch.equal(states[2], before[2])


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("cuts", [(9,), (1, 9), (4, 5, 9)])
def test_convolution_in_pieces(width, cuts):
    """Any cuts give what one convolution over all tokens gives."""
    x, weight, bias = torch.randn(9, 2, 11), torch.randn(2, 11, width), torch.randn(2, 11)
    states = torch.zeros(2, 2, 11, width - 1)
    past = F.pad(x.flatten(1).T, (width - 1, 0))
    expected = F.silu(F.conv1d(past, weight.view(22, 1, width), bias.flatten(), groups=22).T).view(x.shape)
    segments = [Segment(first, end, 1, 1) for first, end in zip((0, *cuts), cuts, strict=False)]
    torch.testing.assert_close(causal_conv_ref(x, weight, bias, states, segments), expected)
    assert torch.equal(states[1].flatten(0, 1), past[:, 9:])


def test_a_step_is_a_scan_of_one_token():
    """Two rows and a padding row twice: all layers' convolutions at once, then layer by layer the states."""
    layers, channels = 3, H * P + G * N
    projected, rows = torch.randn(4, layers, channels + H), torch.tensor([2, 3, 0, 3])
    conv, states = torch.randn(4, layers, channels, 3), torch.randn(4, layers, H, P, N)
    weight, bias = torch.randn(layers, channels, 4), torch.randn(layers, channels)
    a_log, dt_bias, d = torch.randn(layers, H), torch.randn(layers, H), torch.randn(H)
    before = conv.clone(), states.clone()
    xb, dt = mamba_conv_ref(projected, rows, conv, weight, bias, dt_bias)
    x, b = xb[..., : H * P].unflatten(-1, (H, P)), xb[..., H * P :].unflatten(-1, (G, N))
    c = torch.randn(4, layers, G, N)
    y = [
        mamba_read_ref(x[:, i], Drive(b[:, i], dt[:, i], a_log[i]), states[:, i], rows, c[:, i], d)
        for i in range(layers)
    ]
    for i, row in ((0, 2), (2, 0)):
        for layer in range(layers):
            at, one, segments = slice(layer, layer + 1), projected[i : i + 1], [Segment(0, 1, 0, 0)]
            own, mine = (tensor[row : row + 1, at].clone() for tensor in before)
            own_xb = causal_conv_ref(one[:, at, :channels], weight[at], bias[at], own, segments)
            own_x, own_b = own_xb.split((H * P, G * N), dim=-1)
            own_x, own_b, own_c = own_x.view(1, 1, H, P), own_b.view(1, 1, G, N), c[i : i + 1, at]
            rest = (a_log[at], dt_bias[at], d[None], mine, segments, 8)
            expected = ssd_ref(own_x, one[:, at, channels:], own_b, own_c, *rest)
            torch.testing.assert_close(conv[row, layer], own[0, 0])
            torch.testing.assert_close(states[row, layer], mine[0, 0])
            torch.testing.assert_close(y[layer][i], expected[0, 0])
            again = mamba_read_ref(own_x[:, 0], None, states[:, layer], rows[i : i + 1], own_c[:, 0], d)
            torch.testing.assert_close(again, expected[:, 0])
    assert torch.equal(states[1], before[1][1])
    assert torch.equal(conv[1], before[0][1])


def test_the_gated_norm_is_per_group():
    y, z, weight = torch.randn(3, 12), torch.randn(3, 12), torch.randn(12)
    expected = F.rms_norm((y * F.silu(z)).view(3, 3, 4), (4,), eps=1e-5).view(3, 12) * weight
    torch.testing.assert_close(gated_norm_ref(y, z, weight, 1e-5, 3), expected)


def unpacked(plan, ring, room=None, scored=False):
    """A plan on its way through one copy, with chunks of 3 tokens."""
    room = room or plan.room(3, scored)
    return unpack(torch.from_numpy(pack(plan, room, 3, padding_row=9)), room, ring, 3, plan.segments)


def pieces_of(plan, scored):
    """Pieces, their tables without padding."""
    pieces = unpacked(plan, Ring(1, 1), scored=scored)[2]
    for piece, table in zip(pieces, plan.tables(plan.room(3, scored), 3), strict=True):
        assert (piece.table[len(table) :, 2:4] == -1).all() and not piece.table[len(table) :, :2].any()
        piece.table = piece.table[: len(table)]
    return pieces


def test_segments_are_cut_with_their_tokens(monkeypatch):
    """Pieces of 4 tokens: what was begun goes on in its target, an empty segment stays with its predecessor. Kernels
    take spans of 3 tokens at most, of which the first one of those that go on from one another knows a source."""
    monkeypatch.setattr(sansho_batch, "_PIECE_TOKENS", 4)
    segments = [Segment(0, 6, 0, 7), Segment(6, 8, 7, 8), Segment(8, 8, 8, 0), Segment(8, 11, 1, 1)]
    plan = Plan([], np.zeros(11, int), *np.zeros((2, 2, 0), int), [0], [], segments)
    pieces = pieces_of(plan, False)
    assert [(piece.start, piece.end, piece.segments, piece.table.tolist()) for piece in pieces] == [
        (0, 4, [(0, 4, 0, 7)], [[0, 3, 0, -1, 0, 0], [3, 4, -1, 7, 0, 0]]),
        (
            4,
            8,
            [(0, 2, 7, 7), (2, 4, 7, 8), (4, 4, 8, 0)],
            [[0, 2, 7, 7, 0, 7], [2, 4, -1, 8, 0, 7], [4, 4, -1, 0, 0, 7]],
        ),
        (8, 11, [(0, 3, 1, 1)], [[0, 3, 1, 1, 0, 1]]),
    ]
    (whole_step,) = pieces_of(plan, True)
    assert (whole_step.start, whole_step.end, whole_step.segments) == (0, 11, segments)
    assert whole_step.table[-2:].tolist() == [[8, 8, -1, 0, 0, 0], [8, 11, 1, 1, 8, 1]]


# Windows


def chunk_of(row, start, length, snapshots=()):
    return PrefillChunk(row, start, [0] * length, False, start, [], 0, list(snapshots))


def window_step(chunks, taken, ring):
    """Windows of a prefill with room for more sequences, tokens and keys than it has."""
    plan = plan_prefill(chunks, taken, ring)
    room = Room.bucket(len(chunks) + 2, len(plan.slots) + 3, ring, 3)
    assert room.holds(plan.room(3, False))
    return unpacked(plan, ring, room)[1]


def whole(qkv, window, heads=4, dim=8):
    """Attention over a whole sequence, without a cache, norm or rotary."""
    q, k, v = qkv.view(len(qkv), -1, dim).split((heads, 2, 2), dim=1)
    return attention(q, k, v, window)


def run(qkv, ring, step, positions):
    """`window_attention` with rotary that turns nothing, of these tokens and as many of padding as the step has."""
    tables = torch.ones(64, 8), torch.zeros(64, 8)
    padding = 0 if step.slots is None else len(step.slots) - len(qkv)
    qkv, positions = F.pad(qkv, (0, 0, 0, padding), value=torch.nan), F.pad(positions, (0, padding))
    out = window_attention(qkv, 4, (None, None, 0.0), (*tables, positions), ring, step).flatten(1)
    return out[: len(out) - padding]


@pytest.mark.parametrize("window", [1, 2, 7, 8, 9])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("cut", [1, 5, 8, 20])
def test_a_ring_is_a_window(window, block_size, cut):
    """Row 2 of four: chunks of `cut` tokens up to 20, then decode steps to 40; all slots are NaN before. A snapshot is
    taken within a chunk on the way and goes on alone in row 1."""
    size = Ring(window, block_size)
    qkv = torch.randn(40, 64)
    expected = whole(qkv, window)
    ring = KVCache(*(torch.full((4 * size.num_blocks, block_size, 2, 8), torch.nan) for _ in range(2)))
    for start in range(0, 20, cut):
        end = min(start + cut, 20)
        taken = [[(12, 1)] if start < 12 <= end else []]
        step = window_step([chunk_of(2, start, end - start)], taken, size)
        out = run(qkv[start:end], ring, step, torch.arange(start, end))
        torch.testing.assert_close(out, expected[start:end])
    for row, first in ((2, 20), (1, 12)):
        for position in range(first, 40):
            at = torch.tensor([position])
            out = run(qkv[at], ring, WindowMetadata(window, rows=torch.tensor([row])), at)
            torch.testing.assert_close(out[0], expected[position])
    untouched = [*range(size.num_blocks), *range(3 * size.num_blocks, 4 * size.num_blocks)]
    assert ring.k[untouched].isnan().all()


def test_the_window_has_its_edge_at_w():
    """Key i - W + 1 is seen, key i - W is not: changing one changes the last token's output, changing the other not."""
    for window in (1, 3, 8):
        qkv = torch.randn(12, 64)
        for distance, seen in ((window - 1, True), (window, False)):
            other = qkv.clone()
            other[11 - distance, 32:] += 1
            for function in (whole, from_ring):
                assert torch.allclose(function(qkv, window)[11], function(other, window)[11]) != seen


def from_ring(qkv, window):
    """All tokens by one prefill through a ring of pages of 4."""
    size = Ring(window, 4)
    ring = KVCache(*(torch.zeros(size.num_blocks, 4, 2, 8) for _ in range(2)))
    step = window_step([chunk_of(0, 0, len(qkv))], [[]], size)
    return run(qkv, ring, step, torch.arange(len(qkv)))


def test_chunks_of_several_rows_do_not_mix():
    """Three rows at different positions in one step."""
    size = Ring(5, 4)
    qkv = [torch.randn(12, 64) for _ in range(3)]
    ring = KVCache(*(torch.full((3 * size.num_blocks, 4, 2, 8), torch.nan) for _ in range(2)))
    for spans in ([(0, 6), (0, 1), (0, 9)], [(6, 12), (1, 3), (9, 10)]):
        chunks = [chunk_of(row, first, end - first) for row, (first, end) in enumerate(spans)]
        step = window_step(chunks, [[], [], []], size)
        tokens = torch.cat([own[first:end] for own, (first, end) in zip(qkv, spans, strict=True)])
        positions = torch.tensor(np.concatenate([np.arange(first, end) for first, end in spans]))
        out = run(tokens, ring, step, positions)
        expected = [whole(own, 5)[first:end] for own, (first, end) in zip(qkv, spans, strict=True)]
        torch.testing.assert_close(out, torch.cat(expected))


# Snapshots


def test_a_step_becomes_segments():
    """A chunk with two snapshots, the second one at its end, and one with a slot that a later chunk takes too."""
    chunks = [
        chunk_of(0, 4, 8, [(8, 0), (12, 2)]),
        chunk_of(1, 0, 5, [(4, 1)]),
        chunk_of(2, 0, 6, [(4, 1)]),
    ]
    taken = snapshot_rows(chunks, 10)
    assert taken == [[(8, 10), (12, 12)], [], [(4, 11)]]
    assert state_segments(chunks, taken) == [
        (0, 4, 0, 10), (4, 8, 10, 12), (8, 8, 12, 0), (8, 13, 1, 1), (13, 17, 2, 11), (17, 19, 11, 2),
    ]  # fmt: skip


def test_the_least_recently_used_snapshot_goes_first():
    pool = Snapshots(2)
    first, second = pool.take(7), pool.take(8)
    assert {first, second} == {0, 1}
    assert pool.take(7) is None, "it is there"
    assert pool.use(7) == first
    assert pool.take(9) == second
    assert 8 not in pool
    assert 7 in pool
    pool.drop(7)
    pool.drop(7)
    assert pool.take(10) == first
    pool.check({9, 10})
    with pytest.raises(RuntimeError, match=r"2 taken \+ 0 free of 2, 1 of unknown"):
        pool.check({9})
    pool.reset()
    pool.check(set())
    assert Snapshots(0).take(1) is None
