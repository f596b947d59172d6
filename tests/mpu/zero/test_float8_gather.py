# SPDX-License-Identifier: Apache-2.0
"""--fp8-param-gather: the rows of every weight are those that layers make of the whole weight."""

import itertools

import pytest
import torch

from mpu.context import LayerContext
from mpu.layers.float8.recipe import Float8
from mpu.layers.float8.rows import BLOCKS, RECIPES
from mpu.layers.float8.weights import WeightRows
from tests.forecast.recorded import recorded, state
from tests.model.test_float8 import SP, TWO, advance, begin, flags_of


def test_parts_cut_anywhere_make_the_bytes_of_the_whole():
    """Rows of 384 numbers, cut at 1024, 5 and where the weight ends: none of it a row's end."""
    g = torch.Generator().manual_seed(1)
    for scaling, dtype in itertools.product(BLOCKS, (torch.float64, torch.bfloat16)):
        w = torch.randn(256, 384, generator=g, dtype=torch.float64)
        w *= torch.randn(256, 1, generator=g, dtype=torch.float64).exp()
        w[3, 5] = float("inf") if dtype == torch.float64 else 1e30
        w = w.to(dtype)
        recipe = Float8(scaling, "hybrid", LayerContext(dtype=dtype))
        how = WeightRows((256, 384), scaling, False)
        flat, cuts = w.flatten(), [0, 1024, 1029, 50176, 256 * 384, 256 * 384]
        parts = [(flat[a:b], a) for a, b in itertools.pairwise(cuts)]
        scales = torch.stack([how.scales(part, first) for part, first in parts]).amax(0)
        assert len(scales) == how.count and scales.min() > 0
        codes = torch.cat([how.codes(part, first, scales) for part, first in parts])
        rows = how.rows(codes, scales, codes.new_empty(how.nbytes))
        assert torch.equal(rows, recipe.operand(w, "w", "rows")), scaling


def steps(comm, t, p, path, flags, count):
    """Take steps; return losses, norm, the rows of each weight, bytes kept, measured and stated."""
    instances = 2 if "instances 2" in flags else 1
    run = begin(comm.grid(t, pp=p, instances=instances, memory=path == "symmetric"), flags, path)
    losses = advance(run, 0, count)
    norm = run.optimizer.params_norm().item()
    kept = run.optimizer.memory()
    stated = state(recorded(run.config, run.grid))
    run.sink.begin_step()
    rows = {}
    for name, layer in run.model.named_modules():
        if type(getattr(layer, "recipe", None)) is Float8:
            for role in ("w", "wt"):
                rows[name, role] = layer.operand_of_weight(role).clone()
                layer.end_use()
    return losses, norm, rows, kept, stated


def check_same(world, size, t, p, path, flags, count=3):
    """Hold a layout with the flag against itself without it: the same bits, fewer bytes."""
    flags += f" --tensor-model-parallel-size {t} --pipeline-model-parallel-size {p} "
    plain = world(size).run(steps, t, p, path, flags, count)
    coded = world(size).run(steps, t, p, path, f"{flags} --fp8-param-gather", count)
    for without, having in zip(plain, coded, strict=True):
        assert having[:2] == without[:2]  # losses and norm, to the bit
        assert having[2].keys() == without[2].keys() and having[2]
        assert all(torch.equal(rows, without[2][at]) for at, rows in having[2].items())
        kept, stated = having[3:]
        assert kept == stated
        assert kept["moments"] == without[3]["moments"]
    return plain[0], coded[0]


LAYOUTS = [  # ranks, tp, pp, path, flags
    (2, 1, 1, "none", TWO + "--zero-stage 1"),
    (2, 1, 1, "none", TWO + "--zero-stage 2 --overlap-param-gather --overlap-grad-reduce"),
    (2, 1, 1, "none", TWO + "--zero-stage 3 --overlap-param-gather"),
    (4, 2, 1, "ring", f"{TWO} {SP} --zero-stage 1 --overlap-param-gather"),
    (4, 2, 1, "none", TWO + "--zero-stage 3"),
    (4, 1, 2, "none", TWO + "--zero-stage 3 --pipeline-schedule zb-h1 --recompute-granularity full "
                            "--recompute-method uniform --recompute-num-layers 1"),
    (4, 1, 1, "none", "--micro-batch-size 1 --global-batch-size 4 --zero-stage 1 "
                      "--num-distributed-optimizer-instances 2"),
]  # fmt: skip


@pytest.mark.parametrize(
    "scaling, at", [("rowwise", 3), ("blockwise", 2), ("tensorwise", 1), ("delayed", 3)]
)
def test_a_step_has_the_same_bits(world, scaling, at):
    size, t, p, path, flags = LAYOUTS[at]
    check_same(world, size, t, p, path, flags_of(scaling, f"--bf16 {flags}"), 2)


@pytest.mark.prove
@pytest.mark.parametrize("scaling", RECIPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["--bf16", "--fp64"])
def test_steps_have_the_same_bits(world, scaling, layout, dtype):
    size, t, p, path, flags = layout
    check_same(world, size, t, p, path, flags_of(scaling, f"{dtype} {flags}"))
