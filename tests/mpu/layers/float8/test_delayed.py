# SPDX-License-Identifier: Apache-2.0
"""Delayed scaling against a plain serial emulation, and the same steps over layouts and resumes."""

import json
import math

import pytest
import torch
from torch import Tensor, nn

from mpu.context import LayerContext
from mpu.gradients import GradientSink
from mpu.layers.float8.delayed import ROLES, AmaxHistory, Delayed
from mpu.layers.float8.recipe import FORMATS, Float8, use_float8
from mpu.layers.float8.rows import E4M3, Format
from mpu.layers.linear import ColumnParallelLinear, RowParallelLinear
from pretrain_llama import main, train_step
from tests.model.test_float8 import ONE, SMALL, SP, TWO, advance, begin, rows_of
from tests.training.checkpoint.canonical import saver_of
from training.data.batch import DocumentRules, make_batch

FP64 = torch.float64


class Emulation:
    """One layer y = x w^T in fp64: a list of amaxes for each role, and scales made of them."""

    def __init__(self, name: str, how: Delayed) -> None:
        self.how, self.forms = how, {"x": E4M3, "w": E4M3, "dy": FORMATS[name]}
        self.amaxes: dict[str, list[float]] = {role: [] for role in ROLES}
        self.now = dict.fromkeys(ROLES, 0.0)

    def rounded(self, role: str, t: Tensor) -> Tensor:
        form, now = self.forms[role], t.abs().max().item()
        self.now[role] = max(self.now[role], now)
        kept = self.amaxes[role]
        amax = now if not kept else kept[-1] if self.how.most_recent else max(kept)
        scale = 2.0 ** math.ceil(math.log2(amax / form.top))
        return nearest(t / scale, form) * scale

    def end_step(self) -> None:
        for role in ROLES:
            self.amaxes[role] = [*self.amaxes[role], self.now[role]][-self.how.length :]
        self.now = dict.fromkeys(ROLES, 0.0)


def nearest(x: Tensor, form: Format) -> Tensor:
    """Clamp and round to the nearest code, of two as near the even one."""
    every = torch.arange(128, dtype=torch.uint8).view(form.dtype).double()
    every = every[every.isfinite()]
    size = x.abs().clamp(max=form.top)
    above = torch.searchsorted(every, size.contiguous()).clamp(max=len(every) - 1)
    below = (above - 1).clamp(min=0)
    up, down = every[above] - size, size - every[below]
    code = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return every[code].copysign(x)


class Blocks(nn.Module):
    """A numbered block with one linear layer."""

    def __init__(self, kind: type, ctx: LayerContext) -> None:
        super().__init__()
        self.layers = nn.ModuleList([kind(32, 48, ctx=ctx)])


EVERY = [
    (kind, name, how)
    for kind in (ColumnParallelLinear, RowParallelLinear)
    for name in ("e4m3", "hybrid")
    for how in (Delayed(), Delayed(4, False), Delayed(3))
]


SAMPLE, REST = EVERY[4], [case for case in EVERY if case != EVERY[4]]


@pytest.mark.parametrize(
    "kind, name, how",
    [SAMPLE, *(pytest.param(*case, marks=pytest.mark.prove) for case in REST)],
    ids=str,
)
def test_steps_are_those_of_a_serial_emulation(kind, name, how):
    """7 steps of 3 micro-batches whose numbers grow and shrink; one step is skipped, and an
    evaluation lies between two."""
    ctx = LayerContext(dtype=FP64, accumulate=FP64, sink=GradientSink(FP64))
    model = Blocks(kind, ctx)
    use_float8(model, Float8("tensorwise", name, ctx), delayed=how)
    layer, own, g = model.layers[0], Emulation(name, how), torch.Generator().manual_seed(1)
    weight = torch.randn(48, 32, dtype=FP64, generator=g)
    clamped = 0
    for step in range(7):
        with torch.no_grad():
            layer.weight.copy_(weight * 1.5**step)
        if step == 3:
            layer(1e6 * torch.ones(4, 1, 32, dtype=FP64))  # an evaluation
        ctx.sink.begin_step()
        total = 0.0
        w = own.rounded("w", layer.weight.detach())
        for i in range(3):
            size = 10.0 ** ((step * 5 + i) % 7 - 3)
            x = size * torch.randn(8, 2, 32, dtype=FP64, generator=g)
            dy = torch.randn(8, 2, 48, dtype=FP64, generator=g) / size
            x.requires_grad_()
            y = layer(x)
            y.backward(dy)
            x8, dy8 = own.rounded("x", x.detach()), own.rounded("dy", dy)
            clamped += int((x8.abs() < x.detach().abs() / 2).any())
            total = total + dy8.flatten(0, 1).t() @ x8.flatten(0, 1)
            assert (y - x8 @ w.t()).norm() <= 2**-48 * y.norm()
            assert (x.grad - dy8 @ w).norm() <= 2**-48 * x.grad.norm()
        assert (ctx.sink.main[layer.weight] - total).norm() <= 2**-48 * total.norm()
        skipped = step == 4
        ctx.sink.state_of(AmaxHistory).end_step(torch.tensor(float(skipped)))
        if skipped:
            own.now = dict.fromkeys(ROLES, 0.0)
        else:
            own.end_step()
    assert clamped, "a scale of earlier steps was never too small: the test shows nothing"


