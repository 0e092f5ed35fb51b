"""The flash-attn backend against a stand-in that follows the package's documented rules and refuses what it refuses."""

import importlib.util
import sys
from types import ModuleType

import pytest
import torch
from checkpoints import hf_logprobs
from engine_helpers import check_generate, generate, greedy, make_prompts

from nanovllm.attention import choose_backend
from nanovllm.attention.base import AttentionMetadata, KVCache
from nanovllm.attention.torch import TorchAttention
from nanovllm.engine import build

PAGE = 256
MODULE = "nanovllm.attention.flash"


class FakeFlashAttn(ModuleType):
    """flash_attn's two functions in plain arithmetic. The real ones take half precision alone; a test of the numbers
    may allow float32 too."""

    def __init__(self):
        super().__init__("flash_attn")
        self.dtypes = {torch.float16, torch.bfloat16}
        self.calls = {"varlen": 0, "kvcache": 0}

    def flash_attn_varlen_func(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        """q [T, H, D]; k and v [pages, PAGE, KV, D] with a block table; returns [T, H, D]."""
        self.calls["varlen"] += 1
        for ends in (cu_seqlens_q, cu_seqlens_k):
            assert ends.dtype == torch.int32 and ends.is_contiguous() and ends.dim() == 1
            assert len(ends) == len(block_table) + 1 and ends[0] == 0
        assert cu_seqlens_q[-1] == len(q)
        assert type(max_seqlen_q) is int and max_seqlen_q >= cu_seqlens_q.diff().max() > 0
        assert type(max_seqlen_k) is int and max_seqlen_k >= cu_seqlens_k.diff().max()
        rows = q.split(cu_seqlens_q.diff().tolist())
        return torch.cat(self._attend(rows, k, v, cu_seqlens_k.diff(), block_table, softmax_scale, causal))

    def flash_attn_with_kvcache(
        self, q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
        return_softmax_lse=False,
    ):  # fmt: skip
        """q [S, Lq, H, D]; caches as above, with cache_seqlens [S] keys each; returns [S, Lq, H, D]."""
        self.calls["kvcache"] += 1
        assert k is None and v is None, "the backend writes by itself"
        assert q.dim() == 4 and cache_seqlens.dtype == torch.int32 and cache_seqlens.is_contiguous()
        assert len(q) == len(cache_seqlens) == len(block_table)
        return torch.stack(self._attend(q, k_cache, v_cache, cache_seqlens, block_table, softmax_scale, causal))

    def _attend(self, queries, k, v, key_lens, block_table, scale, causal):
        """One sequence after the other; the causal mask ends in the lower right corner."""
        num_pages, page, kv_heads, dim = k.shape
        assert k.shape == v.shape and page % 256 == 0, "pages are multiples of 256 tokens"
        assert dim % 8 == 0 and dim <= 256
        assert block_table.dtype == torch.int32 and block_table.stride(-1) == 1
        out = []
        for q, length, table in zip(queries, key_lens.tolist(), block_table, strict=True):
            assert q.dtype == k.dtype == v.dtype and q.dtype in self.dtypes
            assert all(x.stride(-1) == 1 for x in (q, k, v))
            assert q.shape[-1] == dim and q.shape[1] % kv_heads == 0
            pages = table[: -(-length // page)].long()
            assert len(pages) == -(-length // page) and (pages < num_pages).all() and (pages >= 0).all()
            keys, values = (
                x[pages].flatten(0, 1)[:length].repeat_interleave(q.shape[1] // kv_heads, 1) for x in (k, v)
            )
            scores = torch.einsum("qhd,khd->hqk", q.float(), keys.float()) * (dim**-0.5 if scale is None else scale)
            if causal:
                hidden = torch.ones(len(q), length, dtype=torch.bool).triu(length - len(q) + 1)
                scores = scores.masked_fill(hidden, -torch.inf)
            out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values.float()).to(q.dtype))
        return out


@pytest.fixture
def fake(monkeypatch):
    """A stand-in for the package, and the backend imported anew on top of it."""
    module = FakeFlashAttn()
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    module.backend = importlib.import_module(MODULE).FlashAttention()
    monkeypatch.delitem(sys.modules, "flash_attn")  # or transformers takes it for the package
    yield module
    sys.modules.pop(MODULE)


# Attention alone

HEADS, KV_HEADS, DIM = 6, 2, 16
# Per sequence: tokens in the cache before the step, tokens of the step.
PREFILLS = {
    "one token": [(0, 1)],
    "around a page": [(0, 255), (0, 256), (0, 257)],
    "after a prefix": [(256, 1), (256, 40), (255, 2), (512, 5)],
    "mixed": [(0, 3), (300, 20), (0, 260), (511, 1)],
}
DECODES = {
    "one": [(0, 1)],
    "around a page": [(254, 1), (255, 1), (256, 1)],
    "mixed": [(5, 1), (600, 1), (0, 1), (511, 1)],
}
CASES = [("prefill", name) for name in PREFILLS] + [("decode", name) for name in DECODES]


def make_step(lengths, is_decode):
    """Metadata of a step, with pages in random order, and the number of pages."""
    totals = [before + new for before, new in lengths]
    counts = [-(-total // PAGE) for total in totals]
    num_pages = sum(counts) + 2
    order = torch.randperm(num_pages).split([*counts, 2])
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for row, pages in zip(table, order[:-1], strict=True):
        row[: len(pages)] = pages
    sums = [torch.tensor([0, *values]).cumsum(0).to(torch.int32) for values in ([n for _, n in lengths], totals)]
    context_lens = torch.tensor(totals, dtype=torch.int32)
    query_lens = [new for _, new in lengths]
    metadata = AttentionMetadata(torch.empty(0), table, *sums, context_lens, query_lens, totals, is_decode)
    return metadata, num_pages


def attend(backend, metadata, num_pages, cache, q):
    """The backend's answer for queries whose keys and values are in the cache."""
    metadata.scratch.clear()
    backend.prepare(metadata, num_pages, PAGE)
    return backend.attend(q, cache, metadata, DIM**-0.5)


@pytest.mark.parametrize(("kind", "name"), CASES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_flash_equals_torch(kind, name, dtype, fake):
    """Within the rounding of the dtype; pages behind a sequence's end, and pages of nobody, hold NaN."""
    if dtype == torch.float32:
        fake.dtypes.add(dtype)
    lengths = (PREFILLS if kind == "prefill" else DECODES)[name]
    metadata, num_pages = make_step(lengths, is_decode=kind == "decode")
    cache = KVCache(*(torch.full((num_pages + 1, PAGE, KV_HEADS, DIM), torch.nan, dtype=dtype) for _ in range(2)))
    for part in cache:
        part[-1] = 0  # what padding reads
        for row, total in zip(metadata.block_table, metadata.seq_lens, strict=True):
            positions = torch.arange(total)
            slots = row[positions // PAGE].long() * PAGE + positions % PAGE
            part.flatten(0, 1)[slots] = torch.randn(total, KV_HEADS, DIM).to(dtype)
    q = torch.randn(sum(metadata.query_lens), HEADS, DIM).to(dtype)
    ours = attend(fake.backend, metadata, num_pages, cache, q)
    theirs = attend(TorchAttention(), metadata, num_pages, cache, q)
    assert ours.shape == q.shape and ours.dtype == dtype
    torch.testing.assert_close(ours, theirs, atol=4 * torch.finfo(dtype).eps, rtol=4 * torch.finfo(dtype).eps)
    assert fake.calls == {"varlen": int(kind == "prefill"), "kvcache": int(kind == "decode")}


# A whole engine


@pytest.fixture
def flash_engine(fake, monkeypatch, make_llm):
    """make_llm with the flash backend, on the CPU."""
    monkeypatch.setattr(build, "choose_backend", lambda *args: (fake.backend, "a test wants it"))
    return lambda path, **knobs: make_llm(path, **{"kvcache_block_size": None, "num_kvcache_blocks": 8, **knobs})


@pytest.mark.parametrize("name", ["qwen3_path", "llama_path"])
@pytest.mark.parametrize("budget", [64, 1000])
def test_engine_with_flash_gives_transformers_tokens(name, budget, request, fake, flash_engine):
    """Whole prompts and chunks, a shared prefix of one page, growth into the next page, mixed lengths."""
    fake.dtypes.add(torch.float32)
    path = request.getfixturevalue(name)
    llm = flash_engine(path, max_num_batched_tokens=budget)
    assert llm.engine.block_size == PAGE
    prompts = make_prompts(1, 250, 256, 257, 300)
    prompts.append([*prompts[-1][:256], 9, 8, 7])
    check_generate(llm, path, prompts)
    assert check_generate(llm, path, prompts[-2:])[1]["num_cached_tokens"] == 256
    assert min(fake.calls.values()) > 0


def test_engine_with_flash_takes_whole_pages_alone(flash_engine, qwen3_path):
    """The package reads pages of 256 tokens or multiples."""
    with pytest.raises(ValueError, match=r"kvcache_block_size=128 .*'flash'.*multiples of 256"):
        flash_engine(qwen3_path, kvcache_block_size=128)


def test_engine_with_flash_in_bfloat16(fake, flash_engine, qwen3_path):
    """Everything the package checks holds in the dtype it takes; scores are as close to float32 as torch's."""
    prompts = make_prompts(40, 300)
    llm = flash_engine(qwen3_path, dtype="bfloat16", max_num_batched_tokens=128)
    outputs = generate(llm, prompts, greedy(20))
    assert [len(output["token_ids"]) for output in outputs] == [20, 20]
    errors = []
    for backend in (fake.backend, TorchAttention()):
        llm.engine.backend = llm.engine.runner.backend = backend
        scores = [torch.tensor(score["token_logprobs"][1:]) for score in llm.score(prompts)]
        exact = [hf_logprobs(qwen3_path, prompt) for prompt in prompts]
        errors.append((torch.cat(scores) - torch.cat(exact)).square().mean())
    assert 0 < errors[0] <= 4 * errors[1]


# Whether it is taken

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def installed(monkeypatch):
    """installed(True or False): whether Python finds the package."""
    find = importlib.util.find_spec

    def set_installed(there):
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name, *args: (object() if there else None) if name == "flash_attn" else find(name, *args),
        )

    return set_installed


@pytest.mark.parametrize(
    ("device", "dtype", "there", "reason"),
    [
        (CPU, torch.bfloat16, True, "device is cpu"),
        (CUDA, torch.float32, True, "float32"),
        (CUDA, torch.bfloat16, False, "not installed"),
    ],
    ids=str,
)
def test_flash_is_refused_with_the_reason(device, dtype, there, reason, installed):
    """Asked for by name it is an error, with "auto" another backend is taken; no import fails."""
    installed(there)
    with pytest.raises(ValueError, match=rf"attention_backend='flash'.*{reason}"):
        choose_backend("flash", device, dtype)
    assert choose_backend("auto", device, dtype)[0].name != "flash"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_flash_is_taken_where_it_can_run(dtype, fake, installed):
    """By name, and not when torch's own operators are asked for."""
    installed(True)
    assert choose_backend("flash", CUDA, dtype)[0].name == "flash"
    assert choose_backend("torch", CUDA, dtype)[0].name == "torch"
