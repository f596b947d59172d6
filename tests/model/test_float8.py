# SPDX-License-Identifier: Apache-2.0
"""Whole runs in float8: every layout takes the same steps, and the loss is that of other runs.

2 layers, h 128, 256 tokens a step, of the bytes of this project's documents.
"""

from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from mpu.grid import Grid
from mpu.layers.float8.recipe import Float8
from mpu.layers.float8.rows import BLOCKS
from mpu.layers.linear import use_overlap
from mpu.overlap.choices import OverlapMap
from pretrain_llama import build, train_step
from tests.sampling import sampled
from training.data.batch import DocumentRules, make_batch
from training.data.context_part import context_part
from training.faults.monitor import FailureMonitor
from training.flags.parse import parse
from training.run.autotune.measure import measure
from training.run.autotune.overlap import Overlap, projections

DOCS = Path(__file__).resolve().parents[2] / "docs"
ROWS, S = 2, 128  # of a step
SIZES = f"""
    --num-layers 2 --hidden-size 128 --num-attention-heads 4 --group-query-attention
    --num-query-groups 4 --seq-length {S} --vocab-size 256 --global-batch-size {ROWS} --mock-data
    --untie-embeddings-and-output-weights --train-iters 2000 --lr 1e-3 --device cpu
"""
SMALL = "--kv-channels 32 --ffn-hidden-size 256 "
WIDE = "--kv-channels 128 --ffn-hidden-size 512 "  # 128 numbers of each projection on 4 ranks


@cache
def corpus() -> np.ndarray:
    text = b"".join(file.read_bytes() for file in sorted(DOCS.glob("*.md")))
    return np.frombuffer(text, dtype=np.uint8).astype(np.int64)


def rows_of(step: int, count: int) -> np.ndarray:
    starts = [(step * count + i) * 7919 % (len(corpus()) - S - 1) for i in range(count)]
    return np.stack([corpus()[start : start + S + 1] for start in starts])


def begin(grid: Grid, flags: str, path: str = "none"):
    """Build a rank's part of the run of these flags."""
    run = build(parse((SIZES + flags).split(), grid.world_size), grid, torch.device("cpu"),
                FailureMonitor())  # fmt: skip
    use_overlap(run.model, OverlapMap(path))
    return run


def constant(step: int) -> float:
    return 1e-3


def up_and_down(step: int) -> float:
    """Without jumps a run forgets the rounding of single steps."""
    return 5e-4 * min((step + 1) / 50, 1.0, (330 - step) / 250)


def advance(run, first: int, steps: int, rate=constant) -> list[float]:
    """Take steps; return their losses."""
    losses, size, count = [], run.config.batch.micro_batch_size, run.config.batch.global_batch_size
    for step in range(first, first + steps):
        rows, dp = rows_of(step, count), run.grid.dp
        cuts = [rows[i : i + size] for i in range(0, count, size)][dp.rank :: dp.size]
        part = run.grid.cp.rank, run.grid.cp.size
        batches = [context_part(make_batch(cut, DocumentRules(), 0), *part) for cut in cuts]
        loss, _, found_inf = train_step(run, batches, rate(step), rate(step))
        assert not found_inf.item(), f"step {step}"
        run.iteration += 1
        losses.append(loss.item())
    return losses


RUNS: dict = {}  # of a rank between two calls


def on_ranks(comm, t: int, p: int, path: str, flags: str, first: int, steps: int) -> list[float]:
    """Take steps on one rank; a run that began in an earlier call goes on."""
    if not first:
        RUNS["run"] = begin(comm.grid(t, pp=p, memory=path == "symmetric"), flags, path)
    return advance(RUNS["run"], first, steps)


def followed(world, size: int, t: int, flags: str, steps: int, path: str = "none", p: int = 1):
    """Return the losses of a layout."""
    flags += f" --tensor-model-parallel-size {t} --pipeline-model-parallel-size {p}"
    losses: list[float] = []
    while len(losses) < steps:  # a world answers within its time-out
        some = min(10, steps - len(losses))
        parts = world(size).run(on_ranks, t, p, path, flags, len(losses), some)
        assert all(part == parts[0] for part in parts)
        losses += parts[0]
    return losses


def flags_of(scaling: str, more: str = "") -> str:
    sizes = WIDE if scaling == "blockwise" else SMALL
    return f"{sizes} --fp8-format hybrid --fp8-recipe {scaling} {more} "


SP = "--sequence-parallel"
ONE = "--micro-batch-size 2 "  # one micro-batch a step, cut over tp
TWO = "--micro-batch-size 1 "  # two micro-batches, one a data-parallel rank
LAYOUTS = [  # ranks, tp, pp, path, flags
    (2, 2, 1, "none", ONE),
    (2, 2, 1, "none", ONE + SP),
    (2, 2, 1, "ring", ONE + SP),
    (2, 2, 1, "symmetric", ONE + SP),
    (4, 4, 1, "none", ONE + SP),
    (2, 1, 1, "none", TWO),
    (2, 1, 1, "none", TWO + "--zero-stage 1"),
    (2, 1, 1, "none", TWO + "--zero-stage 2"),
    (2, 1, 1, "none", TWO + "--zero-stage 3 --overlap-param-gather"),
    (2, 1, 2, "none", TWO + "--pipeline-schedule zb-h1"),
    (4, 2, 1, "ring", TWO + SP + " --zero-stage 3"),
]


@cache
def alone(scaling: str, flags: str, steps: int) -> list[float]:
    """The losses of one rank, in this process."""
    return advance(begin(Grid(), flags_of(scaling, f"--fp64 {flags}")), 0, steps)


