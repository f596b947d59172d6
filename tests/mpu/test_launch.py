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
    ALLOW_TF32,
    STAGES,
    cuda_settings,
    environment_defaults,
    set_deterministic,
)
from training.flags.foreign import vocabulary

ROOT = Path(__file__).resolve().parents[2]
DEFAULTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
EAGER = {"CUDA_MODULE_LOADING": "EAGER"}
TWO = ["--pipeline-model-parallel-size", "2"]


def test_the_defaults_leave_what_is_set():
    more = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    assert environment_defaults({}) == DEFAULTS | more
    assert environment_defaults({}, TWO) == DEFAULTS | more | EAGER
    assert environment_defaults(DEFAULTS | more | EAGER, TWO) == {}
    lazy = {"CUDA_MODULE_LOADING": "LAZY"}
    assert "CUDA_MODULE_LOADING" not in environment_defaults(lazy, TWO)
    for name in ALLOCATOR:  # a newer and an older name of the same: they would contradict
        assert environment_defaults({name: ""} | more, TWO) == EAGER


@pytest.mark.parametrize(
    "flags, eager",
    [
        ("", False),
        ("--pipeline-model-parallel-size 1", False),
        ("--pipeline-model-parallel-size=1 --tp-comm-overlap none", False),
        ("--pipeline-model-parallel-size 8", True),
        ("--bf16 --pipeline-model-parallel-size=8", True),
        ("--pipeline_model_parallel_size 8", True),
        ("--tp-comm-overlap ring", False),
        ("--tp-comm-overlap symmetric", True),
        ("--tp-comm-overlap=symmetric", True),
        ("--tp-comm-overlap --bf16", True),  # auto may take symmetric
        ("--tp-comm-overlap", True),
        ("--pp 4", True),
        ("--pp-size=1", False),
    ],
)
def test_kernels_are_loaded_at_the_start_only_where_a_launch_must_not_wait(flags, eager):
    assert ("CUDA_MODULE_LOADING" in environment_defaults({}, flags.split())) == eager


def test_every_name_of_a_flag_that_is_read_early_is_known():
    same = vocabulary().same
    for target, known in (("--pipeline-model-parallel-size", STAGES), ("--allow-tf32", ALLOW_TF32)):
        assert {target} | {name for name, words in same.items() if words[-1] == target} == {*known}


HOSTILE = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", "NVIDIA_TF32_OVERRIDE": "1",
           "HIPBLASLT_ALLOW_TF32": "1", "ONEDNN_DEFAULT_FPMATH_MODE": "BF16",
           "DNNL_DEFAULT_FPMATH_MODE": "ANY"}  # fmt: skip
EXACT = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0", "NVIDIA_TF32_OVERRIDE": "0",
         "HIPBLASLT_ALLOW_TF32": "0", "ONEDNN_DEFAULT_FPMATH_MODE": "STRICT",
         "DNNL_DEFAULT_FPMATH_MODE": "STRICT"}  # fmt: skip


def test_what_would_round_fp32_does_not_stay():
    added = environment_defaults(HOSTILE)
    assert added.items() >= EXACT.items()
    assert not environment_defaults(EXACT).keys() & EXACT.keys()
    assert not environment_defaults({}).keys() & EXACT.keys()
    assert "NVIDIA_TF32_OVERRIDE" in environment_defaults(HOSTILE, ["--allow-tf32=false"])
    for words in (["--allow-tf32"], ["--lr", "1e-3", "--allow_tf32"], ["--tf32=1"]):
        allowed = environment_defaults(HOSTILE, words)
        assert "NVIDIA_TF32_OVERRIDE" not in allowed  # as the user has it
        assert allowed["ONEDNN_DEFAULT_FPMATH_MODE"] == "STRICT"  # which is no TF32


