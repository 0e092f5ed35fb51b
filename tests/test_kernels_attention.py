"""Paged attention: the references against plain softmax, the kernels against the references.

Cache slots that no query may see hold NaN, table entries for blocks that none may see are out of range.
"""

import pytest
import torch
from triton_tools import (
    COMPILED,
    DEVICES,
    INTERPRETED,
    SHARED_MEMORY,
    assert_as_good,
    interpreted,
    nan_filled,
    record_launches,
)

from nanovllm.attention.base import AttentionMetadata, KVCache
from nanovllm.attention.torch import TorchAttention
from nanovllm.attention.triton import TritonAttention
from nanovllm.kernels import paged_attention as ops
from nanovllm.kernels import paged_decode_triton as decode_twin
from nanovllm.kernels import paged_prefill_triton as prefill_twin

CONTEXTS = [1, 0, 15, 257, 16, 17, 63]
QUERIES = [1, 0, 15, 140, 1, 9, 63]  # equal to the context: no cached prefix

# (head size, query heads, KV heads, block size, window). Every size, group and window, not every combination.
SHAPES = [
    (64, 2, 2, 16, None),
    (80, 4, 2, 32, 8),
    (96, 4, 1, 64, 256),
    (128, 7, 1, 128, None),
    (128, 4, 2, 256, 8),
    (256, 8, 1, 48, None),
    (64, 8, 1, 64, 1),
]
DTYPES = [torch.float16, torch.bfloat16]
# Interpreting is slow: there every second shape is bfloat16; a GPU runs both.
CASES = [
    (shape, dtype) for i, shape in enumerate(SHAPES) for j, dtype in enumerate(DTYPES) if not INTERPRETED or i % 2 == j
]
# More ways to cut a tile into blocks.
GPU_SHAPES = [(128, 16, 8, size, window) for size in (16, 32, 64, 128, 256) for window in (None, 256)]
GPU_SHAPES += [(size, 4, 2, 64, 8) for size in (64, 80, 96, 256)]


