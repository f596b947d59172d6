# SPDX-License-Identifier: Apache-2.0
"""The requirements of kernels on their arguments that the kernels do not check themselves.

A kernel that reads a tensor by its address assumes strides, lengths and dtypes; with others it
silently computes wrong results. Our Triton kernels declare their requirements
(mpu/kernels/declared.py). CALLS has those of csrc and torch, with their source. The keywords:

    whole       contiguous                          int64, int32, float32: of that dtype
    rows        the last dimension has stride 1     same: of the dtype of the call's first tensor
    aligned     at a multiple of 16 bytes           sums: fp64 if the first is fp64, else fp32
    half        bf16 or fp16                        like: with the strides of the argument before
    columns     contiguous once transposed

Call sites make their arguments fit, or use another kernel (`fits`, `on_triton`, `kernel_of`). A
rehearsal checks every launch, also on a CPU, and names the line (forecast/rehearsal). Tensors that
a call site allocates, such as an output of empty_like, are checked too.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

ALIGN = 16  # bytes
DTYPES = {"int64": torch.int64, "int32": torch.int32, "float32": torch.float32}


class Requirements(NamedTuple):
    """A call's requirements on its arguments, by name or position; source: where they are found."""

    of: Mapping[str | int, tuple[str, ...]]
    source: str


def _row(source: str, **requirements: str) -> Requirements:
    """Return a row: each keyword is an argument, its value keywords of the module's docstring."""
    return Requirements(
        {name: tuple(words.split()) for name, words in requirements.items()}, source
    )


def _placed(source: str, *requirements: str) -> Requirements:
    """Return a row of arguments, by their positions among a call's tensors."""
    return Requirements({i: tuple(words.split()) for i, words in enumerate(requirements)}, source)


SAME, SUMS, LABELS = "whole same", "whole sums", "whole int64"
QKV_ALIKE = "rows same", "rows same like", "rows same like"
KV_ALIKE = "rows same", "rows same", "rows same like"
FUSED, ATTENTION = "csrc/fused.cpp", "csrc/attention.h"
# sources of torch's kernels were read in a review, at commits of its main branch; not reread since
FLASH = "pytorch aten/src/ATen/native/transformers/cuda/{attention,flash_api}: not read again"
CUDNN = "pytorch aten/src/ATen/native/cudnn/MHA.cpp, its graphs and what they are given"
SCALED = "pytorch aten/src/ATen/native/cuda/ScaledBlas.cpp, ScaledBlasUtils.cpp: not read again"
BLAS = "pytorch aten/src/ATen/native/cuda/Blas.cpp: not read again"

CALLS: dict[str, Requirements] = {
    # csrc, by the positions of the tensors among a call's arguments
    "weft::norm_forward": _placed(FUSED, SAME, SAME, SAME, SAME, SAME, SUMS),
    "weft::norm_backward": _placed(FUSED, SAME, SAME, SUMS, SAME, SAME, SAME, SUMS),
    "weft::swiglu_forward": _placed(FUSED, SAME, SAME),
    "weft::swiglu_backward": _placed(FUSED, SAME, SAME, SAME),
    "weft::rope": _placed(FUSED, SAME, SUMS, SUMS, SAME),
    "weft::softmax_stats": _placed(FUSED, SAME, LABELS, SUMS),
    "weft::softmax_gradient": _placed(FUSED, SAME, LABELS, SUMS, SUMS),
    "weft::attention_forward": _placed(ATTENTION, *QKV_ALIKE, SAME, SUMS),
    "weft::attention_backward": _placed(ATTENTION, *QKV_ALIKE, SAME, SUMS, SAME, SAME),
    "weft::block_forward": _placed(ATTENTION, *KV_ALIKE, "rows same", "sums"),
    "weft::block_backward": _placed(
        ATTENTION, *KV_ALIKE, "rows same", "sums", *["rows same"] * 4
    ),
    # torch, by the names of its schemas
    "aten::_scaled_dot_product_flash_attention": _row(
        FLASH, query="rows same", key="rows same", value="rows same"
    ),
    "aten::_scaled_dot_product_flash_attention_backward": _row(
        FLASH, query="rows", key="rows same", value="rows same", out="same",
        logsumexp="whole float32",
    ),
    # FlashAttention 3 and 4 replace the kernels of the flash operators under the same names
    "aten::_scaled_dot_product_cudnn_attention": _row(
        CUDNN, query="half rows aligned", key="rows same aligned", value="rows same aligned"
    ),
    "aten::_scaled_dot_product_cudnn_attention_backward": _row(
        CUDNN, query="half rows aligned", key="rows same aligned", value="rows same aligned",
        grad_out="rows same aligned", out="rows same aligned", logsumexp="whole float32",
    ),
    "aten::_flash_attention_forward": _row(
        FLASH, query="rows same", key="rows same", value="rows same", cum_seq_q="whole int32",
        cum_seq_k="whole int32",
    ),
    "aten::_flash_attention_backward": _row(
        FLASH, query="rows", key="rows same", value="rows same", logsumexp="whole float32",
        cum_seq_q="whole int32", cum_seq_k="whole int32",
    ),
    "aten::segment_reduce": _row(
        "pytorch aten/src/ATen/native/cuda/SegmentReduce.cu: not read again",
        data="whole", lengths="whole int64",
    ),
    "aten::mm.dtype": _row(BLAS, self="half", mat2="same"),
    "aten::addmm.dtype": _row(BLAS, mat1="half", mat2="same", self="float32"),
    "aten::_scaled_mm_v2": _row(SCALED),  # see `scaled_mm`
}  # fmt: skip


