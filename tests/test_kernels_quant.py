"""Quantized activations and products with int8 weights: references against float64, kernels against references."""

import pytest
import torch
from triton_tools import (
    COMPILED,
    DEVICES,
    INTERPRETED,
    SHARED_MEMORY,
    assert_as_good,
    check_compiles,
    error,
    interpreted,
    nan_filled,
    record_launches,
)

from nanovllm.kernels import (
    activation,
    activation_triton,
    layernorm,
    layernorm_triton,
    quant_linear,
    quant_linear_triton,
    quantize_triton,
)
from nanovllm.kernels.quant_linear import BUCKETS, FIELDS, chip_table, config_for
from nanovllm.kernels.quantize import QuantizedActivation, quantize_tokens, quantize_tokens_ref

EPS = 1e-6
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
on_each_device = pytest.mark.parametrize("device", DEVICES)
in_digits = pytest.mark.parametrize("digits", [1, 2])
in_each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# The interpreter multiplies the bits of bf16 matrices.
in_16_bits = pytest.mark.parametrize("dtype", DTYPES[2:] if INTERPRETED else DTYPES[1:], ids=str)


@pytest.fixture(scope="module")
def interpreter():
    with interpreted(__file__) as finish:
        yield finish


@pytest.fixture(autouse=True)
def small_is_many(monkeypatch):
    """Programs of the norm take several rows from here on."""
    monkeypatch.setattr(layernorm_triton, "_MANY_ROWS", 200)


def make_weights(n, k, device="cpu", dtype=torch.float16):
    """qweight, scales and bias; the extremes of int8 occur."""
    qweight = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    qweight.view(-1)[:2] = torch.tensor([127, -127], dtype=torch.int8)[: n * k]
    return qweight.to(device), (torch.rand(n) / 50 + 1e-3).to(device), torch.randn(n).to(device, dtype)


def as_numbers(x):
    """What a QuantizedActivation stands for, in float64."""
    values = x.values.double()
    return (values if values.dim() == 2 else values[:, 0] + values[:, 1] / 254) * x.scales.double()[:, None]


def exact_product(x, qweight, scales, bias):
    """In float64; x is a tensor or a QuantizedActivation."""
    if isinstance(x, QuantizedActivation):
        x = as_numbers(x)
    y = (x.double() @ qweight.double().T) * scales.double()
    return y if bias is None else y + bias.double()


@in_each_dtype
def test_quantized_tokens_are_within_half_a_step(dtype):
    x = (torch.randn(17, 96) * torch.logspace(-3, 3, 17)[:, None]).to(dtype)
    got = quantize_tokens_ref(x)
    assert got.values.dtype == torch.int8 and got.scales.dtype == torch.float32 and got.dtype == dtype
    torch.testing.assert_close(got.scales.double(), x.double().abs().amax(1) / 127, rtol=1e-6, atol=0)
    step = got.scales.double()[:, None]
    assert ((got.values.double() * step - x.double()).abs() <= step * (0.5 + 1e-4)).all()
    assert (got.values.abs().amax(1) == 127).all()


@in_each_dtype
def test_a_second_digit_holds_more_than_16_bits(dtype):
    """Within half a step of 1/254 of the first's, so no further off than 1/64000 of the row's largest number."""
    x = (torch.randn(17, 96) * torch.logspace(-3, 3, 17)[:, None]).to(dtype)
    got, one = quantize_tokens_ref(x, 2), quantize_tokens_ref(x)
    assert got.shape == x.shape and torch.equal(got.values[:, 0], one.values) and torch.equal(got.scales, one.scales)
    off = (as_numbers(got) - x.double()).abs()
    assert (off <= got.scales.double()[:, None] / 254 * (0.5 + 1e-2)).all()
    assert (off <= x.double().abs().amax(1, keepdim=True) / 64000).all()


def test_half_steps_round_to_even():
    assert quantize_tokens_ref(torch.tensor([[127, 0.5, 1.5, 2.5, -0.5]])).values.tolist() == [[127, 0, 2, 2, 0]]