def test_what_is_not_finite_stays_so():
    ctx = LayerContext(sink=GradientSink())
    model = Blocks(ColumnParallelLinear, ctx)
    use_float8(model, Float8("tensorwise", "hybrid", ctx), delayed=Delayed())
    layer = model.layers[0]
    nn.init.normal_(layer.weight)
    for bad in (1.0, math.inf, math.nan):
        ctx.sink.begin_step()
        x = torch.ones(4, 1, 32)
        x[1, 0, 3] = bad
        assert layer(x).isfinite().all() == (bad == 1.0)
        layer(torch.ones(4, 1, 32)).sum().backward()
        ctx.sink.state_of(AmaxHistory).end_step(torch.tensor(0.0))
        history = ctx.sink.state_of(AmaxHistory).history
        assert history.isfinite().all()


FLAGS = (
    f"{SMALL} --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 3 "
    "--fp8-amax-compute-algo max --fp64 "
)
GLOBAL = "--global-batch-size 4 "
# ranks, tp, cp, pp, flags. All take the micro-batches of one rank, or halves of them: in the first
# step a scale is that of a micro-batch, so another --micro-batch-size rounds otherwise
LAYOUTS = [
    (2, 2, 1, 1, TWO + SP),
    (2, 1, 2, 1, TWO),
    (2, 1, 1, 1, f"{TWO} --zero-stage 3 --overlap-param-gather"),
    (2, 1, 1, 2, f"{TWO} --pipeline-schedule zb-h1"),
    (4, 2, 2, 1, TWO + SP + " --zero-stage 2"),
    (4, 2, 1, 2, TWO + SP),
    (4, 1, 1, 2, f"{TWO} --zero-stage 1 --num-virtual-stages-per-pipeline-rank 1"),
    (1, 1, 1, 1, f"{TWO} --recompute-granularity full"),
]


def steps(comm, t, c, p, flags, count):
    """Take steps; return losses, the norm of the weights, and {layer: its amaxes}."""
    run = begin(comm.grid(t, cp=c, pp=p), FLAGS + GLOBAL + flags)
    losses = advance(run, 0, count)
    return losses, run.optimizer.params_norm().item(), kept(run)


def kept(run):
    """Return {layer: its amaxes}."""
    amaxes = run.sink.state_of(AmaxHistory)
    return dict(zip(amaxes.names, amaxes.history.tolist(), strict=True))


def check(world, layout, count):
    size, t, c, p, flags = layout
    flags += f" --tensor-model-parallel-size {t} --context-parallel-size {c} "
    flags += f"--pipeline-model-parallel-size {p}"
    (plain,) = world(1).run(steps, 1, 1, 1, TWO, count)
    found = world(size).run(steps, t, c, p, flags, count)
    histories = {name: rows for part in found for name, rows in part[2].items()}
    assert histories == plain[2], "the largest numbers, over tp x cp x dp and all micro-batches"
    exact = t == c == 1
    for losses, norm, own in found:
        assert losses == pytest.approx(plain[0], rel=1e-12 if exact else 1e-9)
        assert norm == pytest.approx(plain[1], rel=1e-12 if exact else 1e-9)
        assert len(own) == len(plain[2]) // p
        assert all(own[name] == histories[name] for name in own)


@pytest.mark.prove
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_has_the_same_amaxes_and_losses(world, layout):
    check(world, layout, 12)


