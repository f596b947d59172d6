# SPDX-License-Identifier: Apache-2.0
"""Whether Triton's kernels run in this process: this module is the only place that decides it.

It is not enough that the package is installed. At the first launch Triton compiles its launcher
with a C compiler and Python.h, links it with libcuda.so, and writes it to a cache.
"""

import re
import sysconfig
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch


@cache
def why_not() -> str:
    """Return why Triton's kernels do not run on this process's GPU, or "" if they do.

    The first call launches one, so call it at startup, not while a CUDA graph is captured.
    """
    if find_spec("triton") is None:
        return "Triton is not installed"
    try:
        launch()
    except Exception as error:  # of a compiler, a linker, a file system or a driver
        return f"Triton cannot launch a kernel ({message_of(error)}){_hint()}"
    return ""


def launches(x: torch.Tensor) -> bool:
    """Return whether Triton's kernels can run on x: it is on a GPU and they are available."""
    return x.is_cuda and not why_not()


def launch() -> None:
    """Add 1 and 1 in a kernel on the current GPU, and wait for the result."""
    from mpu.kernels.sum_of_parts import sum_of_parts

    parts = torch.ones(2, 16, device="cuda")
    out = torch.empty(16, device="cuda")
    sum_of_parts(parts, out)
    if out.tolist() != [2.0] * 16:
        raise RuntimeError(f"1 + 1 is {out.tolist()[0]}")


def message_of(error: Exception) -> str:
    """Return the first line of an error, without the names of temporary files."""
    text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return re.sub(re.escape(tempfile.gettempdir()) + r"/[^\s'\",]+", "a temporary file", text)


def _hint() -> str:
    include = Path(sysconfig.get_paths()["include"])
    if (include / "Python.h").exists():
        return ""
    return f"; {include} has no Python.h: install Python's headers (python3-dev)"