@in_each_dtype
def test_a_row_of_zeros_gives_zeros(dtype):
    """B1: its scale is finite, and the other rows are as they are without it."""
    x = torch.randn(3, 64).to(dtype)
    x[1] = 0
    got, alone = quantize_tokens_ref(x), quantize_tokens_ref(x[[0, 2]])
    assert got.values[1].eq(0).all() and got.scales[1] == 1
    assert torch.equal(got.values[[0, 2]], alone.values) and torch.equal(got.scales[[0, 2]], alone.scales)


def test_tiny_rows_keep_their_ratios():
    """B2: in half precision the scale would be 0, or the row all +-127."""
    x = (torch.tensor([[1.0, -2.0, 4.0, 8.0]]) * 2**-20).half()
    assert quantize_tokens_ref(x).values.tolist() == [[16, -32, 64, 127]]
    assert quantize_tokens_ref(torch.tensor([[1e-42, 0.0]])).scales.isfinite().all()


def test_the_largest_numbers_saturate():
    """B21: the range is the row's own, so nothing wraps around."""
    assert quantize_tokens_ref(torch.tensor([[65504.0, -65504.0, 1.0]]).half()).values.tolist() == [[127, -127, 0]]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_number_that_is_not_finite_shows_in_the_product(bad):
    x = torch.ones(2, 8)
    x[1, 3] = bad
    qweight, scales, _ = make_weights(4, 8)
    y = quant_linear.w8a8_linear(quantize_tokens_ref(x), qweight, scales, None)
    assert y[0].isfinite().all() and y[1].isnan().all()


def same(got, expected, dtype=None):
    """Values and scales bit for bit; a row whose scale is NaN may hold any values. With dtype float32, where nothing
    rounds away that a compiler contracts two kernels' sums differently, but for a step here and there."""
    values, scales = got[:2]
    if values.dim() == 3:  # a product and a sum may round once or twice on their way to the second digit
        same((values[:, 0], scales), expected._replace(values=expected.values[:, 0]), dtype)
        agrees = (values[:, 0] == expected.values[:, 0]) & expected.scales.isfinite()[:, None]
        steps = (values[:, 1].int() - expected.values[:, 1].int())[agrees].abs()
        assert not steps.numel() or (steps.max() <= 1 and (dtype == torch.float32 or steps.float().mean() < 1e-2))
        return
    if dtype == torch.float32:
        torch.testing.assert_close(scales, expected.scales, rtol=1e-5, atol=0)
        steps = (values.int() - expected.values.int()).abs()
        assert not steps.numel() or (steps.max() <= 1 and steps.float().mean() < 1e-3)
        return
    assert values.dtype == torch.int8 and torch.equal(scales.nan_to_num(7), expected.scales.nan_to_num(7))
    finite = ~expected.scales.isnan()
    assert torch.equal(values[finite], expected.values[finite])


@on_each_device
@in_each_dtype
@in_digits
@pytest.mark.parametrize("shape", [(1, 1024), (5, 96), (17, 80), (257, 33), (2, 9000), (0, 64)], ids=str)
def test_quantize_tokens(device, dtype, digits, shape):
    """B1, B2, B4: zero rows, tiny rows, no rows."""
    x = torch.randn(shape)
    if shape[0] > 4:
        x[1], x[2], x[3, 5] = 0, x[2] * 1e-6, torch.nan
    x = x.to(device, dtype)
    with nan_filled():
        got = quantize_triton.quantize_tokens(x, digits)
    same(got, quantize_tokens_ref(x, digits))
    same(quantize_triton.quantize_tokens(x.T.contiguous().T, digits), quantize_tokens_ref(x, digits))


