# SPDX-License-Identifier: Apache-2.0
"""Fork the model as a user would: copy the file, rename the class, change a layer.

The fork trains on 2 ranks under tensor, data or pipeline parallelism, is saved in one layout and
resumed in others. It adds a gain vector to the attention's output, whose gradient is a partial sum
over tp under sequence parallelism, and a temperature to the logits, partial because each rank has
its own columns. Both are ordinary autograd code: `mpu.gradients.use` sends the gradient to the
sink, and the Placement says over which axis it is partial. Neither mpu nor training is changed.
"""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

import pretrain_llama
from mpu.comm.failure_monitor import FailureMonitor
from mpu.context import LayerContext
from mpu.pipeline.engine import Engine
from mpu.zero.layout import ZeroConfig
from mpu.zero.optimizer import Optimizer
from mpu.zero.param_and_grad_buffer import ParamAndGradBuffer
from tests.model.twin import gathered
from tests.saved import check_equal, stored
from training.config import (
    BatchConfig,
    CheckpointConfig,
    Config,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
)
from training.data.batch import Batch
from training.plan.pipeline import rank_stages
from training.run.saver import Saver

ROOT = Path(__file__).resolve().parents[2]


def write_fork(folder: Path) -> Path:
    """Copy model/llama.py and edit it the way a person would."""
    text = (ROOT / "model" / "llama.py").read_text()
    edits = {
        "class Llama(nn.Module)": "class Alpaca(nn.Module)",
        "from mpu.param import draw_normal, tie, unique_parameters": (
            "from mpu.gradients import use\n"
            "from mpu.param import Placement, draw_normal, parameter, tie, unique_parameters"
        ),
        "        self.proj = RowParallelLinear(a * d, h, ctx=ctx)\n": (
            "        self.proj = RowParallelLinear(a * d, h, ctx=ctx)\n"
            "        self.ctx = ctx\n"
            "        place = Placement((h,), axis=ctx.tp, reduce_axes=ctx.replicated_over)\n"
            "        self.gain = parameter(place, ctx.dtype, ctx.device, ctx.sink)\n"
        ),
        "        return self.proj(y)\n\n    def decode": (
            "        return self.proj(y) * use(self.gain, self.ctx.sink)\n\n    def decode"
        ),
        "            self.norm = RMSNorm(": (
            "            place = Placement((1,), axis=ctx.tp, reduce_axes=(ctx.tp,))\n"
            "            self.temperature = parameter(place, ctx.dtype, ctx.device, ctx.sink)\n"
            "            self.norm = RMSNorm("
        ),
        "        loss = vocab_parallel": (
            "        logits = logits * use(self.temperature, self.ctx.sink)\n"
            "        loss = vocab_parallel"
        ),
        "def hf_names(model: Llama)": "def hf_names(model)",
        '-> "Llama":': '-> "Alpaca":',
        "    return {name: table[name] for name, _ in unique_parameters(model)}": (
            "    for name, _ in unique_parameters(model):\n"
            "        table.setdefault(name, (name,))\n"
            "    return {name: table[name] for name, _ in unique_parameters(model)}"
        ),
    }
    for old, new in edits.items():
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in model/llama.py"
        text = text.replace(old, new)
    path = folder / "alpaca.py"
    path.write_text(text)
    return path


def build_fork(
    comm, path: str, tp: int, pp: int, zero: int, seed: int = 3
) -> tuple[ModuleType, pretrain_llama.Run]:
    """Build the fork on one rank, in fp64."""
    spec = importlib.util.spec_from_file_location("alpaca", path)
    alpaca = importlib.util.module_from_spec(spec)
    sys.modules["alpaca"] = alpaca
    spec.loader.exec_module(alpaca)
    grid = comm.grid(tp, pp=pp)
    zero_config = ZeroConfig(zero, 1000, overlap_param_gather=True)
    sink = ParamAndGradBuffer(grid, torch.float64, zero_config)
    ctx = LayerContext(grid, tp > 1, torch.float64, torch.float64, torch.device("cpu"), sink)
    config = alpaca.LlamaConfig(50, 16, 24, 2, 4, 2, make_vocab_size_divisible_by=1)
    schedule = "zb-h1" if pp > 1 else None  # weight gradients that wait
    parallel = ParallelConfig(
        comm.size, tp, pipeline_model_parallel_size=pp, pipeline_schedule=schedule
    )
    settings = Config(
        ModelConfig(2, 16, 4, 8, vocab_size=50),
        parallel,
        BatchConfig(2, 4),
        OptimizerConfig(lr=1e-2, lr_decay_style="constant"),
        run=RunConfig(dtype=torch.float64),
    )

    def provider(settings, ctx, recompute=None, stages=None):
        return alpaca.Alpaca(config, ctx, recompute, stages)

    stages = rank_stages(settings, provider, grid.pp.rank)
    model = provider(settings, ctx, stages=stages)
    sink.attach(model, model.chunk_of)
    for names in sink.fill():
        model.initialize(seed, names)
    optimizer = Optimizer(model, sink, grid, alpaca.parameter_group, lr=1e-2, clip=0.0)
    device, monitor = torch.device("cpu"), FailureMonitor()
    engine = Engine(grid, ctx.queue, monitor, ctx.dtype, device)
    return alpaca, pretrain_llama.Run(
        settings, grid, device, model, engine, sink, optimizer, monitor
    )


