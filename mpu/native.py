# SPDX-License-Identifier: Apache-2.0
"""Load the compiled library of csrc/ (plain C functions, no torch or Python headers) through
ctypes.

`make setup` builds build/weft_native.so where a C++ compiler is present. Everything that uses it
has a twin in Python, so its absence costs time, never function.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

PATH = Path(__file__).resolve().parent.parent / "build" / "weft_native.so"
KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}  # as in csrc/fused.cpp


@cache
def load() -> ctypes.CDLL | None:
    """Return the library, or None where it was not built (see `reason`)."""
    try:
        return ctypes.CDLL(str(PATH))
    except OSError:
        return None


def reason() -> str:
    """Say in a sentence why `load` returns None; empty when it does not."""
    if not PATH.exists():
        return f"{PATH.name} is not built: run `make setup` with a C++ compiler on the path"
    try:
        ctypes.CDLL(str(PATH))
    except OSError as error:
        return f"{PATH.name} does not load: {error}"
    return ""


def fits(*tensors: Tensor, accumulate: torch.dtype | None = None) -> bool:
    """Return whether fused operations can take these tensors: built, CPU, contiguous, of one dtype.

    accumulate: the dtype that sums must have, where there are any; the library's is fp32, or fp64.
    """
    dtype = tensors[0].dtype
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    return (
        load() is not None
        and dtype in KINDS
        and accumulate in (None, sums)
        and all(t.device.type == "cpu" and t.dtype == dtype and t.is_contiguous() for t in tensors)
    )


def call(name: str, dtype: torch.dtype, *args: Tensor | int | float) -> None:
    """Call a function of csrc/fused.cpp: kind and threads first, then pointers and numbers."""
    library = load()
    assert library is not None
    getattr(library, f"weft_{name}")(
        ctypes.c_int64(KINDS[dtype]),
        ctypes.c_int64(torch.get_num_threads()),
        *(
            ctypes.c_void_p(a.data_ptr())
            if isinstance(a, Tensor)
            else (ctypes.c_int64(a) if isinstance(a, int) else ctypes.c_double(a))
            for a in args
        ),
    )
