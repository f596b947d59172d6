# SPDX-License-Identifier: Apache-2.0
"""What CUDA reads when it starts is set before, unless the user has set it, and told."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpu.launch import (
    ALLOCATOR,
    cuda_settings,
    environment_defaults,
    registers_graphs,
    set_deterministic,
)

ROOT = Path(__file__).resolve().parents[2]
DEFAULTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
EAGER = {"CUDA_MODULE_LOADING": "EAGER"}
STAGES = ["--pipeline-model-parallel-size", "2"]


def test_the_defaults_leave_what_is_set():
    more = {"TORCH_CPP_LOG_LEVEL": "ERROR", "NCCL_GRAPH_REGISTER": "0"}
    assert environment_defaults({}) == DEFAULTS | more
    assert environment_defaults({}, STAGES) == DEFAULTS | more | EAGER
    assert environment_defaults(DEFAULTS | more | EAGER, STAGES) == {}
    lazy = {"CUDA_MODULE_LOADING": "LAZY"}
    assert "CUDA_MODULE_LOADING" not in environment_defaults(lazy, STAGES)
    for name in ALLOCATOR:  # a newer and an older name of the same: they would contradict
        assert environment_defaults({name: ""} | more, STAGES) == EAGER


@pytest.mark.parametrize(
    "flags, eager",
    [
        ("", False),
        ("--pipeline-model-parallel-size 1", False),
        ("--pipeline-model-parallel-size=1 --tp-comm-overlap none", False),
        ("--pipeline-model-parallel-size 8", True),
        ("--bf16 --pipeline-model-parallel-size=8", True),
        ("--tp-comm-overlap ring", False),
        ("--tp-comm-overlap symmetric", True),
        ("--tp-comm-overlap=symmetric", True),
        ("--tp-comm-overlap --bf16", True),  # auto may take symmetric
        ("--tp-comm-overlap", True),
    ],
)
def test_kernels_are_loaded_at_the_start_only_where_a_launch_must_not_wait(flags, eager):
    assert ("CUDA_MODULE_LOADING" in environment_defaults({}, flags.split())) == eager


WATCH = """
import json, os, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(json.dumps({k: os.environ[k] for k in os.environ if k[:5] in ("CUDA_", "PYTOR")}))
            sys.stdout.flush()
            os._exit(0)
sys.meta_path.insert(0, Watch())
sys.argv = ["pretrain_llama.py", "--pipeline-model-parallel-size", "2"]
exec(compile(open("pretrain_llama.py").read(), "pretrain_llama.py", "exec"))
"""


@pytest.mark.parametrize("set_by_user", [{}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}])
def test_the_program_sets_them_before_torch_is_imported(set_by_user):
    env = {k: v for k, v in os.environ.items() if k not in (*ALLOCATOR, "CUDA_MODULE_LOADING")}
    env |= set_by_user
    words = [sys.executable, "-c", WATCH]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    seen = json.loads(done.stdout)
    assert seen.items() >= (set_by_user or DEFAULTS).items(), done.stderr
    assert seen["CUDA_MODULE_LOADING"] == "EAGER"
    assert ("PYTORCH_ALLOC_CONF" in seen) == (not set_by_user)


@pytest.mark.parametrize(
    ("register", "allocator", "refused"),
    [
        (None, "expandable_segments:True", False),
        ("0", "expandable_segments:True", False),
        ("1", "max_split_size_mb:64,expandable_segments:True", True),
        ("2", "expandable_segments: True", True),
        ("1", "expandable_segments:False", False),
        ("1", "expandable_segments:True,expandable_segments:False", False),
        ("1", None, False),  # a library's user: torch's own default is False
    ],
)
def test_graphs_whose_buffers_nccl_would_register(monkeypatch, register, allocator, refused):
    for name in (*ALLOCATOR, "NCCL_GRAPH_REGISTER"):
        monkeypatch.delenv(name, raising=False)
    if register is not None:
        monkeypatch.setenv("NCCL_GRAPH_REGISTER", register)
    if allocator is not None:
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", allocator)
    assert ("illegal memory access" in registers_graphs()) == refused


def test_what_is_set_is_told(monkeypatch):
    more = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_GRAPH_REGISTER")
    for name in (*ALLOCATOR, "CUDA_MODULE_LOADING", *more):
        monkeypatch.delenv(name, raising=False)
    assert cuda_settings() == []
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    monkeypatch.setenv("NCCL_ALGO", "^NVLS")
    set_deterministic()
    assert os.environ["NCCL_ALGO"] == "^NVLS"
    assert cuda_settings() == [
        "environment of CUDA: PYTORCH_ALLOC_CONF=expandable_segments:False, "
        "CUBLAS_WORKSPACE_CONFIG=:4096:8, NCCL_ALGO=^NVLS"
    ]
    monkeypatch.delenv("NCCL_ALGO")
    set_deterministic()
    assert os.environ["NCCL_ALGO"] == "Ring"
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.delenv("NCCL_ALGO")
