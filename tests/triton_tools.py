"""How Triton kernels are tested: interpreted on the CPU, compiled for chips that are not here, run on the one that is.

Whether kernels are interpreted is settled when triton is first imported. A test file therefore runs its kernel tests
(those that take `device` from DEVICES) in a pytest of its own: see `interpreted`.
"""

import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = [pytest.param("cpu", id="interpreted")] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)]
COMPILED = pytest.mark.skipif(INTERPRETED, reason="compiles, which cannot be done where kernels are interpreted")

# Compute capability to the shared memory that one program may have.
SHARED_MEMORY = {cc: kib * 1024 for cc, kib in {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}.items()}

_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}

if INTERPRETED:
    from triton.runtime import interpreter

    def _dot_of_bf16(create_dot):
        """The interpreter multiplies the bits of bfloat16 as if they were integers; this widens them first."""

        def wide(x):
            if x.dtype.scalar != tl.bfloat16:
                return x
            return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

        return lambda self, a, b, *rest: create_dot(self, wide(a), wide(b), *rest)

    interpreter.InterpreterBuilder.create_dot = _dot_of_bf16(interpreter.InterpreterBuilder.create_dot)


@contextmanager
def interpreted(file):
    """Start the tests of `file` that take a device in a process where kernels are interpreted. Yields a function that
    waits for it and fails if a test failed; what runs in between has the other core."""
    command = [sys.executable, "-m", "pytest", "-q", "-k", "interpreted", "-p", "no:cacheprovider", file]
    with tempfile.TemporaryFile("w+") as output:
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)

        def finish():
            process.wait()
            output.seek(0)
            text = output.read()
            assert process.returncode == 0 and " passed" in text, text[-8000:]

        try:
            yield finish
        finally:
            process.kill()
            process.wait()


def run_interpreted(file):
    """The same, without anything in between."""
    with interpreted(file) as finish:
        finish()


def aot_shared_memory(kernel, signature, constexprs, cc, num_warps=4, num_stages=3):
    """Compile a kernel for a chip of compute capability `cc` (86 for 8.6), present or not.

    Args:
        kernel: what triton.jit made.
        signature: type by name for the arguments that are no constexpr: "*bf16", "i32", "fp32"; pointers are taken
            as multiples of 16 bytes; "i32:16" is an integer known to be a multiple of 16.
        constexprs: value by name.

    Returns:
        Bytes of shared memory per program.
    """
    types, attrs = {}, {}
    for i, name in enumerate(kernel.arg_names):
        kind = "constexpr" if name in constexprs else signature[name]
        types[name] = kind.removesuffix(":16")
        if kind.startswith("*") or kind.endswith(":16"):
            attrs[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, types, constexprs, attrs)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return triton.compile(source, target=GPUTarget("cuda", cc, 32), options=options).metadata.shared


@dataclass(frozen=True)
class Launch:
    """What a launch function asked of a kernel."""

    kernel: JITFunction
    grid: tuple
    arguments: dict
    options: dict

    def shared_memory(self, cc):
        """Bytes for a chip of compute capability `cc`; fails where the kernel does not compile."""
        signature, constexprs = {}, {}
        for param in self.kernel.params:
            value = self.arguments[param.name]
            # As a launch does: an integer that is 1 is compiled in, a multiple of 16 is taken as one.
            special = type(value) is int and not param.do_not_specialize
            if param.is_constexpr or (special and value == 1):
                constexprs[param.name] = value
            elif isinstance(value, torch.Tensor):
                signature[param.name] = f"*{_TYPES[value.dtype]}"
            elif isinstance(value, float):
                signature[param.name] = "fp32"
            else:
                signature[param.name] = "i32:16" if special and value % 16 == 0 else "i32"
        return aot_shared_memory(self.kernel, signature, constexprs, cc, **self.options)


def record_launches(module, call):
    """The launches that call() makes of the kernels of `module`, none of which is run: tensors may be on the CPU."""
    launches = []

    class Recorder:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            def launch(*args, **kwargs):
                options = {key: kwargs.pop(key) for key in ("num_warps", "num_stages") if key in kwargs}
                arguments = {**dict(zip(self.kernel.arg_names, args, strict=False)), **kwargs}
                launches.append(Launch(self.kernel, grid, arguments, options))

            return launch

    kernels = {name: value for name, value in vars(module).items() if isinstance(value, JITFunction)}
    try:
        for name, kernel in kernels.items():
            setattr(module, name, Recorder(kernel))
        call()
    finally:
        for name, kernel in kernels.items():
            setattr(module, name, kernel)
    assert launches, f"{module.__name__} launched nothing"
    return launches


def check_compiles(jobs):
    """Each (launch, compute capability) compiles and fits into that chip's shared memory. One after the other: two
    threads in ast.parse end in a SystemError now and then (seen with Python 3.11.7), and save little."""
    for launch, cc in jobs:
        shared = launch.shared_memory(cc)
        assert shared <= SHARED_MEMORY[cc], f"{launch.kernel.__name__} takes {shared} bytes on sm_{cc}"


@contextmanager
def nan_filled():
    """torch.empty gives NaNs (or the largest integer), so that what a kernel forgets to write shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def error(got, exact):
    """Largest absolute difference; infinite where one of them alone is a NaN."""
    got, exact = got.double().cpu(), exact.double().cpu()
    assert got.shape == exact.shape, f"{got.shape}, expected {exact.shape}"
    difference = torch.where(got.isnan() & exact.isnan() | (got == exact), 0.0, (got - exact).abs())
    return difference.nan_to_num(nan=torch.inf, posinf=torch.inf).max().item() if got.numel() else 0.0


def assert_as_good(got, rival, exact, times=2):
    """The error of `got` is at most `times` that of `rival`, torch's result in the same dtype; one unit in the last
    place of the largest number is free, as `rival` may be exact by luck."""
    assert got.dtype == rival.dtype, f"{got.dtype}, expected {rival.dtype}"
    ours, theirs = error(got, exact), error(rival, exact)
    free = torch.finfo(got.dtype).eps * exact.double().nan_to_num().abs().max().item() if got.numel() else 0.0
    assert ours <= max(times * theirs, free), f"error {ours:.3e}, torch's {theirs:.3e}, dtype {got.dtype}"


def _round_to_bf16(convert):
    """The interpreter cuts float32 to bf16 where a GPU rounds to nearest even; this does as the GPU does."""

    def wrapped(data, from_type, to_type, rounding_mode):
        if (from_type, to_type) != (tl.float32, tl.bfloat16):
            return convert(data, from_type, to_type, rounding_mode)
        bits = np.ascontiguousarray(data).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(data), 0x7FC0, rounded).astype(np.uint16)

    return wrapped


def _patch_once(patch):
    """The interpreter prepares triton.language for every call of one jitted function by another, which takes half of
    the time. This does it once a launch: for the kernel, and for the library's own functions, which see other names."""

    def wrapped(kernel):
        scopes = ExitStack()
        for function in (kernel, tl.cumsum.fn):
            scopes.callback(patch(function).restore)
        scopes.restore = scopes.close
        return scopes

    return wrapped


if INTERPRETED:
    from triton.runtime import interpreter

    interpreter._convert_float = _round_to_bf16(interpreter._convert_float)
    interpreter._patch_lang = _patch_once(interpreter._patch_lang)
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)