def test_data_parallel_ranks_have_the_amaxes_of_one(world):
    check(world, LAYOUTS[2], 2)


def save_at(comm, t, root):
    run = begin(comm.grid(t), f"{FLAGS}{GLOBAL}{TWO} --tensor-model-parallel-size {t}")
    advance(run, 0, 2)
    saver_of(run, root).save(2, 8, must=True)
    return kept(run)


def load_at(comm, t, root):
    run = begin(comm.grid(t), f"{FLAGS}{GLOBAL}{TWO} --tensor-model-parallel-size {t}")
    assert saver_of(run, root).resume.load() == (2, 8)
    return kept(run)


@pytest.mark.parametrize("tp, other", [(2, 1), (1, 2)])
def test_a_checkpoint_has_the_amaxes_of_any_tp(world, tmp_path, tp, other):
    saved = world(tp).run(save_at, tp, str(tmp_path))
    assert saved == [saved[0]] * tp and all(max(rows[0]) > 0 for rows in saved[0].values())
    assert world(other).run(load_at, other, str(tmp_path)) == [saved[0]] * other


RUN = (
    f"{SMALL} --num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --lr 1e-3 "
    "--vocab-size 250 --mock-data --untie-embeddings-and-output-weights --device cpu --bf16 "
    "--lr-decay-style constant --global-batch-size 4 --micro-batch-size 2 --fp8-format hybrid "
    "--fp8-amax-history-len 3 --fp8-amax-compute-algo max --log-interval 1"
)


def trained(folder, more, name="log"):
    """Run the program; return {iteration: (loss, norm)}."""
    log = folder / f"{name}.jsonl"
    assert main(f"{RUN} {more} --log-json {log}".split()) == 0
    lines = map(json.loads, log.read_text().splitlines())
    return {x["iteration"]: (x["loss"], x["grad_norm"]) for x in lines if "grad_norm" in x}


@pytest.mark.prove
def test_a_resume_an_evaluation_and_recomputation_change_no_bit(tmp_path, capsys):
    whole = trained(tmp_path, "--train-iters 6")
    assert len(whole) == 6
    save = f"--save {tmp_path}/ckpt"
    evaluating = "--eval-interval 1 --eval-iters 1 --recompute-granularity full"
    first = trained(tmp_path, f"--train-iters 3 {save} {evaluating}", "first")
    rest = trained(tmp_path, f"--train-iters 6 {save} --load {tmp_path}/ckpt", "rest")
    assert first | rest == whole
    # without the history the fourth step scales otherwise; another length takes what there is
    state = "--train-iters 4 --load " + str(tmp_path / "ckpt") + " --ckpt-step 3"
    plain = RUN.replace("--fp8-amax-history-len 3", "--fp8-amax-history-len 5")
    assert main(f"{plain} {state}".split()) == 0
    assert trained(tmp_path, state.replace("4 ", "4 --finetune "), "fine")[1] != whole[4]
    capsys.readouterr()


def test_an_older_checkpoint_without_histories_loads(tmp_path, capsys):
    older = f"--train-iters 2 --save {tmp_path}/ckpt --fp8-recipe tensorwise"
    trained(tmp_path, older, "older")
    after = trained(tmp_path, f"--train-iters 3 --load {tmp_path}/ckpt", "after")
    tensorwise = f"--train-iters 3 --load {tmp_path}/ckpt --fp8-recipe tensorwise"
    assert after == trained(tmp_path, tensorwise, "same"), "its first step is tensorwise"
    capsys.readouterr()


def test_a_skipped_step_leaves_the_history():
    run = begin(LayerContext().grid, FLAGS + GLOBAL + ONE)
    advance(run, 0, 2)
    amaxes = run.sink.state_of(AmaxHistory)
    before = amaxes.history.clone(), amaxes.scale_bytes_of_step.clone()
    batches = [make_batch(rows_of(2, 4)[i : i + 2], DocumentRules(), 0) for i in (0, 2)]
    weight = run.model.layers["1"].mlp.down.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] = math.nan
    _, _, found_inf = train_step(run, batches, 1e-3, 1e-3)
    assert found_inf.item()
    with torch.no_grad():
        weight.copy_(kept)
    assert torch.equal(amaxes.history, before[0])
    assert torch.equal(amaxes.scale_bytes_of_step, before[1])
    advance(run, 2, 1)
    assert not torch.equal(amaxes.history, before[0])
