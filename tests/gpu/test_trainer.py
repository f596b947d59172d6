# SPDX-License-Identifier: Apache-2.0
"""The whole trainer on one GPU against itself on other layouts; `make gpu-check` runs it.

The CPU's losses are followed by the row `losses` (tests/gpu/steps.py), from the same weights:
initial weights are drawn on the device, so a run of the program on a CPU has others.

There are runs of one rank (whose backend is nccl, though a world of one needs no collective) and of
two ranks that share the GPU over gloo groups, whose CUDA tensors pass through host memory.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
FLAGS = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --num-layers 4 --hidden-size 128
    --num-attention-heads 8 --group-query-attention --num-query-groups 4 --ffn-hidden-size 352
    --seq-length 128 --max-position-embeddings 128 --swiglu --micro-batch-size 2
    --global-batch-size 8 --lr 1e-3 --train-iters 8 --log-interval 1 --clip-grad 1.0
    --eval-interval 8 --eval-iters 2 --overlap-grad-reduce --eod-mask-loss --reset-attention-mask
    --reset-position-ids
""".split()
TOLERANCE = {"fp32": 2e-4, "bf16": 2e-2, "fp64": 1e-10}


MADE: dict[tuple, tuple[list, float]] = {}  # runs of one rank that many tests compare with


def of_one(folder: Path, device: str, dtype: str) -> tuple[list, float]:
    """Return what `train` returns of one rank; each such run is made once."""
    if (device, dtype) not in MADE:
        MADE[device, dtype] = train(folder, device, dtype, 1)
    return MADE[device, dtype]


def train(folder: Path, device: str, dtype: str, ranks: int, *more: str) -> tuple[list, float]:
    """Run pretrain_llama.py; return its losses and the validation loss."""
    log = folder / f"{device}-{dtype}-{ranks}-{len(more)}.json"
    words = [sys.executable]
    if ranks > 1:
        words += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    words += [str(ROOT / "pretrain_llama.py"), *FLAGS, "--device", device, "--log-json", str(log)]
    words += [] if dtype == "fp32" else [f"--{dtype}"]
    env = {**os.environ, "OMP_NUM_THREADS": "4"}
    done = subprocess.run([*words, *more], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    (validation,) = [row["validation_loss"] for row in rows if "validation_loss" in row]
    return losses, validation


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("layout", ["tp", "sp", "dp", "pp", "zero 1", "zero 3"])
def test_two_gloo_ranks_on_one_gpu_follow_one(tmp_path, dtype, layout, device):
    want, want_validation = of_one(tmp_path, device, dtype)
    more = {"tp": ["--tensor-model-parallel-size", "2"], "dp": []}
    more["pp"] = ["--pipeline-model-parallel-size", "2", "--pipeline-schedule", "zb-v"]
    more["sp"] = [*more["tp"], "--sequence-parallel"]
    for level in "13":
        overlap = ["--overlap-grad-reduce", "--overlap-param-gather"]
        more[f"zero {level}"] = ["--zero-stage", level, *overlap]
    gloo = ["--distributed-backend", "gloo"]
    losses, validation = train(tmp_path, device, dtype, 2, *more[layout], *gloo)
    assert losses == pytest.approx(want, rel=TOLERANCE[dtype])
    assert validation == pytest.approx(want_validation, rel=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_overlap_by_symmetric_memory_on_one_gpu_follows_one_rank(tmp_path, monkeypatch, dtype):
    """torch's symmetric memory lets ranks share a device where it is told to."""
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    want, _ = of_one(tmp_path, "cuda", dtype)
    more = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    more += ["--tp-comm-overlap", "symmetric", "--distributed-backend", "gloo"]
    losses, _ = train(tmp_path, "cuda", dtype, 2, *more)
    assert losses == pytest.approx(want, rel=TOLERANCE[dtype])


@pytest.mark.parametrize("granularity", ["selective", "full"])
def test_recomputation_on_a_gpu(tmp_path, granularity, device):
    want, _ = of_one(tmp_path, device, "fp32")
    more = ["--recompute-granularity", granularity]
    if granularity == "full":
        more += ["--recompute-method", "uniform", "--recompute-num-layers", "2"]
    losses, _ = train(tmp_path, device, "fp32", 1, *more)
    assert losses == pytest.approx(want, rel=1e-6)


def test_weight_gradients_come_out_in_fp32():
    """bf16 operands, fp32 product and sum: no worse than fp32 accumulation of exact products."""
    from mpu.gradients import GradientSink
    from mpu.layers.linear import Recipe

    sink, weight = GradientSink(), torch.nn.Parameter(torch.zeros(64, 32, device="cuda").bfloat16())
    x, dy = (torch.randn(512, n, device="cuda").bfloat16() for n in (32, 64))
    for _ in range(3):
        Recipe(on_gpu=True).accumulate(*sink.grad_slot(weight), x, dy)
    want = 3 * (dy.double().t() @ x.double())
    assert (sink.main_grad(weight).double() - want).norm() < 1e-5 * want.norm()


def test_a_save_behind_the_training_holds_the_step_it_was_asked_for(tmp_path, device):
    """Its copies go through page-locked memory; a resume from it gives the same bits."""
    same = "--deterministic-mode"
    saving = [same, "--async-save", "--save-interval", "3", "--save", str(tmp_path / "saved")]
    want, _ = train(tmp_path, device, "bf16", 1, same)
    losses, _ = train(tmp_path, device, "bf16", 1, *saving)
    assert losses == want
    resumed = [same, "--load", str(tmp_path / "saved"), "--ckpt-step", "3"]
    losses, _ = train(tmp_path, device, "bf16", 1, *resumed)
    assert losses == want[3:]


def test_deterministic_mode_repeats_its_bits(tmp_path, device):
    """Without it index_add_ and an attention's backward may add in another order each time."""
    first, _ = train(tmp_path, device, "bf16", 1, "--deterministic-mode")
    again, _ = train(tmp_path, device, "bf16", 1, "--deterministic-mode", "--manual-gc")
    assert first == again
