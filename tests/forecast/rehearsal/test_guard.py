# SPDX-License-Identifier: Apache-2.0
"""The fake CUDA device is torch's, also where torch was built with CUDA.

cuda_library.cpp does what libtorch_cuda.so does when it is loaded. On a machine without a GPU the
same was done with torch 2.13.0 of PyPI and its CUDA packages (docs/rehearsal.md).
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from forecast.rehearsal import guard

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import ctypes, os, sys
from forecast.rehearsal import guard

order, real, torch_lib = sys.argv[1:]
guard.load()
if order == "before":
    ctypes.CDLL(torch_lib + "/libtorch_cpu.so", ctypes.RTLD_GLOBAL)
    ctypes.CDLL(real, ctypes.RTLD_GLOBAL)
if order == "after":
    class After:
        def find_spec(self, name, path=None, target=None):
            if name == "torch._C":
                sys.meta_path.remove(self)
                ctypes.CDLL(real, ctypes.RTLD_GLOBAL)
    sys.meta_path.insert(1, After())
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
if order == "late":
    ctypes.CDLL(real, ctypes.RTLD_GLOBAL)
guard.check(torch)
from forecast.rehearsal.device import install
from forecast.rehearsal.record import Recorder
about = dict(name="none", major=9, minor=0, uuid="", multi_processor_count=1, total_memory=1)
install(Recorder("cuda", ""), about)
with FakeTensorMode():
    x = torch.ones(2, 3, device="cuda", requires_grad=True)
    torch.nn.functional.rms_norm(x @ x.t(), (2,)).sum().backward()
    print(x.grad.device, flush=True)
os._exit(0)  # as a rehearsal ends: autograd's threads may still wait
"""


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Return libtorch_cuda.so, or where this torch has none, compile what stands in for it."""
    own = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
    if own.exists():
        return own
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    made, torch_folder = tmp_path_factory.mktemp("cuda") / "libcuda.so", Path(torch.__file__).parent
    words = [compiler, "-std=c++20", "-O0", "-shared", "-fPIC", "-w", f"-I{torch_folder}/include"]
    words += [str(Path(__file__).with_name("cuda_library.cpp")), "-o", str(made)]
    subprocess.run([*words, f"-L{torch_folder}/lib", "-lc10", "-ltorch_cpu"], check=True)
    return made


@pytest.mark.prove
@pytest.mark.parametrize("order", ["before", "after", "late"])
def test_the_fake_device_counts_in_any_order(real, order):
    lib = str(Path(torch.__file__).parent / "lib")
    env = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, order, str(real), lib],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "cuda:0\n"), done.stderr


def test_a_library_of_another_source_is_not_taken(monkeypatch, tmp_path):
    """A copied build folder has an old library with a newer time."""
    source = tmp_path / "cuda_guard.cpp"
    source.write_text("int before;")
    for name, value in {"HERE": tmp_path, "SOURCE": source, "BUILD": tmp_path / "build"}.items():
        monkeypatch.setattr(guard, name, value, raising=False)
    old = guard.library_path()
    old.parent.mkdir()
    old.write_bytes(b"")
    assert guard.build(tmp_path) == old
    source.write_text("no C++")
    os.utime(source, (1, 1))
    with pytest.raises(guard.GuardError, match="(failed|found no compiler)"):
        guard.build(tmp_path)


def test_another_device_is_said():
    """This process has imported torch without the device."""
    with pytest.raises(guard.GuardError, match="does not use the fake CUDA device"):
        guard.check(torch)
    with pytest.raises(guard.GuardError, match="must be loaded before torch is imported"):
        guard.load()
