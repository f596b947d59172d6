# SPDX-License-Identifier: Apache-2.0
"""Triton counts as available where it launches a kernel, not where it is installed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mpu.kernels import available
from mpu.layers import fused_gpu
from mpu.layers.float8 import rows

ROOT = Path(__file__).resolve().parents[3]
# Triton's own way to a first launch, up to where it would call the driver: there is no GPU here
PROGRAM = """
import json, os, sys
import torch
from triton.runtime import build
from mpu.kernels import available
from mpu.kernels.sum_of_parts import sum_of_parts

torch.cuda.is_available = lambda: True
available.launch = lambda: sum_of_parts(torch.ones(2, 16), torch.empty(16))
said = []
for cc, path in json.loads(sys.argv[1]):
    os.environ.pop("CC", None)
    os.environ.update({"CC": cc} if cc else {}, PATH=path)
    available.why_not.cache_clear()
    for each in vars(build).values():  # Triton 3.9 keeps the compiler that it has found
        getattr(each, "cache_clear", int)()
    said.append(available.why_not())
print(json.dumps(said))
"""


@pytest.fixture
def asked():
    """Ask anew, and leave nothing behind."""
    available.why_not.cache_clear()
    yield
    available.why_not.cache_clear()


@pytest.mark.prove
def test_a_node_without_a_compiler_or_headers(tmp_path):
    """Each sentence is Triton's own: it compiles its launcher at the first launch."""
    pytest.importorskip("triton")
    fails = tmp_path / "fails"
    fails.write_text("#!/bin/sh\nexit 1\n")
    fails.chmod(0o755)
    (tmp_path / "libcuda.so.1").touch()
    cases = [("/nonexistent", "/usr/bin"), ("", "/nonexistent"), (str(fails), "/usr/bin:/bin")]
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache"),
                        "TRITON_LIBCUDA_PATH": str(tmp_path)}  # fmt: skip
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(cases)], cwd=ROOT, env=env, capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    no_file, none, failed = json.loads(done.stdout)
    assert no_file.startswith("Triton cannot launch a kernel (FileNotFoundError: ")
    assert "/nonexistent" in no_file
    assert "Failed to find C compiler" in none
    assert "CalledProcessError" in failed and "returned non-zero exit status 1" in failed
    assert "a temporary file" in failed, "ranks compare this text"


def test_what_fails_is_done_by_torch(asked, monkeypatch):
    """By one answer for all: the fused operations, rows of float8, and what a flag asks for."""
    monkeypatch.setattr(available, "find_spec", lambda name: "triton is installed")

    def launch():
        raise RuntimeError("Failed to find C compiler. Please specify via CC\nand more")

    monkeypatch.setattr(available, "launch", launch)
    x = SimpleNamespace(is_cuda=True, dtype=torch.float32, is_contiguous=lambda: True)
    reason = available.why_not()
    assert "(RuntimeError: Failed to find C compiler. Please specify via CC)" in reason
    assert not fused_gpu.on_triton(x) and not rows.on_triton(x)
    assert fused_gpu.without(torch.device("cuda")) == reason
    available.why_not.cache_clear()
    monkeypatch.setattr(available, "launch", lambda: None)
    assert available.why_not() == "" and fused_gpu.on_triton(x) and rows.on_triton(x)


def test_headers_that_are_missing_are_named(asked, monkeypatch, tmp_path):
    monkeypatch.setattr(available, "find_spec", lambda name: "triton is installed")
    monkeypatch.setattr(available.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setattr(available, "launch", lambda: 1 / 0)
    assert available.why_not().endswith("has no Python.h: install Python's headers (python3-dev)")


def test_it_is_asked_once(asked, monkeypatch):
    calls = []
    monkeypatch.setattr(available, "find_spec", lambda name: "triton is installed")
    monkeypatch.setattr(available, "launch", lambda: calls.append(1))
    assert [available.why_not() for _ in range(3)] == ["", "", ""] and calls == [1]
