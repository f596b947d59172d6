# SPDX-License-Identifier: Apache-2.0
"""Build and load cuda_guard.cpp, a fake CUDA device that does nothing.

Call `load` before torch is imported, and `check` after. torch looks up its CUDA hooks once, while
torch._C is imported. The fake device is loaded just before that, after torch's own libraries.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "cuda_guard.cpp"
BUILD = HERE.parents[1] / "build"


class GuardError(RuntimeError):
    """The fake CUDA device cannot be built or loaded."""


class Loader:
    """An import hook that loads the device's library just before torch._C. It finds no module."""

    def __init__(self, torch: Path, library: Path) -> None:
        self.torch, self.library = torch, library

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Load the library if `name` is torch._C. Raises GuardError if that fails."""
        if name != "torch._C":
            return
        sys.meta_path.remove(self)
        try:  # libtorch loads libtorch_cuda, if it exists: its guard is registered before ours
            ctypes.CDLL(str(self.torch / "lib" / "libtorch.so"), ctypes.RTLD_GLOBAL)
            ctypes.CDLL(str(self.library), ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise GuardError(f"the fake CUDA device cannot be loaded: {error}") from None


def load() -> None:
    """Arrange that the fake device is loaded with torch; build it for this torch if necessary.

    Raises GuardError if torch is imported already or not installed, or if the build fails.
    """
    if "torch" in sys.modules:
        raise GuardError("the fake CUDA device must be loaded before torch is imported")
    found = find_spec("torch")
    if found is None or not found.submodule_search_locations:
        raise GuardError("torch is not installed")
    torch = Path(next(iter(found.submodule_search_locations)))
    sys.meta_path.insert(0, Loader(torch, build(torch)))


def check(torch: ModuleType) -> None:
    """Raise GuardError if the imported torch does not use the fake device."""
    try:  # RTLD_NOLOAD: find the library only if this process has loaded it
        ours = ctypes.CDLL(str(library_path()), mode=os.RTLD_NOLOAD)
    except OSError:
        ours = None
    if ours is None or not ours.weft_fake_cuda():
        raise GuardError(f"torch {torch.__version__} does not use the fake CUDA device")


def library_path() -> Path:
    """Return the path of the compiled library for the installed torch.

    Its name has a hash of the source, since in a copied folder an old library may have a newer
    time.
    """
    made_of = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    return BUILD / f"rehearsal-{version('torch')}-{os.uname().machine}-{made_of}.so"


def build(torch: Path) -> Path:
    """Return the path of the library for the torch in a folder; compile it if it does not exist.

    Raises GuardError if there is no compiler, or if it fails.
    """
    library = library_path()
    if library.exists():
        return library
    compiler = shutil.which(os.environ.get("CXX", "")) or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise GuardError("--rehearse compiles a small C++ file, and found no compiler: install g++")
    BUILD.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        made = Path(folder) / library.name
        words = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-w", f"-I{torch / 'include'}"]
        words += [str(SOURCE), "-o", str(made), f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise GuardError(f"{' '.join(words)} failed:\n{done.stderr[-2000:]}")
        os.replace(made, library)  # another rehearsal may build at the same time
    return library


def flag(argv: list[str], name: str) -> str:
    """Return the value of a flag, or "", without parsing the other flags."""
    for i, word in enumerate(argv):
        if word == name and i + 1 < len(argv):
            return argv[i + 1]
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return ""
