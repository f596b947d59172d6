# SPDX-License-Identifier: Apache-2.0
"""Add a parameter whose gradient is summed over a part of the data-parallel ranks.

A fork of model/llama.py has experts: matrices that the axis ep cuts, so that groups of ranks hold
different ones. Each rank of ep applies its own to the tokens of all of them. The gradients of what
it holds are summed over edp, the ranks that hold the same. The fork is one file: that is all that
such a parameter edits. Its `Placement` names the axis ep, and its own flag says how many ranks that
axis has; buckets, the norm, checks, the dry run and explain follow.

It is trained to 1e-12 of a serial twin in plain torch, at every ZeRO stage. model/moe.py's experts
are on the same axis (tests/model/test_moe_layouts.py has their checkpoints).
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import pretrain_llama
from forecast.dry_run import report
from forecast.explainer.text import sums
from forecast.recording import record
from forecast.traffic import SMALL, traffic
from model.load import load_model_file
from mpu.context import LayerContext
from mpu.gradients import use
from mpu.grid import Grid
from mpu.launch import Launch
from mpu.param import Placement, PlacementError, parameter
from mpu.zero.bucket_layout import BLOCK, ParamEntry, ZeroConfig, make_buckets, sharing_of
from mpu.zero.gradient_check import GradientCheck
from mpu.zero.param_and_grad_buffer import ParamAndGradBuffer
from tests.model.twin import Twin, check, run_layout
from training.flags.parse import parse
from training.settings.config import Config

ROOT = Path(__file__).resolve().parents[3]
EXPERTS = '''
class Experts(nn.Module):
    """Four experts, each a matrix [h, h] with a tanh; every token goes to all of them."""

    def __init__(self, config: "LlamaConfig", ctx: LayerContext) -> None:
        super().__init__()
        self.ctx, self.width = ctx, config.hidden_size
        rows = 4 * self.width
        place = Placement(
            (rows, self.width), 0, ctx.grid.ep, local_size=rows // ctx.grid.ep.size
        )
        self.weight = parameter(place, ctx.dtype, ctx.device, ctx.sink)

    def forward(self, x: Tensor) -> Tensor:
        """x [s/t, b, h] -> [s/t, b, h], by way of the tokens of all ranks of ep."""
        every = gather_from_sequence_parallel_region(x, self.ctx.grid.ep, self)
        own = use(self.weight, self.ctx.sink).view(-1, self.width, self.width)
        out = torch.stack([torch.tanh(every @ matrix.t()) for matrix in own]).sum(0)
        return reduce_scatter_to_sequence_parallel_region(out, self.ctx.grid.ep, self)


class Block(nn.Module):
'''
EDITS = {
    "class Block(nn.Module):\n": EXPERTS,
    "from mpu.context import LayerContext\n": (
        "from mpu.comm.mappings import (\n"
        "    gather_from_sequence_parallel_region,\n"
        "    reduce_scatter_to_sequence_parallel_region,\n"
        ")\n"
        "from mpu.context import LayerContext\n"
        "from mpu.gradients import use\n"
    ),
    "from mpu.param import draw_normal": "from mpu.param import Placement, parameter, draw_normal",
    "        self.mlp = self.mlp_type(config, ctx)\n": (
        "        self.mlp = self.mlp_type(config, ctx)\n"
        "        self.experts = Experts(config, ctx)\n"
    ),
    "        return h + self.mlp(x)\n": "        return h + self.mlp(x) + self.experts(x)\n",
    "def hf_names(": (
        "def extra_args_provider(parser):\n"
        '    parser.add_argument("--ep", type=int, dest="expert_model_parallel_size")\n\n\n'
        "def hf_names("
    ),
}
BASE = dict(dp=4, tp=1, sp=False, recompute=None, tied=False, m=1, rows=8, clip=0.1, lr=1e-2)
BASE |= dict(layers=2)
STEPS = 3
LAYOUTS: dict[str, dict[str, Any]] = {
    **{f"dp 4, ep 2, ZeRO {zero}": dict(ep=2, zero=zero) for zero in range(4)},
    "dp 4, ep 4, each micro-batch, ZeRO 3": dict(ep=4, zero=3, m=2, each=True, gather=True),
    "dp 4, ep 2, two instances, ZeRO 1": dict(ep=2, zero=1, instances=2),
    "tp 2 x dp 2, ep 4, ZeRO 1": dict(dp=2, tp=2, sp=True, ep=4, zero=1),
    "pp 2 x dp 2, ep 1, ZeRO 3": dict(dp=2, pp=2, ep=1, m=2, zero=3, tied=True),
}


@pytest.fixture(scope="module")
def fork(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Copy model/llama.py and edit it the way a person would."""
    text = (ROOT / "model" / "llama.py").read_text()
    for old, new in EDITS.items():
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in model/llama.py"
        text = text.replace(old, new)
    path = tmp_path_factory.mktemp("fork") / "experts.py"
    path.write_text(text)
    return str(path)


