"""Products of int8 weights and activations of one or two int8 digits. W is the left operand, y^T = W x^T: the matrix
units' larger side is then N, and few rows of x need little padding. Two digits are two rows of x, side by side: what
reads W once multiplies it twice.

Bytes: N K for the weights, each read once if all rows of x fit into one tile; x, y and partial sums stay in L2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_PTX = tl.constexpr(not triton.knobs.runtime.interpret)
# 128 + (low seven bits) - (128, or 256 for negative numbers), as two bf16 at a time.
_TO_BF16 = tl.constexpr("""{
    .reg .b32 t<2>, a<2>, b<2>, one;
    mov.b32 one, 0x3f803f80;
    prmt.b32 t0, $2, 0x43434343, 0x7170;
    prmt.b32 t1, $2, 0x43434343, 0x7372;
    and.b32 a0, t0, 0xff7fff7f;
    and.b32 a1, t1, 0xff7fff7f;
    lop3.b32 b0, t0, 0x00800080, 0xc300c300, 0xea;
    lop3.b32 b1, t1, 0x00800080, 0xc300c300, 0xea;
    fma.rn.bf16x2 $0, a0, one, b0;
    fma.rn.bf16x2 $1, a1, one, b1;
}""")
# 1024 + (byte + 128) - 1152, as two fp16 at a time.
_TO_FP16 = tl.constexpr("""{
    .reg .b32 u, t<2>, c;
    mov.b32 c, 0x64806480;
    xor.b32 u, $2, 0x80808080;
    prmt.b32 t0, u, 0x64646464, 0x7170;
    prmt.b32 t1, u, 0x64646464, 0x7372;
    sub.rn.f16x2 $0, t0, c;
    sub.rn.f16x2 $1, t1, c;
}""")


@triton.jit
def _widen(w, dtype: tl.constexpr):
    """int8 to a 16-bit type, exactly."""
    if _PTX and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(_TO_BF16, "=r,=r,r", [w], tl.bfloat16, is_pure=True, pack=4)
    elif _PTX and dtype == tl.float16:
        return tl.inline_asm_elementwise(_TO_FP16, "=r,=r,r", [w], tl.float16, is_pure=True, pack=4)
    else:
        return w.to(dtype)


@triton.jit
def _dot4(a, b, acc):
    """acc plus the product of four int8 in each word of a and b."""
    if _PTX:
        code: tl.constexpr = "dp4a.s32.s32 $0, $1, $2, $3;"
        return tl.inline_asm_elementwise(code, "=r,r,r,r", [a, b, acc], tl.int32, is_pure=True, pack=1)
    else:
        for j in tl.static_range(4):
            acc += ((a << (24 - 8 * j)) >> 24) * ((b << (24 - 8 * j)) >> 24)
        return acc


@triton.jit
def _join(high, low):
    """The float32 sum of what two digits gave; see `QuantizedActivation`."""
    return high.to(tl.float32) + low.to(tl.float32) * (1.0 / 254.0)


@triton.jit
def _finish(acc, w_scale_ptr, x_scale_ptr, b_ptr, n, m, N, num_rows, HAS_BIAS: tl.constexpr):
    """Sums of columns n and rows m, of shapes that broadcast, with their scales and bias, in float32."""
    y = acc.to(tl.float32) * tl.load(w_scale_ptr + n, mask=n < N, other=0.0)
    y *= tl.load(x_scale_ptr + m, mask=m < num_rows, other=0.0)
    if HAS_BIAS:
        y += tl.load(b_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    return y


@triton.jit
def _vector_kernel(
    x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, b_ptr, y_ptr, N, WORDS, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DIGITS: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_N columns of y for one row of x, with the next tile of W under way all the time. W and
    x come as words of four numbers, int32 [N, K / 4] and [DIGITS, K / 4]."""
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    lanes = tl.arange(0, BLOCK_K // 4)[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_K // 4), dtype=tl.int32)
    low = tl.zeros((BLOCK_N, BLOCK_K // 4), dtype=tl.int32)
    w_rows = w_ptr + n.to(tl.int64) * WORDS
    # The weights do not depend on the kernel before: their first tile is on its way while that one ends.
    w = tl.load(w_rows + lanes, mask=(n < N) & (lanes < WORDS), other=0, eviction_policy="evict_first")
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for start in range(0, WORDS, BLOCK_K // 4):
        k = start + BLOCK_K // 4 + lanes
        following = tl.load(w_rows + k, mask=(n < N) & (k < WORDS), other=0, eviction_policy="evict_first")
        acc = _dot4(w, tl.load(x_ptr + start + lanes, mask=start + lanes < WORDS, other=0), acc)
        if DIGITS == 2:
            low = _dot4(w, tl.load(x_ptr + WORDS + start + lanes, mask=start + lanes < WORDS, other=0), low)
        w = following
    total = tl.sum(acc, axis=1)[:, None]
    if DIGITS == 2:
        total = _join(total, tl.sum(low, axis=1)[:, None])
    y = _finish(total, w_scale_ptr, x_scale_ptr, b_ptr, n, tl.zeros_like(n), N, 1, HAS_BIAS)
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=n < N)


@triton.jit(do_not_specialize=["num_rows"])
def _tile_kernel(
    x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, b_ptr, y_ptr, num_rows, N, K, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr, SPLIT_K: tl.constexpr, GROUP: tl.constexpr,
    WHOLE_K: tl.constexpr, DIGITS: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A tile [BLOCK_N, BLOCK_M] of W x^T on the matrix units, x [num_rows, K] with DIGITS rows for each of y's.

    K is cut twice: into SPLIT_K parts, one a program, whose sums y_ptr [SPLIT_K, num_rows / DIGITS, N] then takes,
    unscaled; and a step's tile into SLICES, one a warp, where N alone has too few rows to keep the warps busy.
    """
    # Neighbouring programs share GROUP tiles of x and then of W, which L2 then holds.
    tiles_m, tiles_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // (GROUP * tiles_n)
    size = tl.minimum(tiles_m - group * GROUP, GROUP)
    within = tl.program_id(0) % (GROUP * tiles_n)
    n = within // size * BLOCK_N + tl.arange(0, BLOCK_N)
    tile_m = group * GROUP + within % size
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    lanes = tl.arange(0, BLOCK_K)
    STEP: tl.constexpr = SLICES * BLOCK_K
    steps = tl.cdiv(K, STEP * SPLIT_K)
    first = tl.program_id(1) * steps * STEP
    # Columns beyond N repeat the last, which costs no mask; rows beyond M are masked, which costs no bytes.
    w_rows = w_ptr + tl.minimum(n, N - 1).to(tl.int64) * K
    x_rows = x_ptr + m.to(tl.int64) * K
    if SLICES == 1:
        w_rows, w_k = w_rows[:, None], lanes[None, :]
        x_rows, x_k, live = x_rows[None, :], lanes[:, None], (m < num_rows)[None, :]
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.int32)
    else:
        starts = (tl.arange(0, SLICES) * BLOCK_K)[:, None, None]
        w_rows, w_k = w_rows[None, :, None], starts + lanes[None, None, :]
        x_rows, x_k, live = x_rows[None, None, :], starts + lanes[None, :, None], (m < num_rows)[None, None, :]
        acc = tl.zeros((SLICES, BLOCK_N, BLOCK_M), dtype=tl.int32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for start in range(first, first + steps * STEP, STEP):
        if WHOLE_K:
            w = tl.load(w_rows + (start + w_k))
            x = tl.load(x_rows + (start + x_k), mask=live, other=0)
        else:
            w = tl.load(w_rows + (start + w_k), mask=start + w_k < K, other=0)
            x = tl.load(x_rows + (start + x_k), mask=live & (start + x_k < K), other=0)
        acc = tl.dot(w, x, acc, out_dtype=tl.int32)
    if SLICES > 1:
        acc = tl.sum(acc, axis=0)
    if DIGITS == 2:
        high, low = tl.split(tl.reshape(acc, (BLOCK_N, BLOCK_M // 2, 2)))
        acc = _join(high, low)
        m = tile_m * (BLOCK_M // 2) + tl.arange(0, BLOCK_M // 2)
        num_rows //= 2
    n, m = n[:, None], m[None, :]
    if SPLIT_K == 1:
        acc = _finish(acc, w_scale_ptr, x_scale_ptr, b_ptr, n, m, N, num_rows, HAS_BIAS)
    out = y_ptr + (tl.program_id(1) * num_rows + m).to(tl.int64) * N + n
    tl.store(out, acc.to(y_ptr.dtype.element_ty), mask=(n < N) & (m < num_rows))


@triton.jit(do_not_specialize=["num_rows"])
def _sum_kernel(
    part_ptr, x_scale_ptr, w_scale_ptr, b_ptr, y_ptr, num_rows, N, SPLIT_K: tl.constexpr, BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of one row: the sum of its parts, in their order, then scales and bias."""
    m = tl.program_id(1)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    part = tl.arange(0, SPLIT_K)[:, None]
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    parts = tl.load(part_ptr + (part * num_rows + m).to(tl.int64) * N + n, mask=n < N, other=0)
    total = tl.sum(parts, axis=0)[None, :]
    y = _finish(total, w_scale_ptr, x_scale_ptr, b_ptr, n, tl.zeros_like(n) + m, N, num_rows, HAS_BIAS)
    tl.store(y_ptr + m.to(tl.int64) * N + n, y.to(y_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def _dequantize_kernel(q_ptr, scale_ptr, out_ptr, K, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """BLOCK elements of one row of weights, scaled, in 16 bits."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    q = tl.load(q_ptr + row * K + k, mask=k < K, other=0, eviction_policy="evict_first")
    value = _widen(q, out_ptr.dtype.element_ty).to(tl.float32) * tl.load(scale_ptr + row)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(out_ptr + row * K + k, value.to(out_ptr.dtype.element_ty), mask=k < K)


def linear(
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    config: dict,
    overlap: bool = False,
) -> torch.Tensor:
    """x [M, K], qweight [N, K], both contiguous, scales [N], bias [N] or None. x is int8 with x_scales [M], or
    [M, 2, K] of two digits; "dequantize" alone takes 16-bit floats.

    config: "kernel" names one of the functions below, the rest are its tile sizes and Triton's options. overlap: start
    while the kernel before still runs (sm_90 and newer). Returns [M, N] in `dtype`.
    """
    y = torch.empty(x.shape[0], qweight.shape[0], dtype=dtype, device=x.device)
    if y.numel():
        options = {key: value for key, value in config.items() if key != "kernel"}
        flags = {"HAS_BIAS": bias is not None, "OVERLAP": overlap}
        _RUNS[config["kernel"]](x, x_scales, qweight, scales, bias, y, options, flags)
    return y


def _pdl(flags: dict) -> dict:
    return {"launch_pdl": True} if flags["OVERLAP"] else {}


def _vector(x, x_scales, qweight, scales, bias, y, options, flags):
    """M = 1 and K a multiple of 4, without matrix units."""
    n, k = qweight.shape
    options = {**options, "BLOCK_K": min(triton.next_power_of_2(k), options["BLOCK_K"])}
    operands = (x.view(torch.int32), qweight.view(torch.int32), x_scales, scales, bias, y, n, k // 4)
    grid = (triton.cdiv(n, options["BLOCK_N"]),)
    _vector_kernel[grid](*operands, DIGITS=x.dim() - 1, **options, **flags, **_pdl(flags))


def _tile(x, x_scales, qweight, scales, bias, y, options, flags):
    """Any M, on the matrix units; a second, small kernel adds up what SPLIT_K programs found."""
    digits, split = x.dim() - 1, options["SPLIT_K"]
    (n, k), rows, x_rows = qweight.shape, x.shape[0], x.shape[0] * digits
    out = y
    if split > 1:
        kind = torch.float32 if digits == 2 else torch.int32
        out = torch.empty(split, rows, n, dtype=kind, device=x.device)
    whole = k % (options["BLOCK_K"] * options["SLICES"] * split) == 0
    grid = (triton.cdiv(x_rows, options["BLOCK_M"]) * triton.cdiv(n, options["BLOCK_N"]), split)
    operands = (x, qweight, x_scales, scales, bias, out, x_rows, n, k)
    _tile_kernel[grid](*operands, GROUP=8, WHOLE_K=whole, DIGITS=digits, **options, **flags, **_pdl(flags))
    if split > 1:
        grid = (triton.cdiv(n, 512), rows)
        operands = (out, x_scales, scales, bias, y, rows, n)
        _sum_kernel[grid](*operands, SPLIT_K=split, BLOCK=512, num_warps=2, **flags, **_pdl(flags))


def _dequantize(x, x_scales, qweight, scales, bias, y, options, flags):
    """Slices of W in 16 bits, small enough to stay in L2 until cuBLAS has multiplied with them."""
    (n, k), rows = qweight.shape, options["ROWS"]
    scratch = torch.empty(min(rows, n), k, dtype=x.dtype, device=x.device)
    block = min(4096, triton.next_power_of_2(k))
    for start in range(0, n, rows):
        part = slice(start, min(start + rows, n))
        w = scratch[: part.stop - start]
        grid = (w.shape[0], triton.cdiv(k, block))
        _dequantize_kernel[grid](
            qweight[part], scales[part], w, k, BLOCK=block, OVERLAP=flags["OVERLAP"], **_pdl(flags)
        )
        if bias is None:
            torch.mm(x, w.T, out=y[:, part])
        else:
            torch.addmm(bias[part], x, w.T, out=y[:, part])


_RUNS = {"vector": _vector, "tile": _tile, "dequantize": _dequantize}
