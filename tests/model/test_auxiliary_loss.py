# SPDX-License-Identifier: Apache-2.0
"""A fork's block adds an auxiliary loss: a serial twin has the same loss and every gradient.

The fork is FORK, one file of eleven lines; no file of Weft is edited for it.
"""

import functools
import json

import pytest
import torch

from mpu.context import LayerContext
from mpu.param import Region
from tests.model.test_pipeline_parity import LAYERS, case_of
from tests.model.twin import Twin, check, run_cases
from tests.sampling import sampled

WEIGHT = 0.01
FORK = """
from model import llama
from model.llama import *

class Block(llama.Block):
    def __init__(self, config, ctx, recompute):
        super().__init__(config, ctx, recompute)
        self.ctx = ctx

    def forward(self, *given):
        h = super().forward(*given)
        return self.ctx.auxiliary_loss(h, 0.01 * h.square().mean(-1).sum())

class Model(llama.Llama):
    block = Block
"""


@pytest.fixture(scope="module")
def fork(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("fork") / "square.py"
    file.write_text(FORK)
    return str(file)


class SquareTwin(Twin):
    """The twin of the fork, in plain autograd."""

    def auxiliary(self, h):
        return WEIGHT * h.square().mean(-1).sum()


@functools.cache
def twin(tied: bool, rows: int, masks: bool, kind: type[Twin] = SquareTwin) -> tuple:
    made = kind(tied, LAYERS, rows)
    (loss,), (norm,) = made.train(1, lr=0.0, clip=0.0, masks=masks)
    return made, loss, norm


def compare(world, size: int, some: list[dict]) -> None:
    """Hold each case against its twin: loss, norm, every gradient, the part that is auxiliary."""
    results = world(size).run(run_cases, some)
    for i, case in enumerate(some):
        given = case["tied"], case["rows"], case.get("masks", False)
        made, loss, norm = twin(*given)
        plain = twin(*given, Twin)[1]
        mine = [r[i] for r in results]
        assert loss > 1.001 * plain, "the auxiliary loss is too small to be seen"
        try:
            check(mine, made, loss, norm)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error
        for result in mine:  # on every rank
            assert result["auxiliary"] == pytest.approx(loss - plain, rel=1e-12), case


@pytest.mark.parametrize("schedule", sampled(["zb-v", "interleaved"], 2))
def test_every_schedule_has_the_twins_loss_and_gradients(world, fork, schedule):
    """Plain, recomputed in two ways, tied; with loss masks, which the blocks' loss ignores."""
    more = dict(file=fork)
    some = [
        case_of(schedule, 2, 4, 1, 1, False, **more),
        case_of(schedule, 2, 2, 1, 1, True, recompute="full", **more),
        case_of(schedule, 2, 4, 1, 1, False, recompute="selective", masks=True, **more),
    ]
    compare(world, 2, some)


@pytest.mark.parametrize("size", sampled([2, 4], 2))
def test_tensor_sequence_context_and_data_parallelism(world, fork, size):
    """Under sequence parallelism a rank's value is partial; without it, it is not."""
    more = dict(file=fork)
    two = [
        case_of("1f1b", 1, 2, 2, 1, False, **more),
        case_of("1f1b", 1, 2, 2, 1, True, **more | {"sp": False}),
        case_of("1f1b", 1, 2, 1, 2, False, zero=2, **more),
        case_of("1f1b", 1, 2, 1, 1, False, cp=2, comm="all_gather", **more),
    ]
    four = [
        case_of("zb-v", 2, 3, 2, 1, True, recompute="full", **more),
        case_of("interleaved", 2, 2, 1, 2, False, zero=3, masks=True, **more),
    ]
    compare(world, size, two if size == 2 else four)


def of_heads(comm) -> None:
    """A loss of a rank's own features is partial over tp in its region, sequence-parallel or not.

    Its gradient is summed where the features came from: in the column-parallel layer's backward.
    """
    for sp in (False, True):
        ctx = LayerContext(comm.grid(2), sp)
        x = torch.full((3,), float(comm.rank + 1), requires_grad=True)
        ctx.auxiliary_losses.begin(tokens=4)
        y = ctx.auxiliary_loss(x, x.square().sum(), Region.TENSOR_PARALLEL)
        y.sum().backward()
        assert x.grad.tolist() == [1 + 2 * (comm.rank + 1) / 4] * 3
        assert ctx.auxiliary_losses.take() == 3 + 12
        assert ctx.auxiliary_losses.take() == 0


def test_a_loss_of_own_features_is_summed_over_tp(world):
    world(2).run(of_heads)


def test_the_log_says_how_much_is_auxiliary(fork, tmp_path):
    """The whole program, with evaluation, whose loss has no auxiliary part."""
    import pretrain_llama

    log = tmp_path / "log.json"
    flags = (
        f"--mock-data --vocab-size 97 --num-layers 2 --hidden-size 32 --num-attention-heads 4 "
        f"--seq-length 16 --train-iters 2 --lr 0 --global-batch-size 4 --micro-batch-size 2 "
        f"--eval-interval 2 --eval-iters 1 --log-interval 1 --log-json {log} --model-file {fork}"
    )
    assert pretrain_llama.main(flags.split()) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [line for line in lines if "auxiliary_loss" in line]
    assert len(steps) == 2 and all(0 < line["auxiliary_loss"] < line["loss"] for line in steps)
    [held_out] = [line["validation_loss"] for line in lines if "validation_loss" in line]
    assert held_out < steps[-1]["loss"]