def case_of(path: str, name: str, **more: Any) -> dict[str, Any]:
    layout = dict(LAYOUTS[name])
    ep = layout.pop("ep")
    return BASE | layout | dict(file=path, extra=(("expert_model_parallel_size", ep),)) | more


# --- training


class ExpertTwin(Twin):
    """The fork's serial twin: the sum of the four experts beside the MLP, in plain torch."""

    def more(self, x: torch.Tensor, at: str) -> torch.Tensor:
        weight = self.w[at.removeprefix("model.") + "experts.weight"]
        return sum(torch.tanh(x @ matrix.t()) for matrix in weight.chunk(4))


def run_layouts(comm: Any, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [run_layout(comm, case, STEPS) for case in cases]


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.prove)])
def test_it_trains_as_its_serial_twin(world: Any, fork: str, every: int) -> None:
    """Losses, norms and the last step's gradients, with clipping; every: of the layouts, one."""
    cases = {name: case_of(fork, name) for name in list(LAYOUTS)[::every]}
    results = world(4).run(run_layouts, list(cases.values()))
    twins = {}
    for tied in (False, True):
        twins[tied] = ExpertTwin(tied, layers=2, rows=8, file=fork)
        twins[tied].told = twins[tied].train(STEPS, lr=1e-2, clip=0.1)
    for i, (name, case) in enumerate(cases.items()):
        twin = twins[case["tied"]]
        losses, norms = twin.told
        assert min(norms) > 0.2, "nothing is clipped"
        for result in results:
            assert result[i]["losses"] == pytest.approx(losses, rel=1e-12), name
            assert result[i]["norms"] == pytest.approx(norms, rel=1e-12), name
        check([result[i] for result in results], twin, losses[0], norms[0])
    same = [i for i, name in enumerate(cases) if name.startswith("dp 4, ep 2, ZeRO")]
    first = same[0]
    for result in results:  # the same bits at every ZeRO stage
        for i in same[1:]:
            assert result[i]["losses"] == result[first]["losses"]
            assert result[i]["norms"] == result[first]["norms"]


# --- checks


class Wrong(torch.nn.Module):
    """A weight that every rank of ep holds, and that each uses for its own experts."""

    def __init__(self, ctx: LayerContext) -> None:
        super().__init__()
        self.ctx = ctx
        place = Placement((30, 40), axis=ctx.grid.ep)
        self.weight = parameter(place, torch.float32, torch.device("cpu"), ctx.sink)


def misplaced(comm: Any, stage: int) -> str:
    grid = comm.grid(ep=2)
    sink = ParamAndGradBuffer(grid, torch.float32, ZeroConfig(stage))
    module = Wrong(LayerContext(grid, sink=sink))
    sink.attach(module)
    list(sink.fill())
    sink.check = GradientCheck(grid, lambda line: None)
    sink.begin_step()
    (use(module.weight, sink) * (1.0 + grid.ep.rank)).sum().backward()
    try:
        sink.finish_grad_sync()
    except PlacementError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [0, 3])