@on_each_device
@in_each_dtype
@in_digits
@pytest.mark.parametrize("shape", [(1, 1024), (5, 96), (257, 80), (0, 64)], ids=str)
def test_norm_and_activation_quantize_what_they_would_return(device, dtype, digits, shape):
    """B1, B4: and zero rows stay zero."""
    x, residual = torch.randn(2, *shape).to(device, dtype)
    weight, wide = torch.randn(shape[1]).to(device, dtype), torch.randn(shape[0], 2 * shape[1]).to(device, dtype)
    x[1:2], residual[1:2], wide[1:2] = 0, 0, 0
    with nan_filled():
        alone = layernorm_triton.rms_norm(x, weight, EPS, digits=digits)
        added, total = layernorm_triton.add_rms_norm(x, residual, weight, EPS, digits=digits)
        gated = activation_triton.silu_and_mul(wide, digits=digits)
    normed, expected_total = layernorm_triton.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, expected_total)
    same(alone, quantize_tokens_ref(layernorm_triton.rms_norm(x, weight, EPS), digits), dtype)
    same(added, quantize_tokens_ref(normed, digits), dtype)
    same(gated, quantize_tokens_ref(activation_triton.silu_and_mul(wide), digits), dtype)


@in_digits
def test_on_a_cpu_norm_and_activation_quantize_by_the_references(digits):
    x, weight = torch.randn(5, 64), torch.randn(64)
    normed, total = layernorm.add_rms_norm(x, x, weight, EPS)
    quantized, quantized_total = layernorm.add_rms_norm(x, x, weight, EPS, digits)
    same(quantized, quantize_tokens_ref(normed, digits))
    assert torch.equal(total, quantized_total) and quantized.dtype == torch.float32
    alone = layernorm.rms_norm(x, weight, EPS, digits)
    same(alone, quantize_tokens_ref(layernorm.rms_norm(x, weight, EPS), digits))
    same(activation.silu_and_mul(x, digits), quantize_tokens_ref(activation.silu_and_mul(x), digits))
    same(quantize_tokens(x, digits), quantize_tokens_ref(x, digits))


@in_each_dtype
@pytest.mark.parametrize("shape", [(0, 5, 96), (1, 37, 96), (3, 1, 64), (17, 100, 257), (2, 7, 1), (3, 4, 0)], ids=str)
def test_references(dtype, shape):
    """B4, B5: no rows, K = 96, 1 and 0."""
    m, n, k = shape
    x, (qweight, scales, bias) = torch.randn(m, k).to(dtype), make_weights(n, k, dtype=dtype)
    quantized = quantize_tokens_ref(x)
    for b in (bias, None):
        for run, left in ((quant_linear.int8_linear, x), (quant_linear.w8a8_linear, quantized)):
            got, exact = run(left, qweight, scales, b), exact_product(left, qweight, scales, b)
            assert got.shape == (m, n)
            wide = x.float() if left is x else quantized.values * quantized.scales[:, None]
            rival = wide @ (qweight * scales[:, None]).T
            assert_as_good(got, (rival if b is None else rival + b).to(dtype), exact)


@on_each_device
def test_half_precision_does_not_overflow(device):
    """B17: the plain sum is 4096 * 10 * 127, far over 65504; the scale brings it back before the cast."""
    x, qweight = torch.full((3, 4096), 10.0, dtype=torch.float16), torch.full((8, 4096), 127, dtype=torch.int8)
    scales = torch.full((8,), 1e-3)
    exact = exact_product(x, qweight, scales, None)
    x, qweight, scales = x.to(device), qweight.to(device), scales.to(device)
    quantized = quantize_tokens_ref(x)
    runs = [
        quant_linear.int8_linear(x, qweight, scales, None),
        quant_linear.w8a8_linear(quantized, qweight, scales, None),
    ]
    for config in configs(3)[:2]:
        for left in (quantized, quantize_tokens_ref(x, 2)):
            runs.append(quant_linear_triton.linear(*left[:2], qweight, scales, None, x.dtype, config))
    runs.append(quant_linear_triton.linear(x, None, qweight, scales, None, x.dtype, configs(3)[4]))
    assert all(error(y, exact) <= 4 for y in runs)  # 5202, where half precision has steps of 4


