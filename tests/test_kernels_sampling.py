"""Sampling and log probabilities: kernels against the references, the references against exact probabilities."""

import functools

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton_tools import COMPILED, DEVICES, SHARED_MEMORY, check_compiles, interpreted, nan_filled, record_launches

from nanovllm.kernels import logprobs_triton, sampling, sampling_triton
from nanovllm.kernels.sampling_triton import _bar, _keep, _log_noise, _uniform

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INF = float("inf")
on_each_device = pytest.mark.parametrize("device", DEVICES)
in_each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(scope="module")
def interpreter():
    with interpreted(__file__) as finish:
        yield finish


@pytest.fixture
def small_blocks(monkeypatch):
    """A hundred tokens are many: they make several blocks, overfill the window and need several passes."""
    monkeypatch.setattr(sampling, "_MIN_BLOCK", 16)
    monkeypatch.setattr(sampling, "_MAX_BLOCKS", 16)
    monkeypatch.setattr(sampling_triton, "_STATS_PROGRAMS", 20)
    monkeypatch.setattr(sampling_triton, "_WINDOW", 32)
    monkeypatch.setattr(sampling_triton, "_TILE", 128)


class Case:
    """R rows of logits whose parameters stand, in another order, in vectors of R + 3 places, as the engine has them."""

    def __init__(self, logits, device, filters=None, temperature=None):
        count = len(logits)
        places = torch.randperm(count + 3)[:count]
        floats = torch.full((count + 3, 4), torch.nan)  # one upload, a column for each parameter
        floats[places, 0] = torch.rand(count) + 0.4 if temperature is None else torch.as_tensor(temperature)
        top_k = torch.full((count + 3,), -7, dtype=torch.int32)
        if filters is not None:
            for column, values in enumerate(zip(*filters, strict=True)):
                if column == 0:
                    top_k[places] = torch.tensor(values, dtype=torch.int32)
                else:
                    floats[places, column] = torch.tensor(values)
        self.logits = logits.to(device)
        self.rows = places.to(device)
        self.floats = floats.to(device)
        self.top_k = top_k.to(device)
        self.seed = torch.randint(2**62, (count + 3,)).to(device)
        self.position = torch.randint(40000, (count + 3,)).to(device)
        self.filtered = filters is not None

    @property
    def temperature(self):
        return self.floats[:, 0]

    @property
    def filters(self):
        return (self.top_k, self.floats[:, 1], self.floats[:, 2]) if self.filtered else None

    def scaled(self):
        """Float32 logits as the filters see them."""
        return self.logits.float() / self.temperature[self.rows, None]

    def expected(self):
        """Tokens of the reference."""
        filters = None if self.filters is None else tuple(values[self.rows] for values in self.filters)
        own = (self.temperature[self.rows], self.seed[self.rows], self.position[self.rows])
        return sampling.sample_ref(self.logits.float(), *own, filters).tolist()

    @property
    def own(self):
        return self.rows, self.temperature, self.seed, self.position

    @property
    def block(self):
        return sampling.block_size(self.logits.shape[1])

    def drawn(self):
        """Tokens of the kernels."""
        with nan_filled():
            return sampling_triton.sample(self.logits, self.block, self.own, self.filters).tolist()


@triton.jit
def noise_kernel(uniform_ptr, hash_ptr, out_ptr, N: tl.constexpr):
    """log noise of N given uniform numbers, then of the first N token ids."""
    ids = tl.arange(0, N)
    tl.store(out_ptr + ids, _log_noise(tl.load(uniform_ptr + ids)))
    low = tl.load(hash_ptr).to(tl.uint32)
    high = tl.load(hash_ptr + 1).to(tl.uint32)
    tl.store(out_ptr + N + ids, _log_noise(_uniform(ids, low, high)))