def wrong(
    call: str, given: Mapping[str | int, object], required: Requirements | None = None
) -> Iterator[tuple[Tensor, str]]:
    """Yield each argument of a call that the kernel would misread, with a message.

    given: arguments by name or position; those that are not tensors are ignored. required: the
    declaration of a kernel that has no row in CALLS.
    """
    required = required or CALLS.get(call)
    if required is None:
        return
    tensors = {key: x for key, x in given.items() if isinstance(x, Tensor)}
    first = next((tensors[key] for key in required.of if key in tensors), None)
    before = first
    for key, words in required.of.items():
        if (x := tensors.get(key)) is not None and first is not None and before is not None:
            for word in words:
                if not (fits(word, x, first.dtype) if word != "like" else alike(x, before)):
                    what = key if isinstance(key, str) else f"tensor {key}"
                    must = MEANING.get(word, word)
                    found = f"{x.dtype} {tuple(x.shape)} of strides {x.stride()}"
                    why = f"{call} reads {what} by address, which must be {must}: it is {found}"
                    yield x, f"{why} ({required.source})"
            before = x


MEANING = {
    "whole": "contiguous",
    "rows": "of stride 1 in its last dimension",
    "half": "bf16 or fp16",
    "aligned": f"at a multiple of {ALIGN} bytes",
    "like": "of the strides of the argument before it",
    "columns": "contiguous if it is transposed",
    "same": "of the dtype of the first argument",
    "sums": "of the dtype of sums",
}


def alike(x: Tensor, other: Tensor) -> bool:
    """Return whether one tensor's strides are valid for both."""
    strides = zip(x.shape, x.stride(), other.stride(), strict=False)
    return all(n == 1 or mine == theirs for n, mine, theirs in strides)


def fits(word: str, x: Tensor, kind: torch.dtype) -> bool:
    """Return whether a tensor meets a requirement; kind: the dtype of the first tensor."""
    if word == "whole":
        return x.is_contiguous()
    if word == "columns":
        return x.mT.is_contiguous()
    if word == "rows":
        return x.dim() == 0 or x.shape[-1] == 1 or x.stride(-1) == 1
    if word == "same":
        return x.dtype == kind
    if word == "sums":
        return x.dtype == (torch.float64 if kind == torch.float64 else torch.float32)
    if word == "aligned":
        return x.storage_offset() * x.element_size() % ALIGN == 0
    if word == "half":
        return x.dtype in (torch.bfloat16, torch.float16)
    return x.dtype == DTYPES[word]


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# kinds of scales, as torch.nn.functional.ScalingType numbers them
TENSOR, ROW, BLOCK_32, BLOCK_128, SQUARE = 0, 1, 3, 4, 5


def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, kind_a: int, scale_b: Tensor, kind_b: int
) -> Iterator[tuple[Tensor, str]]:
    """Yield each operand that torch's scaled_mm rejects on CUDA, or misreads, with a message.

    a [n, k], b [k, m]. torch's shape functions check only some of this: neither the dtypes nor the
    strides of block scales (SCALED).
    """
    name = "aten::_scaled_mm_v2"
    dtypes, (n, k), m = {a.dtype, b.dtype}, a.shape, b.shape[1]
    if not dtypes <= {E4M3, E5M2} or dtypes == {E5M2}:
        yield a, f"{name} multiplies e4m3 by e4m3 or e5m2, not {a.dtype} by {b.dtype}"
    elif kind_a in (BLOCK_32, BLOCK_128, SQUARE) and dtypes != {E4M3}:
        yield a, f"{name} multiplies blocks of e4m3 by e4m3 alone, not {a.dtype} by {b.dtype}"
    if a.stride(1) != 1 or b.stride(0) != 1 or a.stride(0) % ALIGN or b.stride(1) % ALIGN:
        yield a, f"{name} takes rows of a and columns of b at multiples of {ALIGN} bytes"
    if k % ALIGN or m % ALIGN:
        yield b, f"{name} takes k {k} and m {m} that are multiples of {ALIGN}"
    for which, scale, kind, length in (("a", scale_a, kind_a, n), ("b", scale_b, kind_b, m)):
        expected = torch.float8_e8m0fnu if kind == BLOCK_32 else torch.float32
        if scale.dtype != expected:
            yield scale, f"{name} takes scales of {which} in {expected}, not {scale.dtype}"
        if kind in (TENSOR, ROW, BLOCK_32) and not scale.is_contiguous():
            yield scale, f"{name} reads scales of {which} by address, which must be contiguous"
        if kind == TENSOR and scale.storage_offset() * scale.element_size() % ALIGN:
            yield scale, f"{name} takes the scale of {which} at a multiple of {ALIGN} bytes"
        if kind == ROW and scale.numel() != length:
            yield scale, f"{name} takes {length} scales of {which}, not {scale.numel()}"
        if kind == BLOCK_128 and length % 4:  # of 16 bytes of scales: vllm-project/vllm#49932
            yield scale, f"{name} takes rows of {which} with blocks' scales in fours, not {length}"
        if kind == BLOCK_128 and scale.stride(0) != 1:
            yield (
                scale,
                f"{name} reads blocks' scales of {which} by columns: {scale.stride()}",
            )
        if kind == SQUARE and (scale.stride(0) != 1 or scale.stride(1) % 4):
            yield (
                scale,
                f"{name} reads squares' scales of {which} in fours: {scale.stride()}",
            )