@pytest.mark.parametrize("shape", [(1, 4), (4, 1), (1,), (5,)], ids=str)
def test_scales_of_another_shape_are_refused(shape):
    """B19: they would broadcast, with M = 1 and M = N too, to another product."""
    qweight, _, _ = make_weights(4, 8)
    for x in (torch.randn(1, 8), torch.randn(4, 8)):
        with pytest.raises(ValueError, match=r"scales must be float32 \[4\]"):
            quant_linear.int8_linear(x, qweight, torch.ones(shape), None)
        with pytest.raises(ValueError, match=r"scales must be float32 \[4\]"):
            quant_linear.w8a8_linear(quantize_tokens_ref(x), qweight, torch.ones(shape), None)


def test_other_misfits_are_refused():
    qweight, scales, bias = make_weights(4, 8)
    x = torch.randn(3, 8)
    values, token_scales, dtype = quantize_tokens_ref(x)
    cases = [
        ("qweight must be int8", (x, qweight.float(), scales, None)),
        ("contiguous", (x, qweight.T.contiguous().T, scales, None)),
        (r"x must be \[M, 8\]", (x[:, :4], qweight, scales, None)),
        ("scales must be float32", (x, qweight, scales.half(), None)),
        (r"bias must be \[4\]", (x, qweight, scales, bias[:3])),
    ]
    for message, arguments in cases:
        with pytest.raises(ValueError, match=message):
            quant_linear.int8_linear(*arguments)
    for bad in ((values, token_scales[:, None]), (values, token_scales[:1]), (values.short(), token_scales)):
        with pytest.raises(ValueError, match="needs int8 values"):
            quant_linear.w8a8_linear(QuantizedActivation(*bad, dtype), qweight, scales, None)


def config(kernel, *numbers):
    """By name, as `linear` takes it."""
    return {"kernel": kernel, **dict(zip(FIELDS[kernel], numbers, strict=True))}


def configs(rows):
    """Small tiles, so that there are many; each way to cut K."""
    tiles = [(16, 16, 64, 1, 1), (16, 32, 32, 4, 1), (32, 16, 32, 4, 2), (16, 64, 32, 1, 4)]
    found = [config("tile", *tile, 4, 3) for tile in tiles] + [config("dequantize", 24)]
    return found + ([config("vector", 4, 64, 2), config("vector", 1, 512, 2)] if rows == 1 else [])


@on_each_device
@in_16_bits
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", [(1, 37, 96), (3, 130, 96), (17, 40, 260), (2, 16, 1024), (33, 17, 31)], ids=str)
def test_kernels(device, dtype, shape, bias):
    """B5: M, N and K that are no multiples of the tile, in every kernel and way to cut K."""
    m, n, k = shape
    x = torch.randn(m, k).to(device, dtype)
    qweight, scales, b = make_weights(n, k, device, dtype)
    b, quantized = b if bias else None, quantize_tokens_ref(x)
    exact = exact_product(x, qweight, scales, b)
    expected = quant_linear.w8a8_linear_ref(quantized, qweight, scales, b)
    rounded = torch.nn.functional.linear(x, (qweight * scales[:, None]).to(dtype), b)
    for choice in configs(m):
        sliced = choice["kernel"] == "dequantize"  # these round the weights
        left = (x, None) if sliced else quantize_tokens_ref(x, 2)[:2]
        with nan_filled():
            got = quant_linear_triton.linear(*left, qweight, scales, b, dtype, choice)
        assert_as_good(got, rounded if sliced else quant_linear.int8_linear_ref(x, qweight, scales, b), exact)
        if not sliced:
            with nan_filled():
                got = quant_linear_triton.linear(*quantized[:2], qweight, scales, b, dtype, choice)
            assert_as_good(got, expected, exact_product(quantized, qweight, scales, b))
    assert quant_linear_triton.linear(x[:0], None, qweight, scales, b, dtype, choice).shape == (0, n)