def train(run: pretrain_llama.Run, steps: int) -> list[float]:
    """Train on the same few rows; return the losses."""
    rows = torch.randint(0, 50, (4, 9), generator=torch.Generator().manual_seed(0))
    dp, pp = run.grid.dp, run.grid.pp.size
    share = 4 // dp.size
    rows = rows[dp.rank * share : (dp.rank + 1) * share]
    batches = [
        Batch(part[:, :-1], part[:, 1:], None, None, None, 0, part[:, 1:].numel())
        for part in rows.chunk(pp)
    ]
    return [pretrain_llama.train_step(run, batches, 1e-2)[0].item() for _ in range(steps)]


def train_steps(comm, path: str, tp: int, pp: int, zero: int, steps: int = 2) -> dict:
    _, run = build_fork(comm, path, tp, pp, zero)
    losses = train(run, steps)
    grads = {
        name: grad.tolist()
        for name, grad in gathered(run.sink, "grad_shard").items()
        if "gain" in name or "temperature" in name
    }
    return {"losses": losses, "grads": grads}


def go_on(comm, path: str, way: tuple[int, int, int], load: str, save: str, at: int) -> list[float]:
    """Load what another layout saved after `at` steps, if any, save it again as it is (to
    `save`/again), train two steps and save."""
    alpaca, run = build_fork(comm, path, *way, seed=3 if at == 0 else 4)

    def saver(folder: str) -> Saver:
        config = replace(run.config, checkpoint=CheckpointConfig(save=folder, load=load))
        names, hf = alpaca.hf_names(run.model), (alpaca.hf_config, alpaca.from_hf_config)
        return Saver(
            config, run.model.ctx, run.model, run.optimizer, names, *hf, {}, lambda line: None
        )

    if at:
        assert saver(load).load() == (at, 4 * at)
        saver(f"{save}/again").save(at, 4 * at, must=True)
    losses = train(run, 2)
    saver(save).save(at + 2, 4 * (at + 2), must=True)
    return losses


def test_a_fork_trains_on_two_ranks(world, tmp_path):
    path = str(write_fork(tmp_path))
    (one,) = world(1).run(train_steps, path, 1, 1, 0)
    assert one["losses"][1] < one["losses"][0]
    for tp, pp, zero in ((1, 1, 0), (1, 1, 3), (2, 1, 0), (1, 2, 0)):
        seen = set()
        for result in world(2).run(train_steps, path, tp, pp, zero):
            assert torch.allclose(
                torch.tensor(result["losses"]), torch.tensor(one["losses"]), rtol=1e-10, atol=0
            )
            for name, grad in result["grads"].items():
                got, want = torch.tensor(grad), torch.tensor(one["grads"][name])
                assert (got - want).norm() <= 1e-12 * want.norm(), (tp, pp, zero, name)
                seen.add(name)
        assert seen == one["grads"].keys()


def test_a_fork_is_saved_in_one_layout_and_loaded_in_others(world, tmp_path):
    """tp 2 -> pp 2 -> dp 2 at ZeRO level 3 -> one rank: what is loaded is what was saved, its own
    parameters and their state included, and it trains like one that never moved."""
    path = str(write_fork(tmp_path))
    ways = [(2, (2, 1, 0)), (2, (1, 2, 0)), (2, (1, 1, 3)), (1, (1, 1, 0))]
    losses, folders, at = [], [], 0
    for size, way in ways:
        load, save = str(folders[-1]) if folders else "", str(tmp_path / str(at))
        found = world(size).run(go_on, path, way, load, save, at)
        assert all(each == found[0] for each in found)
        losses += found[0]
        if folders:
            saved, again = (Path(folder) / f"step_{at:08d}" for folder in (load, f"{save}/again"))
            check_equal(stored(saved), stored(again))
        folders.append(save)
        at += 2
    (straight,) = world(1).run(train_steps, path, 1, 1, 0, at)
    assert losses == pytest.approx(straight["losses"], rel=1e-10) and losses[-1] < losses[0]
    last = stored(Path(folders[-1]) / f"step_{at:08d}")
    for own, shape in {"layers.1.attention.gain": (16,), "temperature": (1,)}.items():
        for kind in ("", ".exp_avg", ".exp_avg_sq"):
            first = stored(Path(folders[0]) / "step_00000002")[f"{own}{kind}"]
            assert last[f"{own}{kind}"].shape == shape
            assert first.all() and not torch.equal(first, last[f"{own}{kind}"])