def agrees(world, scaling: str, layout: tuple, steps: int) -> None:
    """Hold a layout's losses against those of one rank that takes the same micro-batches."""
    size, t, p, path, flags = layout
    losses = followed(world, size, t, flags_of(scaling, f"--fp64 {flags}"), steps, path, p)
    expected = alone(scaling, flags[: len(ONE)], steps)
    error = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    assert error < 1e-9, f"{scaling} {size} ranks, tp {t}, {path}, {flags}: {error:.1e}"
    assert steps < 100 or losses[-1] < 0.7 * losses[0]


def layouts_agree(world, scaling: str, layouts: list, steps: int) -> None:
    for layout in layouts:
        agrees(world, scaling, layout, steps)


@pytest.mark.parametrize(
    "scaling",
    [
        pytest.param(s, marks=[] if s == "tensorwise" else pytest.mark.prove)
        for s in BLOCKS
    ],
)
def test_layouts_take_the_same_steps(world, scaling):
    layouts_agree(world, scaling, [LAYOUTS[i] for i in (1, 10)], 2)


@pytest.mark.parametrize(
    "more", sampled(["--recompute-granularity full --recompute-method uniform", ""], 2)
)
@pytest.mark.parametrize("scaling", sampled([*BLOCKS, "delayed"][::-1], 4))
def test_weights_become_float8_once_a_step(scaling, more, monkeypatch):
    """And after an update again; the steps are those of weights converted for each micro-batch."""
    made, own = Counter[str](), Float8.operand

    def counted(self, x, role, cut):
        made[role] += 1
        return own(self, x, role, cut)

    monkeypatch.setattr(Float8, "operand", counted)
    ran, told = [], []
    for flag in ("", " --no-fp8-weight-cache"):
        run = begin(Grid(), flags_of(scaling, f"--bf16 {TWO}{more}{flag}"))
        made.clear()
        losses = advance(run, 0, 3)
        ran.append((made["w"], made["wt"]))
        tokens = torch.from_numpy(rows_of(9, 1))
        with torch.no_grad():
            losses += run.model(tokens[:, :-1], tokens[:, 1:]).flatten().tolist()
        told.append((losses, [p.detach().clone() for p in run.model.parameters()]))
    linears, again = 3 * 2 * 4, 1 + bool(more)  # of three steps
    assert ran == [(linears, linears), (linears * 2 * again, linears * 2)]
    assert told[0][0] == told[1][0]
    assert all(torch.equal(a, b) for a, b in zip(*(each[1] for each in told), strict=True))


LONG = {scaling: [8] for scaling in BLOCKS}  # of LAYOUTS; the others take 10 steps below
LONG["rowwise"] = [*range(len(LAYOUTS))]  # whose ranks agree on most scales


@pytest.mark.prove
@pytest.mark.parametrize("scaling, i", [(s, i) for s, some in LONG.items() for i in some])
def test_layouts_take_the_same_300_steps(world, scaling, i):
    agrees(world, scaling, LAYOUTS[i], 300)


@pytest.mark.prove
@pytest.mark.parametrize("scaling", [s for s in BLOCKS if s != "rowwise"])
def test_every_layout_takes_the_same_10_steps(world, scaling):
    layouts_agree(world, scaling, LAYOUTS, 10)


@cache
def without(flags: str, steps: int) -> float:
    """The mean loss of the last 50 steps without float8."""
    return float(np.mean(advance(begin(Grid(), flags), 0, steps, up_and_down)[-50:]))


@pytest.mark.prove
@pytest.mark.parametrize("name", ["e4m3", "hybrid"])
@pytest.mark.parametrize("scaling", BLOCKS)
def test_the_loss_is_within_a_percent_of_that_without_float8(scaling, name):
    flags = flags_of(scaling, ONE + "--bf16").replace("hybrid", name)
    plain = " ".join(flags.split("--fp8-format")[0:1]) + ONE + "--bf16"
    losses = advance(begin(Grid(), flags), 0, 300, up_and_down)
    assert np.mean(losses[-50:]) == pytest.approx(without(plain, 300), rel=0.01)


@pytest.mark.prove
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_nothing_is_nan_in_2000_steps(world, scaling):
    losses = followed(world, 2, 2, flags_of(scaling, f"{ONE} {SP} --bf16"), 2000)
    assert np.isfinite(losses).all() and np.mean(losses[-50:]) < 0.5 * losses[0]


def chosen_apart(comm, flags: str) -> tuple[list[str], list[float]]:
    """Take a step with a method for each listed matmul; return those that were not listed."""
    run = begin(comm.grid(2, memory=True), flags)
    choices = {}
    for p in projections(run.model, ROWS * S).values():
        choices |= {p.forward: "symmetric", p.backward: "ring"}
    overlap = Overlap(OverlapMap("auto", choices), run.model)
    p = projections(run.model, ROWS * S)["layers.0.mlp.down"]
    spent = measure(p, ("none", "ring", "symmetric"), run.model.ctx, 0.0)
    assert all(seconds > 0 for both in spent.values() for seconds in both)
    losses = advance(run, 0, 1)
    return list(overlap.auto.unmeasured), losses


@pytest.mark.prove
def test_auto_knows_matmuls_of_float8_by_their_rows(world):
    flags = flags_of("mxfp8", f"--fp64 {ONE} {SP} --first-last-layers-bf16 "
                     "--num-layers-at-end-in-bf16 0 --tensor-model-parallel-size 2")  # fmt: skip
    for unmeasured, losses in world(2).run(chosen_apart, flags):
        assert not unmeasured
        alone = advance(begin(Grid(), flags.split("--tensor")[0].replace(SP, "")), 0, 1)
        assert losses == pytest.approx(alone, rel=1e-9)
