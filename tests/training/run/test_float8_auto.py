# SPDX-License-Identifier: Apache-2.0
"""--fp8-auto: which projections are in float8, by whose times, what is printed and recorded."""

import pytest
import torch

import pretrain_llama
from mpu.context import LayerContext
from mpu.gradients import GradientSink
from mpu.layers.float8.recipe import Float8
from tests.model.test_float8 import ONE, SIZES, SMALL, SP, advance
from training.faults.monitor import FailureMonitor
from training.flags.parse import parse
from training.run.autotune import float8 as float8_auto
from training.run.autotune.measure import ARITHMETICS, by_arithmetic, measure

FLAGS = f"{SIZES} {SMALL} --fp8-format hybrid --fp8-recipe rowwise --fp8-auto --fp64 {ONE} "
TP = f"{SP} --tensor-model-parallel-size 2 "
QKV, DOWN = "layers.*.attention.qkv", "layers.*.mlp.down"
FASTER = ["layers.*.attention.proj", DOWN]


def built(grid, flags):
    config = parse(flags.split(), grid.world_size)
    return pretrain_llama.build(config, grid, torch.device("cpu"), FailureMonitor())


def in_float8(model) -> list[str]:
    names = (n for n, m in model.named_modules() if type(getattr(m, "recipe", None)) is Float8)
    return list(dict.fromkeys(map(float8_auto.starred, names)))


def timer(rank: int, asked: list):
    """Row layers gain on every rank, qkv on rank 0 alone, gate_up less than the margin."""

    def made_up(p, methods, ctx, budget):
        asked.append(p)
        assert tuple(methods) == ARITHMETICS and budget > 0
        if not p.column:
            return {"bf16": (1e-3, 2e-3), "float8": (0.5e-3, 1.5e-3)}
        if p.width * ctx.tp.size == 3 * 128:
            return {"bf16": (1e-3, 2e-3), "float8": (1e-3, 1e-3 if rank == 0 else 2.5e-3)}
        return {"bf16": (1e-3, 2e-3), "float8": (1e-3, 1.995e-3)}

    return made_up


def settled(comm, flags, recorded):
    """Settle twice: with a made-up timer or from `recorded`, then from what the first kept."""
    grid, said, asked = comm.grid(comm.size), [], []
    run = built(grid, flags)
    kept = float8_auto.settle(
        run.model, run.model.ctx, run.config, said.append, recorded, timer(grid.rank, asked)
    )
    again, more = built(grid, flags), []
    same = float8_auto.settle(
        again.model, again.model.ctx, again.config, more.append, kept, timer(1 - grid.rank, [])
    )
    assert same == kept and in_float8(again.model) == in_float8(run.model)
    losses = advance(run, 0, 2), advance(again, 0, 2)
    assert losses[0] == losses[1]  # the same bits
    return kept, in_float8(run.model), said, more, len(asked), losses[0]


def test_ranks_decide_together_and_a_resume_replays_it(world):
    """Rank 0 alone would take qkv, whose float8 is slower than bf16 on rank 1."""
    flags = FLAGS + TP
    (kept, chosen, said, more, asked, _), other = world(2).run(settled, flags, {})
    assert other[0] == kept and other[1] == chosen == FASTER
    assert asked == 4  # equal layers are measured once
    assert said[0].startswith("float8: measuring on ")
    assert said[1].split() == ("float8: projection shape recipe bf16 ms float8 ms choice".split())
    rows = {line.split()[1]: line for line in said[2:]}
    assert len(rows) == 4 and rows[DOWN].split()[2:] == (
        "row 128x128 -> 128 rowwise hybrid 3.000 2.000 float8".split()
    )
    assert rows[QKV].split()[-3:] == ["3.000", "3.500", "bf16"]
    assert more[0] == "float8: as in the checkpoint, which the run goes on from"
    assert all(" -        -  " in line for line in more[2:])


def test_another_device_is_told_and_another_shape_measured(world):
    ((kept, _, _, more, _, _),) = world(1).run(settled, FLAGS, {})
    assert not any("measured on" in line for line in more)
    elsewhere = kept | {"device": "H100"}
    ((after, chosen, said, more, asked, _),) = world(1).run(settled, FLAGS, elsewhere)
    assert asked == 0 and after == elsewhere and chosen == ["layers.*.attention.qkv", *FASTER]
    assert "measured on H100, and this is " in said[1] and said[1] == more[1]
    halved = FLAGS.replace(ONE, "--micro-batch-size 1 ")
    ((_, _, said, _, asked, _),) = world(1).run(settled, halved, kept)
    assert asked == 4
    assert said[0].startswith("float8: the checkpoint does not fit, it says nothing of column 128x")


def test_without_the_flag_nothing_is_measured():
    plain = parse(FLAGS.replace("--fp8-auto", "").split(), 1)
    assert float8_auto.settle(torch.nn.Module(), LayerContext(), plain, print, {}) == {}


def real(comm, sp):
    grid = comm.grid(comm.size)
    ctx = LayerContext(grid, sp, torch.bfloat16, sink=GradientSink())
    layers = float8_auto.projections(built(grid, FLAGS + TP).model, 256)
    return [measure(p, ARITHMETICS, ctx, 0.0, by_arithmetic) for p in layers.values()]


def test_the_clock_measures_forward_dgrad_and_wgrad_of_both(world):
    for found in world(2).run(real, True):
        assert all(list(each) == [*ARITHMETICS] for each in found) and len(found) == 9
        assert all(0 < t < 60 for each in found for both in each.values() for t in both)


RUN = """
    --mock-data --vocab-size 97 --num-layers 2 --hidden-size 128 --num-attention-heads 4
    --seq-length 64 --num-workers 0 --device cpu --lr 1e-2 --log-interval 1 --global-batch-size 2
    --micro-batch-size 2 --bf16 --fp8-format e4m3 --fp8-recipe tensorwise --fp8-auto
"""


@pytest.mark.prove
def test_a_resumed_run_replays_what_its_checkpoint_keeps(launcher):
    def run(words):
        result = launcher.run(1, f"{RUN} {words}".split())
        assert result.codes == [0], result.said(0)
        lines = result.said(0, "out").splitlines()
        return result, [line for line in lines if line.startswith("float8: ")]

    first, lines = run("--train-iters 4 --save {dir}/saved --save-interval 2")
    assert lines[0].startswith("float8: measuring on") and len(lines) == 6
    again, lines = run(f"--train-iters 4 --load {first.folder}/saved --ckpt-step 2")
    assert lines[0] == "float8: as in the checkpoint, which the run goes on from"
    assert again.losses() == first.losses()[2:]  # to the bit
