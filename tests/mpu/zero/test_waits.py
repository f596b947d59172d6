# SPDX-License-Identifier: Apache-2.0
"""No step waits for the device: the norm, the clip factor and found-inf stay there.

Reads of a value on the host are counted. torch's profiler sees every operation, nested ones
included; methods of Tensor that may read without an operation are counted separately.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pretrain_llama
from mpu.grid import Grid
from tests.model.twin import config_of, micro_batches
from training.faults.monitor import FailureMonitor

OPERATIONS = {  # that on a GPU make the host wait
    "aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::nonzero", "aten::equal",
    "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
}  # fmt: skip
ON_CPU_ALONE = {"aten::_fused_adamw_"}  # the CPU's kernel reads its count of steps, CUDA's does not
METHODS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__")
BASE = dict(tp=1, sp=False, recompute=None, tied=True, m=2, rows=8, lr=1e-2, clip=0.1)
RUN = """
    --mock-data --vocab-size 100 --num-layers 1 --hidden-size 32 --num-attention-heads 4
    --seq-length 16 --global-batch-size 2 --lr 1e-3 --train-iters 7 --log-interval 3
    --log-params-norm --num-workers 0 --device cpu
"""
WAYS = [
    dict(zero=0),
    dict(zero=1, gather=True),
    dict(zero=2),
    dict(zero=3, gather=True),
    dict(zero=0, dtype="bfloat16", masks=True),
    dict(zero=1, dtype="bfloat16", main="bf16", wire=True),
    dict(zero=2, dtype="bfloat16", each=True),
    dict(zero=3, dtype="bfloat16", masks=True),
]


@contextmanager
def methods_counted(found: Counter[str]) -> Iterator[None]:
    """Add to `found` the calls meanwhile of methods that read a tensor on the host."""
    inner = {name: getattr(torch.Tensor, name) for name in METHODS}

    def counting(name: str) -> Callable[..., Any]:
        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            found[name] += 1
            return inner[name](self, *args, **kwargs)

        return method

    for name in METHODS:
        setattr(torch.Tensor, name, counting(name))
    try:
        yield
    finally:
        for name in METHODS:
            setattr(torch.Tensor, name, inner[name])


@contextmanager
def counted(found: Counter[str]) -> Iterator[None]:
    """Add to `found` all that is read on the host meanwhile."""
    with methods_counted(found), torch.autograd.profiler.profile(use_kineto=False) as profile:
        yield
    for event in profile.function_events:
        if event.name in OPERATIONS:
            above = [event]
            while above[-1].cpu_parent is not None:
                above.append(above[-1].cpu_parent)
            if not ON_CPU_ALONE & {each.name for each in above}:
                found[event.name] += 1


def waits_of_steps(comm, cases: list[dict]) -> list[dict[str, int]]:
    """Count what the second step of each case reads."""
    made = []
    for case in cases:
        grid = comm.grid(case["tp"], instances=case.get("instances", 1))
        run = pretrain_llama.build(config_of(case), grid, torch.device("cpu"), FailureMonitor())
        found: Counter[str] = Counter()
        pretrain_llama.train_step(run, micro_batches(case, grid.dp.rank), 1e-2)
        batches = micro_batches(case, grid.dp.rank, 1)
        with counted(found):
            pretrain_llama.train_step(run, batches, 1e-2)
            run.sink.wait_for_weights()  # training/run/watch/profile.py says why
        made.append(dict(found))
    return made


@pytest.mark.parametrize(
    "size, more, ways",
    [
        (2, {}, WAYS[:4]),
        pytest.param(4, dict(tp=2, sp=True), WAYS[4:], marks=pytest.mark.prove),
        pytest.param(4, dict(instances=2), WAYS[::2], marks=pytest.mark.prove),
    ],
)
def test_a_step_reads_nothing_on_the_host(world, size, more, ways):
    cases = [BASE | dict(dtype="float32") | way | more for way in ways]
    cases = [case | dict(dp=size // case["tp"]) for case in cases]
    for found in world(size).run(waits_of_steps, cases):
        assert found == [{}] * len(cases)


@pytest.mark.prove
@pytest.mark.parametrize("ways", [WAYS[:4], WAYS[4:]], ids=["fp32", "bf16"])
def test_a_step_of_one_rank_reads_nothing_on_the_host(ways):
    alone = SimpleNamespace(grid=lambda *sizes, **more: Grid())
    cases = [BASE | dict(dtype="float32") | way | dict(dp=1) for way in ways]
    assert waits_of_steps(alone, cases) == [{}] * len(cases)


def test_the_loop_reads_when_it_logs_and_the_flags_of_the_step_before(monkeypatch, capsys):
    """Six steps, of which every third is logged, with the norm of the weights."""
    found: Counter[str] = Counter()
    before: list[Counter[str]] = []
    train_step = pretrain_llama.train_step

    def noted(*args: Any) -> Any:
        before.append(found.copy())
        return train_step(*args)

    monkeypatch.setattr(pretrain_llama, "train_step", noted)
    with methods_counted(found):
        assert pretrain_llama.main(RUN.split()) == 0, capsys.readouterr().err
    before.append(found.copy())
    reads = [dict(after - first) for first, after in zip(before, before[1:], strict=False)]
    flags, logged = {"tolist": 1}, {"tolist": 4}
    assert reads[:-1] == [{}, flags, logged, flags, flags, logged]