def test_a_gradient_that_differs_among_the_ranks_of_ep_is_named(world: Any, stage: int) -> None:
    for said in world(4).run(misplaced, stage):
        assert said.startswith("weight: its gradient differs among the ranks of ep, by ")


def without_the_axis(comm: Any) -> str:
    grid = comm.grid()
    sink = ParamAndGradBuffer(grid)
    try:
        sink.attach(Wrong(LayerContext(grid, sink=sink)))
    except PlacementError as error:
        return str(error)
    return ""


def test_experts_need_the_axis(world: Any) -> None:
    for said in world(2).run(without_the_axis):
        assert said == (
            "weight is placed on the axis ep, which this run does not have, so its gradient "
            "would not be summed; set expert_model_parallel_size (Grid: ep_size)"
        )


# --- what is computed without a run


def parsed(path: str, more: str = "") -> Config:
    words = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --lr 1e-3 "
    words += f"--train-iters 1 --vocab-size 10 --mock-data --ep 2 --model-file {path} {more}"
    return parse(words.split(), 4, load_model_file(path).extra_args_provider)


def test_a_collective_of_a_new_kind_is_in_every_list(fork: str) -> None:
    """The exchange of experts stands in the fork alone: a collective over ep of its layers.

    The list of traffic has it as it runs on meta tensors, so the dry run and `make explain` have
    it, and the sums of gradients over edp beside it.
    """
    config = parsed(fork, "--zero-stage 1")
    over_ep = [row for row in traffic(config, pretrain_llama) if row.axis == "ep"]
    assert any(row.purpose not in SMALL for row in over_ep)
    text = report(config, pretrain_llama)
    assert re.search(r"edp +reduce-scatter", text) and re.search(r"ep +all-gather", text)
    assert "AdamW's two, a share of 1/4, of experts 1/2" in text
    assert any(line.startswith("ep ") for line in sums({}, over_ep))
    assert any(row.axis == "edp" for row in traffic(config, pretrain_llama))


# --- layout


def test_a_bucket_holds_what_one_axis_cuts() -> None:
    entries = [
        ParamEntry(f"layers.{i}.{name}", BLOCK, cut=cut)
        for i in range(2)
        for name, cut in (("dense", "tp"), ("experts", "ep"))
    ]
    shared = {"tp": sharing_of("tp", 4, 4, 3), "ep": sharing_of("ep", 2, 2, 3)}
    found = make_buckets(entries, 10**9, shared)
    assert [(flat.params[0][0], flat.sharing.data, flat.length, flat.own) for flat in found] == [
        ("layers.1.experts", "edp", 2 * BLOCK, BLOCK),
        ("layers.1.dense", "dp_cp", 4 * BLOCK, BLOCK),
        ("layers.0.experts", "edp", 2 * BLOCK, BLOCK),
        ("layers.0.dense", "dp_cp", 4 * BLOCK, BLOCK),
    ]


def test_a_flag_of_the_fork_makes_the_axis(fork: str) -> None:
    config = parsed(fork)
    assert config.expert_model_parallel_size == 2
    layouts = [each.layout for each in record(config, pretrain_llama)[0].run.sink.buckets]
    assert {each.sharing.cut: each.sharing.ranks for each in layouts} == {"tp": 4, "ep": 2}


@pytest.mark.parametrize("ep, instances, why", [
    (3, 1, "the 4 ranks of a pipeline stage do not divide into groups of 3 expert-parallel ranks"),
    (4, 2, "1 expert-data-parallel ranks do not divide into 2 instances of the optimizer"),
])  # fmt: skip
def test_sizes_that_do_not_divide_are_refused(ep: int, instances: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Grid(8, 2, pp_size=2, launch=Launch(0, 8), ep_size=ep, instances=instances)