def test_what_else_changes_bits_is_told(monkeypatch):
    from mpu.launch import cpu_settings

    gpu = """NVTE_ALLOW_NONDETERMINISTIC_ALGO NCCL_PROTO NCCL_NVLS_ENABLE NCCL_MIN_CTAS
        NCCL_MAX_NCHANNELS PYTORCH_TUNABLEOP_ENABLED TORCH_BLAS_PREFER_HIPBLASLT
        HIPBLASLT_TUNING_FILE ROCBLAS_USE_HIPBLASLT MIOPEN_FIND_MODE TRITON_F32_DEFAULT
        CUBLAS_EMULATE_SINGLE_PRECISION CUBLASLT_WORKSPACE_SIZE NVIDIA_TF32_OVERRIDE""".split()
    cpu = """ONEDNN_MAX_CPU_ISA DNNL_MAX_CPU_ISA ATEN_CPU_CAPABILITY MKL_CBWR OPENBLAS_CORETYPE
        MKL_ENABLE_INSTRUCTIONS ONEDNN_DEFAULT_FPMATH_MODE DNNL_DEFAULT_FPMATH_MODE""".split()
    before = {*"".join(cpu_settings()).split(), *"".join(cuda_settings()).split()}
    for name in [*gpu, *cpu]:
        monkeypatch.setenv(name, "7")
    for names, line in ((gpu, cuda_settings()), (cpu, cpu_settings())):
        told = {word.rstrip(",") for word in line[0].split()} - before
        assert told >= {f"{name}=7" for name in names}
        assert not told & {f"{name}=7" for name in {*gpu, *cpu} - {*names}}


RUN = """
import json, os, sys
import pretrain_llama
import torch
code = pretrain_llama.main(sys.argv[1:])
b = torch.backends
print(json.dumps([code, b.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision(),
                  {name: os.environ.get(name) for name in sorted(os.environ)
                   if "TF32" in name or "FPMATH" in name}]))
"""
FLAGS = """--mock-data --vocab-size 64 --num-layers 1 --hidden-size 32 --num-attention-heads 2
    --seq-length 32 --train-iters 2 --lr 1e-3 --device cpu --micro-batch-size 1
    --global-batch-size 2 --log-interval 1 --log-json""".split()


def run(env: dict[str, str], log: Path, *more: str) -> tuple[str, list, list]:
    """Return what a run in this environment prints, its settings, and its steps."""
    clean = {k: v for k, v in os.environ.items() if k not in HOSTILE}
    env = clean | env | {"OMP_NUM_THREADS": "1", "ONEDNN_VERBOSE": "1"}
    words = [sys.executable, "-c", RUN, *FLAGS, str(log), *more]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [(row["loss"], row["grad_norm"]) for row in rows if "loss" in row]
    return done.stdout, json.loads(done.stdout.splitlines()[-1]), steps


@pytest.mark.prove
@pytest.mark.parametrize("env", [HOSTILE])
def test_a_run_computes_fp32_in_fp32_whatever_the_environment_says(env, tmp_path):
    """The bits of a run without them, and what oneDNN says of each of its products."""
    _, _, steps = run({}, tmp_path / "0")
    said, (code, allowed, precision, seen), these = run(env, tmp_path / "1")
    assert code == 0 and these == steps and len(steps) == 2
    assert not allowed and precision == "highest"
    assert seen == {name: EXACT[name] for name in env}
    assert "onednn_verbose" in said and "attr-fpmath" not in said
    told = " ".join(said.split())
    assert f"{', '.join(env)}: overridden, fp32 matmuls are computed in fp32" in told


@pytest.mark.prove
@pytest.mark.parametrize("name, value", [("ONEDNN_MAX_CPU_ISA", "SSE41")])
def test_a_run_names_what_chooses_other_kernels_of_a_cpu(name, value, tmp_path):
    said, (code, *_), steps = run({name: value}, tmp_path / "1")
    _, _, without = run({}, tmp_path / "0")
    assert code == 0 and f"environment of the CPU's libraries: {name}={value}" in said
    assert [loss for loss, _ in steps] == pytest.approx([loss for loss, _ in without], rel=1e-5)


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


def test_what_is_set_is_told(monkeypatch):
    more = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO")
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
