# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, RoPE and SwiGLU compile for GPUs as they are launched, and ptxas spills nothing.

The launches are those of real sizes, on meta tensors; what a launch knows of its arguments is
compiled in: dtypes, sizes that 16 divides, constants. `pytest -rP` prints the registers.
"""

import re
import subprocess

import pytest
import torch

pytest.importorskip("triton", reason="this platform has no triton")
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from mpu.kernels import rms_norm, rope, swiglu
from mpu.kernels.launch import Kernel

POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float64: "*fp64",
}  # fmt: skip
OTHERS = {torch.float16: "*fp16", torch.int32: "*i32", torch.int64: "*i64"}
REGISTERS = 65536  # of an SM, for all threads of a program


def launches(call, patch):
    """Return [(kernel, its arguments)] of what a call launches."""
    found = []

    def note(kernel, grid, *args, **named):
        given = dict(zip(kernel.arg_names, args, strict=False)) | named
        found.append((kernel.jitted, given))

    patch.setattr(Kernel, "launch", note)
    call()
    return found


def resources(kernel, given, major, folder):
    """Compile a launch; return the registers of a thread, and the bytes that ptxas spills."""
    return compiled(kernel, given, major, folder)[:2]


def compiled(kernel, given, major, folder):
    """Compile a launch; return what `resources` does, and Triton's compiled kernel."""
    constants, signature, attrs = {}, {}, {}
    for i, (name, of) in enumerate(zip(kernel.arg_names, kernel.params, strict=True)):
        value = given[name]
        known = isinstance(value, int) and not of.do_not_specialize
        if of.is_constexpr or value is None or (known and value == 1):
            constants[name], signature[name] = value, "constexpr"
            continue
        tensor = isinstance(value, torch.Tensor)
        number = "fp32" if isinstance(value, float) else "i32"
        signature[name] = (POINTERS | OTHERS)[value.dtype] if tensor else number
        if tensor or (known and value % 16 == 0):
            attrs[i,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attrs)
    options = {"num_warps": given.get("num_warps", 4)}
    options |= {"num_stages": given["num_stages"]} if "num_stages" in given else {}
    made = triton.compile(source, target=GPUTarget("cuda", 10 * major, 32), options=options)
    asm = made.asm
    ptx, tool = folder / "kernel.ptx", get_ptxas(10 * major).path
    ptx.write_text(asm["ptx"])
    architecture = re.search(r"\.target (\w+)", asm["ptx"])[1]
    words = [tool, "-v", f"--gpu-name={architecture}", ptx, "-o", folder / "kernel.cubin"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stderr
    registers, stores, loads = (
        int(re.search(words, said)[1])
        for words in (r"Used (\d+) reg", r"(\d+) bytes spill st", r"(\d+) bytes spill l")
    )
    assert registers * options["num_warps"] * 32 <= REGISTERS
    return registers, stores + loads, made


def meta(dtype, *shape):
    return torch.empty(shape, dtype=dtype, device="meta")


def norm_calls(dtype, width):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x, w, r = meta(dtype, 8192, width), meta(dtype, width), meta(wide, 8192, 1)
    for more in (x, None):
        rms_norm.norm_forward(x, more, w, 1e-5)
        _, parts = rms_norm.norm_backward(x, w, r, x, more)
        rms_norm.fold(parts, meta(wide, width), more is None)


def rope_calls(dtype, heads, groups, d):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    qkv, angles = meta(dtype, 4096, 2, heads + 2 * groups, d), meta(wide, 4096, 1, 1, d // 2)
    parts = qkv.split([heads, groups, groups], 2)
    rope.rope(parts, angles, angles, qkv, copy=False)
    grads = [p.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3) for p in parts]
    rope.rope(grads, angles, angles, qkv, copy=True, back=True)


def swiglu_calls(dtype, width):
    x = meta(dtype, 8192, 2 * width)
    swiglu.swiglu_backward(x, swiglu.swiglu_forward(x))


def no_spill(calls, majors, patch, folder):
    """Compile every launch of some calls for some architectures; print its registers."""
    for call, *sizes in calls:
        for kernel, given in launches(lambda call=call, sizes=sizes: call(*sizes), patch):
            for major in majors:
                registers, spilled = resources(kernel, given, major, folder)
                what = f"{kernel.fn.__name__} {sizes} sm_{10 * major}"
                print(f"{what}: {registers} registers, {spilled} bytes spilled")
                assert not spilled, what


def test_a_layer_of_llama_3_8b_is_not_spilled_on_a_hopper(monkeypatch, tmp_path):
    bf16 = torch.bfloat16
    calls = [(norm_calls, bf16, 4096), (rope_calls, bf16, 32, 8, 128), (swiglu_calls, bf16, 14336)]
    no_spill(calls, (9,), monkeypatch, tmp_path)


@pytest.mark.prove
@pytest.mark.parametrize("dtype", POINTERS, ids=lambda d: str(d).removeprefix("torch."))
def test_no_elementwise_kernel_is_spilled(dtype, monkeypatch, tmp_path):
    calls = [(norm_calls, dtype, width) for width in (64, 128, 2048, 4096, 5120, 8192, 16384)]
    calls += [(rope_calls, dtype, *sizes) for sizes in ((32, 8, 128), (128, 8, 128), (4, 1, 64))]
    calls += [(swiglu_calls, dtype, width) for width in (53248, 1000)]
    no_spill(calls, (8, 9, 10), monkeypatch, tmp_path)