@on_each_device
def test_noise_is_the_references_and_exact_where_small(device):
    size, seed, position = 4096, 2**61 + 12345, 77
    uniform = torch.cat((2.0 ** torch.linspace(-33, 0, size // 2), torch.rand(size // 2)))
    low = sampling._mix32(torch.tensor(seed & 0xFFFFFFFF) ^ sampling._mix32(torch.tensor(position)))
    high = sampling._mix32(torch.tensor(((seed >> 32) + 0x9E3779B9 * (position + 1)) & 0xFFFFFFFF))
    out = torch.empty(2 * size, device=device)
    noise_kernel[(1,)](uniform.to(device), torch.stack((low, high)).to(device), out, N=size)
    got = out.cpu().double().view(2, size)
    torch.testing.assert_close(got[0], (-torch.log1p(-uniform.double())).log(), rtol=0, atol=4e-6)
    wanted = sampling.exponential_noise_ref(torch.tensor([seed]), torch.tensor([position]), torch.arange(size))
    torch.testing.assert_close(got[1], wanted[0].double().log(), rtol=0, atol=4e-6)


@on_each_device
@in_each_dtype
def test_draws_what_the_reference_draws(device, dtype, small_blocks):
    """Some rows greedy, one of these with equal largest logits; a bf16 row has many equal logits."""
    logits = (3 * torch.randn(6, 131)).to(dtype)
    logits[4, 60:64] = 50
    temperature = torch.rand(6) + 0.2
    temperature[[2, 4]] = 0
    case = Case(logits, device, temperature=temperature)
    tokens = case.drawn()
    assert tokens == case.expected()
    assert tokens[4] == 60
    assert sampling_triton.sample(case.logits, case.block, None, None).tolist() == logits.float().argmax(-1).tolist()


@on_each_device
def test_a_row_does_not_depend_on_its_batch(device, small_blocks):
    case = Case(torch.randn(4, 131), device, [(5, 0.9, 0.0)] * 4)
    together = case.drawn()
    case.logits, case.rows = case.logits[[3, 1]], case.rows[[3, 1]]
    assert case.drawn() == [together[3], together[1]]
    case.rows[0] = -1  # padding: any token
    assert case.drawn()[1] == together[1]


def logits_of(kind, count, size=131):
    """Rows of logits that are easy or hard to filter."""
    if kind == "peaked":
        return 8 * torch.randn(count, size)
    if kind == "flat":
        return 0.01 * torch.randn(count, size)
    if kind == "equal":
        return torch.full((count, size), -1.5)
    if kind == "few values":
        return torch.randint(-2, 3, (count, size)) / 2.0  # -0.0 is among them
    if kind == "nearly all forbidden":
        logits = torch.where(torch.rand(count, size) < 0.1, torch.randn(count, size), -INF)
        logits[:, 70] = 1e-3
        return logits
    if kind == "some far below":
        return torch.where(torch.rand(count, size) < 0.5, torch.randn(count, size), -1e30)
    raise ValueError(kind)


# top_k, top_p, min_p
FILTERS = [
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (5, 1.0, 0.0),
    (40, 1.0, 0.0),
    (131, 0.9, 0.0),
    (0, 1e-6, 0.0),
    (0, 1.0, 0.3),
    (0, 1.0, 1.0),
    (60, 0.77, 0.0),
    (7, 0.6, 0.01),
    (0, 0.83, 0.2),
    (100, 0.975, 1e-4),
]
KINDS = ["peaked", "flat", "equal", "few values", "nearly all forbidden", "some far below"]


@triton.jit
def kept_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, max_ptr, sum_ptr, window_ptr,
    bar_ptr, tie_ptr, mass_ptr, V: tl.constexpr,
    WINDOW: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """What one row keeps, whether or not that is all."""
    r = tl.program_id(0)
    temperature = tl.load(temperature_ptr + r)
    index = r * BLOCKS + tl.arange(0, BLOCKS)
    maxes = tl.load(max_ptr + index)
    masses = tl.load(sum_ptr + index) * tl.exp((maxes - tl.max(maxes, 0)) / temperature)
    real = tl.arange(0, BLOCKS) * BLOCK < V
    bar, ties = _bar(
        logits_ptr + r * V, window_ptr + r * WINDOW, maxes, masses, real, temperature,
        tl.load(top_k_ptr + r), tl.load(top_p_ptr + r), tl.load(min_p_ptr + r), V, WINDOW, GROUP, BLOCK, BLOCKS,
    )  # fmt: skip
    last_tie, masses = _keep(logits_ptr + r * V, maxes, bar, ties, 1 / temperature, V, GROUP, BLOCK, BLOCKS)
    tl.store(bar_ptr + r, bar)
    tl.store(tie_ptr + r, last_tie)
    tl.store(mass_ptr + index, masses)


@on_each_device
@pytest.mark.parametrize("kind", KINDS)
def test_filters_keep_what_the_reference_keeps(device, kind, small_blocks):
    """Of equal logits too: the smaller ids stay. What stays of each block has its mass."""
    case = Case(logits_of(kind, len(FILTERS)), device, FILTERS)
    own = [values[case.rows] for values in (case.temperature, *case.filters)]
    maxes, _, sums = sampling_triton.block_stats(case.logits, 16, case.rows, case.temperature, True)
    maxes, sums = F.pad(maxes, (0, 7), value=-INF), F.pad(sums, (0, 7))
    with nan_filled():
        window = torch.empty(len(FILTERS), 32, dtype=torch.int32, device=device)
        bar, last_tie = torch.empty(2, len(FILTERS), dtype=torch.int32, device=device)
        masses = torch.empty_like(maxes)
    kept_kernel[(len(FILTERS),)](
        case.logits, *own, maxes, sums, window, bar, last_tie, masses, V=131, WINDOW=32, GROUP=8, BLOCK=16, BLOCKS=16
    )
    bits = (case.logits + 0.0).view(torch.int32)
    key = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ids = torch.arange(131, device=device)
    kept = (key > bar[:, None]) | ((key == bar[:, None]) & (ids <= last_tie[:, None]))
    wanted = sampling.filter_logits_ref(case.scaled(), *own[1:])
    weights = F.pad((wanted - case.scaled().amax(1, keepdim=True)).exp(), (0, 16 * 16 - 131))
    torch.testing.assert_close(masses, weights.view(-1, 16, 16).sum(2), rtol=1e-5, atol=1e-6)
    wanted = wanted > -INF
    for filters, got, expected in zip(FILTERS, kept & (case.logits > -INF), wanted, strict=True):
        assert got.nonzero().flatten().tolist() == expected.nonzero().flatten().tolist(), filters


@on_each_device
def test_draws_what_the_reference_draws_with_filters(device, small_blocks):
    logits = torch.randn(len(FILTERS), 131).bfloat16()
    case = Case(logits, device, FILTERS)
    assert case.drawn() == case.expected()


@on_each_device
@pytest.mark.parametrize("vocab_size", [3, 300, 151936])
def test_draws_what_the_reference_draws_at_full_size(device, vocab_size):
    """As launched in earnest; from rows that lie apart."""
    filters = [(20, 0.95, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.0)]
    if device == "cpu":  # takes its time
        filters = filters[:1]
    logits = torch.full((len(filters), vocab_size + 8), torch.nan, dtype=torch.bfloat16)
    logits[:, :vocab_size] = 2 * torch.randn(len(filters), vocab_size)
    case = Case(logits[:, :vocab_size], device, filters)
    assert case.drawn() == case.expected()


@on_each_device
def test_not_finite(device, small_blocks):
    """-1 where a NaN or +inf is anywhere, or nothing is allowed; a single -inf is no error."""
    logits = torch.randn(6, 131)
    logits[0, 130] = torch.nan
    logits[1, 3] = INF
    logits[2] = -INF
    logits[3, :100] = -INF
    logits[4, 0] = -INF
    wrong = [True, True, True, False, False, False]
    for filters in (None, [(5, 0.5, 0.1)] * 6):
        tokens = Case(logits, device, filters).drawn()
        assert [token == -1 for token in tokens] == wrong
        assert tokens[3] >= 100
    tokens = sampling_triton.sample(logits.to(device), sampling.block_size(131), None, None).tolist()
    assert [token == -1 for token in tokens] == wrong


@on_each_device
@in_each_dtype
def test_token_logprobs(device, dtype, small_blocks):
    logits = (3 * torch.randn(7, 131)).to(dtype)
    logits[1] = 0.5
    logits[2, 10:] = -INF
    logits[3, 5] = torch.nan
    logits[4, 5] = INF
    logits[5] = -INF
    token_ids = torch.tensor([3, 130, 4, 9, 9, 9, -1])
    for num_top in (0, 1, 20):
        stats = sampling_triton.block_stats(logits.to(device), 16, None, None, True)
        with nan_filled():
            got = logprobs_triton.token_logprobs(logits.to(device), 16, stats, token_ids.to(device), num_top)
        chosen, top_ids, top = (values.cpu() for values in got)
        wanted, wanted_ids, wanted_top = sampling.token_logprobs_ref(logits.float(), token_ids, num_top)
        fine = torch.tensor([0, 1, 2, 6])
        torch.testing.assert_close(chosen[fine], wanted[fine], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(top[fine], wanted_top[fine], rtol=1e-5, atol=1e-5)
        assert chosen[3:6].isnan().all() and top[3:6].isnan().all()
        assert top_ids[1].tolist() == list(range(num_top))  # equal logits: the first of them
        if dtype == torch.float32:
            assert top_ids[[0, 6]].tolist() == wanted_ids[[0, 6]].tolist()
        for ids, values, row in zip(top_ids[fine], top[fine], logits[fine].float(), strict=True):
            assert len(set(ids.tolist())) == num_top
            torch.testing.assert_close(row.log_softmax(-1)[ids], values, rtol=1e-5, atol=1e-5)


def assert_drawn_from(tokens, probs):
    """Chi-square test at five standard deviations; rare tokens count together."""
    expected = probs.double() * len(tokens)
    counts = torch.bincount(tokens.cpu(), minlength=len(probs)).double()
    assert counts[probs == 0].sum() == 0
    rare = expected < 10
    groups = [(counts[i].item(), expected[i].item()) for i in (~rare).nonzero().flatten()]
    if expected[rare].sum() > 1:
        groups.append((counts[rare].sum().item(), expected[rare].sum().item()))
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in groups)
    freedom = len(groups) - 1
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5, f"chi-square {statistic:.1f} with {freedom} degrees"


CHI_FILTERS = [None, (7, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.1), (20, 0.9, 0.01)]


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("filters", CHI_FILTERS, ids=str)
def test_draws_are_from_the_exact_distribution(where, filters, monkeypatch):
    """Over seeds at one position, and over positions with one seed; four blocks."""
    monkeypatch.setattr(sampling, "_MIN_BLOCK", 16)
    count, size = 20000, 50
    logits = torch.linspace(-4, 3, size)[torch.randperm(size)].to(where)
    temperature = torch.full((count,), 0.8, device=where)
    own = None
    scaled = logits / 0.8
    if filters is not None:
        own = tuple(torch.tensor([x], device=where).expand(count).contiguous() for x in filters)
        scaled = sampling.filter_logits_ref(scaled[None], *(x[:1] for x in own))[0]
    rows = torch.arange(count, device=where)
    for seed, position in [(rows, torch.full_like(rows, 100)), (torch.full_like(rows, 2**40 + 3), rows)]:
        tokens = sampling.sample(logits.expand(count, size), rows, temperature, seed, position, own)
        assert_drawn_from(tokens, scaled.softmax(-1).cpu())


def test_on_a_cpu_the_references_run():
    for filters in (None, FILTERS):
        case = Case(torch.randn(len(FILTERS), 40).bfloat16(), "cpu", filters)
        assert sampling.sample(case.logits, *case.own, case.filters).tolist() == case.expected()
    logits = torch.randn(4, 40).bfloat16()
    assert torch.equal(sampling.greedy(logits), sampling.greedy_ref(logits))
    pairs = zip(
        sampling.token_logprobs(logits, torch.arange(4), 3),
        sampling.token_logprobs_ref(logits.float(), torch.arange(4), 3),
        strict=True,
    )
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.gpu
@pytest.mark.parametrize("filters", [None, FILTERS], ids=["plain", "filtered"])
def test_in_a_cuda_graph(filters):
    """What is captured follows logits, rows, parameters and positions; logprobs too."""
    case = Case(torch.randn(len(FILTERS), 32000).bfloat16(), "cuda", filters)

    def step():
        tokens = sampling.sample(case.logits, *case.own, case.filters)
        return tokens, sampling.greedy(case.logits), *sampling.token_logprobs(case.logits, tokens, 5)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    case.logits.normal_()
    case.rows.copy_(case.rows.flip(0))
    case.position += 1
    graph.replay()
    got = [tensor.clone() for tensor in captured]
    assert got[0].tolist() == case.expected()
    assert all(torch.equal(a, b) for a, b in zip(got, step(), strict=True))


@COMPILED
def test_compiles(interpreter):
    """At a usual vocabulary, in bf16: the fullest variant of each kernel for each chip, the others for one."""
    logits = torch.zeros(64, 151936, dtype=torch.bfloat16)
    case = Case(logits, "cpu", [(0, 1.0, 0.0)] * 64)
    tiny = Case(torch.zeros(64, 3), "cpu", [(0, 1.0, 0.0)] * 64)
    blocks = [torch.zeros(64, 149, dtype=dtype) for dtype in (torch.float32, torch.int32, torch.float32)]
    draw, logprobs = sampling_triton, logprobs_triton
    every, one = tuple(SHARED_MEMORY), (86,)
    calls = [
        (every, draw, draw.sample, (logits, 1024, case.own, case.filters)),
        (one, draw, draw.sample, (logits, 1024, case.own, None)),
        (one, draw, draw.sample, (logits, 1024, None, None)),
        (one, draw, draw.sample, (tiny.logits, 256, tiny.own, tiny.filters)),
        (one, draw, draw.block_stats, (logits, 1024, None, None, True)),
        (every, logprobs, logprobs.token_logprobs, (logits, 1024, blocks, case.rows, 5)),
    ]
    jobs = [
        (launch, chip)
        for chips, module, run, arguments in calls
        for launch in record_launches(module, functools.partial(run, *arguments))
        for chip in chips
    ]
    check_compiles(jobs)


@COMPILED
def test_under_the_interpreter(interpreter):
    interpreter()