@on_each_device
def test_every_int8_is_taken_exactly(device):
    """Also -128, which no quantizer of ours writes."""
    qweight = torch.arange(-128, 128, dtype=torch.int8, device=device).view(16, 16)
    x, ones = torch.eye(16, dtype=torch.float16, device=device), torch.ones(16, device=device)
    for dtype in DTYPES[2:] if INTERPRETED else DTYPES[1:]:
        got = quant_linear_triton.linear(x.to(dtype), None, qweight, ones, None, dtype, config("dequantize", 16))
        assert torch.equal(got, qweight.T.to(dtype))
        for digits in (1, 2):
            one, all_of_them = (quantize_tokens_ref(part.to(dtype), digits)[:2] for part in (x[3:4], x))
            tile, vector = config("tile", 16, 16, 32, 1, 1, 4, 2), config("vector", 2, 16, 1)
            got = quant_linear_triton.linear(*all_of_them, qweight, ones, None, dtype, tile)
            assert torch.equal(got, qweight.T.to(dtype))
            got = quant_linear_triton.linear(*one, qweight, ones, None, dtype, vector)
            assert torch.equal(got[0], qweight[:, 3].to(dtype))


@pytest.mark.parametrize("chip", SHARED_MEMORY)
def test_every_shape_has_a_configuration(chip):
    for method in ("int8", "w8a8"):
        assert list(chip_table(chip)[method]) == [str(rows) for rows in BUCKETS]
        for m in (1, 2, 17, 4096, 100_000):
            for n, k in ((1, 1), (4096, 12288), (24576, 4096)):
                found = config_for(method, m, n, k, chip)
                assert set(found) == {"kernel", *FIELDS[found["kernel"]]}
                assert (found["kernel"] == "vector") <= (m == 1 and k % 4 == 0)
                assert method == "int8" or found["kernel"] != "dequantize"


def test_the_path_is_named(monkeypatch):
    assert quant_linear.kernel_path("int8", torch.device("cpu")) == "torch reference"
    for chip in SHARED_MEMORY:
        monkeypatch.setattr(quant_linear, "_capability", lambda device, chip=chip: chip)
        assert "W8A8" in quant_linear.kernel_path("w8a8", torch.device("cuda"))
        path = quant_linear.kernel_path("int8", torch.device("cuda"))
        large = [config_for("int8", m, 24576, 4096, chip)["kernel"] for m in BUCKETS]
        assert "W8A16" in path and ("dequantized" in path or "dequantize" not in large)


def shipped(chip):
    """(method, rows, n, k, configuration) for each different one that a chip takes."""
    found = {}
    for method in ("int8", "w8a8"):
        for rows, shapes in chip_table(chip)[method].items():
            for shape, choice in shapes.items():
                found.setdefault((method, *choice), (method, int(rows), *map(int, shape.split("x")), config(*choice)))
    return list(found.values())


def launches_of(chip, method, rows, n, k, choice, dtype=torch.bfloat16):
    z = lambda *shape, kind: torch.empty(*shape, dtype=kind, device="meta")  # noqa: E731
    left = (z(rows, k, kind=dtype), None)
    if choice["kernel"] != "dequantize":
        shape = (rows, k) if method == "w8a8" else (rows, 2, k)
        left = (z(*shape, kind=torch.int8), z(rows, kind=torch.float32))
    right = (z(n, k, kind=torch.int8), z(n, kind=torch.float32), z(n, kind=dtype))
    run = quant_linear_triton.linear
    return record_launches(quant_linear_triton, lambda: run(*left, *right, dtype, choice, chip >= 90))


@COMPILED
@pytest.mark.slow
@pytest.mark.parametrize("chip", SHARED_MEMORY)
def test_shipped_configurations_compile(chip, interpreter):
    """On the chips the file names all of them, on the others those with the most shared memory."""
    found = shipped(chip)
    if chip not in (80, 86, 90):
        area = lambda entry: (entry[0], entry[-1]["kernel"], sum(v for v in entry[-1].values() if type(v) is int))  # noqa: E731
        found = list({(entry[0], entry[-1]["kernel"]): entry for entry in sorted(found, key=area)}.values())
    check_compiles([(launch, chip) for entry in found for launch in launches_of(chip, *entry)[:2]])


