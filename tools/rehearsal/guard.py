# SPDX-License-Identifier: Apache-2.0
"""Build and load cuda_guard.cpp, the CUDA device that does nothing. Call `load` before torch.

It imports no torch, since torch asks for its CUDA hooks once, while it is imported.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build"


class GuardError(RuntimeError):
    """The device that does nothing could not be made."""


def load() -> None:
    """Load the device into this process, and build it if this torch has none yet.

    Raises GuardError where torch is imported already, or no C++ compiler is here.
    """
    if "torch" in sys.modules:
        raise GuardError("the fake CUDA device must be loaded before torch is imported")
    found = find_spec("torch")
    if found is None or not found.submodule_search_locations:
        raise GuardError("torch is not installed")
    torch = Path(next(iter(found.submodule_search_locations)))
    library = build(torch)
    ctypes.CDLL(str(torch / "lib" / "libtorch_cpu.so"), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


def build(torch: Path) -> Path:
    """Return the compiled library for the torch in a folder; compile it if it is not there."""
    source = HERE / "cuda_guard.cpp"
    name = f"rehearsal-{version('torch')}-{os.uname().machine}.so"
    library = BUILD / name
    if library.exists() and library.stat().st_mtime >= source.stat().st_mtime:
        return library
    compiler = shutil.which(os.environ.get("CXX", "")) or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise GuardError("--rehearse compiles a small C++ file and found no compiler; install g++")
    BUILD.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        made = Path(folder) / name
        words = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-w", f"-I{torch / 'include'}"]
        words += [str(source), "-o", str(made), f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise GuardError(f"{' '.join(words)} failed:\n{done.stderr[-2000:]}")
        os.replace(made, library)  # another rehearsal may build at the same time
    return library


def flag(argv: list[str], name: str) -> str:
    """Return the value of a flag, before all flags are read."""
    for i, word in enumerate(argv):
        if word == name and i + 1 < len(argv):
            return argv[i + 1]
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return ""
