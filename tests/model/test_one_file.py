# SPDX-License-Identifier: Apache-2.0
"""examples/one_file.py against the framework: losses, norms and weights of 50 steps, bit for bit.

Both train on the batches of one_file.py. The framework runs without the library of csrc/, whose
kernels one_file.py does not have.
"""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pretrain_llama
from mpu import native
from tests.sampling import sampled
from training.data.batch import Batch
from training.faults.monitor import FailureMonitor
from training.flags.parse import parse

FILE = Path(__file__).resolve().parents[2] / "examples" / "one_file.py"
BATCH, MICRO, LENGTH, CLIP, DECAY = 8, 1, 32, 0.5, 0.1


def one_file():
    spec = importlib.util.spec_from_file_location("one_file", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def rates(module, steps: int) -> list[float]:
    return [module.learning_rate(step, steps, 3e-3, warm_up=10) for step in range(steps)]


def bits(found: dict[str, torch.Tensor]) -> dict[str, bytes]:
    whole = {name: tensor.detach().contiguous() for name, tensor in found.items()}
    return {name: t.view(torch.uint8).numpy().tobytes() for name, t in whole.items()}


def by_one_file(module, tp: int, pp: int, dtype: torch.dtype, steps: int):
    """Train with one_file.py on one rank: the results, and the micro-batches of each step."""
    grid = module.Grid(tp, pp)
    stage = module.Stage(module.Sizes(h=64, f=96, layers=4, a=4, g=2, dtype=dtype), grid)
    optimizer = module.DistributedOptimizer(stage, grid, (0.9, 0.95), DECAY, CLIP)
    text = torch.frombuffer(bytearray(FILE.read_bytes()), dtype=torch.uint8)
    results, data = [], []
    for step, lr in enumerate(rates(module, steps)):
        data.append(module.micro_batches(text, step, grid, BATCH, MICRO, LENGTH, 1234, "cpu"))
        results.append(module.train_step(stage, optimizer, grid, data[-1], lr))
    return results, {f"{p.label}.weight": p for p in stage.weights()}, data


def by_framework(comm, tp: int, pp: int, dtype: torch.dtype, data, lrs: list[float]):
    """Train the same with the framework."""
    flags = (
        f"--mock-data --vocab-size 256 --make-vocab-size-divisible-by 1 --num-layers 4 "
        f"--hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --num-query-groups 2 "
        f"--group-query-attention --seq-length {LENGTH} --max-position-embeddings {LENGTH} "
        f"--rotary-base 10000 --norm-epsilon 1e-5 --init-method-std 0.02 --seed 1234 "
        f"--untie-embeddings-and-output-weights --train-iters {len(data)} --lr 1 "
        f"--adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay {DECAY} "
        f"--clip-grad {CLIP} --global-batch-size {BATCH} --micro-batch-size {MICRO} "
        f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} "
        f"--tp-comm-overlap none --use-distributed-optimizer --ddp-bucket-size 20000"
    ).split()
    flags += ["--sequence-parallel"] if tp > 1 else []
    flags += ["--bf16"] if dtype == torch.bfloat16 else []
    config = parse(flags, comm.size)
    grid = comm.grid(tp, 1, pp)
    load, native.load = native.load, lambda: None
    try:
        run = pretrain_llama.build(config, grid, torch.device("cpu"), FailureMonitor())
        results = []
        for batches, lr in zip(data, lrs, strict=True):
            given = [Batch(t, y, None, None, None, 0, t.numel()) for t, y in batches]
            loss, norm, _ = pretrain_llama.train_step(run, given, lr)
            results.append((loss.item(), norm.item()))
        run.sink.wait_for_weights()
    finally:
        native.load = load
    return results, dict(run.model.named_parameters())


def train_both(comm, tp: int, pp: int, dtype: str, steps: int):
    """Return what differs on this rank, and the losses."""
    module, kind = one_file(), getattr(torch, dtype)
    results, weights, data = by_one_file(module, tp, pp, kind, steps)
    same, theirs = by_framework(comm, tp, pp, kind, data, rates(module, steps))
    mine, theirs = bits(weights), bits(theirs)
    assert mine.keys() == theirs.keys()
    wrong = [name for name in mine if mine[name] != theirs[name]]
    pairs = enumerate(zip(results, same, strict=True))
    wrong += [f"step {i}: {a} for {b}" for i, (a, b) in pairs if a != b]
    return wrong, [loss for loss, _ in results]


def test_no_clipping_is_that_of_a_norm_that_is_never_reached(monkeypatch):
    module, found = one_file(), []
    for clip in (0.0, 1e9, CLIP):
        monkeypatch.setattr(sys.modules[__name__], "CLIP", clip)
        found.append(bits(by_one_file(module, 1, 1, torch.float32, 2)[1]))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    "tp, pp, size, dtype, steps", sampled([(1, 2, 2, "bfloat16", 3), (2, 1, 4, "float32", 2)], 2)
)
def test_steps_have_the_bits_of_the_framework(world, tp, pp, size, dtype, steps):
    for wrong, losses in world(size).run(train_both, tp, pp, dtype, steps):
        assert not wrong and len({*losses}) == steps


@pytest.mark.prove
@pytest.mark.parametrize(
    "tp, pp, size, dtype", [(1, 1, 2, "float32"), (2, 2, 4, "bfloat16"), (1, 4, 4, "float32")]
)
def test_fifty_steps_of_several_layouts(world, tp, pp, size, dtype):
    every = world(size).run(train_both, tp, pp, dtype, 50)
    for wrong, losses in every:
        assert not wrong
        assert losses == every[0][1] and sum(losses[-10:]) / 10 < losses[0] - 1.5


def test_it_imports_torch_alone_and_fits_in_900_lines():
    text = FILE.read_text()
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    assert names - set(sys.stdlib_module_names) == {"torch"}
    assert len(text.splitlines()) <= 900


@pytest.mark.prove
def test_it_runs_by_torchrun_as_on_one_rank(free_port):
    def losses(*words: str) -> list[str]:
        command = [sys.executable, *words, str(FILE), "--steps", "10", "--hidden-size", "64"]
        more = ["--tp", "2"] if words else []
        done = subprocess.run(
            [*command, *more], capture_output=True, text=True, check=True, timeout=120,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        return re.findall(r"loss (\S+)  norm (\S+)", done.stdout)

    port = str(free_port())
    two = losses("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port)
    assert len(two) == 2 and two == losses()


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--global-batch-size", "3"], "--global-batch-size 3 must be a multiple"),
        (["--tp", "2"], "--tp 2 x --pp 1 does not divide 1 ranks"),
    ],
)
def test_bad_flags_are_explained(launcher, flags, words):
    done = launcher.python(FILE, *flags)
    assert done.returncode == 1 and words in done.stderr and "Traceback" not in done.stderr