def make_case(contexts, queries, head_dim, heads, kv_heads, block_size, window, dtype, device="cpu"):
    """q, k_cache, v_cache, block_table and context_lens; what no query sees is NaN or out of range."""
    needed = [-(-n // block_size) for n in contexts]
    order = torch.randperm(sum(needed) + 3)
    table = torch.full((len(contexts), max(needed) + 2), 2**30, dtype=torch.int32)
    caches = torch.full((2, len(order), block_size, kv_heads, head_dim), torch.nan, dtype=dtype)
    taken = 0
    for row, context, query, count in zip(table, contexts, queries, needed, strict=True):
        row[:count] = order[taken : taken + count]
        taken += count
        first = 0 if window is None else max(0, context - query - window + 1)
        positions = torch.arange(first, context)
        blocks = row[positions // block_size].long()
        caches[:, blocks, positions % block_size] = torch.randn(2, len(positions), kv_heads, head_dim).to(dtype)
        row[: first // block_size] = -(2**30)
    # Rows of queries lie apart, as those of a fused projection do.
    qkv = torch.randn(sum(queries), heads + 2 * kv_heads, head_dim).to(dtype).to(device)
    rest = (*caches, table, torch.tensor(contexts, dtype=torch.int32))
    return qkv[:, :heads], *(tensor.to(device) for tensor in rest)


def running_sum(lengths, device="cpu"):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)


def plain_attention(q, k, v, cached, scale, window):
    """Softmax written out, float64: q [n, H, D], k and v [L, KV, D]."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.empty_like(q)
    for i in range(len(q)):
        last = cached + i + 1
        first = 0 if window is None else max(0, last - window)
        for h in range(q.shape[1]):
            kv = h * k.shape[1] // q.shape[1]
            out[i, h] = (k[first:last, kv] @ q[i, h] * scale).softmax(0) @ v[first:last, kv]
    return out


@pytest.mark.parametrize("window", [None, 1, 8])
def test_references_are_softmax(window):
    """Both references, with a cached prefix, grouped heads and garbage around the live slots."""
    contexts, queries = [1, 0, 33, 17], [1, 0, 5, 17]
    q, k_cache, v_cache, table, lens = make_case(contexts, queries, 16, 4, 2, 16, window, torch.float32)
    starts = running_sum(queries)
    got = ops.prefill_attention(q, k_cache, v_cache, table, starts, lens, 0.3, window)
    for seq, (context, query) in enumerate(zip(contexts, queries, strict=True)):
        blocks = table[seq, : -(-context // 16)].clamp(0, len(k_cache) - 1).long()
        k, v = (cache[blocks].flatten(0, 1)[:context] for cache in (k_cache, v_cache))
        rows = slice(starts[seq], starts[seq + 1])
        plain = plain_attention(q[rows], k, v, context - query, 0.3, window)
        torch.testing.assert_close(got[rows], plain.float())
    last = starts[1:].long().clamp_min(1) - 1
    one = ops.decode_attention(q[last], k_cache, v_cache, table, lens, max(contexts), 0.3, window)
    expected = torch.where((lens > 0)[:, None, None], got[last], 0.0)
    torch.testing.assert_close(one, expected)


def check(run, reference, q, caches, rest, rows):
    """The kernel `run` is as good as torch for each of `rows`, sequence by sequence: short ones have large outputs
    and would hide the errors of long ones."""
    with nan_filled():
        got = run(q, *caches, *rest)
    rival = reference(q, *caches, *rest)
    exact = reference(q.float(), *(cache.float() for cache in caches), *rest)
    assert got.dtype == q.dtype
    for part in rows:
        assert got[part].isfinite().all()
        assert_as_good(got[part], rival[part], exact[part])


def check_decode(shape, dtype, device, contexts=CONTEXTS, **knobs):
    q, *caches, table, lens = make_case(contexts, [1] * len(contexts), *shape, dtype, device)
    scale = shape[0] ** -0.5
    rest = (table, lens, max(contexts), scale, shape[-1])
    check(
        lambda *args: decode_twin.decode_attention(*args, **knobs),
        ops.decode_attention_ref,
        q,
        caches,
        rest,
        range(len(contexts)),
    )


def check_prefill(shape, dtype, device, contexts=CONTEXTS, queries=QUERIES, **knobs):
    """With room for two more sequences and thirty more tokens, as a CUDA graph has it."""
    q, *caches, table, lens = make_case([*contexts, 0, 0], [*queries, 0, 0], *shape, dtype, device)
    starts = running_sum([*queries, 0, 0], device)
    q = torch.cat((q, torch.full_like(q[:1], torch.nan).expand(30, -1, -1)))
    rest = (table, starts, lens, shape[0] ** -0.5, shape[-1])
    check(
        lambda *args: prefill_twin.prefill_attention(*args, **knobs),
        ops.prefill_attention_ref,
        q,
        caches,
        rest,
        [slice(a, b) for a, b in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)],
    )


def test_interpreted():
    """The tests below that take a device, without one."""
    if not INTERPRETED:
        with interpreted(__file__) as finish:
            finish()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_decode(shape, dtype, device):
    """As many splits as the launch takes, and one."""
    check_decode(shape, dtype, device)
    check_decode(shape, dtype, device, splits=1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_prefill(shape, dtype, device):
    """Mixed lengths, some behind a cached prefix."""
    check_prefill(shape, dtype, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("splits", [2, 5, 9])
def test_decode_splits(splits, window, device):
    """Few, uneven, and more splits than keys can fill."""
    check_decode((64, 4, 2, 32, window), torch.float16, device, contexts=[700, 0, 129, 1], splits=splits)


@pytest.mark.parametrize("device", DEVICES)
def test_decode_of_a_group_that_takes_two_tiles(device):
    """Forty heads on one KV head."""
    check_decode((64, 40, 1, 16, None), torch.float16, device, contexts=[100, 0, 17])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, 256])
def test_prefill_of_many_tiles(window, device):
    """Tiles before the diagonal that need no mask, and tiles that the window cuts off."""
    check_prefill((64, 1, 1, 64, window), torch.float16, device, contexts=[700, 300], queries=[450, 300])


def test_number_of_splits():
    """One where there is work enough; never so many that a split has less than two tiles."""
    assert decode_twin.num_splits(2048, 4096, 132, 64) == 1
    assert decode_twin.num_splits(8, 8192, 132, 64) == 64
    assert decode_twin.num_splits(8, 100, 132, 64) == 1
    assert decode_twin.num_splits(128, 40960, 132, 64) == 4
    assert decode_twin.num_splits(1, 10**6, 132, 64) == 128


def launches_for(cc, head_dim, window, block_size):
    """What both launch functions ask of a chip: decode with one split and with several, prefill."""
    capability = divmod(cc, 10)
    shape = (head_dim, 4, 2, block_size, window)
    q, *caches, table, lens = make_case([32, 32], [1, 1], *shape, torch.bfloat16)
    scale = head_dim**-0.5
    decode = record_launches(
        decode_twin,
        lambda: [
            decode_twin.decode_attention(
                q, *caches, table, lens, 32, scale, window, splits, decode_twin.decode_config(capability, head_dim)
            )
            for splits in (1, 3)
        ],
    )
    config = prefill_twin.prefill_config(capability, head_dim, window is not None)
    prefill = record_launches(
        prefill_twin,
        lambda: prefill_twin.prefill_attention(q, *caches, table, running_sum([1, 1]), lens, scale, window, config),
    )
    return decode + prefill


def check_each(launches, cc):
    """One at a time: two threads in ast.parse end in a SystemError now and then (seen with Python 3.11.7)."""
    for launch in launches:
        shared = launch.shared_memory(cc)
        assert shared <= SHARED_MEMORY[cc], f"{launch.kernel.__name__} takes {shared} bytes on sm_{cc}"


@COMPILED
@pytest.mark.parametrize("cc", [80, 86, 89, 90, 100, 120])
def test_compiles(cc):
    """Fits each chip's shared memory at the launch configurations; a head of 256 takes most, blocks of 16 mean a
    lookup per key."""
    check_each(launches_for(cc, 128, None, 64) + launches_for(cc, 256, None, 16)[::3], cc)


@COMPILED
@pytest.mark.parametrize(("cc", "head_dim", "window"), [(86, 64, None), (86, 80, 8), (90, 96, 8)])
def test_compiles_for_other_shapes(cc, head_dim, window):
    """Smaller heads and windows, where the limit is tightest and where most are served."""
    check_each(launches_for(cc, head_dim, window, 64)[-2:], cc)


@pytest.mark.parametrize("is_decode", [True, False])
def test_backend(is_decode):
    """The backend hands the metadata on: it attends as torch's backend does, by the references on a CPU."""
    contexts, queries = [5, 40], [1, 1] if is_decode else [5, 9]
    q, k_cache, v_cache, table, lens = make_case(contexts, queries, 32, 4, 2, 16, None, torch.float32)
    table = table.clamp_max(len(k_cache) - 1)
    k_cache, v_cache = k_cache.nan_to_num(), v_cache.nan_to_num()
    results = []
    for backend in (TritonAttention(), TorchAttention()):
        metadata = AttentionMetadata(
            slot_mapping=None,
            block_table=table,
            cu_seqlens_q=running_sum(queries),
            cu_seqlens_k=running_sum(contexts),
            context_lens=lens,
            query_lens=queries,
            seq_lens=contexts,
            is_decode=is_decode,
        )
        backend.prepare(metadata, len(k_cache) - 1, 16)
        results.append(backend.attend(q.contiguous(), KVCache(k_cache, v_cache), metadata, 0.2))
    torch.testing.assert_close(*results)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_more_shapes(shape):
    """Both kernels."""
    check_decode(shape, torch.bfloat16, "cuda", contexts=[*CONTEXTS, 1500])
    check_prefill(shape, torch.bfloat16, "cuda", contexts=[*CONTEXTS, 1500], queries=[*QUERIES, 700])


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [None, 1])
def test_decode_in_a_graph(splits):
    """A graph captured at the longest context serves shorter ones and padding rows; nothing waits for the device."""
    contexts = [900, 1, 300, 64, 0, 0]
    q, *caches, table, lens = make_case(contexts, [1] * 6, 128, 16, 8, 64, None, torch.bfloat16, "cuda")
    attend = ops.decode_attention if splits is None else decode_twin.decode_attention
    knobs = {} if splits is None else {"splits": splits}
    seen = lens.clone()
    seen[:] = 0
    attend(q, *caches, table, seen, 4096, 0.1, **knobs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attend(q, *caches, table, seen, 4096, 0.1, **knobs)
    for live in (lens, lens.clamp_max(5), torch.zeros_like(lens), lens):
        seen.copy_(live)
        graph.replay()
        rest = (table, live, 900, 0.1)
        exact = ops.decode_attention_ref(q.float(), *(cache.float() for cache in caches), *rest)
        for row in range(6):
            assert_as_good(got[row], ops.decode_attention_ref(q, *caches, *rest)[row], exact[row])
        assert not got[live == 0].any()


@pytest.mark.gpu
def test_cache_beyond_32_bits():
    """Offsets in a pool of more than 2^31 elements do not wrap."""
    if torch.cuda.get_device_properties(0).total_memory < 16 * 2**30:
        pytest.skip("the pool takes 8.6 GB")
    blocks = 2**31 // (64 * 8 * 128) + 8
    caches = torch.empty(2, blocks, 64, 8, 128, dtype=torch.bfloat16, device="cuda")
    caches[:, -4:] = torch.randn(2, 4, 64, 8, 128, device="cuda")
    table = torch.arange(blocks - 4, blocks, dtype=torch.int32, device="cuda")[None]
    small = torch.arange(4, dtype=torch.int32, device="cuda")[None]
    lens, starts = torch.tensor([250], dtype=torch.int32, device="cuda"), running_sum([40], "cuda")
    q = torch.randn(40, 16, 128, device="cuda", dtype=torch.bfloat16)
    last = caches[:, -4:].clone()
    for attend, rows, lengths in (
        (ops.prefill_attention, q, (starts, lens)),
        (ops.decode_attention, q[:1], (lens, 250)),
    ):
        assert torch.equal(attend(rows, *caches, table, *lengths, 0.1), attend(rows, *last, small, *lengths, 0.1))