@COMPILED
def test_half_precision_compiles(interpreter):
    for choice in (configs(1)[1], config("vector", 4, 64, 2)):
        check_compiles([(launch, 86) for launch in launches_of(86, "int8", 1, 64, 128, choice, torch.float16)])


@COMPILED
def test_quantizing_kernels_compile(interpreter):
    for chip in SHARED_MEMORY:
        x, wide = torch.zeros(3, 1024, dtype=torch.bfloat16), torch.zeros(3, 2 * 25600, dtype=torch.bfloat16)
        calls = {
            quantize_triton: lambda x=x, chip=chip: quantize_triton.quantize_tokens(x, 2, chip >= 90),
            layernorm_triton: lambda x=x, chip=chip: layernorm_triton.add_rms_norm(x, x, x[0], EPS, chip >= 90, 2),
            activation_triton: lambda x=wide, chip=chip: activation_triton.silu_and_mul(x, chip >= 90, 2),
        }
        check_compiles([(launch, chip) for module, call in calls.items() for launch in record_launches(module, call)])


@COMPILED
def test_under_the_interpreter(interpreter):
    interpreter()


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["int8", "w8a8"])
def test_shipped_configurations_are_right(method):
    """Each that this chip takes, at the row counts around its bucket's ends, in a CUDA graph too."""
    chip = quant_linear._capability(torch.device("cuda", torch.cuda.current_device()))
    reference = {"int8": quant_linear.int8_linear_ref, "w8a8": quant_linear.w8a8_linear_ref}[method]
    for _, rows, n, k, choice in (entry for entry in shipped(chip) if entry[0] == method):
        qweight, scales, bias = make_weights(min(n, 3000), min(k, 2048), "cuda", torch.bfloat16)
        for m in {rows, rows // 2 + 1}:
            x = torch.randn(m, qweight.shape[1], device="cuda", dtype=torch.bfloat16)
            act = x if method == "int8" else quantize_tokens_ref(x)
            left = (x, None) if choice["kernel"] == "dequantize" else quantize_tokens_ref(x, 2 - (method == "w8a8"))[:2]
            rest = (qweight, scales, bias, x.dtype, choice, chip >= 90)
            got, rival = quant_linear_triton.linear(*left, *rest), reference(act, qweight, scales, bias)
            if choice["kernel"] == "dequantize":  # it rounds the weights
                rival = torch.nn.functional.linear(x, (qweight * scales[:, None]).to(x.dtype), bias)
            assert_as_good(got, rival, exact_product(act, qweight, scales, bias))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = quant_linear_triton.linear(*left, *rest)
        graph.replay()
        assert torch.equal(captured, got), choice


@pytest.mark.gpu
def test_public_functions_on_a_gpu():
    """The choice, the fused quantization and the product, one after the other, as a layer calls them; M = 0 too."""
    qweight, scales, _ = make_weights(512, 1024, "cuda", torch.bfloat16)
    weight = torch.randn(1024, device="cuda", dtype=torch.bfloat16)
    for m in (0, 1, 3, 17, 600):
        x = torch.randn(m, 1024, device="cuda", dtype=torch.bfloat16)
        normed, quantized, wide = (layernorm.rms_norm(x, weight, EPS, digits) for digits in range(3))
        got = quant_linear.w8a8_linear(quantized, qweight, scales, None)
        assert got.shape == (m, 512) and got.dtype == x.dtype
        same(quantized, quantize_tokens_ref(normed))
        same(quantize_tokens(normed), quantized)
        same(activation.silu_and_mul(x, 1), quantize_tokens_ref(activation.silu_and_mul(x)))
        same(wide, quantize_tokens_ref(normed, 2))
        if m:
            exact = exact_product(normed, qweight, scales, None)
            assert (got.double() - exact).norm() <= 0.02 * exact.norm()
            y = quant_linear.int8_linear(normed, qweight, scales, None)
            assert (y.double() - exact).norm() <= 0.01 * exact.norm()
            if quant_linear.int8_linear_digits(m, x.dtype, qweight):
                assert torch.equal(y, quant_linear.int8_linear(quantize_tokens(normed, 2), qweight, scales, None))
